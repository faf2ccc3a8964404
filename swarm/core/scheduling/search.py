"""Search for a good assignment of peers to ordered stage groups, whatever the objective.

Simulated annealing in knockout rounds: several grids are annealed, the better half of what they
lead to is annealed again for twice as long and less hot, until one is left; then a longer
tournament begins, from further starts. What decides most is where large groups of peers end up;
that is settled early and by chance, so many short tries are worth more than one long one.

The rule: the answer depends on the arguments alone. Budgets are in candidates tried, chance comes
from the generator that is given, and a found cost is that of the found grid, from scratch.

    starts = block_starts(distances, sizes=[8] * 8)
    found = search(objective, starts, 8, distances, budget=1_000_000, rng=Generator(PCG64(0)))
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.core.scheduling.grid import EMPTY, Floats, Ints, Objective, Walk, evaluate
from swarm.core.scheduling.neighbours import Neighbours


@dataclass(frozen=True, slots=True)
class Cooling:
    """How long and how hot grids are annealed; temperatures are relative to the grid's cost."""

    hot: float = 0.006
    cold: float = 0.001
    cooler: float = 0.8
    """How much less hot the next round of a tournament begins."""
    hottest: float = 1.0
    """How hot every fourth contender begins: where starts are few, others may stay near them."""
    contenders: int = 8
    candidates: int = 50_000
    """How many are tried in every first round of the first tournament; the next has twice that."""


COOLING = Cooling()
SMALLEST_BATCH, LARGEST_BATCH = 16, 1024
BATCHES = 48
"""The fewest batches in which a grid is annealed, so that it cools gradually."""
MADE_PER_BATCH = 4
"""So many exchanges per batch are best: more, and each costs its batch an evaluation again; fewer,
and the batches could be larger."""
BATCHES_PER_SIZE = 16


@dataclass(frozen=True, slots=True)
class Found:
    """The best grid that was met, shaped like the starts; its cost; how many candidates it took."""

    grid: Ints
    cost: float
    candidates: int


def search(
    objective: Objective,
    starts: Sequence[Ints],
    stages: int,
    distances: Floats,
    *,
    budget: int,
    rng: np.random.Generator,
    cooling: Cooling = COOLING,
    enough: Callable[[float], bool] = lambda cost: False,
) -> Found:
    """Return the best grid met in trying `budget` candidates or slightly more (one batch).

    `starts` are grids of one shape (R, W), R >= stages, with each of the n peers once. `distances`
    (n, n) say which peers are near: small where a link is fast. `enough` is asked with the best
    cost, at first and after every batch; once it says so, the search ends. Raises ValueError if
    there is no start, or if a start lacks peers or has another shape.
    """
    _check(starts, stages, len(distances))
    hunt = _Hunt(objective, stages, starts, distances, budget, rng, enough)
    length, first = cooling.candidates, 0
    while not hunt.over:
        hunt.tournament(
            [starts[(first + each) % len(starts)] for each in range(cooling.contenders)],
            length,
            cooling,
        )
        length, first = 2 * length, first + cooling.contenders
    return Found(hunt.best, evaluate(objective, stages, hunt.best), hunt.tried)


class _Hunt:
    """What one search has spent and found so far."""

    def __init__(
        self,
        objective: Objective,
        stages: int,
        starts: Sequence[Ints],
        distances: Floats,
        budget: int,
        rng: np.random.Generator,
        enough: Callable[[float], bool],
    ) -> None:
        self._objective, self._stages = objective, stages
        rows, width = starts[0].shape
        self._neighbours = Neighbours((rows, width), stages, distances)
        self._budget, self._rng, self._enough = budget, rng, enough
        self.tried = 0
        costs = [evaluate(objective, stages, start) for start in starts]
        self.best_cost = min(costs)
        self.best = starts[costs.index(self.best_cost)].astype(np.intp)
        self.over = budget <= 0 or enough(self.best_cost)

    def tournament(self, grids: Sequence[Ints], length: int, cooling: Cooling) -> None:
        """Anneal the grids, then the better half of what was met, and so on."""
        hot, hottest = cooling.hot, cooling.hottest
        while grids and not self.over:
            met = [
                self._anneal(grid, length, hottest if number % 4 == 3 else hot, cooling.cold)
                for number, grid in enumerate(grids)
            ]
            met.sort(key=lambda walk: walk.best_cost)
            grids = [walk.best for walk in met[: len(met) // 2]]
            length, hot = 2 * length, max(hot * cooling.cooler, cooling.cold)
            hottest = hot

    def _anneal(self, grid: Ints, length: int, hot: float, cold: float) -> Walk:
        """Walk from a grid for `length` candidates while the temperature falls."""
        walk = Walk(self._objective, self._stages, grid)
        size, made, batches, end = SMALLEST_BATCH, 0, 0, self.tried + length
        largest = max(SMALLEST_BATCH, min(LARGEST_BATCH, length // BATCHES))
        while self.tried < end and not self.over:
            temperature = hot * (cold / hot) ** (1 - (end - self.tried) / length)
            slacks = self._rng.standard_exponential(size) * temperature * _scale(walk.best_cost)
            exchanges = self._neighbours.draw(walk.contents, size, self._rng)
            made += walk.advance(exchanges, slacks)
            batches += 1
            self._count(size, walk)
            if batches % BATCHES_PER_SIZE == 0:
                size, made = _resized(size, made / BATCHES_PER_SIZE, largest), 0
        return walk

    def _count(self, size: int, walk: Walk) -> None:
        self.tried += size
        if walk.best_cost < self.best_cost:
            self.best_cost, self.best = walk.best_cost, walk.best
        self.over = self.tried >= self._budget or self._enough(self.best_cost)


def _scale(cost: float) -> float:
    return cost if np.isfinite(cost) else 0.0


def _resized(size: int, made: float, largest: int) -> int:
    if made > MADE_PER_BATCH:
        return max(SMALLEST_BATCH, size // 2)
    if made < MADE_PER_BATCH / 4:
        return min(largest, size * 2)
    return size


def _check(starts: Sequence[Ints], stages: int, peers: int) -> None:
    if not starts:
        raise ValueError("a search needs a start")
    for start in starts:
        if start.shape != starts[0].shape or not 1 <= stages <= len(start):
            raise ValueError(f"{stages} stages in a grid of {start.shape}, not {starts[0].shape}")
        if not np.array_equal(np.sort(start[start != EMPTY]), np.arange(peers)):
            raise ValueError(f"a start does not hold each of {peers} peers once")
