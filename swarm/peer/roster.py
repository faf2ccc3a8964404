"""What members say of themselves, and the picture of the swarm that the leader tells everybody.

Every member tells leader and council once a second what it holds and does (Heartbeat), so whoever
leads next knows it too; the leader tells all members what the swarm looks like (LeaderBeat).
"""

import itertools
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field

import trio
from msgspec.structs import replace

from protocol.messages import TABLE, Heartbeat, LeaderBeat, MemberView, Ping, Pong
from protocol.packing import canonical
from protocol.records import Member, PlanBody, clip
from protocol.signing import PeerId
from swarm.core.chain import Plan
from swarm.core.step import replicas_of
from swarm.peer.links import Links

HEARTBEAT_SECONDS = 1.0
LEADER_BEAT_SECONDS = 0.5
RECENT_SECONDS = 15.0
"""An older heartbeat says nothing about now."""
RATE_HEARTBEATS = 10
PINGS_UNDER_WAY = 16
"""A Pong of an older Ping says nothing any more."""


@dataclass
class _Seen:
    """What the leader last heard of a member."""

    heartbeat: Heartbeat
    at: float
    samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_HEARTBEATS))

    @property
    def ends(self) -> tuple[tuple[float, int], tuple[float, int]]:
        """Return the oldest and the newest (time, samples computed)."""
        return self.samples[0], self.samples[-1]


class Roster:
    """The last heartbeats of all members, and round trips to who has a link."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._seen: dict[PeerId, _Seen] = {}
        self._ping_numbers = itertools.count(1)
        self._pings: dict[PeerId, deque[tuple[int, float]]] = {}
        """Number and time of the last Pings to a peer."""

    # --- round trips --------------------------------------------------------------------

    def ping_all(self) -> None:
        """Measure the round trip to every peer with an open link."""
        for peer in sorted(self._links.connected()):
            self.ping(peer)

    def ping(self, peer: PeerId) -> None:
        """Ping a peer, dialling it if need be."""
        number = next(self._ping_numbers)
        sent = self._pings.setdefault(peer, deque(maxlen=PINGS_UNDER_WAY))
        sent.append((number, trio.current_time()))
        self._links.post(peer, Ping(number=number))

    def forget_pings(self, peer: PeerId) -> None:
        """There is no link to a peer any more: what was under way is not answered."""
        self._pings.pop(peer, None)

    def round_trip(self, sender: PeerId, message: Pong) -> float | None:
        """Return how long the answered ping took, in seconds; None for an old one."""
        times = dict(self._pings.get(sender, ()))
        sent_at = times.get(message.number)
        return trio.current_time() - sent_at if sent_at is not None else None

    # --- heartbeats ----------------------------------------------------------------------

    def heartbeat(self, member: Member) -> Heartbeat | None:
        """Return the last heartbeat of this start of a peer; None if there is no recent one."""
        seen = self._seen.get(member.peer)
        if seen is None or seen.heartbeat.boot != member.boot:
            return None
        return seen.heartbeat if trio.current_time() - seen.at <= RECENT_SECONDS else None

    def forget_all_but(self, peers: Container[PeerId]) -> None:
        """Forget who is no member any more."""
        self._seen = {peer: seen for peer, seen in self._seen.items() if peer in peers}

    def heard(self, sender: PeerId, message: Heartbeat) -> None:
        """Note what a member says of itself."""
        now = trio.current_time()
        seen = self._seen.setdefault(sender, _Seen(message, now))
        seen.heartbeat, seen.at = message, now
        seen.samples.append((now, message.samples))

    def beat(self, plan: Plan, *, term: int, waiting_for: int, trouble: str) -> LeaderBeat:
        """Return what the leader tells everybody now."""
        now = trio.current_time()
        views = tuple(self._view(peer, seen, now) for peer, seen in sorted(self._seen.items()))
        losses = {
            seen.heartbeat.version: seen.heartbeat.loss
            for seen in self._seen.values()
            if seen.heartbeat.loss is not None
        }
        beat = LeaderBeat(
            generation=plan.header.generation,
            epoch=plan.header.epoch,
            term=term,
            members=views,
            waiting_for=waiting_for,
            version=max((view.version for view in views), default=0),
            loss=losses[max(losses)] if losses else None,
            samples_per_second=self._samples_per_second(plan.body),
            trouble=clip(trouble),
        )
        return _fitting(beat)

    def _view(self, peer: PeerId, seen: _Seen, now: float) -> MemberView:
        heartbeat = seen.heartbeat
        return MemberView(
            peer=peer,
            boot=heartbeat.boot,
            address=self._links.address_of(peer),
            state=heartbeat.state,
            stage=heartbeat.stage,
            version=heartbeat.version,
            ledger_size=heartbeat.ledger_size,
            queue_length=heartbeat.queue_length,
            silent_seconds=now - seen.at,
            rtt_seconds=heartbeat.rtt_seconds,
            compute_seconds=heartbeat.compute_seconds,
            traffic=heartbeat.traffic,
        )

    def _samples_per_second(self, body: PlanBody) -> float:
        """Return the rate of the last stage group over its last heartbeats."""
        if not body.stages:
            return 0.0
        rate = 0.0
        for peer in replicas_of(body, len(body.stages) - 1):
            if peer in self._seen:
                (first_at, first), (last_at, last) = self._seen[peer].ends
                rate += (last - first) / (last_at - first_at) if last_at > first_at else 0.0
        return rate


def working_members(body: PlanBody) -> list[Member]:
    """Return all replicas and feeders, each once."""
    members = {member for stage in body.stages for member in stage.replicas}
    members |= {feeder.member for feeder in body.feeders}
    return sorted(members, key=lambda member: (member.peer, member.boot))


def _fitting(beat: LeaderBeat) -> LeaderBeat:
    """Return `beat` with as much of the members as one message holds."""
    cap = TABLE[LeaderBeat].header_cap_bytes
    members = beat.members
    while len(canonical(beat)) > cap:
        if any(view.traffic for view in members):
            members = tuple(replace(view, traffic=()) for view in members)
        else:
            members = members[: len(members) // 2]
        beat = replace(beat, members=members)
    return beat


async def beat_forever(seconds: float, beat: Callable[[], None]) -> None:
    """Call `beat` every `seconds`, until cancelled."""
    while True:
        beat()
        await trio.sleep(seconds)
