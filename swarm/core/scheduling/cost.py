"""Predicted seconds per step of an assignment: what every schedule is judged by.

The rule: everybody who has the same problem, assignment and wiring computes the same prediction,
without a solver; a solver is needed only to find the wiring.

A step takes

- **fill and drain**: the way of one average microbatch alone, weighed by the flow: compute, latency
  and bytes over bandwidth, from its feeder to the last stage and back to stage 0;
- **steady state**: M / R, where R is the rate of microbatches at which the flow saturates the first
  resource: a peer's compute, uplink or downlink, or a link;
- **reduction**: of each stage group, the part that outlasts the backward of the stages before it;
- **change**: the mean, over replicas, of the seconds for which each fetches what it does not hold,
  as a fraction of the horizon, times the rest of the step: work that is lost while states move.

Compute and transfers overlap; what the reduction and moving states take from the links that
microbatches use is not modelled, nor is the round trip of Prepared and Commit, which no assignment
avoids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from swarm.core.scheduling.problem import Assignment, Floats, Problem
from swarm.core.scheduling.wiring import (
    Flow,
    Loads,
    backward_edge_seconds,
    best_flow,
    edge_seconds,
    loads_of,
    sources_of,
)

Limit = Literal["compute", "uplink", "downlink", "link", "memory", "nothing"]

TIGHT = 1e-6
"""A resource that is used to within this fraction of the most loaded one is a bottleneck."""


@dataclass(frozen=True)
class Prediction:
    """What a step costs, in seconds, and why."""

    fill_seconds: float
    steady_seconds: float
    reduction_seconds: float
    change_seconds: float
    flow: Flow
    microbatches_per_second: float
    """The rate of the steady state."""
    group_reduction_seconds: tuple[float, ...]
    """By stage, hidden or not."""
    shard_shares: tuple[tuple[float, ...], ...]
    """By stage and replica: part of the stage's parameters that each owns; sums to 1."""
    limits: tuple[Limit, ...]
    """By peer: which of its resources is a bottleneck. `memory`: it fits into no stage."""

    @property
    def step_seconds(self) -> float:
        """Return all parts together."""
        return self.kept_seconds + self.change_seconds

    @property
    def kept_seconds(self) -> float:
        """Return the seconds of a step once everybody holds what it needs."""
        return self.fill_seconds + self.steady_seconds + self.reduction_seconds


def predict(problem: Problem, assignment: Assignment, flow: Flow | None = None) -> Prediction:
    """Return what a step takes by this assignment, with the given wiring or the best one.

    Raises NoFeasiblePlan if no wiring is given and none exists. With a wiring that uses a link
    through which nothing gets, seconds are infinite.
    """
    if flow is None:
        flow = best_flow(problem, assignment)
    loads = loads_of(problem, assignment, flow)
    shares = tuple(shard_shares(problem, group) for group in assignment.groups)
    reductions = tuple(
        reduction_seconds(problem, group, problem.parameter_bytes(*layers), share)
        for layers, group, share in zip(assignment.ranges, assignment.groups, shares, strict=True)
    )
    hidden = hidden_seconds(problem, assignment, flow)
    exposed = max(0.0, *(a - b for a, b in zip(reductions, hidden, strict=True)))
    fill = path_seconds(problem, assignment, flow)
    steady = problem.terms.microbatches_per_step * loads.microbatch_seconds
    kept, moving = fill + steady + exposed, change_fraction(problem, assignment)
    return Prediction(
        fill_seconds=fill,
        steady_seconds=steady,
        reduction_seconds=exposed,
        change_seconds=kept * moving if moving else 0.0,
        flow=flow,
        microbatches_per_second=1.0 / loads.microbatch_seconds
        if loads.microbatch_seconds
        else np.inf,
        group_reduction_seconds=reductions,
        shard_shares=tuple(tuple(share.tolist()) for share in shares),
        limits=_limits(problem, assignment, loads),
    )


def path_seconds(problem: Problem, assignment: Assignment, flow: Flow) -> float:
    """Return fill and drain: the way of one average microbatch alone, there and back."""
    return sum(stage_path_seconds(problem, assignment, flow))


def stage_path_seconds(problem: Problem, assignment: Assignment, flow: Flow) -> tuple[float, ...]:
    """Return the part of each stage in `path_seconds`: the way to it and back, and its compute."""
    made = []
    for stage, unit in enumerate(flow.unit):
        group = list(assignment.groups[stage])
        first, last = assignment.ranges[stage]
        ways = edge_seconds(problem, first, sources_of(assignment, stage), group)
        seconds = ways + problem.seconds(first, last) / problem.speed[group]
        made.append(_weighed(unit, seconds))
    return tuple(made)


