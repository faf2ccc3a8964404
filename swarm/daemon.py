"""One peer's daemon: reads as a table of contents.

Listen, find the swarm, measure, join, work by the newest plan, until told to stop.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from protocol.connection import Received
from protocol.errors import RemoteProtocolError
from protocol.messages import (
    Certified,
    Durable,
    GetChain,
    GetManifest,
    GetState,
    Heartbeat,
    Join,
    LeaderBeat,
    ManifestAnswer,
    Message,
    Ping,
    Pong,
    Report,
    Resume,
    Training,
)
from protocol.packing import canonical
from protocol.records import (
    JOIN_REQUEST_PURPOSE,
    PEER_RECORD_PURPOSE,
    JoinRequest,
    Manifest,
    Member,
    PeerRecord,
    Signed,
    clip,
    sign_record,
)
from protocol.signing import Identity, PeerId
from swarm.core.agreement import Agreement, Plan
from swarm.core.ledger import Ledger
from swarm.core.model import Profile
from swarm.core.planning import Candidate
from swarm.errors import JoinError, PeerError
from swarm.peer.control import Control
from swarm.peer.epoch import Epoch
from swarm.peer.joining import JOIN_SECONDS, RETRY_SECONDS, find_swarm, join
from swarm.peer.link import Answer
from swarm.peer.links import Links
from swarm.peer.state import gather_layers, serve_state
from swarm.peer.status import status_of
from swarm.ports import (
    Buffer,
    Checkpoints,
    DataSource,
    Dht,
    StageExecutor,
    Storage,
    Transport,
)

log = logging.getLogger(__name__)

FIRST_PUBLISH_SECONDS, PUBLISH_SECONDS = 1.0, 30.0
MAX_EARLY_MESSAGES = 4
"""Of one peer."""


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


def with_port(hosts: Sequence[str], listen: str) -> tuple[str, ...]:
    """Return HOST:PORT for every host, with the port of `listen`."""
    port = listen.rpartition(":")[2]
    return tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)


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
        self.listen = ""
        self.manifest = manifest
        self.identity = identity
        self._outside = outside
        self._settings = settings
        self._links = Links(
            transport=outside.transport,
            me=identity.peer,
            run=manifest.run,
            boot=boot,
            receiver=self,
        )
        self.control = Control(
            manifest=manifest,
            agreement=agreement,
            me=self.me,
            storage=outside.storage,
            links=self._links,
            on_plan=self._note_plan,
            wait_for_peers=settings.wait_for_peers,
            stages=settings.stages,
        )
        self._dht: Dht | None = None
        self._profile: Profile | None = None
        self._epoch: Epoch | None = None
        self._phase = "starting"
        self._samples_before = 0
        self._news = trio.Event()
        self._early: list[tuple[PeerId, Training, Buffer]] = []
        self._record_sequence = 0
        self._told_newest: set[tuple[PeerId, int, int]] = set()
        self._published = False
        self._found: list[PeerRecord] = []
        self._stop = trio.Event()

    # --- life ------------------------------------------------------------------------------

    async def run(self, *, ready: Callable[[str], None]) -> None:
        """Live until `stop`; call `ready` with the bound address once peers can connect.

        Raises AddressError, ModelError, DataError, DhtError, JoinError for what keeps this peer
        from taking part."""
        async with trio.open_nursery() as nursery:
            self.listen = await nursery.start(self._listen)
            self._links.know(self.me.peer, self.addresses())
            self._dht = await self._outside.start_dht(self.control.dht_addresses())
            try:
                ready(self.listen)
                nursery.start_soon(self._publish, self._dht)
                nursery.start_soon(self._take_part)
                nursery.start_soon(self.control.run_heartbeats, self._heartbeat)
                nursery.start_soon(self.control.run_leader_beats)
                await self._stop.wait()
                await self._links.say_goodbye()
            finally:
                with trio.CancelScope(shield=True):
                    await self._dht.aclose()
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        """Say Goodbye and end `run`."""
        self._stop.set()

    async def _listen(self, task_status: trio.TaskStatus[str]) -> None:
        await self._links.run(started=task_status.started)

    async def _take_part(self) -> None:
        """Measure, join, then work by one plan after the other."""
        self._phase = "measuring"
        self._profile = await self._outside.executor.profile()
        self.control.layers = len(self._profile.layers)
        digest = b""
        if self._outside.source is not None:
            digest = await trio.to_thread.run_sync(self._outside.source.digest)
        if not self.control.plan.body.ended:
            await self._become_member(self._profile, digest)
        self._phase = "standby"
        while True:
            await self._work(self._profile)

    async def _become_member(self, profile: Profile, digest: bytes) -> None:
        """Join, and again whenever the leader is lost before the first plan: it forgets then."""
        while True:
            self._phase = "joining"
            await self._join(profile, digest)
            self._phase = "waiting for peers"
            while self.control.plan.header.epoch == 0 and self._reaches_leader():
                await self._next_news()
            if self.control.plan.header.epoch > 0:
                return

    def _reaches_leader(self) -> bool:
        return self.control.is_leader or self.control.leader in self._links.connected()

    async def _next_news(self) -> None:
        """Wait until there is a newer plan or a link has ended."""
        self._news = trio.Event()
        await self._news.wait()

    async def _work(self, profile: Profile) -> None:
        """Work by the newest plan until there is a newer one."""
        plan = self.control.plan
        working = plan.body.stages and not plan.body.ended and not plan.body.halted
        if working:
            self._samples_before += self._epoch.samples if self._epoch is not None else 0
            self._epoch = Epoch(
                plan=plan,
                me=self.me,
                training=self.manifest.training,
                shape=profile.shape,
                executor=self._outside.executor,
                source=self._outside.source,
                links=self._links,
                checkpoints=self._outside.checkpoints,
                on_trouble=self.control.report_trouble,
            )
        async with trio.open_nursery() as nursery:
            if working and self._epoch is not None:
                nursery.start_soon(self._epoch.run)
                self._hand_over_early()
            while self.control.plan is plan:
                await self._next_news()
            nursery.cancel_scope.cancel()

    def _note_plan(self, plan: Plan) -> None:
        self._news.set()

    # --- joining ---------------------------------------------------------------------------

    async def _join(self, profile: Profile, digest: bytes) -> None:
        record = sign_record(self.identity, PEER_RECORD_PURPOSE, self._record())
        request = JoinRequest(
            run=self.manifest.run,
            peer=self.me.peer,
            boot=self.me.boot,
            epoch=self.control.plan.header.epoch,
            device=self._settings.device,
            layers=profile.layers,
            memory_bytes=profile.memory_bytes,
            numerics=profile.numerics,
            data_digest=digest,
        )
        signed = sign_record(self.identity, JOIN_REQUEST_PURPOSE, request)
        if self.manifest.founder == self.me.peer:
            self.control.join_myself(Candidate(record, request))
            return
        await self._join_others(record, signed)

    async def _join_others(self, record: Signed, request: Signed) -> None:
        fault: PeerError | None = None
        first: PeerId | None = None
        with trio.move_on_after(JOIN_SECONDS):
            while True:
                try:
                    if first not in self._links.connected():
                        known = [each.peer for each in await self._look_up()]
                        first = await find_swarm(self._links, self._settings.addresses, known)
                    await join(self._links, first, record, request)
                    return self.control.joined()
                except PeerError as error:
                    fault = error
                await trio.sleep(RETRY_SECONDS)
        raise JoinError(
            f"cannot join run {self.manifest.run.hex()[:16]}…: nobody took us in "
            f"within {JOIN_SECONDS:g} s",
            evidence=(fault.reason,) if fault is not None else (),
            hint="ask a running peer for a fresh invitation with `swarm invite`",
        )

    # --- discovery -------------------------------------------------------------------------

    def _record(self) -> PeerRecord:
        self._record_sequence += 1
        return PeerRecord(
            run=self.manifest.run,
            peer=self.me.peer,
            boot=self.me.boot,
            addresses=self.addresses(),
            dht_addresses=self.dht_addresses(),
            sequence=self._record_sequence,
            host_label=self._settings.host_label,
        )

    async def _publish(self, dht: Dht) -> None:
        """Say where this peer is and see who else is there: often at first, then now and then."""
        pause = FIRST_PUBLISH_SECONDS
        while True:
            self._published = await dht.publish(self._record())
            if not self._published:
                log.warning("dht publish failed")
            await self._look_up()
            await trio.sleep(pause)
            pause = min(2 * pause, PUBLISH_SECONDS)

    async def _look_up(self) -> list[PeerRecord]:
        """Ask the DHT who is where, and remember it."""
        if self._dht is None:
            return []
        found = await self._dht.lookup()
        self._found = [record for record in found if record.peer != self.me.peer]
        for record in self._found:
            self._links.know_record(record)
        return self._found

    # --- what arrives (links.Receiver) -----------------------------------------------------

    def check_payload(self, peer: PeerId, message: Message) -> None:
        """Refuse tensors that the active plan does not ask for, before memory is taken.

        Those of another plan are bounded by the connection's cap; `handle` drops or keeps them.
        """
        epoch = self._epoch
        if isinstance(message, Training) and epoch is not None and epoch.works_by(message.fence):
            epoch.check_payload(message)

    async def handle(self, peer: PeerId, boot: int, received: Received, answer: Answer) -> None:
        """Take in one message (links.Receiver.handle)."""
        match received.message:
            case Ping(number=number):
                self._links.post(peer, Pong(number=number))
            case Pong() as message:
                self.control.members.pong(peer, message)
            case Heartbeat() as message:
                self.control.handle_heartbeat(peer, message)
            case LeaderBeat() as message:
                self.control.handle_leader_beat(peer, message)
            case Certified() as message:
                self.control.handle_certified(peer, message)
            case GetChain() as message:
                self.control.handle_get_chain(message, answer)
            case GetManifest(id=number):
                answer(ManifestAnswer(id=number, manifest=canonical(self.manifest)), ())
            case Join() as message:
                self.control.handle_join(peer, message, answer)
            case GetState() as message:
                self._links.start_soon(serve_state, self._outside.checkpoints, message, answer)
            case Training() as message:
                self._handle_training(peer, boot, message, received.payload)
            case other:
                raise RemoteProtocolError(f"{type(other).__name__} is not expected here")

    def lost(self, peer: PeerId, reason: str) -> None:
        """A link has ended (links.Receiver.lost)."""
        self.control.lost(peer, reason)
        self._news.set()

    def _handle_training(self, peer: PeerId, boot: int, message: Training, payload: Buffer) -> None:
        """Fence: only what was said by the active plan, by a start of a peer that it names."""
        fence = message.fence
        if fence.boot != boot:
            raise RemoteProtocolError(f"fence of boot {fence.boot} on a link of boot {boot}")
        newest = self.control.plan.header
        said = (fence.generation, fence.epoch)
        if said < (newest.generation, newest.epoch):
            log.warning(
                "stale peer=%s message=%s epoch=%d", peer, type(message).__name__, fence.epoch
            )
            if (peer, boot, newest.epoch) not in self._told_newest:
                self._told_newest.add((peer, boot, newest.epoch))
                self.control.send_newest(peer)
        elif said > (newest.generation, newest.epoch):
            self._links.start_soon(self.control.fetch_chain, peer)
            self._keep_early(peer, message, payload)
        elif not self._is_worker(Member(peer, boot)):
            raise RemoteProtocolError(f"boot {boot} of {peer} has no role in epoch {fence.epoch}")
        elif isinstance(message, Durable):
            self.control.handle_durable(peer, message)
        elif self._epoch is None or self._epoch.plan.header.epoch != fence.epoch:
            self._keep_early(peer, message, payload)
        else:
            self._epoch.handle(peer, message, payload)

    def _is_worker(self, member: Member) -> bool:
        body = self.control.plan.body
        return any(member in stage.replicas for stage in body.stages) or any(
            member == feeder.member for feeder in body.feeders
        )

    def _keep_early(self, peer: PeerId, message: Training, payload: Buffer) -> None:
        """Keep a message of a plan that this peer does not work by yet.

        Only what the others may say before this peer has reported can be early."""
        kept = sum(sender == peer for sender, _, _ in self._early)
        if not isinstance(message, Report | Resume) or kept >= MAX_EARLY_MESSAGES:
            raise RemoteProtocolError(
                f"{type(message).__name__} of epoch {message.fence.epoch} at epoch "
                f"{self.control.plan.header.epoch}, {kept} messages of this peer wait"
            )
        self._early.append((peer, message, payload))

    def _hand_over_early(self) -> None:
        early, self._early = self._early, []
        for peer, message, payload in early:
            try:
                self._handle_training(peer, message.fence.boot, message, payload)
            except RemoteProtocolError as fault:
                log.warning("early message dropped peer=%s fault=%r", peer, str(fault))

    # --- what others ask -------------------------------------------------------------------

    def _heartbeat(self, rtt_seconds: float, trouble: str) -> Heartbeat:
        epoch = self._epoch
        return Heartbeat(
            epoch=self.control.plan.header.epoch,
            boot=self.me.boot,
            state=epoch.state if epoch is not None else self._phase,
            stage=epoch.role.stage if epoch is not None and epoch.role is not None else -1,
            version=epoch.version if epoch is not None else 0,
            loss=epoch.loss if epoch is not None else None,
            ledger_size=len(self.ledger),
            queue_length=epoch.queue_length if epoch is not None else 0,
            samples=self._samples_before + (epoch.samples if epoch is not None else 0),
            compute_seconds=self._outside.executor.compute_seconds,
            rtt_seconds=rtt_seconds,
            traffic=self._links.traffic.snapshot(),
            suspects=self.control.members.suspects(self.control.plan.body),
            trouble=clip(trouble),
        )

    def status(self) -> dict[str, object]:
        """Return what `swarm status --json` prints."""
        return status_of(
            self.control,
            self._epoch,
            own_traffic=self._links.traffic.snapshot(),
            phase=self._phase,
            listen=self.listen,
            dht={
                "addresses": list(self.dht_addresses()),
                "published": self._published,
                "peers_found": [record.peer for record in self._found],
            },
        )

    @property
    def ledger(self) -> Ledger:
        """Return the ledger of the step in hand."""
        return self._outside.executor.ledger

    def addresses(self) -> tuple[str, ...]:
        """Return the HOST:PORTs under which others reach this peer."""
        return with_port(self._settings.advertised_hosts, self.listen) or (self.listen,)

    def dht_addresses(self) -> tuple[str, ...]:
        """Return the multiaddresses of this peer's DHT node."""
        return self._dht.addresses if self._dht is not None else ()

    async def layers(self) -> tuple[list[Buffer], list[PeerId]]:
        """Return all layers of the completed version, and who gave each. Raises ExportError."""
        return await gather_layers(self._links, self._outside.checkpoints, self.control.plan.body)
