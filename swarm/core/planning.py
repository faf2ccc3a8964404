"""The first plan, and what all plans are made of: stages, feeders, wiring, predicted seconds.

All members are given work, or stand by where the manifest limits the replicas of a stage. The
number of stages minimises the predicted seconds per step,
`sum(stage seconds) + (M - 1) * max(stage seconds / replicas)`: fill and drain of one microbatch,
then the slowest stage group. Bandwidth is not part of this model, so it prefers the fewest stages
that fit into memory; whoever knows better says how many.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from protocol.messages import Heartbeat
from protocol.records import (
    Completed,
    FeederPlan,
    JoinRequest,
    LayerProfile,
    Member,
    PeerRecord,
    PlanBody,
    PlanHeader,
    Signed,
    StagePlan,
    StandbyPlan,
    Training,
    clip,
    decode_record,
)
from protocol.signing import PeerId
from swarm.core.slicing import balanced_cuts, ranges_of
from swarm.errors import NoFeasiblePlan


@dataclass(frozen=True, slots=True)
class Candidate:
    """A member that may be given work: its signed record and what it said of itself."""

    record: Signed
    request: JoinRequest
    signed_request: Signed
    """The request as it was signed."""

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
    step_seconds, ranges, sizes = min(fitting, key=lambda option: option[0])
    groups = _groups(candidates, sizes)
    limit = replica_limit(training) or len(candidates)
    hosts = [[each.member for each in group[:limit]] for group in groups]
    feeders = feeders_of(candidates, hosts)
    return PlanBody(
        members=tuple(each.record for each in candidates),
        requests=tuple(each.signed_request for each in candidates),
        stages=tuple(
            stage_plan(candidates[0].request.layers, first, last, group)
            for (first, last), group in zip(ranges, hosts, strict=True)
        ),
        feeders=feeders,
        wiring=even_wiring(len(feeders), [len(group) for group in hosts]),
        standby=tuple(
            StandbyPlan(each.member, stage)
            for stage, group in enumerate(groups)
            for each in group[limit:]
        ),
        leavers=(),
        step_seconds=step_seconds,
        completed=None,
        ended=False,
        halted="",
        reason=f"first plan: {len(candidates)} peers, {len(ranges)} stages, "
        f"{step_seconds:.3g} s per step predicted",
    )


def completing_plan(current: PlanBody, completed: Completed, *, ended: bool) -> PlanBody:
    """Return the current plan with equal roles, naming a version that all stages hold durably."""
    return replace(
        current,
        leavers=(),
        completed=completed,
        ended=ended,
        halted="",
        reason=f"version {completed.version} is complete"
        + (", the run has ended" if ended else ""),
    )


def halting_plan(current: PlanBody, halted: str) -> PlanBody:
    """Return the current plan with equal roles, saying why training stands still for good."""
    halted = clip(halted)
    return replace(current, ended=False, halted=halted, reason=halted)


def candidates_of(body: PlanBody) -> dict[PeerId, Candidate]:
    """Return what the members of a plan said of themselves, in order of peer.

    Signatures are not checked again: they were before the plan was certified.
    """
    pairs = zip(body.members, body.requests, strict=True)
    found = (
        Candidate(record, decode_record(request.payload, JoinRequest), request)
        for record, request in pairs
    )
    return {each.request.peer: each for each in found}


def members_of(body: PlanBody) -> tuple[Member, ...]:
    """Return the members of a plan, in order of peer."""
    records = (decode_record(signed.payload, PeerRecord) for signed in body.members)
    return tuple(Member(record.peer, record.boot) for record in records)


def evicted(before: PlanBody, after: PlanBody) -> tuple[Member, ...]:
    """Return the members of `before` that are none of `after`, in order of peer."""
    kept = set(members_of(after))
    return tuple(member for member in members_of(before) if member not in kept)


def version_before(header: PlanHeader) -> int:
    """Return a version that the swarm had when this plan was drafted: it goes on from there.

    A planned change names the step with which it begins, which is one later."""
    return max(0, header.from_step - (header.kind == "planned"))


def is_ready(heartbeat: Heartbeat, member: Member, stage: int, lineage: int, version: int) -> bool:
    """Return whether a member says that it can take part in `stage` at once.

    `version` is the newest known: who is one behind gets there with the group's totals."""
    return (
        heartbeat.boot == member.boot
        and heartbeat.state == "ready"
        and (heartbeat.stage, heartbeat.lineage) == (stage, lineage)
        and heartbeat.version >= version - 1
    )


def predicted_step_seconds(
    training: Training, candidates: Sequence[Candidate], stages: Sequence[StagePlan]
) -> float:
    """Return the predicted seconds per step of these stages, by the model of this module.

    A layer takes the median of what all `candidates` measured.
    """
    seconds = _layer_seconds(candidates)
    loads = [sum(seconds[stage.first : stage.last]) for stage in stages]
    return _step_seconds(training, loads, [len(stage.replicas) for stage in stages])


