"""The founder's first plan: who hosts which stage, who feeds, how they are wired.

All members are given work. The number of stages minimises the predicted seconds per step,
`sum(stage seconds) + (M - 1) * max(stage seconds / replicas)`: fill and drain of one microbatch,
then the slowest stage group. Bandwidth is not part of this model, so it prefers the fewest stages
that fit into memory; whoever knows better says how many.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.records import (
    Completed,
    FeederPlan,
    JoinRequest,
    LayerProfile,
    Member,
    PlanBody,
    Signed,
    StagePlan,
    Training,
    clip,
)
from swarm.core.slicing import balanced_cuts, ranges_of
from swarm.errors import NoFeasiblePlan


@dataclass(frozen=True, slots=True)
class Candidate:
    """A member that may be given work: its signed record and what it said of itself."""

    record: Signed
    request: JoinRequest

    @property
    def member(self) -> Member:
        """Return which start of which peer this is."""
        return Member(self.request.peer, self.request.boot)


def first_plan(training: Training, candidates: Sequence[Candidate], stages: int = 0) -> PlanBody:
    """Return a plan for all candidates; `stages` 0 chooses their number.

    If `stages` or the manifest's cuts give the number, peers are divided evenly among stages;
    otherwise the next peer goes to the stage group that is slowest so far. Raises NoFeasiblePlan
    if there are too few peers or layers, if nobody has the data, or if a stage's state does not
    fit into the smallest peer's memory.
    """
    if not candidates:
        raise NoFeasiblePlan("no peer has joined", hint="start a peer")
    candidates = sorted(candidates, key=lambda each: each.request.peer)
    layers = candidates[0].request.layers
    seconds = _layer_seconds(candidates)
    wanted = len(training.slicing.cuts) + 1 if training.slicing.cuts else stages
    _check_feasible(training, candidates, len(layers), wanted)
    counts = [wanted] if wanted else range(1, min(len(candidates), len(layers)) + 1)
    options = [
        _option(training, seconds, len(candidates), count, even=bool(wanted)) for count in counts
    ]
    fitting = _fitting(training, candidates, options)
    step_seconds, ranges, replicas = min(fitting, key=lambda option: option[0])
    groups = _groups(candidates, replicas)
    stage_plans = tuple(
        StagePlan(
            first=first,
            last=last,
            replicas=tuple(each.member for each in group),
            shares=(1,) * len(group),
            output=layers[last - 1].output,
        )
        for (first, last), group in zip(ranges, groups, strict=True)
    )
    feeders = _feeders(candidates, groups[0])
    return PlanBody(
        members=tuple(each.record for each in candidates),
        stages=stage_plans,
        feeders=feeders,
        wiring=_even_wiring(len(feeders), [len(group) for group in groups]),
        step_seconds=step_seconds,
        completed=None,
        ended=False,
        halted="",
        reason=f"first plan: {len(candidates)} peers, {len(ranges)} stages, "
        f"{step_seconds:.3g} s per step predicted",
    )


def completing_plan(current: PlanBody, completed: Completed, *, ended: bool) -> PlanBody:
    """Return the current plan with equal roles, naming a version that all stages hold durably."""
    return _same_roles(
        current,
        completed=completed,
        ended=ended,
        halted="",
        reason=f"version {completed.version} is complete"
        + (", the run has ended" if ended else ""),
    )


def halting_plan(current: PlanBody, halted: str) -> PlanBody:
    """Return the current plan with equal roles, saying why training stands still for good."""
    halted = clip(halted)
    return _same_roles(
        current, completed=current.completed, ended=False, halted=halted, reason=halted
    )


def _same_roles(
    current: PlanBody, *, completed: Completed | None, ended: bool, halted: str, reason: str
) -> PlanBody:
    return PlanBody(
        members=current.members,
        stages=current.stages,
        feeders=current.feeders,
        wiring=current.wiring,
        step_seconds=current.step_seconds,
        completed=completed,
        ended=ended,
        halted=halted,
        reason=reason,
    )


def _layer_seconds(candidates: Sequence[Candidate]) -> list[float]:
    """Return each layer's median over peers of its seconds, forward and backward."""
    columns = zip(*(each.request.layers for each in candidates), strict=True)
    return [_median([_seconds(layer) for layer in column]) for column in columns]


