"""Agreement performed: votes, plans, heartbeats, joining; `vigil` watches the others beside it.

It drives `core.agreement` and `leading`. The rule: hard state is on disk before
anything that relies on it is sent.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Sequence

import trio
from msgspec.structs import replace

from protocol.errors import RemoteProtocolError
from protocol.messages import (
    Accepted,
    CandidatePlan,
    Certified,
    ChainAnswer,
    Changed,
    Consented,
    Durable,
    GetChain,
    GetSwarm,
    Heartbeat,
    Join,
    JoinAnswer,
    LeaderBeat,
    Leave,
    LostWork,
    Measured,
    MemberView,
    Message,
    Ping,
    PingFor,
    PingResult,
    Pong,
    PreVote,
    PreVoteAnswer,
    Propose,
    RequestVote,
    Review,
    Stand,
    Suspect,
    SwarmAnswer,
    VerdictAnswer,
    Vote,
)
from protocol.packing import canonical
from protocol.records import (
    CONSENT_PURPOSE,
    PEER_RECORD_PURPOSE,
    CertifiedPlan,
    Consent,
    Manifest,
    Member,
    PeerRecord,
    PlanBody,
    PlanHeader,
    Signed,
    decode_record,
    open_signed,
    sign_record,
)
from protocol.signing import Identity, PeerId
from swarm.core import membership, voting
from swarm.core.agreement import Agreement
from swarm.core.ballots import Draft
from swarm.core.chain import Key, Plan
from swarm.core.changes import LEAST_BYTES, changes_of, rebuilt_body
from swarm.core.council import majority_rtt_seconds
from swarm.core.effects import Send
from swarm.core.measuring.measured import check_estimates
from swarm.core.membership import Membership
from swarm.core.memo import by_pair
from swarm.core.pace import HEARTBEAT_SECONDS, LEADER_BEAT_SECONDS, SMALL, Pace, consents_now
from swarm.core.review import ReviewContext, better_plan, is_too_poor, review
from swarm.core.roles import Placing
from swarm.core.roll import records_of, working
from swarm.core.scheduling.planning import Candidate, members_of
from swarm.core.soundness import check_once
from swarm.core.verification import check_join, refusal_of
from swarm.core.voting import (
    Adopted,
    Announce,
    Deposed,
    Effect,
    FetchChain,
    Persist,
    Refused,
    ReviewFailed,
)
from swarm.errors import PeerError, RecoveryError
from swarm.peer.joining import NOT_YET
from swarm.peer.keeping import Keeper
from swarm.peer.leading import Leading
from swarm.peer.link import Answer
from swarm.peer.links import Links
from swarm.peer.roster import Roster, working_members
from swarm.peer.solving import Question
from swarm.peer.vigil import Vigil
from swarm.ports import Solver, Storage

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
"""How soon a leader drafts again after its draft was not found good."""
CONSENT_SECONDS = 10.0
"""How soon a member that does not vote says again that it would."""
LONGEST_SECONDS = 1.0
"""After so long this peer looks round even if nothing is due."""
LEADERLESS_SECONDS, LEADERLESS_BEATS = 10.0, 3
"""Elections take a few seconds: only after this time is the lack of a leader trouble."""
OVERDUE_LOOK_SECONDS = 1.0
"""How often voters look who is awaited for too long."""
RETELL_SECONDS = 2.0
"""Who was told of the newest plan so recently may have it on its way."""
_changes = by_pair(changes_of)  # everybody who tells of a plan asks this of it
CATCH_UP_SECONDS = 1.0
"""How long a member of a large swarm waits for a plan of which it has heard."""
TABLE_SECONDS = 0.5
"""How long `swarm status` waits for the leader's table, and how old one may be."""


