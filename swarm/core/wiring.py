"""Which share of its microbatches each source sends to each replica of the next stage.

The rule: what is returned is consistent to the last bit of rounding. Loads and rate are computed
from the weights as they will be used, not taken from the solver that found them.

A *unit flow* is what becomes of one average microbatch: `flow[s][i, j]` is the probability that it
goes from source i of stage s (the feeders for stage 0, else the replicas of stage s - 1) to replica
j. The gradient returns the same way, so an edge loads both directions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from swarm.core.problem import Assignment, Floats, Problem
from swarm.errors import NoFeasiblePlan

Whole = NDArray[np.int64]

NO_FLOW = 1e-9
"""Shares below this are rounding."""
FITTING_ROUNDS = 20


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


def edge_seconds(problem: Problem, cut: int) -> Floats:
    """Return the way over a cut from i to j and of the gradient back, alone on the links, (n, n).

    Seconds; infinite where nothing gets through, 0 on the diagonal. From the feeder (cut 0) the
    way there alone counts: nobody waits for what it gets back.
    """
    there = _transfer_seconds(problem, problem.forward_bytes(cut))
    back = _transfer_seconds(problem, problem.backward_bytes(cut)).T
    return there + back if cut else np.where(np.isfinite(back), there, np.inf)


def backward_edge_seconds(problem: Problem, cut: int) -> Floats:
    """Return the gradient's part of `edge_seconds` for the edge from i to j, (n, n)."""
    return _transfer_seconds(problem, problem.backward_bytes(cut)).T


def _transfer_seconds(problem: Problem, size: float) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds: Floats = problem.latency + size / problem.bandwidth
    seconds[problem.bandwidth == 0] = np.inf
    return seconds


# --- the linear program --------------------------------------------------------------------------


def best_flow(problem: Problem, assignment: Assignment, *, path_weight: float = 1.0) -> Flow:
    """Return the flow with the least `path_weight * path seconds + M * seconds per microbatch`.

    Path seconds are those of one average microbatch alone: compute, latency and transfer, forward
    and back. With `path_weight` 1 that is fill and drain plus steady state, the part of a step's
    seconds that wiring decides; with 0 the rate is the largest possible. A linear program over the
    unit flow and the seconds of the most loaded resource; solved by HiGHS.

    Raises NoFeasiblePlan if no flow gets from the feeders to the last stage.
    """
    program = _Program(problem, assignment)
    solution = program.solve(path_weight)
    if solution is None:
        raise NoFeasiblePlan(
            "the links between these stages let nothing through",
            evidence=(f"stages {[list(group) for group in assignment.groups]}",),
            hint="wait for peers that can reach each other",
        )
    return _flow_of(problem, assignment, solution)


