"""Where a search for an assignment begins: near peers side by side, in blocks of every shape.

Peers are put in the order of the leaves of a hierarchical clustering, so that near peers follow
each other; the order is cut into blocks of r stages by c replicas. Blocks of one row make groups of
near peers, blocks of one column make chains of them, and others some of both.

The rule: exact where that is cheap. Which replica sends to which is a bottleneck matching, the
order of the stages a shortest path.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching
from scipy.spatial.distance import squareform

from swarm.core.scheduling.grid import EMPTY, Floats, Ints

LINKAGES = ("average", "complete", "single")
MOST_ORDERED_STAGES = 12
"""A shortest path through all of S stages takes 2^S * S^2 operations."""


def block_starts(distances: Floats, sizes: Sequence[int]) -> list[Ints]:
    """Return different grids whose row r holds sizes[r] peers, in its first columns.

    `distances` (n, n) are at least 0 and may be infinite; both directions count alike. Raises
    ValueError if the sizes do not add up to n.
    """
    if sum(sizes) != len(distances):
        raise ValueError(f"rows of {sum(sizes)} places for {len(distances)} peers")
    filled = np.arange(max(sizes)) < np.array(sizes)[:, None]
    grids: dict[bytes, Ints] = {}
    for leaves in _leaf_orders(distances):
        for places in _block_orders(len(sizes), max(sizes)):
            grid = np.full(filled.size, EMPTY, np.intp)
            grid[places[filled.ravel()[places]]] = leaves
            grids.setdefault(grid.tobytes(), grid.reshape(filled.shape))
    return list(grids.values())


def arranged(grid: Ints, seconds: Floats) -> Ints:
    """Return the same groups, full ones, ordered and matched for the least sum of worst links.

    The matching between any two groups minimises its worst link of `seconds` (n, n); the order of
    the groups is a shortest path through all of them, or the given one if there are too many.
    """
    stages = len(grid)
    matchings = {
        (one, other): bottleneck_matching(seconds[np.ix_(grid[one], grid[other])])
        for one in range(stages)
        for other in range(stages)
        if one != other and (stages <= MOST_ORDERED_STAGES or other == one + 1)
    }
    order = list(range(stages))
    if stages <= MOST_ORDERED_STAGES:
        worst = np.zeros((stages, stages))
        for (one, other), (cost, _) in matchings.items():
            worst[one, other] = cost
        order = shortest_path(worst)
    rows = [grid[order[0]]]
    column_of = np.arange(grid.shape[1])
    for one, other in pairwise(order):
        column_of = matchings[one, other][1][column_of]
        rows.append(grid[other][column_of])
    return np.stack(rows)


def bottleneck_matching(costs: Floats) -> tuple[float, Ints]:
    """Return the least possible worst cost of a perfect matching (W, W), and each row's column.

    Among the matchings of that worst cost, one of the least sum.
    """
    levels = np.unique(costs)
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        if (maximum_bipartite_matching(csr_array(costs <= levels[middle])) >= 0).all():
            high = middle
        else:
            low = middle + 1
    worst = float(levels[low])
    dear = (levels[np.isfinite(levels)].max(initial=0.0) + 1.0) * (len(costs) + 1)
    _, columns = linear_sum_assignment(np.where(costs <= worst, np.minimum(costs, dear), 2 * dear))
    return worst, np.asarray(columns, np.intp)


def shortest_path(costs: Floats) -> list[int]:
    """Return the order of all of S stages, from any to any, of the least sum of costs (S, S).

    Held and Karp's dynamic program over sets of stages, "A Dynamic Programming Approach to
    Sequencing Problems", 1962.
    """
    stages = len(costs)
    least = np.full((1 << stages, stages), np.inf)
    before = np.full((1 << stages, stages), -1)
    for stage in range(stages):
        least[1 << stage, stage] = 0.0
    for visited in range(1, 1 << stages):
        members = [stage for stage in range(stages) if visited >> stage & 1]
        reached = least[visited][:, None] + costs
        for stage in range(stages):
            if not visited >> stage & 1:
                last = members[int(reached[members, stage].argmin())]
                if reached[last, stage] <= least[visited | 1 << stage, stage]:
                    least[visited | 1 << stage, stage] = reached[last, stage]
                    before[visited | 1 << stage, stage] = last
    visited, stage = (1 << stages) - 1, int(least[-1].argmin())
    path = [stage]
    while (last := int(before[visited, stage])) >= 0:
        visited ^= 1 << stage
        stage = last
        path.append(stage)
    return path[::-1]


def _leaf_orders(distances: Floats) -> Iterator[Ints]:
    """Yield peers so that near ones follow each other, once for each kind of linkage."""
    if len(distances) < 2:
        yield np.arange(len(distances))
        return
    both = (distances + distances.T) / 2
    finite = both[np.isfinite(both)].max(initial=0.0)
    both = np.where(np.isfinite(both), both, 2 * finite + 1)
    np.fill_diagonal(both, 0.0)
    for kind in LINKAGES:
        yield leaves_list(linkage(squareform(both, checks=False), kind)).astype(np.intp)


def _block_orders(rows: int, width: int) -> Iterator[Ints]:
    """Yield all places (rows * width,) block by block, for every shape of blocks."""
    row, column = np.divmod(np.arange(rows * width), width)
    for high in _parts(rows):
        for wide in _parts(width):
            yield np.lexsort((column, row, column // wide, row // high))
            yield np.lexsort((column, row, row // high, column // wide))


def _parts(length: int) -> list[int]:
    """Return the lengths of parts that cut a length into 1, 2, ... parts."""
    return sorted({-(-length // count) for count in range(1, length + 1)})
