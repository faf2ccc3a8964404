"""What limits a transfer: the sender's uplink, the receiver's downlink, or the way between them.

The least of the three is what one transfer gets. All three are fitted to what was measured by the
sum of the absolute differences of logarithms, so that a few odd links change nothing. The rule: of
limits that explain the measurements equally well the largest is taken, because a limit that nobody
has met is not known.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

ROUNDS = 5
TOLERANCE = 0.05
"""So much worse, relative, a larger limit may explain a measurement."""
STEPS = 12
"""Of the latency, at which the way's limit is fitted; between them it is interpolated."""
CANDIDATES = 33
"""Among so many quantiles of all measurements the way's limit is sought."""
MOST_LINKS = 32
"""Of one peer that are looked at for its own limit."""
NARROWEST = 0.2
"""Of the window around such a step, in natural logarithms of seconds."""


@dataclass(frozen=True)
class Capacities:
    """Natural logarithms of bytes per second; infinite where no limit is known."""

    uplink: Floats
    """(n,)"""
    downlink: Floats
    """(n,)"""
    steps: Floats
    """Natural logarithms of latencies, ascending."""
    way: Floats
    """The way's limit at those."""

    def between(self, latency: Floats) -> Floats:
        """Return the logarithm of what one transfer gets between any two, given the latencies
        (n, n) in seconds; the diagonal does not matter."""
        made = np.minimum(self.uplink[:, None], self.downlink[None, :])
        return np.minimum(made, np.interp(np.log(latency), self.steps, self.way))


def capacities(
    count: int, sender: Integers, receiver: Integers, rate: Floats, latency: Floats
) -> Capacities:
    """Return the limits of `count` peers that explain `rate[k]`, natural logarithm of bytes per
    second from `sender[k]` to `receiver[k]`, `latency[k]` seconds apart; at least one."""
    at = np.log(latency)
    steps = np.linspace(at.min(), at.max() + 1e-9, STEPS)
    width = max(NARROWEST, float(steps[-1] - steps[0]) / STEPS)
    nearness = np.exp(-(((steps[:, None] - at[None, :]) / width) ** 2) / 2)
    candidates = np.quantile(rate, np.linspace(0.0, 1.0, CANDIDATES))
    by_sender, by_receiver = _grouped(sender, rate, count), _grouped(receiver, rate, count)
    uplink, downlink = np.full(count, np.inf), np.full(count, np.inf)
    way = np.full(STEPS, np.inf)
    for _ in range(ROUNDS):
        way = _best(candidates, nearness, np.minimum(uplink[sender], downlink[receiver]), rate)
        between = np.interp(at, steps, way)
        uplink = _own(by_sender, rate, np.minimum(downlink[receiver], between))
        downlink = _own(by_receiver, rate, np.minimum(uplink[sender], between))
    return Capacities(uplink, downlink, steps, way)


def _best(candidates: Floats, nearness: Floats, others: Floats, rate: Floats) -> Floats:
    """Return for every step the candidate that explains the rates near it best."""
    error = np.abs(np.minimum(candidates[:, None], others[None, :]) - rate[None, :])
    total = np.einsum("sk,ck->sc", nearness, error)  # no BLAS: the same bits on every machine
    is_good = total <= total.min(1, keepdims=True) + 1e-9
    made: Floats = np.where(is_good, candidates[None, :], -np.inf).max(1)
    return made


def _grouped(index: Integers, rate: Floats, count: int) -> Integers:
    """Return for every peer the positions at which it is in `index`, filled up with -1: of many
    some, evenly spread over its rates."""
    sizes = np.bincount(index, minlength=count)
    order = np.lexsort((rate, index))
    rank = np.arange(len(index)) - (np.cumsum(sizes) - sizes)[index[order]]
    size = sizes[index[order]]
    slot = np.where(size > MOST_LINKS, rank * MOST_LINKS // size, rank)
    made = np.full((count, min(int(sizes.max()), MOST_LINKS)), -1, dtype=np.int64)
    made[index[order], slot] = order
    return made


def _own(groups: Integers, rate: Floats, others: Floats) -> Floats:
    """Return for every peer the largest of its rates that explains them, about as well as any does;
    `others` is what else limits each. Infinite for who has none."""
    exists = groups >= 0
    rates = np.where(exists, rate[groups], 0.0)
    error = np.abs(np.minimum(rates[:, :, None], others[groups][:, None, :]) - rates[:, None, :])
    total = np.where(exists, (error * exists[:, None, :]).sum(2), np.inf)
    allowed = total.min(1, keepdims=True) + TOLERANCE * exists.sum(1, keepdims=True)
    best = np.where(exists & (total <= allowed), rates, -np.inf).max(1)
    return np.where(np.isfinite(best), best, np.inf)
