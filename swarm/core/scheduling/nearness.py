"""Which peers are near each other: places, an order in which near ones follow, bundles of them.

The rule: nearness is the time of a usual transfer there and back, from the links alone; labels of
places only stand in for it in small swarms.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, leaves_list, linkage
from scipy.spatial.distance import squareform

from swarm.core.scheduling.problem import Floats, Problem

Whole = NDArray[np.intp]

MANY_PEERS = 16
"""Of more, places are found by their links, and only some starts are looked at."""
MOST_PLACES = 8
FAR_SECONDS = 1e9
"""A way through which nothing gets."""


def distances_of(problem: Problem) -> Floats:
    """Return how far peers are from each other, (n, n): seconds of a usual transfer, both ways."""
    size = float(np.median(problem.cut_bytes[1:-1])) if len(problem.layers) > 1 else 1.0
    with np.errstate(divide="ignore"):
        ways = problem.latency + size / problem.bandwidth
    made: Floats = np.minimum(ways + ways.T, FAR_SECONDS)
    return made


@lru_cache(maxsize=4)
def near_order(problem: Problem) -> tuple[Whole, Whole]:
    """Return peers so that near ones follow each other, and the number of each one's place, (n,)
    both: the leaves of a hierarchical clustering, and its MOST_PLACES topmost clusters."""
    count = len(problem.peers)
    if count < 2:
        return np.arange(count), np.zeros(count, np.intp)
    tree = linkage(squareform(distances_of(problem), checks=False), "average")
    numbers = fcluster(tree, MOST_PLACES, "maxclust").astype(np.intp)
    return leaves_list(tree).astype(np.intp), numbers


@lru_cache(maxsize=4)
def places(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Return the peers of every place, neighbours near each other, largest speed first.

    In a small swarm by their labels, from the place with the most data holders on, always the place
    with the widest links to the one before; in a large one by their links.
    """
    if len(problem.peers) > MANY_PEERS:
        order, numbers = near_order(problem)
        names = list(dict.fromkeys(numbers[order].tolist()))
        return tuple(largest_first(problem, np.flatnonzero(numbers == k).tolist()) for k in names)
    labels = sorted({peer.place for peer in problem.peers})
    members = [[i for i, peer in enumerate(problem.peers) if peer.place == name] for name in labels]
    holders = [sum(problem.peers[i].has_data for i in place) for place in members]
    left = list(range(len(members)))
    here = max(left, key=lambda k: (holders[k], -k))
    made = []
    while True:
        left.remove(here)
        made.append(largest_first(problem, members[here]))
        if not left:
            return tuple(made)
        last = here
        here = max(left, key=lambda k: (_width(problem, members[last], members[k]), -k))


def largest_first(problem: Problem, peers: Sequence[int]) -> tuple[int, ...]:
    """Return peers by falling speed; ties by id."""
    return tuple(sorted(peers, key=lambda peer: (-problem.peers[peer].speed, peer)))


def bundled(
    problem: Problem, most: int, groups: Sequence[Sequence[int]] = ()
) -> list[tuple[int, ...]]:
    """Return units of near peers, of equal memory if possible, near ones following each other.

    About `most`: of each group, and of those in none, the last unit may be smaller. No unit has
    peers of two groups."""
    count = len(problem.peers)
    if count <= most:
        return [(peer,) for peer in range(count)]
    order, numbers = near_order(problem)
    rank = np.empty(count, np.intp)
    rank[order] = np.arange(count)
    group_of = np.full(count, len(groups))
    for number, group in enumerate(groups):
        group_of[list(group)] = number
    begins = {int(k): int(rank[numbers == k].min()) for k in np.unique(numbers)}
    place = np.array([begins[int(k)] for k in numbers])
    row = np.lexsort((rank, -problem.memory, place, group_of))
    size = -(-count // most)
    made: list[tuple[int, ...]] = []
    for number in range(len(groups) + 1):
        members = row[group_of[row] == number].tolist()
        made += [tuple(members[i : i + size]) for i in range(0, len(members), size)]
    return made


def _width(problem: Problem, a: Sequence[int], b: Sequence[int]) -> float:
    return float(problem.link[np.ix_(a, b)].mean() + problem.link[np.ix_(b, a)].mean())
