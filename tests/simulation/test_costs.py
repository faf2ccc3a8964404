"""The integer model when it pretends to be a large one: sizes, seconds, and what still counts."""

import math
from collections.abc import Awaitable, Callable

import pytest
import trio

from protocol.messages import Microbatch, Totals
from swarm.core.model import Profile
from swarm.core.reduction import buckets
from swarm.core.scheduling.problem import Layer
from swarm.simulation.executor import Machine, SimExecutor
from swarm.simulation.physics import (
    HASH_BYTES,
    STATE_SCALE,
    Costs,
    Physics,
    hollow,
    integer_training,
)
from swarm.simulation.reference import Reference
from tests.simulation.sim import process, run

LAYERS = (
    Layer(1.0, 2.5, 400_000_000, 8_000_000, 5_000),
    Layer(2.0, 3.0, 100_000_000, 4_000_000, 6_000),
    Layer(0.5, 0.5, 0, 10, 7_000),
)
RANGES = [(0, 1), (1, 3)]
MICROBATCHES = 2


def physics(determinism: str = "standard") -> Physics:
    training = integer_training(
        steps=3,
        microbatches=MICROBATCHES,
        determinism=determinism,  # type: ignore[arg-type]
        sizes=(300_000, 4_000),
    )
    return Physics(training, costs=Costs(LAYERS, 300_000, 4_000, optimiser_seconds=5.0))


def with_executors(
    scenario: Callable[[list[SimExecutor], list[str]], Awaitable[None]],
    model: Physics,
    **machine: float,
) -> None:
    complaints: list[str] = []

    def complain(rule: str, text: str) -> None:
        complaints.append(f"{rule} {text}")

    async def main() -> None:
        reference = Reference(model)
        made = [
            SimExecutor(model, reference, process(0), complain, Machine(**machine))  # type: ignore[arg-type]
            for _ in RANGES
        ]
        for stage, each in enumerate(made):
            await each.build(RANGES, stage)
        await scenario(made, complaints)

    run(main)


def test_a_profile_is_the_scenarios_at_the_peers_speed() -> None:
    found: list[Profile] = []

    async def scenario(executors: list[SimExecutor], _: list[str]) -> None:
        found.append(await executors[0].profile())

    with_executors(scenario, physics(), speed=2.0, memory_bytes=7)
    (profile,) = found
    assert [(each.forward_seconds, each.backward_seconds) for each in profile.layers] == [
        (0.5, 1.25),
        (1.0, 1.5),
        (0.25, 0.25),
    ]
    assert [each.parameter_bytes for each in profile.layers] == [400_000_000, 100_000_000, 0]
    assert [each.output.nbytes for each in profile.layers] == [8_000_000, 4_000_000, HASH_BYTES]
    assert [each.activation_bytes for each in profile.layers] == [5_000, 6_000, 7_000]
    assert (profile.shape.input.nbytes, profile.shape.target.nbytes) == (300_000, 4_000)
    assert profile.memory_bytes == 7


async def microbatch(executors: list[SimExecutor], model: Physics, index: int) -> None:
    mb = Microbatch(executors[0].version, index)
    first, last = executors
    passed = Reference(model).passed(Microbatch(0, index))
    assert passed is not None
    inputs = hollow(passed.inputs[0], model.shape.input.nbytes)
    one = await first.forward(mb, inputs)
    assert one.tensor is not None
    assert len(one.tensor) == LAYERS[0].output_bytes
    ids = [int.from_bytes(passed.inputs[0][i : i + 8], "little") for i in (0, 8)]
    targets = hollow(model.sample(ids)[1], model.shape.target.nbytes)
    turn = await last.turn(mb, one.tensor, targets, passed.weight)
    assert turn.gradient is not None
    assert len(turn.gradient) == LAYERS[0].output_bytes
    await first.backward(mb, turn.gradient, passed.weight)


def test_tasks_take_the_seconds_of_their_layers() -> None:
    model = physics()

    async def scenario(executors: list[SimExecutor], complaints: list[str]) -> None:
        before = trio.current_time()
        await microbatch(executors, model, 0)
        assert trio.current_time() - before == pytest.approx((3.5 + 6.0) / 2)
        assert complaints == []

    with_executors(scenario, model, speed=2.0)


