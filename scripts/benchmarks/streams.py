"""Three ways to carry messages between two processes, all used alike: our links, bare trio TLS,
and hivemind's P2P stream.

The rule: each is used as is best for it, with the same certificates where it has certificates,
and nothing is measured that a user of it would not get. A message is a header and a payload of
`size` bytes; the last message of an exchange is answered with an empty one.
"""

import itertools
import socket
import ssl
import struct
import time
from collections.abc import Coroutine, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy
import trio

from protocol.connection import Received
from protocol.messages import Fence, GatherShard, Message, Ping, Pong
from protocol.records import Generation, TensorSpec, sha256
from protocol.signing import Identity, PeerId
from swarm.adapters.asyncio_thread import AsyncioThread
from swarm.adapters.certificates import configure
from swarm.adapters.tls import TlsTransport, parse_address
from swarm.errors import PeerError
from swarm.peer.link import Answer
from swarm.peer.links import Links
from swarm.ports import Buffer

NEAR = Identity.from_seed(sha256(b"near"))
FAR = Identity.from_seed(sha256(b"far"))
SWARM_KEY = sha256(b"a swarm of two")
RUN = sha256(b"a run of nothing")
BOOT = 1
LARGEST_BYTES = 64 * 1024 * 1024

NOTHING, EMPTY, ECHO, ANSWER = range(4)
"""What a message asks for: nothing, an empty answer, its like; or it is an answer."""


class Way(Protocol):
    """One way of carrying messages, seen from the near end."""

    name: str

    async def exchange(self, size: int, count: int) -> float:
        """Send `count` messages with `size` bytes each; return seconds until all have arrived."""
        ...


# --- our links ---------------------------------------------------------------------------------


class LinkEnd:
    """Either end of our links (`links.Receiver`): does what messages ask for."""

    name = "link"

    def __init__(self, me: Identity, other: PeerId, folder: Path) -> None:
        self._other = other
        self.links = Links(
            transport=TlsTransport(me, SWARM_KEY, folder),
            me=me.peer,
            run=RUN,
            boot=BOOT,
            receiver=self,
        )
        self.links.allow_payloads(LARGEST_BYTES)
        self._answers_in, self._answers = trio.open_memory_channel[GatherShard](1000)
        self._pongs: dict[int, trio.Event] = {}
        self._numbers = itertools.count()

    async def run(self, task_status: trio.TaskStatus[str]) -> None:
        """Listen until cancelled; give the address."""
        await self.links.run(started=task_status.started)

    def post(self, size: int, wish: int) -> None:
        """Send a message on the bulk connection."""
        tensors = (TensorSpec("uint8", (size,)),) if size else ()
        message = GatherShard(
            fence=Fence(Generation(), 0, BOOT), step=0, bucket=wish, shard=0, tensors=tensors
        )
        self.links.post(self._other, message, (payload_of(size),) if size else ())

    async def beat(self) -> None:
        """Send a Ping on the control connection and wait for its Pong."""
        number = next(self._numbers)
        self._pongs[number] = trio.Event()
        self.links.post(self._other, Ping(number=number))
        await self._pongs[number].wait()

    async def answer(self) -> None:
        """Wait for the next answer."""
        await self._answers.receive()

    async def exchange(self, size: int, count: int) -> float:
        """Send messages (Way.exchange)."""
        begun = time.perf_counter()
        for _ in range(count - 1):
            self.post(size, NOTHING)
        self.post(size, EMPTY)
        await self.answer()
        return time.perf_counter() - begun

    # --- links.Receiver ---

    def check_payload(self, peer: PeerId, message: Message) -> None:
        """Take all payloads."""

    async def handle(self, peer: PeerId, boot: int, received: Received, reply: Answer) -> None:
        """Do what a message asks for."""
        match received.message:
            case GatherShard(bucket=wish) if wish == EMPTY:
                self.post(0, ANSWER)
            case GatherShard(bucket=wish) if wish == ECHO:
                self.post(len(received.payload), ANSWER)
            case GatherShard(bucket=wish) as message if wish == ANSWER:
                self._answers_in.send_nowait(message)
            case Ping(number=number):
                self.links.post(peer, Pong(number=number))
            case Pong(number=number):
                self._pongs.pop(number).set()

    def opened(self, peer: PeerId, boot: int) -> None:
        """It begins."""

    def unreachable(self, fault: PeerError, waiting: Sequence[Message]) -> None:
        """End the measurement: the far process is not there."""
        raise RuntimeError(f"the far process cannot be reached: {fault.reason}")

    def lost(self, peer: PeerId, reason: str) -> None:
        """End the measurement: its messages are gone. The far end is left when it is over."""
        if peer == FAR.peer:
            raise RuntimeError(f"the link to the far process was lost: {reason}")


