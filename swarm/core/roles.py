"""Roles in the making: what the leader knows, and the moves of which its drafts consist.

The rule: every move leaves each peer in one place and each stage with what fits into its hosts'
memory; nothing here decides when a move is made (drafting.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, Protocol

from msgspec.structs import replace

from protocol.messages import Heartbeat
from protocol.records import (
    Manifest,
    Member,
    PlanBody,
    PlanHeader,
    Signed,
    StandbyPlan,
    clip,
)
from protocol.signing import PeerId
from swarm.core.ballots import Draft
from swarm.core.council import next_council
from swarm.core.scheduling.aims import aimed, bound_to_feed, fed
from swarm.core.scheduling.cost import predict
from swarm.core.scheduling.horizon import LONGEST_SECONDS
from swarm.core.scheduling.planning import (
    Candidate,
    candidates_of,
    is_ready,
    members_of,
    plan_of,
    problem_for,
    replica_limit,
    stage_bytes,
)
from swarm.core.scheduling.problem import Assignment, Problem, Standby
from swarm.core.scheduling.rebalance import HYSTERESIS, stage_seconds
from swarm.core.scheduling.snapshot import assignment_of, flow_of

LINKS_FAIL = "its links keep failing"
MOST_FAILING = 8
"""One of so many members may stand by for that reason by a planned plan, or one."""
REWIRED = 0.95


@dataclass(frozen=True, slots=True)
class Situation:
    """All that the leader's decision depends on."""

    manifest: Manifest
    header: PlanHeader
    """Of the newest certified plan."""
    body: PlanBody
    heartbeats: Mapping[PeerId, Heartbeat] = field(default_factory=dict)
    """Recent ones, of the members' boots."""
    gone: Mapping[Member, str] = field(default_factory=dict)
    """Members with enough evidence against them, and why."""
    joining: Sequence[Candidate] = ()
    """Requests of peers or boots that are no members."""
    consents: frozenset[PeerId] = frozenset()
    """Who has consented to vote, at the newest epoch."""
    lost_work: str = ""
    """Why frames were lost although nobody is gone; empty if none were."""
    apart: Sequence[tuple[PeerId, PeerId]] = ()
    """Pairs of peers that keep losing what they send each other."""
    settled: bool = False
    """Every replica of the newest plan is active and has resumed."""
    pending: bool = False
    """The newest plan waits for the end of a step: every replica of it that works, works by the one
    before, and has resumed."""
    step_left_seconds: float = 0.0
    """How long the step in hand may take yet, by the one before."""
    version: int = 0
    """The newest committed version known."""
    waited_seconds: float = 0.0
    """Since the first NoHolder in a row."""
    estimates: Mapping[PeerId, Signed] = field(default_factory=dict)
    """What members have measured: checked, signed `Estimates`."""
    horizon_seconds: float = LONGEST_SECONDS
    """How long a role is expected to last."""
    promotes: bool = True
    """Whether it is thought now of giving work to who is ready in the middle of a step."""
    improves: bool = True
    """Whether plans that lose nothing are thought of now."""
    least_gain: float = HYSTERESIS
    """By what fraction of a step an improvement that nobody needs has to be better; infinite: such
    improvements have to wait."""
    place: "Placing | None" = None
    """How everybody gets a stage; None: `follow_aims`. Simulations compare rules."""
    target: Mapping[PeerId, int | str] = field(default_factory=dict)
    """What a better plan that somebody has found makes of each peer: its stage, or why it is to
    have no work. Peers that are not in it keep their roles."""


class Placing(Protocol):
    """Gives everybody a stage by its own rule, as `follow_aims` does."""

    def __call__(self, roles: "Roles") -> None:
        """Move members, with `go`; every member works or stands by afterwards."""
        ...


