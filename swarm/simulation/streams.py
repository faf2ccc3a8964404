"""One stream of the modelled network, and what happens to its bytes on the way.

Each direction is a `Half`: chunks with their times of arrival, and at last its end. The rule:
what has arrived stays readable; what a cut, a reset or a power failure takes, takes a tail.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import trio

from protocol.codec import PREFIX, PREFIX_BYTES
from protocol.messages import BY_NUMBER
from protocol.signing import PeerId
from swarm.errors import PeerUnreachable
from swarm.simulation.process import Process

WINDOW_BYTES = 256 * 1024
"""A direction takes no more while so much of it has not been read."""
CRUMB_CHANCE = 1 / 32
"""That a read gets a few bytes only, as if the rest came in another packet."""


class Tap(Protocol):
    """Who listens to what is said on the streams."""

    def frame(
        self, sending: bool, process: Process, other: PeerId, number: int, header: bytes
    ) -> None:
        """A whole frame was handed to a stream, or taken from it, by `process`."""
        ...


class Kernel(Protocol):
    """What a stream needs of the network that it belongs to."""

    rng: random.Random

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call something later."""
        ...

    def host_is_up(self, number: int) -> bool:
        """Return whether a host has power."""
        ...

    def forget_stream(self, stream: "SimStream") -> None:
        """A stream has been closed on both sides."""
        ...


@dataclass
class Path:
    """The way from one host to another."""

    source: int
    target: int
    latency_seconds: float
    jitter_seconds: float
    bytes_per_second: float
    free_at: float = 0.0
    cut_at: float | None = None
    healed: trio.Event = field(default_factory=trio.Event)


