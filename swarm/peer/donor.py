"""Serves what this peer holds to who lacks it: state, reduced gradients, checkpointed weights.

The rule: a version is copied once, between two tasks of the executor, and served from the copy:
training goes on meanwhile. Nothing here asks for the epoch, so a new plan does not end a download.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import trio

from protocol.messages import GetListing, GetState, Listing, Piece, StateChunk, StateKind, Totals
from protocol.records import TensorSpec, sha256
from swarm.core.holding import Holding
from swarm.errors import HomeError, PeerError
from swarm.peer.link import Answer
from swarm.peer.versions import read_states
from swarm.ports import Buffer, Checkpoints, StageExecutor

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 * 1024 * 1024
KEEP_SECONDS = 30.0
MAX_COPIES = 4
NOT_HERE = "not held here"


@dataclass
class _Copy:
    """Pieces of one version, and until when they are kept unless somebody asks again."""

    pieces: dict[int, Buffer]
    listing: tuple[Piece, ...]
    state_hash: bytes
    totals: Totals | None
    until: float


_Key = tuple[StateKind, int, int, int, int]


class Donor:
    """What this peer can give away."""

    def __init__(
        self,
        executor: StageExecutor,
        checkpoints: Checkpoints,
        holding: Callable[[], Holding | None],
    ) -> None:
        """`holding` returns what the executor holds now."""
        self._executor = executor
        self._checkpoints = checkpoints
        self._holding = holding
        self._copies: dict[_Key, _Copy] = {}
        self._lock = trio.Lock()

    async def list(self, message: GetListing, answer: Answer) -> None:
        """Answer what there is of a version, unless the link has gone."""
        async with self._lock:
            copy = await self._copy(message)
        held = self._holding()
        version = held.version if held is not None else 0
        with contextlib.suppress(PeerError):
            if copy is None:
                refusal = f"{message.kind} of version {message.version} is {NOT_HERE}"
                answer(
                    Listing(
                        id=message.id,
                        version=version,
                        state_hash=b"",
                        totals=None,
                        pieces=(),
                        refusal=refusal,
                    ),
                    (),
                )
            else:
                answer(
                    Listing(
                        id=message.id,
                        version=message.version,
                        state_hash=copy.state_hash,
                        totals=copy.totals,
                        pieces=copy.listing,
                    ),
                    (),
                )

    async def piece(self, message: GetState, answer: Answer) -> None:
        """Answer with some bytes, unless the link has gone."""
        try:
            data = await self._bytes_of(message)
        except HomeError as error:
            data, refusal = None, error.what
        else:
            refusal = f"{message.kind} {message.number} of version {message.version} is {NOT_HERE}"
        with contextlib.suppress(PeerError):
            if data is None or message.offset > len(data):
                answer(StateChunk(id=message.id, total=0, refusal=refusal), ())
                return
            length = min(message.length, CHUNK_BYTES)
            piece = data[message.offset : message.offset + length]
            spec = TensorSpec("uint8", (len(piece),))
            answer(StateChunk(id=message.id, total=len(data), tensors=(spec,)), (piece,))

    async def _bytes_of(self, message: GetState) -> Buffer | None:
        if message.kind == "weights":
            return await self._checkpoints.read(
                "weights", message.lineage, message.version, message.number
            )
        for key, copy in self._copies.items():
            same = key[:3] == (message.kind, message.lineage, message.version)
            if same and message.number in copy.pieces:
                copy.until = trio.current_time() + KEEP_SECONDS
                return copy.pieces[message.number]
        return None

    async def _copy(self, message: GetListing) -> _Copy | None:
        now = trio.current_time()
        self._copies = {key: each for key, each in self._copies.items() if each.until > now}
        key = (message.kind, message.lineage, message.version, message.first, message.last)
        if key not in self._copies:
            made = await self._make(message)
            if made is None:
                return None
            while len(self._copies) >= MAX_COPIES:
                del self._copies[min(self._copies, key=lambda each: self._copies[each].until)]
            self._copies[key] = made
        self._copies[key].until = trio.current_time() + KEEP_SECONDS
        return self._copies[key]

    async def _make(self, message: GetListing) -> _Copy | None:
        held = self._holding()
        same = (
            held is not None
            and held.lineage == message.lineage
            and held.range == (message.first, message.last)
        )
        pieces: dict[int, Buffer] | None = None
        state_hash, totals = b"", None
        if same and held is not None:
            state_hash, totals = held.state_hash, held.totals
            if message.kind == "gradient":
                pieces = await self._executor.gradient(message.version)
            elif message.kind == "state" and held.version == message.version:
                pieces = await self._executor.snapshot(message.version)
        if pieces is None and message.kind == "state" and message.state_hash:
            return await self._from_disk(message)
        return None if pieces is None else _copy_of(pieces, state_hash, totals)

    async def _from_disk(self, message: GetListing) -> _Copy | None:
        """Return a checkpoint of the state that is asked for: its hash names it, whatever the
        lineage; a version of another lineage beyond the fork has another."""
        wanted = message.version, message.first, message.last
        found = await read_states(self._checkpoints, *wanted, state_hash=message.state_hash)
        if found is None:
            return None
        state_hash, states = found
        return _copy_of(states, state_hash, None)


def _copy_of(pieces: dict[int, Buffer], state_hash: bytes, totals: Totals | None) -> _Copy:
    listing = tuple(
        Piece(number, len(pieces[number]), sha256(pieces[number])) for number in sorted(pieces)
    )
    return _Copy(pieces, listing, state_hash, totals, 0.0)