@pytest.mark.parametrize(("determinism", "item"), [("standard", 4), ("exact", 8)])
def test_a_step_reduced_in_parts_gives_the_plain_loops_weights(determinism: str, item: int) -> None:
    """Two owners of each bucket, one with a tenth; what comes between has its nominal size."""
    model = physics(determinism)

    async def scenario(executors: list[SimExecutor], complaints: list[str]) -> None:
        for index in range(MICROBATCHES):
            await microbatch(executors, model, index)
        totals = step_totals(model)
        await reduce_all(executors, model, item)
        before = trio.current_time()
        for each in executors:
            await each.commit(0, totals)
        assert trio.current_time() - before == pytest.approx(5.0, abs=0.01)
        assert complaints == []

    with_executors(scenario, model)


def step_totals(model: Physics) -> Totals:
    """Return the totals of step 0 by the plain loop."""
    reference = Reference(model)
    sums = reference.summed(0)
    passes = [reference.passed(Microbatch(0, index)) for index in range(MICROBATCHES)]
    weight = sum(passed.weight for passed in passes if passed is not None)
    loss = math.fsum(passed.loss_sum for passed in passes if passed is not None) / weight
    norm = math.fsum(float(sum(v * v for v in values)) for values in sums.values())
    return Totals(weight, norm, (), "apply", loss)


async def reduce_all(executors: list[SimExecutor], model: Physics, item: int) -> None:
    for each in executors:
        await each.begin_reduction()
    for bucket in buckets(model.shape, RANGES):
        (stage,) = bucket.stages
        cut = bucket.elements // 10
        for start, stop in ((0, cut), (cut, bucket.elements)):
            part = await executors[stage].part(bucket.index, start, stop)
            assert len(part) == item * (stop - start)
            total = await executors[stage].reduce(bucket.index, start, stop, [None, part])
            assert len(total) == item * (stop - start)


def test_a_gradient_with_a_hole_is_not_whole_even_where_nothing_means_anything() -> None:
    model = physics()
    (bucket, _) = buckets(model.shape, RANGES)

    async def scenario(executors: list[SimExecutor], _: list[str]) -> None:
        first = executors[0]
        await first.begin_reduction()
        await first.reduce(0, 0, bucket.elements - 5, [None])
        assert not await first.settle()
        await first.gather(0, bucket.elements - 5, bucket.elements, memoryview(bytes(20)))
        assert await first.settle()

    with_executors(scenario, model)


def test_a_state_stands_for_its_bytes_and_can_be_loaded() -> None:
    model = physics()

    async def scenario(executors: list[SimExecutor], complaints: list[str]) -> None:
        found = await executors[0].snapshot(0)
        assert found is not None
        assert len(found[0]) == -(-3 * LAYERS[0].parameter_bytes // STATE_SCALE)
        await executors[1].load(RANGES, 0, 0, found)
        assert complaints == []
        with pytest.raises(ValueError, match="no state of layer"):
            await executors[1].load(RANGES, 0, 0, {0: found[0][:-1]})

    with_executors(scenario, model)


def test_slow_moments_take_longer_and_do_not_change_what_is_measured_of_work() -> None:
    model = physics()
    worked: list[float] = []

    async def scenario(executors: list[SimExecutor], _: list[str]) -> None:
        before = trio.current_time()
        await microbatch(executors, model, 1)
        assert trio.current_time() - before == pytest.approx(3 * 9.5)

    with_executors(scenario, model, pace=lambda: 3.0, worked=worked.append)  # type: ignore[arg-type]
    assert sum(worked) == pytest.approx(9.5)


def test_without_checks_nobody_complains_of_wrong_gradients() -> None:
    model = physics()
    found: list[list[str]] = []

    async def scenario(executors: list[SimExecutor], complaints: list[str]) -> None:
        wrong = hollow(b"x" * HASH_BYTES, LAYERS[0].output_bytes)
        await executors[1].forward(Microbatch(0, 0), wrong)
        found.append(list(complaints))

    with_executors(scenario, model, checked=False)
    with_executors(scenario, model, checked=True)
    assert found[0] == []
    assert "wrong input" in found[1][0]
