"""The full solve: what it must find, what it must keep, and how near the optimum it comes."""

from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.scheduling.bounds import bound_of
from swarm.core.scheduling.cost import predict
from swarm.core.scheduling.exact import optimum
from swarm.core.scheduling.greedy import greedy_answer
from swarm.core.scheduling.problem import Holding, Layer, Links, Problem, Terms, check_assignment
from swarm.core.scheduling.solver import Budget, Solution, solve
from swarm.core.scheduling.starts import best_cuts
from swarm.errors import NoFeasiblePlan
from tests.core.problems import assignment_of, plain_problem, random_problem

QUICK = Budget(programs=80, neighbours=150, descents=3, kicks=4, candidates=150, rounds=1)


def start_of(solution: Solution) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, ...], ...]]:
    return solution.assignment.ranges, solution.assignment.groups


def test_small_problems_are_solved_near_the_optimum() -> None:
    gaps = []
    for seed in range(20):
        problem = random_problem(seed, most_peers=5, most_layers=5)
        try:
            found = solve(problem, budget=QUICK)
        except NoFeasiblePlan:
            with pytest.raises(NoFeasiblePlan):
                optimum(problem)
            continue
        best = optimum(problem, start_of(found)).step_seconds
        gaps.append(found.prediction.step_seconds / best - 1)
    assert len(gaps) >= 18
    assert median(gaps) == pytest.approx(0, abs=1e-9)
    assert max(gaps) < 0.05


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6))
def test_a_solution_is_one(seed: int) -> None:
    problem = random_problem(seed)
    try:
        found = solve(problem, budget=replace(QUICK, descents=1, kicks=1))
    except NoFeasiblePlan:
        return
    check_assignment(problem, found.assignment)
    assert all(share > 0 for share in found.prediction.flow.feeder_shares)
    assert all(each.reason for each in found.assignment.standby)
    priced = predict(problem, found.assignment, found.prediction.flow)
    assert priced.step_seconds == found.prediction.step_seconds
    assert found.bound_seconds <= found.prediction.step_seconds * (1 + 1e-9)


def test_the_same_problem_and_seed_give_the_same_answer() -> None:
    problem = random_problem(5, most_peers=6, least_peers=6)
    one, two = (solve(problem, seed=3, budget=QUICK) for _ in range(2))
    assert one.assignment == two.assignment
    assert one.prediction.step_seconds == two.prediction.step_seconds
    assert one.programs == two.programs


def test_equal_peers_on_a_free_network_all_work() -> None:
    found = solve(plain_problem([1] * 4, terms=Terms(1000)))
    # 12 s of compute per microbatch by 4 peers: no schedule does more than one in 3 s
    assert found.prediction.microbatches_per_second == pytest.approx(1 / 3, rel=1e-6)
    assert not found.assignment.standby


def test_a_peer_that_makes_the_step_slower_stands_by_and_is_told_why() -> None:
    problem = plain_problem([1, 1, 0.01], layers=1, terms=Terms(4))
    slow_link = replace(problem.peers[2], uplink=1.0, downlink=1.0)
    problem = replace(problem, peers=(*problem.peers[:2], slow_link))
    found = solve(problem)
    assert found.assignment.groups == ((0, 1),)
    (standby,) = found.assignment.standby
    assert standby.peer == 2
    with_it = predict(problem, assignment_of(problem, [], [[0, 1, 2]])).step_seconds
    assert f"would take {with_it:.4g} s" in standby.reason
    assert f"without it {found.prediction.step_seconds:.4g} s" in standby.reason


def test_the_manifests_cuts_are_honoured() -> None:
    found = solve(plain_problem([1, 2, 3], terms=Terms(10, cuts=(1, 3))))
    assert found.assignment.ranges == ((0, 1), (1, 3), (3, 4))


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_manifests_number_of_stages_is_honoured(stages: int) -> None:
    problem = plain_problem([1, 2, 3], terms=Terms(10, stages=stages))
    found = solve(problem)
    assert len(found.assignment.ranges) == stages
    assert len(greedy_answer(problem)[0].ranges) == stages
    best = optimum(problem)
    assert len(best.start[0]) == stages
    assert found.prediction.step_seconds == pytest.approx(best.step_seconds)


def test_limits_of_replicas_are_kept_and_told() -> None:
    found = solve(plain_problem([1, 1, 1], layers=1, terms=Terms(10, max_replicas=2)))
    assert len(found.assignment.groups[0]) == 2
    assert "has all its replicas" in found.assignment.standby[0].reason
    found = solve(plain_problem([1, 1, 1, 1, 1], terms=Terms(10, min_replicas=2)))
    assert min(len(group) for group in found.assignment.groups) >= 2


def test_what_does_not_fit_into_one_peer_is_cut() -> None:
    problem = plain_problem([1, 1, 1], terms=Terms(10, state_ratio=6))
    # a layer takes 600 bytes and some activations; nobody has room for three
    peers = tuple(replace(peer, memory_bytes=1500) for peer in problem.peers)
    found = solve(replace(problem, peers=peers))
    assert len(found.assignment.ranges) >= 2
    check_assignment(replace(problem, peers=peers), found.assignment)


