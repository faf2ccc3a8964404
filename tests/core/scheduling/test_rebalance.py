"""Greedy moves and the greedy answer; the known bounds, under their assumptions."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.scheduling.cost import predict
from swarm.core.scheduling.greedy import greedy_answer
from swarm.core.scheduling.problem import (
    Assignment,
    Holding,
    Problem,
    Standby,
    Terms,
    check_assignment,
)
from swarm.core.scheduling.rebalance import Move, rebalanced, repaired, stage_seconds
from swarm.core.scheduling.solver import Budget, solve
from swarm.core.scheduling.starts import deal
from swarm.core.scheduling.wiring import proportional_flow
from swarm.errors import NoFeasiblePlan
from tests.core.problems import (
    assignment_of,
    plain_problem,
    random_assignment,
    random_problem,
)

seeds = st.integers(0, 10**6)


# --- by hand --------------------------------------------------------------------------------------


def test_a_replica_moves_into_the_slowest_stage() -> None:
    problem = plain_problem([1, 1, 1, 1], layers=2)
    after, moves = rebalanced(problem, assignment_of(problem, [1], [[0, 1, 2], [3]]))
    assert after.groups == ((1, 2), (0, 3))
    assert moves == (Move(0, 0, 1, 0.5, 0.0),)


def test_a_newcomer_joins_the_slowest_stage() -> None:
    problem = plain_problem([1, 1, 1, 1], layers=2)
    after, moves = rebalanced(problem, assignment_of(problem, [1], [[0, 1], [2]]))
    assert after.groups == ((0, 1), (2, 3))
    assert after.standby == ()
    assert [(move.peer, move.source, move.target) for move in moves] == [(3, None, 1)]


def test_a_move_that_makes_another_stage_as_slow_is_not_made() -> None:
    problem = plain_problem([1, 1, 1], layers=2)
    before = assignment_of(problem, [1], [[0, 1], [2]])
    assert rebalanced(problem, before) == (before, ())


def test_the_most_gain_per_byte_wins() -> None:
    problem = plain_problem([1, 2, 1, 2], layers=2)
    before = assignment_of(problem, [1], [[0], [1]])
    # peers 2 and 3 stand by; peer 2 holds the slow stage, peer 3 is faster and would fetch it
    holdings = (Holding(0, 0, 1), Holding(1, 1, 2), Holding(2, 0, 1))
    _, moves = rebalanced(replace(problem, holdings=holdings), before)
    assert [(move.peer, move.fetched_bytes) for move in moves[:2]] == [(2, 0.0), (3, 300.0)]
    _, moves = rebalanced(replace(problem, holdings=holdings[:2]), before)
    assert [(move.peer, move.fetched_bytes) for move in moves[:1]] == [(3, 300.0)]


def test_small_gains_are_not_worth_a_change() -> None:
    problem = plain_problem([100, 100, 4], layers=2)
    before = assignment_of(problem, [1], [[0], [1]])
    assert rebalanced(problem, before)[1] == ()
    assert len(rebalanced(problem, before, hysteresis=0.01)[1]) == 1


def test_limits_and_memory_are_kept() -> None:
    terms = Terms(10, max_replicas=2, min_replicas=1)
    problem = plain_problem([1, 1, 1, 1], layers=4, terms=terms)
    before = assignment_of(problem, [1], [[0, 1], [2]])
    small = replace(problem.peers[3], memory_bytes=700)
    tight = replace(problem, peers=(*problem.peers[:3], small))
    assert rebalanced(problem, before)[0].groups == ((0, 1), (2, 3))
    # it has no room for three layers; peer 0 goes instead
    after = rebalanced(tight, before)[0]
    check_assignment(tight, after)
    assert 3 not in after.groups[1]


def test_a_repair_gives_work_to_survivors_and_the_ready_only() -> None:
    problem = plain_problem([1, 1, 1, 1, 1], layers=2)
    before = assignment_of(problem, [1], [[0, 1], [2]], feeders=[0, 1])
    after = repaired(problem, before, gone=[1], ready=[(3, 1)])
    assert after.groups == ((0,), (2, 3))
    assert after.feeders == (0,)
    assert after.standby == (Standby(1, "it is gone"), Standby(4, ""))
    with pytest.raises(NoFeasiblePlan, match="stage 1 has no replica left"):
        repaired(problem, before, gone=[2])
    assert repaired(problem, before, gone=[2], ready=[(4, 1)]).groups == ((0, 1), (4,))
    assert repaired(problem, before, gone=[2, 4], ready=[(4, 1), (3, 1)]).groups[1] == (3,)


def test_a_repair_finds_somebody_to_feed() -> None:
    problem = plain_problem([1, 1, 1], layers=2)
    before = assignment_of(problem, [1], [[0, 1], [2]], feeders=[0])
    assert repaired(problem, before, gone=[0]).feeders == (1, 2)
    peers = tuple(replace(peer, has_data=i == 0) for i, peer in enumerate(problem.peers))
    with pytest.raises(NoFeasiblePlan, match="nobody who is left has the data"):
        repaired(replace(problem, peers=peers), before, gone=[0])


# --- what is known: identical stages, free network and memory -------------------------------------

speeds_of_peers = st.lists(st.integers(1, 40).map(float), min_size=2, max_size=7)


def slowest_rate(problem: Problem, assignment: Assignment) -> float:
    """Sum of speeds of the poorest stage."""
    return min(sum(problem.speed[list(group)]) for group in assignment.groups)


def best_rate(speeds: list[float], stages: int) -> float:
    """The exact optimum of covering: the largest possible least sum."""
    return max(
        min(
            sum(speed for speed, at in zip(speeds, places, strict=True) if at == stage)
            for stage in range(stages)
        )
        for places in itertools.product(range(stages), repeat=len(speeds))
    )


def equal_stages(problem: Problem) -> tuple[tuple[int, int], ...]:
    return tuple((stage, stage + 1) for stage in range(len(problem.layers)))


@settings(max_examples=40, deadline=None)
@given(speeds_of_peers, st.integers(2, 4))
def test_largest_first_reaches_three_quarters(speeds: list[float], stages: int) -> None:
    """Csirik, Kellerer, Woeginger 1992: (3m - 1) / (4m - 2) of the optimum."""
    stages = min(stages, len(speeds))
    problem = plain_problem(speeds, layers=stages)
    groups = deal(problem, equal_stages(problem))
    made = assignment_of(problem, range(1, stages), groups)
    known = (3 * stages - 1) / (4 * stages - 2)
    assert slowest_rate(problem, made) >= known * best_rate(speeds, stages) * (1 - 1e-12)


def test_largest_first_does_reach_no_more_than_that() -> None:
    # two stages: 5/6 of the optimum is tight for 3, 3 | 2, 2, 2
    problem = plain_problem([3, 3, 2, 2, 2], layers=2)
    groups = deal(problem, equal_stages(problem))
    made = assignment_of(problem, [1], groups)
    assert slowest_rate(problem, made) == 5.0
    assert best_rate([3, 3, 2, 2, 2], 2) == 6.0


@settings(max_examples=40, deadline=None)
@given(speeds_of_peers, st.integers(2, 4), seeds)
def test_moves_reach_half_from_anywhere(speeds: list[float], stages: int, seed: int) -> None:
    """The docstring's m / (2m - 1), where no move helps any more."""
    stages = min(stages, len(speeds))
    problem = plain_problem(speeds, layers=stages)
    places = [(seed >> 2 * peer) % stages for peer in range(stages, len(speeds))]
    groups = [
        [stage, *(peer for peer, at in enumerate(places, start=stages) if at == stage)]
        for stage in range(stages)
    ]
    before = assignment_of(problem, range(1, stages), groups)
    after, _ = rebalanced(problem, before, hysteresis=0.0)
    known = stages / (2 * stages - 1)
    assert slowest_rate(problem, after) >= known * best_rate(speeds, stages) * (1 - 1e-9)
    assert slowest_rate(problem, after) >= slowest_rate(problem, before)