def hidden_seconds(problem: Problem, assignment: Assignment, flow: Flow) -> tuple[float, ...]:
    """Return by stage how long the last microbatch's gradient is still under way below it."""
    made = [0.0]
    units = flow.unit
    for stage in range(1, len(assignment.groups)):
        group = list(assignment.groups[stage - 1])
        first, last = assignment.ranges[stage - 1]
        ways = backward_edge_seconds(problem, last, group, assignment.groups[stage])
        seconds = ways + problem.backward_seconds(first, last) / problem.speed[group][:, None]
        made.append(made[-1] + _weighed(units[stage], seconds))
    return tuple(made)


def _weighed(unit: Floats, seconds: Floats) -> float:
    """Return the mean by the flow; what nothing goes over does not count, even if infinite."""
    return float(np.where(unit > 0, unit * np.where(unit > 0, seconds, 0.0), 0.0).sum())


# --- reduction ----------------------------------------------------------------------------------


def shard_shares(problem: Problem, group: Sequence[int]) -> Floats:
    """Return the part of the parameters that each replica owns, by bandwidth; sums to 1.

    A replica's bandwidth is the least of its uplink, its downlink and its links within the group,
    since an owner exchanges its shard with all others.
    """
    members = list(group)
    if len(members) == 1:
        return np.ones(1)
    links = problem.link[np.ix_(members, members)].copy()
    np.fill_diagonal(links, 0.0)
    widths = np.minimum(
        np.minimum(problem.uplink[members], problem.downlink[members]),
        np.minimum(links.sum(axis=0), links.sum(axis=1)),
    )
    return widths / widths.sum() if widths.sum() > 0 else np.full(len(members), 1 / len(members))


def reduction_seconds(
    problem: Problem, members: Sequence[int], parameter_bytes: float, shares: Floats
) -> float:
    """Return how long the reduction of a stage takes if nothing hides it.

    Every owner receives its shard of everybody's gradient, then sends the sums to everybody: two
    phases, each as slow as the slowest replica (its uplink, its downlink, one of its links), plus
    the longest latency. A stage with one replica has nothing to reduce.
    """
    group = list(members)
    if len(group) == 1:
        return 0.0
    size = parameter_bytes * problem.terms.reduction_ratio
    owned, others = size * shares, len(group) - 1
    up, down = problem.uplink[group], problem.downlink[group]
    pairs = np.ix_(group, group)
    scatter = _transfers(np.tile(owned[None, :], (len(group), 1)), problem.bandwidth[pairs])
    gather = _transfers(np.tile(owned[:, None], (1, len(group))), problem.bandwidth[pairs])
    busiest_scatter = max(((size - owned) / up).max(), (others * owned / down).max(), scatter)
    busiest_gather = max((others * owned / up).max(), ((size - owned) / down).max(), gather)
    return float(busiest_scatter + busiest_gather + 2 * problem.latency[pairs].max())


def _transfers(sizes: Floats, bandwidth: Floats) -> float:
    """Return the seconds of the slowest of transfers at the same time, one for each pair."""
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.where(bandwidth > 0, sizes / bandwidth, np.inf)
    return float(seconds.max())


# --- change --------------------------------------------------------------------------------------


def change_fraction(problem: Problem, assignment: Assignment) -> float:
    """Return the mean over replicas of seconds of fetching, as a fraction of the horizon."""
    seconds = problem.lacking[1]
    fetching = [
        float((seconds[list(group), last] - seconds[list(group), first]).sum())
        for (first, last), group in zip(assignment.ranges, assignment.groups, strict=True)
    ]
    return sum(fetching) / (sum(map(len, assignment.groups)) * problem.horizon_seconds)


# --- limits --------------------------------------------------------------------------------------


def _limits(problem: Problem, assignment: Assignment, loads: Loads) -> tuple[Limit, ...]:
    least = loads.microbatch_seconds * (1 - TIGHT)
    links = np.maximum(loads.link.max(axis=0), loads.link.max(axis=1))
    stages = len(assignment.ranges)
    needed = min(
        problem.memory_bytes(first, last, stage, stages)
        for stage, (first, last) in enumerate(assignment.ranges)
    )
    made: list[Limit] = []
    for i, peer in enumerate(problem.peers):
        if loads.compute[i] >= least:
            made.append("compute")
        elif loads.uplink[i] >= least:
            made.append("uplink")
        elif loads.downlink[i] >= least:
            made.append("downlink")
        elif links[i] >= least:
            made.append("link")
        else:
            made.append("memory" if peer.memory_bytes < needed else "nothing")
    return tuple(made)
