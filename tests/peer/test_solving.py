"""When a full solve is asked for, and when its answer is aimed at."""

from dataclasses import replace

import msgspec
import pytest

from protocol.records import PlanBody
from swarm.core.scheduling.aims import step_seconds
from swarm.core.scheduling.planning import problem_for
from swarm.core.scheduling.problem import Assignment, Problem, Standby
from swarm.core.scheduling.rebalance import HYSTERESIS
from swarm.peer.solving import AGAIN_SECONDS, SOON_SECONDS, Solving, seconds_by
from tests.core.drafts import FOUR, FOUR_LAYERS, RUN
from tests.core.plans import PEOPLE, candidates
from tests.core.scheduling.test_snapshot import estimates

MEMBERS = candidates(4, RUN, FOUR_LAYERS)
PROBLEM = problem_for(RUN.training, MEMBERS, {}, before=FOUR.body)
NAMES = [who.peer for who in PEOPLE[:4]]


def slow(factor: float, *numbers: int) -> Problem:
    """The same swarm, in which some peers take `factor` times as long."""
    told = {PEOPLE[n].peer: estimates(n, slowdown=factor) for n in numbers}
    return problem_for(RUN.training, MEMBERS, told, before=FOUR.body)


def groups(*groups: tuple[int, ...], standby: tuple[Standby, ...] = ()) -> Assignment:
    return Assignment(((0, 2), (2, 4)), groups, groups[0], standby)


def test_new_roles_are_solved_at_once_and_new_figures_after_a_while() -> None:
    solving = Solving()
    assert solving.is_due(("first",), 0.0)
    assert solving.question(PROBLEM, ("first",), 3, 0.0, 8.0) is not None
    assert not solving.is_due(("second",), 1.0)  # one at a time
    solving.answered(PROBLEM, None)
    assert not solving.is_due(("first",), SOON_SECONDS - 1)
    assert solving.is_due(("first",), SOON_SECONDS)
    other = slow(2.0, 0)
    assert solving.question(other, ("first",), 3, SOON_SECONDS, 8.5) is None  # about the same
    assert solving.question(PROBLEM, ("first",), 3, AGAIN_SECONDS, 8.0) is None  # nothing is new
    assert solving.question(other, ("first",), 3, AGAIN_SECONDS + 1, 8.5) is None
    assert solving.question(other, ("first",), 3, 2 * AGAIN_SECONDS, 8.5) is not None
    solving.answered(PROBLEM, None)
    assert solving.is_due(("second",), 2 * AGAIN_SECONDS)


@pytest.mark.parametrize("seconds", [8.9, 7.0])
def test_a_plan_that_proves_much_slower_or_faster_is_solved_again_soon(seconds: float) -> None:
    solving = Solving()
    assert solving.question(PROBLEM, ("first",), 3, 0.0, 8.0) is not None
    solving.answered(PROBLEM, None)
    other = slow(2.0, 0)
    assert solving.question(other, ("first",), 3, SOON_SECONDS, seconds) is not None


def test_a_step_takes_what_the_plan_leads_to_takes() -> None:
    assert seconds_by(slow(2.0, 0, 1, 2, 3), FOUR.body) > seconds_by(PROBLEM, FOUR.body) > 0
    without_data = tuple(replace(peer, has_data=False) for peer in PROBLEM.peers)
    assert seconds_by(replace(PROBLEM, peers=without_data), FOUR.body) == 0


def test_who_has_looked_and_seen_nothing_does_not_look_at_once_again() -> None:
    """A problem of a thousand peers takes a second to make."""
    solving = Solving()
    solving.question(PROBLEM, ("first",), 3, 0.0, 8.0)
    solving.answered(PROBLEM, None)
    assert solving.question(slow(2.0, 0), ("first",), 3, SOON_SECONDS, 8.5) is None
    assert not solving.is_due(("first",), SOON_SECONDS + 1)
    assert solving.is_due(("first",), 2 * SOON_SECONDS)


