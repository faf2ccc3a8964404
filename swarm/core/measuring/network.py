"""Every link of the swarm, from the few that were measured.

What was measured stays as it is; a lower bound only raises what follows from the others. Latencies
of the other pairs come from network coordinates, bandwidths from the capacities of both ends and of
the way between them; both are then corrected by how far the model is off for pairs whose ends are
near to theirs. The rule: the same estimates give the same network, and every entry says how far it
is to be trusted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from protocol.records import GUESS_SPREAD, Estimates, LinkEstimate
from protocol.signing import PeerId
from swarm.core.measuring.capacities import capacities
from swarm.core.measuring.coordinates import Coordinates, coordinates

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

DEFAULT_BANDWIDTH = 125e6
"""Bytes per second, where nothing at all has been measured: a common network card's."""
DEFAULT_LATENCY_SECONDS = 1e-3
LEAST_BANDWIDTH, MOST_BANDWIDTH = 1.0, 1e15
LEAST_SECONDS, MOST_SECONDS = 1e-6, 1e9
NEIGHBOURS = 4
"""The nearest so many peers say what is near."""
NEIGHBOURHOOD = 40
"""Farther ones than the nearest so many say nothing."""
MOST_ODD = 0.5
"""One pair corrects another by at most a factor of e to this."""
DOUBT = 0.3
"""So much does the model count beside one measured pair with the same ends."""
FEWEST_ALIKE = 3
"""So many pairs within places are needed to say something of others."""
MEDIAN_OF_NORMAL = 0.6745
"""Median of the absolute value of a normal variable of standard deviation 1."""


@dataclass(frozen=True)
class Network:
    """What every peer gets from every other, in the order of the peers; row: sender."""

    bandwidth: Floats
    """Bytes per second that one transfer alone gets, (n, n); the diagonal does not matter."""
    latency: Floats
    """One-way seconds, (n, n); 0 on the diagonal."""
    uplink: Floats
    """Bytes per second to all others together, (n,): at least what one of them gets."""
    downlink: Floats
    """Bytes per second from all others together, (n,)."""
    spread: Floats
    """Relative standard error of bandwidth, (n, n): 1 where it is a guess, 0 on the diagonal."""


def completed(
    peers: Sequence[PeerId],
    estimates: Mapping[PeerId, Estimates],
    places: Mapping[PeerId, str] | None = None,
) -> Network:
    """Return the network of `peers` from what some of them have measured.

    `places` (host or region labels) may say who is at the same place; "" says nothing. A latency
    that only one of two peers has measured holds both ways."""
    told = _Told(peers, estimates)
    where = _fitted_coordinates(peers, told.seconds)
    near = _nearness(where, _labels(peers, places))
    latency = _latency(told, where, near)
    bandwidth, spread = _bandwidth(told, latency, near, _same_place(peers, places))
    off = ~np.eye(len(peers), dtype=bool)
    single = np.where(off, bandwidth, 0.0)
    default = np.where(len(peers) > 1, 0.0, DEFAULT_BANDWIDTH)
    return Network(
        bandwidth=bandwidth,
        latency=latency,
        uplink=np.maximum(np.maximum(told.uplink, default), single.max(1, initial=0.0)),
        downlink=np.maximum(np.maximum(told.downlink, default), single.max(0, initial=0.0)),
        spread=np.where(off, spread, 0.0),
    )


class _Told:
    """What peers have told of each other, as matrices with 0 where nothing is known."""

    def __init__(self, peers: Sequence[PeerId], estimates: Mapping[PeerId, Estimates]) -> None:
        n = len(peers)
        index = {peer: i for i, peer in enumerate(peers)}
        self.bandwidth, self.spread = np.zeros((n, n)), np.ones((n, n))
        self.least_bandwidth = np.zeros((n, n))
        """Where transfers that shared their ways say nothing else."""
        self.uplink, self.downlink = np.zeros(n), np.zeros(n)
        seconds = np.zeros((n, n))
        for i, peer in enumerate(peers):
            own = estimates.get(peer)
            if own is None:
                continue
            self.uplink[i], self.downlink[i] = own.uplink, own.downlink
            for link in own.links:
                j = index.get(link.peer, i)
                if j != i:
                    seconds[i, j] = _bounded(link.latency_seconds, LEAST_SECONDS, MOST_SECONDS)
                    self._take(i, j, link)
        self.seconds = np.where(seconds > 0, seconds, seconds.T)

    def _take(self, i: int, j: int, link: LinkEstimate) -> None:
        bandwidth = _bounded(link.bandwidth, LEAST_BANDWIDTH, MOST_BANDWIDTH)
        if link.spread >= GUESS_SPREAD:
            self.least_bandwidth[i, j] = bandwidth
        elif bandwidth > 0:
            self.bandwidth[i, j], self.spread[i, j] = bandwidth, link.spread


def _bounded(value: float, least: float, most: float) -> float:
    """Return a value within bounds; 0, not measured, stays 0."""
    return min(max(value, least), most) if value > 0 else 0.0


# --- latency -------------------------------------------------------------------------------------


