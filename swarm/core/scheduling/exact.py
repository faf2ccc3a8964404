"""The optimum of small problems, by enumeration: what the gap of the search is measured against.

The rule: nothing is discarded but what a lower bound excludes, and what is left is priced by the
same `cost.predict` as everything else.

Groups are bit masks. All ways to give stages disjoint groups and consecutive ranges are built stage
by stage, as arrays, under three lower bounds in turn: tables of every mask and pair of masks, the
bound of bounds.py, the linear program.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from swarm.core.scheduling.bounds import Bounds, pair_rates
from swarm.core.scheduling.candidates import BETTER, Search, budget_for
from swarm.core.scheduling.estimate import INFEASIBLE
from swarm.core.scheduling.problem import Floats, Problem
from swarm.core.scheduling.solver import check_solvable
from swarm.core.scheduling.starts import Range, Start, stage_counts
from swarm.core.scheduling.wiring import edge_seconds
from swarm.errors import NoFeasiblePlan

MAX_PEERS = 8
CHUNK = 2048

Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Optimum:
    """The best assignment there is, and what it took to know it."""

    step_seconds: float
    start: Start
    candidates: int
    """Ways that the tables did not exclude."""
    programs: int


@dataclass(frozen=True)
class _Partial:
    """Ways to staff the first stages; one row each."""

    masks: Whole
    """(ways, stages so far)."""
    ends: Whole
    """(ways, stages so far): first layer after each stage."""
    used: Whole
    slowest: Floats
    """Seconds per microbatch, at least."""
    path: Floats
    """Fill and drain, at least."""


def optimum(problem: Problem, incumbent: Start | None = None) -> Optimum:
    """Return the optimum over all assignments.

    An incumbent, such as the search's answer, makes it quicker and changes nothing. Raises
    ValueError for more than 8 peers, NoFeasiblePlan if nothing is feasible. Beyond four stages it
    may take minutes: the terms can limit them.
    """
    if len(problem.peers) > MAX_PEERS:
        raise ValueError(f"{len(problem.peers)} peers are too many to enumerate")
    check_solvable(problem)
    search = Search(problem, budget_for(problem))
    best, start = np.inf, incumbent
    if incumbent is not None:
        best = search.price(incumbent)
    tables = _Tables(problem)
    counted = 0
    for stages in stage_counts(problem):
        ways, bounds = tables.ways(stages, best)
        counted += len(bounds)
        for i in np.argsort(bounds, kind="stable"):
            if bounds[i] >= best * BETTER:
                break
            candidate = _start(ways, int(i))
            if search.bound(candidate) < best * BETTER:
                price = search.price(candidate)
                if price < best:
                    best, start = price, candidate
    if start is None or not best < INFEASIBLE:
        raise NoFeasiblePlan("no assignment fits", evidence=(f"of {counted} ways, all were tried",))
    return Optimum(float(best), start, counted, search.programs)


def _start(ways: _Partial, row: int) -> Start:
    ends = [0, *ways.ends[row].tolist()]
    ranges = tuple(pairwise(ends))
    masks = ways.masks[row].tolist()
    return ranges, tuple(tuple(i for i in range(MAX_PEERS) if mask >> i & 1) for mask in masks)


class _Tables:
    """What every mask gives a range, and every pair of masks a boundary."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._bounds = Bounds(problem)
        self._count = len(problem.peers)
        self._every = np.arange(2**self._count)
        self._bits = (self._every[:, None] >> np.arange(self._count) & 1).astype(np.float64)
        speeds = np.where(self._bits > 0, problem.speed[None, :], 0.0)
        self._fastest, self._speed = speeds.max(axis=1), speeds.sum(axis=1)
        self._boundaries: dict[int, tuple[Floats, Floats]] = {}

    def ways(self, stages: int, best: float) -> tuple[_Partial, Floats]:
        """Return the ways with so many stages whose lower bound is below `best`, and the bounds."""
        layers = len(self._problem.layers)
        none = np.zeros((1, 0), dtype=np.int64)
        partial = _Partial(none, none, np.zeros(1, np.int64), np.zeros(1), np.zeros(1))
        for stage in range(stages):
            parts = []
            begins = np.unique(partial.ends[:, -1]).tolist() if stage else [0]
            for first in begins:
                here = partial if stage == 0 else _rows(partial, partial.ends[:, -1] == first)
                for last in self._lasts(first, stage, stages, layers):
                    parts += self._extended(here, stage, stages, (first, last), best)
            partial = _joined(parts, stage + 1)
        return partial, self._lower(partial.slowest, partial.path)

    def _lasts(self, first: int, stage: int, stages: int, layers: int) -> list[int]:
        if stage == stages - 1:
            return [layers]
        if self._problem.terms.cuts:
            return [self._problem.terms.cuts[stage]]
        return list(range(first + 1, layers - (stages - 1 - stage) + 1))

    def _lower(self, slowest: Floats, path: Floats) -> Floats:
        return self._problem.terms.microbatches_per_step * slowest + path

    def _extended(
        self, partial: _Partial, stage: int, stages: int, layers: Range, best: float
    ) -> list[_Partial]:
        """Return the ways with one stage more: every group of peers that are not used."""
        feasible = self._feasible(stage, stages, layers)
        if not len(feasible):
            return []
        made = []
        for begin in range(0, len(partial.used), CHUNK):
            part = _rows(partial, slice(begin, begin + CHUNK))
            slowest, path = self._grown(part, feasible, stage, layers)
            used = part.used[:, None] | feasible[None, :]
            lower = self._lower(*self._with_rest(slowest, path, used, layers[1]))
            free = (part.used[:, None] & feasible[None, :]) == 0
            rows, columns = np.nonzero(free & (lower < best * BETTER))
            made.append(
                _Partial(
                    np.column_stack([part.masks[rows], feasible[columns]]),
                    np.column_stack([part.ends[rows], np.full(len(rows), layers[1])]),
                    used[rows, columns],
                    slowest[rows, columns],
                    path[rows, columns],
                )
            )
        return made

    def _feasible(self, stage: int, stages: int, layers: Range) -> Whole:
        """Return the masks of the groups that a stage may have."""
        problem = self._problem
        needed = problem.memory_bytes(*layers, stage, stages)
        small = sum(1 << i for i, peer in enumerate(problem.peers) if peer.memory_bytes < needed)
        sizes = self._bits.sum(axis=1)
        right = (sizes >= problem.terms.min_replicas) & (sizes <= problem.replica_limit)
        feasible: Whole = self._every[right & (self._every & small == 0) & (sizes > 0)]
        return feasible

    def _grown(
        self, part: _Partial, feasible: Whole, stage: int, layers: Range
    ) -> tuple[Floats, Floats]:
        """Return bounds of (ways, feasible): seconds per microbatch, fill and drain."""
        rates, shortest = self._boundary(layers[0])
        holders = sum(1 << peer for peer in self._problem.data_holders)
        sources = part.masks[:, -1] if stage else np.full(len(part.used), holders)
        pairs = np.ix_(sources, feasible)
        limits = self._bits[feasible] @ self._bounds.limits(layers)
        with np.errstate(divide="ignore"):
            slowest = np.maximum(1.0 / np.minimum(rates[pairs], limits), part.slowest[:, None])
        compute = self._problem.seconds(*layers) / self._fastest[feasible]
        return slowest, part.path[:, None] + shortest[pairs] + compute

    def _with_rest(
        self, slowest: Floats, path: Floats, used: Whole, first: int
    ) -> tuple[Floats, Floats]:
        """Add what the layers from `first` on take at least with all who are left."""
        rest = self._problem.seconds(first, len(self._problem.layers))
        if first == len(self._problem.layers):
            return slowest, path
        left = self._every[-1] ^ used
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.maximum(slowest, rest / self._speed[left]), path + rest / self._fastest[left]

    def _boundary(self, cut: int) -> tuple[Floats, Floats]:
        """Return (masks, masks): rate of the links at a cut at most, shortest way at least."""
        found = self._boundaries.get(cut)
        if found is None:
            everybody = range(self._count)
            ways = edge_seconds(self._problem, cut, everybody, everybody)
            capacities = pair_rates(self._problem, cut, everybody, everybody)
            np.fill_diagonal(capacities, 1e12)
            sending, receiving = _peer_rates(self._problem, cut)
            sent = np.minimum(capacities @ self._bits.T, sending[:, None])
            received = np.minimum(self._bits @ capacities, receiving[None, :])
            rates = np.minimum(self._bits @ sent, received @ self._bits.T)
            found = rates, self._least(self._least(ways).T).T
            self._boundaries[cut] = found
        return found

    def _least(self, values: Floats) -> Floats:
        """Return the least row of every mask: (peers, k) to (masks, k)."""
        made = np.full((len(self._every), values.shape[1]), np.inf)
        for mask in range(1, len(self._every)):
            lowest = (mask & -mask).bit_length() - 1
            made[mask] = np.minimum(made[mask & (mask - 1)], values[lowest])
        return made