def test_a_small_memory_among_large_ones_gets_a_small_stage() -> None:
    problem = plain_problem([1, 1, 1], layers=6, terms=Terms(200, state_ratio=6))
    small = replace(problem.peers[1], memory_bytes=700)
    problem = replace(problem, peers=(problem.peers[0], small, problem.peers[2]))
    found = solve(problem)
    assert found.prediction.step_seconds == pytest.approx(optimum(problem).step_seconds)


@pytest.mark.parametrize(
    ("change", "said", "evidence"),
    [
        ({"memory": 100}, "no assignment was found", "the largest layer's state takes 600 bytes"),
        ({"bandwidth": 0.0, "memory": 1500}, "no assignment was found", "6 of 6 directed links"),
        ({"data": False}, "no peer has the data", ""),
        ({"min_replicas": 4}, "3 peers are too few for 1 stages of at least 4", ""),
        ({"cuts": (1, 2, 3)}, "3 peers are too few for 4 stages", ""),
        ({"stages": 4}, "3 peers are too few for 4 stages", ""),
    ],
)
def test_nothing_fits_is_said_with_figures(
    change: dict[str, object], said: str, evidence: str
) -> None:
    problem = _hopeless(**change)  # type: ignore[arg-type]
    with pytest.raises(NoFeasiblePlan, match=said) as caught:
        solve(problem, budget=QUICK)
    assert evidence in str(caught.value)


def _hopeless(
    memory: int = 10**12,
    bandwidth: float = 1e15,
    data: bool = True,
    min_replicas: int = 1,
    cuts: tuple[int, ...] = (),
    stages: int = 0,
) -> Problem:
    terms = Terms(10, min_replicas=min_replicas, cuts=cuts, stages=stages)
    problem = plain_problem([1, 1, 1], terms=terms)
    peers = tuple(replace(peer, memory_bytes=memory, has_data=data) for peer in problem.peers)
    links = Links(((bandwidth,) * 3,) * 3, problem.links.latency_seconds)
    return replace(problem, peers=peers, links=links)


def test_states_are_moved_only_where_it_pays_within_the_horizon() -> None:
    problem = plain_problem([1, 1, 1], layers=3, bandwidth=100.0, terms=Terms(100))
    current = assignment_of(problem, [1], [[0], [1]], feeders=[0])
    holdings = (Holding(0, 0, 1), Holding(1, 1, 3))
    problem = replace(problem, current=current, holdings=holdings)
    soon = solve(replace(problem, horizon_seconds=1.0))
    assert (soon.assignment.ranges, soon.assignment.groups) == (current.ranges, current.groups)
    assert "a step would take" in soon.assignment.standby[0].reason
    later = solve(replace(problem, horizon_seconds=1e6))
    assert later.prediction.step_seconds < soon.prediction.kept_seconds
    assert not later.assignment.standby


def test_the_search_on_grids_finds_what_single_steps_do_not() -> None:
    problem = random_problem(4, least_peers=30, most_peers=30, most_layers=16)
    terms = replace(problem.terms, max_stages=6, microbatches_per_step=128)
    problem = replace(problem, terms=terms)
    budget = Budget(programs=30, neighbours=60, descents=1, kicks=0, candidates=1600, rounds=2)
    found = solve(problem, budget=budget).prediction.step_seconds
    without = solve(problem, budget=replace(budget, candidates=0)).prediction.step_seconds
    assert found < 0.95 * without


@pytest.mark.parametrize("peers", [20, 60])
def test_a_larger_swarm_gets_a_solution_too(peers: int) -> None:
    problem = random_problem(8, least_peers=peers, most_peers=peers)
    budget = Budget(programs=4, neighbours=10, descents=1, kicks=0, candidates=300, rounds=1)
    found = solve(problem, budget=budget)
    check_assignment(problem, found.assignment)
    assert found.prediction.step_seconds <= greedy_answer(problem)[1].step_seconds * (1 + 1e-9)
    assert all(each.reason for each in found.assignment.standby)
    again = solve(problem, budget=budget)
    assert again.assignment == found.assignment


def test_cuts_follow_the_speeds_of_groups() -> None:
    problem = plain_problem([1, 3], layers=8)
    assert best_cuts(problem, [1.0, 3.0], ((0,), (1,))) == ((0, 2), (2, 8))


def test_cuts_avoid_wide_outputs() -> None:
    narrow, wide = Layer(1, 2, 100, 10), Layer(1, 2, 100, 10**6)
    problem = replace(plain_problem([1, 1], bandwidth=1000.0), layers=(narrow, wide, wide, wide))
    assert best_cuts(problem, [1.0, 1.0], ((0,), (1,))) == ((0, 1), (1, 4))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_bound_of_a_start_is_that_of_its_assignment(one: int, two: int) -> None:
    problem = random_problem(one)
    groups = [[peer] for peer in range(min(2, len(problem.peers)))][: 1 + two % 2]
    made = assignment_of(problem, range(1, len(groups)), groups)
    assert bound_of(problem, made) <= predict(problem, made).step_seconds * (1 + 1e-9)
