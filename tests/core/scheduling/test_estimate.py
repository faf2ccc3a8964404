"""The estimate that the search on grids minimises: by hand, and against the cost model."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.scheduling.cost import predict, reduction_seconds, shard_shares
from swarm.core.scheduling.estimate import (
    INFEASIBLE,
    Estimate,
    Reference,
    Units,
    grids_of,
    groups_of,
)
from swarm.core.scheduling.grid import EMPTY, evaluate
from swarm.core.scheduling.nearness import bundled, near_order, places
from swarm.core.scheduling.problem import Assignment, Links, Problem, Terms
from tests.core.problems import assignment_of, plain_problem, random_assignment, random_problem

seeds = st.integers(0, 10**6)


def estimate_of(problem: Problem, assignment: Assignment, units: Units | None = None) -> Estimate:
    """Nothing is known of any assignment."""
    stages = len(assignment.ranges)
    units = units or Units(problem, [(peer,) for peer in range(len(problem.peers))])
    return Estimate(problem, assignment.ranges, units, Reference(0.0, 0.0, (0.0,) * stages, 0.0))


def estimated(problem: Problem, assignment: Assignment, width: int = 0) -> float:
    groups = assignment.groups
    units = [(peer,) for peer in range(len(problem.peers))]
    (grid,) = grids_of([groups], units, width or max(map(len, groups)))
    return evaluate(estimate_of(problem, assignment), len(groups), grid)


def test_where_all_is_even_the_estimate_is_the_prediction() -> None:
    problem = plain_problem([1] * 4, bandwidth=1e15, latency=0.25)
    links = Links(problem.links.bandwidth, problem.links.latency_seconds)
    assignment = assignment_of(replace(problem, links=links), [2], [[0, 1], [2, 3]])
    found = predict(problem, assignment)
    # 10 microbatches of 3 s in each stage; 12 s of compute, the way there and back, a reduction
    assert found.step_seconds == pytest.approx(10 * 3 + 12 + 0.5 + 0.5)
    assert estimated(problem, assignment) == pytest.approx(found.step_seconds)


def test_one_stage_has_its_compute_too() -> None:
    problem = plain_problem([1, 1])
    assignment = assignment_of(problem, [], [[0, 1]])
    assert estimated(problem, assignment) == pytest.approx(10 * 6 + 12)


def test_a_link_that_is_slower_than_both_stages_counts() -> None:
    problem = plain_problem([1, 1], layers=2, bandwidth=2.0)
    assignment = assignment_of(problem, [1], [[0], [1]])
    # 10 bytes there and 10 back take 5 s each, both at once; a stage takes 3 s
    assert estimated(problem, assignment) == pytest.approx(10 * 5 + 6 + 10)


def test_what_does_not_fit_is_dearer_than_anything() -> None:
    problem = plain_problem([1, 1, 1], terms=Terms(10, min_replicas=1, max_replicas=2))
    good = assignment_of(problem, [2], [[0], [1, 2]])
    assert estimated(problem, good) < INFEASIBLE
    small = replace(problem.peers[1], memory_bytes=10)
    tight = replace(problem, peers=(problem.peers[0], small, problem.peers[2]))
    assert estimated(tight, good) > INFEASIBLE / 2
    assert estimated(problem, assignment_of(problem, [], [[0, 1, 2]])) > INFEASIBLE
    estimate = estimate_of(problem, good)
    nobody = np.full((2, 1), EMPTY)
    assert estimate.group_costs(np.array([1]), nobody)[0] > INFEASIBLE


@settings(max_examples=40, deadline=None)
@given(seeds, seeds)
def test_places_in_a_group_and_empty_ones_change_nothing(one: int, two: int) -> None:
    problem = random_problem(one)
    assignment = random_assignment(problem, two)
    stages = len(assignment.groups)
    units = [(peer,) for peer in range(len(problem.peers))]
    estimate = estimate_of(problem, assignment)
    (grid,) = grids_of([assignment.groups], units, max(map(len, assignment.groups)))
    expected = evaluate(estimate, stages, grid)
    (wide,) = grids_of([assignment.groups], units, len(units) + 2)
    rng = np.random.default_rng(two)
    shuffled = np.stack([rng.permutation(row) for row in wide])
    assert evaluate(estimate, stages, shuffled) == pytest.approx(expected, rel=1e-9)
    assert groups_of(shuffled, stages, units) == assignment.groups


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(2, 5))
def test_reductions_are_those_of_the_cost_model_where_links_do_not_limit(
    seed: int, size: int
) -> None:
    """Widths of links inside a group are left out: the estimate is exact without them."""
    problem = random_problem(seed, least_peers=5)
    count = len(problem.peers)
    problem = replace(
        problem,
        links=Links(np.full((count, count), 1e15), np.zeros((count, count))),
        peers=tuple(replace(peer, memory_bytes=10**15) for peer in problem.peers),
        terms=replace(problem.terms, max_replicas=0),
    )
    group = list(range(size))
    size_bytes = problem.parameter_bytes(0, len(problem.layers))
    exact = reduction_seconds(problem, group, size_bytes, shard_shares(problem, group))
    assignment = assignment_of(problem, [], [group])
    free = replace(problem, terms=replace(problem.terms, reduction_ratio=0.0))
    difference = estimated(problem, assignment) - estimated(free, assignment)
    assert difference == pytest.approx(exact, rel=1e-6)


def test_a_bundle_costs_what_its_peers_cost() -> None:
    """But for its reduction: links within a bundle count as their mean."""
    problem = plain_problem([1, 1, 1, 1], bandwidth=1e3, terms=Terms(10, reduction_ratio=0.0))
    assignment = assignment_of(problem, [2], [[0, 1], [2, 3]])
    units = Units(problem, [(0, 1), (2, 3)])
    (grid,) = grids_of([assignment.groups], units.groups, 1)
    bundled_cost = evaluate(estimate_of(problem, assignment, units), 2, grid)
    assert bundled_cost == pytest.approx(estimated(problem, assignment))


# --- who is near ----------------------------------------------------------------------------------


def two_places(count: int) -> Problem:
    problem = plain_problem([1] * count, bandwidth=1e6)
    place = np.arange(count) % 2
    near = place[:, None] == place
    return replace(problem, links=Links(np.where(near, 1e6, 1e3), np.where(near, 0.001, 0.1)))


def test_near_peers_follow_each_other() -> None:
    problem = two_places(40)
    order, _ = near_order(problem)
    assert sorted(order.tolist()) == list(range(40))
    assert len({peer % 2 for peer in order[:20].tolist()}) == 1
    for place in places(problem):
        assert len({peer % 2 for peer in place}) == 1
    assert sorted(peer for place in places(problem) for peer in place) == list(range(40))


@pytest.mark.parametrize("most", [1, 7, 20, 40, 100])
def test_bundles_have_everybody_once(most: int) -> None:
    units = bundled(two_places(40), most)
    assert sorted(peer for unit in units for peer in unit) == list(range(40))
    assert len(units) <= most
    apart = bundled(two_places(40), most, [range(9), range(12, 30)])
    assert sorted(peer for unit in apart for peer in unit) == list(range(40))
    for unit in apart if most < 40 else ():
        assert len({(peer < 9) + 2 * (12 <= peer < 30) for peer in unit}) == 1
    assert len(apart) <= most + 2
