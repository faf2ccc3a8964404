"""What flows of microbatches are, what they occupy, and how long each way takes.

The rule: everything is computed from the weights as they are used, not taken from the solver that
found them.

A *unit flow* is what becomes of one average microbatch: `flow[s][i, j]` is the probability that it
goes from source i of stage s (the feeders for stage 0, else the replicas of stage s - 1) to replica
j. The gradient returns the same way, so an edge loads both directions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swarm.core.scheduling.problem import Assignment, Floats, Problem


@dataclass(frozen=True)
class Flow:
    """How microbatches go through an assignment."""

    feeder_shares: Floats
    """By feeder, (feeders,); sums to 1."""
    wiring: tuple[Floats, ...]
    """By stage, (sources, replicas); each row sums to 1."""

    @property
    def unit(self) -> tuple[Floats, ...]:
        """Return the unit flow of every stage, (sources, replicas); sums to 1."""
        made = []
        arriving = self.feeder_shares
        for weights in self.wiring:
            made.append(arriving[:, None] * weights)
            arriving = made[-1].sum(axis=0)
        return tuple(made)


@dataclass(frozen=True)
class Loads:
    """Seconds for which one average microbatch occupies everything that it passes."""

    compute: Floats
    """By peer, (n,)."""
    uplink: Floats
    downlink: Floats
    link: Floats
    """By directed pair, (n, n)."""

    @property
    def microbatch_seconds(self) -> float:
        """Return the largest: the reciprocal of the rate."""
        parts = (self.compute, self.uplink, self.downlink, self.link)
        return max(float(part.max()) for part in parts)


def sources_of(assignment: Assignment, stage: int) -> tuple[int, ...]:
    """Return who sends to a stage."""
    return assignment.groups[stage - 1] if stage else assignment.feeders


def loads_of(problem: Problem, assignment: Assignment, flow: Flow) -> Loads:
    """Return what a flow occupies. Infinite where it uses a link through which nothing gets."""
    count = len(problem.peers)
    compute = np.zeros(count)
    sent = np.zeros((count, count))
    for stage, unit in enumerate(flow.unit):
        group = list(assignment.groups[stage])
        first, last = assignment.ranges[stage]
        compute[group] += unit.sum(axis=0) * problem.seconds(first, last) / problem.speed[group]
        ways = np.ix_(sources_of(assignment, stage), group)
        sent[ways] += unit * problem.forward_bytes(first)
        sent.T[ways] += unit * problem.backward_bytes(first)
    np.fill_diagonal(sent, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        link = np.where(sent > 0, sent / problem.link, 0.0)
    up, down = sent.sum(axis=1) / problem.uplink, sent.sum(axis=0) / problem.downlink
    return Loads(compute, up, down, link)


def edge_seconds(
    problem: Problem, cut: int, sources: Sequence[int], targets: Sequence[int]
) -> Floats:
    """Return the way over a cut from each source to each target and of the gradient back, alone on
    the links, (sources, targets).

    Seconds; infinite where nothing gets through, 0 to oneself. From the feeder (cut 0) the way
    there alone counts: nobody waits for what it gets back.
    """
    there = _transfer_seconds(problem, problem.forward_bytes(cut), sources, targets)
    back = backward_edge_seconds(problem, cut, sources, targets)
    return there + back if cut else np.where(np.isfinite(back), there, np.inf)


def backward_edge_seconds(
    problem: Problem, cut: int, sources: Sequence[int], targets: Sequence[int]
) -> Floats:
    """Return the gradient's part of `edge_seconds`, (sources, targets)."""
    return _transfer_seconds(problem, problem.backward_bytes(cut), targets, sources).T


def _transfer_seconds(
    problem: Problem, size: float, senders: Sequence[int], receivers: Sequence[int]
) -> Floats:
    ways = np.ix_(senders, receivers)
    bandwidth = problem.bandwidth[ways]
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds: Floats = problem.latency[ways] + size / bandwidth
    seconds[bandwidth == 0] = np.inf
    return seconds


def stage_limits(problem: Problem, first: int, last: int) -> Floats:
    """Return microbatches per second that each peer could do of a stage at most, (n,).

    By compute, uplink and downlink alone, everything else being free. A bound: in stage 0 whoever
    has the data may feed itself.
    """
    onward = last < len(problem.layers)
    there_in, back_in = problem.forward_bytes(first), problem.backward_bytes(first)
    there_out = problem.forward_bytes(last) if onward else 0.0
    back_out = problem.backward_bytes(last) if onward else 0.0
    received = np.full(len(problem.peers), there_in)
    if first == 0:
        received[list(problem.data_holders)] = 0.0
    busiest = np.maximum(
        problem.seconds(first, last) / problem.speed,
        np.maximum(
            (there_out + back_in) / problem.uplink, (received + back_out) / problem.downlink
        ),
    )
    limits: Floats = 1.0 / np.maximum(busiest, 1e-12)
    return limits
