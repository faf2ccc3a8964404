"""What a voter checks of a plan that a leader would propose: content, before it is decided.

The rule: it is judged by what the plan itself, the plan before and signed evidence say; the
reviewer's own observations only add to that. A refusal names the check and the figures.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from protocol.errors import RemoteProtocolError
from protocol.messages import Heartbeat
from protocol.records import (
    CONSENT_PURPOSE,
    ESTIMATES_PURPOSE,
    JOIN_REQUEST_PURPOSE,
    OBSERVATION_PURPOSE,
    Consent,
    Estimates,
    JoinRequest,
    Manifest,
    Member,
    Observation,
    PlanBody,
    PlanHeader,
    R,
    Signed,
    decode_record,
)
from protocol.signing import PeerId, verify
from swarm.core.chain import legal_council_change
from swarm.core.evidence import OBSERVERS, REPORT_MISSING
from swarm.core.roles import LINKS_FAIL, most_failing
from swarm.core.scheduling.aims import aimed, aims_of, bound_to_feed, step_seconds
from swarm.core.scheduling.arranging import window_limit
from swarm.core.scheduling.cost import predict
from swarm.core.scheduling.horizon import LONGEST_SECONDS, SHORTEST_SECONDS
from swarm.core.scheduling.planning import (
    candidates_of,
    evicted,
    is_ready,
    members_of,
    plan_by,
    stage_bytes,
    version_before,
)
from swarm.core.scheduling.problem import Assignment, Problem
from swarm.core.scheduling.rebalance import HYSTERESIS
from swarm.core.scheduling.snapshot import assignment_of, flow_of, problem_of
from swarm.core.step import ranges_of_stages, step_coordinator_of
from swarm.core.verification import JOIN_REQUEST_EPOCHS, check_plan, refusal_of

STEP_SECONDS_TOLERANCE = 0.01
QUALITY_TOLERANCE = 0.1
"""By how much a plan may be worse than the reviewer's own greedy answer."""
TOO_POOR = "quality: "
OLD_ESTIMATES = 6
"""The reviewer's own estimates may be this many numbers behind what it has told last."""


class PlanLike(Protocol):
    """A plan whose header and body are known (chain.Plan)."""

    @property
    def header(self) -> PlanHeader:
        """What was certified."""
        ...

    @property
    def body(self) -> PlanBody:
        """What everybody does."""
        ...


@dataclass(frozen=True, slots=True)
class ReviewContext:
    """What the reviewer knows besides the plan, its predecessor and the evidence."""

    manifest: Manifest
    layers: int = 0
    """The model's number of layers; 0 while it is unknown."""
    heartbeats: Mapping[PeerId, Heartbeat] = field(default_factory=dict)
    """Recent ones; whoever is not in here is believed to be as ready as the leader says."""
    boots: Mapping[PeerId, int] = field(default_factory=dict)
    """Newest boot that the reviewer has heard of each peer."""
    me: PeerId = ""
    """Who reviews."""
    estimates: Mapping[PeerId, Signed] = field(default_factory=dict)
    """The newest signed Estimates that the reviewer has of each peer, checked; its own too."""
    horizon_seconds: float = LONGEST_SECONDS
    """How long a plan is expected to last."""
    judges_quality: bool = True
    """Whether a plan has to be as good as greedy moves: not where rules are compared."""


def review(
    header: PlanHeader,
    body: PlanBody,
    evidence: Sequence[Signed],
    previous: PlanLike,
    context: ReviewContext,
) -> str:
    """Return why the plan must not follow `previous`, or "" if it is good.

    `evidence`: Observations of who is left out, Consents of who is new in the council, join
    requests of newer boots, and the Estimates by which the plan was made."""
    try:
        _check_form(header, body, previous, context)
        _check_members(body, previous, context)
        _check_moves(header, body, previous, context)
        _check_evictions(body, evidence, previous, context)
        _check_council(header, body, evidence, previous)
        estimates = _checked_estimates(body, evidence, context)
        if not _repeats(body, previous):
            _check_step_seconds(body, estimates, context)
            _check_quality(header, body, estimates, previous, context)
            if header.kind == "planned":
                _check_age(body, estimates, context)
    except RemoteProtocolError as refusal:
        return str(refusal)
    return ""


