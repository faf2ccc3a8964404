"""Who should do what: the roles that a plan leads to, by greedy moves and the cost model.

The rule: no linear program and no chance, so that leader and reviewers who have the same problem
aim at the same roles. Stages keep their layers.

A peer *aims* at a stage if it works there or stands by for it without a reason not to work.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from protocol.records import Member, PlanBody
from swarm.core.scheduling.cost import Prediction, predict
from swarm.core.scheduling.problem import Assignment, Problem, Standby
from swarm.core.scheduling.rebalance import HYSTERESIS, rebalanced, stage_seconds
from swarm.core.scheduling.regrouping import changed, idle
from swarm.core.scheduling.starts import Groups, fits
from swarm.core.scheduling.wiring import proportional_flow

WORSE = 1.001
"""A newcomer by which a step takes longer than this many times as long stands by."""
ROUNDING = 1e-6
MOVE_GAIN = 0.002
"""What each of several moves has to gain: in a large stage one replica is a small part."""


def aimed(
    problem: Problem,
    assignment: Assignment,
    *,
    workers: Groups,
    excluded: Collection[int] = (),
    least_gain: float = HYSTERESIS,
) -> Assignment:
    """Return the roles to aim at: newcomers placed, then greedy moves if with all of them a step is
    shorter by `least_gain`, a fraction; with an infinite one newcomers placed alone.

    `assignment` has who aims at a stage already in its groups. `workers`: who works in each stage
    now; one of them stays there until others are ready. Whoever is `excluded` gets nothing.
    """
    placed = _filled(problem, _placed(problem, assignment, frozenset(excluded)), excluded)
    if math.isinf(least_gain):
        return placed
    benched = {each.peer for each in placed.standby if each.reason}
    staying = {*benched, *excluded}
    moved, made = rebalanced(
        problem, placed, hysteresis=MOVE_GAIN, workers=workers, excluded=staying
    )
    if made and step_seconds(problem, moved) < step_seconds(problem, placed) * (1 - least_gain):
        return moved
    return placed


def proportional(problem: Problem, assignment: Assignment) -> Prediction:
    """Return the prediction with the wiring that needs no linear program."""
    return _proportional(problem, assignment)


@lru_cache(maxsize=32)
def _proportional(problem: Problem, assignment: Assignment) -> Prediction:
    return predict(problem, assignment, proportional_flow(problem, assignment))


def step_seconds(problem: Problem, assignment: Assignment) -> float:
    """Return seconds per step with that wiring, the price of change included."""
    return proportional(problem, assignment).step_seconds


def _placed(problem: Problem, assignment: Assignment, excluded: frozenset[int]) -> Assignment:
    """Give whoever has no work the slowest stage that it fits into, the fastest peer first, unless
    a step would take longer with it. Stages with too few replicas come first, whatever it costs."""
    groups, reasons = assignment.groups, {each.peer: each.reason for each in assignment.standby}
    order = sorted(idle(problem, groups), key=lambda peer: (-problem.peers[peer].speed, peer))
    made = assignment
    for peer in order:
        if peer in excluded:
            continue
        reasons[peer] = ""
        stage = _slowest(problem, made, peer)
        if stage is None:
            fitting = [k for k in range(len(groups)) if fits(problem, peer, made.ranges, k)]
            reasons[peer] = "" if fitting else "its memory is too small for any stage"
            continue
        grown = _with(problem, made, peer, stage)
        before = proportional(problem, made).kept_seconds
        after = proportional(problem, grown).kept_seconds
        if after <= before * WORSE or len(made.groups[stage]) < problem.terms.min_replicas:
            made = grown
        else:
            reasons[peer] = (
                f"with it in stage {stage} a step would take {after:.4g} s, without {before:.4g} s"
            )
    standby = tuple(Standby(i, reasons.get(i, "")) for i in idle(problem, made.groups))
    return replace(made, standby=standby)


def _filled(problem: Problem, assignment: Assignment, excluded: Collection[int]) -> Assignment:
    """Move somebody to each stage with too few replicas from one with more than enough, whatever it
    costs: whoever a step suffers least without. A stage that has lost its last replica stops all.
    """
    least, groups = problem.terms.min_replicas, assignment.groups
    for stage, group in enumerate(groups):
        moves = [
            changed(groups, ((other, peer, None), (stage, None, peer)))
            for other, spare in enumerate(groups)
            for peer in spare
            if len(group) < least < len(spare)
            and peer not in excluded
            and fits(problem, peer, assignment.ranges, stage)
        ]
        if moves:
            made = [replace(assignment, groups=each, feeders=fed(problem, each)) for each in moves]
            best = min(made, key=lambda each: step_seconds(problem, each))
            return _filled(problem, best, excluded)
    return assignment


def _slowest(problem: Problem, assignment: Assignment, peer: int) -> int | None:
    """Return the slowest stage that has room and that a peer has the memory for."""
    ranges, groups = assignment.ranges, assignment.groups
    options = [
        stage
        for stage, group in enumerate(groups)
        if len(group) < problem.replica_limit and fits(problem, peer, ranges, stage)
    ]
    return max(
        options,
        key=lambda stage: (
            len(groups[stage]) < problem.terms.min_replicas,
            stage_seconds(problem, ranges[stage], groups[stage]),
            -stage,
        ),
        default=None,
    )


def _with(problem: Problem, assignment: Assignment, peer: int, stage: int) -> Assignment:
    """Return the assignment with one more replica, which feeds if stage 0 feeds itself."""
    groups = tuple(
        tuple(sorted((*group, peer))) if number == stage else group
        for number, group in enumerate(assignment.groups)
    )
    feeders = assignment.feeders
    if stage == 0 and problem.peers[peer].has_data and set(feeders) <= set(groups[0]):
        feeders = tuple(sorted({*feeders, peer}))
    standby = tuple(each for each in assignment.standby if each.peer != peer)
    return replace(assignment, groups=groups, feeders=feeders, standby=standby)


def aims_of(problem: Problem, body: PlanBody, index: Mapping[Member, int]) -> Assignment:
    """Return who aims at which stage by a plan; who is not in `index` is left out: another start of
    a peer holds nothing of what the one before did."""
    limit = problem.replica_limit
    waiting: list[list[int]] = [[] for _ in body.stages]
    reasons = {}
    for each in body.standby:
        peer = index.get(each.member)
        if peer is not None and each.reason:
            reasons[peer] = each.reason
        elif peer is not None:
            waiting[each.stage].append(peer)
    groups = []
    for stage, more in zip(body.stages, waiting, strict=True):
        working = [index[each] for each in stage.replicas if each in index]
        groups.append(tuple(sorted([*working, *more][: max(limit, len(working))])))
    busy = {peer for group in groups for peer in group}
    standby = tuple(Standby(i, reasons.get(i, "")) for i in range(len(index)) if i not in busy)
    ranges = tuple((stage.first, stage.last) for stage in body.stages)
    return Assignment(ranges, tuple(groups), fed(problem, groups), standby)


def bound_to_feed(problem: Problem, workers: Sequence[Sequence[int]]) -> frozenset[int]:
    """Return who gets no other role: all who hold the data where no replica does; else the only
    replica that does, or nobody would be left who hosts and feeds while it is on its way."""
    holders = frozenset(problem.data_holders)
    working = holders & {peer for group in workers for peer in group}
    if len(working) > 1:
        return frozenset()
    return working or holders


def fed(problem: Problem, groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return who feeds: replicas of stage 0 that hold the data, since their inputs stay on the
    machine; else other replicas that hold it; else whoever does."""
    everybody = {peer for group in groups for peer in group}
    for choice in (set(groups[0]), everybody, set(problem.data_holders)):
        feeding = tuple(peer for peer in problem.data_holders if peer in choice)
        if feeding:
            return feeding
    return ()
