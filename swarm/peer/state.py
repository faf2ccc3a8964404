"""Fetches what this peer lacks from who holds it: a stage's state, a gradient, layers for export.

The rule: every piece is checked against its hash. A donor that fails is left, and what has arrived
is kept: another donor goes on where it stopped.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import trio
from msgspec.structs import replace

from protocol.messages import GetListing, GetState, Listing, Piece, StateChunk
from protocol.records import PlanBody, sha256
from protocol.signing import PeerId
from swarm.core.step import replicas_of
from swarm.errors import ExportError, HomeError, PeerError, PeerRefused
from swarm.peer.donor import CHUNK_BYTES
from swarm.peer.links import Links
from swarm.ports import Buffer, Checkpoints

MAX_LAYER_BYTES = 1 << 38
RETRY_SECONDS = 0.2


class NobodyHas(Exception):
    """No donor can give what was asked for; the text says what each of them answered."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A whole version of a stage's state, or the reduced gradient of a step."""

    listing: Listing
    pieces: dict[int, Buffer]
    donors: tuple[PeerId, ...]


async def fetch(
    links: Links,
    donors: Sequence[PeerId],
    wanted: GetListing,
) -> Fetched:
    """Return what `wanted` asks for, from several donors at once.

    Only donors whose listings agree, and have the state hash that is wanted, if one is, are used
    together: those of the largest group. Raises NobodyHas.
    """
    listings: dict[PeerId, Listing] = {}
    refusals: list[str] = []
    async with trio.open_nursery() as nursery:
        for donor in donors:
            if donor != links.me:
                nursery.start_soon(_list, links, donor, wanted, listings, refusals)
    groups: dict[tuple[Piece, ...], list[PeerId]] = {}
    for donor in sorted(listings):
        if not wanted.state_hash or listings[donor].state_hash == wanted.state_hash:
            groups.setdefault(listings[donor].pieces, []).append(donor)
        else:
            refusals.append(f"{donor}  holds another state")
    if not groups:
        raise NobodyHas("; ".join(refusals) or "there is no donor")
    pieces, using = max(groups.items(), key=lambda each: len(each[1]))
    download = _Download(links, wanted, pieces)
    return Fetched(listings[using[0]], await download.run(using), tuple(using))


async def _list(
    links: Links,
    donor: PeerId,
    wanted: GetListing,
    listings: dict[PeerId, Listing],
    refusals: list[str],
) -> None:
    try:
        received = await links.request(donor, lambda number: replace(wanted, id=number))
    except PeerError as fault:
        refusals.append(f"{donor}  {fault.reason}")
        return
    answer = received.message
    if not isinstance(answer, Listing):
        refusals.append(f"{donor}  answered GetListing with {type(answer).__name__}")
    elif answer.refusal:
        refusals.append(f"{donor}  {answer.refusal}")
    elif sum(piece.nbytes for piece in answer.pieces) > MAX_LAYER_BYTES:
        refusals.append(f"{donor}  claims to hold more than {MAX_LAYER_BYTES} bytes")
    else:
        listings[donor] = answer


