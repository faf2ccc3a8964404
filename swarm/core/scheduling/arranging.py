"""What a plan says beyond who does what: shares, wiring, windows, and the seconds of a step.

The rule: replicas keep the order of the plan, figures come from the problem alone, and what is
claimed is predicted from the figures as they are written, rounded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from protocol.records import FeederPlan, Member, StagePlan, TensorSpec
from swarm.core.scheduling.cost import Prediction, predict, stage_path_seconds
from swarm.core.scheduling.problem import Assignment, Problem
from swarm.core.scheduling.wiring import NO_FLOW, Flow, best_flow, narrow_flow, proportional_flow
from swarm.errors import NoFeasiblePlan

MAX_EDGES = 20_000
"""Of more possible ways of microbatches no linear program is made."""
WORTH = 0.98
"""A linear program's wiring is taken if a step takes less than this part of the time: the other
one uses more ways, so that it adapts."""
WIDER = 1.005
"""Few ways are used unless a step takes more than this many times as long."""
FEW = 4
"""Of a stage with fewer replicas every way is used: they can shift load between them."""
SLACK = 2.5
"""So many times as many microbatches are let in as would do if they came evenly: where replicas of
unlike speeds feed each other they do not, and who runs out of work makes up for it never."""
ROUNDING = 1e-6
SHARE_UNITS = 64
SHARD_UNITS = 1000

Wiring = tuple[tuple[tuple[float, ...], ...], ...]


@dataclass(frozen=True)
class Arrangement:
    """The part of a plan that follows from who does what."""

    stages: tuple[StagePlan, ...]
    feeders: tuple[FeederPlan, ...]
    wiring: Wiring
    step_seconds: float


def arranged(
    problem: Problem,
    ranges: Sequence[tuple[int, int]],
    groups: Sequence[Sequence[Member]],
    feeders: Sequence[Member],
    outputs: Sequence[TensorSpec],
    *,
    programs: bool,
) -> Arrangement:
    """Return what a plan says of these roles; `outputs` are what each layer sends on.

    With `programs` the wiring may come from a linear program. Who has no share does not feed.
    Raises NoFeasiblePlan if nothing gets through."""
    index = {peer.id: i for i, peer in enumerate(problem.peers)}
    ordered = [sorted(index[each.peer] for each in group) for group in groups]
    assignment = Assignment(
        tuple(ranges),
        tuple(map(tuple, ordered)),
        tuple(sorted(index[each.peer] for each in feeders)),
    )
    flow = _flow(problem, assignment, programs)
    feeding, shares = _shares(assignment, flow)
    flow = Flow(shares / shares.sum(), (flow.wiring[0][feeding], *flow.wiring[1:]))
    assignment = replace(assignment, feeders=tuple(assignment.feeders[i] for i in feeding))
    prediction = predict(problem, assignment, flow)
    if not math.isfinite(prediction.kept_seconds):
        raise NoFeasiblePlan(
            "the links between these stages let nothing through",
            evidence=(f"groups {[list(group) for group in assignment.groups]}",),
            hint="wait for peers that can reach each other",
        )
    places = [
        {peer: i for i, peer in enumerate(group)}
        for group in (assignment.feeders, *assignment.groups)
    ]
    feeders = [each for each in feeders if index[each.peer] in places[0]]
    rows = [
        [places[k][index[each.peer]] for each in members]
        for k, members in enumerate((feeders, *groups))
    ]
    return Arrangement(
        stages=_stages(problem, assignment, prediction, groups, rows[1:], outputs),
        feeders=tuple(
            FeederPlan(member, int(shares[row]))
            for member, row in zip(feeders, rows[0], strict=True)
        ),
        wiring=tuple(
            tuple(map(tuple, matrix[np.ix_(rows[k], rows[k + 1])].tolist()))
            for k, matrix in enumerate(flow.wiring)
        ),
        step_seconds=prediction.kept_seconds,
    )


def unfed(
    ranges: Sequence[tuple[int, int]],
    groups: Sequence[Sequence[Member]],
    outputs: Sequence[TensorSpec],
) -> Arrangement:
    """Return what a plan says that halts the run since nobody has the data: nothing flows."""
    sizes = [0, *map(len, groups)]
    return Arrangement(
        stages=tuple(
            StagePlan(first, last, tuple(group), (1,) * len(group), outputs[last - 1])
            for (first, last), group in zip(ranges, groups, strict=True)
        ),
        feeders=(),
        wiring=tuple(
            ((1.0 / sizes[k + 1],) * sizes[k + 1],) * sizes[k] for k in range(len(groups))
        ),
        step_seconds=0.0,
    )


def window_limit(problem: Problem, layers: tuple[int, int], group: Sequence[int]) -> int:
    """Return for how many microbatches every replica of a stage has the memory; a step's if they
    keep nothing."""
    first, last = layers
    kept = sum(layer.activation_bytes for layer in problem.layers[first:last])
    most = problem.terms.microbatches_per_step
    if not kept:
        return most
    memory = min(problem.peers[peer].memory_bytes for peer in group)
    state = problem.terms.state_ratio * problem.parameter_bytes(first, last)
    return min(most, int((memory - state) // kept))


@lru_cache(maxsize=16)
def _flow(problem: Problem, assignment: Assignment, programs: bool) -> Flow:
    """Return the wiring that is worth its price."""
    simple = proportional_flow(problem, assignment)
    if min(map(len, assignment.groups)) >= FEW:
        narrow = narrow_flow(problem, assignment, simple)
        seconds = [predict(problem, assignment, flow).kept_seconds for flow in (narrow, simple)]
        simple = narrow if seconds[0] <= WIDER * seconds[1] else simple
    sizes = [len(assignment.feeders), *map(len, assignment.groups)]
    if not programs or sum(a * b for a, b in pairwise(sizes)) > MAX_EDGES:
        return simple
    best = best_flow(problem, assignment)
    seconds = [predict(problem, assignment, flow).kept_seconds for flow in (best, simple)]
    return best if seconds[0] < WORTH * seconds[1] else simple


def _shares(
    assignment: Assignment, flow: Flow
) -> tuple[list[int], np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    """Return which of the feeders feed, and their shares as whole numbers."""
    largest = float(flow.feeder_shares.max())
    feeding = [i for i in range(len(assignment.feeders)) if flow.feeder_shares[i] > NO_FLOW]
    units = np.round(flow.feeder_shares[feeding] / largest * SHARE_UNITS)
    return feeding, np.maximum(units, 1.0)


def _stages(
    problem: Problem,
    assignment: Assignment,
    prediction: Prediction,
    groups: Sequence[Sequence[Member]],
    rows: Sequence[Sequence[int]],
    outputs: Sequence[TensorSpec],
) -> tuple[StagePlan, ...]:
    windows = _windows(problem, assignment, prediction)
    made = []
    for stage, (first, last) in enumerate(assignment.ranges):
        shards = prediction.shard_shares[stage]
        made.append(
            StagePlan(
                first=first,
                last=last,
                replicas=tuple(groups[stage]),
                shares=tuple(max(1, round(SHARD_UNITS * shards[row])) for row in rows[stage]),
                output=outputs[last - 1],
                window=windows[stage],
            )
        )
    return tuple(made)


def _windows(problem: Problem, assignment: Assignment, prediction: Prediction) -> list[int]:
    """Return by stage how many microbatches the replica with the most takes at the same time.

    `SLACK` times as many as come to it while one is under way from here to the end and back
    (Little's law), and one more; as memory allows; not fewer than 1F1B keeps, which memory was
    checked for."""
    path = stage_path_seconds(problem, assignment, prediction.flow)
    stages = len(assignment.ranges)
    rate = prediction.microbatches_per_second
    windows = []
    for stage, (layers, group) in enumerate(zip(assignment.ranges, assignment.groups, strict=True)):
        least = stages - stage + 1
        wanted = least
        if math.isfinite(rate):
            most = float(prediction.flow.unit[stage].sum(axis=0).max())
            wanted = math.ceil(SLACK * rate * most * sum(path[stage:]) - ROUNDING) + 1
        windows.append(max(least, min(wanted, window_limit(problem, layers, group))))
    return windows