class _Program:
    """Variables: the unit flow of every usable edge, and T, seconds per microbatch."""

    def __init__(self, problem: Problem, assignment: Assignment) -> None:
        self._problem = problem
        self._assignment = assignment
        sources, targets, stages, paths = [], [], [], []
        for stage, group in enumerate(assignment.groups):
            first, last = assignment.ranges[stage]
            senders = np.array(sources_of(assignment, stage))
            receivers = np.array(group)
            ways = edge_seconds(problem, first)[np.ix_(senders, receivers)]
            seconds = problem.seconds(first, last) / problem.speed[receivers]
            rows, columns = np.nonzero(np.isfinite(ways))
            sources.append(senders[rows])
            targets.append(receivers[columns])
            stages.append(np.full(len(rows), stage))
            paths.append((ways + seconds)[rows, columns])
        self._source = np.concatenate(sources)
        self._target = np.concatenate(targets)
        self._stage = np.concatenate(stages)
        self._path = np.concatenate(paths)

    def solve(self, path_weight: float) -> list[Floats] | None:
        """Return the unit flow by stage, (sources, replicas); None if there is none."""
        edges = len(self._path)
        usage = self._usage()
        scale = self._scale()
        rows, columns, values, count = usage
        upper = coo_array(
            (
                np.concatenate([values / scale, np.full(count, -1.0)]),
                (
                    np.concatenate([rows, np.arange(count)]),
                    np.concatenate([columns, np.full(count, edges)]),
                ),
            ),
            shape=(count, edges + 1),
        ).tocsr()
        equal, right = self._conservation()
        microbatches = self._problem.terms.microbatches_per_step
        costs = np.append(path_weight / microbatches * self._path / scale, 1.0)
        for method in ("highs-ds", "highs-ipm"):
            answer = linprog(
                costs,
                A_ub=upper,
                b_ub=np.zeros(count),
                A_eq=equal,
                b_eq=right,
                bounds=(0, None),
                method=method,
            )
            if answer.status == 0:
                return self._by_stage(answer.x[:edges])
        return None

    def _scale(self) -> float:
        """Return about how many seconds a microbatch takes, so that numbers are about 1."""
        problem, ranges = self._problem, self._assignment.ranges
        rates = [
            float(stage_limits(problem, *layers)[list(group)].sum())
            for layers, group in zip(ranges, self._assignment.groups, strict=True)
        ]
        return 1.0 / min(rates)

    def _by_stage(self, values: Floats) -> list[Floats]:
        made = []
        for stage, group in enumerate(self._assignment.groups):
            here = self._stage == stage
            senders = np.array(sources_of(self._assignment, stage))
            unit = np.zeros((len(senders), len(group)))
            rows = np.searchsorted(senders, self._source[here])
            unit[rows, np.searchsorted(np.array(group), self._target[here])] = values[here]
            made.append(unit)
        return made

    def _usage(self) -> tuple[Whole, Whole, Floats, int]:
        """Return rows, columns and seconds per unit of flow, and the number of resources."""
        problem, count = self._problem, len(self._problem.peers)
        source, target, edges = self._source, self._target, np.arange(len(self._path))
        ranges = self._assignment.ranges
        seconds = np.array([problem.seconds(*each) for each in ranges])[self._stage]
        there = np.array([problem.forward_bytes(first) for first, _ in ranges])[self._stage]
        back = np.array([problem.backward_bytes(first) for first, _ in ranges])[self._stage]
        far = source != target
        there, back = np.where(far, there, 0.0), np.where(far, back, 0.0)
        up, down, link = problem.uplink, problem.downlink, problem.link
        links = 3 * count
        parts = [
            (target, seconds / problem.speed[target]),
            (count + source, there / up[source]),
            (count + target, back / up[target]),
            (2 * count + target, there / down[target]),
            (2 * count + source, back / down[source]),
            (links + source * count + target, there / link[source, target]),
            (links + target * count + source, back / link[target, source]),
        ]
        rows = np.concatenate([row for row, _ in parts])
        values = np.concatenate([value for _, value in parts])
        columns = np.tile(edges, len(parts))
        used = values > 0
        numbers, rows = np.unique(rows[used], return_inverse=True)
        return rows.astype(np.int64), columns[used], values[used], len(numbers)

    def _conservation(self) -> tuple[coo_array, Floats]:
        """One unit leaves the feeders; what comes to a replica goes on."""
        count, edges = len(self._problem.peers), len(self._path)
        stages = len(self._assignment.ranges)
        every = np.arange(edges)
        inner = self._stage < stages - 1
        onward = self._stage > 0
        rows = np.concatenate(
            [
                np.zeros(int((~onward).sum()), dtype=np.int64),
                1 + self._target[inner],
                1 + self._source[onward],
            ]
        )
        columns = np.concatenate([every[~onward], every[inner], every[onward]])
        values = np.concatenate(
            [
                np.ones(int((~onward).sum())),
                np.ones(int(inner.sum())),
                -np.ones(int(onward.sum())),
            ]
        )
        right = np.zeros(count + 1)
        right[0] = 1.0
        return coo_array((values, (rows, columns)), shape=(count + 1, edges + 1)).tocsr(), right


def _flow_of(problem: Problem, assignment: Assignment, units: Sequence[Floats]) -> Flow:
    """Return weights that make these unit flows; sources without any follow the others' average."""
    shares = _normalised(units[0].sum(axis=1))
    arriving = shares
    wiring = []
    for stage, unit in enumerate(units):
        weights = np.zeros_like(unit)
        average = _normalised(unit.sum(axis=0))
        first = assignment.ranges[stage][0]
        ways = np.ix_(sources_of(assignment, stage), assignment.groups[stage])
        usable = np.isfinite(edge_seconds(problem, first)[ways])
        for i, row in enumerate(unit):
            row = np.where(row > NO_FLOW, row, 0.0)
            if arriving[i] <= 0 or row.sum() <= 0:
                open_to = average * usable[i]
                row = open_to if open_to.sum() > 0 else np.ones_like(row)
            weights[i] = _normalised(row)
        wiring.append(weights)
        arriving = arriving @ weights
    return Flow(shares, tuple(wiring))


