"""All connections of a peer, and the one way to say something to another.

To every peer there are two connections, control and bulk, opened when there is something to
say; whoever says something first dials. Both directions use them.
"""

import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence

import numpy
import trio

from protocol.codec import payload_bytes_of
from protocol.connection import Connection, Received
from protocol.errors import RemoteProtocolError
from protocol.messages import TABLE, Channel, Message, Reply, Request
from protocol.records import PeerRecord, RunId
from protocol.signing import PeerId
from swarm.core.measuring.estimation import Writers
from swarm.errors import NobodyListens, PeerError, PeerUnreachable
from swarm.peer.link import MAX_QUEUED_MESSAGES, Link, Receiver, TrafficCount
from swarm.ports import Buffer, ByteStream, Transport

log = logging.getLogger(__name__)

SMALLEST_PAYLOAD_CAP_BYTES = 8 * 1024 * 1024


class Links:
    """All connections of this peer, and the one way to say something to another."""

    def __init__(
        self, *, transport: Transport, me: PeerId, run: RunId, boot: int, receiver: Receiver
    ) -> None:
        self.traffic = TrafficCount()
        self.writers = Writers()
        self.me = me
        self._transport = transport
        self._run = run
        self._boot = boot
        self._receiver = receiver
        self._addresses: dict[PeerId, tuple[str, ...]] = {}
        self._records: dict[PeerId, tuple[int, int]] = {}
        self.directory: Callable[[PeerId], PeerRecord | None] = lambda peer: None
        """Tells what the plans at hand say of where a peer is."""
        self._open: dict[tuple[PeerId, Channel], list[Link]] = {}
        self.changes = 0
        """Grows with every peer that is met, or lost."""
        self._count: dict[PeerId, int] = {}
        """How many links there are to each peer that has one."""
        self._dialling: dict[tuple[PeerId, Channel], list[tuple[Message, Sequence[Buffer]]]] = {}
        self._request_ids = itertools.count(1)
        self._max_payload_bytes = SMALLEST_PAYLOAD_CAP_BYTES
        self._to_self_send, self._to_self = trio.open_memory_channel[Received](MAX_QUEUED_MESSAGES)
        self._nursery: trio.Nursery | None = None

    async def run(self, *, started: Callable[[str], None]) -> None:
        """Listen and serve until cancelled; call `started` with the bound HOST:PORT."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._serve_self)
            try:
                await self._transport.serve(self._accept, started=started)
            finally:
                self._nursery = None

    def know(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Note where a peer can be reached."""
        self._addresses[peer] = tuple(addresses)
        self.changes += 1

    def know_record(self, record: PeerRecord) -> None:
        """Note what a peer has signed about where it is, if it is the newest of the kind."""
        age = (record.boot, record.sequence)
        if record.peer != self.me and age > self._records.get(record.peer, (0, 0)):
            self._records[record.peer] = age
            self._addresses[record.peer] = record.addresses

    def address_of(self, peer: PeerId) -> str:
        """Return the first known address of a peer, or ""."""
        return (self._addresses_of(peer) or ("",))[0]

    def _addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """Return where a peer is, by the newest that it has signed."""
        record = self.directory(peer) if peer != self.me else None
        if record is not None:
            self.know_record(record)
        return self._addresses.get(peer, ())

    def allow_payloads(self, max_payload_bytes: int) -> None:
        """Set the cap of payloads to what the plan's tensors need."""
        self._max_payload_bytes = max(max_payload_bytes, SMALLEST_PAYLOAD_CAP_BYTES)
        for links in self._open.values():
            for link in links:
                link.connection.max_payload_bytes = self._max_payload_bytes

    def post(self, peer: PeerId, message: Message, payloads: Sequence[Buffer] = ()) -> None:
        """Queue a message to a peer (which may be this one), dialling it if need be.

        What cannot be delivered is told to the receiver: `lost`, or `unreachable`."""
        if peer == self.me:
            payload = _joined(payloads)
            self._to_self_send.send_nowait(Received(message, payload))
            return
        channel: Channel = TABLE[type(message)].channel or "control"
        key = (peer, channel)
        link = self._usable(key)
        if link is not None:
            try:
                link.post(message, payloads)
            except PeerUnreachable as fault:
                self._receiver.lost(peer, fault.reason)
        elif key in self._dialling:
            self._dialling[key].append((message, payloads))
        else:
            self._dialling[key] = [(message, payloads)]
            self.start_soon(self._dial_and_serve, peer, channel)

    async def request(self, peer: PeerId, message: Callable[[int], Request]) -> Received:
        """Send the request that `message` makes from an id; return its reply.

        Raises PeerUnreachable or PeerRefused."""
        channel: Channel = TABLE[type(message(0))].channel or "control"
        link = self._usable((peer, channel)) or await self._connect(peer, channel)
        return await link.request(message(next(self._request_ids)))

    async def meet(self, address: str) -> PeerId:
        """Dial an address without knowing who lives there, unless there is a link; return who
        answered.

        Raises PeerUnreachable or PeerRefused."""
        for peer in sorted(self.connected()):
            if address in self._addresses_of(peer) and self._usable((peer, "bulk")):
                return peer
        link = await self._open_link(address, None, "bulk")
        self.know(link.peer, (address,))
        self._begin(link, "bulk")
        return link.peer

    async def reach(self, peer: PeerId) -> PeerId:
        """Open a bulk connection to a known peer unless there is one; return the peer.

        Raises PeerUnreachable or PeerRefused."""
        if self._usable((peer, "bulk")) is None:
            await self._connect(peer, "bulk")
        return peer

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run something that talks to a peer beside the links, until it ends or they do.

        When this peer is leaving, nothing begins any more."""
        if self._nursery is not None:
            self._nursery.start_soon(function, *args)

    async def say_goodbye(self) -> None:
        """Close all links on purpose; bounded in time."""
        async with trio.open_nursery() as nursery:
            for links in list(self._open.values()):
                for link in list(links):
                    nursery.start_soon(link.say_goodbye)

    def connected(self) -> frozenset[PeerId]:
        """Return the peers with which at least one link is open."""
        return frozenset(self._count)

    def is_connected(self, peer: PeerId) -> bool:
        """Return whether at least one link to a peer is open."""
        return peer in self._count

    def _usable(self, key: tuple[PeerId, Channel]) -> Link | None:
        """Return the oldest link to the newest start of a peer that is not being closed."""
        links = [link for link in self._open.get(key, ()) if not link.is_leaving]
        return max(links, key=_boot_of, default=None)  # the first of equal ones

    # --- opening ----------------------------------------------------------------------

    async def _dial_and_serve(self, peer: PeerId, channel: Channel) -> None:
        try:
            await self._connect(peer, channel)
        except PeerError as fault:
            # Where the other side has dialled meanwhile, all that waited went that way.
            waiting = self._dialling.pop((peer, channel), None)
            if waiting is not None:
                self._receiver.unreachable(fault, [message for message, _ in waiting])

    async def _connect(self, peer: PeerId, channel: Channel) -> Link:
        """Return a new link that is being served. Raises PeerUnreachable."""
        faults: list[PeerError] = []
        for address in self._addresses_of(peer):
            try:
                link = await self._open_link(address, peer, channel)
            except PeerError as fault:
                faults.append(type(fault)(peer, f"{address} {fault.reason}"))
                continue
            self._begin(link, channel)
            return link
        reason = "; ".join(fault.reason for fault in faults) or "no address is known"
        gone = bool(faults) and all(isinstance(fault, NobodyListens) for fault in faults)
        raise (NobodyListens if gone else PeerUnreachable)(peer, reason)

    async def _open_link(self, address: str, peer: PeerId | None, channel: Channel) -> Link:
        stream = await self._transport.dial(address, peer)
        link = self._link(stream, channel)
        await link.open()
        return link

    async def _accept(self, stream: ByteStream) -> None:
        link = self._link(stream, None)
        try:
            await link.open()
        except PeerError as fault:
            log.warning("link refused peer=%s fault=%r", link.peer, fault.reason)
            return
        assert link.connection.channel is not None
        self._register(link, link.connection.channel)
        await self._serve(link, link.connection.channel)

    def _link(self, stream: ByteStream, channel: Channel | None) -> Link:
        connection = Connection(
            run=self._run,
            boot=self._boot,
            channel=channel,
            allocate=lambda message: self._allocate(stream.peer, message),
            max_payload_bytes=self._max_payload_bytes,
        )
        return Link(stream, connection, self._receiver, self.traffic, self.writers)

    def _allocate(self, peer: PeerId, message: Message) -> memoryview:
        self._receiver.check_payload(peer, message)
        # numpy, because bytearray would write zeros first.
        return numpy.empty(payload_bytes_of(message), dtype=numpy.uint8).data

    # --- serving -------------------------------------------------------------------------

    def _begin(self, link: Link, channel: Channel) -> None:
        """Serve a link beside the others; it can be used at once."""
        self._register(link, channel)
        self.start_soon(self._serve, link, channel)

    def _register(self, link: Link, channel: Channel) -> None:
        """Let a link be used, first of all for what waits for one."""
        key = (link.peer, channel)
        self._open.setdefault(key, []).append(link)
        self._count[link.peer] = self._count.get(link.peer, 0) + 1
        self.changes += 1
        link.connection.max_payload_bytes = self._max_payload_bytes
        assert link.connection.remote_hello is not None
        self._receiver.opened(link.peer, link.connection.remote_hello.boot)
        for message, payloads in self._dialling.pop(key, ()):
            self.post(link.peer, message, payloads)

    async def _serve(self, link: Link, channel: Channel) -> None:
        reason = "said Goodbye"
        try:
            await link.serve()
        except PeerError as fault:
            reason = fault.reason
        finally:
            self._forget(link, channel)
        log.info("link closed peer=%s channel=%s reason=%r", link.peer, channel, reason)
        self._receiver.lost(link.peer, reason)

    def _forget(self, link: Link, channel: Channel) -> None:
        links = self._open[link.peer, channel]
        links.remove(link)
        if not links:
            del self._open[link.peer, channel]
        self._count[link.peer] -= 1
        if not self._count[link.peer]:
            del self._count[link.peer]
            self.changes += 1

    async def _serve_self(self) -> None:
        async for received in self._to_self:
            try:
                await self._receiver.handle(self.me, self._boot, received, _no_answer)
            except RemoteProtocolError as fault:
                # What this peer says to itself may clash with what another has said before.
                log.error("refused from this peer itself fault=%r", str(fault))
                self._receiver.lost(self.me, str(fault))


def _boot_of(link: Link) -> int:
    assert link.connection.remote_hello is not None
    return link.connection.remote_hello.boot


def _no_answer(reply: Reply, payloads: Sequence[Buffer]) -> None:
    raise AssertionError(f"a peer does not send requests to itself: {type(reply).__name__}")


def _joined(payloads: Sequence[Buffer]) -> memoryview:
    if len(payloads) == 1:
        return payloads[0]
    return memoryview(b"".join(payloads))
