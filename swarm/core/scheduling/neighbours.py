"""Which exchanges the search tries: mostly those that bring peers together that are near.

In good assignments near peers lie in runs down the columns, so runs are exchanged as well as single
peers; and a run is chosen because its first peer is near the one that it would come to lie next to.

The rule: what is drawn depends on the grids and the generator, never on costs.

Shapes: as in grid.py; a place is column * R + row, so one step down a column is 1.
"""

import numpy as np

from swarm.core.scheduling.grid import EMPTY, Bools, Exchanges, Floats, Ints, Walks

NEAR_PEERS = 8
NEARER = 2
"""The power by which the nearest of them are preferred."""
ANYWHERE = 0.05
"""Share of single exchanges and runs that look for no near peer."""
SINGLES, RUNS, SIDEWAYS = 0.45, 0.25, 0.25
"""Shares of the kinds; what remains are reversals of stages."""
LONG = 0.6
"""Share of sideways exchanges of more than one row."""


class Neighbours:
    """Draws candidates for grids of one shape (rows, columns) and number of stages."""

    def __init__(self, shape: tuple[int, int], stages: int, distances: Floats) -> None:
        self._rows, self._width = shape
        self._stages = stages
        apart = distances.copy()
        np.fill_diagonal(apart, np.inf)
        near = max(1, min(NEAR_PEERS, len(apart) - 1))
        self._near = np.argsort(apart, axis=1, kind="stable")[:, :near].astype(np.intp)

    def draw(self, walks: Walks, count: int, rng: np.random.Generator) -> Exchanges:
        """Return `count` candidates of each walk, all of one kind and length."""
        kind, share, long = rng.random(3)
        chances = rng.random((5, walks.count * count))
        longest = max(1, self._stages // 2)
        if kind < SINGLES or self._stages == 1:
            return self._singles(walks, chances)
        if kind < SINGLES + RUNS:
            return self._runs(walks, 1 + int(share * longest), chances)
        if kind < SINGLES + RUNS + SIDEWAYS:
            return self._sideways(
                1 + int(share * (self._stages - 1)) if long < LONG else 1, chances
            )
        return self._reversals(1 + int(share * longest), chances)

    def _singles(self, walks: Walks, chances: Floats) -> Exchanges:
        """Exchange one peer with one that is near to who is above or below its place."""
        one, down = self._ends(chances)
        ones, others = one[None], self._near_places(walks, one - down, chances)[None]
        return Exchanges(ones, others, np.concatenate((ones, others)) % self._rows)

    def _runs(self, walks: Walks, length: int, chances: Floats) -> Exchanges:
        """Exchange two vertical runs; what would overlap or leave the grid changes nothing."""
        one, down = self._ends(chances)
        other = self._near_places(walks, one - down, chances)
        either = np.where(chances[4] * 1024 % 1 < 0.5, 1, -1)
        steps = length - 1
        bad = self._leave(one, steps * down) | self._leave(other, steps * either)
        low, high = np.minimum(one, one + steps * down), np.maximum(one, one + steps * down)
        last = other + steps * either
        bad |= (low <= np.maximum(other, last)) & (np.minimum(other, last) <= high)
        offsets = np.arange(length)[:, None]
        ones = np.where(bad, 0, one + offsets * down)
        others = np.where(bad, 0, other + offsets * either)
        return Exchanges(ones, others, np.concatenate((ones, others)) % self._rows)

    def _sideways(self, length: int, chances: Floats) -> Exchanges:
        """Exchange runs of two columns in the same rows: groups stay as they are."""
        top = (chances[0] * (self._stages - length + 1)).astype(np.intp)
        one = (chances[1] * self._width).astype(np.intp)
        other = (one + 1 + (chances[2] * (self._width - 1)).astype(np.intp)) % self._width
        starts = top + np.arange(length)[:, None]
        rows = np.zeros((0, one.size), np.intp)
        return Exchanges(starts + one * self._rows, starts + other * self._rows, rows)

    def _reversals(self, half: int, chances: Floats) -> Exchanges:
        """Reverse consecutive stages: `half` at either end, and one or none between them."""
        between = (chances[1] < 0.5) & (2 * half < self._stages)
        length = 2 * half + between
        top = (chances[0] * (self._stages - length + 1)).astype(np.intp)
        offsets = np.arange(half)[:, None]
        ones, others = top + offsets, top + length - 1 - offsets
        rows = np.concatenate((ones, others))
        return Exchanges(self._places_of(ones), self._places_of(others), rows)

    # --- places ----------------------------------------------------------------------------------

    def _ends(self, chances: Floats) -> tuple[Ints, Ints]:
        """Return places (B,) and the steps (B,) that lead to them from the place above or below."""
        ones = (chances[0] * (self._rows * self._width)).astype(np.intp)
        if self._rows == 1:
            return ones, np.zeros_like(ones)
        step = np.where(chances[1] < 0.5, 1, -1)
        before = ones % self._rows - step
        return ones, np.where((before < 0) | (before >= self._rows), -step, step)

    def _near_places(self, walks: Walks, places: Ints, chances: Floats) -> Ints:
        """Return where peers are that are near to those at `places` (B,), or, for a few, any place;
        near nobody is nobody."""
        each = np.arange(places.size) // (places.size // walks.count)
        peers = walks.contents.take(places * walks.count + each)
        nearest = (chances[2] ** NEARER * self._near.shape[1]).astype(np.intp)
        near = self._near.take(peers * self._near.shape[1] + nearest, mode="wrap")
        found = np.where(peers == EMPTY, places, walks.places.take(near * walks.count + each))
        anywhere = np.flatnonzero(chances[3] < ANYWHERE)
        found[anywhere] = (chances[4, anywhere] * (self._rows * self._width)).astype(np.intp)
        return found

    def _leave(self, places: Ints, steps: Ints) -> Bools:
        """Return whether so many steps down their columns lead out of the grid."""
        last = places % self._rows + steps
        return (last < 0) | (last >= self._rows)

    def _places_of(self, rows: Ints) -> Ints:
        """Return (T * W, B): all places of rows (T, B)."""
        places = rows[:, None] + np.arange(self._width)[:, None] * self._rows
        return places.reshape(-1, rows.shape[1])