@dataclass
class Roles:
    """Who does what in the plan that is being made."""

    situation: Situation
    members: dict[PeerId, Candidate]
    groups: list[list[Member]]
    standby: list[list[Member]]
    reasons: dict[Member, str]
    """Of those who stand by and are to have no work: why."""
    news: list[str]
    """What is new, for people."""

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Layers [first, last) of every stage."""
        return [(stage.first, stage.last) for stage in self.situation.body.stages]

    @property
    def candidates(self) -> list[Candidate]:
        """All members, in order of peer."""
        return [self.members[peer] for peer in sorted(self.members)]

    @property
    def numbers(self) -> dict[Member, int]:
        """Which peer of the problem each member is."""
        return {each.member: i for i, each in enumerate(self.candidates)}

    @property
    def problem(self) -> Problem:
        """The problem of all members, with the stages as they are."""
        situation = self.situation
        return problem_for(
            situation.manifest.training,
            self.candidates,
            situation.estimates,
            before=situation.body,
            horizon_seconds=situation.horizon_seconds,
        )

    @property
    def has_room(self) -> list[bool]:
        """Whether each stage may have a further replica."""
        limit = replica_limit(self.situation.manifest.training)
        return [limit is None or len(group) < limit for group in self.groups]

    def size(self, stage: int) -> int:
        """How many peers hold or fetch a stage."""
        return len(self.groups[stage]) + len(self.standby[stage])

    def fits(self, member: Member, stage: int) -> bool:
        """Whether a stage's state fits into a member's memory."""
        request = self.members[member.peer].request
        first, last = self.ranges[stage]
        needed = stage_bytes(self.situation.manifest.training, request, first, last)
        return needed <= request.memory_bytes

    def idle(self) -> list[Member]:
        """Members that neither work nor stand by, in order of peer."""
        busy = {*chain.from_iterable(self.groups), *chain.from_iterable(self.standby)}
        return [each.member for each in self.candidates if each.member not in busy]

    def parted(self, member: Member) -> bool:
        """Whether a member should not work together with one who works."""
        working = {each.peer for each in chain.from_iterable(self.groups)}
        return any(
            (member.peer == a and b in working) or (member.peer == b and a in working)
            for a, b in self.situation.apart
        )

    def poorest(self, member: Member) -> int | None:
        """The smallest stage group that a member has the memory for."""
        fitting = [stage for stage in range(len(self.groups)) if self.fits(member, stage)]
        return min(fitting, key=lambda stage: (self.size(stage), stage)) if fitting else None


# --- moves ----------------------------------------------------------------------------------


def survivors(situation: Situation, gone: Mapping[Member, str]) -> Roles:
    """The newest plan's roles without the gone."""
    body = situation.body
    standby: list[list[Member]] = [[] for _ in body.stages]
    for each in body.standby:
        if each.member not in gone:
            standby[each.stage].append(each.member)
    return Roles(
        situation=situation,
        members={
            peer: each for peer, each in candidates_of(body).items() if each.member not in gone
        },
        groups=[[each for each in stage.replicas if each not in gone] for stage in body.stages],
        standby=standby,
        reasons={
            each.member: each.reason
            for each in body.standby
            if each.reason and each.member not in gone
        },
        news=[f"{member.peer} is gone: {why}" for member, why in gone.items()],
    )


def take_in(roles: Roles, gone: Mapping[Member, str]) -> None:
    """Make members of those who ask to join."""
    for each in sorted(roles.situation.joining, key=lambda each: each.member.peer):
        member = each.member
        if member not in gone and member.peer not in roles.members:
            roles.members[member.peer] = each
            roles.news.append(f"{member.peer} joins")


def promote(roles: Roles, version: int) -> None:
    """Give work to those who stand by and say that they are ready, as far as there is room; who is
    to have none gets it only where nobody is left.

    They hold `version`, or the one before: heartbeats are late, so of a swarm with quick steps they
    tell of an old one."""
    situation = roles.situation
    for stage, waiting in enumerate(roles.standby):
        for member in list(waiting):
            heartbeat = situation.heartbeats.get(member.peer)
            ready = heartbeat is not None and is_ready(
                heartbeat, member, stage, situation.header.lineage, version
            )
            if member in roles.reasons and roles.groups[stage]:
                continue
            if ready and roles.has_room[stage] and not roles.parted(member):
                waiting.remove(member)
                roles.reasons.pop(member, None)
                roles.groups[stage].append(member)
                roles.news.append(f"{member.peer} is ready for stage {stage}")


