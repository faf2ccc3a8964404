"""Who is awaited for too long, though it lives: it has begun nothing and waits for nobody itself.

The rule: waiting is not failing. Of a chain of peers that wait for each other only the last counts;
unless the one that waits does not hear it, or it says itself that it has done what is awaited.
Sans-IO: `now` is in seconds of any clock that does not go back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.messages import Heartbeat
from protocol.signing import PeerId
from swarm.core.pace import HEARTBEAT_SECONDS

STUCK_SECONDS = 30.0
STUCK_TASKS = 20
"""A task or a message that is owed is given up after max(30 s, 20 x the predicted time)."""
OVERDUE_SECONDS = 3.0
"""For so long, some heartbeats of both, it has to be so: what has just come is not missing."""
IN_STEP = ("reducing", "gathering", "prepared")
"""States in which replicas wait for each other within a step, in their order."""


def limit_seconds(predicted_task_seconds: float) -> float:
    """Return for how long a task, or somebody who is owed a message, goes on unchanged at most."""
    return max(STUCK_SECONDS, STUCK_TASKS * predicted_task_seconds)


@dataclass
class Waits:
    """Who was found to be overdue in one epoch, and since when."""

    coordinator: PeerId = ""
    """The step coordinator."""
    period: float = HEARTBEAT_SECONDS
    """How often members say how they are."""
    _since: dict[tuple[PeerId, PeerId], float] = field(default_factory=dict)

    def overdue(
        self, heartbeats: Mapping[PeerId, Heartbeat], predicted_task_seconds: float, now: float
    ) -> list[tuple[PeerId, str]]:
        """Return who is to be given up now, and why; call it at every change, or every second."""
        limit = limit_seconds(predicted_task_seconds)
        found = {
            (peer, awaited): heartbeat.awaits_seconds
            for peer, heartbeat in sorted(heartbeats.items())
            if heartbeat.awaits_seconds > limit
            for awaited in sorted(heartbeat.awaits)
            if awaited in heartbeats and not self._is_excused(peer, awaited, heartbeats, limit)
        }
        self._since = {pair: self._since.get(pair, now) for pair in found}
        return [
            (awaited, f"{peer} has waited for it for {seconds:.0f} s")
            for (peer, awaited), seconds in found.items()
            if now - self._since[peer, awaited] >= max(OVERDUE_SECONDS, 2 * self.period)
        ]

    def _is_excused(
        self, peer: PeerId, awaited: PeerId, heartbeats: Mapping[PeerId, Heartbeat], limit: float
    ) -> bool:
        ours, theirs = heartbeats[peer], heartbeats[awaited]
        if awaited in ours.suspects:
            # Its trouble whatever it waits for: its frames reach others only, all wait in a ring.
            return False
        if ours.state in IN_STEP and theirs.version == ours.version:
            if theirs.state not in IN_STEP:
                return True  # it has yet to get to the step, or to get its microbatches
            passed = self._place(awaited, theirs) > self._place(peer, ours)
            if passed and theirs.awaits_seconds > limit:
                return False  # what it waits for comes after what it says it has done
        return bool(theirs.awaits or theirs.task_seconds)

    def _place(self, peer: PeerId, heartbeat: Heartbeat) -> int:
        """Return how far a replica is in the step: prepared, the step coordinator has yet to wait
        for those who are prepared as well."""
        place = 2 * IN_STEP.index(heartbeat.state)
        return place - 1 if peer == self.coordinator and heartbeat.state == "prepared" else place
