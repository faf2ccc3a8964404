"""Who is there: sounds, silence, suspicion, and members that live and do not do what they owe.

The rule: what one peer notices is an accusation; only evidence (evidence.py) lets a plan leave a
member out. Sans-IO: `now` is in seconds of any clock that does not go back, and what is to be
done is returned as effects.
"""

import heapq
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from protocol.messages import Heartbeat
from protocol.records import Member, Signed
from protocol.signing import PeerId
from swarm.core.evidence import REPORT_MISSING, RESUME_MISSING, Evidence
from swarm.core.memo import by_identity
from swarm.core.pace import HEARTBEAT_SECONDS, Pace
from swarm.core.silence import Rhythm, Watched
from swarm.core.waiting import Waits, limit_seconds

ASK_SECONDS = 1.0
"""How often a suspect is probed and asked for; and what an answer may take besides round trips."""
DIAL_SECONDS = 5.0
"""What an answer may take of a peer to which the round trip is not known."""
DIAL_ROUND_TRIPS = 10
"""Dialling (TCP, TLS, Hello) and the ping itself, with some to spare."""
RTT_SAMPLES = 8
REACHED_SECONDS = 3.0
"""Who was heard so recently, on an open link, is reached."""
REACHED_PERIODS = 2
"""Of a large swarm's heartbeats: the last one still says something of now."""
ACCUSE_SECONDS = 5.0
"""How often an accusation is repeated while its reason lasts."""
PAUSE_SECONDS = 0.5
"""This late, `expire` was not called because this peer stood still, not the others."""


@dataclass(frozen=True, slots=True)
class AskOthers:
    """Send PingFor(target) to other members."""

    target: Member


@dataclass(frozen=True, slots=True)
class Accuse:
    """Sign an Observation and send it (Suspect) to leader and council."""

    target: Member
    reason: str


@dataclass(frozen=True, slots=True)
class Cleared:
    """A suspect has been heard again: tell leader and council (PingResult without Observation),
    which may have this peer's word that it cannot be reached."""

    target: Member


@dataclass(frozen=True, slots=True)
class Probe:
    """Ping `target`, after dialling it if there is no link."""

    target: Member


@dataclass(frozen=True, slots=True)
class Answer:
    """Send PingResult to `asker`: with a signed Observation of `reason`, or, if that is empty,
    without, because the target answers."""

    asker: PeerId
    target: Member
    reason: str


@dataclass(frozen=True, slots=True)
class LoseWork:
    """Send LostWork about `peer` to the leader: a repair starts the epoch's work again."""

    peer: PeerId
    reason: str


Effect = AskOthers | Accuse | Cleared | Probe | Answer | LoseWork


