"""Search for a good assignment of peers to ordered stage groups, whatever the objective.

Simulated annealing in knockout tournaments: many grids are annealed side by side, the few best that
were met are multiplied and annealed again, and so on; then a longer tournament begins. What decides
most is where large groups of peers end up; that is settled early and by chance, so many short
tries are worth more than one long one. An objective that can be eased is at first: then the grids
are sorted as a whole, before it is about their slowest parts.

The first tournament begins from the starts that are given; where those are poor, all that is near
them is, so later ones begin from random grids.

The rule: the answer depends on the arguments alone. Budgets are in candidates tried, chance comes
from the generator that is given, and a found cost is that of the found grid, from scratch.

    starts = block_starts(distances, sizes=[8] * 8)
    found = search(objective, starts, 8, distances, budget=1_000_000, rng=Generator(PCG64(0)))

Shapes: K contenders, grids (R, W); see grid.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.core.scheduling.grid import (
    EMPTY,
    Floats,
    Ints,
    Objective,
    Softenable,
    Walks,
    evaluate,
)
from swarm.core.scheduling.neighbours import Neighbours


@dataclass(frozen=True, slots=True)
class Cooling:
    """How long and how hot grids are annealed; temperatures are relative to the grid's cost."""

    contenders: int = 32
    survivors: int = 6
    """So many of the contenders' best grids go on to the next phase of a tournament."""
    phases: int = 3
    candidates: int = 2_000
    """How many each contender tries in a phase of the first tournament."""
    longer: float = 4.0
    """How much longer every next tournament is, until they have LONG_PHASE candidates."""
    hot: float = 0.007
    cold: float = 0.0005
    cooler: float = 0.7
    """How much less hot the phases after the first begin."""
    hottest: float = 0.03
    """How hot every fourth contender begins: where starts are few, others may stay near them."""
    soft: tuple[float, float] = (0.7, 0.4)
    """How much the objective is eased when the first phase begins, and later ones."""
    shuffled: bool = True
    """Whether tournaments after the first begin from random grids."""


