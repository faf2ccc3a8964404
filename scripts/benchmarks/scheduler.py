"""How good assignments the search finds by DT-FM's cost function, and how soon.

The rule: a cost is computed from the grid that the search returned, from scratch and in plain
Python; the seconds are those of the search alone, on one thread, until it returned. It returns when
it meets the best cost that is known of a case, and after LIMIT_SECONDS at the latest. `cost` and
`seconds` are medians over the seeds.

A case is a JSON object {n, delay_ms[n][n], bandwidth_gbps[n][n], task}, of which task gives
send_gradient_size_GB, send_activation_size_GB, and may give way (stages) and partition_size
(replicas); else they are as near to each other as n allows. The cost is that of DT-FM,
"Decentralized Training of Foundation Models in Heterogeneous Environments", arXiv 2206.01288:
the slowest stage's exchange of gradients, and twice the sum over boundaries between stages of the
slowest link that carries activations.
"""

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import PCG64, Generator

from benchmarks.report import Report, Row
from swarm.core.scheduling.blocks import arranged, block_starts
from swarm.core.scheduling.grid import Floats, Ints, evaluate
from swarm.core.scheduling.search import search

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "dtfm"
KNOWN = {  # the best cost known, and the best that DT-FM's own genetic algorithm met
    "datacenter": (3.4398, 3.4398),
    "spot-in-one-datacenter": (31.6342, 49.5039),
    "two-universities": (16.0868, 16.0868),
    "regional": (34.8020, 34.8020),
    "worldwide": (49.2184, 49.2184),
    "ten-cities": (63.160, 70.378),
    "ten-cities-jitter": (55.838, 65.358),
}
ROUNDED = 1e-4
"""Known costs are rounded: what differs by less is the same."""
SEEDS = 5
LIMIT_SECONDS, QUICK_SECONDS = 9.5, 0.2
KEPT_STARTS = 8
ENDLESS = 10**12


@dataclass(frozen=True, slots=True)
class Case:
    """Peers and links, and what stages send over them; all seconds are those of DT-FM's cost."""

    name: str
    stages: int
    replicas: int
    gradients: Floats
    """(n, n): what a pair adds to the cost of a replica of its stage."""
    activations: Floats
    """(n, n): what a pair adds to the cost, forward and backward, if it is a boundary's slowest."""
    alike: bool
    """Whether gradients cost alike both ways."""
    softness: float = 0.0
    """The share of the mean in each maximum; see `softened`."""

    def group_costs(self, stages: Ints, peers: Ints) -> Floats:
        """Return (B,): the slowest replica's exchange of gradients; see grid.py."""
        ones, others, sums = pairs_of(len(peers), self.alike)
        links = (peers * len(self.gradients)).take(ones, axis=0) + peers.take(others, axis=0)
        return self._slowest(sums @ self.gradients.take(links, mode="clip"))

    def boundary_costs(self, boundaries: Ints, before: Ints, after: Ints) -> Floats:
        """Return (B,): the slowest link between two stages."""
        links = before * len(self.activations) + after
        return self._slowest(self.activations.take(links, mode="clip"))

    def total(self, groups: Floats, boundaries: Floats) -> Floats:
        """Return (B,): the cost of the assignment."""
        return self._slowest(groups) + boundaries.sum(axis=0)

    def softened(self, softness: float) -> "Case":
        """Return the case with a share of the mean in each maximum; see grid.py."""
        return replace(self, softness=softness)

    def _slowest(self, seconds: Floats) -> Floats:
        slowest = np.asarray(seconds.max(axis=0))
        if not self.softness:
            return slowest
        share = self.softness / len(seconds)
        return (1 - self.softness) * slowest + share * seconds.sum(axis=0)


@cache
def pairs_of(replicas: int, alike: bool) -> tuple[Ints, Ints, Floats]:
    """Return P pairs of a group's members, (P,) and (P,), and what sums up each one's, (W, P).

    Where links cost alike both ways, half of the pairs tell what all cost."""
    ones, others = np.nonzero(
        np.triu(np.ones((replicas, replicas)), 1) if alike else 1 - np.eye(replicas)
    )
    pairs = np.arange(ones.size)
    sums = np.zeros((replicas, pairs.size))
    sums[ones, pairs] = 1.0
    if alike:
        sums[others, pairs] = 1.0
    return ones, others, sums


def measure(*, quick: bool, case: Sequence[str] = (), seeds: int = SEEDS) -> Report:
    """Search for each case, `case` naming files or none for all known ones, with several seeds."""
    limit = QUICK_SECONDS if quick else LIMIT_SECONDS
    rows = [_row(each, 1 if quick else seeds, limit) for each in _files(case)]
    better = [
        row for row in rows if row["DT-FM best"] and _not_above(row["cost"], row["DT-FM best"])
    ]
    at_known = [row for row in rows if row["known"] and _not_above(row["cost"], row["known"])]
    compared = sum(row["known"] is not None for row in rows)
    summary: Row = {
        "cases_compared": compared,
        "at_most_dtfm_best": len(better),
        "at_most_known": len(at_known),
        "most_seconds": max(float(row["most seconds"] or 0.0) for row in rows),
    }
    return Report("scheduler", rows, summary)


