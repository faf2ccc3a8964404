"""One peer's daemon: reads as a table of contents.

Listen, find the swarm, measure, join, work by the newest plan, until told to stop.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from protocol.connection import Received
from protocol.errors import RemoteProtocolError
from protocol.messages import (
    Commit,
    Durable,
    Forwarded,
    GetListing,
    GetManifest,
    GetState,
    Heartbeat,
    ManifestAnswer,
    Message,
    Probe,
    ProbeAnswer,
    Report,
    Resume,
    Training,
)
from protocol.packing import canonical
from protocol.records import (
    Manifest,
    Member,
    clip,
)
from protocol.signing import Identity, PeerId
from swarm.core.agreement import Agreement
from swarm.core.chain import Plan
from swarm.core.holding import Holding
from swarm.core.ledger import Ledger
from swarm.core.model import Profile, microbatch_seconds
from swarm.core.roles import Placing
from swarm.core.roll import records_of, stage_of, with_role, working_peers
from swarm.core.step import audience_of, workers_of
from swarm.errors import PeerError
from swarm.peer.applicant import Applicant
from swarm.peer.control import Control
from swarm.peer.discovery import Discovery
from swarm.peer.donor import Donor
from swarm.peer.epoch import Course, Epoch
from swarm.peer.forwarding import Forwarding
from swarm.peer.hosting import REPORT_SECONDS
from swarm.peer.leading import NOT_SETTLED
from swarm.peer.link import Answer
from swarm.peer.links import Links
from swarm.peer.plan_view import plan_of
from swarm.peer.probed import Probed
from swarm.peer.prober import Prober, Work
from swarm.peer.retiming import Retiming
from swarm.peer.state import gather_layers
from swarm.peer.status import status_of
from swarm.peer.writer import Writer
from swarm.ports import (
    Buffer,
    Checkpoints,
    DataSource,
    Dht,
    Solver,
    StageExecutor,
    Storage,
    Transport,
)

log = logging.getLogger(__name__)

MAX_EARLY_MESSAGES = 16
"""Of one peer."""
MAX_LOSSES = 1000
MAX_COMMITS = 100
MAX_EPOCHS_TOLD = 64
"""How many plans `swarm status` tells the course of."""


@dataclass(frozen=True, slots=True)
class Outside:
    """The adapters of one peer."""

    transport: Transport
    storage: Storage
    checkpoints: Checkpoints
    executor: StageExecutor
    source: DataSource | None
    """None where this peer has no data to feed."""
    start_dht: Callable[[tuple[str, ...]], Awaitable[Dht]]
    """Starts the DHT node, given multiaddresses of other members' nodes."""
    draw: Callable[[], float]
    """Returns a random number in [0, 1): it spreads what peers would do at the same time."""
    solver: Solver | None = None
    """None where no full solves are made: plans are greedy ones then."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a peer's owner decides about it."""

    addresses: tuple[str, ...] = ()
    """Where to look for the swarm; the founder needs none."""
    advertised_hosts: tuple[str, ...] = ()
    """Hosts under which others reach this peer; empty for the one that it listens on."""
    device: str = "cpu"
    host_label: str = ""
    wait_for_peers: int = 1
    stages: int = 0
    place: Placing | None = None
    """The rule by which members get stages: None for our own. Simulations compare others."""


