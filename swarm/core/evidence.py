"""What the leader has been told about members in one epoch, and when it is enough.

The rule: a member is given up on the word of as many observers as there are others whom the
leader reaches, two at most; on its own word; or on the step coordinator's where two epochs running
had no Report from it.
"""

from collections.abc import Container, Mapping, Sequence

from protocol.records import Member, Observation, Signed, decode_record
from protocol.signing import PeerId

OBSERVERS = 2
OBSERVATION_SECONDS = 15.0
"""How long an observation counts that is not repeated."""
REPORT_MISSING = "sent no Report in two epochs running"
"""The reason that counts on the step coordinator's word alone."""
RESUME_MISSING = "sent no Resume"
"""The reason that does not count while the step coordinator waits for others itself."""


class Evidence:
    """Observations of the newest epoch."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._coordinator: PeerId = ""
        self._known: dict[Member, dict[PeerId, tuple[Signed, str, float]]] = {}
        self._counted: dict[Member, list[PeerId]] = {}
        """Whose words `gone` counted of each member, at most as many as are ever needed."""

    def begin_epoch(self, coordinator: PeerId) -> None:
        """Forget all: observations are good for one epoch."""
        self._coordinator = coordinator
        self._known.clear()
        self._counted.clear()

    def add(self, observer: PeerId, target: Member, signed: Signed, now: float) -> None:
        """Collect an observation of this epoch; its signature has been checked."""
        reason = decode_record(signed.payload, Observation).reason
        self._known.setdefault(target, {})[observer] = (signed, reason, now)

    def withdraw(self, observer: PeerId, target: Member) -> None:
        """An observer takes its word back."""
        self._known.get(target, {}).pop(observer, None)

    def of(self, target: Member) -> tuple[Signed, ...]:
        """Return the observations of a member that `gone` went by last, by observer: its own, the
        step coordinator's, and as many others as are needed at most."""
        known = self._known.get(target, {})
        wanted = {target.peer, self._coordinator, *self._counted.get(target, ())}
        return tuple(known[observer][0] for observer in sorted(wanted & known.keys()))

    def gone(
        self,
        members: Sequence[Member],
        sure: Mapping[Member, str],
        now: float,
        waiting: Container[PeerId] = (),
    ) -> dict[Member, str]:
        """Return whom the next plan may leave out, and why; `sure` need no observers.

        Who is of the `waiting` does not fail by waiting. Observers count if the leader reaches
        them and they are not gone themselves: then the plan keeps them, and whoever reviews it
        counts them as well.
        """
        if not self._known and not sure:
            self._counted = {}
            return {}
        found = {}
        for member in members:
            reason = sure.get(member) or self._own_word(member)
            if reason:
                found[member] = reason
        others = [each for each in members if each not in found and each.peer != self._me]
        nobody: dict[PeerId, str] = {}
        observers = {
            member: self._observers(member, now, excused=member.peer in waiting)
            if member in self._known
            else nobody
            for member in others
        }
        reached = {member.peer for member in others if self._me not in observers[member]}
        reached.add(self._me)
        needed = min(OBSERVERS, len(reached))

        def enough(target: Member, unheard: Sequence[Member]) -> bool:
            counted = reached - {member.peer for member in unheard}
            return len(counted & observers[target].keys()) >= needed

        accused = [member for member in others if observers[member] and enough(member, ())]
        while not all(enough(member, accused) for member in accused):
            # Somebody is accused by who is accused as well: that has to wait for other observers.
            accused = [member for member in accused if enough(member, accused)]
        for member in accused:
            found[member] = observers[member][min(observers[member])]
        kept = reached - {member.peer for member in accused}
        told = [member for member in members if member in self._known]
        self._counted = {member: self._first(kept, member, now, waiting) for member in told}
        return {member: found[member] for member in sorted(found, key=lambda each: each.peer)}

    def _first(
        self, kept: set[PeerId], member: Member, now: float, waiting: Container[PeerId]
    ) -> list[PeerId]:
        """Return who of those that the plan keeps has spoken against a member: this peer first,
        whose word counts for every reviewer."""
        observers = self._observers(member, now, excused=member.peer in waiting)
        return sorted(kept & observers.keys(), key=lambda peer: (peer != self._me, peer))[
            :OBSERVERS
        ]

    def _own_word(self, member: Member) -> str:
        known = self._known.get(member, {})
        if member.peer in known:
            return known[member.peer][1]
        if self._coordinator in known and known[self._coordinator][1] == REPORT_MISSING:
            return REPORT_MISSING
        return ""

    def _observers(self, member: Member, now: float, *, excused: bool) -> dict[PeerId, str]:
        return {
            observer: reason
            for observer, (_, reason, at) in self._known.get(member, {}).items()
            if now - at <= OBSERVATION_SECONDS and not (excused and reason == RESUME_MISSING)
        }
