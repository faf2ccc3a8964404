"""How long a role lasts: as long as its peer stays, by how often members left of late.

In a swarm of eighty somebody may leave every thirty seconds, and yet who is moved now stays for
forty minutes. The rule: a power of two, so that a problem stays the same problem while nothing
happens.
"""

import math
from collections import deque

SHORTEST_SECONDS, LONGEST_SECONDS = 32.0, 4096.0
KEPT = 8


class Horizon:
    """What this peer has seen of members that left."""

    def __init__(self) -> None:
        self._losses: deque[tuple[float, int]] = deque(maxlen=KEPT + 1)

    def left(self, now: float, peers: int) -> None:
        """A plan without `peers` of the members before has been adopted."""
        self._losses.append((now, peers))

    def seconds(self, members: int) -> float:
        """Return how long one of `members` stays, by the last losses; the longest before two."""
        if len(self._losses) < 2:
            return LONGEST_SECONDS
        (began, _), *losses = self._losses
        pause = (losses[-1][0] - began) / sum(peers for _, peers in losses)
        rounded = 2.0 ** round(math.log2(max(pause * members, 1.0)))
        return min(max(rounded, SHORTEST_SECONDS), LONGEST_SECONDS)