def slowest_seconds(roles: Roles, problem: Problem) -> float:
    """Return seconds per microbatch of the slowest stage, by what its replicas can compute, send
    and receive."""
    number = roles.numbers
    return max(
        stage_seconds(problem, layers, [number[member] for member in group])
        for layers, group in zip(roles.ranges, roles.groups, strict=True)
    )


def pass_seconds(roles: Roles, problem: Problem) -> float:
    """Return what a microbatch takes on the slowest replicas of all stages: what is under way when
    work begins anew."""
    number = roles.numbers
    return sum(
        problem.seconds(*layers) / min(problem.peers[number[member]].speed for member in group)
        for layers, group in zip(roles.ranges, roles.groups, strict=True)
    )


def part(roles: Roles) -> None:
    """Of two that keep losing what they send each other, let one stand by for its stage: of those
    that can be spared, who is in most pairs, then who has most others to replace it."""
    while True:
        parted = [
            (stage, member)
            for stage, group in enumerate(roles.groups)
            for member in group
            if len(group) > 1 and roles.parted(member)
        ]
        if not parted:
            return
        pairs = list(chain.from_iterable(roles.situation.apart))
        stage, member = max(
            parted,
            key=lambda each: (pairs.count(each[1].peer), roles.size(each[0]), each[1].peer),
        )
        roles.groups[stage].remove(member)
        roles.standby[stage].append(member)
        roles.reasons[member] = LINKS_FAIL
        roles.news.append(f"{member.peer} stands by: {LINKS_FAIL}")