class Daemon:
    """One peer, from its start to its end."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        agreement: Agreement,
        identity: Identity,
        boot: int,
        outside: Outside,
        settings: Settings,
    ) -> None:
        self.me = Member(identity.peer, boot)
        self.manifest = manifest
        self._outside = outside
        self._links = Links(
            transport=outside.transport,
            me=identity.peer,
            run=manifest.run,
            boot=boot,
            receiver=self,
        )
        self.control = Control(
            manifest=manifest,
            identity=identity,
            agreement=agreement,
            me=self.me,
            storage=outside.storage,
            links=self._links,
            on_plan=lambda plan: self._note(),
            wait_for_peers=settings.wait_for_peers,
            stages=settings.stages,
            solver=outside.solver,
            place=settings.place,
        )
        self.discovery = Discovery(
            manifest=manifest,
            me=self.me,
            links=self._links,
            advertised_hosts=settings.advertised_hosts,
            host_label=settings.host_label,
        )
        self.prober = Prober(
            run=manifest.run,
            me=self.me,
            identity=identity,
            links=self._links,
            peers=self._known_peers,
            listeners=self.control.vigil.guides,
            rtt_seconds=self.control.members.rtt_seconds,
            pace=lambda: self.control.roster.pace,
            is_busy=lambda: self._is_training() or self._probed.is_serving,
            work=self._work_done,
            on_estimates=self.control.roster.measured,
            draw=outside.draw,
        )
        self._retiming = Retiming(
            outside.executor.profile, self._is_without_work, self.prober.retimed
        )
        self._probed = Probed(
            self._links, is_busy=lambda: self._is_training() or self.prober.is_probing
        )
        self._applicant = Applicant(
            identity=identity,
            control=self.control,
            links=self._links,
            discovery=self.discovery,
            addresses=settings.addresses,
            device=settings.device,
            draw=outside.draw,
            prober=self.prober,
        )
        self._forwarding = Forwarding(
            run=manifest.run,
            me=self.me,
            identity=identity,
            links=self._links,
            relay_to=self.control.vigil.relay_to,
        )
        self._writer = Writer(
            outside.checkpoints,
            manifest.training,
            completed=self._completed_version,
            on_written=self._tell_durable,
        )
        self._donor = Donor(outside.executor, outside.checkpoints, lambda: self.holding)
        self._profile: Profile | None = None
        self._epoch: Epoch | None = None
        self._holding: Holding | None = None
        self._samples_before = 0
        self._replayed_before = 0
        self._losses: deque[tuple[int, float]] = deque(maxlen=MAX_LOSSES)
        """(step, mean loss) of the last steps that this peer committed."""
        self._commits: deque[tuple[int, float]] = deque(maxlen=MAX_COMMITS)
        """(step, when) of the last steps that this peer committed by the active plan."""
        self._courses: deque[Course] = deque(maxlen=MAX_EPOCHS_TOLD)
        self._news = trio.Event()
        self._early: list[tuple[PeerId, Training, Buffer]] = []
        self._told_newest: set[tuple[PeerId, int, int]] = set()
        self._stands_still: tuple[tuple[object, ...], float] | None = None
        """Where the step in hand is, without whom, and since when."""
        self._known: frozenset[PeerId] = frozenset()
        self._known_by: tuple[object, object, int] = (None, None, 0)
        """For which table, plan and links they were known."""
        self._stop = trio.Event()

    @property
    def holding(self) -> Holding | None:
        """Return what the executor holds now."""
        return self._epoch.holding if self._epoch is not None else self._holding

    # --- life ------------------------------------------------------------------------------

    async def run(self, *, ready: Callable[[str], None]) -> None:
        """Live until `stop`; call `ready` with the bound address once peers can connect.

        Raises AddressError, ModelError, DataError, DhtError, JoinError for what keeps this peer
        from taking part."""
        async with trio.open_nursery() as nursery:
            discovery = self.discovery
            discovery.listen = await nursery.start(self._listen)
            self._links.know(self.me.peer, discovery.addresses())
            dht = await self._outside.start_dht(self.control.dht_addresses())
            discovery.dht = dht
            try:
                ready(discovery.listen)
                nursery.start_soon(discovery.run, dht)
                nursery.start_soon(self.control.run)
                nursery.start_soon(self._take_part)
                nursery.start_soon(self.control.run_heartbeats, self._heartbeat)
                nursery.start_soon(self.control.run_leader_beats)
                nursery.start_soon(self.control.run_attention, self._awaits)
                nursery.start_soon(self.control.run_first_tables)
                await self._stop.wait()
                self.control.stop()
                await self._links.say_goodbye()
            finally:
                with trio.CancelScope(shield=True):
                    await dht.aclose()
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        """Say Goodbye and end `run`."""
        self._stop.set()

    async def _listen(self, task_status: trio.TaskStatus[str]) -> None:
        await self._links.run(started=task_status.started)

    async def _take_part(self) -> None:
        """Measure, then be a member, and work by one plan after the other."""
        self._applicant.phase = "measuring"
        began = trio.current_time()
        profile = await self._outside.executor.profile()
        taken = trio.current_time() - began
        self.control.layers = len(profile.layers)
        self._profile = profile
        digest = b""
        if self._outside.source is not None:
            digest = await self._outside.source.digest()
        self._applicant.phase = "standby"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                self._applicant.stay_member,
                profile,
                digest,
                lambda: self._outside.executor.task_seconds,
            )
            nursery.start_soon(self.prober.run)
            nursery.start_soon(self._retiming.run, profile, taken)
            nursery.start_soon(self._writer.run)
            while True:
                await self._work(profile)

    async def _watch_resume(self, epoch: Epoch) -> None:
        """Say so when a plan's Reports, or its Resume, are missing for too long."""
        while epoch.is_replica and not epoch.has_resumed:
            await trio.sleep(self.control.roster.pace.moment_seconds)
            is_late = epoch.awaits_seconds > REPORT_SECONDS
            if is_late and self._active.key == self.control.plan.key:
                self.control.vigil.owed(epoch.awaits, by_coordinator=epoch.is_step_coordinator)

    async def _next_news(self) -> None:
        """Wait until there is a newer plan, a step has been committed, or a link has ended."""
        self._news = trio.Event()
        await self._news.wait()

    def _note(self) -> None:
        self._news.set()
        epoch = self._epoch
        state = epoch.state if epoch is not None else ""
        settled = state not in NOT_SETTLED
        self.control.tell((self._active.key, settled, state == "ready", epoch is not None))

    async def _work(self, profile: Profile) -> None:
        """Work by one plan until the next one is to be activated."""
        plan = self.control.plan
        self._told_newest.clear()
        self._commits.clear()
        self.control.activate(plan)
        working = plan.body.stages and not plan.body.ended and not plan.body.halted
        self._leave_epoch()
        if working:
            self._epoch = Epoch(
                plan=plan,
                me=self.me,
                training=self.manifest.training,
                shape=profile.shape,
                executor=self._outside.executor,
                source=self._outside.source,
                links=self._links,
                checkpoints=self._outside.checkpoints,
                writer=self._writer,
                holding=self._holding,
                on_trouble=self.control.report_trouble,
                on_step=self._note,
                on_loss=self._committed,
            )
            self._courses.append(self._epoch.course)
            self._epoch.course.agree_seconds = self.control.agree_seconds
        async with trio.open_nursery() as nursery:
            if self._epoch is not None:
                nursery.start_soon(self._epoch.run)
                nursery.start_soon(self._watch_resume, self._epoch)
                self._hand_over_early()
            while not self._is_time_for(self.control.plan):
                if self._epoch is not None and self.control.plan.key != plan.key:
                    self._epoch.end_before(self.control.plan.header.from_step)
                await self._next_news()
            nursery.cancel_scope.cancel()

    def _committed(self, step: int, loss: float) -> None:
        self._losses.append((step, loss))
        self._commits.append((step, trio.current_time()))

    def _completed_version(self) -> int:
        completed = self.control.plan.body.completed
        return completed.version if completed is not None else 0

    def _tell_durable(self) -> None:
        if self._epoch is not None:
            self._epoch.tell_durable()

    def _leave_epoch(self) -> None:
        """What is held outlives the plan; nothing else does."""
        if self._epoch is None:
            return
        self._holding = self._epoch.holding
        self._samples_before += self._epoch.samples
        self._replayed_before += self._epoch.replayed
        self._epoch = None

    @property
    def _active(self) -> Plan:
        return self.control.agreement.active

    def _is_time_for(self, newest: Plan) -> bool:
        """Return whether the newest plan is to be activated now.

        A repair, or an end, is at once. A planned change waits for the step before it: a replica
        until it has committed that, who is promoted until it holds its version, and who only
        feeds or stands by until the newest plan's Resume."""
        epoch, header = self._epoch, newest.header
        if newest.key == self._active.key:
            return False
        if epoch is None or header.kind == "repair" or newest.body.ended or newest.body.halted:
            return True
        role = self.me in stage_of(newest.body)
        if epoch.is_replica or (role and epoch.stage >= 0):
            holding = epoch.holding
            return holding is not None and holding.version >= header.from_step
        if role or self.me.peer not in audience_of(self._active.body):
            return True
        return any(isinstance(message, Resume) for _, message, _ in self._early)

    # --- what arrives (links.Receiver) -----------------------------------------------------

    def check_payload(self, peer: PeerId, message: Message) -> None:
        """Refuse tensors that the active plan does not ask for, before memory is taken.

        Those of another plan are bounded by the connection's cap; `handle` drops or keeps them.
        """
        epoch = self._epoch
        if isinstance(message, Probe):
            self._probed.check_payload(message)
        if isinstance(message, Training) and epoch is not None and epoch.works_by(message.fence):
            epoch.check_payload(message)

    async def handle(self, peer: PeerId, boot: int, received: Received, answer: Answer) -> None:
        """Take in one message (links.Receiver.handle)."""
        match received.message:
            case GetManifest(id=number):
                answer(ManifestAnswer(id=number, manifest=canonical(self.manifest)), ())
            case GetListing() as message:
                self._links.start_soon(self._donor.list, message, answer)
            case GetState() as message:
                self._links.start_soon(self._donor.piece, message, answer)
            case Forwarded() as message:
                await self._handle_forwarded(peer, message, answer)
            case Training() as message:
                if received.frame_bytes:  # it has come by a link, and by no other peer
                    self.control.hear_work(peer, boot)
                self._handle_training(peer, boot, message, received.payload)
            case Probe() as message:
                self._probed.take(peer, message)
            case ProbeAnswer() as message:
                self.prober.take_answer(peer, message)
            case message:
                self.control.handle(peer, boot, message, answer)

    def opened(self, peer: PeerId, boot: int) -> None:
        """A link can be used (links.Receiver.opened)."""
        self.control.vigil.opened(peer, boot)
        self.prober.opened(peer)
        if self._epoch is not None:
            self._epoch.opened(peer)

    def lost(self, peer: PeerId, reason: str) -> None:
        """A link has ended (links.Receiver.lost): what two workers had on it may be lost."""
        self.control.vigil.lost(peer, reason)
        if self._works_with(peer):
            self.control.vigil.report_lost_work(peer)
        self._note()

    def _works_with(self, peer: PeerId) -> bool:
        workers = working_peers(self._active.body)
        return peer in workers and self.me.peer in workers and self._epoch is not None

    def unreachable(self, fault: PeerError, waiting: Sequence[Message]) -> None:
        """A peer could not be dialled (links.Receiver.unreachable)."""
        self.control.vigil.unreachable(fault)
        undelivered = [each for each in waiting if not self._forwarding.send(fault.peer, each)]
        if any(isinstance(each, Training) for each in undelivered) and self._works_with(fault.peer):
            self.control.vigil.report_lost_work(fault.peer)

    async def _handle_forwarded(self, sender: PeerId, message: Forwarded, answer: Answer) -> None:
        bodies = self.control.plan.body, self._active.body
        known = frozenset().union(*(records_of(body) for body in bodies))
        taken = self._forwarding.take(sender, message, known)
        if taken is None:
            return
        source, inner = taken
        received = Received(inner, memoryview(b""))
        try:
            await self.handle(source.peer, source.boot, received, answer)
        except RemoteProtocolError as fault:  # not the fault of whoever passes it on
            log.warning("forwarded message refused peer=%s fault=%r", source.peer, str(fault))

    def _handle_training(self, peer: PeerId, boot: int, message: Training, payload: Buffer) -> None:
        """Fence: only what was said by the active plan, by a start of a peer that it names."""
        fence = message.fence
        if fence.boot != boot:
            raise RemoteProtocolError(f"fence of boot {fence.boot} on a link of boot {boot}")
        active, newest = self._active, self.control.plan
        said = (fence.generation, fence.epoch)
        if said < active.key:
            self._refuse_stale(peer, boot, message)
        elif said > active.key:
            if said > newest.key:
                self._links.start_soon(self.control.catch_up, peer)
            self._keep_early(peer, message, payload)
        elif not self._has_role(Member(peer, boot)):
            raise RemoteProtocolError(f"boot {boot} of {peer} has no role in epoch {fence.epoch}")
        elif isinstance(message, Durable):
            self.control.handle_durable(peer, message)
        elif self._epoch is None:
            self._keep_early(peer, message, payload)
        else:
            self._epoch.handle(peer, message, payload)

    def _refuse_stale(self, peer: PeerId, boot: int, message: Training) -> None:
        """Answer what was said by an older plan with the newest certificate, once."""
        epoch, newest = message.fence.epoch, self.control.plan.header.epoch
        log.info("stale peer=%s message=%s epoch=%d", peer, type(message).__name__, epoch)
        if (peer, boot, newest) not in self._told_newest and not self.control.is_being_told:
            self._told_newest.add((peer, boot, newest))
            self.control.send_newest(peer)

    def _has_role(self, member: Member) -> bool:
        return member in with_role(self._active.body)

    def _keep_early(self, peer: PeerId, message: Training, payload: Buffer) -> None:
        """Keep a message of a plan that this peer does not work by yet.

        Only what the others may say before this peer has reported can be early."""
        kept = sum(sender == peer for sender, _, _ in self._early)
        may_be_early = isinstance(message, Report | Resume | Commit | Durable)
        if not may_be_early or kept >= MAX_EARLY_MESSAGES:
            raise RemoteProtocolError(
                f"{type(message).__name__} of epoch {message.fence.epoch} at epoch "
                f"{self._active.header.epoch}, {kept} messages of this peer wait"
            )
        self._early.append((peer, message, payload))
        self._note()

    def _hand_over_early(self) -> None:
        early, self._early = self._early, []
        for peer, message, payload in early:
            try:
                self._handle_training(peer, message.fence.boot, message, payload)
            except RemoteProtocolError as fault:
                log.warning("early message dropped peer=%s fault=%r", peer, str(fault))

    # --- what is measured ------------------------------------------------------------------

    def _is_training(self) -> bool:
        """Return whether this peer computes for the swarm, or measures its machine."""
        epoch = self._epoch
        return not self.control.measured.is_set() or (epoch is not None and epoch.is_training)

    def _known_peers(self) -> frozenset[PeerId]:
        """Return whom this peer may work with: members, those who ask to become some, as the leader
        tells, and whoever has a link. Only those that can be found."""
        table, body = self.control.table, self.control.plan.body
        before = self._known_by
        if before[0] is table and before[1] is body and before[2] == self._links.changes:
            return self._known
        for view in table if before[0] is not table else ():
            if view.address and not self._links.address_of(view.peer):
                self._links.know(view.peer, (view.address,))
        members = records_of(body)  # the plan says where they are
        others = {*(view.peer for view in table), *self._links.connected()} - members.keys()
        found = {each for each in others if self._links.address_of(each)}
        self._known = frozenset(found | members.keys()) - {self.me.peer}
        self._known_by = table, body, self._links.changes
        return self._known

    def _work_done(self) -> Work | None:
        """Return what this peer has computed by the active plan, and what it expected."""
        epoch = self._epoch
        if epoch is None or self._profile is None or not epoch.is_replica:
            return None
        stage = self._active.body.stages[epoch.stage]
        layers = self._profile.layers[stage.first : stage.last]
        return Work(
            plan=self._active.key,
            compute_seconds=epoch.compute_seconds,
            microbatches=epoch.computed,
            profiled_seconds=microbatch_seconds(layers),
        )

    def _is_without_work(self) -> bool:
        return self._epoch is None or not self._epoch.is_replica

    # --- what others ask -------------------------------------------------------------------

    def _heartbeat(self, rtt_seconds: float, trouble: str) -> Heartbeat:
        epoch, control = self._epoch, self.control
        newest, active = control.plan.header, self._active.header
        lost_version = epoch.lost_version if epoch is not None else None
        awaits, awaits_seconds = self._awaits()
        return Heartbeat(
            generation=newest.generation,
            epoch=newest.epoch,
            active_epoch=active.epoch if active.generation == newest.generation else 0,
            term=control.agreement.term if control.leader is not None else 0,
            boot=self.me.boot,
            state=epoch.state if epoch is not None else self._applicant.phase,
            stage=epoch.stage if epoch is not None else -1,
            lineage=active.lineage,
            version=epoch.version if epoch is not None else 0,
            loss=self._losses[-1][1] if self._losses else None,
            ledger_size=len(self.ledger),
            queue_length=epoch.queue_length if epoch is not None else 0,
            samples=self._samples_before + (epoch.samples if epoch is not None else 0),
            compute_seconds=self._outside.executor.compute_seconds,
            rtt_seconds=rtt_seconds,
            traffic=self._links.traffic.snapshot(),
            suspects=control.members.suspects,
            awaits=awaits,
            awaits_seconds=awaits_seconds,
            task_seconds=self._outside.executor.task_seconds,
            rollback=lost_version if lost_version is not None else -1,
            trouble=clip(trouble),
        )

    def _awaits(self) -> tuple[tuple[PeerId, ...], float]:
        """Return who owes this peer what it cannot go on without, and for how long.

        While its step stands still these are the workers whom it does not hear though others may:
        such a link does not break, and nobody else can notice; or else those that owe it something
        in a reduction, or to commit, once that has had the time to get here."""
        epoch, now = self._epoch, trio.current_time()
        if epoch is None or epoch.awaits or not epoch.is_replica:
            return (epoch.awaits, epoch.awaits_seconds) if epoch is not None else ((), 0.0)
        workers = workers_of(self._active.body)
        unheard = tuple(peer for peer in self.control.members.suspects if peer in workers)
        awaits = unheard or epoch.awaits_in_step
        at = (*self._active.key, epoch.version, epoch.state, len(self.ledger), awaits)
        if self._stands_still is None or self._stands_still[0] != at:
            self._stands_still = at, now
        due = self._stands_still[1] + (0.0 if unheard else epoch.transfer_seconds)
        return awaits, max(0.0, now - due) if awaits else 0.0

    def plan(self) -> dict[str, object]:
        """Return the newest plan and why it is as it is (docs/cli.md)."""
        return plan_of(
            self.control.plan,
            self.manifest.training,
            self.control.roster.estimates,
            tuple(self._commits),
        )

    async def fresh_status(self) -> dict[str, object]:
        """Return what `swarm status --json` prints: what the leader sees of the members is asked
        for now."""
        await self.control.refresh_table()
        return self.status()

    def status(self) -> dict[str, object]:
        """Return the same with the members as this peer asked last."""
        return status_of(
            self.control,
            self._epoch,
            own_traffic=self._links.traffic.snapshot(),
            phase=self._applicant.phase,
            disk_trouble=self._writer.trouble,
            listen=self.discovery.listen,
            losses=tuple(self._losses),
            courses=tuple(self._courses),
            replayed=self._replayed_before + (self._epoch.replayed if self._epoch else 0),
            dht={
                "addresses": list(self.discovery.dht_addresses()),
                "published": self.discovery.is_published,
                "peers_found": [record.peer for record in self.discovery.found],
            },
        )

    @property
    def ledger(self) -> Ledger:
        """Return the ledger of the step in hand."""
        return self._outside.executor.ledger

    async def layers(self) -> tuple[list[Buffer], list[PeerId]]:
        """Return all layers of the completed version, and who gave each. Raises ExportError."""
        plan = self.control.plan
        return await gather_layers(
            self._links, self._outside.checkpoints, plan.body, plan.header.lineage
        )
