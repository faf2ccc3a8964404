"""The parts of a step's predicted seconds, computed by hand, and what holds for all of them."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarm.core.scheduling.bounds import bound_of
from swarm.core.scheduling.cost import Prediction, predict
from swarm.core.scheduling.problem import Assignment, Holding, Links, Peer, Problem, Terms
from swarm.core.scheduling.wiring import Flow, proportional_flow
from tests.core.problems import assignment_of, plain_problem, random_assignment, random_problem

seeds = st.integers(0, 10**6)


# --- by hand: layers of 1 s forward, 2 s backward, 100 bytes of parameters, 10 of output ----------


def test_fill_and_steady_state_of_two_stages() -> None:
    problem = plain_problem([1, 1], layers=2, bandwidth=10, latency=0.5, terms=Terms(10))
    prediction = predict(problem, assignment_of(problem, [1], [[0], [1]], feeders=[0]))
    # 3 s on each; over the link 0.5 + 1 s there and the same back
    assert prediction.fill_seconds == pytest.approx(6 + 3)
    # the slowest resource is a peer's compute
    assert prediction.steady_seconds == pytest.approx(10 * 3)
    assert prediction.microbatches_per_second == pytest.approx(1 / 3)
    assert prediction.limits == ("compute", "compute")
    assert prediction.reduction_seconds == prediction.change_seconds == 0
    assert prediction.step_seconds == pytest.approx(39)


def test_the_way_is_weighed_by_the_flow() -> None:
    problem = plain_problem([1, 3], layers=1, terms=Terms(100))
    prediction = predict(problem, assignment_of(problem, [], [[0, 1]]))
    # a quarter takes 3 s, three quarters 1 s
    assert prediction.fill_seconds == pytest.approx(0.25 * 3 + 0.75 * 1)
    assert prediction.steady_seconds == pytest.approx(100 * 0.75)


def test_the_way_from_a_feeder_counts_once() -> None:
    terms = Terms(10, input_bytes=20, target_bytes=10)
    problem = plain_problem([1, 1], layers=1, bandwidth=10, latency=0.5, terms=terms)
    prediction = predict(problem, assignment_of(problem, [], [[1]], feeders=[0]))
    assert prediction.fill_seconds == pytest.approx(3 + 0.5 + 3)
    assert prediction.steady_seconds == pytest.approx(30)


def test_a_reduction_among_two_equals() -> None:
    problem = plain_problem([1, 1], layers=2, bandwidth=10, latency=0.5)
    prediction = predict(problem, assignment_of(problem, [], [[0, 1]]))
    # of 200 bytes each owns 100: 10 s to scatter, 10 s to gather, a latency each
    assert prediction.shard_shares == ((0.5, 0.5),)
    assert prediction.group_reduction_seconds == pytest.approx((21,))
    assert prediction.reduction_seconds == pytest.approx(21)


def test_shards_are_sized_by_bandwidth() -> None:
    problem = plain_problem([1, 1], layers=2)
    peers = (replace(problem.peers[0], uplink=10.0), replace(problem.peers[1], uplink=30.0))
    problem = replace(problem, peers=peers, terms=Terms(10, reduction_ratio=0.5))
    prediction = predict(problem, assignment_of(problem, [], [[0, 1]]))
    # of 100 bytes on the wire: 75 leave the first (7.5 s), then each sends its sums in 2.5 s
    assert prediction.shard_shares == ((0.25, 0.75),)
    assert prediction.reduction_seconds == pytest.approx(7.5 + 2.5)


def test_a_later_stage_reduces_behind_the_backward_of_earlier_ones() -> None:
    problem = plain_problem([1, 1, 1], layers=2, bandwidth=10, latency=0.5)
    prediction = predict(problem, assignment_of(problem, [1], [[0], [1, 2]], feeders=[0]))
    # 100 bytes: 5 + 5 s and two latencies; the last gradient takes 0.5 + 1 s to stage 0, then 2 s
    assert prediction.group_reduction_seconds == pytest.approx((0, 11))
    assert prediction.reduction_seconds == pytest.approx(11 - 3.5)


def test_a_link_inside_a_group_slows_its_reduction() -> None:
    problem = plain_problem([1, 1, 1], layers=1, bandwidth=1e9)
    links = ((0, 1, 1e9), (1e9, 0, 1e9), (1e9, 1e9, 0))
    problem = replace(problem, links=Links(links, problem.links.latency_seconds))
    prediction = predict(problem, assignment_of(problem, [], [[0, 1, 2]]))
    # a third of 100 bytes goes over the link of 1 byte/s in each phase
    assert prediction.reduction_seconds == pytest.approx(200 / 3, rel=1e-6)


def test_moving_a_state_costs_the_time_that_it_takes() -> None:
    problem = plain_problem([1, 1, 1], layers=2, bandwidth=10, terms=Terms(10, moved_ratio=3))
    problem = replace(problem, holdings=(Holding(0, 0, 1), Holding(1, 1, 2)), horizon_seconds=600.0)
    kept = predict(problem, assignment_of(problem, [1], [[0], [1]], feeders=[0]))
    assert kept.change_seconds == 0
    moved = predict(problem, assignment_of(problem, [1], [[0], [1, 2]], feeders=[0]))
    # the newcomer fetches 300 bytes in 30 s: a mean of 10 s of 600 over three replicas
    assert moved.change_seconds == pytest.approx(moved.kept_seconds * 10 / 600)
    assert moved.step_seconds == moved.kept_seconds + moved.change_seconds


def test_what_limits_each_peer() -> None:
    terms = Terms(10, target_bytes=0)
    problem = plain_problem([1, 1000, 1000], layers=2, bandwidth=1e6, terms=terms)
    assert _limits(problem, [[0], [1]]) == ("compute", "nothing", "nothing")
    slow_up = replace(problem.peers[0], uplink=1.0)
    assert _limits(_with_peer(problem, 0, slow_up), [[0], [1]])[0] == "uplink"
    slow_down = replace(problem.peers[1], downlink=1.0)
    assert _limits(_with_peer(problem, 1, slow_down), [[0], [1]])[1] == "downlink"
    links = ((0, 1, 1e6), (1e6, 0, 1e6), (1e6, 1e6, 0))
    linked = replace(problem, links=Links(links, problem.links.latency_seconds))
    assert _limits(linked, [[0], [1]]) == ("link", "link", "nothing")
    small = replace(problem.peers[2], memory_bytes=10)
    assert _limits(_with_peer(problem, 2, small), [[0], [1]])[2] == "memory"


def _limits(problem: Problem, groups: list[list[int]]) -> tuple[str, ...]:
    return predict(problem, assignment_of(problem, [1], groups, feeders=[0])).limits


def _with_peer(problem: Problem, number: int, peer: Peer) -> Problem:
    peers = list(problem.peers)
    peers[number] = peer
    return replace(problem, peers=tuple(peers))


def test_a_wiring_over_a_dead_link_takes_for_ever() -> None:
    problem = plain_problem([1, 1], layers=2)
    links = Links(((0, 0), (1, 0)), problem.links.latency_seconds)
    problem = replace(problem, links=links)
    assignment = assignment_of(problem, [1], [[0], [1]], feeders=[0])
    prediction = predict(problem, assignment, proportional_flow(problem, assignment))
    assert prediction.step_seconds == float("inf")


# --- always ---------------------------------------------------------------------------------------


def drawn(one: int, two: int) -> tuple[Problem, Assignment]:
    problem = random_problem(one)
    return problem, random_assignment(problem, two)


@settings(max_examples=80, deadline=None)
@given(seeds, seeds)
@example(170, 108)  # a breakpoint that rounding put on its other side
def test_the_bound_is_never_above_the_prediction(one: int, two: int) -> None:
    problem, assignment = drawn(one, two)
    assert bound_of(problem, assignment) <= predict(problem, assignment).step_seconds * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(seeds, seeds)
def test_the_best_wiring_is_best(one: int, two: int) -> None:
    problem, assignment = drawn(one, two)
    best = predict(problem, assignment)
    plain = predict(problem, assignment, proportional_flow(problem, assignment))
    assert _wired(best) <= _wired(plain) * (1 + 1e-6)


def _wired(prediction: Prediction) -> float:
    return prediction.fill_seconds + prediction.steady_seconds


@settings(max_examples=50, deadline=None)
@given(seeds, seeds, st.floats(0.1, 10))
def test_a_world_twice_as_fast_takes_half_the_time(one: int, two: int, factor: float) -> None:
    problem, assignment = drawn(one, two)
    flow = proportional_flow(problem, assignment)
    faster = replace(
        problem,
        peers=tuple(
            replace(
                peer,
                speed=peer.speed * factor,
                uplink=peer.uplink * factor,
                downlink=peer.downlink * factor,
            )
            for peer in problem.peers
        ),
        links=Links(
            tuple(tuple(x * factor for x in row) for row in problem.links.bandwidth),
            tuple(tuple(x / factor for x in row) for row in problem.links.latency_seconds),
        ),
    )
    before = predict(problem, assignment, flow).step_seconds
    assert predict(faster, assignment, flow).step_seconds * factor == pytest.approx(before)


@settings(max_examples=50, deadline=None)
@given(seeds, seeds)
def test_the_same_wiring_gives_the_same_prediction_without_a_solver(one: int, two: int) -> None:
    problem, assignment = drawn(one, two)
    found = predict(problem, assignment)
    again = predict(problem, assignment, Flow(found.flow.feeder_shares, found.flow.wiring))
    assert again.step_seconds == found.step_seconds
    assert again.limits == found.limits
