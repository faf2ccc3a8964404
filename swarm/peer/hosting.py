"""One replica at work in one epoch: it gets to the step in hand, commits, and makes durable.

It owns the replica's parts: pipeline, reducer, and the coordinators that its place in the plan
asks for. The rule: what the executor has done is noted at once, since the next plan may come at any
await, and what is held outlives this plan.
"""

import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from protocol.errors import RemoteProtocolError
from protocol.messages import (
    Durable,
    GetListing,
    Held,
    LedgerReport,
    LostWork,
    Report,
    Resume,
    Settlement,
    StateKind,
)
from protocol.records import PlanHeader, clip
from protocol.signing import PeerId
from swarm.core.coordinators import GroupCoordinator, StepCoordinator
from swarm.core.holding import Holding
from swarm.core.model import ModelShape
from swarm.core.reduction import buckets
from swarm.core.scheduling.planning import candidates_of
from swarm.core.settlement import NoHolder
from swarm.core.step import (
    Apply,
    Effect,
    Recover,
    ReplicaState,
    ranges_of_stages,
    step_coordinator_of,
)
from swarm.peer.pipeline import Pipeline
from swarm.peer.reducer import Reducer
from swarm.peer.replica import Replica
from swarm.peer.state import RETRY_SECONDS, Fetched, NobodyHas, fetch_into, largest_pieces
from swarm.peer.versions import held_on_disk, read_states
from swarm.peer.writer import Writer
from swarm.ports import Buffer, Checkpoints

log = logging.getLogger(__name__)

REPORT_SECONDS = 10.0
"""For so long Resume waits for leavers; a replica that has not reported then is suspected."""
FRUITLESS_ATTEMPTS = 150
"""To fetch what the donors have reported that they hold: half a minute at least."""
ANY_HASH = bytes(32)
"""Stands for the state hash of a stage whose holders all have to commit first."""


@dataclass(frozen=True, slots=True)
class Watcher:
    """Whom a replica tells how it gets on."""

    on_step: Callable[[], None]
    """The step in hand has moved on."""
    on_loss: Callable[[int, float], None]
    """A step was committed whose mean loss this was."""
    on_trouble: Callable[[str], None]


