"""How long one member may be silent before it is suspected.

The rule: patience follows what the member is like, between 3 and 15 seconds.
"""

from dataclasses import dataclass

from protocol.records import Member

HEARTBEAT_SECONDS = 1.0
SUSPICION_LEAST_SECONDS = 3.0
SUSPICION_MOST_SECONDS = 15.0


@dataclass
class Watched:
    """What is known of one member."""

    member: Member
    heard_at: float
    """Or since when it is watched."""
    was_heard: bool = False
    interval_mean: float = HEARTBEAT_SECONDS
    interval_deviation: float = HEARTBEAT_SECONDS / 2
    suspicion: str = ""
    """Why this peer cannot reach it; empty while it can."""
    charge: str = ""
    """What is wrong with it although it is heard; lasts for the epoch."""
    ask_at: float = 0.0
    accuse_at: float = 0.0

    @property
    def patience_seconds(self) -> float:
        """For how long it may be silent: mean and four deviations (as in RFC 6298), and longest
        before its first sound."""
        if not self.was_heard:
            return SUSPICION_MOST_SECONDS
        wanted = self.interval_mean + 4 * self.interval_deviation
        return min(max(wanted, SUSPICION_LEAST_SECONDS), SUSPICION_MOST_SECONDS)

    def heard(self, now: float) -> None:
        """Take in a sound, and how long it took; the first one ends no interval."""
        if not self.was_heard:
            self.was_heard, self.heard_at = True, now
            return
        interval = min(max(now - self.heard_at, 0.0), SUSPICION_MOST_SECONDS)
        error = interval - self.interval_mean
        self.interval_mean += error / 8
        self.interval_deviation += (abs(error) - self.interval_deviation) / 4
        self.heard_at = now
