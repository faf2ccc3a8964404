"""Work that was lost with a link though nobody has died, and peers that keep losing it.

The rule: a loss lasts until a plan that is activated at once follows, or everybody works by a newer
one; only work between two peers that are both heard afterwards is lost, else one of them may be
dead. Sans-IO: `now` is in seconds of any clock that does not go back.
"""

from dataclasses import dataclass, field

from protocol.records import Generation
from protocol.signing import PeerId

Key = tuple[Generation, int]
"""Generation and epoch."""
Pair = tuple[PeerId, PeerId]
"""Two peers, sorted."""

APART_LOSSES = 3
APART_SECONDS = 60.0
"""Who have lost work between them so often within this time are kept apart for as long."""


@dataclass
class Losses:
    """What a leader has been told, and whom it has heard since."""

    _since: Key | None = None
    """The last plan that was activated at once: what was lost before it does not matter."""
    _lost: dict[Pair, tuple[Key, float]] = field(default_factory=dict)
    _heard: dict[PeerId, float] = field(default_factory=dict)
    _times: dict[Pair, list[float]] = field(default_factory=dict)

    def lost(self, peer: PeerId, other: PeerId, key: Key, now: float) -> None:
        """Work of the plan `key` between two peers is lost. May be repeated."""
        if self._since is not None and key < self._since:
            return
        pair = (min(peer, other), max(peer, other))
        if pair not in self._lost:
            self._lost[pair] = (key, now)
            recent = [at for at in self._times.get(pair, ()) if at > now - APART_SECONDS]
            self._times[pair] = [*recent, now]

    def heard(self, peer: PeerId, at: float) -> bool:
        """A peer is alive. Return whether that can change anything now."""
        self._heard[peer] = at
        return bool(self._lost)

    def adopted(self, key: Key, *, at_once: bool) -> None:
        """There is a newer plan; a planned one leaves the work to go on meanwhile."""
        if at_once:
            self._since = key
            self._lost.clear()

    def settled(self, key: Key) -> None:
        """Everybody works by this plan: what older ones lost has been done again."""
        self._lost = {pair: each for pair, each in self._lost.items() if each[0] >= key}

    @property
    def reason(self) -> str:
        """Return why work is lost; "" if none is, or if one of those concerned may be dead."""
        alive = all(
            self._heard.get(peer, at) > at for pair, (_, at) in self._lost.items() for peer in pair
        )
        if not self._lost or not alive:
            return ""
        between = (" and ".join(dict.fromkeys(pair)) for pair in sorted(self._lost))
        return f"a link was lost between {', '.join(between)}"

    def apart(self, now: float) -> tuple[Pair, ...]:
        """Return who should not work with each other for the time being, sorted."""
        recent = now - APART_SECONDS
        return tuple(
            sorted(
                pair
                for pair, times in self._times.items()
                if len(times) >= APART_LOSSES and times[-1] > recent
            )
        )