def load(path: Path) -> Case:
    """Return the case that a file describes; exits with a message if it describes none."""
    try:
        found = json.loads(path.read_text())
        return case_of(path.stem, found)
    except OSError as fault:
        raise SystemExit(f"error: cannot read the case {path}: {fault.strerror}") from None
    except (KeyError, TypeError, ValueError) as fault:
        raise SystemExit(f"error: {path} is not a network case: {fault!r}") from None


def case_of(name: str, found: dict[str, Any]) -> Case:
    """Return a decoded case; raises KeyError or ValueError if it is none."""
    peers, task = int(found["n"]), found["task"]
    stages, replicas = shape_of(peers, task)
    delay = np.array(found["delay_ms"], float) / 1000
    bandwidth = np.array(found["bandwidth_gbps"], float)
    if delay.shape != (peers, peers) or bandwidth.shape != (peers, peers):
        raise ValueError(f"links of {delay.shape} and {bandwidth.shape} for {peers} peers")
    np.fill_diagonal(bandwidth, 1.0)
    gigabits = 8 * task["send_gradient_size_GB"], 8 * task["send_activation_size_GB"]
    with np.errstate(divide="ignore"):
        gradients = 2 * (delay + gigabits[0] / (bandwidth * replicas))
        activations = 2 * (delay + gigabits[1] / bandwidth)
    np.fill_diagonal(gradients, 0.0)
    np.fill_diagonal(activations, 0.0)
    alike = bool(np.array_equal(gradients, gradients.T))
    return Case(name, stages, replicas, gradients, activations, alike)


def shape_of(peers: int, task: dict[str, Any]) -> tuple[int, int]:
    """Return (stages, replicas); their product is the number of peers, else ValueError."""
    stages, replicas = task.get("way"), task.get("partition_size")
    if stages is None and replicas is None:
        replicas = next(size for size in range(math.isqrt(peers), 0, -1) if peers % size == 0)
    stages = stages or peers // replicas
    replicas = replicas or peers // stages
    if stages * replicas != peers:
        raise ValueError(f"{stages} stages of {replicas} replicas are not {peers} peers")
    return stages, replicas


def solve(case: Case, seed: int, limit_seconds: float, known: float | None) -> tuple[Ints, float]:
    """Return a grid (stages, replicas) and how many seconds it took to find."""
    began = time.perf_counter()

    def enough(cost: float) -> bool:
        done = known is not None and cost <= known + ROUNDED
        return done or time.perf_counter() - began > limit_seconds

    starts = block_starts(case.activations, [case.replicas] * case.stages)
    starts.sort(key=lambda grid: evaluate(case, case.stages, grid))
    starts = [arranged(grid, case.activations) for grid in starts[:KEPT_STARTS]]
    starts.sort(key=lambda grid: evaluate(case, case.stages, grid))
    rng = Generator(PCG64(seed))
    found = search(
        case, starts, case.stages, case.activations, budget=ENDLESS, rng=rng, enough=enough
    )
    return found.grid, time.perf_counter() - began


def cost_of(case: Case, grid: Sequence[Sequence[int]]) -> float:
    """Return DT-FM's cost of a grid of peers, stage by stage; place k sends to place k."""
    exchange = max(
        sum(float(case.gradients[one, other]) for other in stage if other != one)
        for stage in grid
        for one in stage
    )
    return exchange + sum(
        max(float(case.activations[pair]) for pair in zip(before, after, strict=True))
        for before, after in pairwise(grid)
    )


def _files(named: Sequence[str]) -> list[Path]:
    if named:
        return [Path(each) for each in named]
    if not FOLDER.is_dir():
        raise SystemExit(
            f"error: the network cases are not at {FOLDER}\ntry: name a file with --case FILE"
        )
    return [FOLDER / f"{name}.json" for name in KNOWN]


def _row(path: Path, seeds: int, limit_seconds: float) -> Row:
    """Return medians over the seeds, and what they are to be compared with."""
    case = load(path)
    known, dtfm_best = KNOWN.get(case.name, (None, None))
    costs, times = [], []
    for seed in range(seeds):
        grid, seconds = solve(case, seed, limit_seconds, known)
        costs.append(cost_of(case, grid.tolist()))
        times.append(seconds)
    return {
        "case": case.name,
        "cost": statistics.median(costs),
        "seconds": statistics.median(times),
        "known": known,
        "DT-FM best": dtfm_best,
        "least cost": min(costs),
        "greatest cost": max(costs),
        "most seconds": max(times),
        "seeds": seeds,
        "seeds at known": None if known is None else sum(_not_above(each, known) for each in costs),
    }


def _not_above(cost: object, other: object) -> bool:
    assert isinstance(cost, float) and isinstance(other, float)
    return cost <= other + ROUNDED
