"""Changes that belong together are acted on together.

Sans-IO: `now` is in seconds of any clock that does not go back.
"""

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