def _fitted_coordinates(peers: Sequence[PeerId], seconds: Floats) -> Coordinates:
    both = np.where(seconds.T > 0, np.sqrt(seconds * seconds.T), seconds)
    one, other = np.nonzero(np.triu(both, 1))
    return coordinates(peers, one, other, both[one, other])


def _latency(told: _Told, where: Coordinates, near: csr_array) -> Floats:
    """Return seconds between all peers, (n, n)."""
    is_known = told.seconds > 0
    if not is_known.any():
        made = np.full_like(told.seconds, DEFAULT_LATENCY_SECONDS)
    else:
        model = np.log(np.maximum(where.latency, LEAST_SECONDS))
        wanted = np.log(np.where(is_known, told.seconds, 1.0))
        correction, _ = _smoothed(np.where(is_known, wanted - model, 0.0), is_known, near)
        made = np.where(is_known, told.seconds, np.exp(model + correction))
        made = np.clip(made, LEAST_SECONDS, MOST_SECONDS)
    np.fill_diagonal(made, 0.0)
    return made


# --- bandwidth -----------------------------------------------------------------------------------


def _bandwidth(told: _Told, latency: Floats, near: csr_array, same: Mask) -> tuple[Floats, Floats]:
    """Return bytes per second between all peers and their spread, (n, n) each."""
    is_known = told.bandwidth > 0
    if not is_known.any():
        return np.maximum(DEFAULT_BANDWIDTH, told.least_bandwidth), told.spread
    sender, receiver = np.nonzero(is_known)
    rate = np.log(told.bandwidth[sender, receiver])
    seconds = np.maximum(latency, LEAST_SECONDS)
    found = capacities(len(latency), sender, receiver, rate, seconds[sender, receiver])
    model = found.between(seconds)
    odd = np.zeros_like(model)
    odd[sender, receiver] = rate - model[sender, receiver]
    for kind in (same, ~same):  # what is at one place may be joined by another kind of link
        if (kind & is_known).sum() >= FEWEST_ALIKE:
            off = np.where(kind, np.median(odd[kind & is_known]), 0.0)
            model, odd = model + off, np.where(is_known, odd - off, 0.0)
    correction, spread = _corrected(np.clip(odd, -MOST_ODD, MOST_ODD), is_known, near)
    made = np.clip(np.exp(model + correction), LEAST_BANDWIDTH, MOST_BANDWIDTH)
    made = np.maximum(made, told.least_bandwidth)
    return np.where(is_known, told.bandwidth, made), np.where(is_known, told.spread, spread)


def _corrected(odd: Floats, is_known: Mask, near: csr_array) -> tuple[Floats, Floats]:
    """Return by how much the model is to be corrected, and what spread is left, (n, n) each."""
    odd = np.where(is_known, odd, odd.T)
    correction, weight = _smoothed(odd, is_known | is_known.T, near)
    rest = np.abs(odd - correction)[is_known]
    scale = float(np.median(rest)) / MEDIAN_OF_NORMAL
    return correction, np.minimum(np.sqrt(scale**2 + 1.0 / (1.0 + weight) ** 2), 1.0)


# --- neighbours ----------------------------------------------------------------------------------


def _nearness(where: Coordinates, labels: Sequence[str]) -> csr_array:
    """Return how much one peer says of another, (n, n) in [0, 1]: 1 on the diagonal and at the same
    place, 0 for all but the nearest."""
    apart = where.distances
    n = len(apart)
    if n == 0:
        return csr_array(apart)
    reach = np.partition(apart, min(NEIGHBOURS, n - 1), axis=1)[:, min(NEIGHBOURS, n - 1)]
    made = np.exp(-((apart / (reach[:, None] + 1e-12)) ** 2) / 2)
    made[_equal(labels)] = 1.0
    if n > NEIGHBOURHOOD:
        made[made < np.partition(made, n - NEIGHBOURHOOD, axis=1)[:, n - NEIGHBOURHOOD, None]] = 0.0
    return csr_array(made)


def _smoothed(values: Floats, is_known: Mask, near: csr_array) -> tuple[Floats, Floats]:
    """Return the mean of the known values of pairs with near ends, drawn towards 0 where there are
    few, and how many there are, (n, n) each."""
    row, column = np.nonzero(is_known)
    total, weight = (
        (near @ csr_array((each, (row, column)), shape=near.shape) @ near.T).toarray()
        for each in (values[row, column], np.ones(len(row)))
    )
    return total / (weight + DOUBT), weight


def _labels(peers: Sequence[PeerId], places: Mapping[PeerId, str] | None) -> list[str]:
    """Return the place of every peer; peers of which none is known are each at their own."""
    return [(places or {}).get(peer) or f"\0{peer}" for peer in peers]


def _same_place(peers: Sequence[PeerId], places: Mapping[PeerId, str] | None) -> Mask:
    return _equal(_labels(peers, places)) & ~np.eye(len(peers), dtype=bool)


def _equal(labels: Sequence[str]) -> Mask:
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    own = np.array([numbers[label] for label in labels], dtype=np.int64)
    made: Mask = own[:, None] == own[None, :]
    return made
