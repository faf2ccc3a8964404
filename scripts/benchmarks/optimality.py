"""How near the optimum schedules come: the full search and the greedy answer on small problems.

The rule: everything is priced by the same cost model, and the optimum is exact
(swarm/core/scheduling/exact.py). Problems are drawn from seeds: up to 8 peers in up to three
places, up to 4 stages and 8 layers. A gap is the part of the optimum by which a step takes longer;
seconds are those of the processor.
"""

import time
from collections.abc import Sequence
from statistics import median

from benchmarks.report import Report, Row, percentile
from swarm.core.scheduling.exact import optimum
from swarm.core.scheduling.greedy import greedy_answer
from swarm.core.scheduling.problem import Problem
from swarm.core.scheduling.solver import solve
from swarm.errors import NoFeasiblePlan
from tests.core.problems import random_problem

PROBLEMS = 200
QUICK_PROBLEMS = 5
QUANTILES = (25, 50, 75, 90, 95, 99)


def measure(*, quick: bool, first: int = 0) -> Report:
    """Solve all problems, of seeds from `first` on, in three ways; return gaps to the optimum and
    seconds."""
    report = Report("optimality")
    infeasible = 0
    for seed in range(first, first + (QUICK_PROBLEMS if quick else PROBLEMS)):
        row = _compare(seed, random_problem(seed))
        if row is None:
            infeasible += 1
        else:
            report.rows.append(row)
    report.summary = {"problems": len(report.rows), "infeasible": infeasible}
    for name in ("search", "greedy"):
        gaps = [row[f"{name}_gap"] for row in report.rows]
        report.summary |= _summary(name, [gap for gap in gaps if isinstance(gap, float)])
    for name in ("search", "greedy", "optimum"):
        seconds = [float(row[f"{name}_seconds"] or 0) for row in report.rows]
        report.summary[f"{name}_seconds_median"] = median(seconds)
        report.summary[f"{name}_seconds_most"] = max(seconds)
    return report


def _summary(name: str, gaps: Sequence[float]) -> Row:
    return {
        f"{name}_found": len(gaps),
        f"{name}_optimal": sum(gap < 1e-6 for gap in gaps),
        **{f"{name}_gap_p{part}": percentile(gaps, part) for part in QUANTILES},
        f"{name}_gap_worst": max(gaps),
    }


def _compare(seed: int, problem: Problem) -> Row | None:
    """Return gaps (0: optimal) and seconds; None where nothing is feasible, by all three."""
    begun = time.process_time()
    try:
        found = solve(problem)
    except NoFeasiblePlan:
        found = None
    searched = time.process_time()
    try:
        greedy = greedy_answer(problem)[1].step_seconds
    except NoFeasiblePlan:
        greedy = None
    answered = time.process_time()
    start = (found.assignment.ranges, found.assignment.groups) if found else None
    try:
        best = optimum(problem, start).step_seconds
    except NoFeasiblePlan:
        return None
    proven = time.process_time()
    return {
        "seed": seed,
        "peers": len(problem.peers),
        "layers": len(problem.layers),
        "stages": len(found.assignment.ranges) if found else None,
        "standby": len(found.assignment.standby) if found else None,
        "search_gap": found.prediction.step_seconds / best - 1 if found else None,
        "greedy_gap": greedy / best - 1 if greedy is not None else None,
        "search_seconds": searched - begun,
        "greedy_seconds": answered - searched,
        "optimum_seconds": proven - answered,
    }
