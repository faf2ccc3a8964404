"""How long a plan is expected to last: as long as there was between the last changes of members.

The rule: a power of two, so that a problem stays the same problem while nothing happens.
"""

import math
from collections import deque

SHORTEST_SECONDS, LONGEST_SECONDS = 32.0, 4096.0
KEPT = 8


class Horizon:
    """What this peer has seen of changes of members."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=KEPT + 1)

    def changed(self, now: float) -> None:
        """A plan with other members has been adopted."""
        self._times.append(now)

    @property
    def seconds(self) -> float:
        """Return the mean time between the last changes; the longest before two of them."""
        if len(self._times) < 2:
            return LONGEST_SECONDS
        mean = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        rounded = 2.0 ** round(math.log2(max(mean, 1.0)))
        return min(max(rounded, SHORTEST_SECONDS), LONGEST_SECONDS)
