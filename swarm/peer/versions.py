"""Versions on this peer's disk, for itself and for others.

The rule: what is damaged is not held. It is said in the log, and training goes on without it.
"""

import logging
from collections.abc import Sequence

from protocol.messages import Held
from protocol.records import Completed, PlanBody, PlanHeader, sha256
from swarm.errors import HomeError
from swarm.ports import Buffer, Checkpoints

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
    wanted = range(first, last)
    for lineage, written, known, layers in await checkpoints.held():
        if written != version or not set(wanted) <= set(layers):
            continue
        if state_hash and known != state_hash:
            continue
        states = await _read(checkpoints, lineage, version, wanted, completed)
        if states is not None:
            return known, states
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


async def _read(
    checkpoints: Checkpoints,
    lineage: int,
    version: int,
    layers: Sequence[int],
    completed: Completed | None,
) -> dict[int, Buffer] | None:
    states: dict[int, Buffer] = {}
    try:
        for layer in layers:
            if completed is not None:
                weights = await checkpoints.read("weights", lineage, version, layer)
                if weights is None or sha256(weights) != completed.layer_hashes[layer]:
                    return None
            state = await checkpoints.read("state", lineage, version, layer)
            if state is None:
                return None
            states[layer] = state
    except HomeError as error:
        log.error("checkpoint not used reason=%r", error.what)
        return None
    return states