def _seconds(layer: LayerProfile) -> float:
    return layer.forward_seconds + layer.backward_seconds


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _check_feasible(
    training: Training, candidates: Sequence[Candidate], layers: int, wanted: int
) -> None:
    if wanted > len(candidates):
        raise NoFeasiblePlan(
            f"{wanted} stages need {wanted} peers, {len(candidates)} have joined",
            hint="wait for more peers, or ask for fewer stages",
        )
    if wanted > layers:
        raise NoFeasiblePlan(
            f"{wanted} stages need {wanted} layers, the model has {layers}",
            hint="ask for fewer stages",
        )
    if training.slicing.cuts and training.slicing.cuts[-1] >= layers:
        raise NoFeasiblePlan(
            f"slicing.cuts {list(training.slicing.cuts)} are beyond the model's {layers} layers",
            hint="every cut is the index of a layer",
        )
    if not any(each.request.data_digest for each in candidates):
        raise NoFeasiblePlan(
            "no peer has the data", hint="start a peer where the manifest's data can be read"
        )


def state_bytes(training: Training, parameter_bytes: int) -> int:
    """Return how much memory a stage's state takes, activations not counted.

    Weights and the gradient that the optimiser gets; its moments; accumulator and reduced gradient,
    of 8 bytes per float32 parameter in exact mode."""
    exact = training.execution.determinism == "exact"
    moments = 1 if training.optimiser.name == "sgd" else 2
    return parameter_bytes * (2 + moments + (4 if exact else 2))


_Option = tuple[float, tuple[tuple[int, int], ...], list[int]]
"""Seconds per step, [first, last) of every stage, replicas of every stage."""


def _fitting(
    training: Training, candidates: Sequence[Candidate], options: Sequence[_Option]
) -> list[_Option]:
    """Return the options whose every stage fits into the smallest peer's memory."""
    layers = candidates[0].request.layers
    smallest = min(candidates, key=lambda each: each.request.memory_bytes).request

    def largest_stage(option: _Option) -> int:
        return max(
            state_bytes(training, sum(layer.parameter_bytes for layer in layers[first:last]))
            for first, last in option[1]
        )

    fitting = [each for each in options if largest_stage(each) <= smallest.memory_bytes]
    if not fitting:
        least = min(map(largest_stage, options))
        raise NoFeasiblePlan(
            f"a stage of the model takes {least} bytes of memory",
            evidence=(f"{smallest.peer} has {smallest.memory_bytes} bytes",),
            hint="ask for more stages, wait for more peers, or leave the smallest peer out",
        )
    return fitting


def _option(
    training: Training, seconds: Sequence[float], peers: int, count: int, *, even: bool
) -> _Option:
    """Return (seconds per step, ranges, replicas per stage) for a number of stages."""
    cuts = training.slicing.cuts or balanced_cuts(seconds, count)
    ranges = ranges_of(cuts, len(seconds))
    loads = [sum(seconds[first:last]) for first, last in ranges]
    if even:
        replicas = [peers // count + (stage < peers % count) for stage in range(count)]
    else:
        replicas = [1] * count
        for _ in range(peers - count):
            slowest = max(range(count), key=lambda stage: (loads[stage] / replicas[stage], -stage))
            replicas[slowest] += 1
    bottleneck = max(load / number for load, number in zip(loads, replicas, strict=True))
    step_seconds = sum(loads) + (training.microbatches_per_step - 1) * bottleneck
    return step_seconds, ranges, replicas


def _groups(candidates: Sequence[Candidate], replicas: Sequence[int]) -> list[list[Candidate]]:
    """Deal peers to stages: those that hold the data first to stage 0, which is fed."""
    ordered = sorted(candidates, key=lambda each: (not each.request.data_digest, each.request.peer))
    groups = []
    start = 0
    for number in replicas:
        groups.append(ordered[start : start + number])
        start += number
    return groups


def _feeders(
    candidates: Sequence[Candidate], first_group: Sequence[Candidate]
) -> tuple[FeederPlan, ...]:
    """Replicas of stage 0 feed if they hold the data: their inputs then stay on the machine."""
    holders = [each for each in first_group if each.request.data_digest]
    if not holders:
        holders = [each for each in candidates if each.request.data_digest]
    return tuple(FeederPlan(each.member, 1) for each in holders)


def _even_wiring(
    feeders: int, replicas: Sequence[int]
) -> tuple[tuple[tuple[float, ...], ...], ...]:
    sources = [feeders, *replicas[:-1]]
    return tuple(
        tuple((1.0 / targets,) * targets for _ in range(count))
        for count, targets in zip(sources, replicas, strict=True)
    )
