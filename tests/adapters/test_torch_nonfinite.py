"""Numbers that stop being finite: the layer is named, nothing is added, the verdict is kept."""

from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from protocol.messages import Flag, Microbatch
from protocol.records import (
    DataSpec,
    ExecutionSpec,
    LossSpec,
    ModelSpec,
    OptimiserSpec,
    SampleSpec,
    Training,
)
from swarm.core.ledger import DoubleCount
from swarm.errors import RunHalted
from tests.adapters.torch_swarm import GPT, SIZE, TOKENS, Swarm, execution, reference


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight


class Root(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.sqrt()


def roots() -> list[tuple[str, partial[nn.Module]]]:
    return [("low", partial(Scale)), ("root", partial(Root)), ("high", partial(Scale))]


ROOTS = Training(
    name="roots",
    steps=2,
    microbatches_per_step=2,
    microbatch_size=1,
    model=ModelSpec(f"{__name__}:roots"),
    data=DataSpec(
        "factory",
        factory="unused:unused",
        sample=SampleSpec("float32", (4,)),
        target=SampleSpec("float32", (4,)),
    ),
    loss=LossSpec("mse", "samples"),
    optimiser=OptimiserSpec("sgd", 0.1),
    execution=ExecutionSpec("exact"),
)


class OneBad:
    """A reader whose microbatch 0/1 (samples 2 and 3) has the given numbers."""

    def __init__(self, sample: float, target: float) -> None:
        self._bad = (sample, target)

    def digest(self) -> bytes:
        return b"\0" * 32

    def __len__(self) -> int:
        return 4

    def microbatch(self, sample_ids: Sequence[int]) -> tuple[memoryview, memoryview, int]:
        sample, target = self._bad if sample_ids[0] == 2 else (1.5, 2.5)
        arrays = [np.full((1, 4), value, np.float32) for value in (sample, target)]
        return arrays[0].reshape(-1).data.cast("B"), arrays[1].reshape(-1).data.cast("B"), 1


CASES = {
    "forward": (OneBad(-1.0, 1.0), "root"),
    "input": (OneBad(float("nan"), 1.0), "low"),
    "loss": (OneBad(1.0, 1e30), "loss"),
    "backward": (OneBad(0.0, 1.0), "root"),
    "fixed point": (OneBad(1.0, 3e6), "high"),
}
SLICINGS = [((), [1]), ((1, 2), [1, 1, 1]), ((2,), [2, 2])]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cuts, counts", SLICINGS)
def test_the_same_layer_is_named_however_the_model_is_cut(
    name: str, cuts: tuple[int, ...], counts: list[int]
) -> None:
    source, layer = CASES[name]
    swarm = Swarm.start(ROOTS, cuts, counts)
    totals = swarm.step(source, 0)
    assert totals.flags == (Flag(1, layer),)
    assert totals.verdict == "halt"
    assert totals.loss is None
    before = swarm.export()
    swarm.commit(0, totals)
    assert {one.version for group in swarm.replicas for one in group} == {0}
    assert swarm.export() == before


@pytest.mark.parametrize("name", CASES)
def test_halt_names_step_index_and_layer(name: str) -> None:
    source, layer = CASES[name]
    with pytest.raises(RunHalted) as caught:
        reference(ROOTS, source)
    assert caught.value.evidence == (f"step 0, microbatch 1, layer {layer!r}",)


def test_standard_mode_has_no_bound_but_infinity() -> None:
    training = execution(ROOTS, determinism="standard")
    source, _ = CASES["fixed point"]
    assert Swarm.start(training, (1,), [1, 1]).step(source, 0).verdict == "apply"
    source, layer = CASES["backward"]
    assert Swarm.start(training, (1,), [1, 1]).step(source, 0).flags == (Flag(1, layer),)


def tied_roots() -> dict[str, object]:
    return {"layers": roots(), "tied": {"high.weight": "low.weight"}}


def test_a_tied_tensor_has_half_the_bound_because_it_gets_two_gradients() -> None:
    source = OneBad(1.0, 0.75e6)
    tied = msgspec.structs.replace(ROOTS, model=ModelSpec(f"{__name__}:tied_roots"))
    for cuts, counts in SLICINGS:
        assert Swarm.start(ROOTS, cuts, counts).step(source, 0).flags == ()
        assert Swarm.start(tied, cuts, counts).step(source, 0).flags == (Flag(1, "high"),)


@pytest.mark.parametrize("name", CASES)
def test_skip_leaves_weights_and_goes_on_as_the_reference_does(name: str) -> None:
    source, _ = CASES[name]
    training = execution(ROOTS, on_nonfinite="skip")
    swarm = Swarm.start(training, (1, 2), [2, 1, 1])
    initial = swarm.export()
    totals = swarm.step(source, 0)
    assert totals.verdict == "skip"
    swarm.commit(0, totals)
    assert swarm.export() == initial
    totals = swarm.step(source, 1)
    assert totals.verdict == "apply"
    swarm.commit(1, totals)
    assert {one.version for group in swarm.replicas for one in group} == {2}
    assert swarm.export() != initial
    assert swarm.export() == reference(training, source)


@pytest.mark.parametrize("name", CASES)
def test_a_flagged_microbatch_adds_nothing(name: str) -> None:
    source, layer = CASES[name]
    (stage,) = Swarm.start(ROOTS, (), [1]).replicas[0]
    inputs, targets, weight = source.microbatch([2])
    turn = stage.turn(Microbatch(0, 1), inputs, targets, weight)
    assert (turn.gradient, turn.nonfinite) == (None, layer)
    assert stage.ledger.flags == (Flag(1, layer),)
    assert stage.ledger.weight == weight
    assert bytes(stage.part(0, 0, 8)) == bytes(64)
    with pytest.raises(DoubleCount):
        stage.turn(Microbatch(0, 1), inputs, targets, weight)
    with pytest.raises(DoubleCount):
        stage.flag(Microbatch(0, 1), "low", weight)


def test_an_index_is_refused_the_second_time_before_anything_is_added() -> None:
    source = OneBad(1.0, 2.0)
    (stage,) = Swarm.start(ROOTS, (), [1]).replicas[0]
    inputs, targets, weight = source.microbatch([0])
    stage.turn(Microbatch(0, 0), inputs, targets, weight)
    once = bytes(stage.part(0, 0, 8))
    with pytest.raises(DoubleCount):
        stage.turn(Microbatch(0, 0), inputs, targets, weight)
    assert bytes(stage.part(0, 0, 8)) == once != bytes(64)


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    source = OneBad(1.0, 2.0)
    swarm = Swarm.start(ROOTS, (1,), [1, 1])
    (low,), (high,) = swarm.replicas
    inputs, targets, weight = source.microbatch([0])
    mb = Microbatch(0, 0)
    with pytest.raises(ValueError, match="8 bytes for float32"):
        low.forward(mb, inputs[:8])
    with pytest.raises(ValueError, match="at version 0"):
        low.forward(Microbatch(1, 0), inputs)
    with pytest.raises(ValueError, match="0/2 of 2"):
        low.forward(Microbatch(0, 2), inputs)
    with pytest.raises(ValueError, match="no forward of 0/0"):
        low.backward(mb, inputs, weight)
    hidden = low.forward(mb, inputs).tensor
    assert hidden is not None
    with pytest.raises(ValueError, match="8 bytes for float32"):
        high.turn(mb, hidden, targets[:8], weight)
    with pytest.raises(ValueError, match="12 bytes for float32"):
        low.backward(mb, hidden[:12], weight)
    gradient = high.turn(mb, hidden, targets, weight).gradient
    assert gradient is not None
    assert low.backward(mb, gradient, weight).tensor is None
    assert len(low.ledger) == len(high.ledger) == 1
    with pytest.raises(ValueError, match="no elements"):
        low.part(0, 0, 5)
    with pytest.raises(ValueError, match="no elements"):
        low.part(1, 0, 4)
    with pytest.raises(ValueError, match="8 bytes for 4 elements"):
        low.reduce(0, 0, 4, [memoryview(bytes(8))])
    with pytest.raises(RuntimeError, match="bucket 0 is reduced up to 0 of 4 only"):
        low.square_norms()
    low.reduce(0, 0, 2, [low.part(0, 0, 2)])
    with pytest.raises(RuntimeError, match="bucket 0 is reduced up to 2 of 4 only"):
        low.square_norms()


def test_token_ids_out_of_range_never_reach_the_model() -> None:
    (stage,) = Swarm.start(GPT, (), [1]).replicas[0]
    good = np.zeros((SIZE, TOKENS), np.int64)
    for wrong in (-1, 32, 2**62):
        bad = good.copy()
        bad[1, 3] = wrong
        for inputs, targets in ((bad, good), (good, bad)):
            with pytest.raises(ValueError, match="outside 0 .. 31"):
                stage.turn(
                    Microbatch(0, 0),
                    inputs.reshape(-1).data.cast("B"),
                    targets.reshape(-1).data.cast("B"),
                    16,
                )
    assert len(stage.ledger) == 0