class Hosting:
    """What a replica does by one plan."""

    def __init__(
        self,
        replica: Replica,
        header: PlanHeader,
        checkpoints: Checkpoints,
        writer: Writer,
        perform: Callable[[Sequence[Effect | NoHolder]], None],
        watcher: Watcher,
    ) -> None:
        self.role = replica.role
        self.step = replica.step
        self.pipeline = Pipeline(replica)
        self.reducer = Reducer(replica)
        self.group_coordinator: GroupCoordinator | None = None
        self.step_coordinator: StepCoordinator | None = None
        self._replica = replica
        self._header = header
        self._checkpoints = checkpoints
        self._writer = writer
        self._executor = replica.executor
        self._links = replica.links
        self._perform = perform
        self._watcher = watcher
        self._ranges = ranges_of_stages(self.role.body)
        self._recoveries_send, self._recoveries = trio.open_memory_channel[Recover](1)
        self._commits_send, self._commits = trio.open_memory_channel[Apply](4)
        self._make_coordinators()

    def _make_coordinators(self) -> None:
        role, training = self.role, self._replica.training
        if role.me.peer == role.group[0]:
            self.group_coordinator = GroupCoordinator(role, training)
        if role.me.peer == step_coordinator_of(role.body):
            made = buckets(self._replica.shape, self._ranges)
            self.step_coordinator = StepCoordinator(
                role,
                training,
                counted_tensors(self._replica.shape, self._ranges),
                tied=[bucket.stages for bucket in made if bucket.stages[1:]],
            )

    # --- how far it is -----------------------------------------------------------------------

    @property
    def state(self) -> str:
        """Return where this replica is in the step in hand: of a reduction "gathering" is what is
        left once it has all parts of what it sums up."""
        state = self.step.state
        if state is ReplicaState.REDUCING and not self.reducer.without_parts:
            return "gathering"
        return state.value

    @property
    def awaits(self) -> tuple[PeerId, ...]:
        """Return for whom the step in hand waits here: in a reduction, and to commit."""
        match self.step.state:
            case ReplicaState.REDUCING:
                return self.reducer.without_parts or self.reducer.without_sums
            case ReplicaState.PREPARED if self.step_coordinator is not None:
                return self.step_coordinator.unprepared
            case ReplicaState.PREPARED:
                return (step_coordinator_of(self.role.body),)
            case _:
                return ()

    # --- what is told ------------------------------------------------------------------------

    def resume(self, message: Resume) -> None:
        """All have reported: get to the step in hand."""
        self.pipeline.resume(message)
        if self.group_coordinator is not None:
            settled = bool(message.stages[self.role.stage].prepared)
            self.group_coordinator.resume(message.step, prepared=settled)
        self._perform(self.step.resume(message))
        self.tell_durable(self._header.council)

    def ledger(self, sender: PeerId, message: LedgerReport) -> list[Effect]:
        """Take in a ledger as the stage's coordinator."""
        if self.group_coordinator is None:
            raise RemoteProtocolError("LedgerReport is for the stage's coordinator")
        return self.group_coordinator.ledger(sender, message)

    def recover(self, effect: Recover) -> None:
        """Get to the step in hand, in this replica's own time."""
        self._recoveries_send.send_nowait(effect)

    def apply(self, effect: Apply) -> None:
        """Commit, in this replica's own time."""
        self._commits_send.send_nowait(effect)

    def opened(self, peer: PeerId) -> None:
        """Tell a voter that has come (again) what it has missed, or forgotten with its boot."""
        if peer in self._header.council:
            self.tell_durable([peer])

    def tell_durable(self, voters: Sequence[PeerId]) -> None:
        """Tell voters which versions of this stage lie on this peer's disk: they decide that a
        version is complete. Those that this plan knows complete need not be told of."""
        if self.step.state is ReplicaState.WAITING:
            return
        completed = self.role.body.completed
        place = self._header.lineage, *self._ranges[self.role.stage]
        for each in self._writer.written:
            is_new = completed is None or each.version > completed.version
            if is_new and place == (each.lineage, each.first, each.last):
                durable = Durable(
                    fence=self.role.fence,
                    stage=self.role.stage,
                    version=each.version,
                    layer_hashes=each.layer_hashes,
                )
                for voter in voters:
                    self._links.post(voter, durable)

    # --- life --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Report, then work until cancelled."""
        log.info("activate epoch=%d stage=%d", self._header.epoch, self.role.stage)
        self.step.holding = await self._hold(self.step.holding)
        self._links.post(
            step_coordinator_of(self.role.body),
            Report(fence=self.role.fence, held=await self._held()),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.pipeline.run)
            nursery.start_soon(self.reducer.run)
            nursery.start_soon(self._run_recovery)
            if self.step_coordinator is not None:
                nursery.start_soon(self._excuse_leavers, self.step_coordinator)
            await self._run_commits()

    async def _held(self) -> tuple[Held, ...]:
        found: tuple[Held, ...] = ()
        holding = self.step.holding
        bitmap = self._executor.ledger.bitmap
        if holding is not None:
            prepared = await self._executor.settle()
            bitmap = self._executor.ledger.bitmap
            found = (holding.reported(bitmap, prepared=prepared),)
        own = self._ranges[self.role.stage]
        others = [each for each in self._ranges if each != own]
        checkpoints, header, body = self._checkpoints, self._header, self.role.body
        return found + await held_on_disk(checkpoints, header, body, others, len(bitmap))

    async def _excuse_leavers(self, coordinator: StepCoordinator) -> None:
        await trio.sleep(REPORT_SECONDS)
        self._perform(coordinator.go_without_leavers())

    async def _hold(self, holding: Holding | None) -> Holding | None:
        """Return what this peer holds of its stage in the plan's lineage, at a first plan or a
        rollback after building it; None if it has to fetch."""
        first, last = self._ranges[self.role.stage]
        if holding is not None and holding.lineage == self._header.lineage:
            return holding if holding.range == (first, last) else None
        if self._header.from_step == 0:
            root = await self._executor.build(self._ranges, self.role.stage)
            return Holding(self._header.lineage, first, last, 0, root)
        return await self._hold_from_disk(first, last)

    async def _hold_from_disk(self, first: int, last: int) -> Holding | None:
        """Load the version that the plan goes back to, if this peer has written it: the one whose
        weights have the hashes that a certified plan names."""
        version, completed = self._header.from_step, self.role.body.completed
        if completed is None or completed.version != version:
            return None
        found = await read_states(self._checkpoints, version, first, last, completed=completed)
        if found is None:
            return None
        state_hash, states = found
        await self._executor.load(self._ranges, self.role.stage, version, states)
        return Holding(self._header.lineage, first, last, version, state_hash)

    # --- getting to the step in hand -----------------------------------------------------------

    async def _run_recovery(self) -> None:
        async for recover in self._recoveries:
            await self._recover(recover)
            self._watcher.on_step()

    async def _recover(self, recover: Recover) -> None:
        step, settlement = recover.step, recover.settlement
        fetch_state = recover.fetch_state
        if recover.commit is not None:
            await self._hand_over()  # the plan before may have ended meanwhile
            await self._commit(Apply(step - 1, recover.commit))
            held = self.step.holding
            same = held is not None and held.state_hash == settlement.state_hash
            fetch_state = settlement.state_hash != ANY_HASH and not same
        if fetch_state:
            await self._fetch_state(step, settlement)
        elif recover.discard:
            await self._executor.discard()
        if not recover.keep_gradient and not len(self._executor.ledger):
            await self._take_over()
        await self._hand_over()
        if recover.fetch_gradient:
            load = partial(self._executor.load_gradient, step)
            await self._fetch("gradient", step, settlement.prepared, b"", load)
        held = self.step.holding
        assert held is not None
        has_gradient = recover.fetch_gradient or recover.keep_gradient
        account = settlement.account if has_gradient else None
        if account is None:  # nor does what was reduced under the plan before
            await self._executor.begin_reduction()
        self._perform(self.step.recovered(held, account))
        if account is not None:
            self._perform(self.step.reduced(await self._executor.square_norms()))
        elif len(self._executor.ledger):
            self._perform(self.step.accounted(self._executor.ledger))
        self.pipeline.wake()

    async def _fetch_state(self, step: int, settlement: Settlement) -> None:
        wanted = b"" if settlement.state_hash == ANY_HASH else settlement.state_hash
        fetched = await self._load_from(settlement.donors, step, wanted)
        first, last = self._ranges[self.role.stage]
        listing = fetched.listing
        self.step.holding = Holding(
            self._header.lineage, first, last, step, listing.state_hash, listing.totals
        )
        log.info(
            "fetched stage=%d version=%d donors=%d", self.role.stage, step, len(fetched.donors)
        )

    async def _load_from(
        self, donors: Sequence[PeerId], version: int, state_hash: bytes
    ) -> Fetched:
        """Let the executor hold what donors give; what `step` holds is to be noted afterwards."""

        async def load(pieces: Mapping[int, Buffer]) -> None:
            self.step.holding = None
            await self._executor.load(self._ranges, self.role.stage, version, pieces)

        return await self._fetch("state", version, donors, state_hash, load)

    async def _fetch(
        self,
        kind: StateKind,
        version: int,
        donors: Sequence[PeerId],
        state_hash: bytes,
        take: Callable[[Mapping[int, Buffer]], Awaitable[None]],
    ) -> Fetched:
        """Fetch from the donors; they may have to commit first, so ask until they can.

        If they cannot for long, what they hold is not what they have reported: as work that is lost
        with them, that lets a repair follow, with new Reports."""
        first, last = self._ranges[self.role.stage]
        wanted = GetListing(
            kind=kind,
            lineage=self._header.lineage,
            version=version,
            first=first,
            last=last,
            state_hash=state_hash,
        )
        body, me = self.role.body, self.role.me.peer
        largest = largest_pieces(kind, body, me, self._replica.shape, self.role.stage)
        for attempt in itertools.count(1):
            try:
                return await fetch_into(take, self._links, donors, wanted, largest)
            except NobodyHas as fault:
                log.info("not fetched kind=%s version=%d reason=%r", kind, version, str(fault))
            if attempt % FRUITLESS_ATTEMPTS == 0:
                self._lose_work_with(donors)
            await trio.sleep(RETRY_SECONDS)
        raise AssertionError("it asks for ever")

    def _lose_work_with(self, donors: Sequence[PeerId]) -> None:
        generation, epoch = self._header.generation, self._header.epoch
        for donor in donors:
            log.error("gives nothing peer=%s", donor)
            for voter in self._header.council:
                if donor != self.role.me.peer:
                    lost = LostWork(generation=generation, epoch=epoch, peer=donor)
                    self._links.post(voter, lost)

    # --- committing ----------------------------------------------------------------------------

    async def _run_commits(self) -> None:
        async for apply in self._commits:
            await self._commit(apply)
            if apply.totals.verdict != "halt":
                await self._take_over()
            self._perform(self.step.applied(apply.totals))
            self._watcher.on_step()
            if self.step.state is ReplicaState.HALTED:
                self._watcher.on_trouble(_halt_reason(apply))
            self.pipeline.wake()
            await self._hand_over()

    async def _commit(self, apply: Apply) -> None:
        """Let the executor commit; what is held has changed then, whatever comes next."""
        totals = apply.totals
        await self._executor.commit(apply.step, totals)
        held = self.step.holding
        if held is not None and totals.verdict != "halt":
            self.step.holding = held.after(totals)
        if totals.loss is not None:
            self._watcher.on_loss(apply.step, totals.loss)
        log.info("committed step=%d verdict=%s loss=%s", apply.step, totals.verdict, totals.loss)

    # --- checkpoints ---------------------------------------------------------------------------

    async def _hand_over(self) -> None:
        """Let the writer copy what is held, if that is due; training goes on, the next commit
        waits."""
        held = self.step.holding
        if held is not None and held.lineage == self._header.lineage:
            await self._writer.take(held, self._executor)

    async def _take_over(self) -> None:
        """At a version that is due, take the bytes of the stage's first replica, if that computes
        on unlike hardware: else the two would drift apart, step by step. Nothing has been added
        up in the step yet. It is done again if the plan before ended meanwhile."""
        held, first = self.step.holding, self.role.group[0]
        if held is None or not self._writer.wants(held) or not self._is_unlike(first):
            return
        await self._load_from([first], held.version, held.state_hash)
        self.step.holding = held
        log.info("taken over version=%d from=%s", held.version, first)

    def _is_unlike(self, other: PeerId) -> bool:
        """Return whether another replica may compute other bits than this one."""
        if self._replica.training.execution.determinism == "exact":
            return False
        requests = {each: found.request for each, found in candidates_of(self.role.body).items()}
        return requests[self.role.me.peer].numerics != requests[other].numerics


def counted_tensors(shape: ModelShape, ranges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return how many tensors each stage counts in the norm: those of the buckets it owns."""
    counts = [0] * len(ranges)
    for bucket in buckets(shape, ranges):
        counts[bucket.stages[0]] += len(bucket.slots)
    return tuple(counts)


def _halt_reason(apply: Apply) -> str:
    totals = apply.totals
    flags = ", ".join(f"microbatch {flag.index} in layer {flag.layer}" for flag in totals.flags)
    text = f"step {apply.step}: non-finite numbers: {flags or 'in the sum of the gradients'}"
    return clip(text)
