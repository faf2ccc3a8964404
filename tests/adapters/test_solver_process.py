"""The solver's own process: the same answer as in this one, and nothing worse than none."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
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


def test_a_solve_outlives_the_threads_that_have_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel ends the child with the thread that started it: not one of trio's."""
    monkeypatch.setattr("trio._core._thread_cache.IDLE_TIMEOUT", 0.01)
    problem = random_problem(3, most_peers=5, least_peers=5)
    assert found(problem, 7) is not None


def test_a_solve_that_is_cancelled_leaves_no_process() -> None:
    async def cancelled() -> None:
        with trio.move_on_after(0.5):
            await ProcessSolver().solve(random_problem(3, most_peers=8, least_peers=8), 7)

    before = set(children())
    trio.run(cancelled)
    assert set(children()) <= before


def children() -> list[str]:
    """Return the processes that this one has started."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
