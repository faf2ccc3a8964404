"""Versions on this peer's disk, for itself and for others.

The rule: what is damaged is not held. It is said in the log, and training goes on without it.
"""

import logging
from collections.abc import Sequence

from protocol.messages import Held, StateKind
from protocol.records import Completed, PlanBody, PlanHeader
from swarm.errors import HomeError
from swarm.ports import Buffer, Checkpoints, HeldVersion

log = logging.getLogger(__name__)


async def read_states(
    checkpoints: Checkpoints,
    version: int,
    first: int,
    last: int,
    *,
    completed: Completed | None = None,
    state_hash: bytes = b"",
) -> tuple[bytes, dict[int, Buffer]] | None:
    """Return state hash and states of layers [first, last) at a version; None unless this disk
    holds all of them, with the weights of `completed`, or with the state hash that is asked for.

    One of the two names the history: another lineage may have written the same version."""
    for held in await checkpoints.held():
        if held.version != version or not set(range(first, last)) <= set(held.layers):
            continue
        if state_hash and held.state_hash != state_hash:
            continue
        if completed is not None and not _is_of(held, first, last, completed):
            continue
        states = await _read(checkpoints, held, first, last)
        if states is not None:
            return held.state_hash, states
    return None


async def read_weights(checkpoints: Checkpoints, layer: int, sha256: bytes) -> Buffer | None:
    """Return the weights of a layer that have this hash; None unless this disk holds them, as
    whatever version of whatever lineage. Raises HomeError if they are damaged wherever they lie."""
    damage: HomeError | None = None
    for held in await checkpoints.held():
        if sha256 != _hashes(held).get(layer):
            continue
        try:
            found = await checkpoints.read("weights", held.lineage, held.version, layer)
        except HomeError as error:
            damage = error
            continue
        if found is not None:
            return found
    if damage is not None:
        raise damage
    return None


async def whole_on_disk(
    checkpoints: Checkpoints, version: int, first: int, last: int, state_hash: bytes
) -> tuple[bytes, ...] | None:
    """Return the hashes of the weights of layers [first, last) if this disk holds these layers, and
    no others, of a version with this history, in whatever lineage, and all can be read."""
    for held in await checkpoints.held():
        same = (held.version, held.state_hash) == (version, state_hash)
        whole = same and held.layers == tuple(range(first, last))
        if whole and await _can_be_read(checkpoints, held):
            return held.layer_hashes
    return None


async def held_on_disk(
    checkpoints: Checkpoints,
    header: PlanHeader,
    body: PlanBody,
    ranges: Sequence[tuple[int, int]],
    bitmap_bytes: int,
) -> tuple[Held, ...]:
    """Return which ranges of layers others can have from this disk at the complete version, where
    the plan goes on from it; their ledgers, of `bitmap_bytes`, are empty."""
    completed = body.completed
    if completed is None or header.from_step != completed.version:
        return ()
    found = []
    for first, last in ranges:
        held = await read_states(checkpoints, completed.version, first, last, completed=completed)
        if held is not None:
            found.append(
                Held(
                    lineage=header.lineage,
                    first=first,
                    last=last,
                    version=completed.version,
                    state_hash=held[0],
                    bitmap=bytes(bitmap_bytes),
                    prepared=None,
                    totals=None,
                )
            )
    return tuple(found[:MAX_RANGES])


MAX_RANGES = 15
"""A Report has room for so many, and what the executor holds."""
KINDS: tuple[StateKind, ...] = ("weights", "state")
"""Of a layer's files."""


def _hashes(held: HeldVersion) -> dict[int, bytes]:
    return dict(zip(held.layers, held.layer_hashes, strict=True))


def _is_of(held: HeldVersion, first: int, last: int, completed: Completed) -> bool:
    """Return whether layers [first, last) have the weights of the complete version.

    What is read later is checked against the same list that these hashes are from."""
    return tuple(_hashes(held)[layer] for layer in range(first, last)) == tuple(
        completed.layer_hashes[first:last]
    )


async def _can_be_read(checkpoints: Checkpoints, held: HeldVersion) -> bool:
    try:
        for layer in held.layers:
            for kind in KINDS:
                if await checkpoints.read(kind, held.lineage, held.version, layer) is None:
                    return False
    except HomeError as error:
        log.error("checkpoint not used reason=%r", error.what)
        return False
    return True


async def _read(
    checkpoints: Checkpoints, held: HeldVersion, first: int, last: int
) -> dict[int, Buffer] | None:
    states: dict[int, Buffer] = {}
    try:
        for layer in range(first, last):
            state = await checkpoints.read("state", held.lineage, held.version, layer)
            if state is None:
                return None
            states[layer] = state
    except HomeError as error:
        log.error("checkpoint not used reason=%r", error.what)
        return None
    return states