# --- check 1: well-formed ----------------------------------------------------------------------


def _check_form(
    header: PlanHeader, body: PlanBody, previous: PlanLike, context: ReviewContext
) -> None:
    check_plan(body, context.manifest, context.layers)
    lineage = previous.header.lineage
    if header.lineage not in (lineage, lineage + 1):
        raise RemoteProtocolError(f"lineage: {header.lineage} does not follow {lineage}")
    if header.lineage > lineage and header.kind != "repair":
        raise RemoteProtocolError(f"lineage: a {header.kind} plan starts lineage {header.lineage}")
    if header.lineage > lineage and header.from_step not in _complete_versions(previous.body):
        raise RemoteProtocolError(
            f"lineage: back to version {header.from_step}, which is not known to be complete"
        )
    if header.lineage == lineage and not (body.halted or body.ended):
        least = version_before(previous.header)
        if version_before(header) < least:
            raise RemoteProtocolError(
                f"from_step: {header.from_step}, the plan before went on from version {least}, and "
                f"the lineage is the same"
            )
    done = _complete_versions(body)[-1]
    if done < _complete_versions(previous.body)[-1]:
        raise RemoteProtocolError(
            f"completed: version {done}, {_complete_versions(previous.body)[-1]} was before"
        )
    steps = context.manifest.training.steps
    if body.ended and done != steps:
        raise RemoteProtocolError(f"ended: version {done} is complete, the run has {steps} steps")
    candidates = candidates_of(body)
    layers = len(next(iter(candidates.values())).request.layers)
    if body.stages[-1].last != layers:
        raise RemoteProtocolError(
            f"stages: they end at layer {body.stages[-1].last}, the members' model has {layers}"
        )
    for feeder in body.feeders:
        if not candidates[feeder.member.peer].request.data_digest:
            raise RemoteProtocolError(f"feeders: {feeder.member.peer} does not hold the data")
    for number, members in enumerate(_holders(body)):
        first, last = body.stages[number].first, body.stages[number].last
        for member in members:
            request = candidates[member.peer].request
            needed = stage_bytes(context.manifest.training, request, first, last)
            if needed > request.memory_bytes:
                raise RemoteProtocolError(
                    f"memory: stage {number} takes {needed} bytes, {member.peer} has "
                    f"{request.memory_bytes}"
                )


def _complete_versions(body: PlanBody) -> tuple[int, ...]:
    """The newest version known to be complete, and what everybody can build."""
    return (0,) if body.completed is None else (0, body.completed.version)


def _holders(body: PlanBody) -> list[list[Member]]:
    """Who holds or fetches each stage."""
    holders = [list(stage.replicas) for stage in body.stages]
    for each in body.standby:
        holders[each.stage].append(each.member)
    return holders


def _check_moves(
    header: PlanHeader, body: PlanBody, previous: PlanLike, context: ReviewContext
) -> None:
    """Within a lineage stages keep their layers, and who gets work has held them before."""
    before = previous.body
    if not before.stages or header.lineage != previous.header.lineage:
        return
    if ranges_of_stages(body) != ranges_of_stages(before):
        raise RemoteProtocolError(
            f"moves: the stages {ranges_of_stages(body)} are not those before, "
            f"{ranges_of_stages(before)}, and the lineage is the same"
        )
    waiting = {(each.member, each.stage) for each in before.standby}
    for number, stage in enumerate(body.stages):
        for member in stage.replicas:
            if member in before.stages[number].replicas:
                continue
            if (member, number) not in waiting:
                raise RemoteProtocolError(
                    f"moves: {member.peer} gets stage {number}, which it neither hosted nor "
                    f"stood by for"
                )
            heartbeat = context.heartbeats.get(member.peer)
            lineage = previous.header.lineage
            if heartbeat and not is_ready(heartbeat, member, number, lineage, version=0):
                raise RemoteProtocolError(
                    f"moves: {member.peer} is not ready for stage {number}: it is "
                    f"{heartbeat.state} at stage {heartbeat.stage}, boot {heartbeat.boot}, "
                    f"lineage {heartbeat.lineage}"
                )


