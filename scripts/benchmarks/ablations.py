"""What the parts of a schedule are worth, and how far a swarm scales, in predicted seconds a step.

The rule: every schedule is wired and priced alike (`cost.predict`); "does not fit" is said where no
assignment of a kind fits into memory. Rows:

- for each network: everything free; one replica a stage; one stage; as many stages and replicas as
  DT-FM has, peers in the order of the file, equal layers; the same with peers dealt at random (the
  median of several);
- weak scaling: as many microbatches for each peer; the efficiency is the throughput of a peer
  against that of the smallest swarm. Where it is below 0.9, `grew` says which part of a step grew
  most, and `limits` what limits the rate of how many of the peers at work.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.report import Report, Row, Value
from benchmarks.swarms import FOLDER, LAYERS, network
from swarm.core.scheduling.cost import Prediction, predict
from swarm.core.scheduling.problem import Assignment, Problem, check_assignment
from swarm.core.scheduling.solver import Budget, solve
from swarm.errors import NoFeasiblePlan

NETWORKS = ("regional", "worldwide", "ten-cities")
SCALED = "ten-cities"
MICROBATCHES = 512
STAGES = 8
DEALS = 9
SCALES = (1, 2, 4, 8)
PER_PEER = 8
"""Microbatches per step for each peer, in weak scaling."""
QUICK = Budget(programs=4, neighbours=8, descents=1, kicks=0, candidates=100, rounds=1)
ENOUGH = 0.9


def measure(*, quick: bool) -> Report:
    """Price every kind of schedule on every network, and swarms of growing size."""
    if not FOLDER.is_dir():
        raise SystemExit(f"error: the network cases are not at {FOLDER}")
    report = Report("ablations")
    budget = QUICK if quick else None
    for name in NETWORKS[:1] if quick else NETWORKS:
        report.rows.append(_compared(FOLDER / f"{name}.json", budget))
    scaled = _scaled(FOLDER / f"{SCALED}.json", SCALES[:2] if quick else SCALES, budget)
    report.rows += scaled
    compared = [row for row in report.rows if "unified" in row]
    report.summary = {
        "networks": len(compared),
        "unified_is_best": sum(_is_best(row) for row in compared),
        "least_efficiency": min(float(row["efficiency"] or 0) for row in scaled),
    }
    return report


def _is_best(row: Row) -> bool:
    others = [row[kind] for kind in ("pipeline only", "data-parallel only", "even split", "random")]
    best = row["unified"]
    return isinstance(best, float) and all(
        best <= each * (1 + 1e-9) for each in others if isinstance(each, float)
    )


def _compared(path: Path, budget: Budget | None) -> Row:
    problem = network(path, MICROBATCHES)
    free = problem.terms
    kinds = {
        "unified": free,
        "pipeline only": replace(free, max_replicas=1),
        "data-parallel only": replace(free, stages=1),
    }
    row: Row = {"network": path.stem}
    for kind, terms in kinds.items():
        row[kind] = _solved(replace(problem, terms=terms), budget)
    count = len(problem.peers)
    row["even split"] = _priced(problem, range(count))
    rng = np.random.default_rng(0)
    deals = [_priced(problem, rng.permutation(count).tolist()) for _ in range(DEALS)]
    known = [each for each in deals if isinstance(each, float)]
    row["random"] = median(known) if known else deals[0]
    return row


def _solved(problem: Problem, budget: Budget | None) -> Value:
    try:
        return solve(problem, budget=budget).prediction.step_seconds
    except NoFeasiblePlan:
        return "does not fit"


def _priced(problem: Problem, order: Sequence[int]) -> Value:
    """Return the seconds of a step if peers are dealt to equal stages in this order."""
    replicas, depth = len(order) // STAGES, LAYERS // STAGES
    assignment = Assignment(
        tuple((stage * depth, (stage + 1) * depth) for stage in range(STAGES)),
        tuple(tuple(sorted(order[s * replicas : (s + 1) * replicas])) for s in range(STAGES)),
        problem.data_holders,
    )
    try:
        check_assignment(problem, assignment)
    except ValueError:
        return "does not fit"
    return predict(problem, assignment).step_seconds


def _scaled(path: Path, scales: Sequence[int], budget: Budget | None) -> list[Row]:
    """Return weak scaling; a smaller swarm is every so many of the peers, from all places."""
    first: Prediction | None = None
    rows: list[Row] = []
    for scale in scales:
        every = SCALES[-1] // scale
        chosen = range(0, PER_PEER * SCALES[-1], every)
        problem = network(path, PER_PEER * len(chosen), chosen)
        found = solve(problem, budget=budget)
        first = first or found.prediction
        efficiency = first.step_seconds / found.prediction.step_seconds
        low = efficiency < ENOUGH
        rows.append(
            {
                "scale": f"{scale}x",
                "peers": len(chosen),
                "microbatches": problem.terms.microbatches_per_step,
                "step_seconds": found.prediction.step_seconds,
                "efficiency": efficiency,
                "stages": len(found.assignment.ranges),
                "standby": len(found.assignment.standby),
                "grew": _grew(first, found.prediction) if low else "",
                "limits": _limits(found.assignment, found.prediction) if low else "",
            }
        )
    return rows


def _grew(before: Prediction, after: Prediction) -> str:
    """Return the part of a step that grew most, and by how many seconds."""
    parts = ("fill_seconds", "steady_seconds", "reduction_seconds")
    name = max(parts, key=lambda part: float(getattr(after, part) - getattr(before, part)))
    return f"{name.split('_')[0]} +{getattr(after, name) - getattr(before, name):.3g} s"


def _limits(assignment: Assignment, prediction: Prediction) -> str:
    """Return what limits the rate of how many of those who work."""
    busy = [peer for group in assignment.groups for peer in group]
    counted = Counter(prediction.limits[peer] for peer in busy)
    return ", ".join(f"{name} {number}" for name, number in counted.most_common())
