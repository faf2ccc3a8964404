"""A lower bound of an assignment's predicted seconds per step, without a linear program.

The rule: never above what `cost.predict` finds with the best wiring, so a search may discard what
the bound discards. It adds up what holds for every wiring:

- the rate is at most the sum, over the replicas of a stage, of what each can compute, send and
  receive, and at most the sum of what the links at each boundary carry;
- at a given rate, the mean compute of a microbatch is least if the fastest replicas are full;
  seconds per step are then convex in the rate, and their least value is on a breakpoint;
- ways between stages are at least the shortest, and hide at most the longest part of a reduction.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swarm.core.scheduling.cost import reduction_seconds, shard_shares
from swarm.core.scheduling.problem import Assignment, Floats, Problem
from swarm.core.scheduling.wiring import backward_edge_seconds, edge_seconds, stage_limits

Range = tuple[int, int]
Group = tuple[int, ...]

ROUNDING = 1e-12
MOST_KEPT = 128
"""Of so many peers, what a cut is like between any two is computed once."""


@dataclass(frozen=True)
class _Stage:
    """What a range of layers and a group give, whatever their neighbours are."""

    rate: float
    seconds: tuple[float, ...]
    """Compute of one microbatch by replica, fastest first."""
    rates: tuple[float, ...]
    """What the so many fastest do together."""
    work: tuple[float, ...]
    """Compute seconds per second of the so many fastest, all full."""
    longest_backward: float
    reduction: float
    fetching: float


@dataclass(frozen=True)
class _Cut:
    """What pairs of a cut are like, (sources, targets) each."""

    capacities: Floats
    """Microbatches per second there and back."""
    ways: Floats
    backward: Floats
    """0 where nothing gets through."""


@dataclass(frozen=True)
class _Boundary:
    rate: float
    shortest: float
    longest_backward: float


class Bounds:
    """Bounds of one problem; what was computed for a group or a pair of groups is kept."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._limits: dict[Range, Floats] = {}
        self._cuts: dict[int, _Cut] = {}
        self._stages: dict[tuple[Range, Group], _Stage] = {}
        self._boundaries: dict[tuple[Range, Group, Range, Group], _Boundary] = {}

    def seconds_per_microbatch(self, ranges: Sequence[Range], groups: Sequence[Group]) -> float:
        """Return a lower bound of the seconds per microbatch of any wiring; infinite if no
        microbatch gets through. All who hold the data may feed."""
        stages, boundaries = self._terms(ranges, groups)
        rate = min(*(each.rate for each in stages), *(each.rate for each in boundaries))
        return 1.0 / rate if rate > 0 else math.inf

    def step_seconds(self, ranges: Sequence[Range], groups: Sequence[Group]) -> float:
        """Return a lower bound of the predicted seconds per step; infinite if no microbatch gets
        through. All who hold the data may feed."""
        stages, boundaries = self._terms(ranges, groups)
        rate = min(*(each.rate for each in stages), *(each.rate for each in boundaries))
        if rate <= 0:
            return math.inf
        total = _least(self.problem.terms.microbatches_per_step, 1.0 / rate, stages)
        total += sum(each.shortest for each in boundaries)
        hidden = exposed = 0.0
        for i, stage in enumerate(stages):
            exposed = max(exposed, stage.reduction - hidden)
            if i + 1 < len(stages):
                hidden += stage.longest_backward + boundaries[i + 1].longest_backward
        replicas = sum(map(len, groups))
        moved = sum(each.fetching for each in stages) / (replicas * self.problem.horizon_seconds)
        return (total + exposed) * (1.0 + moved)

    # --- parts ------------------------------------------------------------------------------------

    def _terms(
        self, ranges: Sequence[Range], groups: Sequence[Group]
    ) -> tuple[list[_Stage], list[_Boundary]]:
        stages = [self._stage(*each) for each in zip(ranges, groups, strict=True)]
        before = [((0, 0), self.problem.data_holders), *zip(ranges, groups, strict=True)]
        boundaries = [self._boundary(*before[i], ranges[i], groups[i]) for i in range(len(ranges))]
        return stages, boundaries

    def _stage(self, layers: Range, group: Group) -> _Stage:
        found = self._stages.get((layers, group))
        if found is None:
            found = self._stages[layers, group] = self._new_stage(layers, list(group))
        return found

    def _new_stage(self, layers: Range, group: list[int]) -> _Stage:
        problem = self.problem
        limits = self.limits(layers)[group]
        seconds = problem.seconds(*layers) / problem.speed[group]
        order = np.argsort(seconds, kind="stable")
        seconds, limits = seconds[order], limits[order]
        size = problem.parameter_bytes(*layers)
        fetching = problem.lacking[1]
        return _Stage(
            rate=float(limits.sum()),
            seconds=tuple(seconds.tolist()),
            rates=tuple(np.cumsum(limits).tolist()),
            work=tuple(np.cumsum(limits * seconds).tolist()),
            longest_backward=problem.backward_seconds(*layers) / float(problem.speed[group].min()),
            reduction=reduction_seconds(problem, group, size, shard_shares(problem, group)),
            fetching=float((fetching[group, layers[1]] - fetching[group, layers[0]]).sum()),
        )

    def _boundary(self, before: Range, sources: Group, after: Range, targets: Group) -> _Boundary:
        key = (before, sources, after, targets)
        found = self._boundaries.get(key)
        if found is None:
            found = self._boundaries[key] = self._new_boundary(*key)
        return found

    def _new_boundary(
        self, before: Range, sources: Group, after: Range, targets: Group
    ) -> _Boundary:
        cut = after[0]
        over = self._over(cut, sources, targets)
        if cut:
            sending = self.limits(before)[list(sources)]
        else:
            sending = self.problem.uplink[list(sources)] / max(self.problem.forward_bytes(0), 1e-9)
            sending = np.where(np.isin(sources, targets), np.inf, sending)
        receiving = self.limits(after)[list(targets)]
        sent = np.minimum(over.capacities.sum(axis=1), sending).sum()
        received = np.minimum(over.capacities.sum(axis=0), receiving).sum()
        return _Boundary(
            rate=float(min(sent, received)),
            shortest=float(over.ways.min()),
            longest_backward=float(over.backward.max()),
        )

    def limits(self, layers: Range) -> Floats:
        """Return microbatches per second that each peer can do of these layers at most, (n,)."""
        found = self._limits.get(layers)
        if found is None:
            found = self._limits[layers] = stage_limits(self.problem, *layers)
        return found

    def _over(self, cut: int, sources: Group, targets: Group) -> "_Cut":
        """Return what a cut is like between these; of few peers, all pairs are kept."""
        everybody = tuple(range(len(self.problem.peers)))
        if len(everybody) > MOST_KEPT:
            return _cut_between(self.problem, cut, sources, targets)
        found = self._cuts.get(cut)
        if found is None:
            found = self._cuts[cut] = _cut_between(self.problem, cut, everybody, everybody)
        pairs = np.ix_(sources, targets)
        return _Cut(found.capacities[pairs], found.ways[pairs], found.backward[pairs])