# --- bare trio TLS -----------------------------------------------------------------------------

_HEADER = struct.Struct("!QB")
_READ_BYTES = 64 * 1024
"""More makes SSLStream slower: it allocates this much for every record of 16 KiB."""


class TrioTls:
    """The near end of a trio.SSLStream: exact-size reads into a buffer that is there already."""

    def __init__(self, name: str, stream: trio.SSLStream[trio.SocketStream], piece: int) -> None:
        self.name = name
        self._stream = stream
        self._piece = piece

    @classmethod
    async def connect(cls, name: str, address: str, folder: Path, piece: int) -> "TrioTls":
        """Open a stream on which payloads go out `piece` bytes at a time."""
        tcp = await trio.open_tcp_stream(*parse_address(address))
        context = _context(ssl.PROTOCOL_TLS_CLIENT, NEAR, folder)
        stream = trio.SSLStream(tcp, context, https_compatible=True)
        await stream.do_handshake()
        return cls(name, stream, piece)

    async def exchange(self, size: int, count: int) -> float:
        """Send messages (Way.exchange)."""
        payload = payload_of(size)
        begun = time.perf_counter()
        for number in range(count):
            await self._stream.send_all(_HEADER.pack(size, EMPTY if number == count - 1 else 0))
            for start in range(0, size, self._piece):
                await self._stream.send_all(payload[start : start + self._piece])
        await _fill(self._stream, memoryview(bytearray(_HEADER.size)))
        return time.perf_counter() - begun


async def serve_trio_tls(folder: Path, task_status: trio.TaskStatus[str]) -> None:
    """Be the far end until cancelled; give the address."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, FAR, folder)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    host, port = listener.socket.getsockname()
    task_status.started(f"{host}:{port}")

    async def serve(tcp: trio.SocketStream) -> None:
        stream = trio.SSLStream(tcp, context, server_side=True, https_compatible=True)
        head = memoryview(bytearray(_HEADER.size))
        buffer = memoryview(bytearray(LARGEST_BYTES))
        while await _fill(stream, head):
            size, wish = _HEADER.unpack(head)
            await _fill(stream, buffer[:size])
            if wish == EMPTY:
                await stream.send_all(_HEADER.pack(0, ANSWER))

    await trio.serve_listeners(serve, [listener])


def _context(side: int, identity: Identity, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    configure(context, identity, SWARM_KEY, folder)
    return context


async def _fill(stream: trio.SSLStream[trio.SocketStream], buffer: memoryview) -> bool:
    """Fill `buffer`; False if the stream has ended."""
    filled = 0
    while filled < len(buffer):
        data = await stream.receive_some(min(len(buffer) - filled, _READ_BYTES))
        if not data:
            return False
        buffer[filled : filled + len(data)] = data
        filled += len(data)
    return True


# --- hivemind ------------------------------------------------------------------------------------


class HivemindStream:
    """The near end of a stream through hivemind's libp2p daemons; runs on asyncio."""

    name = "hivemind P2P stream"

    def __init__(self, thread: AsyncioThread, p2p: Any, reader: Any, writer: Any) -> None:
        self._thread = thread
        self._p2p = p2p
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, thread: AsyncioThread, addresses: Sequence[str]) -> "HivemindStream":
        """Start a daemon that knows the far one, and open a stream to it."""

        async def connect() -> Any:
            p2p = await _p2p(addresses)
            (far,) = [each.peer_id for each in await p2p.list_peers()]
            return p2p, *await p2p.call_binary_stream_handler(far, "bench")

        p2p, _, reader, writer = await _result(thread, connect())
        return cls(thread, p2p, reader, writer)

    async def aclose(self) -> None:
        """End the stream and the daemon."""
        self._writer.close()
        await _result(self._thread, self._p2p.shutdown())

    async def exchange(self, size: int, count: int) -> float:
        """Send messages (Way.exchange); the clock runs in asyncio's thread."""

        async def exchange() -> float:
            payload = payload_of(size)
            begun = time.perf_counter()
            for number in range(count):
                self._writer.write(_HEADER.pack(size, EMPTY if number == count - 1 else 0))
                self._writer.write(payload)
                await self._writer.drain()
            await self._reader.readexactly(_HEADER.size)
            return time.perf_counter() - begun

        seconds: float = await _result(self._thread, exchange())
        return seconds


