"""Voters, terms, leadership: how the council of the newest plan decides the next one.

The rule: everything that changes the hard state is saved before anything is said. Each method
that decides returns effects; if the hard state has changed, `Persist` is the first of them. This
module is sans-IO: `now` (seconds of any one clock) and random draws come in, and safety depends
on neither.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, assert_never

import msgspec

from protocol.errors import RemoteProtocolError
from protocol.messages import (
    Accepted,
    PreVote,
    PreVoteAnswer,
    Propose,
    RequestVote,
    Review,
    Stand,
    VerdictAnswer,
    Vote,
)
from protocol.records import (
    BALLOT_PURPOSE,
    VERDICT_PURPOSE,
    AcceptedPlan,
    CertifiedPlan,
    Generation,
    Manifest,
    PlanBody,
    PlanHeader,
    Signed,
    Verdict,
    council_hash,
    decode_record,
    open_signed,
)
from protocol.signing import Identity, PeerId
from swarm.core.ballots import (
    Draft,
    ballot_on,
    certified,
    check_approved,
    drafted,
    is_about,
    open_ballot,
    sign_verdict,
)
from swarm.core.chain import (
    HardState,
    Plan,
    check_certificate,
    check_follows,
    checked_chain,
    legal_council_change,
    links_to,
    majority,
    open_plan,
)
from swarm.core.effects import Send
from swarm.core.register import Register, key_of_proof
from swarm.core.voting import (
    Adopted,
    Announce,
    Asking,
    Deposed,
    Effect,
    FetchChain,
    Follower,
    Leader,
    Leading,
    Proposing,
    Question,
    Refused,
    Reply,
    ReviewFailed,
    Reviewing,
    Stance,
    Standing,
    Voting,
)

ELECTION_SECONDS = (2.0, 4.0)
"""How long a voter waits for a leader: drawn between the two each time."""
RESEND_SECONDS = 0.5
"""How soon an unanswered question is asked again; bodies travel, so the pause doubles."""
SOON_FRACTION = 0.25
"""Part of the spread of elections by which voters differ when they know that the leader is gone."""
REVIEW_SECONDS = 2.0
ELECTION_RTTS = 10
"""An election takes at least so many round trips of the council."""
MOST_REFUSALS = 3
"""A leader whose drafts a voter has refused so often loses its vote for a while."""
DISTRUST_SECONDS = 30.0
MAX_KEPT = 64
NEVER = float("inf")

Judge = Callable[[PlanHeader, PlanBody, tuple[Signed, ...]], str]
"""Returns why a plan is not good, given the evidence that came with it, or ""."""
CheckBody = Callable[[PlanBody], None]
"""Raises RemoteProtocolError if nobody could work by this body."""

M = TypeVar("M", bound=Voting)

replace = msgspec.structs.replace


class Agreement(Register):
    """What one peer knows of the chain of plans, its vote, and its leadership."""

    def __init__(
        self,
        manifest: Manifest,
        identity: Identity,
        state: HardState,
        *,
        draw: Callable[[], float],
    ) -> None:
        """Start from the hard state; `draw` returns a random number in [0, 1).

        Raises RemoteProtocolError if the state does not verify."""
        super().__init__(manifest, identity, state)
        self._draw = draw
        self._stance: Stance = Follower()
        self._leader: tuple[PeerId, int] | None = None
        self._early: tuple[tuple[PeerId, Question], ...] = ()
        self._good: tuple[bytes, tuple[Signed, ...]] | None = None
        self._refused: frozenset[tuple[PeerId, bytes]] = frozenset()
        """Leaders of this epoch and drafts of theirs that this voter has refused."""
        self._distrusted: dict[PeerId, float] = {}
        """Who gets no vote of this peer, and until when."""
        self._scale = 1.0
        self._heard_at = -NEVER
        self._election_at = NEVER
        self._resend_at = NEVER
        self._resend_seconds = RESEND_SECONDS
        self._review_at = NEVER
        self._patience = NEVER
        self._answered: dict[PeerId, float] = {}

    # --- what is known ---------------------------------------------------------------------

    @property
    def leader(self) -> PeerId | None:
        """Return whom this peer takes for the leader of the newest epoch."""
        if self.is_leader:
            return self._me
        return self._leader[0] if self._leader is not None else None

    @property
    def is_leader(self) -> bool:
        """Return whether this peer leads."""
        return isinstance(self._stance, Leader)

    @property
    def is_voter(self) -> bool:
        """Return whether this peer is of the council that decides the next plan."""
        return self._me in self._council

    @property
    def is_sole_voter(self) -> bool:
        """Return whether this peer alone decides the next plan."""
        return self._council == (self._me,)

    @property
    def may_lead(self) -> bool:
        """Return whether a draft is welcome: this peer leads and has proposed nothing yet."""
        return isinstance(self._stance, Leader) and not isinstance(self._stance.work, Proposing)

    @property
    def is_reviewing(self) -> bool:
        """Return whether a draft of this leader is under review."""
        return isinstance(self._stance, Leader) and isinstance(self._stance.work, Reviewing)

    @property
    def deadline(self) -> float:
        """Return when `expire` wants to be called; infinite if never."""
        match self._stance:
            case Leader(work):
                reviewed = self._review_at if isinstance(work, Reviewing) else NEVER
                resent = self._resend_at if work is not None else NEVER
                return min(self._lost_at(), reviewed, resent)
            case Follower():
                return self._election_at
            case _:
                return min(self._election_at, self._resend_at)

    def fingerprint(self) -> tuple[object, ...]:
        """Return all that decides what this peer does next but times: equal ones act alike."""
        distrusted = tuple(sorted(self._distrusted))
        return (self._state, self._stance, self._leader, self._early, self._refused, distrusted)

    def set_rtt(self, seconds: float) -> None:
        """Take in the round trip to a majority of the council: timeouts grow with it."""
        self._scale = max(1.0, ELECTION_RTTS * seconds / ELECTION_SECONDS[0])

    # --- what happens ----------------------------------------------------------------------

    def start(self, now: float) -> list[Effect]:
        """Begin after a start of the process: a council of one leads at once."""
        if self.is_sole_voter:
            return self.stand(now)
        self._wait(now)
        return []

    def stand(self, now: float) -> list[Effect]:
        """Stand at once, without asking first. Raises ValueError if this peer is no voter."""
        if not self.is_voter:
            raise ValueError("only a member of the council stands")
        return self._saving(self._stand(now))

    def handle(self, sender: PeerId, message: Voting, now: float, judge: Judge) -> list[Effect]:
        """Take in a message among voters. Late, early and repeated ones are answered or ignored.

        Raises RemoteProtocolError for what a correct peer cannot say.
        """
        return self._saving(self._handle(sender, message, now, judge))

    def expire(self, now: float) -> list[Effect]:
        """Do what is due at `now`: elections, questions asked again, reviews that failed."""
        if now < self.deadline:
            return []
        match self._stance:
            case Leader():
                effects = self._expire_leader(now)
            case Follower():
                effects = self._ask(now)
            case _ if now >= self._election_at:
                effects = self._ask(now)
            case _:
                effects = self._resend(now)
        return self._saving(effects)

    def heard_leader(
        self, sender: PeerId, generation: Generation, epoch: int, term: int, now: float
    ) -> list[Effect]:
        """Take in that `sender` says it leads."""
        if (generation, epoch) != self._newest.key:
            return self._other_epoch(sender, (generation, epoch))
        if sender not in self._council or sender == self._me:
            return []
        if self.is_voter and term < self.term:
            return self._saving([self._told_term(sender)])
        effects = self._raise_term(term, sender, now) if self.is_voter else []
        return self._saving([*effects, *self._follow(sender, term, now)])

    def heard_follower(
        self, sender: PeerId, generation: Generation, epoch: int, term: int, now: float
    ) -> list[Effect]:
        """Take in that `sender` follows the leader of `term`; 0 without one."""
        if (generation, epoch) != self._newest.key:
            return self._other_epoch(sender, (generation, epoch))
        if self.is_leader and term == self.term and sender in self._council:
            self._answered = {**self._answered, sender: now}
        return []

    def lost_leader(self, peer: PeerId, now: float) -> None:
        """Nobody listens any more where `peer` was: if it leads, the election is soon."""
        if self._leader is not None and self._leader[0] == peer:
            self._be_without_leader(now)

    def _be_without_leader(self, now: float) -> None:
        self._leader = None
        if not self.is_voter:
            return
        self._heard_at = -NEVER
        least, most = ELECTION_SECONDS
        soon = self._draw() * (most - least) * SOON_FRACTION * self._scale
        self._election_at = min(self._election_at, now + soon)

    def _distrusts(self, peer: PeerId, now: float) -> bool:
        """Return whether this voter wants another leader than `peer`."""
        return now < self._distrusted.get(peer, -NEVER)

    def lead(
        self, draft: Draft, now: float, judge: Judge, evidence: tuple[Signed, ...] = ()
    ) -> list[Effect]:
        """Have the council review a draft, in place of one that it reviews already; it is
        proposed as soon as a majority finds it good. Raises ValueError unless `may_lead`."""
        if not self.may_lead:
            raise ValueError("a draft needs a leader that has proposed nothing in its term")
        plan = drafted(draft, self._newest.header, self._newest.header.generation)
        header = decode_record(plan.header, PlanHeader)
        refusal = legal_council_change(self._council, header.council)
        refusal = refusal or judge(header, draft.body, evidence)
        if refusal:
            self._stance = Leader()
            said = (self._me, refusal)
            return [Refused(*said), ReviewFailed((said,))]
        verdict = sign_verdict(self._identity, header, "")
        self._stance = Leader(Reviewing(plan, header, evidence, (verdict,)))
        self._review_at = now + REVIEW_SECONDS * self._scale
        self._resend_from(now)
        return self._saving(self._propose_if_good(now) or self._questions())

    def handle_certified(
        self, proof: CertifiedPlan, sender: PeerId, now: float, check: CheckBody
    ) -> list[Effect]:
        """Take in a plan that `sender` says is certified; `check` may refuse its body.

        Raises RemoteProtocolError if it is not certified, or what `check` raises.
        """
        key = key_of_proof(proof)
        if key <= self._newest.key:
            return self._other_epoch(sender, key) if key < self._newest.key else []
        checked = self._checked(proof)
        if checked is None:
            return [FetchChain(sender)]
        return self._saving(self._learn(*checked, now, check))

    def handle_chain(
        self, plans: tuple[CertifiedPlan, ...], sender: PeerId, now: float, check: CheckBody
    ) -> list[Effect]:
        """Take in the answer to FetchChain. Raises RemoteProtocolError as `handle_certified`."""
        if not plans or key_of_proof(plans[-1]) <= self._newest.key:
            return []
        links, newest = checked_chain(plans, self._manifest)
        return self._saving(self._learn(links, newest, now, check))

    # --- messages --------------------------------------------------------------------------

    def _handle(self, sender: PeerId, message: Voting, now: float, judge: Judge) -> list[Effect]:
        key = (message.generation, message.epoch)
        if key > self._newest.key:
            return self._keep(sender, message)
        if key < self._newest.key:
            return [] if isinstance(message, Reply) else self._other_epoch(sender, key)
        self._check_council(sender, message)
        match message:
            case PreVote():
                return self._answer_pre_vote(sender, message, now)
            case PreVoteAnswer(granted=True):
                return self._count_grant(sender, message, now)
            case Stand():
                return self._take_over(sender, message, now)
        if message.term < self.term:
            return [] if isinstance(message, Reply) else [self._told_term(sender)]
        effects = self._raise_term(message.term, sender, now)
        if self.is_leader:
            self._answered = {**self._answered, sender: now}
        match message:
            case PreVoteAnswer():
                return effects
            case RequestVote():
                return [*effects, *self._answer_vote(sender, now)]
            case Vote():
                return [*effects, *self._count_vote(sender, message, now)]
            case Review():
                return [*effects, *self._answer_review(sender, message, now, judge)]
            case VerdictAnswer():
                return [*effects, *self._count_verdict(sender, message, now)]
            case Propose():
                return [*effects, *self._answer_proposal(sender, message, now)]
            case Accepted():
                return [*effects, *self._count_accepted(sender, message, now)]
            case _:
                assert_never(message)

    def _check_council(self, sender: PeerId, message: Voting) -> None:
        """Both know the same plan, so both know who votes."""
        speaks = sender in self._council or isinstance(message, Stand)
        if sender == self._me or not speaks or not self.is_voter:
            raise RemoteProtocolError(
                f"{type(message).__name__} of epoch {message.epoch}: not among its council"
            )

    def _keep(self, sender: PeerId, message: Voting) -> list[Effect]:
        """A plan that I lack is certified: what is short is answered once I have it."""
        if isinstance(message, PreVote | RequestVote | Stand):
            kept = tuple(
                (peer, other)
                for peer, other in self._early
                if (peer, type(other)) != (sender, type(message))
            )
            self._early = (*kept, (sender, message))[-MAX_KEPT:]
        return [FetchChain(sender)]

    # --- elections -------------------------------------------------------------------------

    def _ask(self, now: float) -> list[Effect]:
        """Ask first whether an election would succeed: who is cut off disturbs nobody."""
        self._leader = None
        self._stance = Asking(frozenset({self._me}))
        self._wait(now)
        self._resend_from(now)
        return self._questions()

    def _answer_pre_vote(self, sender: PeerId, message: PreVote, now: float) -> list[Effect]:
        is_led = self.is_leader or now < self._heard_at + ELECTION_SECONDS[0] * self._scale
        may_vote = message.term > self.term or (
            message.term == self.term and self._state.voted_for in ("", sender)
        )
        if is_led or not may_vote or self._distrusts(sender, now):
            return [self._told_term(sender)]
        return [Send(sender, self._say(PreVoteAnswer, term=message.term, granted=True))]

    def _count_grant(self, sender: PeerId, message: PreVoteAnswer, now: float) -> list[Effect]:
        if not isinstance(self._stance, Asking) or message.term != self.term + 1:
            return []
        self._stance = Asking(self._stance.granted | {sender})
        return self._stand(now) if self._is_majority(self._stance.granted) else []

    def _take_over(self, sender: PeerId, message: Stand, now: float) -> list[Effect]:
        """The old leader is not of the council any more and asks me to lead."""
        if message.term < self.term or self._leader is not None:
            return []
        if not isinstance(self._stance, Follower | Asking):
            return []
        return [*self._raise_term(message.term, sender, now), *self._stand(now)]

    def _stand(self, now: float) -> list[Effect]:
        deposed = self._resign("it stands again", now)
        self._leader = None
        self._state = replace(self._state, term=self.term + 1, voted_for=self._me)
        self._stance = Standing(frozenset({self._me}), self._state.accepted)
        self._wait(now)
        self._resend_from(now)
        return [*deposed, *(self._win_if_elected(now) or self._questions())]

    def _answer_vote(self, sender: PeerId, now: float) -> list[Effect]:
        if self._state.voted_for not in ("", sender) or self._distrusts(sender, now):
            return []
        self._state = replace(self._state, voted_for=sender)
        self._stance = Follower()
        self._wait(now)
        return [Send(sender, self._say(Vote, accepted=self._state.accepted))]

    def _count_vote(self, sender: PeerId, message: Vote, now: float) -> list[Effect]:
        if not isinstance(self._stance, Standing):
            return []
        best, told = self._stance.best, message.accepted
        if told is not None:
            self._check_accepted(told, message.term)
            if best is None or told.term > best.term:
                best = told
        self._stance = Standing(self._stance.votes | {sender}, best)
        return self._win_if_elected(now)

    def _check_accepted(self, accepted: AcceptedPlan, term: int) -> None:
        header = check_follows(accepted.plan, self._newest.header)
        check_approved(accepted.verdicts, header, self._council)
        if accepted.term > term:
            raise RemoteProtocolError(f"a vote in term {term} tells of term {accepted.term}")

    def _win_if_elected(self, now: float) -> list[Effect]:
        """Lead, if a majority says so; what others may have decided is completed first."""
        stance = self._stance
        if not isinstance(stance, Standing) or not self._is_majority(stance.votes):
            return []
        self._stance = Leader()
        self._answered = dict.fromkeys(self._others(), now)
        self._patience = self._drawn_seconds()
        effects: list[Effect] = [Leading(self.term)]
        if stance.best is not None:
            effects += self._propose(stance.best.plan, stance.best.verdicts, now)
        return effects

    def _raise_term(self, term: int, sender: PeerId, now: float) -> list[Effect]:
        if term <= self.term:
            return []
        self._state = replace(self._state, term=term, voted_for="")
        self._leader = None
        return self._resign(f"{sender} is in term {term}", now)

    def _resign(self, reason: str, now: float) -> list[Effect]:
        """Follow from now on, whatever this peer was."""
        was_leader = self.is_leader
        if not isinstance(self._stance, Follower):
            self._stance = Follower()
            self._wait(now)
        return [Deposed(reason)] if was_leader else []

    def _follow(self, leader: PeerId, term: int, now: float) -> list[Effect]:
        """`leader` has shown that it leads `term`, the highest that this peer knows of."""
        if self._leader is not None and term < self._leader[1]:
            return []
        if self.is_leader:
            raise RemoteProtocolError(f"{leader} says that it leads term {term}, as I do")
        if self._distrusts(leader, now):
            return []
        self._stance = Follower()
        self._leader = (leader, term)
        self._heard_at = now
        self._wait(now)
        return []

    # --- voters ----------------------------------------------------------------------------

    def _answer_review(
        self, sender: PeerId, message: Review, now: float, judge: Judge
    ) -> list[Effect]:
        header = check_follows(message.plan, self._newest.header)
        self._follow(sender, message.term, now)
        refusal = ""
        if self._good != (header.hash, message.evidence):
            body = decode_record(message.plan.body, PlanBody)
            refusal = judge(header, body, message.evidence)
            self._good = None if refusal else (header.hash, message.evidence)
        if refusal:
            self._refuse(sender, header, now)
        verdict = sign_verdict(self._identity, header, refusal)
        return [Send(sender, self._say(VerdictAnswer, verdict=verdict))]

    def _refuse(self, leader: PeerId, header: PlanHeader, now: float) -> None:
        """Note a refusal. Who keeps proposing what is not good should not lead: this voter wants
        another one for a while, and does not vote for this one."""
        self._refused |= {(leader, header.hash)}
        drafts = sum(peer == leader for peer, _ in self._refused)
        if drafts < MOST_REFUSALS or self._distrusts(leader, now):
            return
        self._distrusted = {**self._distrusted, leader: now + DISTRUST_SECONDS}
        self._refused = frozenset(each for each in self._refused if each[0] != leader)
        self._be_without_leader(now)

    def _answer_proposal(self, sender: PeerId, message: Propose, now: float) -> list[Effect]:
        """Accept: nothing of the content is looked at, or second thoughts could block a plan
        that others have accepted."""
        header = check_follows(message.plan, self._newest.header)
        decode_record(message.plan.body, PlanBody)
        check_approved(message.verdicts, header, self._council)
        self._check_one_plan(message)
        self._follow(sender, message.term, now)
        ballot, signature = self._accept(message.plan, header, message.verdicts, sender)
        return [Send(sender, self._say(Accepted, ballot=ballot, signature=signature))]

    def _check_one_plan(self, message: Propose) -> None:
        accepted = self._state.accepted
        if accepted is None or accepted.term != message.term:
            return
        if accepted.plan.header != message.plan.header:
            raise RemoteProtocolError(f"two plans are proposed in term {message.term}")

    def _accept(
        self,
        plan: CertifiedPlan,
        header: PlanHeader,
        verdicts: tuple[Signed, ...],
        leader: PeerId,
    ) -> tuple[bytes, bytes]:
        """Return ballot and signature; they may be told once the hard state is saved."""
        accepted = self._state.accepted
        if accepted is None or accepted.term != self.term:
            self._state = replace(
                self._state,
                accepted=AcceptedPlan(self.term, replace(plan, certificate=None), verdicts),
                voted_for=self._state.voted_for or leader,
            )
        ballot = ballot_on(header, self._council, self.term)
        return ballot, self._identity.sign(BALLOT_PURPOSE, ballot)

    # --- leading ---------------------------------------------------------------------------

    def _count_verdict(self, sender: PeerId, message: VerdictAnswer, now: float) -> list[Effect]:
        verdict = open_signed(message.verdict, VERDICT_PURPOSE, Verdict)
        if message.verdict.signer != sender:
            raise RemoteProtocolError(f"{sender} sends a verdict of {message.verdict.signer}")
        work = self._stance.work if isinstance(self._stance, Leader) else None
        if not isinstance(work, Reviewing) or not is_about(verdict, work.header):
            return []
        if sender in work.answered:
            return []
        if not verdict.refusal:
            verdicts = (*work.verdicts, message.verdict)
            self._stance = Leader(dataclasses.replace(work, verdicts=verdicts))
            return self._propose_if_good(now)
        said = (sender, verdict.refusal)
        self._stance = Leader(dataclasses.replace(work, refusals=(*work.refusals, said)))
        return [Refused(*said), *self._fail_if_refused()]

    def _fail_if_refused(self) -> list[Effect]:
        work = self._stance.work if isinstance(self._stance, Leader) else None
        if not isinstance(work, Reviewing):
            return []
        still_possible = len(self._council) - len(work.refusals)
        return self._fail(work) if still_possible < majority(self._council) else []

    def _fail(self, work: Reviewing) -> list[Effect]:
        self._stance = Leader()
        return [ReviewFailed(work.refusals)]

    def _propose_if_good(self, now: float) -> list[Effect]:
        work = self._stance.work if isinstance(self._stance, Leader) else None
        if not isinstance(work, Reviewing) or len(work.verdicts) < majority(self._council):
            return []
        return self._propose(work.plan, work.verdicts, now)

    def _propose(
        self, plan: CertifiedPlan, verdicts: tuple[Signed, ...], now: float
    ) -> list[Effect]:
        """Propose the only plan of this term, and be the first to accept it."""
        header = decode_record(plan.header, PlanHeader)
        ballot, signature = self._accept(plan, header, verdicts, self._me)
        signatures = ((self._me, signature),)
        self._stance = Leader(Proposing(plan, header, verdicts, ballot, signatures))
        self._resend_from(now)
        return self._certify_if_accepted(now) or self._questions()

    def _count_accepted(self, sender: PeerId, message: Accepted, now: float) -> list[Effect]:
        ballot = open_ballot(sender, message.ballot, message.signature)
        if ballot.term != message.term:
            raise RemoteProtocolError(f"a ballot of term {ballot.term} in term {message.term}")
        if not isinstance(self._stance, Leader):
            return []
        work = self._stance.work
        if not isinstance(work, Proposing) or message.ballot != work.ballot:
            raise RemoteProtocolError(f"{sender} accepts in term {ballot.term} what I never said")
        if sender in work.answered:
            return []
        signatures = (*work.signatures, (sender, message.signature))
        self._stance = Leader(dataclasses.replace(work, signatures=signatures))
        return self._certify_if_accepted(now)

    def _certify_if_accepted(self, now: float) -> list[Effect]:
        work = self._stance.work if isinstance(self._stance, Leader) else None
        if not isinstance(work, Proposing) or not self._is_majority(work.answered):
            return []
        proof = certified(work.plan, work.ballot, dict(work.signatures))
        header = check_certificate(proof, self._newest.header, self._manifest)
        decider = council_hash(self._council)
        found = links_to(decider, self._state.links, self._newest, self._manifest)
        assert found is not None, "the newest plan names its council"
        self._stance = Follower()
        effects = [*self._adopt(found[0], open_plan(proof, header), now), Announce(proof)]
        return [*effects, *self._hand_over(now)]

    def _hand_over(self, now: float) -> list[Effect]:
        """A leadership ends with its certificate: the new council elects, at once."""
        if self.is_voter:
            return self._stand(now)
        return [Send(self._council[0], self._say(Stand))]

    def _expire_leader(self, now: float) -> list[Effect]:
        work = self._stance.work if isinstance(self._stance, Leader) else None
        if now >= self._lost_at():
            return self._resign("a majority of the council does not answer", now)
        if isinstance(work, Reviewing) and now >= self._review_at:
            return self._fail(work)
        return self._resend(now)

    def _lost_at(self) -> float:
        """Return when a majority has not answered this leader for an election timeout."""
        needed = majority(self._council) - 1
        if needed == 0:
            return NEVER
        return sorted(self._answered.values(), reverse=True)[needed - 1] + self._patience

    # --- adopting --------------------------------------------------------------------------

    def _learn(
        self, links: tuple[CertifiedPlan, ...], newest: Plan, now: float, check: CheckBody
    ) -> list[Effect]:
        """Adopt what others have decided."""
        check(newest.body)
        effects = self._adopt(links, newest, now)
        return [*effects, *(self._stand(now) if self.is_sole_voter else [])]

    def _adopt(self, links: tuple[CertifiedPlan, ...], newest: Plan, now: float) -> list[Effect]:
        self._newest = newest
        self._state = replace(self._state, accepted=None, links=links, newest=newest.proof)
        effects = self._resign(f"epoch {newest.header.epoch} was decided without it", now)
        self._leader, self._good, self._refused = None, None, frozenset()
        self._wait(now)
        return [*effects, Adopted(newest), *self._answer_early(now)]

    def _answer_early(self, now: float) -> list[Effect]:
        """Answer what came before the plan that it is about."""
        early, self._early = self._early, ()
        effects: list[Effect] = []
        for sender, message in early:
            key = (message.generation, message.epoch)
            if key > self._newest.key:
                self._early = (*self._early, (sender, message))
            elif key == self._newest.key:
                try:
                    effects += self._handle(sender, message, now, _no_judge)
                except RemoteProtocolError:
                    continue  # its link may be gone; whoever sent the plan is not to blame
        return effects

    # --- time and questions ----------------------------------------------------------------

    def _wait(self, now: float) -> None:
        voter_of_many = self.is_voter and not self.is_sole_voter
        self._election_at = now + self._drawn_seconds() if voter_of_many else NEVER

    def _drawn_seconds(self) -> float:
        shortest, longest = ELECTION_SECONDS
        return (shortest + (longest - shortest) * self._draw()) * self._scale

    def _resend_from(self, now: float) -> None:
        self._resend_seconds = RESEND_SECONDS * self._scale
        self._resend_at = now + self._resend_seconds

    def _resend(self, now: float) -> list[Effect]:
        if isinstance(self._stance, Leader):
            longest = ELECTION_SECONDS[1] * self._scale
            self._resend_seconds = min(2 * self._resend_seconds, longest)
        self._resend_at = now + self._resend_seconds
        return self._questions()

    def _questions(self) -> list[Effect]:
        """Return what this peer asks the others of the council that have not answered."""
        match self._stance:
            case Asking(answered):
                question: Question = self._say(PreVote, term=self.term + 1)
            case Standing(votes=answered):
                question = self._say(RequestVote)
            case Leader(Reviewing() as work):
                answered = work.answered
                question = self._say(Review, plan=work.plan, evidence=work.evidence)
            case Leader(Proposing() as work):
                answered = work.answered
                question = self._say(Propose, plan=work.plan, verdicts=work.verdicts)
            case _:
                return []
        return [Send(peer, question) for peer in self._others() if peer not in answered]

    def _told_term(self, sender: PeerId) -> Send:
        return Send(sender, self._say(PreVoteAnswer, granted=False))

    def _say(self, kind: type[M], **fields: Any) -> M:
        header = self._newest.header
        fields.setdefault("term", self.term)
        return kind(generation=header.generation, epoch=header.epoch, **fields)

    def _others(self) -> list[PeerId]:
        return sorted(peer for peer in self._council if peer != self._me)


def _no_judge(header: PlanHeader, body: PlanBody, evidence: tuple[Signed, ...]) -> str:
    return "nobody asked"
