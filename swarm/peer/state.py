"""Fetches what this peer lacks from who holds it: a stage's state, a gradient, layers for export.

The rule: every piece is checked against its hash, and bounded by what the model is like before it
takes memory. A donor that fails is left, and what has arrived is kept: another donor goes on where
it stopped. What does not fit is the fault of who gave it.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy
import trio
from msgspec.structs import replace

from protocol.messages import GetListing, GetState, Listing, Piece, StateChunk, StateKind
from protocol.records import PlanBody
from protocol.signing import PeerId
from swarm.core.model import ModelShape
from swarm.core.reduction import buckets
from swarm.core.scheduling.planning import candidates_of
from swarm.core.step import ranges_of_stages, replicas_of
from swarm.errors import ExportError, HomeError, PeerError, PeerRefused
from swarm.peer.donor import CHUNK_BYTES
from swarm.peer.hashing import hash_of
from swarm.peer.links import Links
from swarm.peer.versions import read_weights
from swarm.ports import Buffer, Checkpoints

MAX_LAYER_BYTES = 1 << 38
STATE_COPIES = 3
"""Of a layer in its state: its weights, and at most two moments of each in the optimiser."""
STATE_SLACK_BYTES = 16 * 1024 * 1024
"""For the names of the tensors, and the optimiser's counters."""
ITEM_BYTES = 8
"""Of a gradient, at most."""
RETRY_SECONDS = 0.2


class NobodyHas(Exception):
    """No donor can give what was asked for; the text says what each of them answered."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A whole version of a stage's state, or the reduced gradient of a step."""

    listing: Listing
    pieces: dict[int, Buffer]
    donors: tuple[PeerId, ...]


def largest_pieces(
    kind: StateKind, body: PlanBody, me: PeerId, shape: ModelShape, stage: int
) -> dict[int, int]:
    """Return how many bytes each piece of a stage has at most: its state by layer, its reduced
    gradient by bucket. How large layers are `me` has measured before it joined."""
    ranges = ranges_of_stages(body)
    if kind == "gradient":
        used = [bucket for bucket in buckets(shape, ranges) if stage in bucket.stages]
        return {bucket.index: ITEM_BYTES * bucket.elements for bucket in used}
    layers = candidates_of(body)[me].request.layers
    return {
        layer: STATE_COPIES * layers[layer].parameter_bytes + STATE_SLACK_BYTES
        for layer in range(*ranges[stage])
    }


async def fetch_into(
    take: Callable[[Mapping[int, Buffer]], Awaitable[None]],
    links: Links,
    donors: Sequence[PeerId],
    wanted: GetListing,
    largest: Mapping[int, int],
) -> Fetched:
    """Fetch as `fetch` does, and let `take` have the pieces: if it raises ValueError, those who
    gave them are left, and others are asked. Raises NobodyHas."""
    faults: list[str] = []
    while True:
        try:
            fetched = await fetch(links, donors, wanted, largest)
        except NobodyHas as fault:
            raise NobodyHas("; ".join([*faults, str(fault)])) from None
        try:
            await take(fetched.pieces)
        except ValueError as error:
            faults += [f"{donor}  gave what does not fit: {error}" for donor in fetched.donors]
            donors = [donor for donor in donors if donor not in fetched.donors]
        else:
            return fetched


async def fetch(
    links: Links,
    donors: Sequence[PeerId],
    wanted: GetListing,
    largest: Mapping[int, int],
) -> Fetched:
    """Return what `wanted` asks for, from several donors at once: exactly the pieces that `largest`
    names, none with more bytes than it says.

    Only donors whose listings agree, and have the state hash that is wanted, if one is, are used
    together: those of the largest group. Raises NobodyHas.
    """
    listings: dict[PeerId, Listing] = {}
    refusals: list[str] = []
    async with trio.open_nursery() as nursery:
        for donor in donors:
            if donor != links.me:
                nursery.start_soon(_list, links, donor, wanted, largest, listings, refusals)
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
    largest: Mapping[int, int],
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
    elif misfit := _misfit(answer.pieces, largest):
        refusals.append(f"{donor}  {misfit}")
    else:
        listings[donor] = answer


