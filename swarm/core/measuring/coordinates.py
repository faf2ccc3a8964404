"""Network coordinates: where peers would have to be so that distances are latencies.

Each peer has a point in a small space and a height (its access link); the latency of two is the
distance of their points plus both heights, as in Vivaldi (Dabek, Cox, Kaashoek, Morris, "Vivaldi: a
decentralized network coordinate system", SIGCOMM 2004). Here one peer knows all measurements, so
all points are fitted together: by gradient descent on the squared difference of logarithms, bounded
so that a single lie does not move everybody. The rule: the same measurements give the same points.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.signing import PeerId

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

DIMENSIONS = 4
ROUNDS = 240
FIRST_STEP = 0.12
"""Of a coordinate, in units of the median latency; it shrinks to nothing over the rounds."""
MOST_PULL = 1.0
"""Of one measurement: a factor of e."""


@dataclass(frozen=True)
class Coordinates:
    """Where peers are."""

    points: Floats
    """(n, DIMENSIONS), in seconds."""
    heights: Floats
    """(n,), in seconds."""

    @property
    def distances(self) -> Floats:
        """Return the distances between points, without heights, in seconds (n, n)."""
        squares = np.zeros((len(self.points), len(self.points)))
        for axis in range(DIMENSIONS):
            squares += np.subtract.outer(self.points[:, axis], self.points[:, axis]) ** 2
        return np.sqrt(squares)

    @property
    def latency(self) -> Floats:
        """Return the latency between any two peers, in seconds (n, n); the diagonal is 0."""
        made = self.distances + self.heights[:, None] + self.heights[None, :]
        np.fill_diagonal(made, 0.0)
        return made


def coordinates(
    peers: Sequence[PeerId], one: Integers, other: Integers, seconds: Floats
) -> Coordinates:
    """Return coordinates by which peers `one[k]` and `other[k]` are `seconds[k]` apart, as nearly
    as they can be. A peer of which nothing is known is in the middle of the others."""
    n = len(peers)
    if not len(seconds):
        return Coordinates(np.zeros((n, DIMENSIONS)), np.zeros(n))
    unit = float(np.median(seconds))
    wanted = np.log(seconds / unit)
    points = 0.5 * _scattered(peers)
    lowest = max(0.25 * math.exp(float(np.quantile(wanted, 0.05))), 1e-3)
    heights = np.full(n, math.log(lowest))
    fitted = np.concatenate([points, heights[:, None]], axis=1)
    _descend(fitted, one, other, wanted)
    known = np.bincount(np.concatenate([one, other]), minlength=n) > 0
    fitted[~known] = np.median(fitted[known], axis=0)
    return Coordinates(fitted[:, :-1] * unit, np.exp(fitted[:, -1]) * unit)


def _scattered(peers: Sequence[PeerId]) -> Floats:
    """Return a point for every peer in a cube around 0, from its id alone."""
    raw = b"".join(hashlib.sha256(peer.encode()).digest() for peer in peers)
    numbers = np.frombuffer(raw, dtype="<u8").reshape(len(peers), -1)[:, :DIMENSIONS]
    return numbers.astype(np.float64) / 2.0**64 - 0.5


def _descend(fitted: Floats, one: Integers, other: Integers, wanted: Floats) -> None:
    """Move points and log heights, the columns of `fitted`, downhill, in the steps of
    Kingma and Ba, "Adam: a method for stochastic optimization" (2015)."""
    mean, square = np.zeros_like(fitted), np.zeros_like(fitted)
    for number in range(1, ROUNDS + 1):
        slope = _slope(fitted, one, other, wanted)
        mean += 0.1 * (slope - mean)
        square += 0.01 * (slope**2 - square)
        step = FIRST_STEP * 0.5 * (1 + math.cos(math.pi * number / ROUNDS))
        size = np.sqrt(square / (1 - 0.99**number)) + 1e-8
        fitted -= step * (mean / (1 - 0.9**number)) / size


def _slope(fitted: Floats, one: Integers, other: Integers, wanted: Floats) -> Floats:
    """Return the derivative of the squared differences of logarithms."""
    n = len(fitted)
    apart = fitted[one, :-1] - fitted[other, :-1]
    distance = np.sqrt((apart**2).sum(1) + 1e-6)
    heights = np.exp(fitted[:, -1])
    latency = distance + heights[one] + heights[other]
    pull = np.clip(np.log(latency) - wanted, -MOST_PULL, MOST_PULL) / latency
    sideways = apart * (pull / distance)[:, None]
    slope = np.empty_like(fitted)
    for axis in range(DIMENSIONS):
        moved = sideways[:, axis]
        slope[:, axis] = np.bincount(one, moved, n) - np.bincount(other, moved, n)
    slope[:, -1] = (np.bincount(one, pull, n) + np.bincount(other, pull, n)) * heights
    return slope