async def serve_hivemind(thread: AsyncioThread, task_status: trio.TaskStatus[list[str]]) -> None:
    """Be the far end until cancelled; give the addresses."""

    async def handle(info: Any, reader: Any, writer: Any) -> None:
        buffer = memoryview(bytearray(LARGEST_BYTES))
        while head := await reader.read(_HEADER.size):
            head += await reader.readexactly(_HEADER.size - len(head))
            size, wish = _HEADER.unpack(head)
            filled = 0
            while filled < size:
                data = await reader.read(size - filled)
                buffer[filled : filled + len(data)] = data
                filled += len(data)
            if wish == EMPTY:
                writer.write(_HEADER.pack(0, ANSWER))
                await writer.drain()

    async def start() -> Any:
        p2p = await _p2p(())
        await p2p.add_binary_stream_handler("bench", handle)
        return p2p, [str(address) for address in await p2p.get_visible_maddrs()]

    p2p, addresses = await _result(thread, start())
    try:
        task_status.started(addresses)
        await trio.sleep_forever()
    finally:
        with trio.CancelScope(shield=True):
            await _result(thread, p2p.shutdown())


async def _p2p(addresses: Sequence[str]) -> Any:
    # Imported here: hivemind takes seconds, and not every process needs it.
    from hivemind.p2p import P2P

    return await P2P.create(
        initial_peers=list(addresses), auto_nat=False, nat_port_map=False, use_relay=False
    )


async def _result(thread: AsyncioThread, coroutine: Coroutine[Any, Any, Any]) -> Any:
    return (await thread.finished(coroutine)).result()


# --- payloads -----------------------------------------------------------------------------------


@cache
def payload_of(size: int) -> Buffer:
    """Return `size` bytes; the same memory every time."""
    return memoryview(numpy.random.default_rng(0).bytes(size))


# --- TCP -----------------------------------------------------------------------------------------

CONGESTION_CONTROL = b"cubic"


class _Sockets(trio.abc.SocketFactory):
    """Makes sockets with one congestion control, whatever the machine's default is."""

    def socket(self, family: Any = -1, type: Any = -1, proto: Any = -1) -> trio.socket.SocketType:
        made = socket.socket(family, type, proto)
        if made.type == socket.SOCK_STREAM and made.family in (socket.AF_INET, socket.AF_INET6):
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL)
        return trio.socket.from_stdlib_socket(made)


def choose_congestion_control() -> str:
    """Give all TCP connections of trio in this process the same congestion control; return it.

    A default of BBR, which paces, halves loopback."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return "the system's"
    trio.socket.set_custom_socket_factory(_Sockets())
    return CONGESTION_CONTROL.decode()
