"""When enough has been measured for a first plan: its cuts stay, so the links should be known.

The rule: it waits until every peer has told of the bandwidth to some others, but not for ever:
some links cannot be measured, and some peers are busy.
"""

from collections.abc import Mapping, Sequence

from protocol.records import Estimates
from protocol.signing import PeerId

LONGEST_SECONDS = 20.0
"""From the last newcomer on; then the plan is made of what is known."""
LINKS = 4
"""Of so many links each peer should know the bandwidth, or of half of all."""


class Gathering:
    """For how long the same peers have been waiting for their first plan."""

    def __init__(self) -> None:
        self._peers: tuple[PeerId, ...] = ()
        self._since = 0.0

    def is_enough(
        self, peers: Sequence[PeerId], told: Mapping[PeerId, Estimates], now: float
    ) -> bool:
        """Return whether a plan for these peers should be made now, of what they have told."""
        if self._peers != tuple(peers):
            self._peers, self._since = tuple(peers), now
        if now >= self._since + LONGEST_SECONDS:
            return True
        wanted = min(LINKS, len(peers) // 2)
        return all(peer in told and _known(told[peer], peers) >= wanted for peer in peers)


def _known(told: Estimates, peers: Sequence[PeerId]) -> int:
    there = frozenset(peers)
    return sum(1 for link in told.links if link.bandwidth > 0 and link.peer in there)