def _normalised(values: Floats) -> Floats:
    kept: Floats = np.where(values > NO_FLOW, values, 0.0)
    made: Floats = kept / kept.sum()
    return made


# --- without a solver -----------------------------------------------------------------------------


def proportional_flow(problem: Problem, assignment: Assignment) -> Flow:
    """Return a flow that needs no solver: to every replica in proportion to what it can take.

    What a replica can take is bounded by its compute, uplink and downlink. Between two stages
    the flow begins in proportion to what each edge carries; rows and columns are scaled in turn
    until replicas get their part (iterative proportional fitting). Feeders that are replicas of
    stage 0 feed themselves if all of stage 0 can.
    """
    groups, feeders = assignment.groups, assignment.feeders
    limits = [
        stage_limits(problem, *layers)[list(group)]
        for layers, group in zip(assignment.ranges, groups, strict=True)
    ]
    if set(groups[0]) <= set(feeders):
        shares = np.zeros(len(feeders))
        own = np.searchsorted(np.array(feeders), np.array(groups[0]))
        shares[own] = limits[0]
        first = np.tile(limits[0] / limits[0].sum(), (len(feeders), 1))
        first[own] = np.eye(len(groups[0]))
    else:
        rates = edge_rates(problem, assignment, 0)
        shares = feeding_rates(problem, assignment.ranges[0], groups[0], feeders)
        first = _fitted(rates, shares, limits[0])
    wiring = [first]
    for stage in range(1, len(groups)):
        rates = edge_rates(problem, assignment, stage)
        wiring.append(_fitted(rates, limits[stage - 1], limits[stage]))
    return Flow(shares / shares.sum(), tuple(wiring))


def feeding_rates(
    problem: Problem, layers: tuple[int, int], group: Sequence[int], feeders: Sequence[int]
) -> Floats:
    """Return microbatches per second with which each can feed stage 0 at most, (feeders,): itself
    without limit but its own, others by its uplink and links."""
    sources, size = list(feeders), max(problem.forward_bytes(0), 1e-9)
    links = problem.bandwidth[np.ix_(sources, list(group))] / size
    own = np.isinf(links)
    sent = np.minimum(np.where(own, 0.0, links).sum(axis=1), problem.uplink[sources] / size)
    rates: Floats = sent + own @ stage_limits(problem, *layers)[list(group)]
    return np.maximum(np.minimum(rates, 1e12), 1e-12)


def edge_rates(problem: Problem, assignment: Assignment, stage: int) -> Floats:
    """Return microbatches per second that each edge into a stage carries alone, at most 1e12."""
    cut = assignment.ranges[stage][0]
    ways = np.ix_(sources_of(assignment, stage), assignment.groups[stage])
    there = problem.forward_bytes(cut) / np.maximum(problem.bandwidth[ways], 1e-12)
    back = problem.backward_bytes(cut) / np.maximum(problem.bandwidth.T[ways], 1e-12)
    usable = np.isfinite(edge_seconds(problem, cut)[ways])
    rates: Floats = np.where(usable, 1.0 / np.maximum(np.maximum(there, back), 1e-12), 0.0)
    return rates


def _fitted(rates: Floats, sources: Floats, targets: Floats) -> Floats:
    """Return weights near `rates`, (sources, targets), that give targets their part."""
    rows, columns = sources / sources.sum(), targets / targets.sum()
    flow = np.minimum(rates, np.minimum(sources[:, None], targets[None, :]))
    flow[flow.sum(axis=1) == 0] = targets
    for _ in range(FITTING_ROUNDS):
        sums = flow.sum(axis=0)
        flow = flow * np.divide(columns, sums, out=np.zeros_like(sums), where=sums > 0)
        flow *= (rows / np.maximum(flow.sum(axis=1), 1e-300))[:, None]
    weights: Floats = flow / flow.sum(axis=1, keepdims=True)
    return weights


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
