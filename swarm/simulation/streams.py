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
from swarm.core.memo import by_identity
from swarm.errors import PeerUnreachable
from swarm.simulation.carriage import Carriage, Pipe
from swarm.simulation.clock import timeline
from swarm.simulation.process import Process

WINDOW_BYTES = 256 * 1024
"""A direction takes no more while so much of it has not been read."""
CRUMB_CHANCE = 1 / 32
"""That a read gets a few bytes only, as if the rest came in another packet."""
CARRIED_BYTES = 16 * 1024
"""Where links have a carriage, so much or more shares them with others (carriage.py); less slips
in between."""
SHARED_BYTES = 64 * 1024
"""Headers so large are those of plans, which go to everybody."""
MEANING_BYTES = 4096
"""Of a tensor that is carried only so many bytes are copied. The others mean nothing, and their
memory is never touched: a simulated model may be of any size."""


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
    carriage: Carriage | None
    """Carries what is large; None where every path has its own bandwidth and no more."""
    sent_bytes: dict[int, float]
    """By type number; as they count on the wire."""

    def hindered(self, size: float) -> float:
        """Return how many bytes would take as long, where nothing was noisy."""
        ...

    def wire_bytes(self, number: int, size: int) -> float:
        """Return as how many bytes `size` bytes of tensors count in a frame of this type."""
        ...

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
    """What one transfer gets alone."""
    free_at: float = 0.0
    pipes: tuple[Pipe, ...] = ()
    """What its transfers share with others, if the network has a carriage."""
    cut_at: float | None = None
    healed: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True)
