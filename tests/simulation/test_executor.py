"""The integer executor: equal to the plain loop, and quick to notice what is not."""

from collections.abc import Awaitable, Callable

import pytest
import trio

from protocol.messages import Flag, Microbatch, Totals
from swarm.core.dataorder import sample_ids
from swarm.core.ledger import DoubleCount
from swarm.core.reduction import buckets
from swarm.core.totals import totals_of
from swarm.simulation.executor import SimExecutor
from swarm.simulation.physics import SAMPLES, Physics, integer_training
from swarm.simulation.reference import Reference
from tests.simulation.sim import process, run

STEPS, MICROBATCHES = 3, 4
RANGES = [(0, 2), (2, 4), (4, 6)]


class Swarm:
    """One executor per stage, driven by hand, and what they complain about."""

    def __init__(self, physics: Physics) -> None:
        self.physics = physics
        self.reference = Reference(physics)
        self.complaints: list[str] = []
        self.stages = [self.executor() for _ in RANGES]
        self.buckets = buckets(physics.shape, RANGES)

    def executor(self) -> SimExecutor:
        return SimExecutor(
            self.physics,
            self.reference,
            process(0),
            lambda rule, text: self.complaints.append(f"{rule} {text}"),
        )

    async def build(self) -> None:
        for number, stage in enumerate(self.stages):
            await stage.build(RANGES, number)

    async def microbatch(self, mb: Microbatch, accumulate: tuple[bool, ...] = (True,) * 3) -> None:
        ids = sample_ids(
            self.physics.training.seed,
            mb.step,
            mb.index,
            microbatches=MICROBATCHES,
            microbatch_size=2,
            samples=SAMPLES,
        )
        inputs, targets, weight = self.physics.sample(ids)
        first, second, third = self.stages
        one = await first.forward(mb, memoryview(inputs))
        if one.nonfinite:
            for stage in self.stages:
                await stage.flag(mb, one.nonfinite, weight)
            return
        assert one.tensor is not None
        two = await second.forward(mb, one.tensor)
        assert two.tensor is not None
        three = await third.turn(mb, two.tensor, memoryview(targets), weight, accumulate[2])
        assert three.gradient is not None
        below = await second.backward(mb, three.gradient, weight, accumulate[1])
        assert below.tensor is not None
        assert (await first.backward(mb, below.tensor, weight, accumulate[0])).tensor is None

    async def reduce(self, step: int) -> Totals:
        """Let the owner of each bucket sum it, and the others gather it; return the totals."""
        for stage in self.stages:
            await stage.begin_reduction()
        for bucket in self.buckets:
            users = [self.stages[number] for number in bucket.stages]
            middle = bucket.elements // 2
            for start, stop in ((0, middle), (middle, bucket.elements)):
                parts = [await user.part(bucket.index, start, stop) for user in users]
                total = await users[0].reduce(bucket.index, start, stop, [*parts, None])
                for user in users[1:]:
                    await user.gather(bucket.index, start, stop, total)
        ledger = self.stages[-1].ledger
        norms = [await stage.square_norms() for stage in self.stages]
        return totals_of(norms, ledger.weight, ledger.flags, ledger.loss_sum, "skip")

    async def step(self, step: int) -> Totals:
        for index in range(MICROBATCHES):
            await self.microbatch(Microbatch(step, index))
        totals = await self.reduce(step)
        for stage in self.stages:
            await stage.commit(step, totals)
        return totals

    async def exported(self) -> list[bytes]:
        return [
            bytes(await stage.layer_state(layer))
            for stage, (first, last) in zip(self.stages, RANGES, strict=True)
            for layer in range(first, last)
        ]


