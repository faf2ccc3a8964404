"""What a plan that nobody needs must gain, and when: what is measured is noisy.

The rule: after each change of one's own free will the next one waits twice as long as the last, so
that their number per hour is bounded whatever is measured; after a quiet hour it is forgotten. Who
has come or gone is no noise: once after that it does not wait, and a small gain is enough.
"""

import math

from swarm.core.scheduling.rebalance import HYSTERESIS

FIRST_SECONDS = 30.0
LONGEST_SECONDS = 3600.0
MEMBERS_SECONDS = 300.0
"""How long other members are a reason for another plan."""
MEMBERS_GAIN = 0.02
"""By what fraction of a step it has to be better then."""


class Calm:
    """How long improvements wait, and what they have to gain then."""

    def __init__(self) -> None:
        self._until = 0.0
        self._wait = FIRST_SECONDS
        self._quiet_from = 0.0
        self._members_until = -math.inf

    def begin(self, now: float) -> None:
        """Work by a plan has begun: it is given time before it is improved."""
        self._until = max(self._until, now + FIRST_SECONDS)

    def members_changed(self, now: float) -> None:
        """There are others than before."""
        self._until = min(self._until, now)
        self._members_until = now + MEMBERS_SECONDS

    def changed(self, now: float) -> None:
        """A plan has been improved that could have stayed as it was."""
        if now < self._members_until:
            self._members_until = -math.inf
            return self.begin(now)
        if now >= self._quiet_from:
            self._wait = FIRST_SECONDS
        self._wait = min(2 * self._wait, LONGEST_SECONDS)
        self._until = now + self._wait
        self._quiet_from = self._until + LONGEST_SECONDS

    def least_gain(self, now: float) -> float:
        """Return by what fraction a step has to be shorter for an improvement; infinite while all
        of them have to wait."""
        if now < self._until:
            return math.inf
        return MEMBERS_GAIN if now < self._members_until else HYSTERESIS

    @property
    def until(self) -> float:
        """When the next improvement may be made."""
        return self._until
