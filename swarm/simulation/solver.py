"""The full solve of a simulated peer: the shipped solver, in this process.

The rule: it takes virtual time, since the daemon's solver works beside it; the same problem and
seed are solved once, whoever asks.
"""

from functools import lru_cache

import trio

from swarm.core.scheduling.problem import Assignment, Problem
from swarm.core.scheduling.solver import solve
from swarm.errors import NoFeasiblePlan

SECONDS = 5.0
"""Of virtual time; about what it takes with ten peers (scripts/bench growth)."""


class SimSolver:
    """`ports.Solver` for the simulator."""

    async def solve(self, problem: Problem, seed: int) -> Assignment | None:
        """Return the best assignment found; None if none is feasible."""
        await trio.sleep(SECONDS)
        return _solved(problem, seed)


@lru_cache(maxsize=64)
def _solved(problem: Problem, seed: int) -> Assignment | None:
    try:
        return solve(problem, seed=seed).assignment
    except NoFeasiblePlan:
        return None
