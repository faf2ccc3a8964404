"""Everything that is one step away from an assignment: what the local search looks at.

The rule: nothing is judged here. Every stage keeps a peer; whether it has enough of them, and the
memory, is for whoever prices the step.
"""

from collections.abc import Iterator, Sequence

from swarm.core.scheduling.nearness import largest_first
from swarm.core.scheduling.problem import Problem
from swarm.core.scheduling.starts import Groups, Range, Start, deal, stage_counts


def neighbours(problem: Problem, start: Start) -> Iterator[Start]:
    """Yield everything that is one step away: another cut, two stages merged, one split, a peer
    moved or two swapped."""
    ranges, groups = start
    if not problem.terms.cuts:
        yield from other_cuts(ranges, groups)
        if len(ranges) - 1 in stage_counts(problem):
            yield from _merged(ranges, groups)
        if len(ranges) + 1 in stage_counts(problem):
            yield from _split(problem, ranges, groups)
    places = (*groups, idle(problem, groups))
    for a, source in enumerate(places):
        for peer in source:
            for b in range(len(places)):
                if a != b and (a == len(groups) or len(source) > 1):
                    yield ranges, changed(groups, ((a, peer, None), (b, None, peer)))
    for a, source in enumerate(places):
        for b in range(a + 1, len(places)):
            for peer in source:
                for other in places[b]:
                    yield ranges, changed(groups, ((a, peer, other), (b, other, peer)))


def other_cuts(ranges: tuple[Range, ...], groups: Groups) -> Iterator[Start]:
    """Yield everything with one cut elsewhere between its neighbours."""
    for k in range(1, len(ranges)):
        for cut in range(ranges[k - 1][0] + 1, ranges[k][1]):
            if cut != ranges[k][0]:
                two = ((ranges[k - 1][0], cut), (cut, ranges[k][1]))
                yield (*ranges[: k - 1], *two, *ranges[k + 1 :]), groups


def near_cuts(start: Start) -> list[Start]:
    """Return what it is with one cut moved by a layer."""
    return [
        (ranges, groups)
        for ranges, groups in other_cuts(*start)
        if sum(abs(a[0] - b[0]) for a, b in zip(ranges, start[0], strict=True)) == 1
    ]


def orders(groups: Groups) -> list[Groups]:
    """Return the groups as they are, with one at another place, and with two exchanged."""
    made = {groups: None}
    for a in range(len(groups)):
        for b in range(len(groups)):
            rest = [*groups[:a], *groups[a + 1 :]]
            made[*rest[:b], groups[a], *rest[b:]] = None
            exchanged = list(groups)
            exchanged[a], exchanged[b] = groups[b], groups[a]
            made[tuple(exchanged)] = None
    return list(made)


def changed(groups: Groups, changes: Sequence[tuple[int, int | None, int | None]]) -> Groups:
    """Return groups after (place, who leaves, who comes); the place after the last stands by."""
    made = list(groups)
    for place, leaving, coming in changes:
        if place < len(groups):
            kept = [peer for peer in made[place] if peer != leaving]
            made[place] = tuple(sorted(kept if coming is None else [*kept, coming]))
    return tuple(made)


def idle(problem: Problem, groups: Groups) -> tuple[int, ...]:
    """Return the peers that are in no group."""
    busy = {peer for group in groups for peer in group}
    return tuple(peer for peer in range(len(problem.peers)) if peer not in busy)


def _merged(ranges: tuple[Range, ...], groups: Groups) -> Iterator[Start]:
    """Two neighbouring stages become one: of both groups, or of one while the other stands by."""
    for k in range(1, len(ranges)):
        one = (*ranges[: k - 1], (ranges[k - 1][0], ranges[k][1]), *ranges[k + 1 :])
        for group in (tuple(sorted(groups[k - 1] + groups[k])), groups[k - 1], groups[k]):
            yield one, (*groups[: k - 1], group, *groups[k + 1 :])


def _split(problem: Problem, ranges: tuple[Range, ...], groups: Groups) -> Iterator[Start]:
    """A stage becomes two: its group dealt to both, or one of them for a single peer of this group
    or of those who stand by."""
    for k, (first, last) in enumerate(ranges):
        for cut in range(first + 1, last):
            two = ((first, cut), (cut, last))
            pairs = [deal(problem, two, largest_first(problem, groups[k]))]
            for peer in (*groups[k], *idle(problem, groups)):
                rest = tuple(other for other in groups[k] if other != peer)
                pairs += [((peer,), rest), (rest, (peer,))]
            for pair in pairs:
                if all(pair):
                    made = (*groups[:k], *pair, *groups[k + 1 :])
                    yield (*ranges[:k], *two, *ranges[k + 1 :]), made
