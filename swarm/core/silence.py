"""How long one member may be silent before it is suspected.

The rule: patience follows what the member is like, between 3 and 15 seconds.
"""

from dataclasses import dataclass, field

from protocol.records import Member

HEARTBEAT_SECONDS = 1.0
SUSPICION_LEAST_SECONDS = 3.0
SUSPICION_MOST_SECONDS = 15.0


@dataclass
class Rhythm:
    """At what intervals a peer is heard: outlasts that it is watched."""

    interval_mean: float = HEARTBEAT_SECONDS
    interval_deviation: float = HEARTBEAT_SECONDS / 2

    @property
    def patience_seconds(self) -> float:
        """For how long it may be silent: mean and four deviations (as in RFC 6298)."""
        wanted = self.interval_mean + 4 * self.interval_deviation
        return min(max(wanted, SUSPICION_LEAST_SECONDS), SUSPICION_MOST_SECONDS)

    def heard_after(self, seconds: float) -> None:
        """Take in how long a sound took."""
        interval = min(max(seconds, 0.0), SUSPICION_MOST_SECONDS)
        error = interval - self.interval_mean
        self.interval_mean += error / 8
        self.interval_deviation += (abs(error) - self.interval_deviation) / 4


@dataclass
class Watched:
    """What is known of one member."""

    member: Member
    heard_at: float
    """Or since when it is watched."""
    rhythm: Rhythm = field(default_factory=Rhythm)
    was_heard: bool = False
    suspicion: str = ""
    """Why this peer cannot reach it; empty while it can."""
    charge: str = ""
    """What is wrong with it although it is heard; lasts for the epoch."""
    is_told: bool = False
    """Others have this peer's word, of this epoch, that it cannot be reached."""
    is_asked_again: bool = False
    """This peer stood still while it waited for the suspect's answer, and has begun anew."""
    ask_at: float = 0.0
    accuse_at: float = 0.0

    @property
    def patience_seconds(self) -> float:
        """For how long it may be silent: longest before its first sound."""
        return self.rhythm.patience_seconds if self.was_heard else SUSPICION_MOST_SECONDS

    def heard(self, now: float) -> None:
        """Take in a sound; the first one ends no interval."""
        if self.was_heard:
            self.rhythm.heard_after(now - self.heard_at)
        self.was_heard, self.heard_at = True, now
