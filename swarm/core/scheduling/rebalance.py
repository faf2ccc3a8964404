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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from swarm.core.scheduling.problem import Assignment, Floats, Problem, Standby
from swarm.core.scheduling.regrouping import idle
from swarm.core.scheduling.starts import Groups, Range
from swarm.core.scheduling.wiring import stage_limits
from swarm.errors import NoFeasiblePlan

HYSTERESIS = 0.1
"""A move must make the slowest stage faster by this fraction, or all of a plan together a step."""
ROUNDING = 1e-12
"""Gains below this are none."""


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
    problem: Problem,
    assignment: Assignment,
    *,
    hysteresis: float = HYSTERESIS,
    workers: Groups | None = None,
    excluded: Collection[int] = (),
) -> tuple[Assignment, tuple[Move, ...]]:
    """Return the assignment after greedy moves, and the moves in order.

    While the slowest stage can be sped up by more than `hysteresis` by a replica of another stage
    or by a peer that stands by, the move with the best gain per byte fetched is made; what fetches
    nothing comes first, by gain. The cuts stay. O(peers) per move. It ends, because a move leaves
    both of its stages faster than the slowest one was.

    `workers` are those of each stage who can work at once: one of them stays. Whoever is `excluded`
    stays where it is.
    """
    staffing = _Staffing(problem, assignment)
    moves: list[Move] = []
    while True:
        kept = {*excluded, *(_last_workers(staffing.groups, workers) if workers else ())}
        found = staffing.best(kept, hysteresis)
        if found is None:
            break
        moves.append(found)
        staffing.make(found)
    groups = staffing.groups
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


def _last_workers(groups: Groups, workers: Groups) -> Iterator[int]:
    """Yield who alone works in its stage."""
    for group, working in zip(groups, workers, strict=True):
        left = [peer for peer in working if peer in group]
        if len(left) == 1:
            yield left[0]


class _Staffing:
    """Who is in which stage, and what every move into the slowest one would bring."""

    def __init__(self, problem: Problem, assignment: Assignment) -> None:
        self._problem, self._ranges = problem, assignment.ranges
        stages = range(len(self._ranges))
        self._limits = np.stack([stage_limits(problem, *layers) for layers in self._ranges])
        needed = [problem.memory_bytes(*self._ranges[s], s, len(self._ranges)) for s in stages]
        self._fits = np.array(needed)[:, None] <= problem.memory
        self._place = np.full(len(problem.peers), len(self._ranges))
        """Stage of each peer; the number of stages for those who stand by."""
        for stage, group in enumerate(assignment.groups):
            self._place[list(group)] = stage
        self._rates = np.array([self._rate(stage) for stage in stages])

    def _rate(self, stage: int) -> float:
        return float(self._limits[stage, self._place == stage].sum())

    @property
    def groups(self) -> Groups:
        """Return the replicas of every stage."""
        stages = range(len(self._ranges))
        return tuple(tuple(np.flatnonzero(self._place == stage).tolist()) for stage in stages)

    def make(self, move: Move) -> None:
        """Let a peer change its place."""
        self._place[move.peer] = move.target
        for stage in (move.source, move.target):
            if stage is not None:
                self._rates[stage] = self._rate(stage)

    def best(self, kept: Collection[int], hysteresis: float) -> Move | None:
        """Return the best move of all but those who are kept: what fetches nothing first, then the
        most gain per byte, then who has no work, then the lower peer."""
        with np.errstate(divide="ignore"):
            seconds = 1.0 / self._rates
        target = int(seconds.argmax())
        sizes = np.bincount(self._place, minlength=len(self._ranges) + 1)
        if sizes[target] >= self._problem.replica_limit:
            return None
        gains = self._gains(target, sizes, float(seconds[target]))
        gains[list(kept)] = -math.inf
        good = np.flatnonzero(gains > hysteresis + ROUNDING)
        if not good.size:
            return None
        first, last = self._ranges[target]
        lacking = self._problem.lacking[0][good]
        fetched = lacking[:, last] - lacking[:, first]
        worth = gains[good] / np.where(fetched > 0, fetched, 1.0)
        busy = self._place[good] < len(self._ranges)
        chosen = int(np.lexsort((good, busy, -worth, fetched > 0))[0])
        peer = int(good[chosen])
        source = int(self._place[peer]) if busy[chosen] else None
        return Move(peer, source, target, float(gains[peer]), float(fetched[chosen]))

    def _gains(self, target: int, sizes: NDArray[np.intp], slowest: float) -> Floats:
        """Return by peer how much faster the slower of both stages would be than the slowest one,
        (n,); minus infinity for who cannot move."""
        problem, stages = self._problem, len(self._ranges)
        everybody = np.arange(len(problem.peers))
        busy = self._place < stages
        source = np.where(busy, self._place, 0)
        rest = self._rates[source] - self._limits[source, everybody]
        alone = sizes[source] - 1 < problem.terms.min_replicas
        with np.errstate(divide="ignore"):
            left = np.where(busy, 1.0 / np.maximum(rest, 0.0), 0.0)
        joined = 1.0 / (self._rates[target] + self._limits[target])
        gains = 1.0 - np.maximum(left, joined) / slowest
        immovable = (self._place == target) | ~self._fits[target] | (busy & alone)
        return np.where(immovable, -math.inf, gains)
