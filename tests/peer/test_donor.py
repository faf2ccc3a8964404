"""What a donor copies, for how long, and whom it makes wait; on a virtual clock, without links."""

import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from protocol.messages import Account, GetListing, GetState, Listing, Reply, StateChunk, StateKind
from protocol.records import sha256
from swarm.core.holding import Holding
from swarm.peer import hashing
from swarm.peer.donor import KEEP_SECONDS, MAX_GRADIENTS, MAX_STATES, Donor
from swarm.ports import Buffer
from swarm.simulation.executor import SimExecutor
from swarm.simulation.fakes import SimCheckpoints, SimDisk
from swarm.simulation.physics import Physics, integer_training
from swarm.simulation.reference import Reference
from tests.peer.ends import HASH, RANGES, STAGE, gradient_of, totals_of
from tests.simulation.sim import process

STEPS = 9
PHYSICS = Physics(integer_training(steps=STEPS, microbatches=2), layers=3)
FIRST, LAST = RANGES[STAGE]
OTHER_HASH = b"o" * 32
STEP_SECONDS = 1.0


class Holder:
    """A replica that holds version 0, and its donor."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.complaints: list[str] = []
        own = process(0)
        self.executor = SimExecutor(
            PHYSICS, Reference(PHYSICS), own, lambda rule, text: self.complaints.append(text)
        )
        self.holding = Holding(0, FIRST, LAST, 0, HASH)
        checkpoints = SimCheckpoints(SimDisk(), own, lambda *_: None)
        self.donor = Donor(self.executor, checkpoints, lambda: self.holding)

    @property
    def copied(self) -> list[tuple[str, int]]:
        """Kind and version of every copy that it keeps."""
        return sorted((key[0], key[2]) for key in self.donor._copies)

    async def listing(self, kind: StateKind, version: int, state_hash: bytes = b"") -> Listing:
        """Ask what there is of a version."""
        asked = GetListing(
            id=1,
            kind=kind,
            lineage=0,
            version=version,
            first=FIRST,
            last=LAST,
            state_hash=state_hash,
        )
        found = await self._ask(self.donor.list, asked)
        assert isinstance(found, Listing)
        return found

    async def piece(self, kind: StateKind, version: int) -> StateChunk:
        """Ask for the first layer, or bucket."""
        asked = GetState(
            id=1, kind=kind, lineage=0, version=version, number=0, offset=0, length=1000
        )
        found = await self._ask(self.donor.piece, asked)
        assert isinstance(found, StateChunk)
        return found

    async def _ask(self, door: Callable[..., Awaitable[None]], asked: object) -> Reply:
        answers, replies = trio.open_memory_channel[Reply](1)

        def answer(reply: Reply, payloads: Sequence[Buffer]) -> None:
            answers.send_nowait(reply)

        self._nursery.start_soon(door, asked, answer)
        return await replies.receive()

    async def commit(self) -> None:
        """Commit the next step, as the plain loop does."""
        step = self.holding.version
        totals = totals_of(PHYSICS, step)
        await self.executor.load_gradient(step, gradient_of(PHYSICS, step))
        await self.executor.commit(step, totals)
        self.holding = self.holding.after(totals)


def with_holder(scenario: Callable[[Holder], Awaitable[None]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            holder = Holder(nursery)
            await holder.executor.build(RANGES, STAGE)
            await scenario(holder)
            nursery.cancel_scope.cancel()
        assert holder.complaints == []

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_copy_is_freed_some_time_after_it_was_asked_for_last() -> None:
    async def scenario(holder: Holder) -> None:
        await holder.listing("state", 0)
        for _ in range(3):
            await trio.sleep(KEEP_SECONDS * 0.9)
            assert not (await holder.piece("state", 0)).refusal
        await trio.sleep(KEEP_SECONDS * 1.1)
        assert holder.copied == []
        assert "not held here" in (await holder.piece("state", 0)).refusal
        await holder.listing("state", 0)
        assert holder.copied == [("state", 0)]
        await trio.sleep(KEEP_SECONDS * 1.1)
        assert holder.copied == []

    with_holder(scenario)


def test_a_state_that_is_being_fetched_is_not_dropped_for_gradients() -> None:
    async def scenario(holder: Holder) -> None:
        await holder.listing("state", 0)
        for step in range(MAX_GRADIENTS + 2):
            await trio.sleep(STEP_SECONDS)
            await holder.commit()
            assert not (await holder.listing("gradient", step)).refusal
        assert not (await holder.piece("state", 0)).refusal
        kept = [version for kind, version in holder.copied if kind == "gradient"]
        assert kept == list(range(2, MAX_GRADIENTS + 2))

    with_holder(scenario)


def test_a_standby_waits_for_a_place_and_who_names_a_state_does_not() -> None:
    """The swarm waits for a replica that knows the hash of what it has to fetch."""

    async def scenario(holder: Holder) -> None:
        for version in range(MAX_STATES):
            assert not (await holder.listing("state", version)).refusal
            await holder.commit()
        assert "others are being fetched" in (await holder.listing("state", MAX_STATES)).refusal
        for version in range(MAX_STATES, STEPS):
            named = await holder.listing("state", version, holder.holding.state_hash)
            assert not named.refusal
            await holder.commit()
        # What is fetched by standbys has stayed, and whoever wants that does not wait.
        assert holder.copied == [("state", each) for each in (*range(MAX_STATES), STEPS - 1)]
        assert not (await holder.listing("state", 0)).refusal
        # A place that a standby would take is not to be had by way of the named one either.
        assert "others are being fetched" in (await holder.listing("state", STEPS - 1)).refusal
        await trio.sleep(KEEP_SECONDS * 1.1)
        assert not (await holder.listing("state", STEPS)).refusal

    with_holder(scenario)


def test_what_standbys_fetch_of_a_named_state_stays_theirs() -> None:
    async def scenario(holder: Holder) -> None:
        await holder.listing("state", 0, holder.holding.state_hash)
        assert not (await holder.listing("state", 0)).refusal
        for version in range(2):
            await holder.commit()
            await holder.listing("state", version + 1, holder.holding.state_hash)
        assert holder.copied == [("state", 0), ("state", 2)]

    with_holder(scenario)


def test_another_state_of_the_same_version_is_copied_anew() -> None:
    """A replica whose state was not that of the others has taken theirs."""

    async def scenario(holder: Holder) -> None:
        assert (await holder.listing("state", 0)).state_hash == HASH
        holder.holding = Holding(0, FIRST, LAST, 0, OTHER_HASH)
        for wanted in (b"", OTHER_HASH):
            assert (await holder.listing("state", 0, wanted)).state_hash == OTHER_HASH
        assert "not held here" in (await holder.listing("state", 0, HASH)).refusal

    with_holder(scenario)


def test_a_step_that_has_been_reduced_again_is_copied_anew() -> None:
    async def scenario(holder: Holder) -> None:
        first = gradient_of(PHYSICS, 0)
        second = {number: memoryview(bytes(len(data))) for number, data in first.items()}
        account = Account(1, (), 0.0)
        for gradient in (first, second):
            await holder.executor.load_gradient(0, gradient)
            holder.holding = replace(holder.holding, account=account)
            found = await holder.listing("gradient", 0)
            assert [piece.sha256 for piece in found.pieces] == [
                sha256(data) for _, data in sorted(gradient.items())
            ]
        await holder.commit()
        found = await holder.listing("gradient", 0)
        assert found.pieces[0].sha256 == sha256(first[0])

    with_holder(scenario)


def test_what_is_large_is_hashed_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def noted(data: Buffer) -> bytes:
        threads.append(threading.get_ident())
        return sha256(data)

    monkeypatch.setattr(hashing, "sha256", noted)
    small, large = (memoryview(bytes(hashing.LARGE_BYTES - less)) for less in (1, 0))
    assert trio.run(hashing.hash_of, small) == sha256(small)
    assert trio.run(hashing.hash_of, large) == sha256(large)
    own = threading.get_ident()
    assert [each == own for each in threads] == [True, False]
