"""An assignment of peers to ordered stage groups as a grid, and what it and its neighbours cost.

A grid (R, W) has one row per stage and one column per place in a group; a place holds a peer
(0..n-1) or nobody (EMPTY). Rows after the stages are the bench: their peers take no part.

The rule: many candidates are evaluated at once, and each costs what its grid costs from scratch;
what would be too dear even if its changed groups cost nothing is not evaluated further.

Shapes: R rows, W columns, N = R * W places row by row, S stages, B candidates, C of them that are
evaluated fully, L places exchanged on either side, T rows touched.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

Ints = np.ndarray[tuple[int, ...], np.dtype[np.intp]]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

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

    def take(self, chosen: Ints) -> "Exchanges":
        """Return the candidates of these numbers."""
        return Exchanges(self.ones[:, chosen], self.others[:, chosen], self.rows[:, chosen])


def evaluate(objective: Objective, stages: int, grid: Ints) -> float:
    """Return what a grid costs, evaluated from scratch."""
    return Walk(objective, stages, grid).cost


class Walk:
    """A grid that exchanges change one after the other, what it costs, and the best it was."""

    def __init__(self, objective: Objective, stages: int, grid: Ints) -> None:
        self._objective, self._stages = objective, stages
        self._rows, self._width = grid.shape
        self.contents: Ints = grid.astype(np.intp).ravel()
        self._groups = np.zeros(self._rows)
        hosts = np.ascontiguousarray(grid[:stages].T, dtype=np.intp)
        self._groups[:stages] = objective.group_costs(np.arange(stages), hosts)
        boundaries = self._boundaries(self.contents[:, None])
        self.cost = float(self._total(self._groups[:, None], boundaries)[0])
        self.best_cost, self.best = self.cost, self.grid

    @property
    def grid(self) -> Ints:
        """Return a copy of the grid as it is now."""
        return self.contents.reshape(self._rows, self._width).copy()

    def costs_after(self, exchanges: Exchanges, limits: Floats) -> Floats:
        """Return (B,): what the grid would cost after each; infinity if above its limit (B,)."""
        costs = self._tried(exchanges, limits)[0]
        return np.where(costs <= limits, costs, np.inf)

    def advance(self, exchanges: Exchanges, slacks: Floats) -> int:
        """Make those that change the cost, but raise it by no more than their slack (B,), in order.

        Whatever does not fit the grid as it was at first is not tried again. Returns how many
        exchanges were made.
        """
        made = 0
        while slacks.size:
            limits = self.cost + slacks
            costs, evaluated, contents, groups = self._tried(exchanges, limits)
            fitting = np.flatnonzero((costs <= limits) & self._differ(costs))
            if not fitting.size:
                break
            first, later = fitting[0], fitting[1:]
            self.contents = contents[:, first].copy()
            self._groups = groups[:, np.searchsorted(evaluated, first)].copy()
            self.cost = float(costs[first])
            if self.cost < self.best_cost:
                self.best_cost, self.best = self.cost, self.grid
            made += 1
            exchanges, slacks = exchanges.take(later), slacks[later]
        return made

    def _differ(self, costs: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        if not np.isfinite(self.cost):
            return np.isfinite(costs)
        return np.abs(costs - self.cost) > SAME * self.cost

    def _tried(self, exchanges: Exchanges, limits: Floats) -> tuple[Floats, Ints, Ints, Floats]:
        """Return costs (B,), infinite where not evaluated; what was evaluated (C,); contents (N, B)
        and groups' costs (R, C) afterwards."""
        every = np.arange(limits.size)
        contents: Ints = np.repeat(self.contents, every.size)
        contents[exchanges.ones * every.size + every] = self.contents.take(exchanges.others)
        contents[exchanges.others * every.size + every] = self.contents.take(exchanges.ones)
        contents = contents.reshape(-1, every.size)
        boundaries = self._boundaries(contents)
        groups: Floats = np.repeat(self._groups, every.size)
        groups[exchanges.rows * every.size + every] = 0.0
        groups = groups.reshape(-1, every.size)
        evaluated = np.flatnonzero(self._total(groups, boundaries) <= limits)
        costs = np.full(every.size, np.inf)
        if evaluated.size:
            rows = exchanges.rows.take(evaluated, axis=1)
            groups = self._regrouped(groups.take(evaluated, axis=1), rows, contents, evaluated)
            costs[evaluated] = self._total(groups, boundaries.take(evaluated, axis=1))
        return costs, evaluated, contents, groups

    def _regrouped(self, groups: Floats, rows: Ints, contents: Ints, evaluated: Ints) -> Floats:
        """Return the groups' costs (R, C) with those of `rows` (T, C) evaluated."""
        candidates = np.broadcast_to(np.arange(evaluated.size), rows.shape)
        hosting = rows < self._stages
        rows, candidates = rows[hosting], candidates[hosting]
        if rows.size:
            places = rows * self._width + np.arange(self._width)[:, None]
            peers = contents.ravel().take(places * contents.shape[1] + evaluated[candidates])
            groups[rows, candidates] = self._objective.group_costs(rows, peers)
        return groups

    def _boundaries(self, contents: Ints) -> Floats:
        """Return (S - 1, B) from contents (N, B)."""
        count, boundaries = contents.shape[1], self._stages - 1
        if not boundaries:
            return np.zeros((0, count))
        columns = contents.reshape(self._rows, self._width, count).swapaxes(0, 1)
        before = columns[:, :boundaries].reshape(self._width, -1)
        after = columns[:, 1 : self._stages].reshape(self._width, -1)
        numbers = np.repeat(np.arange(boundaries), count)
        return self._objective.boundary_costs(numbers, before, after).reshape(boundaries, count)

    def _total(self, groups: Floats, boundaries: Floats) -> Floats:
        return self._objective.total(groups[: self._stages], boundaries)
