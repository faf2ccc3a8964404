"""A replica that is made from another's state goes on with the same bits."""

import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from protocol.messages import Microbatch, Totals
from protocol.records import ModelSpec, OptimiserSpec, Training
from swarm.adapters.torch_stage import TorchStage
from swarm.adapters.weights import layer_bytes
from swarm.core.ledger import DoubleCount
from tests.adapters.test_torch_nonfinite import ROOTS, OneBad
from tests.adapters.torch_swarm import (
    GPT,
    PICTURES,
    STEPS,
    Swarm,
    execution,
    sample_ids,
    source_of,
    with_,
)

GOOD = OneBad(1.0, 2.0)


class Odd(nn.Module):
    """Whatever a layer may hold: strides, buffers, a frozen tensor, one tensor with two names."""

    table: Tensor
    passing: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.across = nn.Parameter(torch.randn(4, 4).t())
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.again = self.frozen
        self.shift = nn.Parameter(torch.tensor(0.1))
        self.narrow = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.register_buffer("table", torch.arange(4))
        self.register_buffer("passing", torch.ones(4), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        scale = self.frozen * self.narrow.float() * self.passing
        turned: Tensor = hidden @ self.across * scale + self.table.float()
        return turned + self.shift


class Bare(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.tanh()


def odd_layers() -> dict[str, object]:
    layers = [("low", partial(Odd)), ("bare", partial(Bare)), ("high", partial(Odd))]
    return {"layers": layers, "tied": {"high.across": "low.across"}}


OPTIMISERS = [
    OptimiserSpec("sgd", 0.1, momentum=0.0),
    OptimiserSpec("sgd", 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    OptimiserSpec("adam", 0.01, clip_norm=0.05),
    OptimiserSpec("adamw", 0.01, weight_decay=0.1, schedule="cosine", warmup_steps=1),
]
ODD = with_(
    ROOTS, steps=2 * STEPS, model=ModelSpec(f"{__name__}:odd_layers"), optimiser=OPTIMISERS[3]
)
MODELS = {
    "gpt": (with_(GPT, steps=2 * STEPS), (1, 3), source_of(GPT)),
    "gpt in one": (with_(GPT, steps=2 * STEPS), (), source_of(GPT)),
    "pictures": (with_(PICTURES, steps=2 * STEPS), (2,), source_of(PICTURES)),
    "odd": (ODD, (1, 2), GOOD),
    "odd in one": (ODD, (), GOOD),
    "odd standard": (execution(ODD, determinism="standard"), (2,), GOOD),
}


def state_of(one: TorchStage) -> dict[int, bytes]:
    snapshot = one.snapshot(one.version)
    assert snapshot is not None
    return {layer: bytes(data) for layer, data in snapshot.items()}


def views(state: dict[int, bytes]) -> dict[int, memoryview]:
    return {layer: memoryview(data) for layer, data in state.items()}


def newcomer(swarm: Swarm, stage: int) -> TorchStage:
    """A replica of `stage` that is made from the state of the first one, and not in its group."""
    one = TorchStage(swarm.training)
    donor = swarm.replicas[stage][0]
    one.load(swarm.stages, stage, donor.version, views(state_of(donor)))
    assert one.version == donor.version
    assert state_of(one) == state_of(donor)
    return one


def copied(buckets: dict[int, memoryview] | None) -> dict[int, bytes] | None:
    return None if buckets is None else {n: bytes(data) for n, data in buckets.items()}


def follow(swarm: Swarm, late: list[TorchStage], step: int, totals: Totals) -> None:
    """Let the newcomers take each stage's reduced gradient, and all commit."""
    for group, one in zip(swarm.replicas, late, strict=True):
        buckets = group[0].gradient(step)
        assert buckets is not None
        assert not one.settle()
        one.load_gradient(step, buckets)
        assert one.settle()
        assert one.square_norms() == group[0].square_norms()
        assert copied(one.gradient(step)) == copied(buckets)
        one.commit(step, totals)
    swarm.commit(step, totals)


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=lambda spec: f"{spec.name}{spec.momentum}")
@pytest.mark.parametrize("name", MODELS)
def test_a_newcomer_goes_on_with_the_bits_of_those_that_never_stopped(
    name: str, optimiser: OptimiserSpec
) -> None:
    training, cuts, source = MODELS[name]
    training = with_(training, optimiser=optimiser)
    swarm = Swarm.start(training, cuts, [1] * (len(cuts) + 1))
    for step in range(STEPS):
        swarm.commit(step, swarm.step(source, step))
    late = [newcomer(swarm, stage) for stage in range(len(swarm.stages))]
    before = swarm.export()
    for step in range(STEPS, 2 * STEPS):
        follow(swarm, late, step, swarm.step(source, step))
    for group, one in zip(swarm.replicas, late, strict=True):
        assert state_of(one) == state_of(group[0])
    alone = Swarm(training, swarm.stages, [[one] for one in late], swarm.shares)
    assert alone.export() == swarm.export() != before
    step = training.steps
    for each in (swarm, alone):
        each.microbatch(source, Microbatch(step, 1))
    for group, one in zip(swarm.replicas, late, strict=True):
        assert one.ledger.bitmap == group[0].ledger.bitmap != bytes(1)
        assert accumulated(one) == accumulated(group[0])


def accumulated(one: TorchStage) -> dict[int, bytes]:
    gradients = one._built().gradients
    return {n: bytes(gradients.part(n, 0, len(total))) for n, total in gradients._totals.items()}


@pytest.mark.parametrize("name", ["gpt", "odd", "odd in one"])
def test_version_0_has_no_optimiser_state_and_can_be_loaded(name: str) -> None:
    training, cuts, source = MODELS[name]
    swarm = Swarm.start(training, cuts, [2] * (len(cuts) + 1))
    for group in swarm.replicas:
        assert state_of(group[0]) == state_of(group[1])
        for data in state_of(group[0]).values():
            assert not [key for key in safetensors.torch.load(data) if key.startswith("optimiser")]
    late = [newcomer(swarm, stage) for stage in range(len(swarm.stages))]
    follow(swarm, late, 0, swarm.step(source, 0))
    for group, one in zip(swarm.replicas, late, strict=True):
        assert state_of(one) == state_of(group[0]) == state_of(group[1])


def test_a_layers_state_does_not_depend_on_the_slicing() -> None:
    training, _, source = MODELS["odd"]
    found = []
    for cuts in ((), (1,), (1, 2)):
        swarm = Swarm.start(training, cuts, [1] * (len(cuts) + 1))
        for step in range(2):
            swarm.commit(step, swarm.step(source, step))
        states: dict[int, bytes] = {}
        for (one,) in swarm.replicas:
            states |= state_of(one)
        found.append(states)
    assert found[0] == found[1] == found[2]
    assert sorted(safetensors.torch.load(found[0][2])) == [
        "buffer/high.table",
        *(
            f"optimiser/high.{name}/{key}"
            for name in ("across", "narrow", "shift")
            for key in ("exp_avg", "exp_avg_sq", "step")
        ),
        *(f"weight/high.{name}" for name in ("across", "frozen", "narrow", "shift")),
    ]
    assert safetensors.torch.load(found[0][1]) == {}


def test_the_memory_of_an_optimiser_keeps_its_strides() -> None:
    swarm = Swarm.start(ODD, (), [1])
    swarm.commit(0, swarm.step(GOOD, 0))
    one = newcomer(swarm, 0)
    strides = []
    for stage in (one, swarm.replicas[0][0]):
        optimiser = stage._built()._optimiser
        assert optimiser is not None
        strides.append(
            [
                [(key, value.stride()) for key, value in optimiser.state[tensor].items()]
                for tensor in optimiser.param_groups[0]["params"]
            ]
        )
    assert strides[0] == strides[1]
    assert ("exp_avg", (1, 4)) in strides[0][0]


def test_a_snapshot_is_of_one_version_and_does_not_change() -> None:
    swarm = Swarm.start(ODD, (), [1])
    (one,) = swarm.replicas[0]
    swarm.commit(0, swarm.step(GOOD, 0))
    assert one.snapshot(0) is None and one.snapshot(2) is None
    snapshot = one.snapshot(1)
    assert snapshot is not None
    before = {layer: bytes(data) for layer, data in snapshot.items()}
    swarm.commit(1, swarm.step(GOOD, 1))
    assert {layer: bytes(data) for layer, data in snapshot.items()} == before
    assert state_of(one) != before


def test_ties_are_ties_again() -> None:
    swarm = Swarm.start(ODD, (), [1])
    swarm.commit(0, swarm.step(GOOD, 0))
    one = newcomer(swarm, 0)
    layers = one._built()._layers
    low, high = layers[0].parameters["low.across"], layers[2].parameters["high.across"]
    assert low.data_ptr() == high.data_ptr()


# --- what is refused ------------------------------------------------------------------------

Tensors = dict[str, Tensor]


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensors[key] for key in tensors if key != name}


def having(name: str, change: Callable[[Tensor], Tensor], of: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[of])}


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return having(name, change, name)


