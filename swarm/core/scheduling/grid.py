"""Assignments of peers to ordered stage groups as grids, and what they and their neighbours cost.

A grid (R, W) has one row per stage and one column per place in a group; a place holds a peer
(0..n-1) or nobody (EMPTY). Rows after the stages are the bench: their peers take no part.

The rule: many candidates of many grids are evaluated at once, and each costs what its grid costs
from scratch; what would be too dear even if its changed groups cost nothing is not evaluated
further.

Shapes: R rows, W columns, N = R * W places column by column (a boundary is then a view of them),
S stages, K walks, B candidates, as many of each walk and walk by walk, C of them that are evaluated
fully, L places exchanged on either side, T rows touched.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

Ints = np.ndarray[tuple[int, ...], np.dtype[np.intp]]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

EMPTY = -1
SAME = 1e-9
"""Relative difference of costs that counts as none: sums in another order differ by less."""


class Objective(Protocol):
    """What is minimised; costs are at least 0, and infinite where something is impossible.

    Peers may be EMPTY where a grid has empty places. A cost depends on its arguments alone, and
    the total does not fall when one of the costs rises. For example, pipelines that wait for the
    slowest link of each boundary, and stages that wait for their slowest peer:

        class Pipelines:
            def group_costs(self, stages, peers):
                return stage_seconds[stages] / slowest[peers].min(axis=0)

            def boundary_costs(self, boundaries, before, after):
                return link_seconds[before, after].max(axis=0)

            def total(self, groups, boundaries):
                return groups.max(axis=0) + boundaries.sum(axis=0)
    """

    def group_costs(self, stages: Ints, peers: Ints) -> Floats:
        """Return (B,): what it costs that peers[:, b] host stages[b]; peers is (W, B)."""
        ...

    def boundary_costs(self, boundaries: Ints, before: Ints, after: Ints) -> Floats:
        """Return (B,): what it costs that stage boundaries[b] is hosted by before[:, b] (W, B), and
        the next by after[:, b]; place w sends to place w, if the objective cares."""
        ...

    def total(self, groups: Floats, boundaries: Floats) -> Floats:
        """Return (B,) from the costs of groups (S, B) and of boundaries (S - 1, B)."""
        ...


@runtime_checkable
class Softenable(Objective, Protocol):
    """An objective of extremes that can be eased; a search profits from it, but needs it not.

    Where only the slowest counts, most exchanges change nothing, and those that make the second
    slowest faster are in vain. With the mean mixed in, every exchange tells whether it is good.
    """

    def softened(self, softness: float) -> Objective:
        """Return the objective with this share of the mean in each maximum: 0 is none, 1 all."""
        ...


@dataclass(frozen=True, slots=True)
class Exchanges:
    """B candidates, each of which exchanges what places `ones` hold with what `others` hold.

    The 2 L places of a candidate differ, or each is exchanged with itself and nothing changes.
    """

    ones: Ints
    """(L, B)."""
    others: Ints
    """(L, B)."""
    rows: Ints
    """(T, B): rows whose groups may change, possibly with repetitions; the order in a group
    alone is no change."""


def evaluate(objective: Objective, stages: int, grid: Ints) -> float:
    """Return what a grid costs, evaluated from scratch."""
    return float(Walks(objective, stages, grid[None]).costs[0])


class Walks:
    """K grids that exchanges change one after the other, what they cost, and the best they were."""

    def __init__(self, objective: Objective, stages: int, grids: Ints) -> None:
        """`grids` (K, R, W) are where the walks begin; all hold the same peers."""
        self.count, self._rows, self._width = grids.shape
        self._stages = stages
        places_first = grids.transpose(2, 1, 0).reshape(-1, self.count)
        self.contents: Ints = np.array(places_first, dtype=np.intp, order="C")
        """(N, K)."""
        self.places: Ints = np.zeros((int(grids.max(initial=EMPTY)) + 2, self.count), np.intp)
        """(n + 1, K): where each peer is; the last row, that of EMPTY, means nothing."""
        self._note_places(np.arange(self.count))
        self.price(objective)

    def price(self, objective: Objective) -> None:
        """Continue with another objective; what was the best by the former is forgotten."""
        self._objective = objective
        stages = np.arange(self._stages).repeat(self.count)
        columns = self.contents.reshape(self._width, self._rows, self.count)
        hosts = columns[:, : self._stages].reshape(self._width, -1)
        self._groups = np.zeros((self._rows, self.count))
        groups = objective.group_costs(stages, hosts).reshape(self._stages, self.count)
        self._groups[: self._stages] = groups
        self.costs = self._total(self._groups, self._boundaries(self.contents))
        """(K,)."""
        self.best_costs, self._best = self.costs.copy(), self.contents.copy()

    def grids(self) -> Ints:
        """Return the grids (K, R, W) as they are now."""
        return self._as_grids(self.contents)

    def best_grids(self) -> Ints:
        """Return the best grids (K, R, W) since they were priced; they cost `best_costs` (K,)."""
        return self._as_grids(self._best)

    def costs_after(self, exchanges: Exchanges, limits: Floats) -> Floats:
        """Return (B,): what a grid would cost after each; infinity if above its limit (B,)."""
        costs = self._tried(exchanges, limits)[0]
        return np.where(costs <= limits, costs, np.inf)

    def advance(
        self,
        exchanges: Exchanges,
        slacks: Floats,
        least: Floats | float = 0.0,
        *,
        choosy: bool = False,
    ) -> int:
        """Make of each walk the first that raises its cost by no more than its slack; or, if it is
        to be choosy, of all such the one whose cost is farthest below what it might be.

        `slacks` are (B,). What changes a cost by no more than `least` (K,) is not made: it leads
        nowhere, and ends the batch of its walk. Returns how many walks have moved.
        """
        limits = slacks + self.costs.repeat(slacks.size // self.count)
        costs, evaluated, contents, groups = self._tried(exchanges, limits)
        fitting = (costs <= limits).reshape(self.count, -1)
        fitting &= self._differ(costs.reshape(self.count, -1), least)
        walks = np.flatnonzero(fitting.any(axis=1))
        if walks.size:
            ranks = np.where(fitting, 0.0, 1.0)
            if choosy:
                np.subtract(costs, limits, out=ranks.reshape(-1), where=fitting.reshape(-1))
            made = walks * fitting.shape[1] + ranks[walks].argmin(axis=1)
            self.contents[:, walks] = contents.take(made, axis=1)
            self._groups[:, walks] = groups.take(evaluated.searchsorted(made), axis=1)
            self.costs[walks] = costs[made]
            self._note_places(walks)
            better = walks[self.costs[walks] < self.best_costs[walks]]
            self.best_costs[better] = self.costs[better]
            self._best[:, better] = self.contents[:, better]
        return walks.size

    # --- what was tried --------------------------------------------------------------------------

    def _differ(self, costs: Floats, least: Floats | float) -> Bools:
        """Return where costs (K, B / K) differ from those of the walks; infinite ones do not."""
        band = np.where(np.isfinite(self.costs), self.costs * SAME + least, 0.0)
        low, high = self.costs - band, self.costs + band
        return (costs < low[:, None]) | ((costs > high[:, None]) & np.isfinite(costs))

    def _tried(self, exchanges: Exchanges, limits: Floats) -> tuple[Floats, Ints, Ints, Floats]:
        """Return costs (B,), infinite where not evaluated; what was evaluated (C,); contents (N, B)
        and groups' costs (R, C) afterwards."""
        size, each = limits.size, limits.size // self.count
        every = np.arange(size)
        walks = every // each
        ones, others = exchanges.ones, exchanges.others
        held = self.contents.take(ones * self.count + walks)
        contents = self.contents.repeat(each, axis=1)
        flat = contents.ravel()
        flat[ones * size + every] = self.contents.take(others * self.count + walks)
        flat[others * size + every] = held
        boundaries = self._boundaries(contents)
        groups = self._groups.repeat(each, axis=1)
        groups.ravel()[exchanges.rows * size + every] = 0.0
        evaluated = np.flatnonzero(self._total(groups, boundaries) <= limits)
        costs = np.full(size, np.inf)
        if evaluated.size:
            groups = groups.take(evaluated, axis=1)
            self._regroup(groups, exchanges.rows.take(evaluated, axis=1), contents, evaluated)
            costs[evaluated] = self._total(groups, boundaries.take(evaluated, axis=1))
        return costs, evaluated, contents, groups

    def _regroup(self, groups: Floats, rows: Ints, contents: Ints, evaluated: Ints) -> None:
        """Evaluate the costs of `rows` (T, C) among those of the groups (R, C)."""
        candidates = np.arange(rows.size) % evaluated.size
        rows = rows.ravel()
        if self._stages < self._rows:
            hosting = np.flatnonzero(rows < self._stages)
            rows, candidates = rows[hosting], candidates[hosting]
        if rows.size:
            size = contents.shape[1]
            columns = np.arange(self._width)[:, None] * (self._rows * size)
            places = rows * size + evaluated.take(candidates) + columns
            peers = contents.take(places, mode="clip")  # in range, and faster than to check it
            groups[rows, candidates] = self._objective.group_costs(rows, peers)

    # --- parts of grids --------------------------------------------------------------------------

    def _boundaries(self, contents: Ints) -> Floats:
        """Return (S - 1, B) from contents (N, B)."""
        count, boundaries = contents.shape[1], self._stages - 1
        if not boundaries:
            return np.zeros((0, count))
        columns = contents.reshape(self._width, self._rows, count)
        before = columns[:, :boundaries].reshape(self._width, -1)
        after = columns[:, 1 : self._stages].reshape(self._width, -1)
        numbers = np.arange(boundaries).repeat(count)
        return self._objective.boundary_costs(numbers, before, after).reshape(boundaries, count)

    def _total(self, groups: Floats, boundaries: Floats) -> Floats:
        return self._objective.total(groups[: self._stages], boundaries)

    def _note_places(self, walks: Ints) -> None:
        self.places[self.contents[:, walks], walks] = np.arange(len(self.contents))[:, None]

    def _as_grids(self, contents: Ints) -> Ints:
        columns = contents.reshape(self._width, self._rows, self.count)
        return columns.transpose(2, 1, 0).copy()
