"""Agreement: which plan the swarm works by, who may join, when the run halts or ends.

Drives `core.agreement`. The leader is the council's only voter. The rule: hard state is on disk
before anything that relies on it is sent.
"""

import logging
from collections.abc import Callable, Sequence

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
)
from protocol.packing import canonical
from protocol.records import (
    PEER_RECORD_PURPOSE,
    CertifiedPlan,
    Completed,
    Manifest,
    Member,
    PeerRecord,
    PlanBody,
    open_signed,
)
from protocol.signing import PeerId
from swarm.core.agreement import (
    HARD_STATE,
    Adopted,
    Agreement,
    Announce,
    Effect,
    FetchChain,
    Persist,
    Plan,
)
from swarm.core.planning import Candidate, completing_plan, first_plan, halting_plan
from swarm.core.step import replicas_of
from swarm.core.verification import check_join, check_plan, refusal_of
from swarm.errors import NoFeasiblePlan, PeerError
from swarm.peer.joining import NOT_YET
from swarm.peer.link import Answer
from swarm.peer.links import Links
from swarm.peer.membership import (
    HEARTBEAT_SECONDS,
    LEADER_BEAT_SECONDS,
    SUSPICION_SECONDS,
    Membership,
    beat_forever,
    working_members,
)
from swarm.ports import Storage

log = logging.getLogger(__name__)


