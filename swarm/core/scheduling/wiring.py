"""Which share of its microbatches each source sends to each replica of the next stage.

The rule: what is returned is consistent to the last bit of rounding. Loads and rate are computed
from the weights as they will be used (flows.py), not taken from the solver that found them.
"""

from collections.abc import Sequence

import numpy as np

from swarm.core.scheduling.flows import (
    Flow,
    Loads,
    backward_edge_seconds,
    edge_seconds,
    loads_of,
    sources_of,
    stage_limits,
)
from swarm.core.scheduling.problem import Assignment, Floats, Problem
from swarm.core.scheduling.programs import Program
from swarm.errors import NoFeasiblePlan

__all__ = [
    "NO_FLOW",
    "Flow",
    "Loads",
    "backward_edge_seconds",
    "best_flow",
    "edge_rates",
    "edge_seconds",
    "feeding_rates",
    "loads_of",
    "narrow_flow",
    "proportional_flow",
    "sources_of",
    "stage_limits",
]

NO_FLOW = 1e-9
"""Shares below this are rounding."""
FITTING_ROUNDS = 20
NO_WAY = 1e-3
"""A way that carries less than this part of what a replica takes is none."""


def best_flow(problem: Problem, assignment: Assignment, *, path_weight: float = 1.0) -> Flow:
    """Return the flow with the least `path_weight * path seconds + M * seconds per microbatch`.

    Path seconds are those of one average microbatch alone: compute, latency and transfer, forward
    and back. With `path_weight` 1 that is fill and drain plus steady state, the part of a step's
    seconds that wiring decides; with 0 the rate is the largest possible. A linear program over the
    unit flow and the seconds of the most loaded resource; solved by HiGHS.

    Of more than MOST_EDGES edges, not all are variables: each source has its nearest targets, each
    target its nearest sources, NEAREST of them, and a chain of edges over which all replicas could
    be used as much as they can compute, send and receive. The flow is then the best over these
    edges. In swarms of 200 and 500 peers (10 stages, five places) it took at most 0.3 % longer than
    the best over all edges; nothing is proven.

    Raises NoFeasiblePlan if no flow gets from the feeders to the last stage.
    """
    program = Program(problem, assignment)
    solution = program.solve(path_weight)
    if solution is None:
        raise NoFeasiblePlan(
            "the links between these stages let nothing through",
            evidence=(f"stages {[list(group) for group in assignment.groups]}",),
            hint="wait for peers that can reach each other",
        )
    return _flow_of(problem, assignment, solution)