class _Chunk:
    """Bytes on their way; those of a memoryview mean something at first only."""

    arrival: float
    data: bytes | memoryview
    carried: bool


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
        self._chunks: deque[_Chunk] = deque()
        self._end: str | None = None
        self._end_at = 0.0
        self._last_arrival = 0.0
        self._room: int | None = None
        self.read_bytes = 0
        self.writable = trio.Event()
        self._reader: trio.lowlevel.Task | None = None
        """Who waits for bytes to arrive."""
        self._look_at = float("inf")
        """When the next look is due whether some have."""

    def push(self, data: bytes | memoryview, rng: random.Random, *, carried: bool = False) -> bool:
        """Take bytes to be delivered; return whether the stream still lives.

        What was carried has left its host just now, and takes no room from what follows."""
        if not carried:
            self.unread += len(data)
        if self.abandoned or self._end is not None:
            return True
        lives = True
        if self._room is not None:
            lives, data = len(data) <= self._room, data[: self._room]
            self._room -= len(data)
        path, left_at = self.path, trio.current_time()
        if not carried:
            left_at = path.free_at = max(left_at, path.free_at) + len(data) / path.bytes_per_second
        arrival = left_at + path.latency_seconds + path.jitter_seconds * rng.random()
        self._last_arrival = max(self._last_arrival, arrival)
        if len(data):
            self._chunks.append(_Chunk(self._last_arrival, data, carried))
            if len(self._chunks) == 1:
                self._look()
        return lives

    def end(self, reason: str) -> None:
        """Nothing follows what is on its way: "" is an ordinary end, else it is broken."""
        if self._end is None:
            path = self.path
            self._end = reason
            self._end_at = max(self._last_arrival, trio.current_time() + path.latency_seconds)
            self._look()

    def take(self, max_bytes: int, rng: random.Random) -> bytes | memoryview | None:
        """Return bytes that have arrived; b"" at the end; None while there is nothing. A memoryview
        means something in its first MEANING_BYTES only.

        Raises ConnectionError if the end is a broken one."""
        cut_at = self.path.cut_at
        now = trio.current_time() if cut_at is None else cut_at
        taken: list[bytes | memoryview] = []
        size = 0
        if max_bytes > 1 and rng.random() < CRUMB_CHANCE:
            max_bytes = rng.randint(1, min(max_bytes, 64))
        while self._chunks and self._chunks[0].arrival <= now and size < max_bytes:
            chunk = self._chunks[0]
            data = chunk.data
            is_hollow = isinstance(data, memoryview)
            if is_hollow and taken:
                break
            is_plan = not taken and max_bytes >= WINDOW_BYTES and not is_hollow
            if size + len(data) > max_bytes and not is_plan:
                chunk.data = data[max_bytes - size :]
                data = data[: max_bytes - size]
            else:
                self._chunks.popleft()
            taken.append(data)
            size += len(data)
            if not chunk.carried:
                self.unread -= len(data)
            if is_hollow:
                break
        if taken:
            self.read_bytes += size
            self.writable.set()
            return taken[0] if len(taken) == 1 else b"".join(taken)
        if not self._chunks and self._end is not None and self._end_at <= now:
            if self._end:
                raise ConnectionError(self._end)
            return b""
        return None

    async def arrival(self) -> None:
        """Wait until there may be something to take."""

        def abort(_: object) -> trio.lowlevel.Abort:
            self._reader = None
            return trio.lowlevel.Abort.SUCCEEDED

        self._reader = trio.lowlevel.current_task()
        self._look()
        await trio.lowlevel.wait_task_rescheduled(abort)

    def wake(self) -> None:
        """Let whoever waits look again."""
        if self._reader is not None:
            reader, self._reader = self._reader, None
            trio.lowlevel.reschedule(reader)

    def _look(self) -> None:
        """Wake the reader when there is something to take, which may be later."""
        arrived = self._chunks or self._end is not None
        if self._reader is None or self.path.cut_at is not None or not arrived:
            return
        at = self._chunks[0].arrival if self._chunks else self._end_at
        if at < self._look_at:
            self._look_at = at
            timeline().call_at(at, self._look_now)

    def _look_now(self) -> None:
        if trio.current_time() < self._look_at:
            return  # what it was for has been put off
        self._look_at = float("inf")
        arrived = self._chunks or self._end is not None
        if self._reader is None or self.path.cut_at is not None or not arrived:
            return
        at = self._chunks[0].arrival if self._chunks else self._end_at
        if at <= trio.current_time():
            self.wake()
        else:
            self._look()

    def heal(self, floor: float, cut_at: float) -> None:
        """What was on its way during a cut arrives at `floor` at the earliest."""
        for chunk in self._chunks:
            if chunk.arrival > cut_at:
                chunk.arrival = max(chunk.arrival, floor)
        if self._chunks:
            self._last_arrival = max(self._last_arrival, self._chunks[-1].arrival)
        self._end_at = max(self._end_at, self._last_arrival, floor)
        self.wake()

    def break_after(self, size: int) -> None:
        """Carry only so many bytes more."""
        self._room = size

    def lose_some(self, rng: random.Random) -> None:
        """A random part of what has not arrived yet never will."""
        now = trio.current_time()
        coming = sum(chunk.arrival > now for chunk in self._chunks)
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
        """Send all bytes, as the window allows; what it has room for takes no time.

        Raises PeerUnreachable."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check()
        begun = self._frames.feed(data)
        for number, header, end in begun:
            self.process.reach(f"before send {_name(number)}")
            self._check()
            self.out.frames.append((end, number, header))
            self._tap.frame(True, self.process, self._peer, number, header)
        number, tensor_bytes = self._frames.last
        size = self._kernel.wire_bytes(number, tensor_bytes) + len(data) - tensor_bytes
        sent = self._kernel.sent_bytes
        sent[number] = sent.get(number, 0) + size
        carriage = self._kernel.carriage
        if carriage is not None and size >= CARRIED_BYTES:
            await self._carry(carriage, data, size)
        elif any(len(header) >= SHARED_BYTES for _, header, _ in begun):
            await self._send_whole(bytes(data))
        else:
            await self._send_as_room_is(bytes(data))
        for number, _, _ in begun:
            self.process.reach(f"after send {_name(number)}")

    async def _send_as_room_is(self, rest: bytes) -> None:
        while rest:
            room = await self._room()
            self._push(rest[:room])
            rest = rest[room:]

    async def _send_whole(self, data: bytes) -> None:
        """Send a plan, which goes to everybody, in one piece: nobody has a part of it of its own,
        neither here nor on the other side."""
        await self._room()
        self._push(data)

    async def _room(self) -> int:
        """Wait until there is room in the window; return how much."""
        while self.out.unread >= WINDOW_BYTES:
            self.out.writable = trio.Event()
            await self.out.writable.wait()
            self._check()
        return WINDOW_BYTES - self.out.unread

    async def _carry(self, carriage: Carriage, data: bytes | memoryview, size: float) -> None:
        """Wait until all bytes have left this host, sharing its links with others."""
        path, gone = self.out.path, trio.Event()

        def done() -> None:
            gone.set()
            self.out.writable.set()

        size = self._kernel.hindered(size)
        transfer = carriage.start(path.pipes, size, done, lambda: path.cut_at is None)
        try:
            while not gone.is_set():
                self.out.writable = trio.Event()
                await self.out.writable.wait()
                self._check()
        finally:
            carriage.stop(transfer)
        self._push(data, carried=True)

    async def receive_some(self, max_bytes: int) -> bytes:
        """Return 1 to `max_bytes` bytes, or b"" at the end. Raises PeerUnreachable."""
        return bytes(await self._receive(max_bytes))

    async def receive_into(self, buffer: memoryview) -> int:
        """Fill `buffer` with at least one byte; return how many, 0 at the end."""
        data = await self._receive(len(buffer))
        size = len(data)
        if isinstance(data, memoryview):
            data = data[:MEANING_BYTES]
        buffer[: len(data)] = data
        return size

    async def _receive(self, max_bytes: int) -> bytes | memoryview:
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

    def _push(self, data: bytes | memoryview, *, carried: bool = False) -> None:
        if self._write_fault:
            raise PeerUnreachable(self._peer, self._write_fault)
        lives = self.out.push(data, self._kernel.rng, carried=carried)
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
        self.into.wake()
        self.out.writable.set()


def _name(number: int) -> str:
    kind = BY_NUMBER.get(number)
    return kind.__name__ if kind is not None else f"type {number}"


@by_identity
def _header_of(frame: bytes | memoryview) -> bytes:
    """Return the header of a frame that has nothing else: once, if the same one goes to many."""
    return bytes(frame[PREFIX_BYTES:])


class _Frames:
    """Finds the frames in what one side sends."""

    def __init__(self) -> None:
        self._head = b""
        self._skip = 0
        self._position = 0
        self.last = (0, 0)
        """Type of the frame to which the last byte of what was fed last belongs, and how many of
        the bytes fed last are its tensors'."""

    def feed(self, data: bytes | memoryview) -> list[tuple[int, bytes, int]]:
        """Return (type number, header, position of its last byte) of frames whose header ends
        in `data`."""
        if not self._skip and not self._head and len(data) >= PREFIX_BYTES:
            number, header_bytes, payload_bytes = PREFIX.unpack_from(data)
            head = PREFIX_BYTES + header_bytes
            if head <= len(data) <= head + payload_bytes:  # one frame, as it is mostly
                self._position += len(data)
                self._skip = head + payload_bytes - len(data)
                self.last = (number, len(data) - head)
                is_shared = head == len(data) >= SHARED_BYTES and isinstance(data, bytes)
                header = _header_of(data) if is_shared else bytes(data[PREFIX_BYTES:head])
                return [(number, header, self._position + self._skip)]
        if self._skip >= len(data) > 0:
            self._skip -= len(data)
            self._position += len(data)
            self.last = (self.last[0], len(data))
            return []
        found = []
        rest = bytes(data)
        tensor_bytes = 0
        while rest:
            if self._skip:
                used = min(self._skip, len(rest))
                self._skip -= used
                self._position += used
                rest = rest[used:]
                tensor_bytes = used
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
                    tensor_bytes = 0
                    self.last = (number, 0)
        self.last = (self.last[0], tensor_bytes)
        return found
