"""A plan is refused by name of the check that does not hold; a good one passes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from protocol.messages import Heartbeat
from protocol.records import (
    BALLOT_PURPOSE,
    ESTIMATES_PURPOSE,
    Completed,
    Estimates,
    FeederPlan,
    Generation,
    PlanHeader,
    Signed,
    StandbyPlan,
    decode_record,
    sign_record,
)
from protocol.signing import Identity, PeerId
from swarm.core.ballots import Draft
from swarm.core.chain import Plan, genesis
from swarm.core.evidence import REPORT_MISSING
from swarm.core.review import OLD_ESTIMATES, ReviewContext, better_plan, is_too_poor, review
from swarm.core.roles import LINKS_FAIL
from swarm.core.scheduling.horizon import LONGEST_SECONDS, SHORTEST_SECONDS
from swarm.core.scheduling.planning import completing_plan, halting_plan, plan_of, problem_for
from swarm.core.verification import JOIN_REQUEST_EPOCHS
from tests.core.drafts import (
    FOUR,
    FOUR_LAYERS,
    ONE,
    RUN,
    SPARE,
    Known,
    adopted,
    begun,
    draft_in,
    groups,
    member,
    newcomer,
    peers,
    ready,
    situation,
)
from tests.core.plans import (
    PEOPLE,
    candidate,
    candidates,
    consent,
    heartbeat,
    manifest,
    observation,
    request,
    signed_request,
    training,
)
from tests.core.scheduling.test_snapshot import estimates

replace = msgspec.structs.replace
CONTEXT = ReviewContext(RUN, 4)
SEEN_BY_TWO = [observation(PEOPLE[n], member(1), FOUR.header) for n in (0, 2)]
REPAIR = adopted(draft_in(situation(RUN, FOUR, gone={member(1): "silent"})), FOUR.header)
"""Of two stages of two replicas, 1 is left out of the first."""


def repeated(before: Known, **header: object) -> Known:
    """The same plan once more, as a repair."""
    return Known(
        replace(
            before.header,
            epoch=before.header.epoch + 1,
            predecessor=before.header.hash,
            kind="repair",
            **header,
        ),
        before.body,
    )


FOUR_AGAIN = repeated(FOUR)
SPARE_AGAIN = repeated(SPARE)
COMPLETE = Completed(5, (b"h" * 32,) * 4)


def verdict(
    plan: Known,
    evidence: Sequence[Signed] = (),
    previous: Known = FOUR,
    context: ReviewContext = CONTEXT,
    **changed: object,
) -> str:
    """Review `plan` with other values in its body."""
    return review(plan.header, replace(plan.body, **changed), evidence, previous, context)


# --- good plans ---------------------------------------------------------------------------------


def test_the_first_plan_and_a_repair_with_evidence_are_good() -> None:
    root = genesis(RUN)
    assert review(FOUR.header, FOUR.body, (), root, CONTEXT) == ""
    assert verdict(REPAIR, SEEN_BY_TWO) == ""


def test_the_reviewer_needs_no_more_of_the_plan_before_than_header_and_body() -> None:
    proof = genesis(RUN).proof
    before = Plan(FOUR.header, FOUR.body, proof)
    assert review(REPAIR.header, REPAIR.body, SEEN_BY_TWO, before, CONTEXT) == ""


def test_plans_with_equal_roles_are_good() -> None:
    done = completing_plan(FOUR.body, COMPLETE, ended=False)
    assert review(FOUR_AGAIN.header, done, (), FOUR, CONTEXT) == ""
    halted = halting_plan(FOUR.body, "the loss is not finite")
    assert review(FOUR_AGAIN.header, halted, (), FOUR, CONTEXT) == ""


# --- check 1 ------------------------------------------------------------------------------------


def test_a_plan_is_well_formed() -> None:
    wiring = (((1.0,),), ((0.5, 0.4),))
    assert verdict(REPAIR, SEEN_BY_TWO, wiring=wiring).endswith("of stage 1 sums to 0.9")
    stages = (REPAIR.body.stages[0],)
    assert "ends at layer 2, the model has 4" in verdict(
        REPAIR, SEEN_BY_TWO, stages=stages, wiring=REPAIR.body.wiring[:1]
    )
    unknown = ReviewContext(RUN)
    refusal = verdict(
        REPAIR, SEEN_BY_TWO, context=unknown, stages=stages, wiring=REPAIR.body.wiring[:1]
    )
    assert refusal == "stages: they end at layer 2, the members' model has 4"


def test_feeders_hold_the_data() -> None:
    plan = begun(RUN, candidates(4, RUN, FOUR_LAYERS, holders=[0]), 2)
    root = Known(genesis(RUN).header, genesis(RUN).body)
    assert verdict(plan, previous=root) == ""
    expected = f"feeders: {PEOPLE[2].peer} does not hold the data"
    assert verdict(plan, previous=root, feeders=(FeederPlan(member(2), 1),)) == expected


def test_what_is_complete_stays_complete() -> None:
    before = Known(FOUR.header, completing_plan(FOUR.body, COMPLETE, ended=False))
    assert verdict(FOUR_AGAIN, previous=before) == "completed: version 0, 5 was before"
    assert verdict(FOUR_AGAIN, previous=before, completed=COMPLETE) == ""
    back = repeated(before, lineage=1, from_step=5)
    assert verdict(back, previous=before) == ""


def test_a_run_has_ended_when_its_last_version_is_complete() -> None:
    early = completing_plan(FOUR.body, COMPLETE, ended=True)
    assert verdict(Known(FOUR_AGAIN.header, early)).startswith("ended: version 5 is complete")
    last = Completed(RUN.training.steps, COMPLETE.layer_hashes)
    done = completing_plan(FOUR.body, last, ended=True)
    assert verdict(Known(FOUR_AGAIN.header, done)) == ""


@pytest.mark.parametrize("works", [True, False])
def test_memory_holds_the_state_of_a_stage(works: bool) -> None:
    """A stage of two layers of 16 bytes takes 192 bytes with AdamW."""
    root = Known(genesis(RUN).header, genesis(RUN).body)
    asked = request(PEOPLE[3], RUN.run, seconds=FOUR_LAYERS, memory_bytes=191)
    members = candidates(3, RUN, FOUR_LAYERS)
    plan = begun(RUN, [*members, newcomer(3, RUN, epoch=0)], 2)
    changed: dict[str, object] = {
        "requests": (*plan.body.requests[:3], signed_request(PEOPLE[3], asked))
    }
    if not works:
        last = plan.body.stages[1]
        alone = replace(last, replicas=last.replicas[:1], shares=(1,))
        changed |= {
            "stages": (plan.body.stages[0], alone),
            "wiring": (plan.body.wiring[0], ((1.0,), (1.0,))),
            "standby": (StandbyPlan(member(3), 1),),
        }
    plan = Known(plan.header, replace(plan.body, **changed))
    assert verdict(plan, previous=root) == (
        f"memory: stage 1 takes 192 bytes, {PEOPLE[3].peer} has 191"
    )


@pytest.mark.parametrize(
    ("changed", "refusal"),
    [
        ({"lineage": 1, "from_step": 0}, ""),
        ({"lineage": 1, "from_step": 5}, "lineage: back to version 5, which is not known"),
        ({"lineage": 2, "from_step": 0}, "lineage: 2 does not follow 0"),
        ({"lineage": 1, "kind": "planned"}, "lineage: a planned plan starts lineage 1"),
    ],
)
def test_only_a_repair_goes_back_and_to_what_is_complete(
    changed: dict[str, object], refusal: str
) -> None:
    header = replace(REPAIR.header, **changed)
    found = review(header, REPAIR.body, SEEN_BY_TWO, FOUR, CONTEXT)
    assert found.startswith(refusal) and bool(found) == bool(refusal)


def test_within_a_lineage_the_swarm_goes_on_from_where_the_plan_before_did() -> None:
    """A rollback to version 5, or a planned change with step 6, which begins at version 5."""
    back = Known(replace(FOUR.header, kind="repair", from_step=5), FOUR.body)
    change = Known(replace(FOUR.header, kind="planned", from_step=6), FOUR.body)
    for before in (back, change):
        for from_step, good in ((4, False), (5, True), (6, True)):
            after = Known(
                replace(REPAIR.header, predecessor=before.header.hash, from_step=from_step),
                REPAIR.body,
            )
            refusal = verdict(after, SEEN_BY_TWO, previous=before)
            assert refusal.startswith("from_step: 4, the plan before") != good
            assert bool(refusal) != good


def test_stages_keep_their_layers_within_a_lineage() -> None:
    first, second = FOUR.body.stages
    recut = (replace(first, last=1), replace(second, first=1))
    assert verdict(FOUR_AGAIN, stages=recut).startswith(
        "moves: the stages [(0, 1), (1, 4)] are not"
    )


def test_nobody_gets_work_at_a_stage_that_it_did_not_have() -> None:
    first, second = FOUR.body.stages
    swapped = (
        replace(first, replicas=second.replicas),
        replace(second, replicas=first.replicas),
    )
    refusal = verdict(FOUR_AGAIN, stages=swapped)
    assert refusal.startswith(f"moves: {PEOPLE[2].peer} gets stage 0, which it neither hosted")


@pytest.mark.parametrize(
    ("said", "good"),
    [
        ({}, True),
        (ready(3, 1), True),
        (ready(3, 0), False),
        (ready(3, 1, lineage=1), False),
        ({PEOPLE[3].peer: heartbeat(state="joining", stage=1)}, False),
    ],
)
def test_who_gets_work_is_ready_as_far_as_the_reviewer_knows(
    said: dict[PeerId, Heartbeat], good: bool
) -> None:
    now = situation(ONE, SPARE, gone={member(2): "silent"}, heartbeats=ready(3, 1))
    plan = adopted(draft_in(now), SPARE.header)
    seen = [observation(PEOPLE[n], member(2), SPARE.header) for n in (0, 1)]
    refusal = verdict(plan, seen, SPARE, ReviewContext(ONE, 4, heartbeats=said))
    assert refusal == "" if good else refusal.startswith(f"moves: {PEOPLE[3].peer} is not ready")


def test_nobody_works_at_another_stage_than_it_stood_by_for() -> None:
    first, second = SPARE.body.stages
    body = {
        "stages": (replace(first, replicas=(member(3),)), second),
        "feeders": (FeederPlan(member(3), 1),),
        "standby": SPARE.body.standby[:1],
    }
    refusal = verdict(SPARE_AGAIN, (), SPARE, ReviewContext(ONE, 4), **body)
    assert refusal.startswith(f"moves: {PEOPLE[3].peer} gets stage 0")


# --- check 2: members ---------------------------------------------------------------------------


def with_newcomer(**asked: object) -> Known:
    """A plan in which 5 is new and stands by; FOUR is of epoch 1."""
    now = situation(RUN, FOUR, joining=[newcomer(5, RUN, **asked)], settled=True)  # type: ignore[arg-type]
    return adopted(draft_in(now), FOUR.header)


def test_a_newcomer_has_asked_lately_and_agrees_with_the_members() -> None:
    assert verdict(with_newcomer()) == ""
    assert verdict(with_newcomer(epoch=2)) == (
        f"members: {PEOPLE[5].peer} asked to join in epoch 2, this plan follows 1"
    )
    late = replace(FOUR.header, epoch=2 + JOIN_REQUEST_EPOCHS)
    refusal = verdict(with_newcomer(), previous=Known(late, FOUR.body))
    assert refusal == f"members: {PEOPLE[5].peer} asked to join in epoch 1, this plan follows 10"
    assert "the data differs" in verdict(with_newcomer(digest=b"e" * 32))


def test_a_member_without_a_request_of_its_own_boot_is_none() -> None:
    """A leader cannot name another boot than the one that asked."""
    body = replace(FOUR.body, requests=(*FOUR.body.requests[:3], FOUR.body.requests[2]))
    assert verdict(Known(FOUR_AGAIN.header, body)).startswith("the join request beside")
    older = situation(RUN, FOUR, joining=[newcomer(3, RUN, boot=3)])
    now = adopted(draft_in(older), FOUR.header)
    assert review(now.header, now.body, (), FOUR, CONTEXT) == ""
    back = repeated(Known(now.header, FOUR.body))
    refusal = review(back.header, FOUR.body, (), now, CONTEXT)
    assert refusal == f"members: {PEOPLE[3].peer} with boot 1, the plan before names 3"


# --- check 2: evictions -------------------------------------------------------------------------

ALICE, BOB = PEOPLE[0], PEOPLE[1]


def by(who: Identity, *, reason: str = "is silent", **changed: object) -> Signed:
    """Return an observation of member 1 by `who`, in a header with other values."""
    return observation(who, member(1), replace(FOUR.header, **changed), reason)


TOO_FEW = f"evictions: {BOB.peer}, boot 1, is left out on the word of {{}} observers, 2 are needed"


@pytest.mark.parametrize(
    ("evidence", "observers"),
    [
        ([], 0),
        ([by(ALICE)], 1),
        ([by(ALICE), by(ALICE, reason="again")], 1),
        ([by(ALICE), by(PEOPLE[5])], 1),  # no member
        ([by(ALICE), by(PEOPLE[2], epoch=0)], 1),
        ([by(ALICE), by(PEOPLE[2], generation=Generation(1, b"x" * 32))], 1),
        ([by(ALICE), by(PEOPLE[2], run=b"x" * 32)], 1),
        ([by(ALICE), observation(PEOPLE[2], member(1, boot=2), FOUR.header)], 1),
        ([by(ALICE), observation(PEOPLE[2], member(3), FOUR.header)], 1),
        ([by(ALICE), replace(by(PEOPLE[2]), signer=PEOPLE[3].peer)], 1),
        ([by(ALICE), sign_record(PEOPLE[2], BALLOT_PURPOSE, FOUR.header)], 1),
        ([by(PEOPLE[2], reason=REPORT_MISSING)], 1),  # 0 is the step coordinator
    ],
)
def test_one_word_is_not_enough_to_leave_out_a_member(
    evidence: list[Signed], observers: int
) -> None:
    assert verdict(REPAIR, evidence) == TOO_FEW.format(observers)


@pytest.mark.parametrize(
    "evidence",
    [
        [by(ALICE), by(PEOPLE[3])],
        [by(BOB, reason="executor hung")],
        [by(ALICE, reason=REPORT_MISSING)],
        [signed_request(BOB, request(BOB, RUN.run, boot=2))],
    ],
)
def test_what_is_enough(evidence: list[Signed]) -> None:
    """Two observers, its own word, the step coordinator's about Reports, a newer boot's request."""
    assert verdict(REPAIR, evidence) == ""


def test_nobody_speaks_for_a_newer_boot_of_another() -> None:
    of_another = signed_request(BOB, request(PEOPLE[2], RUN.run, boot=2))
    assert verdict(REPAIR, [of_another]) == TOO_FEW.format(0)
    forged = signed_request(PEOPLE[2], request(BOB, RUN.run, boot=2))
    assert verdict(REPAIR, [forged]) == TOO_FEW.format(0)
    foreign = signed_request(BOB, request(BOB, b"x" * 32, boot=2))
    assert verdict(REPAIR, [foreign]) == TOO_FEW.format(0)
    same = signed_request(BOB, request(BOB, RUN.run, boot=1))
    assert verdict(REPAIR, [same]) == TOO_FEW.format(0)


def test_the_reviewer_may_have_heard_the_newer_boot_itself() -> None:
    assert verdict(REPAIR, context=ReviewContext(RUN, 4, boots={BOB.peer: 2})) == ""
    heard = ReviewContext(RUN, 4, boots={BOB.peer: 1})
    assert verdict(REPAIR, context=heard) == TOO_FEW.format(0)


def test_who_is_left_out_as_well_is_no_observer() -> None:
    gone = {member(1): "silent", member(3): "silent"}
    plan = adopted(draft_in(situation(RUN, FOUR, gone=gone)), FOUR.header)
    seen = [
        observation(PEOPLE[by], member(of), FOUR.header)
        for by, of in ((0, 1), (3, 1), (0, 3), (2, 3))
    ]
    assert verdict(plan, seen) == TOO_FEW.format(1)
    assert verdict(plan, [*seen, by(PEOPLE[2])]) == ""


def test_of_two_members_one_is_enough() -> None:
    two = begun(RUN, candidates(2, RUN, FOUR_LAYERS), 1)
    alone = adopted(draft_in(situation(RUN, two, gone={member(1): "silent"})), two.header)
    assert verdict(alone, previous=two).endswith("word of 0 observers, 1 are needed")
    assert verdict(alone, [observation(ALICE, member(1), two.header)], two) == ""


# --- check 2: council ---------------------------------------------------------------------------


def with_council(*numbers: int, kind: str = "planned") -> PlanHeader:
    return replace(FOUR_AGAIN.header, council=tuple(peers(*numbers)), kind=kind)


WILLING = [consent(PEOPLE[n], FOUR.header) for n in (1, 2, 3, 5)]


def test_new_voters_are_members_and_have_consented() -> None:
    def found(evidence: list[Signed], *council: int) -> str:
        return review(with_council(*council), FOUR.body, evidence, FOUR, CONTEXT)

    assert found(WILLING, 0, 1, 2) == ""
    assert found([], 0) == ""
    assert found(WILLING[:1], 0, 1, 2) == (
        f"council: {PEOPLE[2].peer} is to vote and has not consented in epoch 1"
    )
    stale = consent(PEOPLE[2], genesis(RUN).header)
    assert "has not consented" in found([WILLING[0], stale], 0, 1, 2)
    assert found(WILLING, 0, 1, 5) == f"council: {PEOPLE[5].peer} is to vote and is no member"


@pytest.mark.parametrize(
    ("council", "refusal"),
    [
        ((0, 1), "a council has 1, 3, 5 or 7 members, not 2"),
        ((0, 1, 1), "names somebody twice"),
        ((1, 2, 3), "3 come and 1 go"),
        ((), "a council has 1, 3, 5 or 7 members, not 0"),
    ],
)
def test_a_change_of_the_council_is_legal(council: tuple[int, ...], refusal: str) -> None:
    found = review(with_council(*council), FOUR.body, WILLING, FOUR, CONTEXT)
    assert found.startswith("council: ") and refusal in found


# --- check 3 ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "good"), [(1.0, True), (1.009, True), (1.02, False), (0.5, False)]
)
def test_the_claimed_time_is_the_models(factor: float, good: bool) -> None:
    """Four layers of 1 s; one microbatch takes 4 s, four take 2 s each, by one replica. Links are
    not measured: what is believed of them takes some milliseconds."""
    refusal = verdict(REPAIR, SEEN_BY_TWO, step_seconds=factor * 12.0)
    claim = f"step_seconds: the plan claims {factor * 12:.4g} s, the model says 12 s"
    assert refusal == ("" if good else claim)


def test_a_claim_that_is_no_number_is_refused() -> None:
    assert verdict(REPAIR, SEEN_BY_TWO, step_seconds=float("nan")).startswith("step_seconds: ")


# --- check 4 ------------------------------------------------------------------------------------


def poor_plan(groups: Sequence[Sequence[int]], standby: Sequence[tuple[int, int, str]]) -> Known:
    """A planned plan after FOUR with these roles, otherwise as it should be."""
    members = candidates(4, RUN, FOUR_LAYERS)
    problem = problem_for(RUN.training, members, {}, before=FOUR.body)
    body = plan_of(
        problem,
        members,
        [(0, 2), (2, 4)],
        [[member(n) for n in group] for group in groups],
        [StandbyPlan(member(n), stage, why) for n, stage, why in standby],
        programs=False,
    )
    return adopted(Draft(body, "planned", 1, 0, FOUR.header.council), FOUR.header)


def test_a_plan_that_is_much_worse_than_greedy_moves_is_refused_with_a_better_one() -> None:
    """Without 1, stage 0 takes 2 s per microbatch instead of 1 s."""
    poor = poor_plan([[0], [2, 3]], [(1, 0, "nobody needs it")])
    refusal = verdict(poor)
    assert refusal == "quality: the plan leads to 12 s per step, greedy moves to 8.004 s"
    assert is_too_poor(refusal)
    better = better_plan(poor.body, (), FOUR, CONTEXT)
    assert better is not None
    assert groups(better) == groups(FOUR.body)
    repair = Known(replace(poor.header, kind="repair"), poor.body)
    assert verdict(repair) == ""  # it gives work to those who can do it at once


def test_who_is_on_its_way_to_work_counts() -> None:
    assert verdict(poor_plan([[0], [2, 3]], [(1, 0, "")])) == ""


def test_a_member_whose_links_fail_need_not_work_but_not_all_links_fail() -> None:
    """By the plan before, a repair, they stand by."""
    for benched, refusal in (
        ([(1, 0, LINKS_FAIL)], ""),
        (
            [(1, 0, LINKS_FAIL), (3, 1, LINKS_FAIL)],
            "links: those of 2 of 4 members are said to fail",
        ),
    ):
        gone = {number for number, _, _ in benched}
        groups = [[n for n in pair if n not in gone] for pair in ((0, 1), (2, 3))]
        before = poor_plan(groups, benched)
        again = replace(before.header, epoch=before.header.epoch + 1)
        claim = replace(before.body, step_seconds=before.body.step_seconds * 1.001)
        assert review(again, claim, (), before, CONTEXT) == refusal


# --- check 5 ------------------------------------------------------------------------------------


def test_a_plan_is_judged_by_the_estimates_that_come_with_it() -> None:
    """0 alone hosts stage 0 and takes twice as long as it said: 6 s for one microbatch, and four
    times 4 s."""
    slow = estimates(0, slowdown=2.0)
    assert verdict(REPAIR, [*SEEN_BY_TWO, slow]) == (
        "step_seconds: the plan claims 12 s, the model says 22 s"
    )
    now = situation(RUN, FOUR, gone={member(1): "silent"}, estimates={slow.signer: slow})
    honest = adopted(draft_in(now), FOUR.header)
    assert verdict(honest, [*SEEN_BY_TWO, slow]) == ""
    assert verdict(honest, SEEN_BY_TWO) == (
        "step_seconds: the plan claims 22 s, the model says 12 s"
    )


def repaired_with(told: Sequence[Signed]) -> Known:
    """FOUR once more, as a repair since work was lost, by these estimates."""
    by_peer = {signed.signer: signed for signed in told}
    now = situation(RUN, FOUR, lost_work="a link broke", estimates=by_peer)
    return adopted(draft_in(now), FOUR.header)


def test_estimates_are_their_peers_own_and_of_this_run_and_boot() -> None:
    plan = repaired_with(())
    of_another_run = estimates(1, manifest(run=training(steps=7)), slowdown=2.0)
    assert verdict(plan, [of_another_run]) == f"estimates: {PEOPLE[1].peer} signs for another run"
    assert verdict(plan, [estimates(1, boot=2, slowdown=2.0)]) == ""  # they do not count
    forged = replace(estimates(1, slowdown=2.0), signer=PEOPLE[2].peer)
    assert verdict(plan, [forged]) == ""  # nobody signed it, so it is no estimate
    told = decode_record(estimates(1, slowdown=2.0).payload, Estimates)
    for_another = sign_record(PEOPLE[2], ESTIMATES_PURPOSE, told)
    assert verdict(plan, [for_another]) == (
        f"estimates: {PEOPLE[2].peer} signs those of {PEOPLE[1].peer}"
    )


def planned_with(told: Sequence[Signed]) -> Known:
    """FOUR with a newcomer, planned by these estimates."""
    known = {each.signer: each for each in told}
    joining = [newcomer(5, RUN)]
    draft = draft_in(situation(RUN, FOUR, settled=True, joining=joining, estimates=known))
    assert draft.kind == "planned"
    return adopted(draft, FOUR.header)


def test_a_plan_takes_account_of_about_what_the_reviewer_has_told_last() -> None:
    known = {PEOPLE[1].peer: estimates(1, sequence=OLD_ESTIMATES + 3)}
    own = dataclasses.replace(CONTEXT, estimates=known, me=PEOPLE[1].peer)
    for sequence, good in ((OLD_ESTIMATES + 3, True), (3, True), (2, False)):
        told = [estimates(1, sequence=sequence)]
        plan = planned_with(told)
        refusal = f"estimates: those of {PEOPLE[1].peer} have number 2, it has told number 9"
        assert review(plan.header, plan.body, told, FOUR, own) == ("" if good else refusal)
    plan = planned_with(())
    assert "have number 0, it has told number 9" in review(plan.header, plan.body, (), FOUR, own)


def test_what_others_have_told_may_be_on_its_way_and_a_repair_waits_for_nothing() -> None:
    known = {PEOPLE[1].peer: estimates(1, sequence=OLD_ESTIMATES + 3)}
    others = dataclasses.replace(CONTEXT, estimates=known, me=PEOPLE[2].peer)
    plan = planned_with(())
    assert review(plan.header, plan.body, (), FOUR, others) == ""
    own = dataclasses.replace(others, me=PEOPLE[1].peer)
    assert verdict(repaired_with(()), context=own) == ""


@pytest.mark.parametrize(
    "changes",
    [{"seconds": [1.0] * 3}, {"seconds": [1e-3] * 4}, {"numerics": "other"}, {"digest": b""}],
    ids=["a layer less", "another speed", "other numerics", "no data"],
)
def test_whoever_is_kept_has_not_asked_for_anything_else(changes: dict[str, Any]) -> None:
    plan = planned_with(())
    number = [each.signer for each in plan.body.members].index(PEOPLE[2].peer)
    requests = list(plan.body.requests)
    asked = request(PEOPLE[2], RUN.run, **{"seconds": FOUR_LAYERS, **changes})
    requests[number] = signed_request(PEOPLE[2], asked)
    body = replace(plan.body, requests=tuple(requests))
    refusal = review(plan.header, body, (), FOUR, CONTEXT)
    assert refusal == (
        f"members: {PEOPLE[2].peer} is kept, with another record or join request than before"
    )


@pytest.mark.parametrize("window", [5, 2**53])
def test_no_replica_takes_more_at_a_time_than_a_step_has(window: int) -> None:
    plan = planned_with(())
    first = replace(plan.body.stages[0], window=window)
    body = replace(plan.body, stages=(first, *plan.body.stages[1:]))
    refusal = review(plan.header, body, (), FOUR, CONTEXT)
    assert f"window: stage 0 takes {window} microbatches at a time; a step has 4" in refusal


def test_exact_mode_refuses_other_numerics() -> None:
    exact = manifest(run=training(determinism="exact"))
    before = begun(exact, candidates(2, exact, FOUR_LAYERS), 1)
    other = candidate(
        PEOPLE[5],
        exact,
        request(PEOPLE[5], exact.run, seconds=FOUR_LAYERS, epoch=1, numerics="other"),
    )
    plan = adopted(draft_in(situation(exact, before, joining=[other], settled=True)), before.header)
    assert "numerics fingerprint differs" in verdict(plan, (), before, ReviewContext(exact, 4))


def test_a_plan_is_judged_by_the_horizon_that_favours_it() -> None:
    """Three peers take three times as long as they said, so one of the others should move to them.
    It fetches 40 MB at 1 MB per second: worth it if plans last for an hour, not for half a minute.
    Who has just started expects the former, who has seen many come and go the latter."""
    run = manifest(run=training(steps=100, microbatches=1000))
    asked = {"seconds": FOUR_LAYERS, "parameter_bytes": 20_000_000, "memory_bytes": 1 << 40}
    people = [candidate(who, run, request(who, run.run, **asked)) for who in PEOPLE[:6]]
    before = begun(run, people, 2)
    told = {
        PEOPLE[n].peer: estimates(
            n,
            run,
            slowdown=3.0 if n < 3 else 1.0,
            links=[(other, 1e6, 0.001) for other in range(6) if other != n],
        )
        for n in range(6)
    }
    moving = draft_in(
        situation(run, before, settled=True, estimates=told, horizon_seconds=LONGEST_SECONDS)
    )
    assert "moves from stage 1 to stage 0" in moving.body.reason
    plan = adopted(moving, before.header)
    for horizon in (SHORTEST_SECONDS, 256.0, LONGEST_SECONDS):
        context = ReviewContext(run, 4, estimates=told, horizon_seconds=horizon)
        assert review(plan.header, plan.body, tuple(told.values()), before, context) == ""


def test_no_more_are_parked_by_a_planned_plan_than_reviewers_bear() -> None:
    """Two pairs of six peers lose what they send each other: a repair lets two stand by."""
    run = manifest(run=training(steps=100))
    before = begun(run, candidates(6, run, FOUR_LAYERS), 2)
    apart = ((PEOPLE[0].peer, PEOPLE[3].peer), (PEOPLE[1].peer, PEOPLE[4].peer))
    repair = draft_in(situation(run, before, lost_work="a link broke", apart=apart))
    repaired = adopted(repair, before.header)
    parked = [each for each in repaired.body.standby if each.reason == LINKS_FAIL]
    assert len(parked) == 2
    joining = [newcomer(8, run, epoch=2)]
    draft = draft_in(situation(run, repaired, apart=apart, settled=True, joining=joining))
    plan = adopted(draft, repaired.header)
    assert review(plan.header, plan.body, (), repaired, ReviewContext(run, 4)) == ""
    working = {each.peer for stage in plan.body.stages for each in stage.replicas}
    assert not any(one in working and other in working for one, other in apart)
