"""The first plan: everybody works, nothing depends on who asked first."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.packing import canonical, unpack
from protocol.records import MAX_TEXT_CHARS, Completed, Member, PlanBody
from swarm.core.scheduling.planning import (
    Candidate,
    candidates_of,
    completing_plan,
    evicted,
    first_plan,
    halting_plan,
    members_of,
    problem_for,
)
from swarm.core.verification import check_plan
from swarm.errors import NoFeasiblePlan
from tests.core.plans import PEOPLE, candidate, candidates, manifest, request, training

RUN = manifest()
layer_times = st.lists(st.integers(0, 40).map(float), min_size=1, max_size=6)


def sizes(body: PlanBody) -> list[int]:
    return [len(stage.replicas) for stage in body.stages]


def ranges(body: PlanBody) -> list[tuple[int, int]]:
    return [(stage.first, stage.last) for stage in body.stages]


@settings(max_examples=80, deadline=None)
@given(layer_times, st.integers(1, 12), st.data())
def test_every_first_plan_passes_the_check_of_plans(
    seconds: list[float], people: int, data: st.DataObject
) -> None:
    cuts = data.draw(st.sets(st.integers(1, len(seconds) - 1)) if len(seconds) > 1 else st.just(()))
    run = manifest(run=training(cuts=tuple(sorted(cuts))))
    stages = data.draw(st.integers(0, min(people, len(seconds))))
    holders = data.draw(st.sets(st.integers(0, people - 1), min_size=1))
    members = candidates(people, run, seconds, sorted(holders))
    if len(cuts) >= people:
        with pytest.raises(NoFeasiblePlan):
            first_plan(run.training, members, stages)
        return
    body = first_plan(run.training, members, stages)
    check_plan(body, run)
    assert unpack(canonical(body), PlanBody) == body
    if cuts or stages:
        assert sum(sizes(body)) == people  # all members are given work
    else:
        feeding = {each.member for each in body.feeders}
        working = feeding.union(*(stage.replicas for stage in body.stages))
        assert len(working) + len(body.standby) == people
    assert body.stages[-1].last == len(seconds)
    if cuts:
        assert [first for first, _ in ranges(body)[1:]] == sorted(cuts)
    elif stages:
        assert len(body.stages) == stages


@settings(max_examples=40, deadline=None)
@given(layer_times, st.integers(1, 8), st.randoms(use_true_random=False))
def test_the_order_in_which_peers_joined_does_not_matter(
    seconds: list[float], people: int, random: object
) -> None:
    members = candidates(people, RUN, seconds, range(0, people, 2))
    shuffled = list(members)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert first_plan(RUN.training, shuffled) == first_plan(RUN.training, members)


@pytest.mark.parametrize(
    ("people", "stages", "even"),
    [(6, 3, [2, 2, 2]), (7, 3, [3, 2, 2]), (8, 3, [3, 3, 2]), (3, 3, [1, 1, 1]), (5, 1, [5])],
)
def test_given_the_number_of_stages_peers_are_divided_evenly(
    people: int, stages: int, even: list[int]
) -> None:
    """Even where one layer is much slower: who gives the number has a reason."""
    body = first_plan(RUN.training, candidates(people, RUN, [1.0, 90.0, 1.0, 1.0]), stages)
    assert sizes(body) == even


def test_the_same_number_of_peers_has_as_much_speed_in_every_stage() -> None:
    """Two peers are twice as fast as four others, and two half as fast."""
    took = [0.5, 0.5, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    people = [
        candidate(who, RUN, request(who, RUN.run, seconds=[seconds] * 2, digest=b"d" * 32))
        for who, seconds in zip(PEOPLE, took, strict=False)
    ]
    speed = {each.member: 1 / seconds for each, seconds in zip(people, took, strict=True)}
    body = first_plan(RUN.training, people, 2)
    assert sizes(body) == [4, 4]
    assert [sum(speed[each] for each in stage.replicas) for stage in body.stages] == [4.5, 4.5]


def test_the_cuts_of_the_manifest_are_kept() -> None:
    run = manifest(run=training(cuts=(1, 3)))
    body = first_plan(run.training, candidates(4, run, [1.0, 9.0, 1.0, 9.0]), stages=2)
    assert ranges(body) == [(0, 1), (1, 3), (3, 4)]
    assert sizes(body) == [2, 1, 1]


def test_as_long_as_only_computing_takes_time_one_stage_is_predicted_fastest() -> None:
    """Layers of 1, 8 and 1 s, 4 microbatches, 8 peers: three stages with six replicas of the
    middle one take 10 + 4 * 8/6 s, one with eight 10 + 4 * 10/8: no group waits for another."""
    run = manifest(run=training(microbatches=4))
    body = first_plan(run.training, candidates(8, run, [1.0, 8.0, 1.0]))
    assert sizes(body) == [8]
    assert body.step_seconds == pytest.approx(10 + 4 * 10 / 8, rel=0.01)


@settings(max_examples=40, deadline=None)
@given(layer_times.filter(any), st.integers(1, 5))
def test_no_number_of_stages_with_even_groups_is_predicted_much_faster(
    seconds: list[float], people: int
) -> None:
    members = candidates(people, RUN, seconds)
    body = first_plan(RUN.training, members)
    even = [
        first_plan(RUN.training, members, count).step_seconds
        for count in range(1, min(people, len(seconds)) + 1)
    ]
    assert body.step_seconds <= min(even) * 1.02


def test_replicas_that_hold_the_data_are_dealt_to_stage_0_and_feed() -> None:
    members = candidates(4, RUN, holders=[1, 3])
    body = first_plan(RUN.training, members, stages=2)
    holders = [PEOPLE[1].peer, PEOPLE[3].peer]
    assert [member.peer for member in body.stages[0].replicas] == holders
    assert [feeder.member.peer for feeder in body.feeders] == holders
    assert body.wiring == (((1.0, 0.0), (0.0, 1.0)), ((0.5, 0.5), (0.5, 0.5)))


def test_a_holder_of_the_data_beyond_stage_0_does_not_feed() -> None:
    body = first_plan(RUN.training, candidates(4, RUN, [1.0] * 4), stages=4)
    assert [feeder.member.peer for feeder in body.feeders] == [PEOPLE[0].peer]


# --- what cannot be -----------------------------------------------------------------------------


def test_more_stages_than_peers() -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        first_plan(RUN.training, candidates(2, RUN, [1.0] * 5), stages=3)
    assert caught.value.what == "3 stages need 3 peers, 2 have joined"
    assert caught.value.hint == "wait for more peers, or ask for fewer stages"


def test_more_stages_than_layers() -> None:
    with pytest.raises(NoFeasiblePlan, match="3 stages need 3 layers, the model has 2"):
        first_plan(RUN.training, candidates(3, RUN), stages=3)


def test_cuts_beyond_the_model() -> None:
    run = manifest(run=training(cuts=(1, 7)))
    with pytest.raises(NoFeasiblePlan, match=r"\[1, 7\] are beyond the model's 4 layers"):
        first_plan(run.training, candidates(3, run, [1.0] * 4))


def test_nobody_has_the_data() -> None:
    with pytest.raises(NoFeasiblePlan, match="no peer has the data"):
        first_plan(RUN.training, candidates(2, RUN, holders=[]))


def test_nobody_at_all() -> None:
    with pytest.raises(NoFeasiblePlan, match="no peer has joined"):
        first_plan(RUN.training, [])


# --- plans that follow ----------------------------------------------------------------------------


def test_a_completing_plan_changes_nothing_but_what_is_complete() -> None:
    body = first_plan(RUN.training, candidates(3, RUN))
    completed = Completed(3, (b"h" * 32, b"i" * 32))
    ended = completing_plan(body, completed, ended=True)
    assert ended == msgspec.structs.replace(
        body,
        completed=completed,
        ended=True,
        reason="version 3 is complete, the run has ended",
    )
    check_plan(ended, RUN)
    assert completing_plan(body, completed, ended=False).reason == "version 3 is complete"


def test_a_halting_plan_says_why() -> None:
    body = first_plan(RUN.training, candidates(3, RUN))
    halted = halting_plan(body, "the loss is not finite")
    assert halted == msgspec.structs.replace(
        body, halted="the loss is not finite", reason="the loss is not finite"
    )
    check_plan(halted, RUN)


def test_however_much_there_is_to_say_a_halting_plan_can_be_read() -> None:
    """Every microbatch of a large step may have failed in its own layer."""
    why = ", ".join(f"microbatch {n} in layer transformer.{n}" for n in range(1000))
    halted = halting_plan(first_plan(RUN.training, candidates(1, RUN)), why)
    assert unpack(canonical(halted), PlanBody) == halted
    assert halted.halted[:1000] == why[:1000]
    assert len(halted.halted) == MAX_TEXT_CHARS


def with_memory(memory_bytes: int) -> list[Candidate]:
    """Four peers, one of them with this little memory."""
    members = candidates(4, RUN, [1.0, 1.0])
    request = msgspec.structs.replace(members[2].request, memory_bytes=memory_bytes)
    return [*members[:2], candidate(PEOPLE[2], RUN, request), members[3]]


def test_the_fewest_stages_whose_state_fits_into_the_smallest_memory() -> None:
    """Standard AdamW keeps six times the parameters: weights, gradient, two moments, two sums.

    The two layers have 16 bytes of parameters each."""
    for memory_bytes, stages in ((192, 1), (191, 2), (96, 2)):
        assert len(first_plan(RUN.training, with_memory(memory_bytes)).stages) == stages
    with pytest.raises(NoFeasiblePlan, match="96 bytes of memory"):
        first_plan(RUN.training, with_memory(95), stages=2)
    exact = manifest(run=training(determinism="exact"))
    with pytest.raises(NoFeasiblePlan, match="128 bytes of memory"):
        first_plan(exact.training, with_memory(127), stages=2)


# --- who stands by ------------------------------------------------------------------------------


def test_further_peers_of_a_stage_stand_by_where_the_manifest_limits_its_replicas() -> None:
    """Seven peers for three stages of at most two: 3, 2 and 2, so one stands by for stage 0."""
    run = manifest(run=training(max_replicas=2))
    body = first_plan(run.training, candidates(7, run, [1.0] * 3), stages=3)
    check_plan(body, run)
    assert sizes(body) == [2, 2, 2]
    assert [(each.member.peer, each.stage) for each in body.standby] == [(PEOPLE[2].peer, 0)]
    # 3 s for one microbatch, 4 of them at 1 s by two replicas
    assert body.step_seconds == pytest.approx(3 + 4 / 2, rel=0.01)


def test_who_stands_by_is_not_counted_on() -> None:
    run = manifest(run=training(max_replicas=2))
    body = first_plan(run.training, candidates(6, run, [1.0] * 2), stages=2)
    assert [each.stage for each in body.standby] == [0, 1]
    # 2 s for one microbatch, 4 of them at 1 s by two replicas, not by three
    assert body.step_seconds == pytest.approx(2 + 4 / 2, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(layer_times, st.integers(1, 10), st.integers(1, 3), st.data())
def test_everybody_works_or_stands_by(
    seconds: list[float], people: int, limit: int, data: st.DataObject
) -> None:
    run = manifest(run=training(max_replicas=limit))
    stages = data.draw(st.integers(0, min(people, len(seconds))))
    holders = data.draw(st.sets(st.integers(0, people - 1), min_size=1))
    body = first_plan(run.training, candidates(people, run, seconds, sorted(holders)), stages)
    check_plan(body, run)
    working = [member.peer for stage in body.stages for member in stage.replicas]
    waiting = [each.member.peer for each in body.standby]
    feeding = [each.member.peer for each in body.feeders if each.member.peer not in working]
    assert sorted(working + waiting + feeding) == [who.peer for who in PEOPLE[:people]]
    assert all(size <= limit for size in sizes(body))
    # Nobody stands by for a stage that has room without a reason.
    assert all(sizes(body)[each.stage] == limit or each.reason for each in body.standby)
    if stages:  # the data stays where it is fed
        assert all(feeder.member in body.stages[0].replicas for feeder in body.feeders)


def test_what_members_said_of_themselves_can_be_read_from_a_plan() -> None:
    members = candidates(4, RUN, [1.0, 2.0], holders=[2])
    body = first_plan(RUN.training, members[::-1])
    assert list(candidates_of(body).items()) == [(who.request.peer, who) for who in members]
    assert members_of(body) == tuple(who.member for who in members)
    assert [peer.id for peer in problem_for(RUN.training, members, {}).peers] == [
        who.request.peer for who in members
    ]


def test_who_is_evicted_is_a_matter_of_boots() -> None:
    before = first_plan(RUN.training, candidates(3, RUN))
    again = candidate(PEOPLE[1], RUN, request(PEOPLE[1], RUN.run, boot=2))
    after = first_plan(RUN.training, [candidates(1, RUN)[0], again])
    assert evicted(before, after) == (Member(PEOPLE[1].peer, 1), Member(PEOPLE[2].peer, 1))
    assert evicted(before, before) == ()