ACROSS, FIRST = "weight/low.across", "optimiser/low.across/exp_avg"
TAMPERED = {
    "a tensor lacks": (without("buffer/low.table"), "lacks 'buffer/low.table'"),
    "a tensor too many": (having("weight/low.x", Tensor.clone, ACROSS), "has 'weight/low.x'"),
    "another shape": (changed(ACROSS, lambda t: t[:2]), "not torch.float32[4, 4]"),
    "another dtype": (changed(ACROSS, Tensor.double), "not torch.float32[4, 4]"),
    "a buffer as a weight": (
        lambda tensors: without("buffer/low.table")(
            having("weight/low.table", Tensor.clone, "buffer/low.table")(tensors)
        ),
        "lacks 'buffer/low.table'",
    ),
    "half of a memory": (without(FIRST), "lacks 'exp_avg'"),
    "no memory of one": (
        lambda tensors: {k: t for k, t in tensors.items() if "optimiser/low.narrow" not in k},
        "remembers some tensors and others not",
    ),
    "an unknown memory": (
        having("optimiser/low.narrow/momentum_buffer", Tensor.clone, "weight/low.narrow"),
        "has 'momentum_buffer'",
    ),
    "a memory of what is not trained": (
        having("optimiser/low.again/step", Tensor.clone, "optimiser/low.narrow/step"),
        "no trained tensor 'low.again'",
    ),
    "a memory of nothing": (having("optimiser/", Tensor.clone, FIRST), "no trained tensor ''"),
    "a step of another dtype": (
        changed("optimiser/low.narrow/step", Tensor.double),
        "not torch.float32[]",
    ),
    "a tied weight alone": (changed(ACROSS, lambda t: t + 1), "tied tensors differ"),
    "a tied memory alone": (changed(FIRST, lambda t: t + 1), "tied tensors differ"),
}