# --- always ---------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(seeds, seeds)
def test_every_move_speeds_up_the_slowest_stage_and_reloads_nothing(one: int, two: int) -> None:
    problem = random_problem(one)
    before = random_assignment(problem, two)
    after, moves = rebalanced(problem, before)
    groups = [list(group) for group in before.groups]
    for move in moves:
        seconds = _seconds(problem, before, groups)
        assert move.target == seconds.index(max(seconds))
        assert move.source != move.target
        assert move.peer not in groups[move.target]
        if move.source is not None:
            groups[move.source].remove(move.peer)
        groups[move.target] = sorted([*groups[move.target], move.peer])
        changed = _seconds(problem, before, groups)
        touched = [changed[s] for s in {move.source, move.target} if s is not None]
        assert max(touched) == pytest.approx(max(seconds) * (1 - move.gain))
        assert move.gain > 0.05
    assert after.groups == tuple(map(tuple, groups))
    assert after.ranges == before.ranges


def _seconds(problem: Problem, assignment: Assignment, groups: list[list[int]]) -> list[float]:
    pairs = zip(assignment.ranges, groups, strict=True)
    return [stage_seconds(problem, layers, group) for layers, group in pairs]


@settings(max_examples=50, deadline=None)
@given(seeds, seeds)
def test_what_was_rebalanced_stays(one: int, two: int) -> None:
    """The same figures once more change nothing: no oscillation."""
    problem = random_problem(one)
    after, _ = rebalanced(problem, random_assignment(problem, two))
    assert rebalanced(problem, after) == (after, ())


@settings(max_examples=10, deadline=None)
@given(seeds)
def test_the_greedy_answer_is_feasible_and_priced_without_a_solver(seed: int) -> None:
    problem = random_problem(seed)
    try:
        assignment, prediction = greedy_answer(problem)
    except NoFeasiblePlan:
        return
    check_assignment(problem, assignment)
    flow = proportional_flow(problem, assignment)
    assert prediction.step_seconds == predict(problem, assignment, flow).step_seconds
    assert greedy_answer(problem)[0] == assignment


@pytest.mark.parametrize("seed", [1, 4, 17])
def test_the_solver_is_no_worse_than_the_greedy_answer(seed: int) -> None:
    problem = random_problem(seed)
    _, greedy = greedy_answer(problem)
    solved = solve(problem, budget=Budget(programs=60, neighbours=200, descents=3, kicks=2))
    assert solved.prediction.step_seconds <= greedy.step_seconds * (1 + 1e-9)


def test_the_greedy_answer_knows_what_peers_do_now() -> None:
    problem = plain_problem([1, 1, 1], layers=2, bandwidth=10.0, terms=Terms(50))
    current = assignment_of(problem, [1], [[2], [1]], feeders=[2])
    holdings = (Holding(2, 0, 1), Holding(1, 1, 2))
    problem = replace(problem, current=current, holdings=holdings, horizon_seconds=1e-3)
    # nothing can be fetched within the horizon; who holds a stage keeps it, the third stands by
    assignment, prediction = greedy_answer(problem)
    assert (assignment.ranges, assignment.groups) == (current.ranges, current.groups)
    assert prediction.change_seconds == 0
