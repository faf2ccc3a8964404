"""How the scheduler's work grows with the swarm: CPU seconds of everything at 10, 100, 1,000 peers.

The rule: CPU seconds of one process on one thread, on problems that were not seen before; the
exponent is the slope of the logarithms (least squares). Beside them, seconds per step of what was
found, and of what the solver finds without the search on grids in the budget that is left to it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from benchmarks.report import Report, Row
from benchmarks.swarms import random_swarm
from swarm.core.scheduling.cost import predict
from swarm.core.scheduling.greedy import greedy_answer
from swarm.core.scheduling.problem import Assignment, Problem
from swarm.core.scheduling.rebalance import rebalanced
from swarm.core.scheduling.solver import budget_for, solve
from swarm.core.scheduling.starts import best_cuts
from swarm.core.scheduling.wiring import proportional_flow

Result = TypeVar("Result")

PEERS, QUICK_PEERS = (10, 30, 100, 300, 1000), (4, 6)
TIMED = ("greedy", "rebalance", "predict", "solve")
STAGES = 8


def measure(*, quick: bool) -> Report:
    """Time everything for every number of peers."""
    report = Report("growth")
    for peers in QUICK_PEERS if quick else PEERS:
        report.rows.append(_row(peers, random_swarm(peers)))
    for name in TIMED:
        figures = [(row["peers"], row[f"{name}_seconds"]) for row in report.rows]
        report.summary[f"{name}_exponent"] = _exponent(
            [(float(a or 0), float(b or 0)) for a, b in figures]
        )
    return report


def _row(peers: int, problem: Problem) -> Row:
    # what every problem computes once, and a daemon keeps, is not the growth of one algorithm
    assert problem.bandwidth.size and problem.lacking
    (_, greedy), greedy_seconds = _timed(lambda: greedy_answer(problem))
    uneven = _uneven(problem)
    _, rebalance_seconds = _timed(lambda: rebalanced(problem, uneven))
    _, predict_seconds = _timed(
        lambda: predict(problem, uneven, proportional_flow(problem, uneven))
    )
    found, solve_seconds = _timed(lambda: solve(problem))
    budget = replace(budget_for(problem), candidates=0)
    plain, plain_seconds = _timed(lambda: solve(problem, budget=budget))
    return {
        "peers": peers,
        "greedy_seconds": greedy_seconds,
        "rebalance_seconds": rebalance_seconds,
        "predict_seconds": predict_seconds,
        "solve_seconds": solve_seconds,
        "programs": found.programs,
        "stages": len(found.assignment.ranges),
        "standby": len(found.assignment.standby),
        "greedy_step": greedy.step_seconds,
        "solve_step": found.prediction.step_seconds,
        "no_grids_step": plain.prediction.step_seconds,
        "no_grids_seconds": plain_seconds,
    }


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    begun = time.process_time()
    made = work()
    return made, time.process_time() - begun


def _uneven(problem: Problem) -> Assignment:
    """Return an assignment in which peers are dealt to stages without a look at them."""
    count = len(problem.peers)
    stages = min(STAGES, count // 2)
    ranges = best_cuts(problem, [1.0] * stages)
    groups = tuple(tuple(range(stage, count, stages)) for stage in range(stages))
    return Assignment(ranges, groups, problem.data_holders)


def _exponent(figures: Sequence[tuple[float, float]]) -> float:
    peers, seconds = np.log(np.maximum(np.array(figures), 1e-6)).T
    return float(np.polyfit(peers, seconds, 1)[0])
