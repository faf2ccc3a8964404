"""How often plans change that nobody needs: figures are measured, and measurements are noisy.

The rule: after each change of one's own free will the next one waits twice as long as the last, so
that their number per hour is bounded whatever is measured; after a quiet hour it is forgotten.
"""

FIRST_SECONDS = 30.0
LONGEST_SECONDS = 3600.0


class Calm:
    """Until when improvements wait."""

    def __init__(self) -> None:
        self._until = 0.0
        self._wait = FIRST_SECONDS
        self._quiet_from = 0.0

    def begin(self, now: float) -> None:
        """Work by a plan has begun: it is given time before it is improved."""
        self._until = max(self._until, now + FIRST_SECONDS)

    def changed(self, now: float) -> None:
        """A plan has been improved that could have stayed as it was."""
        if now >= self._quiet_from:
            self._wait = FIRST_SECONDS
        self._wait = min(2 * self._wait, LONGEST_SECONDS)
        self._until = now + self._wait
        self._quiet_from = self._until + LONGEST_SECONDS

    def is_calm(self, now: float) -> bool:
        """Return whether improvements have to wait now."""
        return now < self._until

    @property
    def until(self) -> float:
        """When the next improvement may be made."""
        return self._until