class Half:
    """One direction of a stream."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unread = 0
        """Bytes that were written and not yet read."""
        self.forgotten = False
        """Something in between does not know this connection any more."""
        self.abandoned = False
        """One side lost power: nothing arrives any more."""
        self.frames: deque[tuple[int, int, bytes]] = deque()
        """(position of the end, type number, header) of frames that were not read yet."""
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._end: str | None = None
        self._end_at = 0.0
        self._last_arrival = 0.0
        self._room: int | None = None
        self.read_bytes = 0
        self.arriving = trio.Event()
        self.writable = trio.Event()

    def push(self, data: bytes, rng: random.Random) -> bool:
        """Take bytes to be delivered; return whether the stream still lives."""
        self.unread += len(data)
        if self.abandoned or self._end is not None:
            return True
        lives = True
        if self._room is not None:
            lives, data = len(data) <= self._room, data[: self._room]
            self._room -= len(data)
        path, now = self.path, trio.current_time()
        path.free_at = max(now, path.free_at) + len(data) / path.bytes_per_second
        arrival = path.free_at + path.latency_seconds + path.jitter_seconds * rng.random()
        self._last_arrival = max(self._last_arrival, arrival)
        if data:
            self._chunks.append((self._last_arrival, data))
            if len(self._chunks) == 1:
                self.arriving.set()
        return lives

    def end(self, reason: str) -> None:
        """Nothing follows what is on its way: "" is an ordinary end, else it is broken."""
        if self._end is None:
            path = self.path
            self._end = reason
            self._end_at = max(self._last_arrival, trio.current_time() + path.latency_seconds)
            self.arriving.set()

    def take(self, max_bytes: int, rng: random.Random) -> bytes | None:
        """Return bytes that have arrived; b"" at the end; None while there is nothing.

        Raises ConnectionError if the end is a broken one."""
        cut_at = self.path.cut_at
        now = trio.current_time() if cut_at is None else cut_at
        taken: list[bytes] = []
        size = 0
        if max_bytes > 1 and rng.random() < CRUMB_CHANCE:
            max_bytes = rng.randint(1, min(max_bytes, 64))
        while self._chunks and self._chunks[0][0] <= now and size < max_bytes:
            arrival, data = self._chunks.popleft()
            if size + len(data) > max_bytes:
                self._chunks.appendleft((arrival, data[max_bytes - size :]))
                data = data[: max_bytes - size]
            taken.append(data)
            size += len(data)
        if taken:
            self.unread -= size
            self.read_bytes += size
            self.writable.set()
            return b"".join(taken)
        if not self._chunks and self._end is not None and self._end_at <= now:
            if self._end:
                raise ConnectionError(self._end)
            return b""
        return None

    async def arrival(self) -> None:
        """Wait until there may be something to take."""
        self.arriving = trio.Event()
        at = float("inf")
        if self.path.cut_at is None and (self._chunks or self._end is not None):
            at = self._chunks[0][0] if self._chunks else self._end_at
        with trio.move_on_at(at):
            await self.arriving.wait()

    def heal(self, floor: float, cut_at: float) -> None:
        """What was on its way during a cut arrives at `floor` at the earliest."""
        self._chunks = deque(
            (arrival if arrival <= cut_at else max(arrival, floor), data)
            for arrival, data in self._chunks
        )
        if self._chunks:
            self._last_arrival = max(self._last_arrival, self._chunks[-1][0])
        self._end_at = max(self._end_at, self._last_arrival, floor)
        self.arriving.set()

    def break_after(self, size: int) -> None:
        """Carry only so many bytes more."""
        self._room = size

    def lose_some(self, rng: random.Random) -> None:
        """A random part of what has not arrived yet never will."""
        now = trio.current_time()
        coming = sum(arrival > now for arrival, _ in self._chunks)
        for _ in range(rng.randint(0, coming)):
            self._chunks.pop()


class SimStream:
    """One side of a stream (`ports.ByteStream`)."""

    other: "SimStream"

    def __init__(
        self,
        kernel: Kernel,
        tap: Tap,
        process: Process,
        peer: PeerId,
        out: Half,
        into: Half,
    ) -> None:
        self.process = process
        self.out = out
        self.into = into
        self._kernel = kernel
        self._tap = tap
        self._peer = peer
        self._frames = _Frames()
        self._fault = ""
        self._closed = False

    @property
    def peer(self) -> PeerId:
        """Return who is on the other side."""
        return self._peer

    async def send_all(self, data: bytes | memoryview) -> None:
        """Send all bytes, as the window allows. Raises PeerUnreachable."""
        await trio.lowlevel.checkpoint()
        self._check()
        begun = self._frames.feed(data)
        for number, header, end in begun:
            self.process.reach(f"before send {_name(number)}")
            self._check()
            self.out.frames.append((end, number, header))
            self._tap.frame(True, self.process, self._peer, number, header)
        rest = bytes(data)
        while rest:
            room = WINDOW_BYTES - self.out.unread
            if room <= 0:
                self.out.writable = trio.Event()
                await self.out.writable.wait()
                self._check()
                continue
            self._push(rest[:room])
            rest = rest[room:]
        for number, _, _ in begun:
            self.process.reach(f"after send {_name(number)}")

    async def receive_some(self, max_bytes: int) -> bytes:
        """Return 1 to `max_bytes` bytes, or b"" at the end. Raises PeerUnreachable."""
        waited = False
        while True:
            self._check()
            try:
                data = self.into.take(max_bytes, self._kernel.rng)
            except ConnectionError as error:
                self.fail(str(error))
                continue
            if data is not None:
                break
            waited = True
            await self.into.arrival()
        if not waited:
            await trio.lowlevel.checkpoint()
        frames = self.into.frames
        while frames and frames[0][0] <= self.into.read_bytes:
            _, number, header = frames.popleft()
            self._tap.frame(False, self.process, self._peer, number, header)
            self.process.reach(f"after receive {_name(number)}")
        return data

    async def receive_into(self, buffer: memoryview) -> int:
        """Fill `buffer` with at least one byte; return how many, 0 at the end."""
        data = await self.receive_some(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    async def aclose(self) -> None:
        """Close at once."""
        if not self.process.dead:
            self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Close: the other side reads what is on its way and then the end, and cannot write."""
        if self._closed:
            return
        self._closed = True
        self.out.end("connection reset" if self.into.unread else "")
        self._wake()
        path = self.out.path
        self._kernel.after(path.latency_seconds, lambda: self._tell_other(path))

    def vanish(self) -> None:
        """The machine is without power: nothing more comes from here, and nothing arrives."""
        self._closed = True
        self.out.lose_some(self._kernel.rng)
        self.into.abandoned = self.out.abandoned = True

    def fail(self, reason: str) -> None:
        """The connection is broken on this side."""
        self._fault = self._fault or reason
        self._wake()

    def _tell_other(self, path: Path) -> None:
        """The other side's kernel learns that nobody reads here any more."""
        if path.cut_at is not None:
            return  # what is written is answered when the cut is over
        self.other.out.writable.set()
        self.other.peer_closed()

    def peer_closed(self) -> None:
        """Writing is useless from now on; what has arrived may still be read."""
        if self._closed:
            self._kernel.forget_stream(self)
        elif not self._fault:
            self._write_fault = "connection reset"

    _write_fault = ""

    def _push(self, data: bytes) -> None:
        if self._write_fault:
            raise PeerUnreachable(self._peer, self._write_fault)
        lives = self.out.push(data, self._kernel.rng)
        is_stale = self.out.abandoned and self._kernel.host_is_up(self.out.path.target)
        round_trip = self.out.path.latency_seconds + self.into.path.latency_seconds
        if not lives or self.out.forgotten:
            self.out.end("connection reset")
            self.into.end("connection reset")
            self._kernel.after(round_trip, lambda: self.fail("connection reset"))
            self._kernel.after(round_trip, lambda: self.other.fail("connection reset"))
        elif is_stale or (
            self.other._closed and not self.out.abandoned and self.out.path.cut_at is None
        ):
            self._kernel.after(round_trip, lambda: self.fail("connection reset"))

    def _check(self) -> None:
        if self._closed or self.process.dead:
            raise PeerUnreachable(self._peer, "stream was closed here")
        if self._fault:
            raise PeerUnreachable(self._peer, self._fault)

    def _wake(self) -> None:
        self.into.arriving.set()
        self.out.writable.set()


def _name(number: int) -> str:
    kind = BY_NUMBER.get(number)
    return kind.__name__ if kind is not None else f"type {number}"


class _Frames:
    """Finds the frames in what one side sends."""

    def __init__(self) -> None:
        self._head = b""
        self._skip = 0
        self._position = 0

    def feed(self, data: bytes | memoryview) -> list[tuple[int, bytes, int]]:
        """Return (type number, header, position of its last byte) of frames whose header ends
        in `data`."""
        found = []
        rest = bytes(data)
        while rest:
            if self._skip:
                used = min(self._skip, len(rest))
                self._skip -= used
                self._position += used
                rest = rest[used:]
                continue
            wanted = PREFIX_BYTES
            if len(self._head) >= PREFIX_BYTES:
                wanted += PREFIX.unpack(self._head[:PREFIX_BYTES])[1]
            used = min(wanted - len(self._head), len(rest))
            self._head += rest[:used]
            self._position += used
            rest = rest[used:]
            if len(self._head) >= PREFIX_BYTES:
                number, header_bytes, payload_bytes = PREFIX.unpack(self._head[:PREFIX_BYTES])
                if len(self._head) == PREFIX_BYTES + header_bytes:
                    header = self._head[PREFIX_BYTES:]
                    found.append((number, header, self._position + payload_bytes))
                    self._head, self._skip = b"", payload_bytes
        return found
