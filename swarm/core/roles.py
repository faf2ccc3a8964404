"""Roles in the making: what the leader knows, and the moves of which its drafts consist.

The rule: every move leaves each peer in one place and each stage with what fits into its hosts'
memory; nothing here decides when a move is made (drafting.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from msgspec.structs import replace

from protocol.messages import Heartbeat
from protocol.records import Manifest, Member, PlanBody, PlanHeader, StandbyPlan, clip
from protocol.signing import PeerId
from swarm.core.ballots import Draft
from swarm.core.council import next_council
from swarm.core.planning import (
    Candidate,
    candidates_of,
    even_wiring,
    feeders_of,
    is_ready,
    predicted_step_seconds,
    replica_limit,
    stage_bytes,
    stage_plan,
)


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
    version: int = 0
    """The newest committed version known."""
    waited_seconds: float = 0.0
    """Since the first NoHolder in a row."""


@dataclass
class Roles:
    """Who does what in the plan that is being made."""

    situation: Situation
    members: dict[PeerId, Candidate]
    groups: list[list[Member]]
    standby: list[list[Member]]
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
    """Give work to those who stand by and say that they are ready, as far as there is room.

    They hold `version`, or the one before: heartbeats are late, so of a swarm with quick steps they
    tell of an old one."""
    situation = roles.situation
    for stage, waiting in enumerate(roles.standby):
        for member in list(waiting):
            heartbeat = situation.heartbeats.get(member.peer)
            ready = heartbeat is not None and is_ready(
                heartbeat, member, stage, situation.header.lineage, version
            )
            if ready and roles.has_room[stage] and not roles.parted(member):
                waiting.remove(member)
                roles.groups[stage].append(member)
                roles.news.append(f"{member.peer} is ready for stage {stage}")


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
        roles.news.append(f"{member.peer} stands by: its links keep failing")


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


def rebalance(roles: Roles) -> None:
    """Move one peer from the largest to the smallest group if that is by two or more smaller,
    unless the move would make the slowest stage slower."""
    stages = range(len(roles.groups))
    larger = max(stages, key=lambda stage: (roles.size(stage), -stage))
    smaller = min(stages, key=lambda stage: (roles.size(stage), stage))
    if roles.size(larger) < roles.size(smaller) + 2:
        return
    before = _seconds_with_all(roles)
    groups = [list(group) for group in roles.groups]
    standby = [list(group) for group in roles.standby]
    member = _spare(roles, larger, smaller)
    if member is None:
        return
    roles.standby[smaller].append(member)
    if _seconds_with_all(roles) > before:
        roles.groups, roles.standby = groups, standby
    else:
        roles.news.append(f"{member.peer} moves from stage {larger} to stage {smaller}")


def _spare(roles: Roles, stage: int, target: int) -> Member | None:
    """Take out of a stage who stood by last, or works last in plan order, and fits elsewhere."""
    for group in (roles.standby[stage], roles.groups[stage]):
        spared = group if group is roles.standby[stage] else group[1:]
        for member in reversed(spared):
            if roles.fits(member, target):
                group.remove(member)
                return member
    return None


def _seconds_with_all(roles: Roles) -> float:
    """Predicted seconds per step if all who follow a stage worked for it."""
    layers = roles.candidates[0].request.layers
    stages = [
        stage_plan(layers, first, last, [*group, *waiting])
        for (first, last), group, waiting in zip(
            roles.ranges, roles.groups, roles.standby, strict=True
        )
    ]
    return predicted_step_seconds(roles.situation.manifest.training, roles.candidates, stages)


# --- the draft itself -----------------------------------------------------------------------------

Kind = Literal["planned", "repair"]


def draft_of(roles: Roles, kind: Kind, from_step: int, lineage: int, *, halted: str = "") -> Draft:
    """Return the plan that gives these roles: even shares and wiring, feeders by their data."""
    candidates = roles.candidates
    layers = candidates[0].request.layers
    stages = tuple(
        stage_plan(layers, first, last, group)
        for (first, last), group in zip(roles.ranges, roles.groups, strict=True)
    )
    feeders = feeders_of(candidates, roles.groups)
    feeding = {feeder.member for feeder in feeders}
    training = roles.situation.manifest.training
    body = PlanBody(
        members=tuple(each.record for each in candidates),
        requests=tuple(each.signed_request for each in candidates),
        stages=stages,
        feeders=feeders,
        wiring=even_wiring(len(feeders), [len(group) for group in roles.groups]),
        standby=tuple(
            StandbyPlan(member, stage)
            for stage, waiting in enumerate(roles.standby)
            for member in waiting
            if member not in feeding
        ),
        leavers=_leavers(roles, new_lineage=lineage != roles.situation.header.lineage),
        step_seconds=predicted_step_seconds(training, candidates, stages),
        completed=None,
        ended=False,
        halted=halted,
        reason="",
    )
    return finished(roles, body, kind, from_step, lineage)


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
