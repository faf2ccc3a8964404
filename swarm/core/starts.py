"""Where the search begins: cuts by dynamic programming, peers dealt to stages by a rule.

The rule: no start is judged here, and none needs a linear program; ties go to the lower stage and
to the lower peer.

Largest first into the poorest stage is the rule of R. L. Graham ("Bounds on multiprocessing timing
anomalies", SIAM J. Appl. Math. 17, 1969), applied to covering: what is known about it then is in
rebalance.py.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import numpy as np

from swarm.core.cost import reduction_seconds, shard_shares
from swarm.core.problem import Floats, Problem

Range = tuple[int, int]
Groups = tuple[tuple[int, ...], ...]
Start = tuple[tuple[Range, ...], Groups]

MANY_PEERS = 32
TOO_LARGE = 1e12
"""Seconds of a stage that does not fit, in the dynamic program."""


def stage_counts(problem: Problem) -> range:
    """Return the numbers of stages that layers, peers and terms allow; none if empty."""
    terms = problem.terms
    most = min(len(problem.layers), len(problem.peers) // terms.min_replicas)
    most = min(most, terms.max_stages or most)
    if terms.cuts:
        return range(len(terms.cuts) + 1, min(most, len(terms.cuts) + 1) + 1)
    return range(1, most + 1)


def starts(problem: Problem, stages: int) -> Iterator[Start]:
    """Yield places to begin at with so many stages: peers dealt out in several orders, or every
    stage in as few places as possible. Each is cut twice: for equal stages, then for the groups
    that came of it.

    Groups may be too small for a stage's memory or the terms' replicas; who fits nowhere, or is
    one too many, is in none.
    """
    even = best_cuts(problem, [float(problem.speed.sum()) / stages] * stages)
    orders = _orders(problem, stages)
    for number in range(len(orders) + 1):
        ranges = even
        for _ in range(2):
            row = number == len(orders)
            dealt = (
                _deal_in_a_row(problem, ranges) if row else deal(problem, ranges, orders[number])
            )
            groups = _filled(problem, dealt)
            yield ranges, groups
            speeds = [float(problem.speed[list(group)].sum()) for group in groups]
            again = best_cuts(problem, speeds, groups)
            if again == ranges:
                break
            ranges = again


def _orders(problem: Problem, stages: int) -> list[list[int]]:
    """Return in which orders peers are dealt to all stages: largest first; place by place, so that
    activations stay near; those of one place only; the fewest that can be, of all and of each
    place; and, for one stage, each peer alone. Of many peers the fewest are not worth a look."""
    everybody = largest_first(problem, range(len(problem.peers)))
    places = [largest_first(problem, place) for place in _places(problem)]
    whole = [everybody, list(chain(*places))]
    whole += [place for place in places if stages <= len(place) < len(everybody)]
    fewest = [order[:stages] for order in whole]
    if stages == 1:
        fewest += [[peer] for peer in everybody]
    return whole if len(everybody) > MANY_PEERS else [*whole, *fewest]


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


def deal(problem: Problem, ranges: Sequence[Range], order: Sequence[int] | None = None) -> Groups:
    """Return groups by the rule: largest first (or in the given order) into the poorest stage, the
    one with the most seconds per microbatch so far, of those with room and whose memory fits."""
    stages = range(len(ranges))
    groups: list[list[int]] = [[] for _ in ranges]
    speeds = [0.0 for _ in ranges]
    seconds = [problem.seconds(*layers) for layers in ranges]
    needed = [problem.memory_bytes(*ranges[stage], stage, len(ranges)) for stage in stages]
    limit = problem.replica_limit
    for peer in largest_first(problem, range(len(problem.peers))) if order is None else order:
        memory, speed = problem.peers[peer].memory_bytes, problem.peers[peer].speed
        fitting = [s for s in stages if len(groups[s]) < limit and needed[s] <= memory]
        if fitting:
            poorest = min(fitting, key=lambda s: speeds[s] / seconds[s] if seconds[s] else math.inf)
            groups[poorest].append(peer)
            speeds[poorest] += speed
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


def largest_first(problem: Problem, peers: Sequence[int]) -> list[int]:
    """Return peers by falling speed; ties by id."""
    return sorted(peers, key=lambda peer: (-problem.peers[peer].speed, peer))


def fits(problem: Problem, peer: int, ranges: Sequence[Range], stage: int) -> bool:
    """Whether a peer has the memory for a stage."""
    needed = problem.memory_bytes(*ranges[stage], stage, len(ranges))
    return problem.peers[peer].memory_bytes >= needed


def _deal_in_a_row(problem: Problem, ranges: Sequence[Range]) -> Groups:
    """Stages take peers place by place, each until it has its part: reductions stay near."""
    order = [peer for place in _places(problem) for peer in largest_first(problem, place)]
    stages = len(ranges)
    total = problem.seconds(0, len(problem.layers)) or 1.0
    everything = float(problem.speed.sum())
    groups: list[list[int]] = [[] for _ in ranges]
    stage, so_far = 0, 0.0
    for i, peer in enumerate(order):
        wanted = everything * problem.seconds(0, ranges[stage][1]) / total
        full = groups[stage] and so_far + problem.peers[peer].speed / 2 > wanted
        needed = stages - 1 - stage
        if stage < stages - 1 and (full or (groups[stage] and len(order) - i <= needed)):
            stage += 1
        so_far += problem.peers[peer].speed
        if len(groups[stage]) < problem.replica_limit and fits(problem, peer, ranges, stage):
            groups[stage].append(peer)
    return tuple(tuple(sorted(group)) for group in groups)


def _places(problem: Problem) -> list[list[int]]:
    """Return the peers of every place, neighbours near each other: from the place with the most
    data holders on, always the place with the widest links to the one before."""
    names = sorted({peer.place for peer in problem.peers})
    members = [[i for i, peer in enumerate(problem.peers) if peer.place == name] for name in names]
    holders = [sum(problem.peers[i].has_data for i in place) for place in members]
    left = list(range(len(members)))
    here = max(left, key=lambda k: (holders[k], -k))
    made = []
    while True:
        left.remove(here)
        made.append(members[here])
        if not left:
            return made
        last = here
        here = max(left, key=lambda k: (_width(problem, members[last], members[k]), -k))


def _width(problem: Problem, a: Sequence[int], b: Sequence[int]) -> float:
    return float(problem.link[np.ix_(a, b)].mean() + problem.link[np.ix_(b, a)].mean())