class Membership:
    """One peer's view of the others, and what a leader has been told."""

    def __init__(self, me: Member) -> None:
        self._me = me
        self._members: Mapping[PeerId, Member] = {}
        self._pace = Pace(0)
        self._watched: dict[PeerId, Watched] = {}
        self._queue: list[tuple[float, PeerId]] = []
        self._rhythms: dict[PeerId, Rhythm] = {}
        self._boots: dict[PeerId, int] = {}
        self._rtt_seconds: dict[PeerId, deque[float]] = {}
        self._open: set[PeerId] = set()
        self._lost: dict[PeerId, str] = {}
        self._sure: dict[Member, str] = {}
        self._evidence = Evidence(me.peer)
        self._waits = Waits()
        self._probes: dict[tuple[PeerId, PeerId], tuple[Member, float]] = {}
        self._unreported: dict[Member, int] = {}
        self._watches = 0
        self._gave_up_at = -float("inf")
        self._expired_at: float | None = None
        self._asks = True
        self.changes = 0
        """Grows with whatever `gone` or `suspects` depend on, but time."""

    # --- who matters ---------------------------------------------------------------------

    def watch(
        self,
        members: Sequence[Member],
        now: float,
        coordinator: PeerId = "",
        near: Mapping[PeerId, float] | None = None,
    ) -> list[Effect]:
        """Watch whom the newly adopted plan names, and nobody else.

        Observations and charges are settled by the plan, silence is not. Call it once for each
        plan. `coordinator` is its step coordinator. `near` names those whose silence means
        something to this peer, and how often each is to be heard, in seconds; None: all, every
        second. Of the others it notices what their links and their own words tell."""
        self.changes += 1
        self._watches += 1
        self._members = _by_peer(members)
        self._pace = Pace(len(members))
        self._evidence.begin_epoch(coordinator)
        self._waits = Waits(coordinator, self._pace.heartbeat_seconds)
        before, self._watched, self._queue = self._watched, {}, []
        for peer in sorted(before):
            known = before[peer]
            if self._members.get(peer) != known.member:
                continue
            was_charged, known.charge = bool(known.charge), ""
            if known.is_told:
                known.is_told, known.accuse_at = False, now
            if near is None or known.period is not None or known.suspicion or was_charged:
                known.looked_at = float("inf")
                self._watched[peer] = known
        if self._sure:
            kept = {each for each in self._sure if self._members.get(each.peer) == each}
            self._sure = {each: why for each, why in self._sure.items() if each in kept}
        self._unreported = {
            each: at
            for each, at in self._unreported.items()
            if self._members.get(each.peer) == each
        }
        self.attend(near, now)
        effects = self._own_older_boot()
        for _, watched in sorted(self._watched.items()):
            if watched.member in self._sure:
                effects += self._charge(watched, self._sure[watched.member], now)
            else:
                effects += self._started_again(watched, now)
            self._look_at(watched)
        return effects

    def attend(self, near: Mapping[PeerId, float] | None, now: float) -> None:
        """From now on the silence of `near` means something, and of nobody else, as for `watch`."""
        self._asks = near is None or len(near) > len(self._members) // 2
        if near is None:
            near = dict.fromkeys(self._members, HEARTBEAT_SECONDS)
        for peer, watched in self._watched.items():
            if peer not in near:
                watched.period = None
        for peer in sorted(near):
            watched_ = self._noticed(peer, now)
            if watched_ is None:
                continue
            if watched_.period is None:
                watched_.heard_at, watched_.was_heard = now, False
            watched_.period = near[peer]
            self._look_at(watched_)

    def _noticed(self, peer: PeerId, now: float) -> Watched | None:
        """Return what is known of a member, from now on if nothing was; None for all others, and
        this peer."""
        watched = self._watched.get(peer)
        member = self._members.get(peer)
        if watched is None and member is not None and peer != self._me.peer:
            rhythm = self._rhythms.setdefault(peer, Rhythm())
            watched = self._watched[peer] = Watched(member, now, rhythm, None)
        return watched

    def _own_older_boot(self) -> list[Effect]:
        """If the plan names an older boot of this peer, it has no role: by its own word."""
        reason = f"has started again (boot {self._me.boot})"
        named = self._members.get(self._me.peer, self._me)
        if named == self._me:
            return []
        self._sure[named] = reason
        return [Accuse(named, reason)]

    @property
    def suspects(self) -> tuple[PeerId, ...]:
        """Members that this peer cannot reach, or that do not do what they owe; sorted."""
        return tuple(
            sorted(
                peer
                for peer, watched in self._watched.items()
                if watched.suspicion or watched.charge
            )
        )

    def is_suspect(self, peer: PeerId) -> bool:
        """Return whether a peer is one of the `suspects`."""
        watched = self._watched.get(peer)
        return watched is not None and bool(watched.suspicion or watched.charge)

    def boot_of(self, peer: PeerId) -> int:
        """Return the newest boot that was heard of a peer; 0 if none was."""
        return self._boots.get(peer, 0)

    def silent_seconds(self, peer: PeerId, now: float) -> float:
        """Return for how long a watched member has been silent; 0 for others."""
        watched = self._watched.get(peer)
        return now - watched.heard_at if watched is not None else 0.0

    def rtt_seconds(self, peer: PeerId) -> float:
        """Return the round trip to a peer; 0 before the first.

        It is the least of the last few: one that waited for dialling, or for a peer that stood
        still, says nothing of the way."""
        return min(self._rtt_seconds.get(peer, ()), default=0.0)

    # --- sounds --------------------------------------------------------------------------

    def heard(self, member: Member, now: float, rtt_seconds: float | None = None) -> list[Effect]:
        """A peer has said something, whatever it was. A newer boot makes the older one gone at
        once."""
        peer = member.peer
        if member.boot > self.boot_of(peer):
            self._boots[peer] = member.boot
            self.changes += 1
        if rtt_seconds is not None:
            self._rtt_seconds.setdefault(peer, deque(maxlen=RTT_SAMPLES)).append(rtt_seconds)
        effects = self._answer_askers(member) if self._probes else []
        watched = self._watched.get(peer)
        if watched is None and member.boot > self._members.get(peer, member).boot:
            watched = self._noticed(peer, now)
        if watched is None or member.boot < watched.member.boot:
            return effects
        if member.boot > watched.member.boot:
            return [*effects, *self._started_again(watched, now)]
        watched.heard(now)
        doubted, watched.suspicion = watched.suspicion or watched.is_told, ""
        if doubted and not watched.charge:
            watched.is_told = False
            self.changes += 1
            self._evidence.withdraw(self._me.peer, member)
            effects.append(Cleared(member))
        self._look_at(watched)
        return effects

    def _started_again(self, watched: Watched, now: float) -> list[Effect]:
        boot = self.boot_of(watched.member.peer)
        if boot <= watched.member.boot or watched.member in self._sure:
            return []
        reason = f"has started again (boot {boot})"
        self._sure[watched.member] = reason
        return self._charge(watched, reason, now)

    def left(self, member: Member, now: float) -> list[Effect]:
        """A member has said that it stops. It is not waited for."""
        watched = self._noticed(member.peer, now)
        if watched is None or watched.member != member or member in self._sure:
            return []
        self._sure[member] = "has left"
        return self._charge(watched, "has left", now)

    # --- links -----------------------------------------------------------------------------

    def link_open(self, peer: PeerId, now: float) -> None:
        """There is a link to a peer; nothing has been heard on it yet."""
        self._open.add(peer)
        self._lost.pop(peer, None)

    def link_lost(self, peer: PeerId, reason: str, now: float) -> None:
        """The last link to a peer has ended. That alone is no sign of death."""
        self._open.discard(peer)
        self._lost[peer] = reason

    def dial_refused(self, peer: PeerId, reason: str, now: float) -> list[Effect]:
        """Nobody listens where a peer was. After a lost link that is a suspicion at once."""
        failed = self.probe_failed(peer, reason)
        lost = self._lost.get(peer)
        watched = self._noticed(peer, now) if lost is not None else None
        why = f"its link was lost ({lost}) and nobody listens ({reason})"
        if watched is None or watched.suspicion == why:
            return failed
        watched.suspicion, watched.ask_at = why, now + self._ask_seconds
        accusation = self._accuse(watched, now)
        return [*failed, *self._ask(watched), accusation]

    # --- time --------------------------------------------------------------------------------

    @property
    def has_not_begun(self) -> bool:
        """Return whether `expire` was never called: pauses count from its first call on."""
        return self._expired_at is None

    @property
    def deadline(self) -> float:
        """When `expire` has to be called next; infinite if nobody is watched."""
        due = self._next_look()
        for _, until in self._probes.values():
            due = min(due, until)
        if self._queue and self._expired_at is not None:
            due = min(due, self._expired_at + ASK_SECONDS)
        return due

    def expire(self, now: float) -> list[Effect]:
        """Do what is due. Call it at `deadline`, and at least once a second."""
        self._forgive_own_pause(now)
        effects: list[Effect] = []
        for key in sorted(self._probes):
            if self._probes[key][1] <= now:
                effects.append(self._fail(key, "does not answer a ping"))
        for watched in self._due(now):
            silent = now - watched.heard_at
            if not watched.suspicion and now >= watched.silent_from:
                effects += self._suspect(watched, f"has been silent for {silent:.1f} s", now)
                continue
            if watched.suspicion and watched.ask_at <= now:
                watched.ask_at = now + self._ask_seconds
                effects += [Probe(watched.member), *self._ask(watched)]
            if (watched.suspicion or watched.charge) and watched.accuse_at <= now:
                effects.append(self._accuse(watched, now))
            self._look_at(watched)
        return effects

    @property
    def _ask_seconds(self) -> float:
        return ASK_SECONDS if self._asks else ACCUSE_SECONDS

    def _ask(self, watched: Watched) -> list[Effect]:
        """In a large swarm who hears all members asks others, once for all who have noticed."""
        return [AskOthers(watched.member)] if self._asks or watched.period is not None else []

    def _look_at(self, watched: Watched) -> None:
        """Note when something is to be done about a member. What is queued may be too early."""
        due = watched.due_at
        if due < watched.looked_at:
            watched.looked_at = due
            heapq.heappush(self._queue, (due, watched.member.peer))

    def _next_look(self) -> float:
        """Return when something is to be done about anybody."""
        while self._queue:
            at, peer = self._queue[0]
            watched = self._watched.get(peer)
            if watched is not None and watched.looked_at == at:
                if watched.due_at <= at:
                    return at
                watched.looked_at = float("inf")
                heapq.heappop(self._queue)
                self._look_at(watched)
            else:
                heapq.heappop(self._queue)
        return float("inf")

    def _due(self, now: float) -> list[Watched]:
        """Return about whom something is to be done now, in order of peer."""
        found = {}
        while self._next_look() <= now:
            _, peer = heapq.heappop(self._queue)
            found[peer] = self._watched[peer]
            found[peer].looked_at = float("inf")
        return [found[peer] for peer in sorted(found)]

    def _forgive_own_pause(self, now: float) -> None:
        """While this peer stood still (stopped, swapped out), nobody was silent, and what others
        have said meanwhile has yet to be read. Suspects are asked again, once: who is always late
        does not wait for ever."""
        late = now - self.deadline
        if self._expired_at is not None and late > PAUSE_SECONDS:
            for watched in self._watched.values():
                watched.heard_at = min(watched.heard_at + late, now)
                if watched.suspicion and not watched.is_told and not watched.is_asked_again:
                    watched.is_asked_again = True
                    watched.ask_at = now
                    watched.accuse_at = now + self._answer_seconds(watched.member.peer)
                    self._look_at(watched)
            self._probes = {
                key: (target, max(until, now + ASK_SECONDS))
                for key, (target, until) in self._probes.items()
            }
        self._expired_at = now

    def _suspect(self, watched: Watched, reason: str, now: float) -> list[Effect]:
        """See for oneself first: who has only stood still answers at once."""
        self.changes += 1
        watched.suspicion, watched.is_asked_again = reason, False
        watched.ask_at = now + self._ask_seconds
        watched.accuse_at = now + self._answer_seconds(watched.member.peer)
        self._look_at(watched)
        return [Probe(watched.member), *self._ask(watched)]

    def _charge(self, watched: Watched, reason: str, now: float) -> list[Effect]:
        watched.charge = reason
        return [self._accuse(watched, now)]

    def _accuse(self, watched: Watched, now: float) -> Accuse:
        self.changes += 1
        watched.is_told, watched.accuse_at = True, now + ACCUSE_SECONDS
        self._look_at(watched)
        return Accuse(watched.member, watched.charge or watched.suspicion)

    def _answer_seconds(self, peer: PeerId) -> float:
        """Return how long a peer that lives may take to answer a probe, dialling included."""
        if peer not in self._rtt_seconds:
            return DIAL_SECONDS
        round_trips = 2 if peer in self._open else DIAL_ROUND_TRIPS
        return ASK_SECONDS + round_trips * self.rtt_seconds(peer)

    # --- for others -----------------------------------------------------------------------

    def ping_for(self, asker: PeerId, target: Member, now: float) -> list[Effect]:
        """Answer whether this peer reaches `target`, at once or when a probe has had its time.

        What else is wrong with it is an answer, too."""
        watched = self._watched.get(target.peer)
        boot = self.boot_of(target.peer)
        if target == self._me:
            return [Answer(asker, target, "")]
        if boot > target.boot:
            return [Answer(asker, target, f"has started again (boot {boot})")]
        recent = now - REACHED_SECONDS
        if watched is not None and watched.member == target:
            if watched.charge:
                return [Answer(asker, target, watched.charge)]
            if target.peer in self._open and watched.heard_at >= recent:
                return [Answer(asker, target, "")]
        until = now + self._answer_seconds(target.peer)
        self._probes[(asker, target.peer)] = (target, until)
        return [Probe(target)]

    def probe_failed(self, peer: PeerId, reason: str) -> list[Effect]:
        """A probe could not be sent: its askers need not wait. That a probe is answered is a
        sound (`heard`)."""
        keys = sorted(key for key in self._probes if key[1] == peer)
        return [self._fail(key, reason) for key in keys]

    def _fail(self, key: tuple[PeerId, PeerId], reason: str) -> Answer:
        """Answer an asker that the target is not reached; that is this peer's word, too."""
        target, _ = self._probes.pop(key)
        watched = self._watched.get(target.peer)
        if watched is not None and watched.member == target:
            watched.is_told = True
        return Answer(key[0], target, reason)

    def _answer_askers(self, heard: Member) -> list[Effect]:
        effects: list[Effect] = []
        for key in sorted(key for key in self._probes if key[1] == heard.peer):
            target = self._probes[key][0]
            if target.boot <= heard.boot:
                again = target.boot < heard.boot
                reason = f"has started again (boot {heard.boot})" if again else ""
                effects.append(Answer(key[0], target, reason))
                del self._probes[key]
        return effects

    # --- what is alive and does not do what it owes ------------------------------------------

    def stuck(
        self, member: Member, heartbeat: Heartbeat, predicted_task_seconds: float, now: float
    ) -> list[Effect]:
        """Give up a member (perhaps this one) whose own word is that its executor hangs."""
        limit = limit_seconds(predicted_task_seconds)
        if not is_stuck(heartbeat.task_seconds, predicted_task_seconds):
            return []
        reason = f"executor hung: at one task for {heartbeat.task_seconds:.0f} s of {limit:.0f}"
        if member == self._me:
            if now - self._gave_up_at < ACCUSE_SECONDS:
                return []
            self._gave_up_at = now
            return [Accuse(member, reason)]
        return self._charge_once(member, reason, now)

    def overdue(
        self, heartbeats: Mapping[PeerId, Heartbeat], predicted_task_seconds: float, now: float
    ) -> list[Effect]:
        """Give up who is awaited for too long, as waiting.py says. A heartbeat of who is silent
        says nothing about now."""
        reached = max(REACHED_SECONDS, REACHED_PERIODS * self._pace.heartbeat_seconds)
        if self._pace.is_small:
            reached = REACHED_SECONDS
        fresh = {
            peer: each
            for peer, each in heartbeats.items()
            if self.silent_seconds(peer, now) <= reached
        }
        effects: list[Effect] = []
        for awaited, reason in self._waits.overdue(fresh, predicted_task_seconds, now):
            member = self._members.get(awaited)
            if member is not None:
                effects += self._charge_once(member, reason, now)
        return effects

    def report_missing(self, member: Member, now: float) -> list[Effect]:
        """On the step coordinator: a replica's Report has not come within 10 s.

        The first time work is lost, and the epoch's repair asks it again; the second time
        running the step coordinator's word is enough to leave it out."""
        before = self._unreported.get(member)
        self._unreported[member] = self._watches
        if before == self._watches:
            return []
        if before == self._watches - 1:
            return self._charge_once(member, REPORT_MISSING, now)
        return [LoseWork(member.peer, "sent no Report")]

    def resume_missing(self, coordinator: Member, now: float) -> list[Effect]:
        """On a replica: the step coordinator has not sent Resume. Two such words count."""
        return self._charge_once(coordinator, RESUME_MISSING, now)

    def _charge_once(self, member: Member, reason: str, now: float) -> list[Effect]:
        watched = self._noticed(member.peer, now)
        if watched is None or watched.member != member or watched.charge:
            return []
        return self._charge(watched, reason, now)

    # --- on the leader -------------------------------------------------------------------------

    def observed(self, observer: PeerId, target: Member, signed: Signed, now: float) -> None:
        """Collect an observation of the newest epoch, this peer's own as well. Whether `observer`
        signed it, and for which epoch, has been checked. Only members have a word, and only about
        members."""
        is_member = observer in self._members or observer == self._me.peer
        if is_member and self._members.get(target.peer) == target:
            self.changes += 1
            self._evidence.add(observer, target, signed, now)

    def doubt(self, target: Member, now: float) -> list[Effect]:
        """On who hears all members of a large swarm: another does not reach one of them. See for
        oneself, and ask others, sooner than its silence would tell."""
        watched = self._watched.get(target.peer)
        if self._pace.is_small or not self._asks or watched is None or watched.member != target:
            return []
        if watched.suspicion or watched.charge:
            return []
        return self._suspect(watched, "others do not reach it", now)

    def withdrawn(self, observer: PeerId, target: Member) -> None:
        """An observer reaches the target (again): what it said of it before does not count.

        What a peer says of itself stays said."""
        if observer != target.peer:
            self.changes += 1
            self._evidence.withdraw(observer, target)

    def gone(
        self, members: Sequence[Member], now: float, waiting: Container[PeerId] = ()
    ) -> dict[Member, str]:
        """Return whom of the newest plan's members the next one may leave out, and why.

        `waiting` are those who wait for others themselves."""
        return self._evidence.gone(members, self._sure, now, waiting)

    def evidence(self, member: Member) -> tuple[Signed, ...]:
        """Return the observations of a member that `gone` went by, by observer: they go into
        Review."""
        return self._evidence.of(member)


def is_stuck(task_seconds: float, predicted_task_seconds: float) -> bool:
    """Return whether a task has taken so long that its peer is given up."""
    return task_seconds > limit_seconds(predicted_task_seconds)


@by_identity
def _by_peer(members: Sequence[Member]) -> Mapping[PeerId, Member]:
    return {member.peer: member for member in members}