# --- check 2: members, evictions, voters ---------------------------------------------------------


def _check_members(body: PlanBody, previous: PlanLike, context: ReviewContext) -> None:
    before = {member.peer: member.boot for member in members_of(previous.body)}
    known = candidates_of(previous.body) or candidates_of(body)
    others = list(known.values())
    epoch = previous.header.epoch
    for peer, candidate in candidates_of(body).items():
        boot = candidate.member.boot
        if before.get(peer) == boot:
            if candidate != known[peer]:
                raise RemoteProtocolError(
                    f"members: {peer} is kept, with another record or join request than before"
                )
            continue
        if boot < before.get(peer, 0):
            raise RemoteProtocolError(
                f"members: {peer} with boot {boot}, the plan before names {before[peer]}"
            )
        asked = candidate.request.epoch
        if not asked <= epoch <= asked + JOIN_REQUEST_EPOCHS:
            raise RemoteProtocolError(
                f"members: {peer} asked to join in epoch {asked}, this plan follows {epoch}"
            )
        refusal = refusal_of(candidate, others, context.manifest)
        if refusal:
            raise RemoteProtocolError(f"members: {peer}: {refusal}")


def _check_evictions(
    body: PlanBody, evidence: Sequence[Signed], previous: PlanLike, context: ReviewContext
) -> None:
    """Whoever is left out has been given up by enough observers, by itself, or by a newer boot."""
    before = previous.header
    leaving = evicted(previous.body, body)
    kept = {member.peer for member in members_of(previous.body) if member not in leaving}
    coordinator = step_coordinator_of(previous.body) if previous.body.stages else ""
    boots = _newest_boots(body, evidence, context)
    words: dict[Member, dict[PeerId, str]] = {}
    for signer, seen in _opened(evidence, OBSERVATION_PURPOSE, Observation):
        if (seen.run, seen.generation, seen.epoch) == (before.run, before.generation, before.epoch):
            words.setdefault(seen.suspect, {})[signer] = seen.reason
    for member in leaving:
        observers = words.get(member, {})
        given_up = (
            boots.get(member.peer, 0) > member.boot
            or member.peer in observers
            or observers.get(coordinator) == REPORT_MISSING
        )
        counted = [peer for peer in observers if peer in kept or peer in before.council]
        needed = min(OBSERVERS, max(1, len(kept)))
        if not given_up and len(counted) < needed:
            raise RemoteProtocolError(
                f"evictions: {member.peer}, boot {member.boot}, is left out on the word of "
                f"{len(counted)} observers, {needed} are needed"
            )


def _newest_boots(
    body: PlanBody, evidence: Sequence[Signed], context: ReviewContext
) -> dict[PeerId, int]:
    """Return the newest boot of each peer that the reviewer has heard of or that has asked to
    join."""
    boots = dict(context.boots)
    requests = _opened((*body.requests, *evidence), JOIN_REQUEST_PURPOSE, JoinRequest)
    for signer, request in requests:
        if request.run == context.manifest.run and signer == request.peer:
            boots[signer] = max(boots.get(signer, 0), request.boot)
    return boots


def _check_council(
    header: PlanHeader, body: PlanBody, evidence: Sequence[Signed], previous: PlanLike
) -> None:
    """The change is legal; who is new in the council is a member and has consented."""
    before = previous.header
    refusal = legal_council_change(before.council, header.council)
    if refusal:
        raise RemoteProtocolError(f"council: {refusal}")
    consents = {
        signer
        for signer, consent in _opened(evidence, CONSENT_PURPOSE, Consent)
        if (consent.run, consent.generation, consent.epoch)
        == (before.run, before.generation, before.epoch)
    }
    members = {member.peer for member in members_of(body)}
    for peer in header.council:
        if peer in before.council:
            continue
        if peer not in members:
            raise RemoteProtocolError(f"council: {peer} is to vote and is no member")
        if peer not in consents:
            raise RemoteProtocolError(
                f"council: {peer} is to vote and has not consented in epoch {before.epoch}"
            )