COOLING = Cooling()
LONG_PHASE, SLOWLY = 32_000, 1.25
"""A contender's candidates in a phase from which on tournaments get longer by this factor only:
several that are long enough find more than one of their lengths together. In these, walks make the
best of what a batch offers, like a heat bath: it saves candidates; shorter ones would freeze."""
LEVELS = 32
"""In so many levels a grid is cooled and its objective hardened, each level as long as the next."""
HARD_LEVELS = 2
"""The last of them, in which the objective is not eased."""
LEAST_SOFT = 0.1
"""How much it is eased in the levels before."""
EASING = 0.75
"""The part of a phase after which the objective would not be eased if there was no least."""
SMALLEST, LARGEST_BATCH = 8, 1024
"""Candidates of a contender, and of all of them, in one batch."""
MANY_MOVE, FEW_MOVE = 0.6, 0.35
"""Shares of the walks that move in a batch: with more of them batches get smaller, as of each walk
what follows its first move is wasted; with fewer larger, as large ones cost less per candidate."""
PER_SIZE = 16
"""Batches after which their size is judged."""
IN_VAIN = 0.1
"""Changes of less than this part of the temperature are not made: they lead nowhere, slowly."""


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
    hunt = _Hunt(objective, stages, starts, distances, budget, rng, enough, cooling)
    contenders, length, first = cooling.contenders, float(cooling.candidates), True
    while not hunt.over:
        grids = np.stack([starts[each % len(starts)] for each in range(contenders)])
        hunt.tournament(grids if first or not cooling.shuffled else _shuffled(grids, rng), length)
        length *= cooling.longer if length < LONG_PHASE else SLOWLY
        first = False
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
        cooling: Cooling,
    ) -> None:
        self._objective, self._stages, self._cooling = objective, stages, cooling
        rows, width = starts[0].shape
        self._neighbours = Neighbours((rows, width), stages, distances)
        self._budget, self._rng, self._enough = budget, rng, enough
        self._choosy = False
        self.tried = 0
        costs = [evaluate(objective, stages, start) for start in starts]
        self.best_cost = min(costs)
        self.best = starts[costs.index(self.best_cost)].astype(np.intp)
        self.over = budget <= 0 or enough(self.best_cost)

    def tournament(self, grids: Ints, length: float) -> None:
        """Anneal grids (K, R, W), then copies of the best that were met, and so on."""
        cooling, contenders = self._cooling, np.arange(len(grids))
        self._choosy = length >= LONG_PHASE
        hot = np.where(contenders % 4 == 3, cooling.hottest, cooling.hot)
        costs, met = np.full(len(grids), np.inf), grids
        for phase in range(cooling.phases):
            softness = cooling.soft[min(phase, 1)]
            found_costs, found = self._anneal(met, length, hot, softness)
            better = found_costs < costs
            costs[better] = found_costs[better]
            met = np.where(better[:, None, None], found, met)
            if self.over:
                break
            order = np.argsort(costs, kind="stable")[contenders % cooling.survivors]
            costs, met = costs[order], met[order]
            hot = np.full(len(grids), max(cooling.hot * cooling.cooler, cooling.cold))

    def _anneal(
        self, grids: Ints, length: float, hot: Floats, softness: float
    ) -> tuple[Floats, Ints]:
        """Return the least costs (K,) that were met, and their grids, in trying `length` candidates
        of each grid while temperatures fall from `hot` (K,)."""
        walks = Walks(self._objective, self._stages, grids)
        costs, met = walks.costs.copy(), grids.copy()
        levels = int(min(LEVELS, max(1, length // SMALLEST)))
        tried, size = 0, SMALLEST
        for level in range(levels):
            eased = self._eased(softness, level, levels)
            if eased:
                walks.price(eased)
            scales = np.where(np.isfinite(walks.costs), walks.costs, 0.0)
            temperatures = scales * hot * (self._cooling.cold / hot) ** (level / levels)
            until = length * (level + 1) / levels
            tried, size = self._walk(walks, tried, until, temperatures, size, not eased)
            if eased:
                walks.price(self._objective)
            self._note(walks)
            better = walks.best_costs < costs
            costs[better], met[better] = walks.best_costs[better], walks.best_grids()[better]
            if self.over:
                break
        return costs, met

    def _eased(self, softness: float, level: int, levels: int) -> Objective | None:
        """Return the objective of a level, if it is not the one that is searched for."""
        if not softness or level >= levels - HARD_LEVELS:
            return None
        if not isinstance(self._objective, Softenable):
            return None
        left = max(0.0, 1 - level / (EASING * levels))
        return self._objective.softened(max(LEAST_SOFT, softness * left))

    def _walk(
        self,
        walks: Walks,
        tried: int,
        until: float,
        temperatures: Floats,
        size: int,
        hard: bool,
    ) -> tuple[int, int]:
        """Try candidates of each walk, from `tried` on, in batches of `size` of each at first.

        Return how many of each have been tried, and what size is good now."""
        batches = moved = 0
        while tried < until and not self.over:
            slacks = self._rng.standard_exponential((walks.count, size)) * temperatures[:, None]
            exchanges = self._neighbours.draw(walks, size, self._rng)
            moved += walks.advance(
                exchanges, slacks.ravel(), IN_VAIN * temperatures, choosy=self._choosy
            )
            batches += 1
            tried += size
            self.tried += size * walks.count
            if hard:
                self._note(walks)
            self.over = self.tried >= self._budget or self._enough(self.best_cost)
            if batches % PER_SIZE == 0:
                size, moved = _resized(size, moved / (PER_SIZE * walks.count), walks.count), 0
        return tried, size

    def _note(self, walks: Walks) -> None:
        """Keep the best of all, if it is among the best of these walks."""
        walk = int(walks.best_costs.argmin())
        if walks.best_costs[walk] < self.best_cost:
            self.best_cost, self.best = float(walks.best_costs[walk]), walks.best_grids()[walk]


def _resized(size: int, moving: float, walks: int) -> int:
    if moving > MANY_MOVE:
        return max(SMALLEST, size // 2)
    if moving < FEW_MOVE and 2 * size * walks <= LARGEST_BATCH:
        return size * 2
    return size


def _shuffled(grids: Ints, rng: np.random.Generator) -> Ints:
    """Return grids (K, R, W) with their peers anywhere; who is nobody stays where it is."""
    made = grids.copy()
    for grid in made:
        held = grid != EMPTY
        grid[held] = rng.permutation(grid[held])
    return made


def _check(starts: Sequence[Ints], stages: int, peers: int) -> None:
    if not starts:
        raise ValueError("a search needs a start")
    for start in starts:
        if start.shape != starts[0].shape or not 1 <= stages <= len(start):
            raise ValueError(f"{stages} stages in a grid of {start.shape}, not {starts[0].shape}")
        if not np.array_equal(np.sort(start[start != EMPTY]), np.arange(peers)):
            raise ValueError(f"a start does not hold each of {peers} peers once")
