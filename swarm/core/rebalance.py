"""Greedy moves on a join or a failure: few replicas change, in milliseconds.

The rule: one move at a time, into the slowest stage, the best gain per byte moved; ties go to who
has no work, to the lower peer, to the lower stage. Nobody who works is moved unless the slowest
stage gets faster and the stage that is left stays faster than it was; a peer never leaves a stage
for the same stage.

What is known. Take the assumptions *identical stages, free network and memory*: all stages take
equally long, only compute limits a replica. Then stages are machines and peers are jobs, and the
slowest stage is the least loaded machine, as large as possible ("machine covering").

- Largest first into the poorest stage (`starts.deal`) reaches (3m - 1) / (4m - 2) of the optimal
  rate with m stages, so more than 3/4, and no more in the worst case: J. Csirik, H. Kellerer,
  G. Woeginger, "The exact LPT-bound for maximizing the minimum completion time", Operations
  Research Letters 11 (1992); before them 3/4 by B. Deuermeyer, D. Friesen, M. Langston, "Scheduling
  to maximize the minimum processor completion time in a multiprocessor system", SIAM J. Algebraic
  and Discrete Methods 3 (1982). (R. L. Graham's 4/3 of 1969 is about the most loaded machine.)
- Where no move of `rebalanced` helps (hysteresis 0), the rate is at least m / (2m - 1) of the
  optimum, so more than 1/2: no peer of speed v can leave a stage of rate C for the poorest, of rate
  c, so C - v <= c. A stage with two peers or more has one with v <= C / 2, so C <= 2c. A stage with
  one peer may be struck from the problem together with it: the optimum of what remains is no
  smaller. What remains has k <= m stages and rates of at most c + (k - 1) * 2c together, and the
  optimum is at most their mean.

Outside these assumptions nothing is claimed (with a hysteresis, many small peers may each gain too
little to move); scripts/bench optimality measures it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from swarm.core.problem import Assignment, Problem, Standby
from swarm.core.regrouping import idle
from swarm.core.starts import Groups, Range, fits
from swarm.core.wiring import stage_limits
from swarm.errors import NoFeasiblePlan

HYSTERESIS = 0.05
"""A move must make the slowest stage faster by this fraction."""


@dataclass(frozen=True)
class Move:
    """One peer changes its place."""

    peer: int
    source: int | None
    """The stage that it leaves; None if it stood by or is new."""
    target: int
    gain: float
    """By what fraction the seconds per microbatch of the slowest stage fall."""
    fetched_bytes: float


def stage_seconds(problem: Problem, layers: Range, group: Sequence[int]) -> float:
    """Return seconds per microbatch of a stage by what its replicas can compute, send and receive;
    infinite without replicas."""
    rate = float(stage_limits(problem, *layers)[list(group)].sum())
    return 1.0 / rate if rate else math.inf


def rebalanced(
    problem: Problem, assignment: Assignment, *, hysteresis: float = HYSTERESIS
) -> tuple[Assignment, tuple[Move, ...]]:
    """Return the assignment after greedy moves, and the moves in order.

    While the slowest stage can be sped up by more than `hysteresis` by a replica of another stage
    or by a peer that stands by, the move with the best gain per byte fetched is made; what fetches
    nothing comes first, by gain. The cuts stay. O(peers) per move. It ends, because a move leaves
    both of its stages faster than the slowest one was.
    """
    groups = assignment.groups
    moves: list[Move] = []
    while True:
        possible = _moves(problem, assignment.ranges, groups)
        good = [move for move in possible if move.gain > hysteresis]
        if not good:
            break
        found = max(good, key=_preference)
        moves.append(found)
        groups = _moved(groups, found)
    reasons = {each.peer: each.reason for each in assignment.standby}
    standby = tuple(Standby(peer, reasons.get(peer, "")) for peer in idle(problem, groups))
    return replace(assignment, groups=groups, standby=standby), tuple(moves)


def repaired(
    problem: Problem,
    assignment: Assignment,
    gone: Sequence[int],
    ready: Sequence[tuple[int, int]] = (),
) -> Assignment:
    """Return the assignment without those who are gone, for a repair.

    Survivors keep their stages; `ready` are pairs (peer, stage) of standby peers that hold what the
    stage needs: they get it if there is room. Nobody else gets work or moves: that takes a planned
    plan (`rebalanced`). Those who are gone stand by, so that indexes stay.

    Raises NoFeasiblePlan if a stage is left without replicas, or nobody to feed.
    """
    lost = set(gone)
    groups = [[peer for peer in group if peer not in lost] for group in assignment.groups]
    working = {peer for group in groups for peer in group}
    for peer, stage in sorted(ready):
        room = len(groups[stage]) < problem.replica_limit
        if room and peer not in lost and peer not in working:
            groups[stage].append(peer)
            working.add(peer)
    feeders = [peer for peer in assignment.feeders if peer not in lost]
    feeders = feeders or [peer for peer in problem.data_holders if peer not in lost]
    empty = [stage for stage, group in enumerate(groups) if not group]
    if empty or not feeders:
        raise NoFeasiblePlan(
            f"stage {empty[0]} has no replica left" if empty else "nobody who is left has the data",
            evidence=tuple(f"{problem.peers[peer].id} is gone" for peer in sorted(lost)),
            hint="wait for a peer to come back",
        )
    made = tuple(tuple(sorted(group)) for group in groups)
    standby = tuple(
        Standby(peer, "it is gone" if peer in lost else "") for peer in idle(problem, made)
    )
    return replace(assignment, groups=made, feeders=tuple(feeders), standby=standby)


# --- moves ---------------------------------------------------------------------------------------


def _moves(problem: Problem, ranges: Sequence[Range], groups: Groups) -> Iterator[Move]:
    """Yield the moves into the slowest stage, in order of peer."""
    seconds = [stage_seconds(problem, *each) for each in zip(ranges, groups, strict=True)]
    target = max(range(len(ranges)), key=lambda stage: (seconds[stage], -stage))
    if len(groups[target]) >= problem.replica_limit:
        return
    places = {peer: stage for stage, group in enumerate(groups) for peer in group}
    for peer in range(len(problem.peers)):
        source = places.get(peer)
        if source == target or not fits(problem, peer, ranges, target):
            continue
        left = 0.0
        if source is not None:
            rest = [other for other in groups[source] if other != peer]
            if len(rest) < problem.terms.min_replicas:
                continue
            left = stage_seconds(problem, ranges[source], rest)
        joined = stage_seconds(problem, ranges[target], (*groups[target], peer))
        gain = 1.0 - max(left, joined) / seconds[target]
        bytes_before = problem.lacking[0][peer]
        first, last = ranges[target]
        yield Move(peer, source, target, gain, float(bytes_before[last] - bytes_before[first]))


def _preference(move: Move) -> tuple[bool, float, bool, int]:
    """Order moves that gain: free ones first, then by gain per byte; who has no work; by peer."""
    worth = move.gain / move.fetched_bytes if move.fetched_bytes else move.gain
    return move.fetched_bytes == 0, worth, move.source is None, -move.peer


def _moved(groups: Groups, move: Move) -> Groups:
    made = [tuple(peer for peer in group if peer != move.peer) for group in groups]
    made[move.target] = tuple(sorted((*made[move.target], move.peer)))
    return tuple(made)