def refused(states: dict[int, memoryview], words: str, version: int = 1) -> None:
    """A stage that holds version 0 is offered `states`, and then holds nothing."""
    one = TorchStage(ODD)
    one.build([(0, 3)], 0)
    one.turn(Microbatch(0, 0), *GOOD.microbatch([0]))
    with pytest.raises(ValueError) as caught:
        one.load([(0, 3)], 0, version, states)
    assert words in str(caught.value)
    assert one.snapshot(0) is None and one.snapshot(1) is None
    assert one.gradient(0) is None
    assert not one.settle() and len(one.ledger) == 0
    with pytest.raises(ValueError, match="no stage has been built"):
        one.turn(Microbatch(0, 1), *GOOD.microbatch([0]))


@pytest.fixture(scope="module")
def trained() -> dict[int, memoryview]:
    swarm = Swarm.start(ODD, (), [1])
    swarm.commit(0, swarm.step(GOOD, 0))
    return views(state_of(swarm.replicas[0][0]))


@pytest.mark.parametrize("name", TAMPERED)
def test_a_state_that_does_not_fit_is_refused(trained: dict[int, memoryview], name: str) -> None:
    tamper, words = TAMPERED[name]
    wrong = layer_bytes(tamper(safetensors.torch.load(bytes(trained[0]))))
    refused(trained | {0: memoryview(wrong)}, words)