def _flow_of(problem: Problem, assignment: Assignment, units: Sequence[Floats]) -> Flow:
    """Return weights that make these unit flows; sources without any follow the others' average."""
    shares = _normalised(units[0].sum(axis=1))
    arriving = shares
    wiring = []
    for stage, unit in enumerate(units):
        weights = np.zeros_like(unit)
        average = _normalised(unit.sum(axis=0))
        first = assignment.ranges[stage][0]
        ways = sources_of(assignment, stage), assignment.groups[stage]
        usable = np.isfinite(edge_seconds(problem, first, *ways))
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

    What a replica can take is bounded by its compute, uplink and downlink, and by its links to the
    stages before and after it. Between two stages the flow begins in proportion to what each edge
    carries, and inversely to the seconds of its way; rows and columns are scaled in turn until
    replicas get their part (iterative proportional fitting). Feeders that are replicas of stage 0
    feed themselves if all of stage 0 can.
    """
    groups, feeders = assignment.groups, assignment.feeders
    between = [edge_rates(problem, assignment, stage) for stage in range(1, len(groups))]
    limits = _linked(
        [
            stage_limits(problem, *layers)[list(group)]
            for layers, group in zip(assignment.ranges, groups, strict=True)
        ],
        between,
    )
    if set(groups[0]) <= set(feeders):
        shares = np.zeros(len(feeders))
        own = np.searchsorted(np.array(feeders), np.array(groups[0]))
        shares[own] = limits[0]
        first = np.tile(limits[0] / limits[0].sum(), (len(feeders), 1))
        first[own] = np.eye(len(groups[0]))
    else:
        rates = edge_rates(problem, assignment, 0)
        shares = feeding_rates(problem, assignment.ranges[0], groups[0], feeders)
        flow = np.minimum(rates, np.minimum(shares[:, None], limits[0][None, :]))
        first = _fitted(flow * _quickness(problem, assignment, 0), shares, limits[0])
    wiring = [first]
    for stage, rates in enumerate(between, start=1):
        before, after = limits[stage - 1], limits[stage]
        flow = np.minimum(rates, np.minimum(before[:, None], after[None, :]))
        wiring.append(_fitted(flow * _quickness(problem, assignment, stage), before, after))
    return Flow(shares / shares.sum(), tuple(wiring))


def narrow_flow(problem: Problem, assignment: Assignment, flow: Flow) -> Flow:
    """Return a flow in which everybody sends, and gets, as much as in another one, by few ways.

    Sources and targets lie side by side, those of a region together, each as wide as its part; what
    overlaps is a way (the north-west corner rule for transport problems): of n sources and m
    targets at most n + m - 1. So microbatches arrive at even distances, and few of them have to be
    under way to keep all busy: with a way from each to each they meet in queues by chance.
    """
    shares, wiring, units = flow.feeder_shares, [flow.wiring[0]], flow.unit
    for stage in range(1, len(assignment.groups)):
        unit = units[stage]
        rows = _by_place(problem, sources_of(assignment, stage))
        columns = _by_place(problem, assignment.groups[stage])
        parts = unit.sum(axis=1)[rows], unit.sum(axis=0)[columns]
        ends = [np.cumsum(part) / part.sum() for part in parts]
        begins = [end - part / part.sum() for end, part in zip(ends, parts, strict=True)]
        shared = np.minimum(ends[0][:, None], ends[1][None, :]) - np.maximum(
            begins[0][:, None], begins[1][None, :]
        )
        kept = np.where(shared > NO_WAY / max(unit.shape), shared, 0.0)
        weights = np.array(flow.wiring[stage])
        for place, row in zip(rows, kept, strict=True):
            if row.sum() > 0:
                weights[place] = 0.0
                weights[place, columns] = row / row.sum()
        wiring.append(weights)
    return Flow(shares, tuple(wiring))


def _by_place(problem: Problem, group: Sequence[int]) -> list[int]:
    """Return the places in a group, those of one region together."""
    return sorted(range(len(group)), key=lambda i: (problem.peers[group[i]].place, i))


def _quickness(problem: Problem, assignment: Assignment, stage: int) -> Floats:
    """Return the reciprocal of the seconds of each way into a stage, (sources, targets), at most
    1,000 times that of the mean; 0 where nothing gets through."""
    ways = edge_seconds(
        problem,
        assignment.ranges[stage][0],
        sources_of(assignment, stage),
        assignment.groups[stage],
    )
    usable = np.isfinite(ways)
    least = 1e-3 * float(ways.sum(where=usable) / max(int(usable.sum()), 1))
    made: Floats = usable / np.maximum(ways, max(least, 1e-12))
    return made


def _linked(limits: list[Floats], between: Sequence[Floats]) -> list[Floats]:
    """Return limits by stage that the links to the stages before and after allow; where they let
    nothing through at all, what was given."""
    made = list(limits)
    for stage, rates in enumerate(between, start=1):
        arriving = np.minimum(rates, made[stage - 1][:, None]).sum(axis=0)
        made[stage] = np.minimum(made[stage], arriving)
    for stage, rates in reversed(list(enumerate(between))):
        leaving = np.minimum(rates, made[stage + 1][None, :]).sum(axis=1)
        made[stage] = np.minimum(made[stage], leaving)
    return made if all(each.sum() > 0 for each in made) else limits


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
    sources, targets = sources_of(assignment, stage), assignment.groups[stage]
    onward = problem.bandwidth[np.ix_(sources, targets)]
    backward = problem.bandwidth[np.ix_(targets, sources)].T
    there = problem.forward_bytes(cut) / np.maximum(onward, 1e-12)
    back = problem.backward_bytes(cut) / np.maximum(backward, 1e-12)
    usable = (onward > 0) & (backward > 0)
    rates: Floats = np.where(usable, 1.0 / np.maximum(np.maximum(there, back), 1e-12), 0.0)
    return rates


def _fitted(flow: Floats, sources: Floats, targets: Floats) -> Floats:
    """Return weights near those of a flow, (sources, targets), that give targets their part."""
    rows, columns = sources / sources.sum(), targets / targets.sum()
    flow = flow / max(float(flow.max()), 1e-300)
    flow[flow.sum(axis=1) == 0] = targets
    for _ in range(FITTING_ROUNDS):
        sums = flow.sum(axis=0)
        flow *= np.divide(columns, sums, out=np.zeros_like(sums), where=sums > 0)
        flow *= (rows / np.maximum(flow.sum(axis=1), 1e-300))[:, None]
    flow[flow.sum(axis=1) == 0] = columns  # who gets nothing
    weights: Floats = flow / flow.sum(axis=1, keepdims=True)
    return weights