class Control:
    """One peer's part in membership and agreement."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        agreement: Agreement,
        me: Member,
        storage: Storage,
        links: Links,
        on_plan: Callable[[Plan], None],
        wait_for_peers: int,
        stages: int,
    ) -> None:
        """Continue from what `agreement` knows. `wait_for_peers` and `stages` matter to the
        founder only: how many peers the first plan waits for, and its number of stages."""
        self.manifest = manifest
        self.me = me
        self.members = Membership(links, self.me)
        self.beat: LeaderBeat | None = None
        self._beat_at = 0.0
        self._storage = storage
        self._links = links
        self._on_plan = on_plan
        self._wait_for_peers = wait_for_peers
        self._stages = stages
        self.agreement = agreement
        self._candidates: dict[PeerId, Candidate] = {}
        self._founder: Candidate | None = None
        self._durable: dict[PeerId, Durable] = {}
        self.joined_event = trio.Event()
        self._trouble = ""
        self.layers = 0
        """How many layers the model has; 0 until this peer has measured it."""

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
    def candidates(self) -> frozenset[PeerId]:
        """Return the peers that this leader has taken in."""
        return frozenset(self._candidates)

    @property
    def trouble(self) -> str:
        """Return why training stands still, as far as this peer knows; "" while it does not."""
        if self.plan.body.halted:
            return self.plan.body.halted
        if self.plan.body.ended:
            return ""
        told = self.beat.trouble if self.beat is not None else ""
        return self._trouble or self._leader_trouble() or told

    def _leader_trouble(self) -> str:
        """Return what is wrong with the leader, if another peer leads by a plan and this one has
        joined. Before the first plan peers join again instead."""
        if self.is_leader or not self.joined_event.is_set() or not self.plan.body.stages:
            return ""
        if self.leader not in self._links.connected():
            return f"the leader {self.leader} is lost, and nobody can plan without it"
        if self.beat_age_seconds > SUSPICION_SECONDS:
            return f"the leader {self.leader} has been silent for {self.beat_age_seconds:.0f} s"
        return ""

    @property
    def beat_age_seconds(self) -> float:
        """Return how old the last word of the leader is; 0 where this peer leads."""
        return 0.0 if self.is_leader else trio.current_time() - self._beat_at

    def dht_addresses(self) -> tuple[str, ...]:
        """Return where the DHT nodes of the plan's other members were."""
        records = [
            open_signed(signed, PEER_RECORD_PURPOSE, PeerRecord)
            for signed in self.plan.body.members
        ]
        return tuple(
            address
            for record in records
            if record.peer != self.me.peer
            for address in record.dht_addresses
        )

    # --- joining ---------------------------------------------------------------------------

    def joined(self) -> None:
        """The leader has taken this peer in."""
        self._beat_at = trio.current_time()
        self.joined_event.set()

    def join_myself(self, candidate: Candidate) -> None:
        """The founder is the first member: all others have to agree with it."""
        self.joined()
        self._founder = candidate
        self._take_in(candidate)

    def handle_join(self, sender: PeerId, message: Join, answer: Answer) -> None:
        """Answer a peer that asks to become a member. Raises RemoteProtocolError if the request
        is not its own."""
        candidate = check_join(
            message.record, message.request, sender, self.manifest, self.plan.header.epoch
        )
        refusal = ""
        if self.is_leader and self._founder is None and not self.plan.body.ended:
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
        self._links.know_record(open_signed(candidate.record, PEER_RECORD_PURPOSE, PeerRecord))
        self._candidates[peer] = candidate
        for proof in self.agreement.chain_after(candidate.request.epoch):
            self._links.post(peer, Certified(plan=proof))
        self._plan_first_if_enough()

    def _plan_first_if_enough(self) -> None:
        if self.plan.header.epoch == 0 and len(self._candidates) >= self._wait_for_peers:
            self._plan_first()

    def lost(self, peer: PeerId, reason: str) -> None:
        """A link to a peer has ended. Who leaves before the first plan is no candidate for it."""
        self.members.lost(peer, reason)
        is_candidate = self.plan.header.epoch == 0 and peer in self._candidates
        if is_candidate and peer != self.me.peer and peer not in self._links.connected():
            del self._candidates[peer]
            log.info("left peer=%s reason=%r", peer, reason)
            self._trouble = ""
            self._plan_first_if_enough()

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
        check_plan(body, self.manifest, self.layers)
        self._perform(self.agreement.propose(body, kind="planned", from_step=from_step))

    def handle_certified(self, sender: PeerId, message: Certified) -> None:
        """Take in a certificate. Raises RemoteProtocolError if it does not hold."""
        self._take_certified(message.plan, sender)

    def _take_certified(self, proof: CertifiedPlan, sender: PeerId) -> None:
        """Adopt what is certified. Nobody could work by a malformed plan: it is refused."""
        self._perform(
            self.agreement.handle_certified(
                proof, sender, lambda body: check_plan(body, self.manifest, self.layers)
            )
        )

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
                    self._take_certified(proof, peer)
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
            self._links.know_record(open_signed(signed, PEER_RECORD_PURPOSE, PeerRecord))
        self.members.begin_epoch()
        self._on_plan(plan)

    def _others(self) -> list[PeerId]:
        """Return all but this peer: members of the plan (a leader that has started again has no
        candidates yet), and who has joined since."""
        planned = {signed.signer for signed in self.plan.body.members}
        return sorted((planned | self.candidates) - {self.me.peer})

    # --- what stops or ends the run --------------------------------------------------------

    def handle_durable(self, sender: PeerId, message: Durable) -> None:
        """A replica has written its layers. With the last one, the version is complete.

        Raises RemoteProtocolError if `sender` does not host that stage."""
        body = self.plan.body
        if not self.is_leader:
            raise RemoteProtocolError(f"Durable is for the leader, {self.leader}")
        if message.stage >= len(body.stages) or sender not in replicas_of(body, message.stage):
            raise RemoteProtocolError(f"{sender} does not host stage {message.stage}")
        if message.version != self.manifest.training.steps:
            raise RemoteProtocolError(
                f"{sender} ends with version {message.version} of {self.manifest.training.steps}"
            )
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

    # --- heartbeats ------------------------------------------------------------------------

    async def run_heartbeats(self, make: Callable[[float, str], Heartbeat]) -> None:
        """Once this peer has joined, tell the leader every second what `make` says of it."""
        await self.joined_event.wait()

        def beat() -> None:
            self._links.post(
                self.leader, make(self.members.rtt_seconds(self.leader), self._trouble)
            )
            self.members.ping_all()

        await beat_forever(HEARTBEAT_SECONDS, beat)

    async def run_leader_beats(self) -> None:
        """While this peer leads, tell all members what the swarm looks like."""

        def beat() -> None:
            if self.is_leader:
                self.beat = self._make_beat()
                for peer in self._others():
                    if peer in self._links.connected():
                        self._links.post(peer, self.beat)

        await beat_forever(LEADER_BEAT_SECONDS, beat)

    def _make_beat(self) -> LeaderBeat:
        epoch = self.plan.header.epoch
        missing = self._wait_for_peers - len(self._candidates)
        return self.members.beat(
            self.plan.body,
            epoch=epoch,
            term=self.agreement.term,
            waiting_for=max(0, missing) if epoch == 0 else 0,
            trouble=self._trouble,
        )

    def handle_heartbeat(self, sender: PeerId, message: Heartbeat) -> None:
        """Note what a member says of itself, if this peer leads."""
        if self.is_leader and sender in (self.me.peer, *self._others()):
            self.members.heard(sender, message)
            if message.trouble and self._is_working(sender, message):
                self._halt(message.trouble)

    def _is_working(self, sender: PeerId, message: Heartbeat) -> bool:
        """Return whether a heartbeat is of a worker, as the plan names it, at this plan."""
        workers = working_members(self.plan.body)
        current = message.epoch == self.plan.header.epoch
        return current and Member(sender, message.boot) in workers

    def handle_leader_beat(self, sender: PeerId, message: LeaderBeat) -> None:
        """Note what the leader says. Raises RemoteProtocolError if `sender` does not lead."""
        if sender != self.leader:
            raise RemoteProtocolError(f"LeaderBeat from {sender}, {self.leader} leads")
        self.beat = message
        self._beat_at = trio.current_time()
        if message.epoch > self.plan.header.epoch:
            self._links.start_soon(self.fetch_chain, sender)
