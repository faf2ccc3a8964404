"""Which version of the model is complete: what replicas have said of their disks, put together.

The rule: a version is complete when every replica of every stage has written it. The hashes that
name it are those of each stage's first replica.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.records import Completed, PlanBody
from protocol.signing import PeerId

MAX_VERSIONS = 8
"""So many of one peer's versions are remembered, the last that it told of: peers are not equally
fast, and not each writes every version."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers [first, last) at a version."""

    lineage: int
    version: int
    first: int
    last: int


class Completion:
    """What every replica has written."""

    def __init__(self) -> None:
        self._written: dict[PeerId, dict[Layers, tuple[bytes, ...]]] = {}

    def written(self, peer: PeerId, layers: Layers, layer_hashes: Sequence[bytes]) -> None:
        """A replica has written layers, whose weights have these hashes."""
        known = self._written.setdefault(peer, {})
        known.pop(layers, None)
        known[layers] = tuple(layer_hashes)
        while len(known) > MAX_VERSIONS:
            del known[next(iter(known))]

    def forget_all_but(self, peers: set[PeerId]) -> None:
        """Forget who is no member any more."""
        self._written = {peer: each for peer, each in self._written.items() if peer in peers}

    def complete(self, body: PlanBody, lineage: int) -> Completed | None:
        """Return the newest version that all replicas of a plan have written; None if that is not
        newer than the one that the plan knows."""
        known = body.completed.version if body.completed is not None else 0
        version = max(self._common(body, lineage), default=0)
        if version <= known:
            return None
        hashes = [
            self._written[stage.replicas[0].peer][Layers(lineage, version, stage.first, stage.last)]
            for stage in body.stages
        ]
        return Completed(version, tuple(digest for each in hashes for digest in each))

    def unlike(self, body: PlanBody, lineage: int, version: int) -> list[tuple[int, PeerId]]:
        """Return which replicas have written other weights than the first of their stage: numbers
        of stages, with the replica."""
        found = []
        for number, stage in enumerate(body.stages):
            place = Layers(lineage, version, stage.first, stage.last)
            told = [(each.peer, self._written[each.peer][place]) for each in stage.replicas]
            found += [(number, peer) for peer, hashes in told if hashes != told[0][1]]
        return found

    def _common(self, body: PlanBody, lineage: int) -> set[int]:
        """Return the versions that every replica has written of its own stage."""
        common: set[int] | None = None
        for stage in body.stages:
            for member in stage.replicas:
                versions = {
                    each.version
                    for each in self._written.get(member.peer, {})
                    if (each.lineage, each.first, each.last) == (lineage, stage.first, stage.last)
                }
                common = versions if common is None else common & versions
        return common or set()
