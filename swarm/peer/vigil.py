"""Who is there: suspicion, evidence and lost work, performed.

It drives `core.membership`. The rule: what this peer sees of another it signs and tells leader and
council; what it is asked about another it answers.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import trio

from protocol.messages import (
    LostWork,
    PingFor,
    PingResult,
    Suspect,
)
from protocol.records import (
    OBSERVATION_PURPOSE,
    Member,
    Observation,
    RunId,
    Signed,
    clip,
    open_signed,
    sign_record,
)
from protocol.signing import Identity, PeerId
from swarm.core import membership
from swarm.core.agreement import Agreement
from swarm.core.chain import Plan
from swarm.core.membership import Membership
from swarm.core.pace import HEARTBEAT_SECONDS, Pace, listeners_of
from swarm.core.roll import records_of, working_peers
from swarm.core.scheduling.planning import members_of
from swarm.core.step import step_coordinator_of, workers_of
from swarm.errors import NobodyListens, PeerError
from swarm.peer.leading import Leading
from swarm.peer.links import Links
from swarm.peer.roster import Roster

log = logging.getLogger(__name__)

MAX_ASKED = 4
"""How many others a suspicion is checked with."""
MAX_ATTENDED = 4
"""Of those whom a peer waits for, so many are pinged."""


class Vigil:
    """One peer's watch over the others."""

    def __init__(
        self,
        *,
        run: RunId,
        me: Member,
        identity: Identity,
        agreement: Agreement,
        links: Links,
        members: Membership,
        roster: Roster,
        leading: Leading,
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called when something may be due."""
        self.members = members
        self.roster = roster
        self.sign_at: float | None = None
        """When the first sign was seen that a newer plan may be needed."""
        self._run = run
        self._me = me
        self._identity = identity
        self._agreement = agreement
        self._links = links
        self._leading = leading
        self._wake = wake
        self._awaited: tuple[PeerId, ...] = ()
        self._near_key: object = None
        self._lost_with: set[PeerId] = set()
        """With whom work of the active plan may have been lost."""
        self._undelivered: Counter[PeerId] = Counter()
        """How often a peer could not be dialled since there was a link to it."""

    @property
    def plan(self) -> Plan:
        """Return the newest certified plan."""
        return self._agreement.newest

    @property
    def pace(self) -> Pace:
        """Return the periods of the newest plan's swarm."""
        return self.roster.pace

    def guides(self) -> list[PeerId]:
        """Return to whom this peer tells how it is, without itself: who listens; a voter tells
        leader and council."""
        leader, council = self._agreement.leader, self.plan.header.council
        if self._agreement.is_voter:
            guides = {*council, *((leader,) if leader else ())}
        else:
            guides = set(listeners_of(leader, council, self.pace, self.members.suspects))
        return sorted(guides - {self._me.peer})

    def look(self) -> None:
        """See again whose silence means something: in a large swarm who listens hears all members,
        and voters hear each other."""
        leader, council = self._agreement.leader, self.plan.header.council
        if self.pace.is_small:
            return
        listens = self._me.peer in listeners_of(leader, council, self.pace)
        key = (self.plan.key, leader if self._agreement.is_voter else None, listens, self._awaited)
        if key != self._near_key:
            self._near_key = key
            self.members.attend(self._near(), trio.current_time())

    def _near(self) -> dict[PeerId, float] | None:
        """Return whose silence means something, and how often each is to be heard."""
        if self.pace.is_small:
            return None
        leader, council = self._agreement.leader, self.plan.header.council
        near = dict.fromkeys(self._awaited, self.pace.attention_seconds)
        if self._me.peer in listeners_of(leader, council, self.pace):
            every = self.pace.heartbeat_seconds
            near = dict.fromkeys((each.peer for each in members_of(self.plan.body)), every)
        if self._agreement.is_voter:
            near |= dict.fromkeys(council, HEARTBEAT_SECONDS)
        near.pop(self._me.peer, None)
        return near

    def watch(self, now: float) -> None:
        """There is a newer plan: watch whom it names."""
        body = self.plan.body
        members = members_of(body)
        self.roster.pace = Pace(len(members))
        self._awaited, self._near_key = (), None
        coordinator = step_coordinator_of(body) if body.stages else ""
        self.act(self.members.watch(members, now, coordinator, self._near()))

    def attend(self, awaited: Sequence[PeerId]) -> None:
        """Hear some of those whom this peer waits for: in a large swarm it hears them seldom."""
        self._awaited = () if self.pace.is_small else tuple(awaited[:MAX_ATTENDED])
        self.look()
        for peer in self._awaited:
            if peer != self._me.peer:
                self.roster.ping(peer)

    def reaches(self, peer: PeerId) -> bool:
        """Return whether this peer has a link to another and hears it."""
        return peer == self._me.peer or (
            self._links.is_connected(peer) and not self.members.is_suspect(peer)
        )

    def activated(self) -> None:
        """Another plan is active: what was lost before it does not matter."""
        self._lost_with.clear()

    def repeat_lost_work(self) -> None:
        """Say again what was lost, as long as the same plan is active."""
        for peer in sorted(self._lost_with):
            self._say_lost_work(peer)

    def sound(self, peer: PeerId, boot: int, now: float, rtt_seconds: float | None = None) -> None:
        """A start of a peer has said something; `rtt_seconds` if it answered a ping."""
        self.act(self.members.heard(Member(peer, boot), now, rtt_seconds))

    def heard(self, peer: PeerId, boot: int, now: float, rtt_seconds: float | None = None) -> None:
        """A start of a peer has said that it lives, now: it sends that on a link that is open."""
        self.sound(peer, boot, now, rtt_seconds)
        self._leading.heard(peer, now)

    def opened(self, peer: PeerId, boot: int) -> None:
        """A link can be used."""
        self._undelivered.pop(peer, None)
        self.members.link_open(peer, trio.current_time())

    def lost(self, peer: PeerId, reason: str) -> None:
        """A link to a peer has ended: see whether it is still there."""
        if self._links.is_connected(peer):
            return
        self.members.link_lost(peer, reason, trio.current_time())
        self.roster.forget_pings(peer)
        if peer in self._leading.candidates and not self.plan.body.stages:
            self._leading.drop_candidate(peer)  # it asks again if it is still there
            log.info("left peer=%s reason=%r", peer, reason)
        elif peer in records_of(self.plan.body):
            self.roster.ping(peer)
        self._wake()

    def unreachable(self, fault: PeerError) -> None:
        """A peer could not be dialled."""
        now = trio.current_time()
        self._undelivered[fault.peer] += 1
        self.roster.forget_pings(fault.peer)
        if isinstance(fault, NobodyListens):
            self._agreement.lost_leader(fault.peer, now)
            self.act(self.members.dial_refused(fault.peer, fault.reason, now))
        else:
            self.act(self.members.probe_failed(fault.peer, fault.reason))
        self._wake()

    def report_lost_work(self, peer: PeerId) -> None:
        """Frames of the active plan may have been lost with a link to `peer`: say so until
        another one is active."""
        self._lost_with.add(peer)
        self._say_lost_work(peer)

    def _say_lost_work(self, peer: PeerId) -> None:
        generation, epoch = self._agreement.active.key
        message = LostWork(generation=generation, epoch=epoch, peer=peer)
        self.take_lost_work(self._me.peer, message)
        for guide in self.guides():
            self._links.post(guide, message)

    def take_lost_work(self, sender: PeerId, message: LostWork) -> None:
        """Note what was lost between two workers, and see whether both are alive."""
        bodies = [plan.body for plan in (self.plan, self._agreement.active) if plan.body.stages]
        if not all(
            any(peer in working_peers(body) for body in bodies) for peer in (sender, message.peer)
        ):
            log.info("no work is lost peer=%s with=%s", sender, message.peer)
            return
        self.see_sign()
        self._leading.lost_work(sender, message, trio.current_time())
        for peer in (sender, message.peer):
            if peer != self._me.peer:
                self.roster.ping(peer)

    def owed(self, awaited: Sequence[PeerId], *, by_coordinator: bool) -> None:
        """Reports (to the step coordinator) or Resume (by it) have not come in time."""
        now = trio.current_time()
        for member in members_of(self.plan.body):
            if member.peer in awaited and by_coordinator:
                self.act(self.members.report_missing(member, now))
            elif member.peer in awaited:
                self.act(self.members.resume_missing(member, now))

    def relay_to(self, target: PeerId) -> PeerId | None:
        """Return a peer that may pass on a message to `target`; None if there is none. At each
        attempt it is another one: who is reached need not reach the target."""
        others = self._others_to_ask(target)
        return others[self._undelivered[target] % len(others)] if others else None

    def act(self, effects: Sequence[membership.Effect]) -> None:
        """Perform what the core asks for."""
        for effect in effects:
            match effect:
                case membership.AskOthers(target):
                    for peer in self._others_to_ask(target.peer):
                        self._links.post(peer, PingFor(target=target))
                case membership.Accuse() if self.plan.body.ended:
                    pass  # peers may go
                case membership.Accuse(target, reason):
                    log.warning("suspects peer=%s reason=%r", target.peer, reason)
                    self._accuse(target, reason)
                case membership.Cleared(target):
                    log.info("hears again peer=%s", target.peer)
                    for peer in self.guides():
                        self._links.post(peer, PingResult(target=target, observation=None))
                case membership.Probe(target):
                    self.roster.ping(target.peer)
                case membership.Answer(asker, target, reason):
                    signed = self.observation(target, reason) if reason else None
                    self._links.post(asker, PingResult(target=target, observation=signed))
                case membership.LoseWork(peer, _):
                    self.report_lost_work(peer)
        if effects:
            self._wake()

    def _others_to_ask(self, target: PeerId) -> list[PeerId]:
        """Return a few peers that may reach `target`: voters first, to whom all members report and
        who so have a link to it, if anybody has."""
        council = [peer for peer in self.plan.header.council if self.reaches(peer)]
        others = [peer for peer in workers_of(self.plan.body) if self.reaches(peer)]
        ordered = dict.fromkeys([*council, *others])
        return [peer for peer in ordered if peer not in (self._me.peer, target)][:MAX_ASKED]

    def see_sign(self) -> None:
        """Something has happened that a newer plan may be needed for."""
        if self.sign_at is None:
            self.sign_at = trio.current_time()

    def _accuse(self, target: Member, reason: str) -> None:
        self.see_sign()
        signed = self.observation(target, reason)
        self.members.observed(self._me.peer, target, signed, trio.current_time())
        for peer in self.guides():
            if peer != target.peer:
                self._links.post(peer, Suspect(observation=signed))

    def observation(self, target: Member, reason: str) -> Signed:
        """Return the signed word of this peer that it gives a member up."""
        generation, epoch = self.plan.key
        observation = Observation(
            run=self._run,
            generation=generation,
            epoch=epoch,
            suspect=target,
            reason=clip(reason),
        )
        return sign_record(self._identity, OBSERVATION_PURPOSE, observation)

    def take_observation(self, signed: Signed) -> None:
        """Note what a member has seen. Raises RemoteProtocolError for a bad signature."""
        observation = open_signed(signed, OBSERVATION_PURPOSE, Observation)
        current = (observation.generation, observation.epoch) == self.plan.key
        if current and observation.run == self._run:
            now = trio.current_time()
            self.members.observed(signed.signer, observation.suspect, signed, now)
            if signed.signer != observation.suspect.peer:
                self.act(self.members.doubt(observation.suspect, now))
