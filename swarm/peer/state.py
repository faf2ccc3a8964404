"""Layers of a completed version, from whoever holds them: served to others, gathered for export.

The rule: every layer is checked against the hash that a certified plan names.
"""

import contextlib
import hashlib
import logging
from collections.abc import Sequence

import numpy
import trio

from protocol.messages import GetState, StateChunk
from protocol.records import PlanBody, TensorSpec
from protocol.signing import PeerId
from swarm.core.step import replicas_of
from swarm.errors import ExportError, HomeError, PeerError, PeerRefused
from swarm.peer.link import Answer
from swarm.peer.links import Links
from swarm.ports import Buffer, Checkpoints

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 * 1024 * 1024
MAX_LAYER_BYTES = 1 << 38


async def serve_state(checkpoints: Checkpoints, message: GetState, answer: Answer) -> None:
    """Answer a request for a piece of a layer's state, unless its link has gone."""
    with contextlib.suppress(PeerError):
        await _serve_piece(checkpoints, message, answer)


async def _serve_piece(checkpoints: Checkpoints, message: GetState, answer: Answer) -> None:
    try:
        data = await trio.to_thread.run_sync(checkpoints.read, message.version, message.layer)
    except HomeError as error:
        answer(StateChunk(id=message.id, total=0, refusal=error.what), ())
        return
    if data is None or message.offset >= len(data):
        refusal = f"layer {message.layer} of version {message.version} is not held here"
        answer(StateChunk(id=message.id, total=0, refusal=refusal), ())
        return
    length = min(message.length, CHUNK_BYTES)
    piece = data[message.offset : message.offset + length]
    spec = TensorSpec("uint8", (len(piece),))
    answer(StateChunk(id=message.id, total=len(data), tensors=(spec,)), (piece,))


async def gather_layers(
    links: Links, checkpoints: Checkpoints, body: PlanBody
) -> tuple[list[Buffer], list[PeerId]]:
    """Return all layers of the plan's completed version, and from which peer each came.

    Raises ExportError if there is no such version, or a layer cannot be had from anyone."""
    if body.completed is None:
        raise ExportError(
            "there is no certified complete version to export",
            evidence=(body.reason,),
            hint="a run can be exported when it has ended; `swarm status` says whether it goes on",
        )
    layers, donors = [], []
    for number, stage in enumerate(body.stages):
        for layer in range(stage.first, stage.last):
            wanted = body.completed.layer_hashes[layer]
            data, donor = await _one_layer(
                links, checkpoints, replicas_of(body, number), body.completed.version, layer, wanted
            )
            layers.append(data)
            donors.append(donor)
    return layers, donors


async def _one_layer(
    links: Links,
    checkpoints: Checkpoints,
    donors: Sequence[PeerId],
    version: int,
    layer: int,
    wanted: bytes,
) -> tuple[Buffer, PeerId]:
    faults = []
    for donor in sorted(donors, key=lambda peer: peer != links.me):
        try:
            if donor == links.me:
                held = await trio.to_thread.run_sync(checkpoints.read, version, layer)
                data = held if held is not None else memoryview(b"")
            else:
                data = await _download(links, donor, version, layer)
        except (PeerError, HomeError) as fault:
            faults.append(
                f"{donor}  {fault.what if isinstance(fault, HomeError) else fault.reason}"
            )
            continue
        if hashlib.sha256(data).digest() == wanted:
            return data, donor
        faults.append(f"{donor}  sent bytes with another hash")
    raise ExportError(
        f"layer {layer} of version {version} cannot be had from anyone",
        evidence=tuple(faults),
        hint="start a peer that held this layer when the run ended, and try again",
    )


async def _download(links: Links, donor: PeerId, version: int, layer: int) -> Buffer:
    first, total = await _piece(links, donor, version, layer, 0)
    if total > MAX_LAYER_BYTES:
        raise PeerRefused(donor, f"claims that layer {layer} has {total} bytes")
    data = numpy.empty(total, dtype=numpy.uint8).data
    done = 0
    piece = first
    while True:
        if done + len(piece) > total:
            raise PeerRefused(donor, "sent more than the layer has")
        data[done : done + len(piece)] = piece
        done += len(piece)
        if done == total:
            return data
        piece, _ = await _piece(links, donor, version, layer, done)


async def _piece(
    links: Links, donor: PeerId, version: int, layer: int, offset: int
) -> tuple[Buffer, int]:
    """Return a piece of a layer and the size of the whole."""
    received = await links.request(
        donor,
        lambda number: GetState(
            id=number, version=version, layer=layer, offset=offset, length=CHUNK_BYTES
        ),
    )
    chunk = received.message
    if not isinstance(chunk, StateChunk):
        raise PeerRefused(donor, f"answered GetState with {type(chunk).__name__}")
    if chunk.refusal or not len(received.payload):
        raise PeerRefused(donor, chunk.refusal or "sent an empty piece")
    return received.payload, chunk.total