class _Download:
    """Pieces of one listing, fetched by one task per donor from a common list."""

    def __init__(self, links: Links, wanted: GetListing, pieces: Sequence[Piece]) -> None:
        self._links = links
        self._wanted = wanted
        self._open = sorted(pieces, key=lambda each: each.number, reverse=True)
        self._begun: dict[int, tuple[Buffer, int]] = {}
        self._done: dict[int, Buffer] = {}
        self._faults: list[str] = []

    async def run(self, donors: Sequence[PeerId]) -> dict[int, Buffer]:
        """Return all pieces. Raises NobodyHas."""
        while self._open and donors:
            failed: list[PeerId] = []
            async with trio.open_nursery() as nursery:
                for donor in donors:
                    nursery.start_soon(self._work, donor, failed)
            donors = [donor for donor in donors if donor not in failed]
        if self._open:
            raise NobodyHas("; ".join(self._faults))
        return self._done

    async def _work(self, donor: PeerId, failed: list[PeerId]) -> None:
        while self._open:
            piece = self._open.pop()
            try:
                await self._fetch(donor, piece)
            except PeerError as fault:
                self._faults.append(f"{donor}  {fault.reason}")
                self._open.append(piece)
                failed.append(donor)
                return

    async def _fetch(self, donor: PeerId, piece: Piece) -> None:
        empty = numpy.empty(piece.nbytes, dtype=numpy.uint8).data
        data, done = self._begun.get(piece.number, (empty, 0))
        while done < piece.nbytes:
            part = await self._part(donor, piece, done)
            data[done : done + len(part)] = part
            done += len(part)
            self._begun[piece.number] = (data, done)
        self._begun.pop(piece.number, None)
        if sha256(data) != piece.sha256:
            raise PeerRefused(donor, f"sent a piece {piece.number} with another hash")
        self._done[piece.number] = data

    async def _part(self, donor: PeerId, piece: Piece, done: int) -> Buffer:
        received = await self._links.request(
            donor,
            lambda number: GetState(
                id=number,
                kind=self._wanted.kind,
                lineage=self._wanted.lineage,
                version=self._wanted.version,
                number=piece.number,
                offset=done,
                length=CHUNK_BYTES,
            ),
        )
        chunk = received.message
        if not isinstance(chunk, StateChunk) or chunk.refusal or not len(received.payload):
            said = chunk.refusal if isinstance(chunk, StateChunk) else type(chunk).__name__
            raise PeerRefused(donor, said or "sent an empty piece")
        if done + len(received.payload) > piece.nbytes:
            raise PeerRefused(donor, "sent more than the piece has")
        return received.payload


# --- export ------------------------------------------------------------------------------


async def gather_layers(
    links: Links, checkpoints: Checkpoints, body: PlanBody, lineage: int
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
                links,
                checkpoints,
                replicas_of(body, number),
                (lineage, body.completed.version, layer),
                wanted,
            )
            layers.append(data)
            donors.append(donor)
    return layers, donors


async def _one_layer(
    links: Links,
    checkpoints: Checkpoints,
    donors: Sequence[PeerId],
    place: tuple[int, int, int],
    wanted: bytes,
) -> tuple[Buffer, PeerId]:
    faults = []
    for donor in sorted(donors, key=lambda peer: peer != links.me):
        try:
            if donor == links.me:
                held = await checkpoints.read("weights", *place)
                data = held if held is not None else memoryview(b"")
            else:
                data = await _download(links, donor, place)
        except (PeerError, HomeError) as fault:
            faults.append(
                f"{donor}  {fault.what if isinstance(fault, HomeError) else fault.reason}"
            )
            continue
        if hashlib.sha256(data).digest() == wanted:
            return data, donor
        faults.append(f"{donor}  sent bytes with another hash")
    raise ExportError(
        f"layer {place[2]} of version {place[1]} cannot be had from anyone",
        evidence=tuple(faults),
        hint="start a peer that held this layer when the run ended, and try again",
    )


async def _download(links: Links, donor: PeerId, place: tuple[int, int, int]) -> Buffer:
    first, total = await _piece(links, donor, place, 0)
    if total > MAX_LAYER_BYTES:
        raise PeerRefused(donor, f"claims that layer {place[2]} has {total} bytes")
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
        piece, _ = await _piece(links, donor, place, done)


async def _piece(
    links: Links, donor: PeerId, place: tuple[int, int, int], offset: int
) -> tuple[Buffer, int]:
    """Return a piece of a layer and the size of the whole."""
    lineage, version, layer = place
    received = await links.request(
        donor,
        lambda number: GetState(
            id=number,
            kind="weights",
            lineage=lineage,
            version=version,
            number=layer,
            offset=offset,
            length=CHUNK_BYTES,
        ),
    )
    chunk = received.message
    if not isinstance(chunk, StateChunk):
        raise PeerRefused(donor, f"answered GetState with {type(chunk).__name__}")
    if chunk.refusal or not len(received.payload):
        raise PeerRefused(donor, chunk.refusal or "sent an empty piece")
    return received.payload, chunk.total