def test_what_is_no_state_at_all_is_refused(trained: dict[int, memoryview]) -> None:
    eight = b'{"a":{"dtype":"F8_E8M0","shape":[0],"data_offsets":[0,0]}}'
    unknown = len(eight).to_bytes(8, "little") + eight
    for data in (b"", b"\x80\x02}q\x00.", bytes(trained[0])[:-1], unknown):
        refused(trained | {0: memoryview(data)}, "no safetensors")
    refused({layer: trained[layer] for layer in (0, 1)}, "states of layers [0, 1] instead of")
    refused(trained | {3: trained[1]}, "states of layers [0, 1, 2, 3] instead of")
    refused(trained | {0: trained[2]}, "state of layer 'low'")
    refused(trained, "no version -1", version=-1)


def test_a_stage_can_be_loaded_after_a_refusal(trained: dict[int, memoryview]) -> None:
    one = TorchStage(ODD)
    with pytest.raises(ValueError, match="no safetensors"):
        one.load([(0, 3)], 0, 1, trained | {0: memoryview(b"")})
    one.load([(0, 3)], 0, 1, trained)
    assert state_of(one) == {layer: bytes(data) for layer, data in trained.items()}


# --- the reduced gradient -------------------------------------------------------------------


def test_a_reduced_gradient_is_kept_until_the_next_commit() -> None:
    swarm = Swarm.start(ROOTS, (1,), [1, 1])
    (low,), (high,) = swarm.replicas
    assert low.gradient(0) is None and not low.settle()
    totals = swarm.step(GOOD, 0)
    first = low.gradient(0)
    assert first is not None and low.settle()
    kept = copied(first)
    first[0][:] = bytes(len(first[0]))
    assert copied(low.gradient(0)) == kept != copied(first)
    swarm.commit(0, totals)
    assert not low.settle()
    assert (copied(low.gradient(0)), low.gradient(1), low.gradient(-1)) == (kept, None, None)
    totals = swarm.step(GOOD, 1)
    assert copied(low.gradient(0)) == kept
    assert low.gradient(1) is not None
    swarm.commit(1, totals)
    assert low.gradient(0) is None
    assert copied(low.gradient(1)) != kept
    assert sorted(high.gradient(1) or ()) == [1]


def test_a_reduction_that_begins_again_forgets_the_one_before() -> None:
    swarm = Swarm.start(ROOTS, (), [1])
    (one,) = swarm.replicas[0]
    totals = swarm.step(GOOD, 0)
    reduced, part = copied(one.gradient(0)), bytes(one.part(0, 0, 8))
    one.begin_reduction()
    assert not one.settle() and one.gradient(0) is None
    with pytest.raises(RuntimeError, match="reduced up to 0 of 8"):
        one.commit(0, totals)
    one.reduce(0, 0, 8, [one.part(0, 0, 8)])
    assert copied(one.gradient(0)) == reduced
    assert bytes(one.part(0, 0, 8)) == part
    assert len(one.ledger) == 2