def stage_plan(
    layers: Sequence[LayerProfile], first: int, last: int, replicas: Sequence[Member]
) -> StagePlan:
    """Return layers [first, last) hosted by `replicas`, with even shares in the reduction."""
    return StagePlan(
        first=first,
        last=last,
        replicas=tuple(replicas),
        shares=(1,) * len(replicas),
        output=layers[last - 1].output,
    )


def feeders_of(
    candidates: Sequence[Candidate], hosts: Sequence[Sequence[Member]]
) -> tuple[FeederPlan, ...]:
    """Return who feeds, in order of peer; nobody if nobody has the data.

    Replicas of stage 0 feed if they hold the data: their inputs then stay on the machine.
    Else other replicas that hold it, else any member.
    """
    holders = [each.member for each in candidates if each.request.data_digest]
    everybody = [member for group in hosts for member in group]
    for choice in (hosts[0], everybody, holders):
        feeding = sorted((each for each in holders if each in choice), key=lambda each: each.peer)
        if feeding:
            return tuple(FeederPlan(member, 1) for member in feeding)
    return ()


def even_wiring(feeders: int, replicas: Sequence[int]) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Return wiring by which every source sends equally much to all replicas of a stage."""
    sources = [feeders, *replicas[:-1]]
    return tuple(
        tuple((1.0 / targets,) * targets for _ in range(count))
        for count, targets in zip(sources, replicas, strict=True)
    )


def replica_limit(training: Training) -> int | None:
    """Return how many replicas a stage has at most; None if there is no limit."""
    return training.slicing.max_replicas or None


def state_bytes(training: Training, parameter_bytes: int) -> int:
    """Return how much memory a stage's state takes, activations not counted.

    Weights and the gradient that the optimiser gets; its moments; accumulator and reduced gradient,
    of 8 bytes per float32 parameter in exact mode."""
    exact = training.execution.determinism == "exact"
    moments = 1 if training.optimiser.name == "sgd" else 2
    return parameter_bytes * (2 + moments + (4 if exact else 2))


def stage_bytes(training: Training, request: JoinRequest, first: int, last: int) -> int:
    """Return how much memory the state of layers [first, last) takes."""
    layers = request.layers[first:last]
    return state_bytes(training, sum(layer.parameter_bytes for layer in layers))


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


_Option = tuple[float, tuple[tuple[int, int], ...], list[int]]
"""Seconds per step, [first, last) of every stage, peers of every stage."""


def _fitting(
    training: Training, candidates: Sequence[Candidate], options: Sequence[_Option]
) -> list[_Option]:
    """Return the options whose every stage fits into the smallest peer's memory."""
    smallest = min(candidates, key=lambda each: each.request.memory_bytes).request

    def largest_stage(option: _Option) -> int:
        return max(stage_bytes(training, smallest, first, last) for first, last in option[1])

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
    """Return (seconds per step, ranges, peers per stage) for a number of stages."""
    cuts = training.slicing.cuts or balanced_cuts(seconds, count)
    ranges = ranges_of(cuts, len(seconds))
    loads = [sum(seconds[first:last]) for first, last in ranges]
    limit = replica_limit(training) or peers
    if even:
        sizes = [peers // count + (stage < peers % count) for stage in range(count)]
    else:
        sizes = _sizes(loads, peers, limit)
    working = [min(size, limit) for size in sizes]
    return _step_seconds(training, loads, working), ranges, sizes


def _sizes(loads: Sequence[float], peers: int, limit: int) -> list[int]:
    """Give each further peer to the slowest stage; once all are full, to the smallest group."""
    sizes = [1] * len(loads)
    for _ in range(peers - len(loads)):
        growing = [stage for stage, size in enumerate(sizes) if size < limit]
        if growing:
            chosen = max(growing, key=lambda stage: (loads[stage] / sizes[stage], -stage))
        else:
            chosen = sizes.index(min(sizes))
        sizes[chosen] += 1
    return sizes


def _step_seconds(training: Training, loads: Sequence[float], replicas: Sequence[int]) -> float:
    bottleneck = max(load / number for load, number in zip(loads, replicas, strict=True))
    return sum(loads) + (training.microbatches_per_step - 1) * bottleneck


def _groups(candidates: Sequence[Candidate], replicas: Sequence[int]) -> list[list[Candidate]]:
    """Deal peers to stages: those that hold the data first to stage 0, which is fed."""
    ordered = sorted(candidates, key=lambda each: (not each.request.data_digest, each.request.peer))
    groups = []
    start = 0
    for number in replicas:
        groups.append(ordered[start : start + number])
        start += number
    return groups
