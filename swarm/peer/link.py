"""One connection to one peer: protocol.Connection over a stream, served until it ends.

The rule: what a peer does wrong ends the link and is told to it; what we do wrong ends the daemon.
"""

import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from protocol.codec import payload_bytes_of
from protocol.connection import Connection, Received
from protocol.errors import RemoteProtocolError
from protocol.messages import TABLE, Goodbye, Message, Reply, Request, Traffic
from protocol.signing import PeerId
from swarm.core.measuring.estimation import Writers
from swarm.errors import PeerError, PeerRefused, PeerUnreachable
from swarm.ports import Buffer, ByteStream

RECEIVE_BYTES = 256 * 1024
LARGE_PAYLOAD_BYTES = 64 * 1024
"""While so much of a payload is missing, the stream writes straight into its memory."""
SMALL_PAYLOAD_BYTES = 128 * 1024
"""Payloads up to this size are copied behind their header: one write instead of two."""
REQUEST_SECONDS = 20.0
HELLO_SECONDS = 5.0
FRAME_GRACE_SECONDS = 15.0
MIN_BYTES_PER_SECOND = 64 * 1024
"""A frame that has begun must end within the grace time plus its size at this rate."""
GOODBYE_SECONDS = 1.0
MAX_QUEUED_MESSAGES = 16384


class Receiver(Protocol):
    """Who takes in what arrives on the links."""

    def check_payload(self, peer: PeerId, message: Message) -> None:
        """Raise RemoteProtocolError if `message` may not carry the tensors that it announces.
        Called before memory is taken for them."""
        ...

    async def handle(self, peer: PeerId, boot: int, received: Received, answer: "Answer") -> None:
        """Take in one message; must not wait for the network or for computation.

        Raises RemoteProtocolError if the peer may not say this: it ends the link."""
        ...

    def opened(self, peer: PeerId, boot: int) -> None:
        """A link to `peer` can be used."""
        ...

    def lost(self, peer: PeerId, reason: str) -> None:
        """A link to `peer` has ended; frames may be lost."""
        ...

    def unreachable(self, fault: PeerError, waiting: Sequence[Message]) -> None:
        """A peer could not be dialled; these messages were meant for it."""
        ...


Answer = Callable[[Reply, Sequence[Buffer]], None]
"""Answers the request that has just been received, on the link on which it came."""


@dataclass(order=True)
class _Queued:
    """A message that waits to be sent; the order is that of the outbox."""

    rank: int
    number: int
    message: Message
    payloads: Sequence[Buffer]

    def __post_init__(self) -> None:
        assert sum(len(payload) for payload in self.payloads) == payload_bytes_of(self.message)


class TrafficCount:
    """Bytes sent and received, by kind of message."""

    def __init__(self) -> None:
        self._sent: dict[str, int] = {}
        self._received: dict[str, int] = {}

    def sent(self, message: Message, size: int) -> None:
        """Count a frame that has been handed to the stream."""
        name = type(message).__name__
        self._sent[name] = self._sent.get(name, 0) + size

    def received(self, message: Message, size: int) -> None:
        """Count a whole frame that has arrived."""
        name = type(message).__name__
        self._received[name] = self._received.get(name, 0) + size

    def snapshot(self) -> tuple[Traffic, ...]:
        """Return the counts so far, sorted by kind."""
        kinds = sorted(self._sent.keys() | self._received.keys())
        return tuple(
            Traffic(kind, self._sent.get(kind, 0), self._received.get(kind, 0)) for kind in kinds
        )