def test_a_gradient_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    swarm = Swarm.start(ROOTS, (1,), [1, 1])
    (low,), (high,) = swarm.replicas
    swarm.step(GOOD, 0)
    before = low.gradient(0)
    other = high.gradient(0)
    assert before is not None and other is not None
    changed = {0: memoryview(bytes(before[0].nbytes))}
    wrong: tuple[tuple[int, dict[int, memoryview]], ...]
    wrong = ((1, changed), (0, {}), (0, other), (0, changed | other), (0, {0: changed[0][:-8]}))
    for step, buckets in wrong:
        with pytest.raises(ValueError):
            low.load_gradient(step, buckets)
        assert copied(low.gradient(0)) == copied(before)
    low.load_gradient(0, changed)
    assert copied(low.gradient(0)) == copied(changed) != copied(before)


def test_a_step_that_is_skipped_needs_no_gradient_and_changes_no_state() -> None:
    swarm = Swarm.start(ODD, (), [1])
    (one,) = swarm.replicas[0]
    skip = Totals(2, math.inf, (), "skip", None)
    start = state_of(one)
    swarm.step(GOOD, 0)
    one.begin_reduction()
    one.commit(0, skip)
    assert (one.version, one.gradient(0), len(one.ledger)) == (1, None, 0)
    assert state_of(one) == start
    late = newcomer(swarm, 0)
    totals = swarm.step(GOOD, 1)
    follow(swarm, [late], 1, totals)
    for each in (one, late):
        each.commit(2, skip)
    totals = swarm.step(GOOD, 3)
    follow(swarm, [late], 3, totals)
    assert state_of(late) == state_of(one) != start


def test_a_stage_without_parameters_is_whole_once_its_reduction_has_begun() -> None:
    (one,) = Swarm.start(ROOTS, (1, 2), [1, 1, 1]).replicas[1]
    assert not one.settle() and one.gradient(0) is None
    one.begin_reduction()
    assert one.settle() and one.gradient(0) == {}
    assert one.square_norms() == ()
    one.commit(0, Totals(2, 1.0, (), "apply", None))
    assert one.gradient(0) == {} and not one.settle()
    one.load_gradient(1, {})
    assert one.settle()


# --- microbatches for the sake of others, and what a repair leaves ------------------------


def test_a_forward_that_nobody_takes_back_keeps_no_activations() -> None:
    swarm = Swarm.start(ROOTS, (1,), [1, 1])
    (low,), _ = swarm.replicas
    mb, (inputs, _, weight) = Microbatch(0, 1), GOOD.microbatch([0])
    hidden = low.forward(mb, inputs, keep=False).tensor
    assert hidden is not None
    with pytest.raises(ValueError, match="no forward of 0/1"):
        low.backward(mb, hidden, weight)
    assert low.forward(mb, inputs).tensor == hidden
    low.backward(mb, hidden, weight)


def test_settling_drops_activations_and_nothing_else() -> None:
    swarm = Swarm.start(ROOTS, (1,), [1, 1])
    (low,), _ = swarm.replicas
    swarm.microbatch(GOOD, Microbatch(0, 0))
    inputs, _, weight = GOOD.microbatch([0])
    before = (state_of(low), accumulated(low), low.ledger.bitmap)
    hidden = low.forward(Microbatch(0, 1), inputs).tensor
    assert hidden is not None
    assert not low.settle()
    with pytest.raises(ValueError, match="no forward of 0/1"):
        low.backward(Microbatch(0, 1), hidden, weight)
    assert (state_of(low), accumulated(low), low.ledger.bitmap) == before
    low.forward(Microbatch(0, 1), inputs)
    low.backward(Microbatch(0, 1), hidden, weight)
    assert low.ledger.bitmap == b"\x03"


def test_discarding_empties_accumulator_and_ledger_alone() -> None:
    swarm = Swarm.start(ROOTS, (), [1])
    (one,) = swarm.replicas[0]
    swarm.step(GOOD, 0)
    before, state, reduced = accumulated(one), state_of(one), copied(one.gradient(0))
    one.discard()
    assert len(one.ledger) == 0 and not any(accumulated(one)[0])
    assert (state_of(one), copied(one.gradient(0)), one.version) == (state, reduced, 0)
    swarm.step(GOOD, 0)
    assert accumulated(one) == before