def most_failing(members: int) -> int:
    """Return how many may be said to have links that keep failing: a leader could say it of all."""
    return max(1, members // MOST_FAILING)


def let_stand_by(roles: Roles, members: Sequence[Member]) -> None:
    """Let each member follow the smallest stage group that it has the memory for."""
    for member in members:
        stage = roles.poorest(member)
        if stage is not None:
            roles.standby[stage].append(member)


def employ(roles: Roles, member: Member) -> None:
    """Give a member work in the smallest stage group, or let it stand by where there is no room."""
    stage = roles.poorest(member)
    if stage is not None:
        hosts = roles.groups if roles.has_room[stage] else roles.standby
        hosts[stage].append(member)


def fill(roles: Roles, stage: int) -> bool:
    """Move somebody of the largest group that can spare one into an empty stage."""
    others = sorted(range(len(roles.groups)), key=lambda other: (-roles.size(other), other))
    for other in others:
        member = _spare(roles, other, stage)
        if member is not None:
            roles.groups[stage].append(member)
            return True
    return False


def _spare(roles: Roles, stage: int, target: int) -> Member | None:
    """Take out of a stage who stood by last, or works last in plan order, and fits elsewhere."""
    for group in (roles.standby[stage], roles.groups[stage]):
        spared = group if group is roles.standby[stage] else group[1:]
        for member in reversed(spared):
            if roles.fits(member, target):
                group.remove(member)
                return member
    return None


# --- by the problem -------------------------------------------------------------------------------


def follow_aims(roles: Roles) -> None:
    """Let everybody go where `aims.aimed` wants it, or the better plan that somebody has found:
    newcomers and those who stand by at once, who works by leaving and standing by. Where
    improvements have to wait, newcomers are placed and nobody moves."""
    situation = roles.situation
    problem = roles.problem
    if not problem.data_holders:
        let_stand_by(roles, roles.idle())
        return
    members = [each.member for each in roles.candidates]
    number = roles.numbers
    for member in [member for member in roles.reasons if not roles.parted(member)]:
        if roles.reasons[member] == LINKS_FAIL:
            del roles.reasons[member]
    failing = [member for member in members if roles.reasons.get(member) == LINKS_FAIL]
    for member in failing[most_failing(len(members)) :]:  # no work either while they are apart
        del roles.reasons[member]
    parted = [number[member] for member in failing if member in roles.reasons]
    workers = tuple(tuple(sorted(number[each] for each in group)) for group in roles.groups)
    feeding = bound_to_feed(problem, workers)
    target = {} if math.isinf(situation.least_gain) else dict(situation.target)
    for peer in feeding:
        target.pop(members[peer].peer, None)
    now = _aims(roles, number, target)
    wanted = aimed(
        problem,
        now,
        workers=workers,
        excluded={*parted, *feeding},
        least_gain=situation.least_gain,
    )
    reasons = {each.peer: each.reason for each in wanted.standby}
    stages = {peer: stage for stage, group in enumerate(wanted.groups) for peer in group}
    for member in members:
        peer = number[member]
        if peer in parted:
            continue
        if peer in stages:
            roles.reasons.pop(member, None)
            go(roles, member, stages[peer])
        else:
            _stand_by(roles, member, reasons.get(peer, ""))
    _spread(roles, [member for member in members if number[member] not in stages])


def _spread(roles: Roles, spares: Sequence[Member]) -> None:
    """Let every stage have about as many spare members as the others."""
    while True:
        waiting = [[each for each in group if each in spares] for group in roles.standby]
        most = max(range(len(waiting)), key=lambda stage: (len(waiting[stage]), -stage))
        least = min(range(len(waiting)), key=lambda stage: (len(waiting[stage]), stage))
        fitting = [each for each in waiting[most] if roles.fits(each, least)]
        if len(waiting[most]) < len(waiting[least]) + 2 or not fitting:
            return
        roles.standby[most].remove(fitting[-1])
        roles.standby[least].append(fitting[-1])


def _aims(
    roles: Roles, number: Mapping[Member, int], target: Mapping[PeerId, int | str]
) -> Assignment:
    """Return who aims at which stage, and the reasons of those who do not."""
    limit = roles.problem.replica_limit
    groups: list[list[int]] = [[] for _ in roles.groups]
    reasons = {number[member]: reason for member, reason in roles.reasons.items()}
    for stage, members in enumerate(roles.groups):
        for place, member in enumerate(members):
            wanted = target.get(member.peer, stage)
            last = len(members) - place == 1 and not groups[stage]  # a stage keeps somebody
            if isinstance(wanted, int) and not last:
                groups[wanted].append(number[member])
            elif last:
                groups[stage].append(number[member])
            else:
                reasons[number[member]] = str(wanted)
    for stage, members in enumerate(roles.standby):
        for member in members:
            wanted = target.get(member.peer, roles.reasons.get(member, stage))
            if isinstance(wanted, int) and len(groups[wanted]) < limit:
                groups[wanted].append(number[member])
    busy = {peer for group in groups for peer in group}
    made = tuple(tuple(sorted(group)) for group in groups)
    feeders = fed(roles.problem, made)
    standby = tuple(
        Standby(peer, reasons.get(peer, "")) for peer in number.values() if peer not in busy
    )
    return Assignment(tuple(roles.ranges), made, feeders, standby)


def go(roles: Roles, member: Member, stage: int) -> None:
    """Let a member be where it is, or stand by for the stage where it is to work."""
    here = place_of(roles, member)
    if here == stage:
        return
    if here is not None:
        if roles.groups[here] == [member]:
            return
        _take_out(roles, member)
        roles.news.append(f"{member.peer} moves from stage {here} to stage {stage}")
    roles.standby[stage].append(member)


def _stand_by(roles: Roles, member: Member, reason: str) -> None:
    """Let a member without work follow a stage; one with work leaves it only for a reason."""
    here = place_of(roles, member)
    works = here is not None and member in roles.groups[here]
    if works and (not reason or roles.groups[here or 0] == [member]):
        return
    if reason:
        if roles.reasons.get(member) != reason and (works or member not in roles.reasons):
            roles.news.append(f"{member.peer} stands by: {reason}")
        roles.reasons[member] = reason
    else:
        roles.reasons.pop(member, None)
    if works or here is None:
        _take_out(roles, member)
        let_stand_by(roles, [member])


def place_of(roles: Roles, member: Member) -> int | None:
    """Return the stage where a member works or stands by."""
    for stage, (group, waiting) in enumerate(zip(roles.groups, roles.standby, strict=True)):
        if member in group or member in waiting:
            return stage
    return None


def _take_out(roles: Roles, member: Member) -> None:
    for group in (*roles.groups, *roles.standby):
        if member in group:
            group.remove(member)


# --- the draft itself -----------------------------------------------------------------------------

Kind = Literal["planned", "repair"]


def draft_of(roles: Roles, kind: Kind, from_step: int, lineage: int, *, halted: str = "") -> Draft:
    """Return the plan that gives these roles, feeders by their data.

    What follows from the roles (wiring, shares, windows) stays as it was with equal roles, unless a
    step would take less than `REWIRED` of its time otherwise. Raises NoFeasiblePlan if nothing gets
    through."""
    standby = [
        StandbyPlan(member, stage, clip(roles.reasons.get(member, "")))
        for stage, waiting in enumerate(roles.standby)
        for member in waiting
    ]
    body = plan_of(
        roles.problem,
        roles.candidates,
        roles.ranges,
        roles.groups,
        standby,
        programs=kind == "planned",
    )
    body = _as_before(roles, body)
    new_lineage = lineage != roles.situation.header.lineage
    body = replace(body, leavers=_leavers(roles, new_lineage=new_lineage), halted=halted)
    return finished(roles, body, kind, from_step, lineage)


def _as_before(roles: Roles, body: PlanBody) -> PlanBody:
    """Return the plan with the wiring of the one before, if that is as good."""
    before = roles.situation.body
    if not same_work(body, before) or not body.feeders:
        return body
    flow = flow_of(before)
    kept = replace(before, members=body.members, requests=body.requests)
    seconds = predict(roles.problem, assignment_of(kept), flow).kept_seconds
    if body.step_seconds < REWIRED * seconds:
        roles.news.append(f"a step takes {body.step_seconds:.4g} s instead of {seconds:.4g} s")
        return body
    return replace(
        body,
        stages=before.stages,
        feeders=before.feeders,
        wiring=before.wiring,
        step_seconds=seconds,
    )


def same_work(body: PlanBody, before: PlanBody) -> bool:
    """Return whether the same members host the same stages and may feed them."""
    if [stage.replicas for stage in body.stages] != [stage.replicas for stage in before.stages]:
        return False
    members = set(members_of(body))
    return all(each.member in members for each in before.feeders)


def _leavers(roles: Roles, *, new_lineage: bool) -> tuple[Member, ...]:
    """Who had work and is still a member: of a plan that may not be active, its leavers too.

    In a new lineage all who have no work: they may have the version on their disks."""
    before = roles.situation.body
    had = set(chain.from_iterable(stage.replicas for stage in before.stages))
    if not roles.situation.settled:
        had.update(before.leavers)
    working = set(chain.from_iterable(roles.groups))
    members = [each.member for each in roles.candidates]
    return tuple(each for each in members if each not in working and (new_lineage or each in had))


def finished(roles: Roles, body: PlanBody, kind: Kind, from_step: int, lineage: int) -> Draft:
    """Add what is the same in all drafts: the complete version, the reason, the council."""
    header = roles.situation.header
    council = next_council(header.council, body, roles.situation.consents)
    news = list(roles.news)
    if council != header.council:
        news.append(f"the council has {len(council)} voters")
    body = replace(
        body,
        completed=roles.situation.body.completed,
        reason=clip("; ".join(news) or "peers have new roles"),
    )
    return Draft(body, kind, from_step, lineage, council)
