"""A sans-IO connection: bytes in, messages out, and the order in which things may be said.

The rule: each side says Hello first and Goodbye last; every Reply answers one open Request.
Payload bytes go into memory that the caller allocated after it saw (and checked) the message
they belong to: copied once from what the stream delivered, or put there by the stream itself.
"""

from collections.abc import Callable
from typing import NamedTuple

from protocol.codec import PREFIX_BYTES, FramePrefix, decode_header, decode_prefix, encode
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.messages import Channel, Goodbye, Hello, Message, Reply, Request
from protocol.records import RunId

PROTOCOL_VERSION = 1
MAX_OPEN_REQUESTS = 64
MAX_FAULT_CHARS = 1024
"""Of a Goodbye: at four bytes each they fit under its cap."""

Allocate = Callable[[Message], memoryview]
"""Given a message whose payload is about to arrive, return memory of exactly that many bytes
(format "B"), or raise RemoteProtocolError if this message should not have one."""


class Received(NamedTuple):
    """One whole message and the bytes of its tensors, one after the other."""

    message: Message
    payload: memoryview
    frame_bytes: int = 0
    """Size of the whole frame on the wire; 0 if it was never there."""


NO_PAYLOAD = memoryview(bytearray())


class Connection:
    """One connection's side of the protocol. It performs no I/O and knows no time."""

    def __init__(
        self,
        *,
        run: RunId,
        boot: int,
        channel: Channel | None,
        allocate: Allocate,
        max_payload_bytes: int = 0,
    ) -> None:
        """Start a connection of `run`; the accepting side passes None as `channel` and learns
        it from the other side's Hello."""
        self.channel = channel
        self.remote_hello: Hello | None = None
        self.max_payload_bytes = max_payload_bytes
        self._run = run
        self._boot = boot
        self._allocate = allocate
        self._said_hello = False
        self._ours_closed = False
        self._theirs_closed = False
        self._our_requests: set[int] = set()
        self._their_requests: set[int] = set()
        self._head = bytearray()
        self._prefix: FramePrefix | None = None
        self._message: Message | None = None
        self._payload = NO_PAYLOAD
        self._filled = 0

    # --- sending ---------------------------------------------------------------------

    def hello(self) -> bytes:
        """Return our Hello. The accepting side can say it only after it has heard the other."""
        if self.channel is None:
            raise LocalProtocolError("Hello before the channel is known")
        if self._said_hello:
            raise LocalProtocolError("Hello said twice")
        self._said_hello = True
        return encode(
            Hello(version=PROTOCOL_VERSION, run=self._run, channel=self.channel, boot=self._boot)
        )

    def refuse(self, fault: str) -> bytes:
        """Return a Goodbye that names the other side's fault; it may come before any Hello.

        Returns nothing if ours has been said: the other side may err while we are leaving."""
        if self._ours_closed:
            return b""
        self._ours_closed = True
        return encode(Goodbye(fault=fault[:MAX_FAULT_CHARS]))

    def send(self, message: Message) -> bytes:
        """Return prefix and header of `message`; the caller sends its tensors' bytes after it.

        Raises LocalProtocolError if it may not be said now.
        """
        if isinstance(message, Hello) or not self._said_hello:
            raise LocalProtocolError(f"{type(message).__name__} before Hello")
        if self._ours_closed:
            raise LocalProtocolError(f"{type(message).__name__} after Goodbye")
        match message:
            case Request(id=number):
                if number in self._our_requests:
                    raise LocalProtocolError(f"request id {number} is open already")
                self._our_requests.add(number)
            case Reply(id=number):
                if number not in self._their_requests:
                    raise LocalProtocolError(f"reply to request {number}, which is not open")
                self._their_requests.remove(number)
            case Goodbye():
                self._ours_closed = True
        return encode(message)

    # --- receiving --------------------------------------------------------------------

    @property
    def mid_frame_bytes(self) -> int | None:
        """Return how large the frame is that has begun and not ended; None between frames."""
        if self._prefix is not None:
            return PREFIX_BYTES + self._prefix.header_bytes + self._prefix.payload_bytes
        return PREFIX_BYTES if self._head else None

    @property
    def missing_bytes(self) -> int:
        """Return how many bytes are needed before anything new can be known."""
        if self._message is not None:
            return len(self._payload) - self._filled
        size = PREFIX_BYTES if self._prefix is None else self._prefix.header_bytes
        return max(1, size - len(self._head))

    def receive_data(self, data: bytes | bytearray | memoryview) -> list[Received]:
        """Take bytes from the stream; return the messages that are complete now.

        Raises RemoteProtocolError, after which the connection must be dropped.
        """
        view = memoryview(data)
        done: list[Received] = []
        while True:
            if self._message is not None:
                view = self._fill_payload(view)
                if self._filled < len(self._payload):
                    return done
                done.append(self._end_frame())
            elif self._prefix is not None:
                view = self._fill_head(view, self._prefix.header_bytes)
                if len(self._head) < self._prefix.header_bytes:
                    return done
                self._begin_payload(self._prefix)
            else:
                view = self._fill_head(view, PREFIX_BYTES)
                if len(self._head) < PREFIX_BYTES:
                    return done
                self._begin_header()

    @property
    def awaited_payload(self) -> memoryview:
        """Return the memory for what is still missing of a payload; empty where nothing is.

        A stream may fill it from its start instead of `receive_data`, and say so to
        `receive_filled`."""
        return self._payload[self._filled :]

    def receive_filled(self, count: int) -> list[Received]:
        """Note that `awaited_payload` holds `count` more bytes; return as `receive_data` does."""
        self._filled += count
        return [self._end_frame()] if self._filled == len(self._payload) else []

    def receive_end(self) -> None:
        """Note that the stream has ended. Raises RemoteProtocolError if inside a frame."""
        if self.mid_frame_bytes is not None:
            raise RemoteProtocolError("the stream ended inside a frame")

    @property
    def said_goodbye(self) -> bool:
        """Return whether the other side has said Goodbye."""
        return self._theirs_closed

    def _fill_head(self, view: memoryview, size: int) -> memoryview:
        wanted = size - len(self._head)
        self._head += view[:wanted]
        return view[wanted:]

    def _fill_payload(self, view: memoryview) -> memoryview:
        count = min(len(view), len(self._payload) - self._filled)
        self._payload[self._filled : self._filled + count] = view[:count]
        self._filled += count
        return view[count:]

    def _begin_header(self) -> None:
        self._prefix = decode_prefix(self._head, self.channel, self.max_payload_bytes)
        self._head = bytearray()
        if self._theirs_closed:
            raise RemoteProtocolError(f"{self._prefix.kind.__name__} after Goodbye")
        expected = (Hello, Goodbye) if self.remote_hello is None else ()
        if (self._prefix.kind is Hello or self.remote_hello is None) and (
            self._prefix.kind not in expected
        ):
            raise RemoteProtocolError(
                f"{self._prefix.kind.__name__} where Hello has its only place"
            )

    def _begin_payload(self, prefix: FramePrefix) -> None:
        message = decode_header(prefix, self._head)
        self._head = bytearray()
        self._check_order(message)
        self._message = message
        self._filled = 0
        self._payload = NO_PAYLOAD
        if prefix.payload_bytes:
            self._payload = self._allocate(message)
            if len(self._payload) != prefix.payload_bytes:
                raise LocalProtocolError(
                    f"allocated {len(self._payload)} bytes for {prefix.payload_bytes}"
                )

    def _end_frame(self) -> Received:
        assert self._message is not None and self._prefix is not None
        size = PREFIX_BYTES + self._prefix.header_bytes + self._prefix.payload_bytes
        received = Received(self._message, self._payload, size)
        self._prefix = self._message = None
        self._payload = NO_PAYLOAD
        return received

    def _check_order(self, message: Message) -> None:
        match message:
            case Hello():
                self._check_hello(message)
                self.remote_hello = message
                self.channel = message.channel
            case Request(id=number):
                if number in self._their_requests:
                    raise RemoteProtocolError(f"request id {number} is open already")
                if len(self._their_requests) >= MAX_OPEN_REQUESTS:
                    raise RemoteProtocolError(f"more than {MAX_OPEN_REQUESTS} open requests")
                self._their_requests.add(number)
            case Reply(id=number):
                if number not in self._our_requests:
                    raise RemoteProtocolError(f"reply to request {number}, which is not open")
                self._our_requests.remove(number)
            case Goodbye():
                self._theirs_closed = True

    def _check_hello(self, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise RemoteProtocolError(
                f"protocol version {hello.version}, ours is {PROTOCOL_VERSION}"
            )
        if hello.run != self._run:
            raise RemoteProtocolError(
                f"another run: theirs is {hello.run.hex()[:16]}, ours is {self._run.hex()[:16]}"
            )
        if self.channel not in (None, hello.channel):
            raise RemoteProtocolError(f"{hello.channel} connection, we opened {self.channel}")
