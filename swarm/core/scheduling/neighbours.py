"""Which exchanges the search tries: mostly those that bring peers together that are near.

In good assignments near peers lie in runs down the columns, so runs are exchanged as well as single
peers; and a run is chosen because its first peer is near the one that it would come to lie next to.

The rule: what is drawn depends on the grid and the generator, never on costs.
"""

import numpy as np

from swarm.core.scheduling.grid import EMPTY, Exchanges, Floats, Ints

NEAR_PEERS = 12
ANYWHERE = 0.15
"""Share of single exchanges and runs that look for no near peer."""
SINGLES, RUNS, SIDEWAYS = 0.45, 0.25, 0.25
"""Shares of the kinds; what remains are reversals of stages."""


class Neighbours:
    """Draws candidates for grids of one shape (rows, columns) and number of stages."""

    def __init__(self, shape: tuple[int, int], stages: int, distances: Floats) -> None:
        self._rows, self._width = shape
        self._stages = stages
        apart = distances.copy()
        np.fill_diagonal(apart, np.inf)
        near = max(1, min(NEAR_PEERS, len(apart) - 1))
        self._near = np.argsort(apart, axis=1, kind="stable")[:, :near]

    def draw(self, contents: Ints, count: int, rng: np.random.Generator) -> Exchanges:
        """Return `count` candidates, all of one kind and length; `contents` (N,) is row by row."""
        kind, share = rng.random(2)
        chances = rng.random((5, count))
        longest = max(1, self._stages // 2)
        if kind < SINGLES or self._stages == 1:
            return self._runs(contents, 1, chances)
        if kind < SINGLES + RUNS:
            return self._runs(contents, 1 + int(share * longest), chances)
        if kind < SINGLES + RUNS + SIDEWAYS:
            long = chances[3, 0] < 0.6
            return self._sideways(1 + int(share * (self._stages - 1)) if long else 1, chances)
        return self._reversals(1 + int(share * longest), chances)

    def _runs(self, contents: Ints, length: int, chances: Floats) -> Exchanges:
        """Exchange two vertical runs; what would overlap or leave the grid changes nothing."""
        places = contents.size
        ones, down = self._ends(chances[:2])
        near = self._near_places(contents, ones - down, chances[2])
        others = np.where(chances[3] < ANYWHERE, (chances[4] * places).astype(np.intp), near)
        offsets = np.arange(length)[:, None]
        either = np.where(chances[4] * 1024 % 1 < 0.5, self._width, -self._width)
        first, second = ones + offsets * down, others + offsets * either
        if length > 1:
            low, high = np.minimum(first[0], first[-1]), np.maximum(first[0], first[-1])
            lowest, highest = np.minimum(second[0], second[-1]), np.maximum(second[0], second[-1])
            outside = (np.minimum(low, lowest) < 0) | (np.maximum(high, highest) >= places)
            overlap = ((ones - others) % self._width == 0) & (low <= highest) & (lowest <= high)
            first = np.where(outside | overlap, 0, first)
            second = np.where(outside | overlap, 0, second)
        return Exchanges(first, second, np.concatenate((first, second)) // self._width)

    def _ends(self, chances: Floats) -> tuple[Ints, Ints]:
        """Return places (B,) and the steps (B,) that lead to them from the place above or below."""
        ones = (chances[0] * (self._rows * self._width)).astype(np.intp)
        if self._rows == 1:
            return ones, np.zeros_like(ones)
        step = np.where(chances[1] < 0.5, self._width, -self._width)
        before = ones - step
        outside = (before < 0) | (before >= self._rows * self._width)
        return ones, np.where(outside, -step, step)

    def _near_places(self, contents: Ints, places: Ints, chance: Floats) -> Ints:
        """Return where peers are that are near to those at `places` (B,); near nobody is nobody."""
        held = contents != EMPTY
        place_of = np.zeros(len(self._near), np.intp)
        place_of[contents[held]] = np.flatnonzero(held)
        peers = contents[places]
        near = self._near[peers, (chance * self._near.shape[1]).astype(np.intp)]
        return np.where(peers == EMPTY, places, place_of[near])

    def _sideways(self, length: int, chances: Floats) -> Exchanges:
        """Exchange runs of two columns in the same rows: groups stay as they are."""
        top = (chances[0] * (self._stages - length + 1)).astype(np.intp)
        one = (chances[1] * self._width).astype(np.intp)
        other = (one + 1 + (chances[2] * (self._width - 1)).astype(np.intp)) % self._width
        starts = (top + np.arange(length)[:, None]) * self._width
        return Exchanges(starts + one, starts + other, np.zeros((0, one.size), np.intp))

    def _reversals(self, half: int, chances: Floats) -> Exchanges:
        """Reverse consecutive stages: `half` at either end, and one or none between them."""
        between = (chances[1] < 0.5) & (2 * half < self._stages)
        length = 2 * half + between
        top = (chances[0] * (self._stages - length + 1)).astype(np.intp)
        offsets = np.arange(half)[:, None]
        ones, others = top + offsets, top + length - 1 - offsets
        rows = np.concatenate((ones, others))
        return Exchanges(self._places_of(ones), self._places_of(others), rows)

    def _places_of(self, rows: Ints) -> Ints:
        """Return (T * W, B): all places of rows (T, B)."""
        places = rows[:, None] * self._width + np.arange(self._width)[:, None]
        return places.reshape(-1, rows.shape[1])
