"""Who is in the swarm, how they are, and what the leader tells everybody about it.

Every member tells the leader once a second what it holds and does (Heartbeat); the leader tells
all members what the swarm looks like (LeaderBeat). The rule: without a repair nothing replaces a
worker, so a link that was lost in an epoch stays on the list of troubles until the next one.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import trio
from msgspec.structs import replace

from protocol.messages import TABLE, Heartbeat, LeaderBeat, MemberView, Ping, Pong
from protocol.packing import canonical
from protocol.records import Member, PlanBody, clip
from protocol.signing import PeerId
from swarm.core.step import replicas_of, workers_of
from swarm.peer.links import Links

HEARTBEAT_SECONDS = 1.0
LEADER_BEAT_SECONDS = 0.5
SUSPICION_SECONDS = 15.0
RATE_HEARTBEATS = 10


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


class Membership:
    """One peer's view of the others, and the leader's of all."""

    def __init__(self, links: Links, me: Member) -> None:
        self._links = links
        self._me = me
        self._epoch_began = trio.current_time()
        self._seen: dict[PeerId, _Seen] = {}
        self._lost: dict[PeerId, str] = {}
        self._pings: dict[PeerId, tuple[int, float]] = {}
        self._rtt: dict[PeerId, float] = {}

    # --- round trips --------------------------------------------------------------------

    def ping_all(self) -> None:
        """Measure the round trip to every peer with an open link."""
        for peer in sorted(self._links.connected()):
            number = self._pings.get(peer, (0, 0.0))[0] + 1
            self._pings[peer] = (number, trio.current_time())
            self._links.post(peer, Ping(number=number))

    def pong(self, sender: PeerId, message: Pong) -> None:
        """Take in the answer to a ping; late ones do not count."""
        number, sent_at = self._pings.get(sender, (0, 0.0))
        if message.number == number:
            self._rtt[sender] = trio.current_time() - sent_at

    def rtt_seconds(self, peer: PeerId) -> float:
        """Return the last round trip to a peer; 0 before the first."""
        return self._rtt.get(peer, 0.0)

    # --- losses --------------------------------------------------------------------------

    def lost(self, peer: PeerId, reason: str) -> None:
        """A link to a peer has ended or could not be opened."""
        self._lost[peer] = reason

    def begin_epoch(self) -> None:
        """A new plan is active: what was lost under the old one is settled."""
        self._lost.clear()
        self._epoch_began = trio.current_time()

    def suspects(self, body: PlanBody) -> tuple[PeerId, ...]:
        """Return the workers of the plan to which a link was lost in this epoch."""
        workers = workers_of(body) if body.stages else ()
        return tuple(peer for peer in workers if peer in self._lost)

    # --- the leader's view ------------------------------------------------------------------

    def heard(self, sender: PeerId, message: Heartbeat) -> None:
        """Note what a member says of itself."""
        now = trio.current_time()
        seen = self._seen.setdefault(sender, _Seen(message, now))
        seen.heartbeat, seen.at = message, now
        seen.samples.append((now, message.samples))

    def beat(
        self, body: PlanBody, *, epoch: int, term: int, waiting_for: int, trouble: str
    ) -> LeaderBeat:
        """Return what the leader tells everybody now."""
        now = trio.current_time()
        views = tuple(self._view(peer, seen, now) for peer, seen in sorted(self._seen.items()))
        losses = {
            seen.heartbeat.version: seen.heartbeat.loss
            for seen in self._seen.values()
            if seen.heartbeat.loss is not None
        }
        beat = LeaderBeat(
            epoch=epoch,
            term=term,
            members=views,
            waiting_for=waiting_for,
            version=max((view.version for view in views), default=0),
            loss=losses[max(losses)] if losses else None,
            samples_per_second=self._samples_per_second(body),
            trouble=clip(trouble or self._trouble(body, now)),
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

    def _trouble(self, body: PlanBody, now: float) -> str:
        """Return why training cannot go on although nobody has said so; "" while it can."""
        if not body.stages or body.ended or body.halted:
            return ""
        for peer in self.suspects(body):
            return f"the link to {peer} was lost ({self._lost[peer]}) and nobody replaces it"
        for member in working_members(body):
            trouble = self._trouble_with(member, now)
            if trouble:
                return trouble
        return ""

    def _trouble_with(self, member: Member, now: float) -> str:
        peer = member.peer
        seen = self._seen.get(peer)
        boot = self._me.boot if peer == self._me.peer else seen.heartbeat.boot if seen else 0
        if boot > member.boot:
            return f"{peer} has started again, its boot {boot} has no role and nobody replaces it"
        if seen is not None and seen.heartbeat.suspects:
            return f"{peer} has lost {seen.heartbeat.suspects[0]} and nobody replaces it"
        silent = now - (seen.at if seen is not None else self._epoch_began)
        if silent > SUSPICION_SECONDS:
            return f"{peer} has been silent for {silent:.0f} s and nobody replaces it"
        return ""


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