def _opened(evidence: Sequence[Signed], purpose: str, kind: type[R]) -> Iterator[tuple[PeerId, R]]:
    """Yield signer and record of the evidence that is a `kind`; what is signed for another
    purpose, or not at all, is no evidence of this kind."""
    for signed in evidence:
        if verify(signed.signer, purpose, signed.payload, signed.signature):
            yield signed.signer, decode_record(signed.payload, kind)


# --- checks 3 to 5: the estimates, the claim, the quality -----------------------------------------


def _checked_estimates(
    body: PlanBody, evidence: Sequence[Signed], context: ReviewContext
) -> dict[PeerId, Signed]:
    """Return the estimates by which a plan was made: one of each member at most, of its boot."""
    boots = {member.peer: member.boot for member in members_of(body)}
    found: dict[PeerId, Signed] = {}
    sequences: dict[PeerId, int] = {}
    for signed in evidence:
        if not verify(signed.signer, ESTIMATES_PURPOSE, signed.payload, signed.signature):
            continue
        told = decode_record(signed.payload, Estimates)
        if told.peer != signed.signer:
            raise RemoteProtocolError(f"estimates: {signed.signer} signs those of {told.peer}")
        if told.run != context.manifest.run:
            raise RemoteProtocolError(f"estimates: {signed.signer} signs for another run")
        if boots.get(told.peer) == told.boot and told.sequence >= sequences.get(told.peer, 0):
            found[told.peer], sequences[told.peer] = signed, told.sequence
    return found


def _check_age(body: PlanBody, estimates: Mapping[PeerId, Signed], context: ReviewContext) -> None:
    """The leader knows about what the reviewer has told of itself. What others have told may be on
    its way, or cannot reach the leader; and a repair waits for nothing."""
    own, given = context.estimates.get(context.me), estimates.get(context.me)
    if own is None:
        return
    said = decode_record(own.payload, Estimates)
    number = decode_record(given.payload, Estimates).sequence if given is not None else 0
    is_member = Member(context.me, said.boot) in members_of(body)
    if is_member and number < said.sequence - OLD_ESTIMATES:
        raise RemoteProtocolError(
            f"estimates: those of {context.me} have number {number}, it has told number "
            f"{said.sequence}"
        )


def _repeats(body: PlanBody, previous: PlanLike) -> bool:
    """Return whether a plan gives the same work and claims what was claimed of it before, as one
    does that names a version complete or halts the run."""
    before = previous.body
    return (
        (body.stages, body.feeders, body.wiring, body.step_seconds)
        == (before.stages, before.feeders, before.wiring, before.step_seconds)
        and (body.members, body.standby) == (before.members, before.standby)
    ) or not body.feeders


def _check_step_seconds(
    body: PlanBody, estimates: Mapping[PeerId, Signed], context: ReviewContext
) -> None:
    problem = problem_of(context.manifest.training, body.members, body.requests, estimates)
    _check_windows(problem, body)
    expected = predict(problem, assignment_of(body), flow_of(body)).kept_seconds
    if not abs(body.step_seconds - expected) <= STEP_SECONDS_TOLERANCE * expected:
        raise RemoteProtocolError(
            f"step_seconds: the plan claims {body.step_seconds:.4g} s, the model says "
            f"{expected:.4g} s"
        )


def _check_windows(problem: Problem, body: PlanBody) -> None:
    """No replica takes more microbatches than a step has, nor than its memory holds, if it takes
    more at all than a pipeline needs that takes backward before forward."""
    most = problem.terms.microbatches_per_step
    groups = assignment_of(body).groups
    for stage, (plan, group) in enumerate(zip(body.stages, groups, strict=True)):
        limit = window_limit(problem, (plan.first, plan.last), group)
        if plan.window > max(limit, len(body.stages) - stage + 1):
            raise RemoteProtocolError(
                f"window: stage {stage} takes {plan.window} microbatches at a time; a step has "
                f"{most}, and memory is enough for {limit}"
            )