def pair_rates(
    problem: Problem, cut: int, sources: Sequence[int], targets: Sequence[int]
) -> Floats:
    """Return microbatches per second that each way over a cut and back carries at most, (sources,
    targets); at most 1e12."""
    onward = problem.bandwidth[np.ix_(sources, targets)]
    backward = problem.bandwidth[np.ix_(targets, sources)].T
    size, size_back = problem.forward_bytes(cut), problem.backward_bytes(cut)
    there = onward / size if size else np.full_like(onward, np.inf)
    back = backward / size_back if size_back else np.full_like(onward, np.inf)
    made: Floats = np.minimum(np.minimum(there, back), 1e12)
    made[(onward == 0) | (backward == 0)] = 0.0
    return made


def _cut_between(
    problem: Problem, cut: int, sources: Sequence[int], targets: Sequence[int]
) -> _Cut:
    ways = edge_seconds(problem, cut, sources, targets)
    backward = backward_edge_seconds(problem, cut, sources, targets)
    backward[~np.isfinite(ways)] = 0.0
    return _Cut(pair_rates(problem, cut, sources, targets), ways, backward)


def bound_of(problem: Problem, assignment: Assignment) -> float:
    """Return the lower bound of one assignment's predicted seconds per step."""
    return Bounds(problem).step_seconds(assignment.ranges, assignment.groups)


def _least(microbatches: int, fastest: float, stages: Sequence[_Stage]) -> float:
    """Return the least of `microbatches * T + mean compute of a microbatch` over T >= fastest.

    The mean is convex and piecewise linear in T, seconds per microbatch: the slower the rate, the
    more of the flow the fastest replicas carry. From `fastest` upwards, the first breakpoint at
    which the sum no longer falls is the least.
    """
    seconds = fastest
    while True:
        total, slope, following = microbatches * seconds, float(microbatches), math.inf
        for stage in stages:
            slower = (1.0 - ROUNDING) / seconds  # on a breakpoint the piece above it counts
            full = min(bisect_left(stage.rates, slower), len(stage.rates) - 1)
            rate = stage.rates[full - 1] if full else 0.0
            work = stage.work[full - 1] if full else 0.0
            total += seconds * work + max(0.0, 1.0 - seconds * rate) * stage.seconds[full]
            slope += work - rate * stage.seconds[full]
            if full:
                following = min(following, 1.0 / rate)
        if slope >= 0 or following == math.inf:
            return total
        seconds = following
