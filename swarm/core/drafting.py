"""What the leader wants next: repairs, promotions, newcomers, moves, the council.

The rule: a repair gives work to survivors and to ready members only; everything else waits until
the newest plan is settled, and moves without loss. Pure and deterministic: the same situation
gives the same draft.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.records import Member, PlanBody
from swarm.core.ballots import Draft
from swarm.core.roles import (
    Roles,
    Situation,
    draft_of,
    employ,
    fill,
    finished,
    follow_aims,
    let_stand_by,
    part,
    pass_seconds,
    promote,
    slowest_seconds,
    survivors,
    take_in,
)
from swarm.core.scheduling.planning import (
    candidates_of,
    feeding_members,
    first_plan,
    members_of,
)
from swarm.core.step import step_coordinator_of
from swarm.errors import NoFeasiblePlan

__all__ = ["NoHolder", "Situation", "next_draft"]

RESTART_PAUSE_SECONDS = 0.1
"""What a repair takes beside the work that is under way."""
RESTART_SECONDS = 60.0
"""How long a stage without a holder waits for one to come back."""


@dataclass(frozen=True, slots=True)
class NoHolder:
    """No plan is possible yet: it waits for a peer to come back. `reason` is for people."""

    reason: str


def next_draft(situation: Situation) -> Draft | NoHolder | None:
    """Return the plan that should follow the newest one; None if that one is good.

    `body.reason` says why. Who is left out (`planning.evicted`) needs evidence in the review.
    """
    body = situation.body
    if not body.stages or body.ended or body.halted:
        return None
    try:
        return _next_draft(situation, _gone(situation))
    except NoFeasiblePlan as error:
        return NoHolder(f"{error.what} ({error.hint})")


def _next_draft(situation: Situation, gone: Mapping[Member, str]) -> Draft | NoHolder | None:
    if _rollback_wanted(situation):
        return _back(situation, gone)
    idle = situation.settled and _idle(situation.body, gone)
    if situation.lost_work or (gone and not idle):
        return _repair(situation, gone)
    if situation.version >= situation.manifest.training.steps:
        return None
    promoted = _promoted(situation, gone) if situation.promotes else None
    if promoted is not None:
        return promoted
    if situation.settled:
        return _planned(situation, gone) if situation.improves else None
    return _joined(situation, gone) if situation.pending else None


# --- who is there ----------------------------------------------------------------------------


def _gone(situation: Situation) -> dict[Member, str]:
    """Members that the next plan cannot keep: evidence is in, or a newer boot asks to join."""
    boots = {each.member.peer: each.member.boot for each in situation.joining}
    gone = {}
    for member in members_of(situation.body):
        if boots.get(member.peer, 0) > member.boot:
            gone[member] = "has started again"
        elif member in situation.gone:
            gone[member] = situation.gone[member]
    return gone


def _idle(body: PlanBody, gone: Mapping[Member, str]) -> bool:
    """Whether the newest plan, which is settled, gives no work to any of them."""
    feeding = {feeder.member for feeder in body.feeders}
    working = feeding.union(*(stage.replicas for stage in body.stages))
    return not any(member in working for member in gone)


def _rollback_wanted(situation: Situation) -> bool:
    coordinator = situation.heartbeats.get(step_coordinator_of(situation.body))
    return (
        coordinator is not None
        and coordinator.rollback >= 0
        and coordinator.epoch == coordinator.active_epoch == situation.header.epoch
    )


# --- kinds of drafts ---------------------------------------------------------------------------


def _repair(situation: Situation, gone: Mapping[Member, str]) -> Draft | NoHolder:
    roles = survivors(situation, gone)
    if situation.lost_work:
        roles.news.append(f"work was lost: {situation.lost_work}")
    part(roles)
    promote(roles, situation.version)
    known = set(roles.members)
    take_in(roles, gone)
    let_stand_by(roles, [member for member in roles.idle() if member.peer not in known])
    empty = [stage for stage, group in enumerate(roles.groups) if not group]
    if empty:
        reason = f"stage {empty[0]} has no holder"
        if situation.waited_seconds <= RESTART_SECONDS and not _all_back(situation, gone, empty):
            return NoHolder(f"{reason}: waiting for a peer to come back")
        return _rollback(situation, gone, reason)
    if not feeding_members(roles.candidates, roles.groups):
        return _without_feeders(roles, situation.version, situation.header.lineage)
    return draft_of(roles, "repair", situation.version, situation.header.lineage)


def _promoted(situation: Situation, gone: Mapping[Member, str]) -> Draft | None:
    """Give work to who is ready in the middle of a step, if what is left of the step takes so much
    less time with it that beginning anew costs less."""
    waiting = any(not each.reason for each in situation.body.standby)
    if not (situation.settled or situation.pending) or gone or not waiting:
        return None
    before, roles = survivors(situation, gone), survivors(situation, gone)
    promote(roles, situation.version + 1)  # others would have to fetch what they lack first
    if roles.groups == before.groups:
        return None
    problem = roles.problem
    seconds = [slowest_seconds(each, problem) for each in (before, roles)]
    saved = situation.step_left_seconds * (1.0 - seconds[1] / seconds[0])
    if saved <= RESTART_PAUSE_SECONDS + pass_seconds(roles, problem):
        return None
    return draft_of(roles, "repair", situation.version, situation.header.lineage)


def _joined(situation: Situation, gone: Mapping[Member, str]) -> Draft | None:
    """While the newest plan waits for the end of the step, newcomers get into the one that takes
    its place, so that they can fetch what they need."""
    roles = survivors(situation, gone)
    take_in(roles, gone)
    if set(roles.members) == set(candidates_of(situation.body)):
        return None
    (situation.place or follow_aims)(roles)
    return draft_of(roles, "planned", situation.version + 1, situation.header.lineage)


def _without_feeders(roles: Roles, from_step: int, lineage: int) -> Draft | NoHolder:
    reason = "no member has the data"
    if roles.situation.waited_seconds <= RESTART_SECONDS:
        return NoHolder(f"{reason}: waiting for a peer to come back")
    return draft_of(roles, "repair", from_step, lineage, halted=reason)


def _all_back(situation: Situation, gone: Mapping[Member, str], stages: Sequence[int]) -> bool:
    """Whether all who had a stage have started again, so that nobody is worth waiting for."""
    back = {each.member.peer for each in situation.joining if each.member not in gone}
    body = situation.body
    had = {member.peer for stage in stages for member in body.stages[stage].replicas}
    return had <= back


def _back(situation: Situation, gone: Mapping[Member, str]) -> Draft | NoHolder:
    """Back to the complete version; where that cannot be had, to the beginning after a while, or
    once more with those who have come meanwhile."""
    lost = situation.heartbeats[step_coordinator_of(situation.body)].rollback
    completed = situation.body.completed
    tried = completed is not None and situation.header.from_step == completed.version >= lost
    if completed is None or not tried:
        return _rollback(situation, gone, "nobody holds the step in hand any more")
    reason = f"nobody holds version {completed.version}, which is complete"
    if situation.joining or gone:
        return _rollback(situation, gone, reason)
    if situation.waited_seconds <= RESTART_SECONDS:
        return NoHolder(f"{reason}: waiting for a peer to come back")
    return _rollback(situation, gone, reason, to_beginning=True)


def _rollback(
    situation: Situation, gone: Mapping[Member, str], why: str, *, to_beginning: bool = False
) -> Draft | NoHolder:
    """Everybody starts from the newest complete version, in a new lineage.

    Nothing of the old lineage is of use, so all members get work; who has a stage keeps it."""
    roles = survivors(situation, gone)
    take_in(roles, gone)
    completed = situation.body.completed
    version = completed.version if completed and not to_beginning else 0
    roles.news.append(f"{why}: back to version {version}")
    for stage, waiting in enumerate(roles.standby):
        while waiting and roles.has_room[stage]:
            roles.groups[stage].append(waiting.pop(0))
    for member in roles.idle():
        employ(roles, member)
    for stage, group in enumerate(roles.groups):
        if not group and not fill(roles, stage):
            return _recut(roles, version)
    if not feeding_members(roles.candidates, roles.groups):
        return _without_feeders(roles, version, situation.header.lineage + 1)
    return draft_of(roles, "repair", version, situation.header.lineage + 1)


def _recut(roles: Roles, version: int) -> Draft | NoHolder:
    """Too few are left for these stages: cut the model anew, where the manifest allows it."""
    situation = roles.situation
    training = situation.manifest.training
    stages = min(len(situation.body.stages), len(roles.members))
    try:
        body = first_plan(training, roles.candidates, stages, situation.estimates)
    except NoFeasiblePlan as error:
        return NoHolder(f"{error.what}: waiting for a peer to come back")
    return finished(roles, body, "repair", version, situation.header.lineage + 1)


def _planned(situation: Situation, gone: Mapping[Member, str]) -> Draft | None:
    roles = survivors(situation, gone)
    promote(roles, version=0)  # it waits until they have caught up
    take_in(roles, gone)
    (situation.place or follow_aims)(roles)
    promote(roles, version=0)  # who was to have no work until now
    draft = draft_of(roles, "planned", situation.version + 1, situation.header.lineage)
    body, before, header = draft.body, situation.body, situation.header
    is_calm = math.isinf(situation.least_gain)
    if is_calm and not is_needed(body, before) and draft.council == header.council:
        return None
    same = body.members == before.members and same_roles(body, before)
    return None if same and draft.council == header.council else draft


def same_roles(body: PlanBody, before: PlanBody) -> bool:
    """Return whether everybody does the same by two plans."""
    return (body.stages, body.feeders, body.wiring) == (
        before.stages,
        before.feeders,
        before.wiring,
    ) and _waiting(body) == _waiting(before)


def is_needed(body: PlanBody, before: PlanBody) -> bool:
    """Return whether a plan takes in or leaves out somebody, or gives somebody work: others only
    improve on the one before."""
    if members_of(body) != members_of(before):
        return True
    working = {member for stage in before.stages for member in stage.replicas}
    return any(member not in working for stage in body.stages for member in stage.replicas)


def _waiting(body: PlanBody) -> list[tuple[Member, int, bool]]:
    """Who stands by for what, and whether it is to work: figures in reasons may change."""
    return [(each.member, each.stage, bool(each.reason)) for each in body.standby]