def with_swarm(
    scenario: Callable[[Swarm], Awaitable[None]],
    *,
    tied: bool = False,
    nonfinite: frozenset[tuple[int, int, int]] = frozenset(),
) -> None:
    training = integer_training(steps=STEPS, microbatches=MICROBATCHES)
    swarm = Swarm(Physics(training, tied=tied, nonfinite=nonfinite))

    async def main() -> None:
        await swarm.build()
        await scenario(swarm)

    run(main)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_reach_the_weights_of_the_plain_loop(tied: bool) -> None:
    async def scenario(swarm: Swarm) -> None:
        for step in range(STEPS):
            totals = await swarm.step(step)
            assert totals.verdict == "apply"
        tensors = swarm.reference.at(STEPS)
        wanted = [swarm.physics.exported(layer, tensors) for layer in range(6)]
        assert await swarm.exported() == wanted
        assert wanted != [
            swarm.physics.exported(layer, swarm.reference.at(STEPS - 1)) for layer in range(6)
        ]
        assert swarm.complaints == []

    with_swarm(scenario, tied=tied)


@pytest.mark.parametrize(
    ("indices", "complaint"),
    [([0, 1, 3], "lacks 2"), ([0, 1], "lacks 2, lacks 3")],
)
def test_a_lost_index_is_named_at_commit(indices: list[int], complaint: str) -> None:
    async def scenario(swarm: Swarm) -> None:
        for index in indices:
            await swarm.microbatch(Microbatch(0, index))
        await swarm.stages[0].commit(0, await swarm.reduce(0))
        assert any(complaint in text for text in swarm.complaints)

    with_swarm(scenario)


def test_a_double_index_is_refused_by_the_ledger_and_named_when_two_replicas_have_it() -> None:
    async def scenario(swarm: Swarm) -> None:
        for index in range(MICROBATCHES):
            await swarm.microbatch(Microbatch(0, index))
        with pytest.raises(DoubleCount):
            await swarm.microbatch(Microbatch(0, 1))
        twin = Swarm(swarm.physics)
        await twin.build()
        await twin.microbatch(Microbatch(0, 3))
        totals = await swarm.reduce(0)
        bucket = swarm.buckets[0]
        stage, other = swarm.stages[0], twin.stages[0]
        parts = [await each.part(bucket.index, 0, bucket.elements) for each in (stage, other)]
        await stage.reduce(bucket.index, 0, bucket.elements, parts)
        await stage.commit(0, totals)
        assert any("has 3 twice" in text for text in swarm.complaints)

    with_swarm(scenario)


def test_who_does_not_accumulate_computes_and_changes_nothing() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.microbatch(Microbatch(0, 0))
        before = [bytes(await swarm.stages[0].part(0, 0, 6)), swarm.stages[0].ledger.bitmap]
        await swarm.microbatch(Microbatch(0, 0), (False, False, False))
        assert [bytes(await swarm.stages[0].part(0, 0, 6)), swarm.stages[0].ledger.bitmap] == before
        await swarm.microbatch(Microbatch(0, 1), (True, False, True))
        assert [len(stage.ledger) for stage in swarm.stages] == [2, 1, 2]

    with_swarm(scenario)


def test_what_nobody_takes_back_is_not_kept_and_what_is_left_at_a_commit_is_noticed() -> None:
    async def scenario(swarm: Swarm) -> None:
        stage, mb = swarm.stages[0], Microbatch(0, 0)
        inputs = memoryview(swarm.physics.sample((1, 2))[0])
        await stage.forward(mb, inputs, keep=False)
        with pytest.raises(ValueError, match="no forward of 0/0"):
            await stage.backward(mb, inputs, 1)
        await stage.forward(mb, inputs)
        await stage.flag(mb, "layers.3", 1, accumulate=False)
        with pytest.raises(ValueError, match="no forward of 0/0"):
            await stage.backward(mb, inputs, 1)
        swarm.complaints.clear()
        await stage.forward(mb, inputs)
        await stage.commit(0, Totals(1, 0.0, (), "skip", None))
        assert any("activations are left of 0/0" in text for text in swarm.complaints)

    with_swarm(scenario)


def test_a_tensor_of_another_version_is_noticed_where_it_arrives() -> None:
    async def scenario(swarm: Swarm) -> None:
        stale = await swarm.stages[0].forward(
            Microbatch(0, 0), memoryview(swarm.physics.sample((1, 2))[0])
        )
        assert stale.tensor is not None
        assert "wrong input of layer 0" in swarm.complaints[0]
        await swarm.stages[1].forward(Microbatch(0, 0), stale.tensor)
        assert "wrong input of layer 2" in swarm.complaints[1]

    with_swarm(scenario)


