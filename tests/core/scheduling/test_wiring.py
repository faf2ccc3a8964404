"""The flow: no resource is overrun, and prices prove that no flow is faster."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from swarm.core.scheduling.bounds import Bounds
from swarm.core.scheduling.problem import Assignment, Floats, Problem, Terms
from swarm.core.scheduling.wiring import (
    Flow,
    best_flow,
    loads_of,
    narrow_flow,
    proportional_flow,
    sources_of,
    stage_limits,
)
from swarm.errors import NoFeasiblePlan
from tests.core.problems import (
    assignment_of,
    plain_problem,
    random_assignment,
    random_problem,
    with_links,
)

seeds = st.integers(0, 10**6)


def microbatch_seconds(problem: Problem, assignment: Assignment, flow: Flow) -> float:
    return loads_of(problem, assignment, flow).microbatch_seconds


# --- by hand --------------------------------------------------------------------------------------


def test_replicas_get_work_by_their_speed() -> None:
    problem = plain_problem([1, 2], layers=1)
    assignment = assignment_of(problem, [], [[0, 1]])
    flow = best_flow(problem, assignment, path_weight=0)
    # a microbatch takes 3 s on one and 1.5 s on the other: together one a second
    assert microbatch_seconds(problem, assignment, flow) == pytest.approx(1.0)
    np.testing.assert_allclose(flow.unit[0].sum(axis=0), [1 / 3, 2 / 3])


def test_a_narrow_link_gets_what_it_carries() -> None:
    # stage 0 has one fast replica, stage 1 two: 30 bytes/s to the first, plenty to the second
    problem = plain_problem([1000, 1, 1], layers=2, bandwidth=1e9)
    narrow = [[0, 2, 1e9], [1e9, 0, 1e9], [1e9, 1e9, 0]]
    problem = with_links(problem, narrow)
    assignment = assignment_of(problem, [1], [[0], [1, 2]], feeders=[0])
    flow = best_flow(problem, assignment, path_weight=0)
    # peer 1 gets 2/10 microbatches a second, peer 2 computes 1/3
    assert microbatch_seconds(problem, assignment, flow) == pytest.approx(1 / (0.2 + 1 / 3))
    np.testing.assert_allclose(flow.wiring[1], [[0.375, 0.625]])


def test_the_gradient_comes_back_the_same_way() -> None:
    problem = plain_problem([1000, 1, 1], layers=2, bandwidth=1e9)
    problem = with_links(problem, [[0, 1e9, 1e9], [2, 0, 1e9], [1e9, 1e9, 0]])
    assignment = assignment_of(problem, [1], [[0], [1, 2]], feeders=[0])
    flow = best_flow(problem, assignment, path_weight=0)
    np.testing.assert_allclose(flow.wiring[1], [[0.375, 0.625]])


def test_an_uplink_is_shared_by_all_it_sends() -> None:
    problem = plain_problem([1000, 1000, 1000], layers=2, bandwidth=1e9)
    peers = (replace(problem.peers[0], uplink=5.0), *problem.peers[1:])
    problem = replace(problem, peers=peers)
    assignment = assignment_of(problem, [1], [[0], [1, 2]], feeders=[0])
    flow = best_flow(problem, assignment, path_weight=0)
    assert microbatch_seconds(problem, assignment, flow) == pytest.approx(2.0)


def test_a_feeder_on_the_spot_sends_nothing() -> None:
    problem = plain_problem([1, 1], layers=1, bandwidth=1.0, terms=Terms(10, input_bytes=1000))
    assignment = assignment_of(problem, [], [[0, 1]])
    flow = best_flow(problem, assignment)
    loads = loads_of(problem, assignment, flow)
    assert loads.link.max() == loads.uplink.max() == loads.downlink.max() == 0
    np.testing.assert_allclose(flow.unit[0], [[0.5, 0], [0, 0.5]])


def test_a_link_through_which_nothing_gets_is_not_wired() -> None:
    problem = with_links(plain_problem([1, 1, 1], layers=2), [[0, 0, 9], [9, 0, 9], [9, 9, 0]])
    assignment = assignment_of(problem, [1], [[0], [1, 2]], feeders=[0])
    assert best_flow(problem, assignment).wiring[1].tolist() == [[0.0, 1.0]]
    assert proportional_flow(problem, assignment).wiring[1].tolist() == [[0.0, 1.0]]
    cut_off = assignment_of(problem, [1], [[0], [1]], feeders=[0])
    with pytest.raises(NoFeasiblePlan, match="let nothing through"):
        best_flow(problem, cut_off)
    assert Bounds(problem).seconds_per_microbatch(cut_off.ranges, cut_off.groups) == np.inf


def test_of_many_edges_those_that_are_left_can_use_everybody() -> None:
    """45,000 edges are more than MOST_EDGES; on a free network only compute limits."""
    speeds = np.random.default_rng(0).uniform(0.5, 2, 300).tolist()
    problem = plain_problem(speeds, layers=2)
    assignment = assignment_of(problem, [1], [range(150), range(150, 300)], feeders=range(150))
    flow = best_flow(problem, assignment, path_weight=0)
    slowest = min(sum(speeds[:150]), sum(speeds[150:]))
    assert microbatch_seconds(problem, assignment, flow) == pytest.approx(3 / slowest, rel=1e-6)
    for before, after in itertools.pairwise(flow.unit):
        np.testing.assert_allclose(before.sum(axis=0), after.sum(axis=1), atol=1e-12)


def test_who_gets_little_over_its_links_is_sent_little_without_a_solver() -> None:
    problem = plain_problem([1, 1, 1], layers=2, bandwidth=1e9)
    problem = with_links(problem, [[0, 1e9, 1e-3], [1e9, 0, 1e9], [1e9, 1e9, 0]])
    assignment = assignment_of(problem, [1], [[0], [1, 2]], feeders=[0])
    flow = proportional_flow(problem, assignment)
    # 10 bytes to peer 2 take 10,000 s; what it gets keeps that link as busy as peer 1
    assert flow.wiring[1][0, 1] == pytest.approx(3 / 10_003)


def test_one_who_is_too_slow_for_one_microbatch_gets_none() -> None:
    problem = plain_problem([1, 0.001], layers=1, terms=Terms(4))
    flow = best_flow(problem, assignment_of(problem, [], [[0, 1]]))
    np.testing.assert_allclose(flow.unit[0].sum(axis=0), [1, 0], atol=1e-9)


# --- always ---------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seeds, seeds, st.sampled_from([0.0, 1.0]))
def test_rows_sum_to_one_and_flow_is_conserved(one: int, two: int, weight: float) -> None:
    problem = random_problem(one)
    assignment = random_assignment(problem, two)
    for flow in (
        best_flow(problem, assignment, path_weight=weight),
        proportional_flow(problem, assignment),
    ):
        assert abs(flow.feeder_shares.sum() - 1) < 1e-9
        for stage, weights in enumerate(flow.wiring):
            sources = sources_of(assignment, stage)
            assert weights.shape == (len(sources), len(assignment.groups[stage]))
            assert (weights >= 0).all()
            np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-9)
        for before, after in itertools.pairwise(flow.unit):
            np.testing.assert_allclose(before.sum(axis=0), after.sum(axis=1), atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(seeds, seeds)
def test_prices_prove_that_no_flow_is_faster(one: int, two: int) -> None:
    """By duality: with these prices of resources every way through the stages costs at least
    `seconds`, so no mixture of ways loads all resources less."""
    problem = random_problem(one, most_peers=6)
    assignment = random_assignment(problem, two)
    flow = best_flow(problem, assignment, path_weight=0)
    seconds = microbatch_seconds(problem, assignment, flow)
    uses = np.array(list(_uses(problem, assignment)))
    prices = _prices(uses)
    assert (prices >= 0).all()
    assert prices.sum() == pytest.approx(1)
    assert seconds <= (uses @ prices).min() * (1 + 1e-6)


def _uses(problem: Problem, assignment: Assignment) -> Iterator[Floats]:
    """Seconds of every resource for every way through the stages, computed one way at a time."""
    count = len(problem.peers)
    for way in itertools.product(assignment.feeders, *assignment.groups):
        sent = np.zeros((count, count))
        compute = np.zeros(count)
        for (first, last), source, target in zip(assignment.ranges, way, way[1:], strict=False):
            layers = problem.layers[first:last]
            work = sum(layer.forward_seconds + layer.backward_seconds for layer in layers)
            compute[target] += work / problem.peers[target].speed
            if source != target:
                sent[source, target] += problem.forward_bytes(first)
                sent[target, source] += problem.backward_bytes(first)
        up = [sent[i].sum() / problem.peers[i].uplink for i in range(count)]
        down = [sent[:, i].sum() / problem.peers[i].downlink for i in range(count)]
        links = [
            sent[i, j] / problem.links.bandwidth[i][j] if i != j else 0.0
            for i in range(count)
            for j in range(count)
        ]
        yield np.array([*compute, *up, *down, *links])


def _prices(uses: Floats) -> Floats:
    """Maximise the cheapest way over prices that sum to 1."""
    ways, resources = uses.shape
    scale = uses.max()
    answer = linprog(
        np.append(np.zeros(resources), -1.0),
        A_ub=np.hstack([-uses / scale, np.ones((ways, 1))]),
        b_ub=np.zeros(ways),
        A_eq=np.append(np.ones(resources), 0.0)[None, :],
        b_eq=[1.0],
        bounds=[(0, None)] * resources + [(None, None)],
    )
    prices = np.maximum(answer.x[:resources], 0)
    return np.asarray(prices / prices.sum())


@settings(max_examples=80, deadline=None)
@given(seeds, seeds)
def test_no_flow_is_faster_than_the_bound(one: int, two: int) -> None:
    problem = random_problem(one)
    assignment = random_assignment(problem, two)
    bound = Bounds(problem).seconds_per_microbatch(assignment.ranges, assignment.groups)
    fastest = microbatch_seconds(problem, assignment, best_flow(problem, assignment, path_weight=0))
    assert fastest >= bound * (1 - 1e-9)
    mixed = microbatch_seconds(problem, assignment, best_flow(problem, assignment))
    assert mixed >= fastest * (1 - 1e-6)


@settings(max_examples=50, deadline=None)
@given(seeds)
def test_a_stage_alone_is_as_fast_as_its_replicas_together(seed: int) -> None:
    problem = random_problem(seed)
    peers = tuple(replace(peer, has_data=True) for peer in problem.peers)
    problem = replace(problem, peers=peers)
    assignment = assignment_of(problem, [], [range(len(peers))])
    flow = best_flow(problem, assignment, path_weight=0)
    limits = stage_limits(problem, 0, len(problem.layers))
    assert 1 / microbatch_seconds(problem, assignment, flow) == pytest.approx(limits.sum())


@settings(max_examples=60, deadline=None)
@given(seeds, seeds)
def test_few_ways_give_everybody_the_same_part(one: int, two: int) -> None:
    problem = random_problem(one)
    assignment = random_assignment(problem, two)
    flow = proportional_flow(problem, assignment)
    narrow = narrow_flow(problem, assignment, flow)
    for before, after in zip(flow.unit, narrow.unit, strict=True):
        np.testing.assert_allclose(after.sum(axis=0), before.sum(axis=0), atol=5e-3)
        np.testing.assert_allclose(after.sum(axis=1), before.sum(axis=1), atol=5e-3)
    for weights in narrow.wiring:
        np.testing.assert_allclose(weights.sum(axis=1), 1.0)
    for unit in narrow.unit[1:]:
        assert np.count_nonzero(unit) <= sum(unit.shape) - 1


def test_equal_stages_are_wired_one_to_one() -> None:
    problem = plain_problem([1.0] * 12, layers=2)
    assignment = assignment_of(problem, [1], [range(6), range(6, 12)], feeders=range(6))
    narrow = narrow_flow(problem, assignment, proportional_flow(problem, assignment))
    np.testing.assert_allclose(narrow.wiring[1], np.eye(6))


def test_few_ways_stay_within_a_place_where_they_can() -> None:
    problem = plain_problem([1.0] * 8, layers=2)
    places = [replace(each, place="ab"[i % 2]) for i, each in enumerate(problem.peers)]
    problem = replace(problem, peers=tuple(places))
    assignment = assignment_of(problem, [1], [range(4), range(4, 8)], feeders=range(4))
    narrow = narrow_flow(problem, assignment, proportional_flow(problem, assignment))
    for i, j in zip(*np.nonzero(narrow.wiring[1]), strict=True):
        assert places[i].place == places[4 + j].place