def test_a_failed_solve_is_an_answer() -> None:
    solving = Solving()
    solving.question(PROBLEM, (), 0, 0.0)
    assert not solving.is_answered(NAMES)
    solving.answered(PROBLEM, None)
    assert solving.is_answered(NAMES)
    assert solving.answer is None
    assert not solving.is_answered(NAMES[1:])


def test_what_repays_its_moves_is_aimed_at_until_a_plan_leads_there() -> None:
    """0 and 1 take eight times as long: the others in stage 0 and 1 alone cannot be reached by
    moving one; exchanging 1 and 2 makes both stages equal."""
    uneven = slow(8.0, 0, 1)
    exchanged = groups((0, 2), (1, 3))
    now = groups((0, 1), (2, 3))
    assert step_seconds(uneven, exchanged) < step_seconds(uneven, now) * (1 - HYSTERESIS)
    solving = Solving()
    assert solving.propose(uneven, FOUR.body, exchanged)
    assert solving.target == dict(zip(NAMES, (0, 1, 0, 1), strict=True))
    assert not solving.propose(uneven, FOUR.body, exchanged)  # it is the target already
    solving.adopted(FOUR.body)
    assert solving.target
    there = replace_groups(((0, 2), (1, 3)))
    solving.adopted(there)
    assert not solving.target


def replace_groups(groups: tuple[tuple[int, ...], ...]) -> PlanBody:
    """FOUR with other replicas."""
    members = [each.member for each in MEMBERS]
    stages = tuple(
        msgspec.structs.replace(stage, replicas=tuple(members[n] for n in group))
        for stage, group in zip(FOUR.body.stages, groups, strict=True)
    )
    return msgspec.structs.replace(FOUR.body, stages=stages)


def test_a_target_says_who_is_to_have_no_work() -> None:
    uneven = slow(1e5, 0)
    left_out = groups((1,), (2, 3), standby=(Standby(0, "it is too slow"),))
    solving = Solving()
    assert solving.propose(uneven, FOUR.body, left_out)
    assert solving.target[NAMES[0]] == "it is too slow"


@pytest.mark.parametrize(
    "other",
    [
        groups((0, 1), (2, 3)),  # what is
        Assignment(((0, 3), (3, 4)), ((0, 1), (2, 3)), (0, 1)),  # other stages
        groups((0, 1, 2), (3,)),  # worse
    ],
)
def test_what_is_no_better_is_not_aimed_at(other: Assignment) -> None:
    solving = Solving()
    assert not solving.propose(PROBLEM, FOUR.body, other)
    assert not solving.target


def test_moves_are_worth_it_if_the_plan_lasts_long_enough() -> None:
    """Two layers of 10 MB and twice as much of moments come in half a second by 125 MB/s."""
    uneven = slow(1.6, 0, 1)
    large = tuple(replace(layer, parameter_bytes=10**7) for layer in uneven.layers)
    exchanged = groups((0, 2), (1, 3))
    for horizon_seconds, good in ((60.0, True), (1.0, False)):
        problem = replace(uneven, layers=large, horizon_seconds=horizon_seconds)
        assert Solving().propose(problem, FOUR.body, exchanged) is good


def test_a_target_ends_with_the_stages_that_it_means() -> None:
    uneven = slow(8.0, 0, 1)
    solving = Solving()
    assert solving.propose(uneven, FOUR.body, groups((0, 2), (1, 3)))
    one = msgspec.structs.replace(FOUR.body.stages[0], last=4)
    solving.adopted(msgspec.structs.replace(FOUR.body, stages=(one,)))
    assert not solving.target


def test_nothing_is_aimed_at_that_does_not_fit_into_memory() -> None:
    uneven = slow(8.0, 0, 1)
    small = tuple(
        replace(peer, memory_bytes=1) if number == 2 else peer
        for number, peer in enumerate(uneven.peers)
    )
    exchanged = groups((0, 2), (1, 3))
    assert not Solving().propose(replace(uneven, peers=small), FOUR.body, exchanged)