def test_state_moves_to_another_executor_and_training_goes_on() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.step(0)
        state = await swarm.stages[1].snapshot(1)
        assert state is not None and await swarm.stages[1].snapshot(0) is None
        heir = swarm.executor()
        with pytest.raises(ValueError):
            await heir.load(RANGES, 1, 0, state)
        with pytest.raises(ValueError):
            await heir.load(RANGES, 2, 1, state)
        await heir.load(RANGES, 1, 1, state)
        assert len(heir.ledger) == 0 and not await heir.settle()
        swarm.stages[1] = heir
        await swarm.step(1)
        assert swarm.complaints == []

    with_swarm(scenario)


def test_a_forged_state_is_noticed_when_it_is_loaded() -> None:
    async def scenario(swarm: Swarm) -> None:
        state = await swarm.stages[1].snapshot(0)
        assert state is not None
        state[2] = memoryview(bytes(state[2][:-1]) + b"\x01")
        await swarm.executor().load(RANGES, 1, 0, state)
        assert "differs at version 0" in swarm.complaints[0]

    with_swarm(scenario)


def test_the_reduced_gradient_is_kept_until_the_next_commit_and_can_be_handed_on() -> None:
    async def scenario(swarm: Swarm) -> None:
        stage = swarm.stages[0]
        assert await stage.gradient(0) is None
        for index in range(MICROBATCHES):
            await swarm.microbatch(Microbatch(0, index))
        totals = await swarm.reduce(0)
        in_hand = await stage.gradient(0)
        assert in_hand is not None and await stage.settle()
        heir = swarm.executor()
        await heir.build(RANGES, 0)
        with pytest.raises(ValueError):
            await heir.load_gradient(1, in_hand)
        with pytest.raises(RuntimeError):
            await heir.square_norms()
        await heir.load_gradient(0, in_hand)
        await heir.commit(0, totals)
        assert swarm.complaints == []
        assert await heir.gradient(0) == in_hand
        assert await heir.gradient(1) is None
        await stage.begin_reduction()
        assert await stage.gradient(0) is None

    with_swarm(scenario)


def test_a_flagged_step_is_skipped_as_the_plain_loop_does() -> None:
    async def scenario(swarm: Swarm) -> None:
        totals = await swarm.step(0)
        assert totals.verdict == "skip" and totals.flags == (Flag(2, "layers.1"),)
        assert (await swarm.step(1)).verdict == "apply"
        assert swarm.complaints == []
        assert swarm.reference.at(1) == swarm.reference.at(0)

    with_swarm(scenario, nonfinite=frozenset({(0, 2, 1)}))


def test_tasks_end_in_the_order_of_their_calls_and_a_cancelled_caller_gets_its_result() -> None:
    async def scenario(swarm: Swarm) -> None:
        stage = swarm.stages[0]
        done: list[str] = []
        inputs = memoryview(
            swarm.physics.sample(
                sample_ids(0, 0, 0, microbatches=MICROBATCHES, microbatch_size=2, samples=SAMPLES)
            )[0]
        )

        async def forward(name: str) -> None:
            await stage.forward(Microbatch(0, 0), inputs)
            done.append(name)

        async def impatient() -> None:
            with trio.move_on_after(0.001):
                await forward("impatient")

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(impatient)
            await trio.sleep(0.0001)
            for name in ("a", "b", "c"):
                nursery.start_soon(forward, name)
                await trio.sleep(0.0001)
            assert stage.task_seconds == pytest.approx(0.0004)
        assert done == ["impatient", "a", "b", "c"]
        assert trio.current_time() - began == pytest.approx(4 * 0.02)
        assert stage.task_seconds == 0 and stage.compute_seconds == pytest.approx(0.0805)

    with_swarm(scenario)


def test_a_hung_task_ends_when_it_is_let_go_on() -> None:
    async def scenario(swarm: Swarm) -> None:
        stage = swarm.stages[0]
        stage.hang()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stage.settle)
            await trio.sleep(100)
            assert stage.task_seconds == 100
            stage.go_on()
        assert stage.task_seconds == 0

    with_swarm(scenario)
