"""How long one member may be silent before it is suspected.

The rule: patience follows what the member is like, between 3 and 15 seconds; or, of who says less
often than every second how it is, from three times as long as that on.
"""

from dataclasses import dataclass, field

from protocol.records import Member
from swarm.core.pace import HEARTBEAT_SECONDS

SUSPICION_LEAST_SECONDS = 3.0
SUSPICION_MOST_SECONDS = 15.0
SUSPICION_LEAST_PERIODS, SUSPICION_MOST_PERIODS = 3, 5
NEVER = float("inf")


@dataclass
class Rhythm:
    """At what intervals a peer is heard: outlasts that it is watched."""

    interval_mean: float = HEARTBEAT_SECONDS
    interval_deviation: float = HEARTBEAT_SECONDS / 2

    def patience_seconds(self, period: float = HEARTBEAT_SECONDS) -> float:
        """For how long it may be silent that is to be heard every `period` seconds: mean and four
        deviations (as in RFC 6298)."""
        wanted = self.interval_mean + 4 * self.interval_deviation
        least = max(SUSPICION_LEAST_SECONDS, SUSPICION_LEAST_PERIODS * period)
        return min(max(wanted, least), longest_patience(period))

    def heard_after(self, seconds: float, period: float = HEARTBEAT_SECONDS) -> None:
        """Take in how long a sound took."""
        interval = min(max(seconds, 0.0), longest_patience(period))
        error = interval - self.interval_mean
        self.interval_mean += error / 8
        self.interval_deviation += (abs(error) - self.interval_deviation) / 4


def longest_patience(period: float) -> float:
    """Return for how long whom nobody has heard yet may be silent."""
    return max(SUSPICION_MOST_SECONDS, SUSPICION_MOST_PERIODS * period)


@dataclass
class Watched:
    """What is known of one member."""

    member: Member
    heard_at: float
    """Or since when it is watched."""
    rhythm: Rhythm = field(default_factory=Rhythm)
    period: float | None = HEARTBEAT_SECONDS
    """How often it is to be heard; None where its silence means nothing here."""
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
    looked_at: float = NEVER
    """When the next look at it is due at the latest (Membership's queue)."""

    @property
    def silent_from(self) -> float:
        """When it has been silent for too long: longest before its first sound."""
        if self.period is None:
            return NEVER
        if not self.was_heard:
            return self.heard_at + longest_patience(self.period)
        return self.heard_at + self.rhythm.patience_seconds(self.period)

    @property
    def due_at(self) -> float:
        """When something is to be done about it next."""
        at = self.ask_at if self.suspicion else self.silent_from
        return min(at, self.accuse_at) if self.suspicion or self.charge else at

    def heard(self, now: float) -> None:
        """Take in a sound; the first one ends no interval."""
        if self.was_heard:
            self.rhythm.heard_after(now - self.heard_at, self.period or HEARTBEAT_SECONDS)
        self.was_heard, self.heard_at = True, now
