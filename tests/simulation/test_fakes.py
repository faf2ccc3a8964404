"""Disks that keep exactly what was saved, and a DHT that may be anything."""

import hashlib

import pytest
import trio

from protocol.records import PeerRecord, sha256
from swarm.errors import HomeError
from swarm.simulation.fakes import (
    RECORD_SECONDS,
    Board,
    SimCheckpoints,
    SimDht,
    SimDisk,
    SimStorage,
)
from swarm.simulation.process import Process
from tests.simulation.sim import process, run


@pytest.mark.parametrize(("kept", "found"), [(False, b"old"), (True, b"new")])
def test_a_crash_at_a_save_comes_before_or_after_it_and_never_in_between(
    kept: bool, found: bytes
) -> None:
    async def main() -> None:
        disk, victim = SimDisk(), process(0)
        saved: list[bytes] = []

        def note(process: Process, name: str, data: bytes) -> None:
            saved.append(data)

        storage = SimStorage(disk, victim, note)
        storage.save("state", b"old")
        storage.crash_at_save(1, kept=kept, crash=victim.die)
        storage.save("state", b"new")
        assert victim.dead
        storage.save("state", b"from the grave")
        assert SimStorage(disk, process(0, 2), note).load("state") == found
        assert saved == ([b"old", b"new"] if kept else [b"old"])

    run(main)


def test_checkpoints_are_whole_or_not_there() -> None:
    async def main() -> None:
        disk, writer = SimDisk(), process(0)
        written: list[int] = []
        checkpoints = SimCheckpoints(disk, writer, lambda _, version, __: written.append(version))
        weights, states = (
            {1: memoryview(b"w1"), 0: memoryview(b"w0")},
            {0: memoryview(b"s0"), 1: memoryview(b"s1")},
        )
        hashes = await checkpoints.write(0, 4, weights, states, b"h")
        assert hashes == tuple(hashlib.sha256(data).digest() for data in (b"w0", b"w1"))
        assert await checkpoints.held() == ((0, 4, b"h", (0, 1), hashes),)
        assert await checkpoints.read("weights", 0, 4, 1) == b"w1"
        assert await checkpoints.read("state", 0, 4, 0) == b"s0"
        assert await checkpoints.read("state", 0, 4, 2) is None
        assert await checkpoints.read("weights", 1, 4, 1) is None
        disk.damaged.add((0, 4, 1))
        with pytest.raises(HomeError):
            await checkpoints.read("weights", 0, 4, 1)
        disk.is_full = True
        with pytest.raises(HomeError, match="No space left"):
            await checkpoints.write(0, 5, weights, states, b"j")
        disk.is_full = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(checkpoints.write, 0, 6, weights, states, b"i")
            await trio.sleep(0.001)
            writer.die()
        assert written == [4] and list(disk.versions) == [(0, 4)]

    run(main)


def test_the_dht_forgets_splits_dies_and_lies() -> None:
    async def main() -> None:
        board = Board()
        nodes = [SimDht(board, process(number)) for number in range(3)]

        def record(number: int, sequence: int) -> PeerRecord:
            run_id = sha256(b"run")
            return PeerRecord(run_id, process(number).peer, 1, ("sim:1",), (), sequence)

        async def found(number: int) -> list[tuple[str, int]]:
            return [(each.peer, each.sequence) for each in await nodes[number].lookup()]

        assert await nodes[0].publish(record(0, 1))
        assert await nodes[0].publish(record(0, 2))
        assert await nodes[1].publish(record(1, 1))
        names = {number: process(number).peer for number in range(3)}
        newest = sorted([(names[0], 2), (names[1], 1)])
        assert await found(2) == newest
        board.mood = "poisoned"
        assert (names[0], 1) in await found(2)
        board.mood = "dead"
        assert not await nodes[0].publish(record(0, 3)) and await found(0) == []
        board.mood = "good"
        board.sides[2] = 1
        assert await found(2) == []
        await nodes[2].publish(record(2, 1))
        assert await found(2) == [(names[2], 1)] and await found(0) == newest
        board.sides.clear()
        board.wall_offset_seconds[0] = RECORD_SECONDS
        assert await found(0) == [] and await found(1) == newest

    run(main)
