"""Membership and agreement: who is in the swarm, and which plan it works by.

Drives `core.agreement`, answers joiners, keeps the leader informed and everybody informed by
the leader. The leader is the council's only voter. The rule: hard state is on disk before
anything that relies on it is sent.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

from protocol.errors import RemoteProtocolError
from protocol.messages import (
    Certified,
    ChainAnswer,
    Durable,
    GetChain,
    Heartbeat,
    Join,
    JoinAnswer,
    LeaderBeat,
    MemberView,
    Ping,
    Pong,
)
from protocol.packing import canonical
from protocol.records import (
    PEER_RECORD_PURPOSE,
    Completed,
    Manifest,
    Member,
    PeerRecord,
    PlanBody,
    decode_record,
    open_signed,
)
from protocol.signing import Identity, PeerId
from swarm.core.agreement import (
    Adopted,
    Agreement,
    Announce,
    Effect,
    FetchChain,
    HardState,
    Persist,
    Plan,
)
from swarm.core.planning import Candidate, completing_plan, first_plan, halting_plan
from swarm.core.step import replicas_of
from swarm.core.verification import check_join, check_plan, refusal_of
from swarm.errors import NoFeasiblePlan, PeerError
from swarm.peer.joining import NOT_YET
from swarm.peer.links import Answer, Links
from swarm.ports import Storage

log = logging.getLogger(__name__)

HARD_STATE = "agreement"
HEARTBEAT_SECONDS = 1.0
LEADER_BEAT_SECONDS = 0.5
SUSPICION_SECONDS = 15.0


@dataclass
class _Seen:
    """What the leader last heard of a member."""

    heartbeat: Heartbeat
    at: float
    samples: list[tuple[float, int]] = field(default_factory=list)


class Control:
    """One peer's part in membership and agreement."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        identity: Identity,
        boot: int,
        storage: Storage,
        links: Links,
        on_plan: Callable[[Plan], None],
        wait_for_peers: int,
        stages: int,
    ) -> None:
        """Continue from the hard state on disk. `wait_for_peers` and `stages` matter to the
        founder only: how many peers the first plan waits for, and its number of stages."""
        self.manifest = manifest
        self.me = Member(identity.peer, boot)
        self.beat: LeaderBeat | None = None
        self._storage = storage
        self._links = links
        self._on_plan = on_plan
        self._wait_for_peers = wait_for_peers
        self._stages = stages
        saved = storage.load(HARD_STATE)
        state = decode_record(saved, HardState) if saved is not None else HardState()
        self.agreement = Agreement(manifest, identity, state)
        self._candidates: dict[PeerId, Candidate] = {}
        self._founder: Candidate | None = None
        self._seen: dict[PeerId, _Seen] = {}
        self._durable: dict[PeerId, Durable] = {}
        self._lost: dict[PeerId, str] = {}
        self._trouble = ""
        self._pings: dict[PeerId, tuple[int, float]] = {}
        self._rtt: dict[PeerId, float] = {}

    @property
    def plan(self) -> Plan:
        """Return the newest certified plan."""
        return self.agreement.newest

    @property
    def leader(self) -> PeerId:
        """Return the peer that leads: the council's only voter."""
        return self.plan.header.council[0]

    @property
    def is_leader(self) -> bool:
        """Return whether this peer leads."""
        return self.leader == self.me.peer

    @property
    def trouble(self) -> str:
        """Return why training stands still, as far as this peer knows; "" while it does not."""
        if self.plan.body.halted:
            return self.plan.body.halted
        if self.plan.body.ended:
            return ""
        return self._trouble or (self.beat.trouble if self.beat is not None else "")

    # --- membership ------------------------------------------------------------------------

    def join_myself(self, candidate: Candidate) -> None:
        """The founder is the first member: all others have to agree with it."""
        self._founder = candidate
        self._take_in(candidate)

    def handle_join(self, sender: PeerId, message: Join, answer: Answer) -> None:
        """Answer a peer that asks to become a member. Raises RemoteProtocolError if the request
        is not its own."""
        candidate = check_join(
            message.record, message.request, sender, self.manifest, self.plan.header.epoch
        )
        refusal = ""
        if self.is_leader and self._founder is None:
            refusal = f"{NOT_YET}the leader is still measuring its own machine"
        elif self.is_leader:
            refusal = refusal_of(candidate, self._founder, self.manifest)
        answer(
            JoinAnswer(
                id=message.id,
                refusal=refusal,
                leader=self.leader,
                leader_address=self._links.address_of(self.leader),
            ),
            (),
        )
        if refusal:
            log.warning("join refused peer=%s reason=%r", sender, refusal)
        elif self.is_leader:
            self._take_in(candidate)

    def _take_in(self, candidate: Candidate) -> None:
        peer = candidate.request.peer
        log.info("joined peer=%s boot=%d", peer, candidate.request.boot)
        record = open_signed(candidate.record, PEER_RECORD_PURPOSE, PeerRecord)
        self._links.know(peer, record.addresses)
        self._candidates[peer] = candidate
        for proof in self.agreement.chain_after(candidate.request.epoch):
            self._links.post(peer, Certified(plan=proof))
        if self.plan.header.epoch == 0 and len(self._candidates) >= self._wait_for_peers:
            self._plan_first()

    def _plan_first(self) -> None:
        candidates = [self._candidates[peer] for peer in sorted(self._candidates)]
        try:
            body = first_plan(self.manifest.training, candidates, self._stages)
        except NoFeasiblePlan as error:
            self._trouble = f"{error.what} ({error.hint})"
            log.error("no plan reason=%r", error.what)
            return
        self._trouble = ""
        self._decide(body, from_step=0)

    # --- agreement -------------------------------------------------------------------------

    def _decide(self, body: PlanBody, *, from_step: int) -> None:
        check_plan(body, self.manifest)
        self._perform(self.agreement.propose(body, kind="planned", from_step=from_step))

    def handle_certified(self, sender: PeerId, message: Certified) -> None:
        """Take in a certificate. Raises RemoteProtocolError if it does not hold."""
        self._perform(self.agreement.handle_certified(message.plan, sender))

    def handle_get_chain(self, message: GetChain, answer: Answer) -> None:
        """Answer with the certified plans that the asker lacks."""
        answer(ChainAnswer(id=message.id, plans=self.agreement.chain_after(message.epoch)), ())

    async def fetch_chain(self, peer: PeerId) -> None:
        """Ask a peer for the certified plans that this one lacks."""
        try:
            answer = await self._links.request(
                peer, lambda number: GetChain(id=number, epoch=self.plan.header.epoch)
            )
            if isinstance(answer.message, ChainAnswer):
                for proof in answer.message.plans:
                    self._perform(self.agreement.handle_certified(proof, peer))
        except (PeerError, RemoteProtocolError) as fault:
            log.warning("chain not fetched peer=%s fault=%r", peer, str(fault))

    def send_newest(self, peer: PeerId) -> None:
        """Send the newest certificate to a peer that works by an older plan."""
        self._links.post(peer, Certified(plan=self.plan.proof))

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Persist(state):
                    self._storage.save(HARD_STATE, canonical(state))
                case Announce(proof):
                    for peer in self._others():
                        self._links.post(peer, Certified(plan=proof))
                case Adopted(plan):
                    self._adopt(plan)
                case FetchChain(peer):
                    self._links.start_soon(self.fetch_chain, peer)

    def _adopt(self, plan: Plan) -> None:
        log.info("adopted epoch=%d reason=%r", plan.header.epoch, plan.body.reason)
        for signed in plan.body.members:
            record = open_signed(signed, PEER_RECORD_PURPOSE, PeerRecord)
            if record.peer != self.me.peer:
                self._links.know(record.peer, record.addresses)
        self._on_plan(plan)

    def _others(self) -> list[PeerId]:
        return [peer for peer in sorted(self._candidates) if peer != self.me.peer]

    # --- what stops or ends the run --------------------------------------------------------

    def handle_durable(self, sender: PeerId, message: Durable) -> None:
        """A replica has written its layers. With the last one, the version is complete.

        Raises RemoteProtocolError if `sender` does not host that stage."""
        body = self.plan.body
        if message.stage >= len(body.stages) or sender not in replicas_of(body, message.stage):
            raise RemoteProtocolError(f"{sender} does not host stage {message.stage}")
        self._durable[sender] = message
        replicas = [
            (number, member.peer)
            for number, stage in enumerate(body.stages)
            for member in stage.replicas
        ]
        if body.ended or any(peer not in self._durable for _, peer in replicas):
            return
        hashes: list[bytes] = []
        for number, stage in enumerate(body.stages):
            said = {self._durable[member.peer].layer_hashes for member in stage.replicas}
            if len(said) != 1 or len(next(iter(said))) != stage.last - stage.first:
                self.report_trouble(f"replicas of stage {number} ended with different weights")
                return
            hashes.extend(said.pop())
        completed = Completed(message.version, tuple(hashes))
        self._decide(
            completing_plan(body, completed, ended=True), from_step=self.manifest.training.steps
        )

    def report_trouble(self, reason: str) -> None:
        """This peer cannot go on with training: let the leader halt the run."""
        self._trouble = reason
        if self.is_leader:
            self._halt(reason)

    def _halt(self, reason: str) -> None:
        body = self.plan.body
        if body.stages and not body.halted and not body.ended:
            self._decide(halting_plan(body, reason), from_step=0)

    def lost(self, peer: PeerId, reason: str) -> None:
        """A link to a peer has ended. Without repair, a lost worker stops training."""
        self._lost[peer] = reason

    # --- heartbeats ------------------------------------------------------------------------

    async def run_heartbeats(self, make: Callable[[float, str], Heartbeat]) -> None:
        """Tell the leader once a second what `make` says of this peer."""
        while True:
            heartbeat = make(self._rtt.get(self.leader, 0.0), self._trouble)
            self._links.post(self.leader, heartbeat)
            for peer in sorted(self._links.connected()):
                self._ping(peer)
            await trio.sleep(HEARTBEAT_SECONDS)

    def _ping(self, peer: PeerId) -> None:
        number = self._pings.get(peer, (0, 0.0))[0] + 1
        self._pings[peer] = (number, trio.current_time())
        self._links.post(peer, Ping(number=number))

    def handle_pong(self, sender: PeerId, message: Pong) -> None:
        """Measure the round trip."""
        number, sent_at = self._pings.get(sender, (0, 0.0))
        if message.number == number:
            self._rtt[sender] = trio.current_time() - sent_at

    def handle_heartbeat(self, sender: PeerId, message: Heartbeat) -> None:
        """Note what a member says of itself, if this peer leads."""
        if not self.is_leader or sender not in self._candidates:
            return
        now = trio.current_time()
        seen = self._seen.setdefault(sender, _Seen(message, now))
        seen.heartbeat, seen.at = message, now
        seen.samples = [*seen.samples[-10:], (now, message.samples)]
        self._lost.pop(sender, None)
        if message.trouble:
            self._halt(message.trouble)

    async def run_leader_beats(self) -> None:
        """While this peer leads, tell all members what the swarm looks like."""
        while True:
            if self.is_leader:
                self.beat = self._make_beat()
                for peer in self._others():
                    if peer in self._links.connected():
                        self._links.post(peer, self.beat)
            await trio.sleep(LEADER_BEAT_SECONDS)

    def handle_leader_beat(self, sender: PeerId, message: LeaderBeat) -> None:
        """Note what the leader says. Raises RemoteProtocolError if `sender` does not lead."""
        if sender != self.leader:
            raise RemoteProtocolError(f"LeaderBeat from {sender}, {self.leader} leads")
        self.beat = message
        if message.epoch > self.plan.header.epoch:
            self._links.start_soon(self.fetch_chain, sender)

    def _make_beat(self) -> LeaderBeat:
        now = trio.current_time()
        views = tuple(self._view(peer, seen, now) for peer, seen in sorted(self._seen.items()))
        losses = [
            (seen.heartbeat.version, seen.heartbeat.loss)
            for seen in self._seen.values()
            if seen.heartbeat.loss is not None
        ]
        working = self._workers()
        return LeaderBeat(
            epoch=self.plan.header.epoch,
            term=self.agreement.term,
            members=views,
            waiting_for=max(0, self._wait_for_peers - len(self._candidates))
            if self.plan.header.epoch == 0
            else 0,
            version=min((view.version for view in views if view.peer in working), default=0),
            loss=max(losses, key=lambda pair: pair[0])[1] if losses else None,
            samples_per_second=self._samples_per_second(),
            trouble=self._current_trouble(now),
        )

    def _view(self, peer: PeerId, seen: _Seen, now: float) -> MemberView:
        beat = seen.heartbeat
        return MemberView(
            peer=peer,
            boot=beat.boot,
            address=self._links.address_of(peer),
            state=beat.state,
            stage=beat.stage,
            version=beat.version,
            ledger_size=beat.ledger_size,
            queue_length=beat.queue_length,
            silent_seconds=now - seen.at,
            rtt_seconds=beat.rtt_seconds,
            compute_seconds=beat.compute_seconds,
            traffic=beat.traffic,
        )

    def _workers(self) -> frozenset[PeerId]:
        return frozenset(
            member.peer for stage in self.plan.body.stages for member in stage.replicas
        )

    def _samples_per_second(self) -> float:
        """Return the rate of the last stage group over the last heartbeats."""
        if not self.plan.body.stages:
            return 0.0
        rate = 0.0
        for peer in replicas_of(self.plan.body, len(self.plan.body.stages) - 1):
            samples = self._seen[peer].samples if peer in self._seen else []
            if len(samples) > 1 and samples[-1][0] > samples[0][0]:
                rate += (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0])
        return rate

    def _current_trouble(self, now: float) -> str:
        if self._trouble or self.plan.body.ended or not self.plan.body.stages:
            return self._trouble
        for peer in sorted(self._workers()):
            if peer in self._lost and peer not in self._links.connected():
                return f"{peer} is lost ({self._lost[peer]}) and nobody replaces it"
            seen = self._seen.get(peer)
            if seen is not None and now - seen.at > SUSPICION_SECONDS:
                return f"{peer} has been silent for {now - seen.at:.0f} s and nobody replaces it"
        return ""
