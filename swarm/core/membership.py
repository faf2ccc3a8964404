"""Who is there: sounds, silence, suspicion, and members that live and do not do what they owe.

The rule: what one peer notices is an accusation; only evidence (evidence.py) lets a plan leave a
member out. Sans-IO: `now` is in seconds of any clock that does not go back, and what is to be
done is returned as effects.
"""

from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from protocol.messages import Heartbeat
from protocol.records import Member, Signed
from protocol.signing import PeerId
from swarm.core.evidence import REPORT_MISSING, RESUME_MISSING, Evidence
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
        self._members: frozenset[Member] = frozenset()
        self._watched: dict[PeerId, Watched] = {}
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

    # --- who matters ---------------------------------------------------------------------

    def watch(
        self, members: Sequence[Member], now: float, coordinator: PeerId = ""
    ) -> list[Effect]:
        """Watch whom the newly adopted plan names, and nobody else.

        Observations and charges are settled by the plan, silence is not. Call it once for each
        plan. `coordinator` is its step coordinator."""
        self._watches += 1
        self._members = frozenset(members)
        self._evidence.begin_epoch(coordinator)
        self._waits = Waits(coordinator)
        named = {member.peer: member for member in members if member.peer != self._me.peer}
        before, self._watched = self._watched, {}
        for peer, member in sorted(named.items()):
            known = before.get(peer)
            if known is None or known.member != member:
                known = Watched(member, now, self._rhythms.setdefault(peer, Rhythm()))
            known.charge = ""
            if known.is_told:
                known.is_told, known.accuse_at = False, now
            self._watched[peer] = known
        self._sure = {each: why for each, why in self._sure.items() if each in members}
        self._unreported = {each: at for each, at in self._unreported.items() if each in members}
        effects = self._own_older_boot(members)
        for watched in list(self._watched.values()):
            if watched.member in self._sure:
                effects += self._charge(watched, self._sure[watched.member], now)
            else:
                effects += self._started_again(watched, now)
        return effects

    def _own_older_boot(self, members: Sequence[Member]) -> list[Effect]:
        """If the plan names an older boot of this peer, it has no role: by its own word."""
        reason = f"has started again (boot {self._me.boot})"
        older = [each for each in members if each.peer == self._me.peer and each != self._me]
        self._sure |= dict.fromkeys(older, reason)
        return [Accuse(member, reason) for member in older]

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
        self._boots[peer] = max(self.boot_of(peer), member.boot)
        if rtt_seconds is not None:
            self._rtt_seconds.setdefault(peer, deque(maxlen=RTT_SAMPLES)).append(rtt_seconds)
        effects = self._answer_askers(member)
        watched = self._watched.get(peer)
        if watched is None or member.boot < watched.member.boot:
            return effects
        if member.boot > watched.member.boot:
            return [*effects, *self._started_again(watched, now)]
        watched.heard(now)
        doubted, watched.suspicion = watched.suspicion or watched.is_told, ""
        if doubted and not watched.charge:
            watched.is_told = False
            self._evidence.withdraw(self._me.peer, member)
            effects.append(Cleared(member))
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
        watched = self._watched.get(member.peer)
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
        watched = self._watched.get(peer)
        lost = self._lost.get(peer)
        why = f"its link was lost ({lost}) and nobody listens ({reason})"
        if watched is None or lost is None or watched.suspicion == why:
            return failed
        watched.suspicion, watched.ask_at = why, now + ASK_SECONDS
        return [*failed, AskOthers(watched.member), self._accuse(watched, now)]

    # --- time --------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """When `expire` has to be called next; infinite if nobody is watched."""
        times = [until for _, until in self._probes.values()]
        for watched in self._watched.values():
            if watched.suspicion:
                times.append(watched.ask_at)
            else:
                times.append(watched.heard_at + watched.patience_seconds)
            if watched.suspicion or watched.charge:
                times.append(watched.accuse_at)
        if self._watched and self._expired_at is not None:
            times.append(self._expired_at + ASK_SECONDS)
        return min(times, default=float("inf"))

    def expire(self, now: float) -> list[Effect]:
        """Do what is due. Call it at `deadline`, and at least once a second."""
        self._forgive_own_pause(now)
        effects: list[Effect] = []
        for key in sorted(self._probes):
            if self._probes[key][1] <= now:
                effects.append(self._fail(key, "does not answer a ping"))
        for _, watched in sorted(self._watched.items()):
            silent = now - watched.heard_at
            # The same sum as in `deadline`: rounding must not leave it in the past.
            if not watched.suspicion and now >= watched.heard_at + watched.patience_seconds:
                effects += self._suspect(watched, f"has been silent for {silent:.1f} s", now)
                continue
            if watched.suspicion and watched.ask_at <= now:
                watched.ask_at = now + ASK_SECONDS
                effects += [Probe(watched.member), AskOthers(watched.member)]
            if (watched.suspicion or watched.charge) and watched.accuse_at <= now:
                effects.append(self._accuse(watched, now))
        return effects

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
            self._probes = {
                key: (target, max(until, now + ASK_SECONDS))
                for key, (target, until) in self._probes.items()
            }
        self._expired_at = now

    def _suspect(self, watched: Watched, reason: str, now: float) -> list[Effect]:
        """See for oneself first: who has only stood still answers at once."""
        watched.suspicion, watched.is_asked_again = reason, False
        watched.ask_at = now + ASK_SECONDS
        watched.accuse_at = now + self._answer_seconds(watched.member.peer)
        return [Probe(watched.member), AskOthers(watched.member)]

    def _charge(self, watched: Watched, reason: str, now: float) -> list[Effect]:
        watched.charge = reason
        return [self._accuse(watched, now)]

    def _accuse(self, watched: Watched, now: float) -> Accuse:
        watched.is_told, watched.accuse_at = True, now + ACCUSE_SECONDS
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
        fresh = {
            peer: each
            for peer, each in heartbeats.items()
            if self.silent_seconds(peer, now) <= REACHED_SECONDS
        }
        effects: list[Effect] = []
        for awaited, reason in self._waits.overdue(fresh, predicted_task_seconds, now):
            watched = self._watched.get(awaited)
            if watched is not None:
                effects += self._charge_once(watched.member, reason, now)
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
        watched = self._watched.get(member.peer)
        if watched is None or watched.member != member or watched.charge:
            return []
        return self._charge(watched, reason, now)

    # --- on the leader -------------------------------------------------------------------------

    def observed(self, observer: PeerId, target: Member, signed: Signed, now: float) -> None:
        """Collect an observation of the newest epoch, this peer's own as well. Whether `observer`
        signed it, and for which epoch, has been checked. Only members have a word, and only about
        members."""
        known = {self._me.peer, *(member.peer for member in self._members)}
        if target in self._members and observer in known:
            self._evidence.add(observer, target, signed, now)

    def withdrawn(self, observer: PeerId, target: Member) -> None:
        """An observer reaches the target (again): what it said of it before does not count.

        What a peer says of itself stays said."""
        if observer != target.peer:
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


DEBOUNCE_SECONDS = 0.2


class Debounce:
    """Lets changes gather for 200 ms from the first one; later ones do not prolong it."""

    def __init__(self, seconds: float = DEBOUNCE_SECONDS) -> None:
        self._seconds = seconds
        self._deadline: float | None = None

    @property
    def deadline(self) -> float:
        """When the changes are due; infinite while there are none."""
        return float("inf") if self._deadline is None else self._deadline

    def note(self, now: float) -> None:
        """Something has changed."""
        if self._deadline is None:
            self._deadline = now + self._seconds

    def forget(self) -> None:
        """Nothing is different from what it was before the first change."""
        self._deadline = None

    def due(self, now: float) -> bool:
        """Return whether changes are to be acted on now; they are then forgotten."""
        if now < self.deadline:
            return False
        self._deadline = None
        return True
