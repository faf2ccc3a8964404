"""What peers tell each other of their measurements: what is checked, and what is worth telling.

The rule: a peer speaks of itself and of the links from it, nothing else; of two words of one peer
the newer counts.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from msgspec.structs import replace

from protocol.errors import RemoteProtocolError
from protocol.records import (
    ESTIMATES_PURPOSE,
    MAX_LINKS,
    Estimates,
    LinkEstimate,
    RunId,
    Signed,
    open_signed,
)
from protocol.signing import PeerId

TELL_SECONDS = 10.0
"""Estimates are not told more often,"""
FIRST_WORDS, FIRST_SECONDS = 8, 2.0
"""but for the first words of a peer: the first plan waits for them."""
NEWS_SECONDS = 60.0
"""What has changed little waits for so long."""
NEWS_RATIO = 1.1
"""What has changed by more than this is news."""
SAME_RATIO = 1.03
"""What has changed by less than this has not changed."""
SAME_SECONDS = 0.0005
"""Latencies that differ by less make no difference."""
OWN = ("slowdown", "uplink", "downlink")


def check_estimates(signed: Signed, sender: PeerId, run: RunId, boot: int) -> Estimates:
    """Return what `sender`, at this boot, says that it has measured.

    Raises RemoteProtocolError if it may not say that."""
    if signed.signer != sender:
        raise RemoteProtocolError(f"{sender} sends estimates of {signed.signer}")
    told = open_signed(signed, ESTIMATES_PURPOSE, Estimates)
    if (told.run, told.peer, told.boot) != (run, sender, boot):
        raise RemoteProtocolError(f"estimates of {sender} are not of this run and boot")
    names = [link.peer for link in told.links]
    if sender in names or not all(one < other for one, other in pairwise(names)):
        raise RemoteProtocolError(f"links of {sender} are not in order of peer, each once")
    return told


def is_newer(told: Estimates, than: Estimates | None) -> bool:
    """Return whether one word of a peer replaces another."""
    return than is None or (told.boot, told.sequence) > (than.boot, than.sequence)


@dataclass
class Telling:
    """When a peer tells its estimates, and what it told last; `now` is in seconds."""

    _said: Estimates | None = None
    _said_at: float = -float("inf")
    _told: dict[PeerId, int] = field(default_factory=dict)
    """The sequence that each listener was told last."""

    def news(self, made: Estimates, now: float) -> Estimates | None:
        """Return what is to be told from now on; None while what was told before is good enough.

        `made` is what this peer knows now; its sequence does not matter."""
        said = self._said
        if said is not None:
            made = replace(_settled(said, made), sequence=said.sequence)
            age = now - self._said_at
            pause = FIRST_SECONDS if said.sequence < FIRST_WORDS else TELL_SECONDS
            is_due = age >= NEWS_SECONDS or (age >= pause and _is_news(said, made))
            if made == said or not is_due:
                return None
        made = replace(made, sequence=1 if said is None else said.sequence + 1)
        self._said, self._said_at = made, now
        return made

    def untold(self, listeners: list[PeerId]) -> list[PeerId]:
        """Return who has not been told the newest word, and note that it is now; who is no
        listener any more is forgotten."""
        if self._said is None:
            return []
        newest = self._said.sequence
        missing = [peer for peer in listeners if self._told.get(peer) != newest]
        self._told = dict.fromkeys(listeners, newest)
        return missing

    def forget(self, listener: PeerId) -> None:
        """A listener may have forgotten what it was told, or be another start of that peer."""
        self._told.pop(listener, None)


def fitting(links: list[LinkEstimate]) -> tuple[LinkEstimate, ...]:
    """Return links in order of peer, as many as a record holds: those whose bandwidth is known
    first."""
    kept = sorted(links, key=lambda link: (link.bandwidth == 0, link.peer))[:MAX_LINKS]
    return tuple(sorted(kept, key=lambda link: link.peer))


def _settled(said: Estimates, made: Estimates) -> Estimates:
    """Return what is known now without what has hardly changed: that stays as it was said."""
    before = {link.peer: link for link in said.links}
    links = tuple(
        old if (old := before.get(new.peer)) is not None and _is_same(old, new) else new
        for new in made.links
    )
    own = {
        name: getattr(said, name)
        for number in OWN
        for name in (number, f"{number}_spread")
        if not _differs(getattr(said, number), getattr(made, number), SAME_RATIO)
    }
    return replace(made, links=links, **own)


def _is_same(old: LinkEstimate, new: LinkEstimate) -> bool:
    same_rate = not _differs(old.bandwidth, new.bandwidth, SAME_RATIO)
    return same_rate and not _is_farther(old.latency_seconds, new.latency_seconds, SAME_RATIO)


def _is_news(said: Estimates, made: Estimates) -> bool:
    if any(_differs(getattr(said, name), getattr(made, name), NEWS_RATIO) for name in OWN):
        return True
    one, other = ({link.peer: link for link in each.links} for each in (said, made))
    for peer in sorted(one.keys() | other.keys()):
        old, new = (each.get(peer) or LinkEstimate(peer, 0.0, 0.0, 1.0) for each in (one, other))
        if _differs(old.bandwidth, new.bandwidth, NEWS_RATIO):
            return True
        if _is_farther(old.latency_seconds, new.latency_seconds, NEWS_RATIO):
            return True
    return False


def _differs(one: float, other: float, ratio: float) -> bool:
    return max(one, other) > ratio * min(one, other)


def _is_farther(one: float, other: float, ratio: float) -> bool:
    """Return whether two latencies differ by as much as a plan could depend on."""
    return abs(one - other) > SAME_SECONDS and _differs(one, other, ratio)