class Control:
    """One peer's part in membership and agreement."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        identity: Identity,
        agreement: Agreement,
        me: Member,
        storage: Storage,
        links: Links,
        on_plan: Callable[[Plan], None],
        wait_for_peers: int,
        stages: int,
        solver: Solver | None = None,
        place: Placing | None = None,
    ) -> None:
        """Continue from what `agreement` knows."""
        self.manifest = manifest
        self.me = me
        self.agreement = agreement
        self.members = Membership(me)
        self.roster = Roster(links)
        self.leading = Leading(
            manifest=manifest,
            me=me,
            agreement=agreement,
            members=self.members,
            roster=self.roster,
            wait_for_peers=wait_for_peers,
            stages=stages,
            solves=solver is not None,
            place=place,
        )
        self._solver = solver
        self.vigil = Vigil(
            run=manifest.run,
            me=me,
            identity=identity,
            agreement=agreement,
            links=links,
            members=self.members,
            roster=self.roster,
            leading=self.leading,
            wake=lambda: self._wake.set(),
        )
        self._before = self._before_newest = agreement.newest
        self._adopted_at = -math.inf
        self._told_as: tuple[Key, Certified, Changed | None] | None = None
        """How the plan with this key is told."""
        self._directory = [agreement.newest.body]
        links.directory = self._record_of
        self.beat: LeaderBeat | None = None
        self.table: tuple[MemberView, ...] = ()
        """The members, as the leader saw them when this peer asked last."""
        self._table_at = -math.inf
        self._beat_at = trio.current_time()
        self._identity = identity
        self._keeper = Keeper(storage)
        self._links = links
        self._on_plan = on_plan
        self.agree_seconds: float | None = None
        """From the first sign that a newer plan was needed to its adoption."""
        self._trouble = ""
        self._retry_at = 0.0
        self._consented: tuple[object, ...] = ()
        self._consented_at = 0.0
        self._consent_turn = 0
        self._fetching: set[PeerId] = set()
        self._is_catching_up = False
        self._heard_candidates: set[PeerId] = set()
        """Whose candidate plan for the newest plan has been looked at: checking one costs."""
        self._told: dict[PeerId, tuple[object, float]] = {}
        """Of which plan a peer was told last, and when."""
        self._overdue_at = self._ask_at = 0.0
        self._looks_at = 0.0
        """When `run` looks next whether something is due."""
        self._leads = trio.Event()
        self._news = trio.Event()
        """There is something about this peer that others wait to hear."""
        self._standing: object = None
        self._told_by: PeerId | None = None
        """Who said last that it leads."""
        self._wake = trio.Event()
        self._adopted = trio.Event()
        self.measured = trio.Event()
        """Set once this peer knows its machine, and may ask to join."""
        self.layers = 0
        """How many layers the model has; 0 until this peer has measured it."""

    # --- what is known ---------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """Return the newest certified plan."""
        return self.agreement.newest

    @property
    def leader(self) -> PeerId | None:
        """Return who leads, as far as this peer knows."""
        return self.agreement.leader

    @property
    def is_leader(self) -> bool:
        """Return whether this peer leads."""
        return self.agreement.is_leader

    def is_stuck(self, task_seconds: float) -> bool:
        """Return whether this peer's executor hangs: then it takes no part."""
        return membership.is_stuck(task_seconds, self._task_seconds())

    async def next_plan(self) -> None:
        """Wait until there is a newer plan."""
        await self._adopted.wait()

    @property
    def is_member(self) -> bool:
        """Return whether the newest plan names this start of this peer."""
        return self.me in members_of(self.plan.body)

    @property
    def trouble(self) -> str:
        """Return why training stands still, as far as this peer knows; "" while it does not."""
        if self.plan.body.halted:
            return self.plan.body.halted
        if self.plan.body.ended:
            return ""
        if self.is_leader:
            return self._trouble or self.leading.trouble
        told = self.beat.trouble if self.beat is not None else ""
        return self._trouble or told or self._loss_without_repair()

    def _loss_without_repair(self) -> str:
        """Return whom training waits for, if nobody can replace them."""
        planning = self.planning_trouble
        lost = set(self.members.suspects)
        if not planning or not lost:
            return ""
        missing = [each.peer for each in working_members(self.plan.body) if each.peer in lost]
        return f"lost {', '.join(missing)}, and nobody plans: {planning}" if missing else ""

    @property
    def planning_trouble(self) -> str:
        """Return what keeps the council from deciding; training may go on meanwhile."""
        body = self.plan.body
        beats = LEADERLESS_BEATS * self.roster.pace.leader_beat_seconds
        patience = max(LEADERLESS_SECONDS, beats)
        if not body.stages or body.ended or self.beat_age_seconds <= patience:
            return ""
        council = self.plan.header.council
        reached = [peer for peer in council if self.vigil.reaches(peer)]
        silent = [peer for peer in council if peer not in reached]
        return (
            f"nobody leads for {self.beat_age_seconds:.0f} s: {len(reached)} of the council's "
            f"{len(council)} voters are reached, {len(council) // 2 + 1} are needed; not reached: "
            f"{', '.join(silent) or 'none'}. Start them again, or use `swarm recover`"
        )

    @property
    def beat_age_seconds(self) -> float:
        """Return how old the last word of a leader is; 0 where this peer leads."""
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

    # --- life ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Do what is due, until cancelled."""
        self._know(self.plan)
        self._perform(self.agreement.start(trio.current_time()))
        while True:
            self._wake = trio.Event()
            self._looks_at = min(self._due_at, trio.current_time() + self._longest_seconds)
            with trio.move_on_at(self._looks_at):
                await self._wake.wait()
            self._expire()

    @property
    def _due_at(self) -> float:
        """Return when something is to be done next, if nothing happens before."""
        return min(self.agreement.deadline, self.members.deadline, self._draft_at())

    @property
    def _longest_seconds(self) -> float:
        if self.agreement.is_voter or self.roster.pace.is_small:
            return LONGEST_SECONDS
        return self.roster.pace.heartbeat_seconds

    def _expire(self) -> None:
        now = trio.current_time()
        if now >= self.agreement.deadline:
            self._perform(self.agreement.expire(now))
        if now >= self.members.deadline or self.members.has_not_begun:
            self.vigil.act(self.members.expire(now))
        if self.agreement.is_voter and now >= self._overdue_at:  # members report to them
            self._overdue_at = now + OVERDUE_LOOK_SECONDS
            heartbeats = self.leading.heartbeats() if self.roster.somebody_waits else {}
            self.vigil.act(self.members.overdue(heartbeats, self._task_seconds(), now))
        self._lead(now)

    @property
    def _may_draft(self) -> bool:
        return self.agreement.may_lead and not self.agreement.is_reviewing

    def _draft_at(self) -> float:
        """Return when a draft is due; infinite while none is welcome."""
        return max(self.leading.look_at, self._retry_at) if self._may_draft else math.inf

    def tell(self, standing: object) -> None:
        """This peer stands as `standing` says with the newest plan: others wait to hear of it."""
        if standing != self._standing:
            self._standing = standing
            if not self.roster.pace.is_small:
                self._news.set()

    def _lead(self, now: float) -> None:
        """As the leader, let the council review what should be done next."""
        agreement = self.agreement
        self._ask_solver(now)
        if not self._may_draft or now < self._retry_at or not self.leading.is_due(now):
            return
        wanted = self.leading.draft(now)
        if wanted is not None:
            draft, evidence = wanted
            self._perform(agreement.lead(draft, now, self._judge, evidence))

    # --- better plans --------------------------------------------------------------------

    def _ask_solver(self, now: float) -> None:
        """Let the solver look for a better plan, if there is reason to: for the leader, and for a
        voter that has no work."""
        solver = self._solver
        if solver is None or now < self._ask_at:
            return
        self._ask_at = now + self.roster.pace.draft_pause_seconds
        is_free = self.agreement.is_voter and self.me not in working(self.plan.body)
        if solver is None or not (self._may_draft or (is_free and self.plan.body.stages)):
            return
        question = self.leading.question(now)
        if question is not None:
            self._links.start_soon(self._solve, solver, question)

    async def _solve(self, solver: Solver, question: Question) -> None:
        assignment, better = None, None
        try:
            assignment = await solver.solve(question.problem, question.seed)
        finally:
            better = self.leading.answered(question.problem, assignment)
        if self.leader is not None and not self.is_leader:
            self._tell_candidate(self.leader, better)
        self._wake.set()

    def _tell_candidate(self, leader: PeerId, body: PlanBody | None) -> None:
        if body is not None:
            generation, epoch = self.plan.key
            self._links.post(
                leader, CandidatePlan(generation=generation, epoch=epoch, body=canonical(body))
            )

    def _handle_candidate_plan(self, sender: PeerId, message: CandidatePlan) -> None:
        """Somebody has found a plan. Raises RemoteProtocolError if it is none of these members."""
        is_late = (message.generation, message.epoch) != self.plan.key
        if is_late or not self.is_leader or sender in self._heard_candidates:
            return
        self._heard_candidates.add(sender)
        body = decode_record(message.body, PlanBody)
        taken = self.leading.propose(body)
        log.info("candidate plan peer=%s epoch=%d taken=%s", sender, message.epoch, taken)

    def stop(self) -> None:
        """Tell leader and council that this peer stops; its own word is the evidence."""
        if self.is_member:
            signed = self.vigil.observation(self.me, "leaves")
            for peer in self.vigil.guides():
                self._links.post(peer, Suspect(observation=signed))
                self._links.post(peer, Leave(boot=self.me.boot))

    # --- what arrives ----------------------------------------------------------------------

    def hear_work(self, peer: PeerId, boot: int) -> None:
        """A peer has said something about training: in a large swarm, where it says little else,
        that it lives."""
        if not self.roster.pace.is_small:
            self.vigil.sound(peer, boot, trio.current_time())

    def handle(self, peer: PeerId, boot: int, message: Message, answer: Answer) -> None:
        """Take in a message that is not about training itself.

        Raises RemoteProtocolError if the peer may not say this."""
        now = trio.current_time()
        if peer != self.me.peer and not isinstance(message, Pong | Heartbeat | LeaderBeat):
            self.vigil.sound(peer, boot, now)
        match message:
            case Ping(number=number):
                self._links.post(peer, Pong(number=number))
            case Pong():
                rtt_seconds = self.roster.round_trip(peer, message)
                self.vigil.heard(peer, boot, now, rtt_seconds)
            case Heartbeat():
                self._handle_heartbeat(peer, message, now)
            case LeaderBeat():
                self._handle_leader_beat(peer, boot, message, now)
            case Certified(plan=proof):
                self._take_certified(proof, peer)
            case Changed(plan=link, changes=changes):
                self._take_changed(link, changes, peer)
            case GetChain():
                plans = self.agreement.chain_for(message.generation, message.epoch)
                answer(ChainAnswer(id=message.id, plans=plans), ())
            case Join():
                self._handle_join(peer, message, answer)
            case PingFor(target=target):
                self.vigil.act(self.members.ping_for(peer, target, now))
            case GetSwarm():
                members = self.roster.table() if self.is_leader else ()
                answer(SwarmAnswer(id=message.id, members=members), ())
            case PingResult(observation=signed) if signed is not None:
                self.vigil.take_observation(signed)
            case PingResult(target=target):
                self.members.withdrawn(peer, target)
            case Suspect(observation=signed):
                self.vigil.take_observation(signed)
            case LostWork():
                self.vigil.take_lost_work(peer, message)
            case Leave():
                self.vigil.act(self.members.left(Member(peer, boot), now))
                self.leading.drop_candidate(peer)
            case Consented(consent=signed):
                self._take_consent(peer, signed)
            case Measured(estimates=signed):
                told = check_estimates(signed, peer, self.manifest.run, boot)
                self.roster.measured(told, signed)
            case CandidatePlan():
                self._handle_candidate_plan(peer, message)
            case (
                PreVote()
                | PreVoteAnswer()
                | RequestVote()
                | Vote()
                | Stand()
                | Review()
                | VerdictAnswer()
                | Propose()
                | Accepted()
            ):
                self._perform(self.agreement.handle(peer, message, now, self._judge))
            case other:
                raise RemoteProtocolError(f"{type(other).__name__} is not expected here")
        # What comes from everybody all the time puts things off. At most a draft is due sooner.
        is_routine = isinstance(message, Ping | Pong | Heartbeat | LeaderBeat | Measured)
        if not is_routine or self._draft_at() < self._looks_at:
            self._wake.set()

    # --- joining ---------------------------------------------------------------------------

    def join_myself(self, candidate: Candidate) -> None:
        """This peer leads and asks itself."""
        self.leading.take_in(candidate)
        self._wake.set()

    def _handle_join(self, sender: PeerId, message: Join, answer: Answer) -> None:
        """Answer a peer that asks to become a member. Raises RemoteProtocolError if the request
        is not its own."""
        candidate = check_join(
            message.record, message.request, sender, self.manifest, self.plan.header.epoch
        )
        references = self.leading.references
        refusal = ""
        if self.leader is None and not self.plan.body.ended:
            refusal = f"{NOT_YET}nobody leads at the moment"
        elif self.is_leader and not references and not self.plan.body.ended:
            refusal = f"{NOT_YET}the leader is still measuring its own machine"
        elif self.is_leader:
            refusal = refusal_of(candidate, references, self.manifest)
        leader = self.leader or self.me.peer
        answer(
            JoinAnswer(
                id=message.id,
                refusal=refusal,
                leader=leader,
                leader_address=self._links.address_of(leader),
            ),
            (),
        )
        if refusal:
            log.warning("join refused peer=%s reason=%r", sender, refusal)
        elif self.is_leader:
            log.info("joined peer=%s boot=%d", sender, candidate.request.boot)
            self._links.know_record(open_signed(candidate.record, PEER_RECORD_PURPOSE, PeerRecord))
            self.leading.take_in(candidate)

    # --- agreement -------------------------------------------------------------------------

    def _take_certified(self, proof: CertifiedPlan, sender: PeerId) -> None:
        now = trio.current_time()
        self._perform(self.agreement.handle_certified(proof, sender, now, self._check_body))

    def _check_body(self, body: PlanBody) -> None:
        """Nobody could work by a malformed plan: it is not adopted."""
        check_once(body, self.manifest, self.layers)

    async def catch_up(self, peer: PeerId) -> None:
        """Get the plans that this peer lacks from one that speaks by a newer one. Of many, some
        hear of it by others before the leader's word arrives: that is given a moment."""
        if self._is_catching_up:
            return
        if not self.roster.pace.is_small:
            before, self._is_catching_up = self.plan.key, True
            try:
                await trio.sleep(CATCH_UP_SECONDS)
            finally:
                self._is_catching_up = False
            if self.plan.key != before:
                return
        await self.fetch_chain(peer)

    async def fetch_chain(self, peer: PeerId) -> None:
        """Ask a peer for the certified plans that this one lacks; once at a time."""
        if peer in self._fetching:
            return
        self._fetching.add(peer)
        header = self.plan.header
        try:
            answer = await self._links.request(
                peer,
                lambda number: GetChain(
                    id=number, generation=header.generation, epoch=header.epoch
                ),
            )
            if isinstance(answer.message, ChainAnswer):
                now, plans = trio.current_time(), answer.message.plans
                self._perform(self.agreement.handle_chain(plans, peer, now, self._check_body))
        except (PeerError, RemoteProtocolError) as fault:
            log.warning("chain not fetched peer=%s fault=%r", peer, str(fault))
        finally:
            self._fetching.discard(peer)
            self._wake.set()

    def send_newest(self, peer: PeerId) -> None:
        """Send the newest certificate to a peer that works by an older plan."""
        whole, changed = self._newest_told
        has_before = changed is not None and peer in records_of(self._before_newest.body)
        self._links.post(peer, changed if changed is not None and has_before else whole)

    @property
    def is_being_told(self) -> bool:
        """Return whether the leader has just begun to tell the many of a large swarm of the newest
        plan, so that others need not."""
        is_new = trio.current_time() < self._adopted_at + RETELL_SECONDS
        return is_new and not self.roster.pace.is_small

    @property
    def _newest_told(self) -> tuple[Certified, Changed | None]:
        """Return the newest plan as it is told, and what is other in it for who has the one before,
        if that is worth it: the same messages to everybody."""
        if self._told_as is None or self._told_as[0] != self.plan.key:
            proof, before, header = self.plan.proof, self._before_newest, self.plan.header
            changed = None
            if len(proof.body) >= LEAST_BYTES and before.header.hash == header.predecessor:
                link = CertifiedPlan(proof.header, b"", proof.certificate)
                changed = Changed(plan=link, changes=_changes(before.body, self.plan.body))
            self._told_as = self.plan.key, Certified(plan=proof), changed
        return self._told_as[1:]

    def activate(self, plan: Plan) -> None:
        """Work by `plan` from now on."""
        self.vigil.activated()
        self._perform(self.agreement.activate(plan))

    def _judge(self, header: PlanHeader, body: PlanBody, evidence: tuple[Signed, ...]) -> str:
        """Return why a plan is not good, or ""."""
        context = ReviewContext(
            manifest=self.manifest,
            layers=self.layers,
            heartbeats=self.leading.heartbeats(),
            boots={
                member.peer: self.members.boot_of(member.peer)
                for member in members_of(self.plan.body)
            },
            me=self.me.peer,
            estimates=self.roster.estimates,
            horizon_seconds=self.leading.horizon_seconds,
            judges_quality=self.leading.place is None,
        )
        refusal = review(header, body, evidence, self.plan, context)
        leader = self.leader
        if is_too_poor(refusal) and leader is not None and not self.is_leader:
            self._tell_candidate(leader, better_plan(body, evidence, self.plan, context))
        return refusal

    def _perform(self, effects: Sequence[Effect]) -> None:
        if not effects:
            return
        for effect in effects:
            match effect:
                case Persist(state):
                    self._keeper.save(state)
                case Send(peer, Certified()):
                    self._retell(peer)
                case Send(peer, message):
                    self._links.post(peer, message)
                case Announce():
                    self._announce()
                case Adopted(plan):
                    self._adopt(plan)
                case FetchChain(peer):
                    self._links.start_soon(self.catch_up, peer)
                case voting.Leading(term):
                    log.info("leads epoch=%d term=%d", self.plan.header.epoch, term)
                    self.leading.begin()
                    self._tell_beat(self._audience())
                    self._leads.set()
                case Deposed(reason):
                    log.info("deposed epoch=%d reason=%r", self.plan.header.epoch, reason)
                case Refused(voter, reason):
                    log.warning("plan refused voter=%s reason=%r", voter, reason)
                case ReviewFailed(refusals):
                    log.warning("review failed refusals=%d", len(refusals))
                    self.leading.refused()
                    if any(voter == self.me.peer for voter, _ in refusals):
                        self.leading.forget_candidates()
                    self._retry_at = trio.current_time() + RETRY_SECONDS
                    self.leading.look_again()
        self._wake.set()

    def _announce(self) -> None:
        """Tell everybody of the newest plan: who has the one before gets what is other in it."""
        for peer in self._audience():
            self._note_told(peer)
            self.send_newest(peer)

    def _take_changed(self, link: CertifiedPlan, changes: bytes, sender: PeerId) -> None:
        """Make a plan of what is other in it, or fetch it where the one before is not at hand."""
        header = decode_record(link.header, PlanHeader)
        if header.predecessor == self.plan.header.hash:
            body = rebuilt_body(self.plan.body, changes)
            self._take_certified(CertifiedPlan(link.header, body, link.certificate), sender)
        elif (header.generation, header.epoch) > self.plan.key:
            self._links.start_soon(self.catch_up, sender)

    def _retell(self, peer: PeerId) -> None:
        """Somebody speaks by an older plan: tell it of the newest, unless that is on its way."""
        key, at = self._told.get(peer, (None, 0.0))
        is_on_its_way = key == self.plan.key and trio.current_time() < at + RETELL_SECONDS
        if not ((is_on_its_way and self._links.is_connected(peer)) or self.is_being_told):
            self._note_told(peer)
            self.send_newest(peer)

    def _note_told(self, peer: PeerId) -> None:
        self._told[peer] = self.plan.key, trio.current_time()

    def _adopt(self, plan: Plan) -> None:
        log.info("adopted epoch=%d reason=%r", plan.header.epoch, plan.body.reason)
        now, before = trio.current_time(), self._before
        self._before_newest, self._adopted_at = before, now
        sign_at, self.vigil.sign_at = self.vigil.sign_at, None
        self.agree_seconds = now - sign_at if sign_at is not None else None
        self._know(plan)
        self.leading.adopted(before, now)
        self._adopted.set()
        self._adopted = trio.Event()
        self._heard_candidates.clear()
        self._retry_at = 0.0
        self._on_plan(plan)

    def _know(self, plan: Plan) -> None:
        """Take in who is where, and watch them."""
        self._directory = [plan.body, self._before.body, self.agreement.active.body]
        self._before = plan
        self._told = {peer: told for peer, told in self._told.items() if told[0] == plan.key}
        self.vigil.watch(trio.current_time())
        self.roster.forget_all_but(records_of(plan.body).keys() | self.leading.candidates)

    def _record_of(self, peer: PeerId) -> PeerRecord | None:
        """Return what the plans at hand say of where a peer is. Their signatures were checked."""
        for body in self._directory:
            signed = records_of(body).get(peer)
            if signed is not None:
                return decode_record(signed.payload, PeerRecord)
        return None

    def _audience(self) -> list[PeerId]:
        """Return all but this peer: members, voters, and who asks to join."""
        peers = records_of(self.plan.body).keys() | records_of(self._before.body).keys()
        peers |= {*self.plan.header.council, *self._before.header.council}
        return sorted((peers | self.leading.candidates) - {self.me.peer})

    def _hears_of(self, peer: PeerId) -> bool:
        """Return whether a peer is one of the audience."""
        return (
            peer in records_of(self.plan.body)
            or peer in records_of(self._before.body)
            or peer in self.plan.header.council
            or peer in self._before.header.council
            or peer in self.leading.candidates
        )

    # --- consent ---------------------------------------------------------------------------

    def _consent(self, leader: PeerId) -> None:
        """Tell the leader that this peer would vote from this epoch on; again after a while, since
        that may be lost with a link."""
        now, key = trio.current_time(), (*self.plan.key, leader)
        if self.me.peer in self.plan.header.council:
            return
        if self._consented == key and now < self._consented_at + CONSENT_SECONDS:
            return
        self._consented, self._consented_at = key, now
        self._consent_turn += 1
        members = tuple(records_of(self.plan.body))
        if not consents_now(self.me.peer, members, self.plan.header.epoch + self._consent_turn):
            return
        generation, epoch = self.plan.key
        consent = Consent(run=self.manifest.run, generation=generation, epoch=epoch)
        signed = sign_record(self._identity, CONSENT_PURPOSE, consent)
        self._links.post(leader, Consented(consent=signed))

    def _take_consent(self, sender: PeerId, signed: Signed) -> None:
        consent = open_signed(signed, CONSENT_PURPOSE, Consent)
        if signed.signer != sender or consent.run != self.manifest.run:
            raise RemoteProtocolError(f"{sender} sends a consent of {signed.signer}")
        if (consent.generation, consent.epoch) == self.plan.key:
            self.leading.consented(sender, signed)

    # --- heartbeats ------------------------------------------------------------------------

    async def run_heartbeats(self, make: Callable[[float, str], Heartbeat]) -> None:
        """Tell leader and council every second what `make` says of this peer.

        A voter's word keeps the leader in office: it does not wait until it has measured."""
        if self.me.peer not in self.plan.header.council:
            await self.measured.wait()

        while True:
            self._news = trio.Event()
            began = trio.current_time()
            self._say_heartbeat(make)
            pace = self.roster.pace
            voter = self.agreement.is_voter
            period = HEARTBEAT_SECONDS if voter else pace.heartbeat_seconds
            with trio.move_on_at(began + period):
                await self._news.wait()
            await trio.sleep_until(min(began + HEARTBEAT_SECONDS, began + period))

    def _say_heartbeat(self, make: Callable[[float, str], Heartbeat]) -> None:
        leader = self.leader
        leader_rtt = self.members.rtt_seconds(leader) if leader is not None else 0.0
        heartbeat = make(leader_rtt, self._trouble)
        self.roster.heard(self.me.peer, heartbeat)
        now = trio.current_time()
        self.leading.heard(self.me.peer, now)
        self.vigil.act(self.members.stuck(self.me, heartbeat, self._task_seconds(), now))
        guides = self.vigil.guides()
        for peer in guides:
            self._links.post(peer, heartbeat)
        self.vigil.repeat_lost_work()
        self.roster.ping_all(guides)
        council = self.plan.header.council
        self.agreement.set_rtt(
            majority_rtt_seconds(council, self.me.peer, self.members.rtt_seconds)
        )

    async def run_first_tables(self) -> None:
        """Before the first plan, learn from the leader who else has come: of many, seldom."""
        while not self.plan.body.stages:
            await self.refresh_table()
            await trio.sleep(max(1.0, len(self.table) / SMALL))
        if not self.roster.pace.is_small:  # the plan says who they are
            self.table = ()

    async def run_attention(self, awaited: Callable[[], tuple[Sequence[PeerId], float]]) -> None:
        """In a large swarm, hear those whom this peer has waited for, as `awaited` says."""
        while True:
            pace = self.roster.pace
            await trio.sleep(pace.moment_seconds)
            if pace.is_small:
                continue
            peers, seconds = awaited()
            self.vigil.attend(peers if seconds > pace.attention_seconds else ())

    async def run_leader_beats(self) -> None:
        """While this peer leads, tell the council often that it does, and the others now and
        then."""
        others_at = -math.inf
        while True:
            if not self.is_leader:
                self._leads = trio.Event()
                await self._leads.wait()
            if not self.plan.body.stages:
                self.roster.pace = Pace(len(self.leading.candidates))
            now, pace = trio.current_time(), self.roster.pace
            if now >= others_at:
                others_at = now + pace.leader_beat_seconds
                self._tell_beat(self._audience())
            else:
                self._tell_beat(self.plan.header.council)
            self.vigil.look()
            await trio.sleep(LEADER_BEAT_SECONDS)

    def _tell_beat(self, peers: Sequence[PeerId]) -> None:
        if not self.is_leader:
            return
        self._beat_at = trio.current_time()
        self.beat = self.roster.beat(
            self.plan,
            term=self.agreement.term,
            waiting_for=self.leading.waiting_for,
            trouble=self.trouble,
        )
        for peer in peers:
            if peer == self.me.peer:
                continue
            if self._links.is_connected(peer) or peer in self.plan.header.council:
                self._links.post(peer, self.beat)

    async def refresh_table(self) -> None:
        """Get the table of members from the leader, if it answers soon."""
        leader, now = self.leader, trio.current_time()
        if self.is_leader:
            self.table, self._table_at = self.roster.table(), now
        elif leader is not None and now > self._table_at + TABLE_SECONDS:
            with trio.move_on_after(TABLE_SECONDS), contextlib.suppress(PeerError):
                received = await self._links.request(leader, lambda number: GetSwarm(id=number))
                if isinstance(received.message, SwarmAnswer) and received.message.members:
                    self.table, self._table_at = received.message.members, trio.current_time()
        if not self.plan.body.stages:
            self.roster.pace = Pace(len(self.table))

    @property
    def table_age_seconds(self) -> float:
        """Return how old the table of members is; 0 where there is none."""
        return trio.current_time() - self._table_at if self.table else 0.0

    def _handle_heartbeat(self, sender: PeerId, message: Heartbeat, now: float) -> None:
        self.vigil.heard(sender, message.boot, now)
        self._perform(
            self.agreement.heard_follower(
                sender, message.generation, message.epoch, message.term, now
            )
        )
        if not self._hears_of(sender):
            return
        self.roster.heard(sender, message)
        member = Member(sender, message.boot)
        self.vigil.act(self.members.stuck(member, message, self._task_seconds(), now))
        if message.trouble and self._is_working(member, message):
            self.leading.halt(message.trouble)

    def _task_seconds(self) -> float:
        """Return how long a task of the slowest stage is predicted to take."""
        return self.plan.body.step_seconds / self.manifest.training.microbatches_per_step

    def _is_working(self, member: Member, message: Heartbeat) -> bool:
        """Return whether a heartbeat is of a worker, as the plan names it, at this plan."""
        current = (message.generation, message.epoch) == self.plan.key
        return current and member in working(self.plan.body)

    def _handle_leader_beat(
        self, sender: PeerId, boot: int, message: LeaderBeat, now: float
    ) -> None:
        self.vigil.heard(sender, boot, now)
        self._perform(
            self.agreement.heard_leader(
                sender, message.generation, message.epoch, message.term, now
            )
        )
        if sender == self.leader and (message.generation, message.epoch) == self.plan.key:
            self.beat = message
            self._beat_at = now
            self._consent(sender)
            if self._told_by != sender:  # it has not heard this peer as a leader
                self._told_by = sender
                self._news.set()

    def recover(self, key: Identity, nonce: bytes) -> None:
        """Start a new generation of councils with this peer as the only voter, by the recovery
        key; `nonce` has 32 random bytes. Raises RecoveryError if there is nothing to recover."""
        plan = self.plan
        if key.peer != self.manifest.recovery or not plan.body.stages or plan.body.ended:
            raise RecoveryError(
                "this run cannot be recovered here",
                evidence=(
                    f"the run's recovery key is {self.manifest.recovery}, yours {key.peer}",
                    f"epoch {plan.header.epoch}: {plan.body.reason}",
                ),
                hint="use the founder's recovery.key, at a peer that has been part of the run",
            )
        number = plan.header.generation.number + 1
        reason = f"recovered by key: generation {number}, {self.me.peer} decides alone"
        body = replace(plan.body, leavers=(), reason=reason)
        version = self.leading.version
        draft = Draft(body, "repair", version, plan.header.lineage, (self.me.peer,))
        proof = self.agreement.recovery_plan(key, nonce, draft)
        self._take_certified(proof, self.me.peer)
        self._perform([Announce(self.plan.proof)])

    def report_trouble(self, reason: str) -> None:
        """This peer cannot go on with training: let the leader halt the run."""
        self._trouble = self._trouble or reason
        self.leading.halt(reason)
        self._wake.set()

    def handle_durable(self, sender: PeerId, message: Durable) -> None:
        """A replica has written its layers. Raises RemoteProtocolError if it may not say so."""
        self.leading.durable(sender, message)
        self._wake.set()
