"""No schedule exceeds the upper bound; and it is not higher than it has to be."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.scheduling.exact import optimum
from swarm.core.scheduling.problem import Layer, Peer, Terms
from swarm.core.scheduling.solver import solve
from swarm.errors import NoFeasiblePlan
from swarm.simulation.conditions import Conditions
from swarm.simulation.upper_bound import UpperBounds, rate_bound
from tests.core.problems import plain_problem, random_problem
from tests.simulation.scenes import small


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_no_plan_is_better_than_the_bound(seed: int) -> None:
    drawn = random_problem(seed, most_peers=5, most_layers=5)
    problem = replace(drawn, current=None, holdings=())
    try:
        best = optimum(problem)
    except NoFeasiblePlan:
        return
    rate = problem.terms.microbatches_per_step / best.step_seconds
    assert 0 < rate <= rate_bound(problem) * (1 + 1e-9)


def test_compute_bounds_the_rate() -> None:
    problem = plain_problem([1.0, 2.0, 3.0], layers=4, terms=Terms(1000))
    assert rate_bound(problem) == pytest.approx(6.0 / 12.0)


def test_a_step_of_few_microbatches_is_not_quicker_than_the_fastest_peer() -> None:
    problem = plain_problem([1.0, 3.0], layers=4, terms=Terms(1))
    assert rate_bound(problem) == pytest.approx(3.0 / 12.0)


def test_memory_makes_stages_and_stages_make_bytes() -> None:
    """Peers hold two of four layers: 10 bytes go over one cut, there and back, by two uplinks."""
    problem = plain_problem([1e6, 1e6], layer=Layer(1.0, 2.0, 100, 10), terms=Terms(1000))
    peers = tuple(replace(peer, memory_bytes=1300, uplink=5.0) for peer in problem.peers)
    assert rate_bound(replace(problem, peers=peers)) == pytest.approx(10.0 / 20.0)


def test_a_model_that_fits_nowhere_cannot_be_trained() -> None:
    problem = plain_problem([1.0, 1.0])
    peers = tuple(Peer(peer.id, 1.0, 599, 1e9, 1e9) for peer in problem.peers)
    assert rate_bound(replace(problem, peers=peers)) == 0.0


def test_a_scenario_is_bounded_by_what_its_peers_are_at_the_time() -> None:
    scenario = small()
    conditions, bounds = Conditions(scenario), UpperBounds(scenario)
    everybody = range(4)
    assert bounds.rate(conditions.state, everybody) == pytest.approx(4 / 1.2)
    conditions.slowness[0] = 2.0
    conditions.changed()
    assert bounds.rate(conditions.state, everybody) == pytest.approx(3.5 / 1.2)
    assert bounds.rate(conditions.state, [0]) == pytest.approx(0.5 / 1.2)
    assert bounds.rate(conditions.state, []) == 0.0
    conditions.slowness[0] = 1.0
    conditions.changed()
    problem = bounds.problem(conditions.state, everybody)
    best = problem.terms.microbatches_per_step / solve(problem).prediction.kept_seconds
    assert bounds.best_plan(conditions.state, everybody) == pytest.approx(best)