def _check_quality(
    header: PlanHeader,
    body: PlanBody,
    estimates: Mapping[PeerId, Signed],
    previous: PlanLike,
    context: ReviewContext,
) -> None:
    """A planned plan leads to roles that are about as good as what greedy moves make of the plan
    before; if nobody loses its work by it, as what placing newcomers makes: improvements may wait.
    Members whose links keep failing are not counted on, as long as they are few."""
    before = previous.body
    same_lineage = header.lineage == previous.header.lineage and before.stages
    if header.kind != "planned" or not same_lineage or not context.judges_quality:
        return
    failing = [each for each in body.standby if each.reason == LINKS_FAIL]
    if len(failing) > most_failing(len(body.members)):
        raise RemoteProtocolError(
            f"links: those of {len(failing)} of {len(body.members)} members are said to fail"
        )
    refusals = []
    for horizon in (context.horizon_seconds, SHORTEST_SECONDS, LONGEST_SECONDS):
        refusal = _poverty(body, estimates, previous, context, horizon)
        if not refusal:
            return
        refusals.append(refusal)
    raise RemoteProtocolError(refusals[0])


def _poverty(
    body: PlanBody,
    estimates: Mapping[PeerId, Signed],
    previous: PlanLike,
    context: ReviewContext,
    horizon_seconds: float,
) -> str:
    """Return how much better greedy moves would be, if plans last for so long; "" if hardly. Who
    has just come knows less than others of how long they do."""
    problem, index, greedy = _greedy(body, estimates, previous, context, horizon_seconds)
    if greedy is None:
        return ""
    mine = step_seconds(problem, greedy)
    theirs = step_seconds(problem, aims_of(problem, body, index))
    if theirs <= mine * (1 + QUALITY_TOLERANCE):
        return ""
    return f"{TOO_POOR}the plan leads to {theirs:.4g} s per step, greedy moves to {mine:.4g} s"


def _greedy(
    body: PlanBody,
    estimates: Mapping[PeerId, Signed],
    previous: PlanLike,
    context: ReviewContext,
    horizon_seconds: float,
) -> tuple[Problem, dict[Member, int], Assignment | None]:
    """Return the problem of the members of a plan, their numbers in it, and what greedy moves make
    of the plan before; None if that has nobody left for a stage, or to feed."""
    before, training = previous.body, context.manifest.training
    problem = problem_of(
        training,
        body.members,
        body.requests,
        estimates,
        before=before,
        horizon_seconds=horizon_seconds,
    )
    index = {each: i for i, each in enumerate(members_of(body))}
    workers = tuple(
        tuple(sorted(index[each] for each in stage.replicas if each in index))
        for stage in before.stages
    )
    now = aims_of(problem, before, index)
    if not all(now.groups) or not now.feeders:
        return problem, index, None
    failing = {index[each.member] for each in body.standby if each.reason == LINKS_FAIL}
    failing |= bound_to_feed(problem, workers)
    moves = any(
        not set(group) <= set(after)
        for group, after in zip(workers, assignment_of(body).groups, strict=True)
    )
    least_gain = HYSTERESIS if moves else math.inf
    greedy = aimed(problem, now, workers=workers, excluded=failing, least_gain=least_gain)
    return problem, index, greedy


def is_too_poor(refusal: str) -> bool:
    """Return whether a plan was refused since the reviewer knows a better one."""
    return refusal.startswith(TOO_POOR)


def better_plan(
    body: PlanBody, evidence: Sequence[Signed], previous: PlanLike, context: ReviewContext
) -> PlanBody | None:
    """Return a plan that leads to the reviewer's own greedy answer, for the leader to aim at.

    Raises RemoteProtocolError as `review` would."""
    estimates = _checked_estimates(body, evidence, context)
    problem, _, greedy = _greedy(body, estimates, previous, context, context.horizon_seconds)
    if greedy is None:
        return None
    candidates = list(candidates_of(body).values())
    return plan_by(problem, candidates, greedy, programs=False)
