"""Voters, terms, leadership, rule by rule; the quotations are the design's."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import pytest

from protocol.errors import RemoteProtocolError
from protocol.messages import (
    Accepted,
    Certified,
    Message,
    PreVote,
    PreVoteAnswer,
    Propose,
    RequestVote,
    Review,
    Stand,
    VerdictAnswer,
    Vote,
)
from protocol.packing import canonical, unpack
from protocol.records import BALLOT_PURPOSE, Ballot, CertifiedPlan, decode_record
from swarm.core.agreement import (
    DISTRUST_SECONDS,
    ELECTION_SECONDS,
    SOON_FRACTION,
    Agreement,
)
from swarm.core.ballots import sign_verdict
from swarm.core.chain import HardState, genesis
from swarm.core.effects import Send
from swarm.core.voting import (
    Adopted,
    Announce,
    Deposed,
    Effect,
    FetchChain,
    Leading,
    Persist,
    Refused,
    ReviewFailed,
)
from tests.core.agreement_world import (
    IDENTITIES,
    MANIFEST,
    NAME_OF,
    RECOVERY,
    body,
    draft,
    founded,
    state_of,
)
from tests.core.test_chain import PLAN_1, decided, header_of

M = TypeVar("M", bound=Message)
E = TypeVar("E")
replace = msgspec.structs.replace
A, B, C, D = (IDENTITIES[name].peer for name in "ABCD")
LATER = 100.0


def any_body(content: object) -> None:
    """Accept any content."""


def good(header: object, content: object, evidence: object) -> str:
    return ""


def peer(name: str, council: str = "ABC", state: HardState | None = None) -> Agreement:
    """Return a peer that knows the plan by which `council` votes."""
    known = state_of(founded(council)) if state is None else state
    return Agreement(MANIFEST, IDENTITIES[name], known, draw=lambda: 0.5)


def of(effects: Sequence[Effect], kind: type[E]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def sent(effects: Sequence[Effect], kind: type[M], to: str = "") -> list[M]:
    return [
        effect.message
        for effect in of(effects, Send)
        if isinstance(effect.message, kind) and to in ("", effect.peer)
    ]


def deliver(
    effects: Sequence[Effect], source: Agreement, target: Agreement, now: float = 0.0
) -> list[Effect]:
    """Give `target` what `source` has sent to it, or announced; return what it does."""
    answers: list[Effect] = []
    for effect in effects:
        match effect:
            case Send(to, Certified(plan=plan)) if to == target._me:
                answers += target.handle_certified(plan, source._me, now, any_body)
            case Send(to, message) if to == target._me:
                answers += target.handle(source._me, message, now, good)  # type: ignore[arg-type]
            case Announce(plan):
                answers += target.handle_certified(plan, source._me, now, any_body)
    return answers


def elected(leader: Agreement, voter: Agreement) -> list[Effect]:
    return deliver(deliver(leader.stand(0.0), leader, voter), voter, leader)


def proposed(
    leader: Agreement, voter: Agreement, council: str = "ABC", number: int = 1
) -> list[Effect]:
    """Have `leader` draft, and `voter` find it good; return the proposal."""
    return deliver(
        deliver(leader.lead(draft(council, number), 0.0, good), leader, voter), voter, leader
    )


def restarted(agreement: Agreement, state: HardState | None = None) -> Agreement:
    saved = agreement.hard_state if state is None else state
    return Agreement(
        MANIFEST, agreement._identity, unpack(canonical(saved), HardState), draw=lambda: 0.5
    )


def say(kind: type[M], of: Agreement, **fields: Any) -> M:
    generation, epoch = of.newest.key
    fields = {"generation": generation, "epoch": epoch, "term": of.term, **fields}
    return kind(**fields)


# --- a council of one -------------------------------------------------------------------------


def test_a_council_of_one_stands_leads_and_decides_at_once_but_saves_first() -> None:
    founder = peer("A", "A")
    effects = founder.start(0.0)
    assert effects == [Persist(HardState(term=1, voted_for=A)), Leading(1)]
    assert founder.deadline == float("inf")
    effects = founder.lead(draft("A", 1), 0.0, good)
    saved, adopted, announce, leading = effects
    assert isinstance(saved, Persist) and isinstance(adopted, Adopted)
    assert isinstance(announce, Announce) and leading == Leading(2)
    assert saved.state.newest == announce.proof
    assert adopted.plan.body == body(1)
    assert founder.may_lead


def test_the_founder_hands_over_and_the_new_council_of_one_leads_when_it_hears_of_it() -> None:
    founder, heir = peer("A", "A"), peer("B", "A")
    founder.start(0.0)
    effects = founder.lead(draft("B"), 0.0, good)
    assert not founder.is_voter and not founder.is_leader
    assert [stand.epoch for stand in sent(effects, Stand, B)] == [1]
    assert of(deliver(effects, founder, heir), Leading) == [Leading(1)]


# --- standing ---------------------------------------------------------------------------------


def test_a_voter_that_hears_no_leader_asks_before_it_stands() -> None:
    """Pre-vote first: it changes nothing."""
    voter = peer("A")
    assert voter.start(0.0) == []
    assert ELECTION_SECONDS[0] <= voter.deadline <= ELECTION_SECONDS[1]
    assert voter.expire(voter.deadline - 0.01) == []
    effects = voter.expire(voter.deadline)
    assert effects == [Send(to, say(PreVote, voter, term=1)) for to in (B, C)]
    assert voter.hard_state == state_of(founded("ABC"))
    answers = deliver(effects, voter, peer("B"), LATER)
    [answer] = sent(answers, PreVoteAnswer, A)
    assert answer.granted and of(answers, Persist) == []
    effects = voter.handle(B, answer, LATER, good)
    assert isinstance(effects[0], Persist)
    assert (effects[0].state.term, effects[0].state.voted_for) == (1, A)
    assert sent(effects, RequestVote, B) == sent(effects, RequestVote, C)


def test_who_hears_a_leader_grants_no_pre_vote() -> None:
    voter = peer("B")
    generation, epoch = voter.newest.key
    voter.heard_leader(A, generation, epoch, 1, LATER)
    assert voter.leader == A
    question = say(PreVote, voter, term=2)
    for now, granted in ((LATER + 1.9, False), (LATER + 2.1, True)):
        [answer] = sent(voter.handle(C, question, now, good), PreVoteAnswer, C)
        assert answer.granted is granted


def test_unanswered_questions_are_asked_again() -> None:
    candidate = peer("A")
    candidate.stand(0.0)
    assert candidate.deadline == 0.5
    assert len(sent(candidate.expire(0.5), RequestVote)) == 2
    assert candidate.deadline == 1.0


def test_slow_links_make_elections_longer() -> None:
    """Election 2-4 s, and at least 10 RTTs of the council."""
    voter = peer("A")
    voter.set_rtt(0.4)
    voter.start(0.0)
    assert voter.deadline == pytest.approx(6.0)


def test_only_members_of_the_council_stand() -> None:
    outsider = peer("D")
    with pytest.raises(ValueError, match="member of the council"):
        outsider.stand(0.0)
    for question in (say(PreVote, outsider, term=1), say(RequestVote, outsider, term=1)):
        with pytest.raises(RemoteProtocolError, match="not among its council"):
            peer("A").handle(D, question, 0.0, good)
        with pytest.raises(RemoteProtocolError, match="not among its council"):
            outsider.handle(A, question, 0.0, good)


def test_a_voter_that_knows_that_the_leader_is_gone_asks_soon() -> None:
    """Half a second at most apart, so that they do not all stand at once."""
    voter = peer("B")
    generation, epoch = voter.newest.key
    voter.heard_leader(A, generation, epoch, 1, LATER)
    voter.lost_leader(C, LATER)  # does not lead
    assert (voter.leader, voter.deadline) == (A, LATER + 3.0)
    voter.lost_leader(A, LATER)
    assert LATER <= voter.deadline <= LATER + 0.5
    [answer] = sent(voter.handle(C, say(PreVote, voter, term=2), LATER, good), PreVoteAnswer)
    assert answer.granted


# --- votes ------------------------------------------------------------------------------------


def test_one_vote_per_term_across_restarts() -> None:
    voter = peer("B")
    ask = say(RequestVote, voter, term=3)
    effects = voter.handle(A, ask, 0.0, good)
    assert isinstance(effects[0], Persist)
    assert (effects[0].state.term, effects[0].state.voted_for) == (3, A)
    assert len(sent(effects, Vote, A)) == 1
    for each in (voter, restarted(voter)):
        assert each.handle(C, ask, 0.0, good) == []
        assert len(sent(each.handle(A, ask, 0.0, good), Vote, A)) == 1  # its answer may be lost


def test_a_lower_term_is_answered_with_ones_own() -> None:
    voter = peer("B")
    voter.handle(A, say(RequestVote, voter, term=5), 0.0, good)
    plan = decided(PLAN_1, "ABC", "")
    for question in (
        say(RequestVote, voter, term=4),
        say(Review, voter, term=4, plan=plan, evidence=()),
        say(Propose, voter, term=4, plan=plan, verdicts=()),
    ):
        [answer] = sent(voter.handle(C, question, 0.0, good), PreVoteAnswer, C)
        assert (answer.granted, answer.term) == (False, 5)


def test_a_leader_that_learns_of_a_higher_term_leads_no_more() -> None:
    leader = peer("A")
    assert of(elected(leader, peer("B")), Leading) == [Leading(1)]
    told = say(PreVoteAnswer, leader, term=4, granted=False)
    effects = leader.handle(C, told, 0.0, good)
    assert isinstance(effects[0], Persist) and effects[0].state.term == 4
    assert len(of(effects, Deposed)) == 1 and not leader.is_leader


def test_a_voter_that_is_ahead_answers_with_the_certificate() -> None:
    behind, ahead = peer("A"), peer("B")
    newer = decided(PLAN_1, "ABC", "BC")
    ahead.handle_certified(newer, C, 0.0, any_body)
    effects = deliver(behind.stand(0.0), behind, ahead)
    assert effects == [Send(A, Certified(plan=newer))]
    deliver(effects, ahead, behind)
    assert behind.newest.header.epoch == 2


def test_a_voter_that_is_behind_fetches_first_and_then_answers() -> None:
    behind, ahead = peer("A"), peer("B")
    newer = decided(PLAN_1, "ABC", "BC")
    ahead.handle_certified(newer, C, 0.0, any_body)
    assert deliver(ahead.stand(0.0), ahead, behind) == [FetchChain(B)]
    effects = behind.handle_chain(ahead.chain_for(*behind.newest.key), B, 0.0, any_body)
    assert len(of(effects, Adopted)) == 1
    [vote] = sent(effects, Vote, B)
    assert vote.epoch == 2


def test_a_vote_of_another_epoch_or_term_does_not_count() -> None:
    candidate = peer("A")
    candidate.stand(0.0)
    assert candidate.handle(B, say(Vote, candidate, term=0, accepted=None), 0.0, good) == []
    early = say(Vote, candidate, epoch=2, accepted=None)
    assert candidate.handle(B, early, 0.0, good) == [FetchChain(B)]
    assert not candidate.is_leader


# --- review -----------------------------------------------------------------------------------


def test_the_proposal_carries_good_verdicts_of_a_majority() -> None:
    leader, voter = peer("A"), peer("B")
    elected(leader, voter)
    review = leader.lead(draft("ABC", 1), 0.0, good)
    assert len(sent(review, Review)) == 2 and sent(review, Propose) == []
    effects = deliver(deliver(review, leader, voter), voter, leader)
    assert isinstance(effects[0], Persist)
    assert effects[0].state.accepted is not None
    [proposal, _] = sent(effects, Propose)
    assert {signed.signer for signed in proposal.verdicts} == {A, B}
    assert not leader.may_lead
    with pytest.raises(ValueError, match="proposed nothing"):
        leader.lead(draft("ABC", 2), 0.0, good)


def test_a_refused_draft_may_be_followed_by_a_better_one() -> None:
    leader, voter, other = peer("A"), peer("B"), peer("C")
    elected(leader, voter)
    review = leader.lead(draft("ABC", 1), 0.0, good)
    effects: list[Effect] = []
    for each in (voter, other):
        [question] = sent(review, Review, each._me)
        answer = each.handle(A, question, 0.0, lambda *plan: "too slow")
        effects += deliver(answer, each, leader)
    assert of(effects, Refused) == [Refused(B, "too slow"), Refused(C, "too slow")]
    assert of(effects, ReviewFailed) == [ReviewFailed(((B, "too slow"), (C, "too slow")))]
    assert sent(proposed(leader, voter, number=2), Propose)


def test_a_better_draft_replaces_the_one_under_review() -> None:
    leader, voter = peer("A"), peer("B")
    elected(leader, voter)
    late = deliver(leader.lead(draft("ABC", 1), 0.0, good), leader, voter)
    better = leader.lead(draft("ABC", 2), 0.0, good)
    assert deliver(late, voter, leader) == []  # a verdict on the other one
    [proposal, _] = sent(deliver(deliver(better, leader, voter), voter, leader), Propose)
    assert proposal.plan.body == canonical(body(2))


def test_a_review_without_a_majority_fails_after_two_seconds() -> None:
    leader, voter = peer("A"), peer("B")
    elected(leader, voter)
    leader.lead(draft("ABC"), 0.0, good)
    effects = [effect for now in (0.5, 1.5, 2.0) for effect in leader.expire(now)]
    assert of(effects, ReviewFailed) == [ReviewFailed(())]
    assert len(sent(effects, Review)) == 4
    assert leader.may_lead and not leader.is_reviewing


def test_a_leader_refuses_its_own_bad_draft() -> None:
    leader = peer("A")
    elected(leader, peer("B"))
    effects = leader.lead(draft("ABC"), 0.0, lambda *plan: "no")
    assert effects == [Refused(A, "no"), ReviewFailed(((A, "no"),))]
    illegal = leader.lead(draft("DEF"), 0.0, good)
    assert "3 come and 3 go" in of(illegal, Refused)[0].reason
    assert leader.may_lead


def refuse(leader: Agreement, voter: Agreement, numbers: Sequence[int]) -> None:
    """Have the leader draft plans of these numbers, and the voter refuse each."""
    for number in numbers:
        [question] = sent(leader.lead(draft("ABC", number), 0.0, good), Review, voter._me)
        voter.handle(leader._me, question, 0.0, lambda *plan: "too slow")


def test_who_has_refused_three_drafts_of_a_leader_wants_another_one() -> None:
    leader, voter, other = peer("A"), peer("B"), peer("C")
    elected(leader, voter)
    refuse(leader, voter, (1, 2, 2, 1))
    assert voter.leader == A  # two drafts, told twice each
    refuse(leader, voter, (3,))
    assert voter.leader is None
    assert voter.deadline <= SOON_FRACTION * (ELECTION_SECONDS[1] - ELECTION_SECONDS[0])
    generation, epoch = voter.newest.key
    assert voter.heard_leader(A, generation, epoch, voter.term, 0.1) == []
    assert voter.leader is None
    # It asks for votes itself, grants another's question and none of the old leader's.
    assert sent(voter.expire(voter.deadline), PreVote)
    for asker, granted in ((leader, False), (other, True)):
        [answer] = sent(
            voter.handle(asker._me, say(PreVote, voter, term=voter.term + 1), 1.0, good),
            PreVoteAnswer,
        )
        assert answer.granted is granted
    assert voter.handle(A, say(RequestVote, voter, term=voter.term + 1), 1.0, good)[1:] == []


def test_distrust_ends_after_a_while_and_binds_no_vote_on_a_plan() -> None:
    leader, voter = peer("A"), peer("B")
    elected(leader, voter)
    refuse(leader, voter, (1, 2, 3))
    accepted = voter.handle(A, proposal_to(voter, term=voter.term), 1.0, good)
    assert sent(accepted, Accepted)  # what a majority finds good is decided by whoever leads
    generation, epoch = voter.newest.key
    voter.heard_leader(A, generation, epoch, voter.term, DISTRUST_SECONDS + 0.1)
    assert voter.leader == A


# --- accepting --------------------------------------------------------------------------------


def proposal_to(voter: Agreement, term: int = 1, number: int = 1, by: str = "AB") -> Propose:
    plan = replace(decided(PLAN_1, "ABC", "", number), certificate=None)
    verdicts = tuple(sign_verdict(IDENTITIES[name], header_of(plan), "") for name in by)
    return say(Propose, voter, term=term, plan=plan, verdicts=verdicts)


def test_a_voter_accepts_durably_signs_and_does_not_look_at_the_content() -> None:
    voter = peer("B")
    question = proposal_to(voter, 2)
    effects = voter.handle(A, question, 0.0, lambda *plan: "second thoughts")
    saved, answer = effects
    assert isinstance(saved, Persist) and saved.state.accepted is not None
    assert saved.state.term == saved.state.accepted.term == 2  # accepting raises the term
    assert isinstance(answer, Send) and isinstance(answer.message, Accepted)
    assert voter.handle(A, question, 0.0, good) == [answer]  # again, and nothing to save


def test_a_proposal_needs_verdicts_of_a_majority_on_this_very_plan() -> None:
    voter = peer("B")
    for verdicts in (
        proposal_to(voter, by="A").verdicts,
        proposal_to(voter, by="AA").verdicts,
        proposal_to(voter, by="AD").verdicts,
        proposal_to(voter, number=2).verdicts,
    ):
        with pytest.raises(RemoteProtocolError, match="find it good"):
            voter.handle(A, replace(proposal_to(voter), verdicts=verdicts), 0.0, good)
    assert voter.hard_state.accepted is None


def test_at_most_one_plan_per_epoch_and_term_across_restarts() -> None:
    voter = peer("B")
    voter.handle(A, proposal_to(voter), 0.0, good)
    for each in (voter, restarted(voter)):
        with pytest.raises(RemoteProtocolError, match="two plans are proposed in term 1"):
            each.handle(A, proposal_to(each, number=2), 0.0, good)


def test_a_later_term_may_have_another_plan() -> None:
    """The first was not accepted by a majority, or its leader would have had to complete it."""
    voter = peer("B")
    voter.handle(A, proposal_to(voter), 0.0, good)
    effects = voter.handle(C, proposal_to(voter, 2, 2), 0.0, good)
    [answer] = sent(effects, Accepted, C)
    assert decode_record(answer.ballot, Ballot).term == 2


@pytest.mark.parametrize("at", range(3))
def test_wherever_a_voter_crashes_it_keeps_what_it_has_said(at: int) -> None:
    """Restart from the hard state of each save: vote, accept, adopt."""
    voter, newer = peer("B"), decided(PLAN_1, "ABC", "AC", 1)
    effects = voter.handle(A, say(RequestVote, voter, term=1), 0.0, good)
    effects += voter.handle(A, proposal_to(voter), 0.0, good)
    effects += voter.handle_certified(newer, A, 0.0, any_body)
    state = of(effects, Persist)[at].state
    again = restarted(voter, state)
    assert again.term == 1
    assert again.handle(C, say(RequestVote, again, term=1), 0.0, good) == []
    told = [] if at == 2 else sent(again.handle(C, say(RequestVote, again, term=2), 0, good), Vote)
    if at < 2:
        assert (told[0].accepted is not None) is (at == 1)
    assert again.newest.header.epoch == (2 if at == 2 else 1)


# --- leading ----------------------------------------------------------------------------------


def test_what_a_vote_tells_of_is_completed_unchanged_with_its_verdicts() -> None:
    """The one with the highest term, before anything else."""
    voters = {name: peer(name) for name in "BC"}
    older, newer = proposal_to(voters["B"], 1, 1), proposal_to(voters["C"], 2, 2)
    voters["B"].handle(A, older, 0.0, good)
    voters["C"].handle(A, newer, 0.0, good)
    leader = restarted(voters["B"])  # it has accepted the older one itself
    leader.handle(C, say(PreVoteAnswer, leader, term=2, granted=False), 0.0, good)
    effects = elected(leader, voters["C"])
    assert of(effects, Leading) == [Leading(3)]
    assert not leader.may_lead
    for proposal in sent(effects, Propose):
        assert (proposal.plan, proposal.verdicts) == (newer.plan, newer.verdicts)
        assert proposal.term == 3


def test_a_majority_that_accepts_makes_the_certificate_and_ends_the_leadership() -> None:
    leader, voter, other = peer("A"), peer("B"), peer("C")
    elected(leader, voter)
    effects = deliver(deliver(proposed(leader, voter, "ABC"), leader, voter), voter, leader)
    [announce] = of(effects, Announce)
    assert [adopted.plan.proof for adopted in of(effects, Adopted)] == [announce.proof]
    # it stands at once, without pre-vote, in term + 1 before the new council
    assert isinstance(effects[0], Persist) and effects[0].state.term == 2
    assert not leader.is_leader
    assert {ask.epoch for ask in sent(effects, RequestVote)} == {2}
    answers = deliver(effects, leader, other)
    assert of(deliver(answers, other, leader), Leading) == [Leading(2)]


def test_a_leader_that_is_no_voter_any_more_asks_one_to_stand() -> None:
    leader, voter = peer("A"), peer("B")
    elected(leader, voter)
    effects = deliver(deliver(proposed(leader, voter, "BCD"), leader, voter), voter, leader)
    assert sent(effects, RequestVote) == [] and not leader.is_voter
    answers = deliver(effects, leader, voter)
    assert {(ask.epoch, ask.term) for ask in sent(answers, RequestVote)} == {(2, 2)}


def test_a_leader_without_a_majority_steps_down_after_an_election_timeout() -> None:
    leader = peer("A")
    elected(leader, peer("B"))
    generation, epoch = leader.newest.key
    assert leader.deadline == 3.0
    leader.heard_follower(B, generation, epoch, 1, 2.0)
    leader.heard_follower(C, generation, epoch, 0, 4.0)  # follows somebody else
    leader.heard_follower(D, generation, epoch, 1, 4.0)  # no voter
    assert leader.expire(4.9) == []
    assert len(of(leader.expire(5.0), Deposed)) == 1
    assert not leader.is_leader and leader.deadline == 8.0


def accepted_by(name: str, leader: Agreement, **changed: Any) -> Accepted:
    work = leader._stance.work  # type: ignore[union-attr]
    ballot = canonical(replace(decode_record(work.ballot, Ballot), **changed))  # type: ignore[union-attr]
    signature = IDENTITIES[name].sign(BALLOT_PURPOSE, ballot)
    term = changed.get("term", leader.term)
    return say(Accepted, leader, term=term, ballot=ballot, signature=signature)


@pytest.mark.parametrize("changed", [{"header_hash": b"x" * 32}, {"council_hash": b"x" * 32}])
def test_a_ballot_for_what_was_never_proposed_in_this_term_is_a_lie(
    changed: dict[str, Any],
) -> None:
    leader, voter = peer("A"), peer("B")
    elected(leader, voter)
    proposed(leader, voter)
    with pytest.raises(RemoteProtocolError, match="what I never said"):
        leader.handle(B, accepted_by("B", leader, **changed), 0.0, good)
    with pytest.raises(RemoteProtocolError, match="bad ballot signature"):
        leader.handle(C, accepted_by("B", leader), 0.0, good)


def test_ballots_of_an_earlier_term_do_not_count() -> None:
    """All with the same term."""
    leader, voter = peer("A"), peer("B")
    elected(leader, voter)
    late = deliver(proposed(leader, voter), leader, voter)
    other = peer("C")
    effects = elected(leader, other)
    assert leader.is_leader and leader.term == 2 and sent(effects, Propose)
    assert deliver(late, voter, leader) == []
    assert leader.newest.header.epoch == 1


def test_a_verdict_travels_under_its_signers_name() -> None:
    leader, voter = peer("A"), peer("B")
    elected(leader, voter)
    [answer] = sent(deliver(leader.lead(draft("ABC"), 0.0, good), leader, voter), VerdictAnswer)
    with pytest.raises(RemoteProtocolError, match="a verdict of"):
        leader.handle(C, answer, 0.0, good)


# --- adopting ---------------------------------------------------------------------------------


def test_who_sees_a_certificate_saves_and_adopts_it_once() -> None:
    follower = peer("D")
    newer = decided(PLAN_1, "ABC", "AB")
    saved, adopted = follower.handle_certified(newer, A, 0.0, any_body)
    assert isinstance(saved, Persist) and saved.state.newest == newer
    assert isinstance(adopted, Adopted)
    assert follower.handle_certified(decided(PLAN_1, "ABC", "BC"), A, 0.0, any_body) == []
    older = follower.handle_certified(founded("ABC")[0], C, 0.0, any_body)
    assert older == [Send(C, Certified(plan=newer))]


def test_a_plan_that_is_not_certified_or_that_nobody_can_work_by_leaves_no_trace() -> None:
    follower = peer("D")
    before = follower.hard_state

    def refuse(content: object) -> None:
        raise RemoteProtocolError("no layers")

    with pytest.raises(RemoteProtocolError, match="1 valid signatures"):
        follower.handle_certified(decided(PLAN_1, "ABC", "A"), A, 0.0, any_body)
    with pytest.raises(RemoteProtocolError, match="no layers"):
        follower.handle_certified(decided(PLAN_1, "ABC", "AB"), A, 0.0, refuse)
    assert follower.hard_state == before


def chain(*councils: str) -> list[CertifiedPlan]:
    """Return the plans after the genesis, each naming one of `councils`."""
    before, plans = genesis(MANIFEST).header, []
    for number, council in enumerate(councils):
        voters = "".join(NAME_OF[voter] for voter in before.council)
        plans.append(decided(before, council, voters, number))
        before = header_of(plans[-1])
    return plans


def test_a_peer_that_misses_plans_needs_those_where_the_council_changed() -> None:
    plans = chain("ABC", "ABC", "ABD", "ABD", "ABD")
    ahead, behind = peer("A", "A"), peer("B", "A")
    for plan in plans:
        ahead.handle_certified(plan, C, 0.0, any_body)
    assert behind.handle_certified(plans[-1], A, 0.0, any_body) == [FetchChain(A)]
    answer = ahead.chain_for(*behind.newest.key)
    assert [header_of(plan).epoch for plan in answer] == [1, 3, 5]
    assert [bool(plan.body) for plan in answer] == [False, False, True]
    behind.handle_chain(answer, A, 0.0, any_body)
    assert behind.newest == ahead.newest
    assert restarted(behind).newest == ahead.newest
    assert ahead.chain_for(*behind.newest.key) == ()
    assert behind.handle_chain(answer, A, 0.0, any_body) == []


def test_while_the_council_stays_the_newest_plan_is_enough() -> None:
    plans = chain("ABC", *["ABC"] * 20)
    follower = peer("D", "A")
    follower.handle_certified(plans[0], A, 0.0, any_body)
    follower.handle_certified(plans[-1], A, 0.0, any_body)
    assert follower.newest.header.epoch == 21
    assert len(follower.hard_state.links) == 1


def test_the_chain_does_not_grow_with_councils_that_come_back() -> None:
    follower = peer("D", "A")
    for plan in chain(*["ABC", "ABD"] * 20):
        follower.handle_certified(plan, A, 0.0, any_body)
        assert restarted(follower).newest == follower.newest
        assert len(follower.hard_state.links) <= 2


def test_who_took_a_short_cut_can_still_show_the_way() -> None:
    """A council that came back hides the one in between from who slept through it."""
    plans = chain("B", "A", "ABC")
    awake, asleep, later = peer("C", "A"), peer("D", "A"), peer("E", "A")
    for plan in plans[:1]:
        awake.handle_certified(plan, A, 0.0, any_body)
    asleep.handle_certified(plans[2], A, 0.0, any_body)
    assert asleep.newest.header.epoch == 3  # the founder decided it, whom it knows
    for peer_ in (awake, later):
        answer = asleep.chain_for(*peer_.newest.key)
        peer_.handle_chain(answer, D, 0.0, any_body)
        assert peer_.newest == asleep.newest


def test_active_never_goes_back_nor_ahead_of_certified() -> None:
    follower = peer("D", "A")
    plans = chain("ABC", "ABC")
    adopted = [
        of(follower.handle_certified(plan, A, 0.0, any_body), Adopted)[0].plan for plan in plans
    ]
    first, second = adopted
    [saved] = follower.activate(second)
    assert isinstance(saved, Persist) and saved.state.active == second.proof
    assert follower.activate(second) == []
    with pytest.raises(ValueError, match="epoch 1"):
        follower.activate(first)
    assert restarted(follower).active == second
    with pytest.raises(ValueError, match="epoch 2"):
        peer("E").activate(second)


# --- recovery ---------------------------------------------------------------------------------


def test_a_recovery_replaces_the_council_and_an_older_generation_is_answered() -> None:
    survivor, other = peer("B"), peer("C")
    proof = survivor.recovery_plan(RECOVERY, b"r" * 32, draft("B", 1))
    effects = survivor.handle_certified(proof, B, 0.0, any_body)
    assert of(effects, Leading) and survivor.newest.header.generation.number == 1
    for _ in range(2):
        survivor.lead(draft("B", 2), 0.0, good)
    assert survivor.hard_state.links == (replace(proof, body=b""),)
    newest = survivor.hard_state.newest
    assert newest is not None
    assert other.handle_certified(newest, B, 0.0, any_body) == [FetchChain(B)]
    other.handle_chain(survivor.chain_for(*other.newest.key), B, 0.0, any_body)
    assert other.newest == survivor.newest and restarted(other).newest == survivor.newest
    old = decided(PLAN_1, "ABC", "ABC", 7)
    assert other.handle_certified(old, A, 0.0, any_body) == [Send(A, Certified(plan=newest))]


def test_only_the_recovery_key_recovers() -> None:
    with pytest.raises(ValueError, match="not the recovery key"):
        peer("B").recovery_plan(IDENTITIES["B"], b"r" * 32, draft("B"))


def test_what_was_accepted_before_a_recovery_is_void() -> None:
    voter = peer("B")
    voter.handle(A, proposal_to(voter), 0.0, good)
    proof = voter.recovery_plan(RECOVERY, b"r" * 32, draft("BCD"))
    voter.handle_certified(proof, B, 0.0, any_body)
    assert voter.hard_state.accepted is None
    assert voter.hard_state.term == 1  # one vote per term, over all generations


def test_what_is_told_of_leaders_and_followers_finds_who_is_behind() -> None:
    ahead, behind = peer("A"), peer("B")
    newer = decided(PLAN_1, "ABC", "BC")
    ahead.handle_certified(newer, C, 0.0, any_body)
    for agreement, heard in ((ahead, behind), (behind, ahead)):
        generation, epoch = heard.newest.key
        lacks = [FetchChain(heard._me)]
        tells = [Send(heard._me, Certified(plan=newer))]
        expected = lacks if agreement is behind else tells
        assert agreement.heard_leader(heard._me, generation, epoch, 1, 0.0) == expected
        assert agreement.heard_follower(heard._me, generation, epoch, 1, 0.0) == expected


def test_an_old_leader_is_told_the_term() -> None:
    voter = peer("B")
    voter.handle(C, say(RequestVote, voter, term=5), 0.0, good)
    generation, epoch = voter.newest.key
    [effect] = voter.heard_leader(A, generation, epoch, 1, 0.0)
    assert effect == Send(A, say(PreVoteAnswer, voter, granted=False))
    assert voter.leader is None