def _peer_rates(problem: Problem, cut: int) -> tuple[Floats, Floats]:
    """Return microbatches per second that each peer's uplink and downlink carry over a cut, as
    sender and as receiver, (n,) each; who may feed itself is not bounded by the way in."""
    there, back = problem.forward_bytes(cut), problem.backward_bytes(cut)
    sending = 1.0 / np.maximum(np.maximum(there / problem.uplink, back / problem.downlink), 1e-12)
    receiving = 1.0 / np.maximum(np.maximum(there / problem.downlink, back / problem.uplink), 1e-12)
    if cut == 0:
        sending[list(problem.data_holders)] = 1e12
        receiving[list(problem.data_holders)] = 1e12
    return sending, receiving


def _rows(partial: _Partial, chosen: "slice | NDArray[np.bool_]") -> _Partial:
    return _Partial(
        partial.masks[chosen],
        partial.ends[chosen],
        partial.used[chosen],
        partial.slowest[chosen],
        partial.path[chosen],
    )


def _joined(parts: list[_Partial], stages: int) -> _Partial:
    none = np.zeros((0, stages), dtype=np.int64)
    parts = [*parts, _Partial(none, none, np.zeros(0, np.int64), np.zeros(0), np.zeros(0))]
    return _Partial(
        np.concatenate([part.masks for part in parts]),
        np.concatenate([part.ends for part in parts]),
        np.concatenate([part.used for part in parts]),
        np.concatenate([part.slowest for part in parts]),
        np.concatenate([part.path for part in parts]),
    )
