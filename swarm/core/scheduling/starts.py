"""Where the search begins: cuts by dynamic programming, peers dealt to stages by a rule.

The rule: no start is judged here, and none needs a linear program; ties go to the lower stage and
to the lower peer.

Largest first into the poorest stage is the rule of R. L. Graham ("Bounds on multiprocessing timing
anomalies", SIAM J. Appl. Math. 17, 1969), applied to covering: what is known about it then is in
rebalance.py.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import chain, pairwise

import numpy as np

from swarm.core.scheduling.cost import reduction_seconds, shard_shares
from swarm.core.scheduling.nearness import MANY_PEERS, largest_first, places
from swarm.core.scheduling.problem import Floats, Problem

Range = tuple[int, int]
Groups = tuple[tuple[int, ...], ...]
Start = tuple[tuple[Range, ...], Groups]

MOST_COUNTS = 8
"""So many numbers of stages are tried in a large swarm."""
TOO_LARGE = 1e12
"""Seconds of a stage that does not fit, in the dynamic program."""


def stage_counts(problem: Problem) -> range:
    """Return the numbers of stages that layers, peers and terms allow; none if empty."""
    terms = problem.terms
    most = min(len(problem.layers), len(problem.peers) // terms.min_replicas)
    most = min(most, terms.max_stages or most)
    wanted = len(terms.cuts) + 1 if terms.cuts else terms.stages
    if wanted:
        return range(wanted, min(most, wanted) + 1)
    return range(1, most + 1)


def stage_counts_to_try(problem: Problem) -> list[int]:
    """Return all numbers of stages of a small swarm; of a large one some, evenly by ratio."""
    counts = stage_counts(problem)
    if len(problem.peers) <= MANY_PEERS or len(counts) <= MOST_COUNTS:
        return list(counts)
    chosen = np.geomspace(counts[0], counts[-1], MOST_COUNTS).round().astype(int)
    return sorted(set(chosen.tolist()))


def starts(problem: Problem, stages: int) -> Iterator[Start]:
    """Yield places to begin at with so many stages: peers dealt out in several orders, or every
    stage in as few places as possible. Each is cut twice: for equal stages, then for the groups
    that came of it; of many peers, the second is all that is looked at.

    Groups may be too small for a stage's memory or the terms' replicas; who fits nowhere, or is
    one too many, is in none.
    """
    many = len(problem.peers) > MANY_PEERS
    even = best_cuts(problem, [float(problem.speed.sum()) / stages] * stages)
    orders = _orders(problem, stages)
    blocks = sorted({min(len(places(problem)), stages), stages} - {1})
    rules: list[Callable[[Sequence[Range]], Groups]] = [
        *(partial(deal, problem, order=order) for order in orders),
        *(partial(_deal_in_blocks, problem, blocks=count) for count in blocks or [1]),
    ]
    for rule in rules:
        ranges = even
        for _ in range(2):
            groups = _filled(problem, rule(ranges))
            if ranges != even or not many:
                yield ranges, groups
            speeds = [float(problem.speed[list(group)].sum()) for group in groups]
            again = best_cuts(problem, speeds, groups)
            if again == ranges:
                break
            ranges = again
        if many and ranges == even:
            yield ranges, groups


def _orders(problem: Problem, stages: int) -> list[Sequence[int]]:
    """Return in which orders peers are dealt to all stages: largest first; place by place, so that
    activations stay near; those of one place only; the fewest that can be, of all and of each
    place; and, for one stage, each peer alone. Of many peers two places and the fastest of all."""
    everybody: Sequence[int] = largest_first(problem, range(len(problem.peers)))
    many = len(everybody) > MANY_PEERS
    rows: list[Sequence[int]] = list(places(problem))
    whole = [everybody, list(chain(*rows))]
    alone = [row for row in rows if stages <= len(row) < len(everybody)]
    if many:
        alone.sort(key=lambda row: -float(problem.speed[list(row)].sum()))
        fastest = everybody[:stages]
        return [*whole, *alone[:2], fastest]
    whole += alone
    fewest = [order[:stages] for order in whole]
    if stages == 1:
        fewest += [[peer] for peer in everybody]
    return [*whole, *fewest]


# --- cuts ----------------------------------------------------------------------------------------


def best_cuts(
    problem: Problem, speeds: Sequence[float], groups: Groups | None = None
) -> tuple[Range, ...]:
    """Return the ranges of `len(speeds)` stages by dynamic programming, O(stages * layers^2).

    `speeds` are sums over each stage's replicas. First the slowest stage or boundary per microbatch
    is made as fast as possible; among such cuts those with the shortest way over all boundaries
    and reductions are taken. With groups, each stage fits into its smallest memory if that is
    possible, and boundaries and reductions count; without, half the sum of memory is taken as
    evenly spread and boundaries by the mean of all links.
    The manifest's cuts, if it has any, are the only ones.
    """
    count, layers = len(speeds), len(problem.layers)
    if problem.terms.cuts:
        edges = [0, *problem.terms.cuts, layers]
        return tuple(pairwise(edges))
    slowest = [_slowest(problem, stage, speeds, groups) for stage in range(count)]
    best, _ = _shortest(slowest, np.maximum)
    ways = [_ways(problem, stage, count, groups) for stage in range(count)]
    allowed = [
        np.where(seconds <= best * (1 + 1e-9), way, np.inf)
        for seconds, way in zip(slowest, ways, strict=True)
    ]
    return _shortest(allowed, np.add)[1]


def _shortest(terms: Sequence[Floats], combine: np.ufunc) -> tuple[float, tuple[Range, ...]]:
    """Return the least combination of `terms[stage][first, last]` over all ways to cut."""
    layers = len(terms[0]) - 1
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    choices = []
    for term in terms:
        combined = combine(best[:, None], term)
        choices.append(combined.argmin(axis=0))
        best = combined.min(axis=0)
    ranges = []
    end = layers
    for choice in reversed(choices):
        ranges.append((int(choice[end]), end))
        end = int(choice[end])
    return float(best[layers]), tuple(reversed(ranges))


def _slowest(
    problem: Problem, stage: int, speeds: Sequence[float], groups: Groups | None
) -> Floats:
    """Return seconds per microbatch of the stage as layers [first, last), (layers + 1)²; what does
    not fit into memory is slower than anything that does."""
    layers, stages = len(problem.layers), len(speeds)
    boundary = _boundary_seconds(problem, stage, stages, groups)
    forward, backward, parameters, activations = problem.prefix
    compute = _between(forward + backward)
    if groups:
        memory = min(problem.peers[peer].memory_bytes for peer in groups[stage])
    else:
        memory = sum(peer.memory_bytes for peer in problem.peers) // (2 * len(problem.peers))
    kept = activations * (stages - stage + 1)  # as in Problem.memory_bytes
    needed = _between(problem.terms.state_ratio * parameters + kept)
    over = needed / max(memory, 1) - 1
    made = np.maximum(compute / speeds[stage], boundary[:, None])
    made = np.where(over > 0, TOO_LARGE * (1 + over), made)
    first, last = np.ogrid[: layers + 1, : layers + 1]
    later = stages - 1 - stage
    possible = (first < last) & (first >= stage) & (last <= layers - later)
    possible &= (first == 0) if stage == 0 else (first > 0)
    possible &= (last == layers) if later == 0 else (last < layers)
    return np.where(possible, made, np.inf)


def _between(prefix: Floats) -> Floats:
    """Return prefix[last] - prefix[first] at [first, last]."""
    made: Floats = prefix[None, :] - prefix[:, None]
    return made


def _boundary_seconds(problem: Problem, stage: int, stages: int, groups: Groups | None) -> Floats:
    """Return seconds per microbatch of the boundary before a stage, by cut, (layers + 1,)."""
    if stage == 0:
        return np.zeros(len(problem.layers) + 1)
    narrow = np.minimum(problem.uplink, problem.downlink)
    if groups:
        before, after = list(groups[stage - 1]), list(groups[stage])
        links = problem.link[np.ix_(before, after)].sum()
        width = min(narrow[before].sum(), narrow[after].sum(), links)
    else:
        width = narrow.sum() / stages
    seconds: Floats = problem.cut_bytes / max(float(width), 1e-9)
    return seconds


def _ways(problem: Problem, stage: int, stages: int, groups: Groups | None) -> Floats:
    """Return seconds of the way to a stage and, of stage 0, its reduction by range,
    (layers + 1)²."""
    layers = len(problem.layers)
    if groups:
        pairs = np.ix_(groups[stage - 1] if stage else problem.data_holders, groups[stage])
        width = float(np.median(problem.bandwidth[pairs]))
    else:
        width = float(np.median(problem.uplink))
    made = np.repeat((problem.cut_bytes / max(width, 1e-9))[:, None], layers + 1, axis=1)
    if stage == 0:
        unit = 1.0 / max(width, 1e-9)
        if groups:
            share = shard_shares(problem, groups[0])
            unit = min(reduction_seconds(problem, groups[0], 1e6, share) / 1e6, TOO_LARGE)
        made += _between(problem.prefix[2]) * unit
    return made


# --- peers to stages -----------------------------------------------------------------------------


def deal(
    problem: Problem,
    ranges: Sequence[Range],
    order: Sequence[int] | None = None,
    stages: Sequence[int] = (),
) -> Groups:
    """Return groups by the rule: largest first (or in the given order) into the poorest stage, the
    one with the most seconds per microbatch so far, of those with room and whose memory fits; of
    all stages, or of those given."""
    stages = stages or range(len(ranges))
    groups: list[list[int]] = [[] for _ in ranges]
    speeds = [0.0 for _ in ranges]
    seconds = [problem.seconds(*layers) for layers in ranges]
    needed = [problem.memory_bytes(*each, stage, len(ranges)) for stage, each in enumerate(ranges)]
    poorest = [(0.0 if seconds[stage] else math.inf, stage) for stage in stages]  # a heap
    for peer in largest_first(problem, range(len(problem.peers))) if order is None else order:
        small = []
        while poorest and needed[poorest[0][1]] > problem.peers[peer].memory_bytes:
            small.append(heappop(poorest))
        if poorest:
            _, stage = heappop(poorest)
            groups[stage].append(peer)
            speeds[stage] += problem.peers[peer].speed
            if len(groups[stage]) < problem.replica_limit:
                rate = speeds[stage] / seconds[stage] if seconds[stage] else math.inf
                heappush(poorest, (rate, stage))
        for each in small:
            heappush(poorest, each)
    return tuple(tuple(sorted(group)) for group in groups)


def _filled(problem: Problem, groups: Groups) -> Groups:
    """Give every empty stage a peer that has none, or one of the largest group, even if it does not
    fit: where memory is scarce, that is where the search begins."""
    made = [list(group) for group in groups]
    busy = {peer for group in groups for peer in group}
    idle = [peer for peer in range(len(problem.peers)) if peer not in busy]
    for group in made:
        if not group:
            largest = max(made, key=len)
            group.append(idle.pop() if idle else largest.pop())
    return tuple(tuple(sorted(group)) for group in made)


def fits(problem: Problem, peer: int, ranges: Sequence[Range], stage: int) -> bool:
    """Whether a peer has the memory for a stage."""
    needed = problem.memory_bytes(*ranges[stage], stage, len(ranges))
    return problem.peers[peer].memory_bytes >= needed


def _deal_in_blocks(problem: Problem, ranges: Sequence[Range], blocks: int) -> Groups:
    """Consecutive stages in blocks: each block takes peers place by place until it has its part,
    and deals them to its stages. With as many blocks as stages, reductions stay near."""
    order = list(chain(*places(problem)))
    stages = len(ranges)
    edges = [stages * block // blocks for block in range(blocks + 1)]
    total = problem.seconds(0, len(problem.layers)) or 1.0
    everything = float(problem.speed.sum())
    groups: list[tuple[int, ...]] = []
    taken, so_far = 0, 0.0
    for first, last in pairwise(edges):
        wanted = everything * problem.seconds(0, ranges[last - 1][1]) / total
        begin, most = taken, len(order) - (stages - last)
        while taken < most and (
            taken - begin < last - first or so_far + problem.speed[order[taken]] / 2 <= wanted
        ):
            so_far += float(problem.speed[order[taken]])
            taken += 1
        part = largest_first(problem, order[begin : taken if last < stages else len(order)])
        groups += deal(problem, ranges, part, range(first, last))[first:last]
    return tuple(groups)
