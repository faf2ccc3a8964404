"""What a peer's writer brings to its disk, and what it leaves out."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from dataclasses import replace as changed

import pytest
import trio

from swarm.core.holding import Holding
from swarm.peer.writer import RETRY_SECONDS, Writer, Written
from swarm.simulation.executor import SimExecutor
from swarm.simulation.fakes import SimCheckpoints, SimDisk
from swarm.simulation.physics import Physics, integer_training
from swarm.simulation.reference import Reference
from tests.peer.ends import HASH, RANGES, STAGE, gradient_of, totals_of
from tests.simulation.sim import process, run

STEPS = 6
PHYSICS = Physics(integer_training(steps=STEPS, microbatches=2, checkpoint_every=1))
SLOW_SECONDS = 5.0


@dataclass
class Desk:
    """A writer, its disk, and an executor whose state it writes."""

    disk: SimDisk = field(default_factory=SimDisk)
    completed: int = 0
    saved: list[int] = field(default_factory=list)
    """Versions that the disk was given."""
    told: list[tuple[Written, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        this = process(0)
        self.executor = SimExecutor(PHYSICS, Reference(PHYSICS), this, lambda *said: None)
        checkpoints = SimCheckpoints(
            self.disk, this, lambda _, version, __: self.saved.append(version)
        )
        self.writer = Writer(
            checkpoints,
            PHYSICS.training,
            completed=lambda: self.completed,
            on_written=lambda: self.told.append(tuple(self.writer.written)),
        )
        first, last = RANGES[STAGE]
        self.holding = Holding(0, first, last, 0, HASH)

    async def step(self) -> None:
        """Commit a step, and let the writer have the version."""
        version = self.holding.version
        totals = totals_of(PHYSICS, version)
        await self.executor.load_gradient(version, gradient_of(PHYSICS, version))
        await self.executor.commit(version, totals)
        self.holding = self.holding.after(totals)
        await self.writer.take(self.holding, self.executor)

    async def steps(self, count: int) -> None:
        for _ in range(count):
            await self.step()


def at_desk(scenario: Callable[[Desk], Awaitable[None]]) -> None:
    async def main() -> None:
        desk = Desk()
        await desk.executor.build(RANGES, STAGE)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(desk.writer.run)
            await scenario(desk)
            nursery.cancel_scope.cancel()

    run(main)


def test_while_one_version_is_written_only_the_newest_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(desk: Desk) -> None:
        desk.disk.write_seconds = SLOW_SECONDS
        await desk.steps(4)
        await trio.sleep(3 * SLOW_SECONDS)
        assert desk.saved == [1, 4]
        await desk.steps(2)
        await trio.sleep(3 * SLOW_SECONDS)
        assert desk.saved == [1, 4, 5, 6]
        assert [each.version for each in desk.told[-1]] == desk.saved

    at_desk(scenario)
    skipped = [each.getMessage() for each in caplog.records if "not written" in each.getMessage()]
    assert skipped == [f"not written version={each}: the disk is slow" for each in (2, 3)]


def test_what_is_offered_twice_is_written_once() -> None:
    async def scenario(desk: Desk) -> None:
        desk.disk.write_seconds = SLOW_SECONDS
        await desk.step()
        for _ in range(2):  # being written, then written
            await desk.writer.take(desk.holding, desk.executor)
            await trio.sleep(2 * SLOW_SECONDS)
        assert (desk.saved, len(desk.told)) == ([1], 1)

    at_desk(scenario)


def test_a_version_that_lies_there_is_not_written_again_unless_it_is_damaged() -> None:
    """The writer of another start, and of another lineage, has written the same history."""

    async def scenario(desk: Desk) -> None:
        await desk.step()
        await trio.sleep(1)
        again = Desk(disk=desk.disk)
        again.executor, again.holding = desk.executor, changed(desk.holding, lineage=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(again.writer.run)
            await again.writer.take(again.holding, again.executor)
            await trio.sleep(1)
            (written,) = again.writer.written
            assert (again.saved, written.lineage, written.version) == ([], 1, 1)
            assert written.layer_hashes == desk.writer.written[0].layer_hashes
            nursery.cancel_scope.cancel()
        desk.disk.damaged.add((0, 1, 0))
        other = Desk(disk=desk.disk)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other.writer.run)
            await other.writer.take(desk.holding, desk.executor)
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
        assert other.saved == [1] and desk.disk.damaged == set()

    at_desk(scenario)


def test_other_layers_of_a_complete_version_stay_where_they_are() -> None:
    """They may be the only ones; of a version that is not complete nobody needs them any more."""

    async def scenario(desk: Desk) -> None:
        await desk.step()
        await trio.sleep(1)
        before = desk.disk.versions[0, 1]
        other, shorter = Desk(disk=desk.disk, completed=1), [(0, 1), (1, 3)]
        await other.executor.load(shorter, 0, 1, {0: memoryview(before.states[0])})
        other.holding = Holding(0, 0, 1, 1, bytes([9]) * 32)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other.writer.run)
            await other.writer.take(other.holding, other.executor)
            await trio.sleep(1)
            assert (other.saved, other.writer.written) == ([], [])
            assert desk.disk.versions[0, 1] is before
            other.completed = 0
            await other.writer.take(other.holding, other.executor)
            await trio.sleep(1)
            assert list(desk.disk.versions[0, 1].weights) == [0]
            nursery.cancel_scope.cancel()

    at_desk(scenario)


def test_only_the_last_version_is_tried_again() -> None:
    async def scenario(desk: Desk) -> None:
        desk.disk.is_full = True
        await desk.steps(STEPS - 1)
        await trio.sleep(1)
        assert desk.writer.trouble.startswith(f"version {STEPS - 1} is not on this disk: ")
        desk.disk.is_full = False
        await trio.sleep(2 * RETRY_SECONDS)
        assert desk.saved == []
        desk.disk.is_full = True
        await desk.step()
        await trio.sleep(3 * RETRY_SECONDS)
        desk.disk.is_full = False
        await trio.sleep(2 * RETRY_SECONDS)
        assert (desk.saved, desk.writer.trouble) == ([STEPS], "")

    at_desk(scenario)


def test_there_is_room_before_a_version_is_written_and_the_complete_one_stays() -> None:
    """`keep` is 2: of what is below the newest complete version the last one stays."""

    async def scenario(desk: Desk) -> None:
        for completed in (0, 1, 2, 3):
            desk.completed = completed
            await desk.step()
            await trio.sleep(1)
        assert sorted(desk.disk.versions) == [(0, 2), (0, 3), (0, 4)]
        desk.completed, desk.disk.is_full = 4, True
        await desk.step()
        await trio.sleep(1)
        assert sorted(desk.disk.versions) == [(0, 3), (0, 4)]

    at_desk(scenario)
