"""The solver's own process: the same answer as in this one, and nothing worse than none."""

from dataclasses import replace

import trio

from swarm.adapters.solver_process import ProcessSolver
from swarm.core.scheduling.problem import Assignment, Problem
from swarm.core.scheduling.solver import solve
from tests.core.problems import random_problem


def found(problem: Problem, seed: int) -> Assignment | None:
    return trio.run(ProcessSolver().solve, problem, seed)


def test_the_answer_is_that_of_the_core() -> None:
    problem = random_problem(3, most_peers=5, least_peers=5)
    assert found(problem, 7) == solve(problem, seed=7).assignment


def test_where_nothing_is_feasible_there_is_no_answer() -> None:
    problem = random_problem(3, most_peers=3, least_peers=3)
    small = tuple(replace(peer, memory_bytes=1) for peer in problem.peers)
    assert found(replace(problem, peers=small), 0) is None
