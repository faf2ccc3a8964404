"""The exact optimum, against a plain enumeration of everything."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from swarm.core.scheduling.cost import predict
from swarm.core.scheduling.exact import optimum
from swarm.core.scheduling.problem import Assignment, Problem, Terms, check_assignment
from swarm.errors import NoFeasiblePlan
from tests.core.problems import assignment_of, plain_problem, random_problem


def everything(problem: Problem) -> Iterator[Assignment]:
    """Every assignment that the problem allows."""
    peers, layers = len(problem.peers), len(problem.layers)
    for stages in range(1, min(peers, layers) + 1):
        for cuts in itertools.combinations(range(1, layers), stages - 1):
            for places in itertools.product(range(stages + 1), repeat=peers):
                groups = [[p for p in range(peers) if places[p] == s] for s in range(stages)]
                if all(groups):
                    made = assignment_of(problem, cuts, groups)
                    try:
                        check_assignment(problem, made)
                    except ValueError:
                        continue
                    yield made


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_better_than_the_optimum(seed: int) -> None:
    problem = random_problem(seed, most_peers=4, most_layers=4)
    prices = [predict(problem, each).step_seconds for each in everything(problem)]
    assert optimum(problem).step_seconds == pytest.approx(min(prices), rel=1e-7)


def test_an_incumbent_changes_nothing() -> None:
    problem = random_problem(3, most_peers=5, least_peers=5, most_layers=5)
    found = optimum(problem)
    bad = (((0, len(problem.layers)),), ((4,),))
    assert optimum(problem, bad).step_seconds == found.step_seconds
    assert optimum(problem, found.start).start == found.start


def test_terms_are_kept() -> None:
    problem = plain_problem([1, 1, 1, 1], terms=Terms(10, min_replicas=2, cuts=(1,)))
    ranges, groups = optimum(problem).start
    assert ranges == ((0, 1), (1, 4))
    assert [len(group) for group in groups] == [2, 2]


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ValueError, match="9 peers are too many"):
        optimum(plain_problem([1] * 9))
    problem = plain_problem([1, 1])
    small = tuple(replace(peer, memory_bytes=1) for peer in problem.peers)
    with pytest.raises(NoFeasiblePlan, match="no assignment fits"):
        optimum(replace(problem, peers=small))