def _misfit(pieces: Sequence[Piece], largest: Mapping[int, int]) -> str:
    """Return why these cannot be the pieces that are wanted, or ""."""
    numbers = sorted(piece.number for piece in pieces)
    if numbers != sorted(largest):
        return f"lists pieces {numbers} instead of {sorted(largest)}"
    for piece in pieces:
        if piece.nbytes > largest[piece.number]:
            return f"claims that piece {piece.number} has {piece.nbytes} bytes"
    return ""


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
        if await hash_of(data) != piece.sha256:
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

    Their hashes name them: after a rollback they lie under an older lineage. Raises ExportError if
    there is no such version, or a layer cannot be had from anyone."""
    if body.completed is None:
        raise ExportError(
            "there is no certified complete version to export",
            evidence=(body.reason,),
            hint="a run can be exported when it has ended; `swarm status` says whether it goes on",
        )
    members = sorted(signed.signer for signed in body.members)
    layers, donors = [], []
    for number, stage in enumerate(body.stages):
        for layer in range(stage.first, stage.last):
            wanted = _Wanted(
                lineage, body.completed.version, layer, body.completed.layer_hashes[layer]
            )
            # Whoever may hold it, the likely ones first.
            asked = dict.fromkeys([links.me, *replicas_of(body, number), *members])
            data, donor = await _one_layer(links, checkpoints, list(asked), wanted)
            layers.append(data)
            donors.append(donor)
    return layers, donors


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One layer's weights."""

    lineage: int
    version: int
    layer: int
    sha256: bytes


async def _one_layer(
    links: Links, checkpoints: Checkpoints, donors: Sequence[PeerId], wanted: _Wanted
) -> tuple[Buffer, PeerId]:
    faults = []
    for donor in donors:
        try:
            if donor == links.me:
                held = await read_weights(checkpoints, wanted.layer, wanted.sha256)
                if held is None:
                    raise PeerRefused(donor, "this peer does not hold it")
                return held, donor
            return await _download(links, donor, wanted), donor
        except PeerError as fault:
            faults.append(f"{donor}  {fault.reason}")
        except HomeError as fault:
            faults.append(f"{donor}  {fault.what}")
    raise ExportError(
        f"layer {wanted.layer} of version {wanted.version} cannot be had from anyone",
        evidence=tuple(faults),
        hint="start a peer that held this layer when the version was written, and try again",
    )


async def _download(links: Links, donor: PeerId, wanted: _Wanted) -> Buffer:
    """Return a layer's bytes, hashed piece by piece: nothing else waits for a whole layer."""
    piece, total = await _piece(links, donor, wanted, 0)
    if total > MAX_LAYER_BYTES:
        raise PeerRefused(donor, f"claims that layer {wanted.layer} has {total} bytes")
    data = numpy.empty(total, dtype=numpy.uint8).data
    digest = hashlib.sha256()
    done = 0
    while True:
        if done + len(piece) > total:
            raise PeerRefused(donor, "sent more than the layer has")
        data[done : done + len(piece)] = piece
        digest.update(piece)
        done += len(piece)
        if done == total:
            break
        piece, _ = await _piece(links, donor, wanted, done)
    if digest.digest() != wanted.sha256:
        raise PeerRefused(donor, "sent bytes with another hash")
    return data


async def _piece(links: Links, donor: PeerId, wanted: _Wanted, offset: int) -> tuple[Buffer, int]:
    """Return a piece of a layer and the size of the whole."""
    received = await links.request(
        donor,
        lambda number: GetState(
            id=number,
            kind="weights",
            lineage=wanted.lineage,
            version=wanted.version,
            number=wanted.layer,
            offset=offset,
            length=CHUNK_BYTES,
            sha256=wanted.sha256,
        ),
    )
    chunk = received.message
    if not isinstance(chunk, StateChunk):
        raise PeerRefused(donor, f"answered GetState with {type(chunk).__name__}")
    if chunk.refusal or not len(received.payload):
        raise PeerRefused(donor, chunk.refusal or "sent an empty piece")
    return received.payload, chunk.total
