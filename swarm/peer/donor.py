"""Serves what this peer holds to who lacks it: state, reduced gradients, checkpointed weights.

The rule: a version is copied once, between two tasks of the executor, and served from the copy:
training goes on meanwhile. Copies are few and freed when nobody asks any more; a state that is
being fetched is not dropped for another. Nothing here asks for the epoch, so a new plan does not
end a download.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

import trio

from protocol.messages import GetListing, GetState, Listing, Piece, StateChunk, StateKind, Totals
from protocol.records import TensorSpec
from swarm.core.holding import Holding
from swarm.errors import HomeError, PeerError
from swarm.peer.hashing import hash_of
from swarm.peer.link import Answer
from swarm.peer.versions import read_states, read_weights
from swarm.ports import Buffer, Checkpoints, StageExecutor

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 * 1024 * 1024
KEEP_SECONDS = 30.0
MAX_STATES = 2
"""For standbys: they do not know the hash of what they fetch."""
MAX_NAMED_STATES = 1
"""For those who name the hash: the whole swarm waits for them, and a new one replaces the last."""
MAX_GRADIENTS = 3
NOT_HERE = "not held here"


@dataclass
class _Copy:
    """Pieces of one version, and until when they are kept unless somebody asks again."""

    pieces: dict[int, Buffer]
    listing: tuple[Piece, ...]
    state_hash: bytes
    totals: Totals | None
    made_of: Holding | None
    """What was held then; None for a copy from the disk."""
    is_named: bool
    """Only those who named its hash have asked for it."""
    until: float = 0.0


_Key = tuple[StateKind, int, int, int, int]
"""Kind, lineage, version, and the layers [first, last)."""


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
        self._is_freeing = False
        self._lock = trio.Lock()

    async def list(self, message: GetListing, answer: Answer) -> None:
        """Answer what there is of a version, unless the link has gone.

        Whoever is the first to be given something then frees what is not asked for any more."""
        async with self._lock:
            copy = await self._copy(message)
        held = self._holding()
        version = held.version if held is not None else 0
        with contextlib.suppress(PeerError):
            if isinstance(copy, str):
                refusal = f"{message.kind} of version {message.version} {copy}"
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
        await self._free_unused()

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
        if message.kind == "weights" and message.sha256:
            return await read_weights(self._checkpoints, message.number, message.sha256)
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

    async def _free_unused(self) -> None:
        """Drop copies as their time comes, until there are none; one task does it for all."""
        if self._is_freeing:
            return
        self._is_freeing = True
        try:
            while self._copies:
                await trio.sleep_until(min(each.until for each in self._copies.values()))
                now = trio.current_time()
                self._copies = {key: each for key, each in self._copies.items() if each.until > now}
        finally:
            self._is_freeing = False

    async def _copy(self, message: GetListing) -> _Copy | str:
        """Return a copy of what is asked for, or why there is none."""
        key = (message.kind, message.lineage, message.version, message.first, message.last)
        copy = self._copies.get(key)
        if copy is not None and not self._is_current(copy, message):
            copy = None
        is_named = bool(message.state_hash) and (copy is None or copy.is_named)
        if not self._has_room(key, is_named=is_named):
            return "cannot be copied now: others are being fetched"
        copy = copy or await self._make(message)
        if copy is None:
            return f"is {NOT_HERE}"
        self._make_room(key, is_named=is_named)
        copy.is_named = is_named
        copy.until = trio.current_time() + KEEP_SECONDS
        self._copies[key] = copy
        return copy

    def _is_current(self, copy: _Copy, message: GetListing) -> bool:
        """Return whether a copy is still what is meant: there may be another state of the same
        version here, and a step that was not committed may have been reduced again."""
        held = self._holding()
        if message.kind == "gradient":
            made_of = copy.made_of
            committed = made_of is not None and made_of.version > message.version
            return committed or made_of is held
        wanted = message.state_hash
        if not wanted and _is_of(held, message) and held.version == message.version:
            wanted = held.state_hash
        return wanted in (b"", copy.state_hash)

    def _has_room(self, key: _Key, *, is_named: bool) -> bool:
        """Return whether there may be one more copy. A gradient, and a state that the swarm waits
        for, may take the place of another: they are of use for the length of a step."""
        replaces = key[0] == "gradient" or is_named
        return replaces or len(self._others(key, is_named=False)) < MAX_STATES

    def _make_room(self, key: _Key, *, is_named: bool) -> None:
        others = self._others(key, is_named=is_named)
        most = MAX_GRADIENTS if key[0] == "gradient" else MAX_NAMED_STATES
        if (key[0] == "gradient" or is_named) and len(others) >= most:
            del self._copies[min(others, key=lambda each: self._copies[each].until)]

    def _others(self, key: _Key, *, is_named: bool) -> tuple[_Key, ...]:
        return tuple(
            other
            for other, copy in self._copies.items()
            if other[0] == key[0] and other != key and copy.is_named == is_named
        )

    async def _make(self, message: GetListing) -> _Copy | None:
        held = self._holding()
        pieces: dict[int, Buffer] | None = None
        if _is_of(held, message):
            is_meant = message.state_hash in (b"", held.state_hash)
            if message.kind == "gradient":
                pieces = await self._executor.gradient(message.version)
            elif message.kind == "state" and held.version == message.version and is_meant:
                pieces = await self._executor.snapshot(message.version)
            if pieces is not None:
                return await _copy_of(pieces, held.state_hash, held.totals, held)
        if message.kind == "state" and message.state_hash:
            return await self._from_disk(message)
        return None

    async def _from_disk(self, message: GetListing) -> _Copy | None:
        """Return a checkpoint of the state that is asked for: its hash names it, whatever the
        lineage; a version of another lineage beyond the fork has another."""
        wanted = message.version, message.first, message.last
        found = await read_states(self._checkpoints, *wanted, state_hash=message.state_hash)
        if found is None:
            return None
        state_hash, states = found
        return await _copy_of(states, state_hash, None, None)


def _is_of(held: Holding | None, message: GetListing) -> TypeGuard[Holding]:
    """Return whether what is held is of the lineage and the layers that are asked for."""
    wanted = (message.lineage, (message.first, message.last))
    return held is not None and (held.lineage, held.range) == wanted


async def _copy_of(
    pieces: dict[int, Buffer], state_hash: bytes, totals: Totals | None, made_of: Holding | None
) -> _Copy:
    listing = [
        Piece(number, len(pieces[number]), await hash_of(pieces[number]))
        for number in sorted(pieces)
    ]
    return _Copy(pieces, tuple(listing), state_hash, totals, made_of, is_named=False)