class Link:
    """One connection to one peer: an outbox in order of rank, a writer and a reader."""

    def __init__(
        self,
        stream: ByteStream,
        connection: Connection,
        receiver: Receiver,
        traffic: TrafficCount,
        writers: Writers | None = None,
    ) -> None:
        """`writers` sees how fast bulk data leaves."""
        self.peer = stream.peer
        self.connection = connection
        self._stream = stream
        self._receiver = receiver
        self._traffic = traffic
        self._writers = writers if writers is not None else Writers()
        self._outbox: list[_Queued] = []
        self._numbers = itertools.count()
        self._writing_bytes = 0
        self._work = trio.Event()
        self._said_goodbye = trio.Event()
        self._ended = False
        self._waiting: dict[int, trio.MemorySendChannel[Received]] = {}

    @property
    def is_leaving(self) -> bool:
        """Return whether the link is being closed: nothing more will be sent on it."""
        return self._ended or self._said_goodbye.is_set()

    async def open(self) -> None:
        """Exchange Hello; the stream is closed where that fails. Raises PeerRefused or
        PeerUnreachable."""
        try:
            await self._exchange_hello()
        except BaseException:  # also when cancelled
            await self._stream.aclose()
            raise

    async def _exchange_hello(self) -> None:
        try:
            with trio.fail_after(HELLO_SECONDS):
                if self.connection.channel is not None:
                    await self._stream.send_all(self.connection.hello())
                    await self._hear_hello()
                else:
                    await self._hear_hello()
                    await self._stream.send_all(self.connection.hello())
        except trio.TooSlowError:
            raise PeerUnreachable(self.peer, f"no Hello within {HELLO_SECONDS:g} s") from None
        except RemoteProtocolError as fault:
            await self.refuse(str(fault))
            raise PeerRefused(self.peer, str(fault)) from fault

    async def _hear_hello(self) -> None:
        # Byte by byte as far as the frame asks: what follows belongs to the reader.
        while self.connection.remote_hello is None:
            wanted = self.connection.missing_bytes
            data = await self._stream.receive_some(wanted)
            if not data:
                raise PeerUnreachable(self.peer, "closed before Hello")
            for received in self.connection.receive_data(data):
                if isinstance(received.message, Goodbye):
                    raise PeerRefused(self.peer, received.message.fault)

    def post(self, message: Message, payloads: Sequence[Buffer] = ()) -> None:
        """Queue a message behind all of its rank that wait already."""
        if len(self._outbox) >= MAX_QUEUED_MESSAGES:
            raise PeerUnreachable(self.peer, f"{MAX_QUEUED_MESSAGES} messages wait to be sent")
        rank = TABLE[type(message)].rank
        heapq.heappush(self._outbox, _Queued(rank, next(self._numbers), message, payloads))
        self._work.set()

    async def request(self, message: Request) -> Received:
        """Send a request and return its reply. Raises PeerUnreachable after the deadline."""
        send, receive = trio.open_memory_channel[Received](1)
        self._waiting[message.id] = send
        self.post(message)
        try:
            with trio.fail_after(REQUEST_SECONDS):
                return await receive.receive()
        except (trio.TooSlowError, trio.EndOfChannel):
            name = type(message).__name__
            raise PeerUnreachable(self.peer, f"no answer to {name}") from None
        finally:
            self._waiting.pop(message.id, None)

    async def serve(self) -> None:
        """Read and write until either side ends the link. Raises PeerError for why it ended;
        returns if the other side said Goodbye."""
        try:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    await self._read()
                    nursery.cancel_scope.cancel()
            finally:
                self._ended = True
        except BaseExceptionGroup as group:
            theirs, ours = group.split((PeerError, RemoteProtocolError))
            if ours is not None:
                raise ours from None  # what a peer did in the moment of our leaving is no matter
            if theirs is None:
                raise
            if self._said_goodbye.is_set():
                return
            fault = _only(theirs)
            if isinstance(fault, RemoteProtocolError):
                await self.refuse(str(fault))
                raise PeerRefused(self.peer, str(fault)) from None
            raise fault from None
        finally:
            for channel in self._waiting.values():
                channel.close()
            self._writers.pause(self.peer)
            await self._stream.aclose()

    async def refuse(self, fault: str) -> None:
        """Say Goodbye with the other side's fault, if that is still possible."""
        with trio.move_on_after(GOODBYE_SECONDS, shield=True):
            with contextlib.suppress(PeerError):  # it is gone: nothing is left to be said
                await self._stream.send_all(self.connection.refuse(fault))
        await self._stream.aclose()

    async def say_goodbye(self) -> None:
        """Close on purpose, after the frame that is being sent."""
        with trio.move_on_after(GOODBYE_SECONDS), contextlib.suppress(PeerUnreachable):
            self.post(Goodbye())
            await self._said_goodbye.wait()
        self._said_goodbye.set()
        await self._stream.aclose()

    async def _write(self) -> None:
        with trio.CancelScope() as patience:
            await self._write_all(patience)
        if patience.cancelled_caught:
            raise PeerUnreachable(self.peer, f"took no {self._writing_bytes} bytes in time")

    async def _write_all(self, patience: trio.CancelScope) -> None:
        """Write what is queued, until Goodbye; `patience` ends what takes too long. There is one
        for all frames, since it costs as much as a small frame itself."""
        is_bulk = self.connection.channel == "bulk"
        while True:
            if is_bulk and self._outbox:
                self._writers.begin(self.peer, trio.current_time())
            while self._outbox:
                queued = heapq.heappop(self._outbox)
                await self._write_one(queued, patience)
                if isinstance(queued.message, Goodbye):
                    return self._said_goodbye.set()
            if is_bulk:
                self._writers.pause(self.peer)
            self._work = trio.Event()
            await self._work.wait()

    async def _write_one(self, queued: _Queued, patience: trio.CancelScope) -> None:
        head = self.connection.send(queued.message)
        size = len(head) + sum(len(payload) for payload in queued.payloads)
        self._writing_bytes = size
        seconds = FRAME_GRACE_SECONDS + size / MIN_BYTES_PER_SECOND
        patience.deadline = trio.current_time() + seconds
        if size <= SMALL_PAYLOAD_BYTES:
            await self._stream.send_all(b"".join((head, *queued.payloads)))
        else:
            await self._stream.send_all(head)
            for payload in queued.payloads:
                await self._stream.send_all(payload)
        patience.deadline = math.inf
        self._traffic.sent(queued.message, size)
        self._writers.wrote(self.peer, size, trio.current_time())

    async def _read(self) -> None:
        begun: float | None = None
        while not self.connection.said_goodbye:
            for received in await self._receive_in_time(begun):
                begun = None
                await self._dispatch(received)
            if self.connection.mid_frame_bytes is None:
                begun = None
            elif begun is None:
                begun = trio.current_time()

    async def _receive_in_time(self, begun: float | None) -> list[Received]:
        size = self.connection.mid_frame_bytes
        if begun is None or size is None:
            return await self._receive()
        deadline = begun + FRAME_GRACE_SECONDS + size / MIN_BYTES_PER_SECOND
        with trio.move_on_at(deadline):
            return await self._receive()
        raise RemoteProtocolError(f"a frame of {size} bytes did not arrive in time")

    async def _receive(self) -> list[Received]:
        payload = self.connection.awaited_payload
        if len(payload) >= LARGE_PAYLOAD_BYTES:
            count = await self._stream.receive_into(payload)
            self._writers.received(count)
            if count:
                return self.connection.receive_filled(count)
        else:
            data = await self._stream.receive_some(RECEIVE_BYTES)
            self._writers.received(len(data))
            if data:
                return self.connection.receive_data(data)
        self.connection.receive_end()
        raise PeerUnreachable(self.peer, "closed the connection")

    async def _dispatch(self, received: Received) -> None:
        message = received.message
        self._traffic.received(message, received.frame_bytes)
        if isinstance(message, Goodbye):
            if message.fault:
                raise PeerRefused(self.peer, message.fault)
        elif isinstance(message, Reply):
            channel = self._waiting.get(message.id)
            if channel is not None:
                channel.send_nowait(received)
        else:
            assert self.connection.remote_hello is not None
            boot = self.connection.remote_hello.boot
            await self._receiver.handle(self.peer, boot, received, self.post)


def _only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first leaf of a group of which one explains the end as well as another."""
    first = group.exceptions[0]
    return _only(first) if isinstance(first, BaseExceptionGroup) else first
