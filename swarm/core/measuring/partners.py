"""With whom a peer measures its links: with everybody in a small swarm, with a few in a large one.

The rule: everybody can compute it alone, nobody is chosen by many, and who comes or goes changes
little. In a large swarm each takes those of whom the pair draws the lowest (rendezvous hashing:
Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998), so that everybody
is taken by about as many as it takes; and a few of those that are near, which say what near links
are like.
"""

import hashlib
from collections.abc import Mapping, Sequence

from protocol.signing import PeerId

ALL_PAIRS = 32
"""Up to so many peers everybody measures the way to everybody."""
NEAR = 2
"""So many partners are near ones,"""
NEAR_AMONG = 8
"""drawn from so many, so that a peer near to all is not taken by all."""


def partners(
    me: PeerId, peers: Sequence[PeerId], seed: str, known: Mapping[PeerId, float]
) -> tuple[PeerId, ...]:
    """Return whom `me` probes, of `peers`, in the order in which it does: O(log n) of them beyond
    ALL_PAIRS peers.

    `known` are latencies in seconds of those to whom they are known."""
    drawn = {peer: _draw(seed, me, peer) for peer in {*peers} - {me}}
    ordered = sorted(drawn, key=lambda peer: drawn[peer])
    if len(ordered) < ALL_PAIRS:
        return tuple(ordered)
    far = ordered[: len(ordered).bit_length()]
    others = [peer for peer in ordered if peer in known and peer not in far]
    nearest = sorted(others, key=lambda peer: (known[peer], drawn[peer]))[:NEAR_AMONG]
    return (*far, *sorted(nearest, key=lambda peer: drawn[peer])[:NEAR])


def _draw(seed: str, me: PeerId, peer: PeerId) -> bytes:
    return hashlib.sha256(f"{seed}/{me}/{peer}".encode()).digest()
