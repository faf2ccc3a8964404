"""The first plan, and what all plans are made of.

The first plan is a full solve's (`solved_plan`), or, where its owner says how many stages there
are, an even one, in which all members are given work, or stand by where the manifest limits the
replicas of a stage (`first_plan`). What a plan claims comes from the cost model, by the problem of
its members (snapshot.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from msgspec.structs import replace

from protocol.messages import Heartbeat
from protocol.records import (
    Completed,
    JoinRequest,
    Member,
    PeerRecord,
    PlanBody,
    PlanHeader,
    Signed,
    StandbyPlan,
    Training,
    clip,
    decode_record,
)
from protocol.signing import PeerId
from swarm.core.memo import by_identity
from swarm.core.scheduling.aims import aimed
from swarm.core.scheduling.arranging import arranged, unfed
from swarm.core.scheduling.greedy import greedy_answer
from swarm.core.scheduling.horizon import LONGEST_SECONDS
from swarm.core.scheduling.problem import Assignment, Problem
from swarm.core.scheduling.slicing import balanced_cuts, ranges_of
from swarm.core.scheduling.snapshot import problem_of
from swarm.core.scheduling.starts import fits
from swarm.errors import NoFeasiblePlan

UNLIKE = 1.5
"""Speeds differ where the fastest is so many times as fast as the slowest."""


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


def first_plan(
    training: Training,
    candidates: Sequence[Candidate],
    stages: int = 0,
    estimates: Mapping[PeerId, Signed] | None = None,
) -> PlanBody:
    """Return a plan for all candidates; `stages` 0 chooses their number.

    If `stages` or the manifest's cuts give the number, stages get equally many peers;
    otherwise the greedy answer is taken (greedy.py). Raises NoFeasiblePlan if there are too few
    peers or layers, if nobody has the data, or if a stage's state does not fit into memory.
    """
    if not candidates:
        raise NoFeasiblePlan("no peer has joined", hint="start a peer")
    candidates = sorted(candidates, key=lambda each: each.request.peer)
    layers = len(candidates[0].request.layers)
    count = len(training.slicing.cuts) + 1 if training.slicing.cuts else stages
    _check_feasible(training, candidates, layers, count)
    if not count:
        problem = problem_for(training, candidates, estimates or {})
        answer, _ = greedy_answer(problem)
        everybody = aimed(problem, answer, workers=answer.groups)
        return solved_plan(training, candidates, estimates or {}, everybody)
    problem = problem_for(training, candidates, estimates or {}, stages=count)
    seconds = [problem.seconds(layer, layer + 1) for layer in range(layers)]
    ranges = ranges_of(training.slicing.cuts or balanced_cuts(seconds, count), layers)
    _check_memory(training, candidates, ranges)
    sizes = [len(candidates) // count + (k < len(candidates) % count) for k in range(count)]
    limit = replica_limit(training) or len(candidates)
    groups = _groups(candidates, sizes, [peer.speed for peer in problem.peers])
    hosts = [[each.member for each in group[:limit]] for group in groups]
    standby = [
        StandbyPlan(each.member, stage)
        for stage, group in enumerate(groups)
        for each in group[limit:]
    ]
    body = plan_of(problem, candidates, ranges, hosts, standby, programs=True)
    return replace(body, reason=_first_reason(body))


def solved_plan(
    training: Training,
    candidates: Sequence[Candidate],
    estimates: Mapping[PeerId, Signed],
    assignment: Assignment,
) -> PlanBody:
    """Return the first plan as a solver found it for these candidates, in order of peer."""
    problem = problem_for(training, candidates, estimates)
    body = plan_by(problem, candidates, assignment, programs=True)
    return replace(body, reason=_first_reason(body))


def plan_by(
    problem: Problem,
    candidates: Sequence[Candidate],
    assignment: Assignment,
    *,
    programs: bool,
) -> PlanBody:
    """Return the plan that an assignment of these candidates, in order of peer, stands for.

    Who stands by follows the stage with the fewest hosts that fits into its memory."""
    members = [each.member for each in candidates]
    hosts = [[members[peer] for peer in group] for group in assignment.groups]
    sizes = [len(group) for group in hosts]
    standby = []
    for each in assignment.standby:
        fitting = [
            stage
            for stage in range(len(hosts))
            if fits(problem, each.peer, assignment.ranges, stage)
        ]
        if fitting:
            stage = min(fitting, key=lambda stage: (sizes[stage], stage))
            sizes[stage] += 1
            standby.append(StandbyPlan(members[each.peer], stage, clip(each.reason)))
    return plan_of(problem, candidates, assignment.ranges, hosts, standby, programs=programs)


def _first_reason(body: PlanBody) -> str:
    return (
        f"first plan: {len(body.members)} peers, {len(body.stages)} stages, "
        f"{body.step_seconds:.3g} s per step predicted"
    )


def problem_for(
    training: Training,
    candidates: Sequence[Candidate],
    estimates: Mapping[PeerId, Signed],
    *,
    before: PlanBody | None = None,
    stages: int = 0,
    horizon_seconds: float = LONGEST_SECONDS,
) -> Problem:
    """Return the problem of these members, in order of peer (snapshot.problem_of)."""
    return problem_of(
        training,
        [each.record for each in candidates],
        [each.signed_request for each in candidates],
        estimates,
        before=before,
        stages=stages,
        horizon_seconds=horizon_seconds,
    )


def plan_of(
    problem: Problem,
    candidates: Sequence[Candidate],
    ranges: Sequence[tuple[int, int]],
    hosts: Sequence[Sequence[Member]],
    standby: Sequence[StandbyPlan],
    *,
    programs: bool,
) -> PlanBody:
    """Return the plan that gives these roles; who feeds does not stand by.

    With `programs` its wiring may come from a linear program. Nobody feeds if nobody has the data:
    then nothing is predicted."""
    feeders = feeding_members(candidates, hosts)
    outputs = [layer.output for layer in candidates[0].request.layers]
    if feeders:
        made = arranged(problem, ranges, hosts, feeders, outputs, programs=programs)
    else:
        made = unfed(ranges, hosts, outputs)
    feeding = {each.member for each in made.feeders}
    return PlanBody(
        members=tuple(each.record for each in candidates),
        requests=tuple(each.signed_request for each in candidates),
        stages=made.stages,
        feeders=made.feeders,
        wiring=made.wiring,
        standby=tuple(each for each in standby if each.member not in feeding),
        leavers=(),
        step_seconds=made.step_seconds,
        completed=None,
        ended=False,
        halted="",
        reason="",
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


@by_identity
def candidates_of(body: PlanBody) -> Mapping[PeerId, Candidate]:
    """Return what the members of a plan said of themselves, in order of peer.

    Signatures are not checked again: they were before the plan was certified.
    """
    pairs = zip(body.members, body.requests, strict=True)
    found = (
        Candidate(record, decode_record(request.payload, JoinRequest), request)
        for record, request in pairs
    )
    return {each.request.peer: each for each in found}


@by_identity
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


def feeding_members(
    candidates: Sequence[Candidate], hosts: Sequence[Sequence[Member]]
) -> list[Member]:
    """Return who may feed, in order of peer; nobody if nobody has the data.

    Replicas of stage 0 feed if they hold the data: their inputs then stay on the machine.
    Else other replicas that hold it, else any member.
    """
    holders = [each.member for each in candidates if each.request.data_digest]
    everybody = [member for group in hosts for member in group]
    for choice in (hosts[0], everybody, holders):
        feeding = sorted((each for each in holders if each in choice), key=lambda each: each.peer)
        if feeding:
            return feeding
    return []


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


def _check_memory(
    training: Training, candidates: Sequence[Candidate], ranges: Sequence[tuple[int, int]]
) -> None:
    """Whoever hosts which stage, it has to fit into the smallest memory."""
    smallest = min(candidates, key=lambda each: each.request.memory_bytes).request
    largest = max(stage_bytes(training, smallest, first, last) for first, last in ranges)
    if largest > smallest.memory_bytes:
        raise NoFeasiblePlan(
            f"a stage of the model takes {largest} bytes of memory",
            evidence=(f"{smallest.peer} has {smallest.memory_bytes} bytes",),
            hint="ask for more stages, wait for more peers, or leave the smallest peer out",
        )


def _groups(
    candidates: Sequence[Candidate], replicas: Sequence[int], speeds: Sequence[float]
) -> list[list[Candidate]]:
    """Deal peers to stages: those that hold the data first to stage 0, which is fed; where all do
    and speeds differ, the fastest first, there and back along the stages."""
    have_data = all(each.request.data_digest for each in candidates)
    if have_data and max(speeds) > UNLIKE * min(speeds):
        dealt: list[list[Candidate]] = [[] for _ in replicas]
        there = range(len(replicas))
        turns = cycle((*there, *reversed(there)))
        for i in sorted(range(len(candidates)), key=lambda i: (-speeds[i], i)):
            stage = next(turn for turn in turns if len(dealt[turn]) < replicas[turn])
            dealt[stage].append(candidates[i])
        return dealt
    ordered = sorted(candidates, key=lambda each: (not each.request.data_digest, each.request.peer))
    groups = []
    start = 0
    for number in replicas:
        groups.append(ordered[start : start + number])
        start += number
    return groups