@pytest.mark.parametrize("training", [GPT, ROOTS], ids=["gpt", "roots"])
def test_a_microbatch_for_the_sake_of_others_gives_the_same_and_adds_nothing(
    training: Training,
) -> None:
    source = source_of(GPT) if training is GPT else GOOD
    swarm = Swarm.start(training, (1,), [1, 1])
    (low,), (high,) = swarm.replicas
    mb = Microbatch(0, 1)
    inputs, targets, weight = source.microbatch(sample_ids(0, 1) if training is GPT else [0])
    seen = []
    for accumulate in (False, True, False):
        hidden = low.forward(mb, inputs).tensor
        assert hidden is not None
        gradient = high.turn(mb, hidden, targets, weight, accumulate).gradient
        assert gradient is not None
        assert low.backward(mb, gradient, weight, accumulate).tensor is None
        seen.append((bytes(hidden), bytes(gradient)))
        held = [(one.ledger.bitmap, one.ledger.loss_sum, accumulated(one)) for one in (low, high)]
        if not accumulate and len(seen) == 1:
            assert len(low.ledger) == len(high.ledger) == 0
            assert not any(itertools.chain(*accumulated(low).values(), *accumulated(high).values()))
        if accumulate:
            once = held
    assert seen[0] == seen[1] == seen[2]
    assert held == once
    assert low.ledger.bitmap == b"\x02"
    with pytest.raises(DoubleCount):
        high.turn(mb, hidden, targets, weight)


def test_bad_numbers_are_told_and_not_entered_for_the_sake_of_others() -> None:
    for source, words in ((OneBad(1.0, 1e30), "loss"), (OneBad(1.0, 3e6), "high")):
        (one,) = Swarm.start(ROOTS, (), [1]).replicas[0]
        inputs, targets, weight = source.microbatch([2])
        turn = one.turn(Microbatch(0, 1), inputs, targets, weight, accumulate=False)
        assert (turn.gradient, turn.nonfinite) == (None, words)
        one.flag(Microbatch(0, 1), words, weight, accumulate=False)
        assert len(one.ledger) == 0
        one.flag(Microbatch(0, 1), words, weight)
        one.flag(Microbatch(0, 1), words, weight, accumulate=False)
        assert len(one.ledger) == 1


def test_a_flag_for_the_sake_of_others_drops_activations() -> None:
    (low,), _ = Swarm.start(ROOTS, (1,), [1, 1]).replicas
    inputs, _, weight = GOOD.microbatch([0])
    hidden = low.forward(Microbatch(0, 0), inputs).tensor
    assert hidden is not None
    low.flag(Microbatch(0, 0), "high", weight, accumulate=False)
    with pytest.raises(ValueError, match="no forward of 0/0"):
        low.backward(Microbatch(0, 0), hidden, weight)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=6))
def test_only_what_accumulates_counts(turns: list[tuple[int, bool]]) -> None:
    one, other = (Swarm.start(ROOTS, (), [1]).replicas[0][0] for _ in range(2))
    counted: set[int] = set()
    for index, accumulate in turns:
        inputs, targets, weight = OneBad(0.5, 1.0).microbatch([2 * index])
        mb = Microbatch(0, index)
        if accumulate and index in counted:
            with pytest.raises(DoubleCount):
                one.turn(mb, inputs, targets, weight)
            continue
        one.turn(mb, inputs, targets, weight, accumulate)
        if accumulate:
            counted.add(index)
            other.turn(mb, inputs, targets, weight)
    assert one.ledger.bitmap == other.ledger.bitmap
    assert one.ledger.loss_sum == other.ledger.loss_sum
    assert accumulated(one) == accumulated(other)
