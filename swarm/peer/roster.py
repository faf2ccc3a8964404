"""What members say of themselves, and the picture of the swarm that the leader makes of it.

Members tell those who listen (core/pace.py) what they hold and do (Heartbeat); the leader tells all
members that it leads, and how far the swarm is (LeaderBeat), and whom it hears to who asks.
"""

import itertools
from collections import deque
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field

import trio
from msgspec.structs import replace

from protocol.messages import TABLE, Heartbeat, LeaderBeat, MemberView, Ping, Pong, SwarmAnswer
from protocol.packing import canonical
from protocol.records import Estimates, Member, PlanBody, Signed, clip
from protocol.signing import PeerId
from swarm.core.chain import Plan
from swarm.core.measuring.measured import is_newer
from swarm.core.memo import by_identity
from swarm.core.pace import Pace
from swarm.core.step import replicas_of
from swarm.peer.links import Links

RECENT_SECONDS, RECENT_PERIODS = 15.0, 3
"""An older heartbeat says nothing about now."""
RATE_HEARTBEATS = 10
ROUNDS_PER_PING = 4
"""Heartbeats for one round trip measured."""
LIVES = 0
"""Number of a Pong that answers no Ping."""
PINGS_UNDER_WAY = 16
"""A Pong of an older Ping says nothing any more."""
MAX_MEASURED = 4096
"""So many peers' estimates are kept, of members and of who may ask to join."""


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
        self.pace = Pace(0)
        """That of the newest plan."""
        self.changes = 0
        """Grows whenever a member says something that a plan may depend on,"""
        self.measurements = 0
        """or tells what it has measured."""
        self._links = links
        self._seen: dict[PeerId, _Seen] = {}
        self._waiting: set[PeerId] = set()
        self._rounds = 0
        self._ping_numbers = itertools.count(1)
        self._pings: dict[PeerId, deque[tuple[int, float]]] = {}
        """Number and time of the last Pings to a peer."""
        self._measured: dict[PeerId, tuple[Estimates, Signed]] = {}

    # --- round trips --------------------------------------------------------------------

    def ping_all(self, guides: Collection[PeerId]) -> None:
        """Measure now and then the round trip to every peer with an open link; in a large swarm to
        `guides` only, since links may be many. In a small one those that are neither asked nor
        `guides`, who have been told, hear that this peer lives."""
        self._rounds += 1
        is_turn = self._rounds % ROUNDS_PER_PING == 1
        if not self.pace.is_small:
            for peer in guides if is_turn else ():
                self.ping(peer)
            return
        for peer in sorted(self._links.connected()):
            if is_turn or peer not in self._pings:
                self.ping(peer)
            elif peer not in guides:
                self._links.post(peer, Pong(number=LIVES))

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

    # --- measurements --------------------------------------------------------------------

    @property
    def estimates(self) -> Mapping[PeerId, Signed]:
        """Return the newest signed records.Estimates of each peer that has sent some, checked."""
        return {peer: signed for peer, (_, signed) in sorted(self._measured.items())}

    def measured(self, told: Estimates, signed: Signed) -> None:
        """Keep what a peer has measured, unless there is a newer word of it."""
        known = self._measured.get(told.peer)
        has_room = known is not None or len(self._measured) < MAX_MEASURED
        if has_room and is_newer(told, known[0] if known is not None else None):
            self._measured[told.peer] = told, signed
            self.measurements += 1

    # --- heartbeats ----------------------------------------------------------------------

    def heartbeat(self, member: Member) -> Heartbeat | None:
        """Return the last heartbeat of this start of a peer; None if there is no recent one."""
        seen = self._seen.get(member.peer)
        if seen is None or seen.heartbeat.boot != member.boot:
            return None
        age, recent = trio.current_time() - seen.at, RECENT_SECONDS
        return seen.heartbeat if age <= max(recent, self._oldest_seconds) else None

    @property
    def _oldest_seconds(self) -> float:
        return 0.0 if self.pace.is_small else RECENT_PERIODS * self.pace.heartbeat_seconds

    @property
    def somebody_waits(self) -> bool:
        """Return whether a member waits for others, by its last word."""
        return bool(self._waiting)

    def forget_all_but(self, peers: Container[PeerId]) -> None:
        """Forget who is no member any more."""
        self._seen = {peer: seen for peer, seen in self._seen.items() if peer in peers}
        connected = self._links.connected()  # some of them are about to ask to join
        self._measured = {
            peer: each
            for peer, each in self._measured.items()
            if peer in peers or peer in connected
        }
        self._waiting &= self._seen.keys()

    def heard(self, sender: PeerId, message: Heartbeat) -> None:
        """Note what a member says of itself."""
        now = trio.current_time()
        seen = self._seen.get(sender)
        if seen is None:
            seen = self._seen[sender] = _Seen(message, now)
            self.changes += 1
        elif _decisive(seen.heartbeat) != _decisive(message):
            self.changes += 1
        seen.heartbeat, seen.at = message, now
        seen.samples.append((now, message.samples))
        if message.awaits:
            self._waiting.add(sender)
        else:
            self._waiting.discard(sender)

    def beat(self, plan: Plan, *, term: int, waiting_for: int, trouble: str) -> LeaderBeat:
        """Return what the leader tells everybody now."""
        seen = self._seen.values()
        newest = max(
            ((each.heartbeat.version, each.heartbeat.loss) for each in seen if _has_loss(each)),
            default=None,
        )
        return LeaderBeat(
            generation=plan.header.generation,
            epoch=plan.header.epoch,
            term=term,
            waiting_for=waiting_for,
            version=max((each.heartbeat.version for each in seen), default=0),
            loss=newest[1] if newest is not None else None,
            samples_per_second=self._samples_per_second(plan.body),
            trouble=clip(trouble),
        )

    def table(self) -> tuple[MemberView, ...]:
        """Return a line for every member that was heard, sorted by peer; as much as one message
        holds."""
        now = trio.current_time()
        return _fitting(
            tuple(self._view(peer, seen, now) for peer, seen in sorted(self._seen.items()))
        )

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


@by_identity
def working_members(body: PlanBody) -> list[Member]:
    """Return all replicas and feeders, each once."""
    members = {member for stage in body.stages for member in stage.replicas}
    members |= {feeder.member for feeder in body.feeders}
    return sorted(members, key=lambda member: (member.peer, member.boot))


def _decisive(heartbeat: Heartbeat) -> tuple[object, ...]:
    """Return what plans depend on."""
    return (
        heartbeat.generation,
        heartbeat.epoch,
        heartbeat.active_epoch,
        heartbeat.boot,
        heartbeat.state,
        heartbeat.stage,
        heartbeat.lineage,
        heartbeat.version,
        heartbeat.rollback,
        heartbeat.awaits,
        heartbeat.trouble,
    )


def _has_loss(seen: _Seen) -> bool:
    return seen.heartbeat.loss is not None


def _fitting(members: tuple[MemberView, ...]) -> tuple[MemberView, ...]:
    cap = TABLE[SwarmAnswer].header_cap_bytes
    while len(canonical(SwarmAnswer(members=members))) > cap - ID_BYTES:
        if any(view.traffic for view in members):
            members = tuple(replace(view, traffic=()) for view in members)
        else:
            members = members[: len(members) // 2]
    return members


ID_BYTES = 16
"""Of a reply."""
