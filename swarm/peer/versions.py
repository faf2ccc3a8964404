"""Versions on this peer's disk, for itself and for others.

The rule: what is damaged is not held. It is said in the log, and training goes on without it.
"""

import logging
from collections.abc import Sequence

from protocol.messages import Held
from protocol.records import PlanBody, PlanHeader
from swarm.errors import HomeError
from swarm.ports import Buffer, Checkpoints

log = logging.getLogger(__name__)


async def read_states(
    checkpoints: Checkpoints, version: int, first: int, last: int
) -> tuple[bytes, dict[int, Buffer]] | None:
    """Return state hash and states of layers [first, last) at a version; None unless this disk
    holds all of them."""
    for lineage, written, state_hash, layers in await checkpoints.held():
        if written == version and set(range(first, last)) <= set(layers):
            states = await _read(checkpoints, lineage, version, range(first, last))
            if states is not None:
                return state_hash, states
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
        held = await read_states(checkpoints, completed.version, first, last)
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
    checkpoints: Checkpoints, lineage: int, version: int, layers: Sequence[int]
) -> dict[int, Buffer] | None:
    states: dict[int, Buffer] = {}
    for layer in layers:
        try:
            data = await checkpoints.read("state", lineage, version, layer)
        except HomeError as error:
            log.warning("damaged version=%d layer=%d fault=%r", version, layer, error.what)
            return None
        if data is None:
            return None
        states[layer] = data
    return states
