"""One encrypted stream: trio's SSLStream, read in large pieces into the caller's own buffer.

The rule: only public hooks of ssl and trio are used. TLS hands over at most 16 KiB per read,
and a turn of trio's loop costs as much as decrypting that; so one turn takes every record that
has arrived (`_Records`), and one system call takes 256 KiB (`_WideReads`). Together that is
over twice the throughput of a bare SSLStream.
"""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from functools import cached_property
from typing import Any, cast

import trio

from protocol.signing import PeerId
from swarm.adapters.certificates import peer_of
from swarm.errors import PeerUnreachable

PIECE_BYTES = 256 * 1024
"""Read, encrypted or decrypted at a time: a fifth of a millisecond of the loop."""

_NOTSENT_LOWAT_BYTES = 128 * 1024  # more in the kernel's queue cannot be overtaken any more
_KEEPALIVE_SECONDS = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_UNANSWERED_MILLISECONDS = 30_000  # keepalive does not probe while something waits to be taken in


class _Records(ssl.SSLObject):
    """Reads as many records as are there, not one."""

    into: memoryview | None = None
    """Where the next read goes; None makes it return bytes."""
    scratch: memoryview
    """What bytes are decrypted into first, at least as long as any such read."""
    _fault: ssl.SSLError | None = None

    def read(self, len: int = 1024, buffer: Any = None) -> Any:
        """Return bytes, or the filled part of `into`; `buffer` is not used."""
        if self._fault is not None:
            raise self._fault
        target = (self.scratch if self.into is None else self.into)[:len]
        filled = self._one(target)
        while 0 < filled < target.nbytes:
            try:
                more = self._one(target[filled:])
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError as fault:  # first hand over what came before it
                self._fault = fault
                break
            if more == 0:
                break
            filled += more
        return target[:filled].tobytes() if self.into is None else target[:filled]

    def _one(self, target: memoryview) -> int:
        return cast(int, super().read(target.nbytes, target))  # an int where there is a buffer


class TlsContext(ssl.SSLContext):
    """An SSLContext whose objects read all records at once; remembers the newest of them."""

    newest: _Records

    @cached_property
    def scratch(self) -> memoryview:
        """Return memory for one read at a time: they all happen in one thread."""
        return memoryview(bytearray(PIECE_BYTES))

    def wrap_bio(self, *args: Any, **keywords: Any) -> ssl.SSLObject:
        """Do as SSLContext.wrap_bio does; trio calls it once per stream."""
        self.sslobject_class = _Records
        made = super().wrap_bio(*args, **keywords)
        assert isinstance(made, _Records)
        made.scratch = self.scratch
        self.newest = made
        return made


class _WideReads(trio.abc.Stream):
    """A TCP stream that reads 256 KiB where trio's default is 64."""

    def __init__(self, tcp: trio.SocketStream) -> None:
        self._tcp = tcp

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._tcp.receive_some(PIECE_BYTES if max_bytes is None else max_bytes)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._tcp.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._tcp.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._tcp.aclose()


class TlsStream:
    """A `ports.ByteStream` to `peer`; after the first error it only fails."""

    def __init__(self, tls: trio.SSLStream[_WideReads], records: _Records, peer: PeerId) -> None:
        self._tls = tls
        self._records = records
        self._peer = peer

    @property
    def peer(self) -> PeerId:
        """Return the id that the other side proved to own."""
        return self._peer

    async def send_all(self, data: bytes | memoryview) -> None:
        """Send all bytes, piece by piece. Raises PeerUnreachable if the stream is broken."""
        with self._faults():
            if len(data) <= PIECE_BYTES:
                await self._tls.send_all(data)
                return
            view = memoryview(data)
            for start in range(0, len(view), PIECE_BYTES):
                await self._tls.send_all(view[start : start + PIECE_BYTES])

    async def receive_some(self, max_bytes: int) -> bytes:
        """Return 1 to `max_bytes` bytes, or b"" at the end. Raises PeerUnreachable."""
        with self._faults():
            data = await self._tls.receive_some(min(max_bytes, PIECE_BYTES))
        return bytes(data)

    async def receive_into(self, buffer: memoryview) -> int:
        """Decrypt at least one byte straight into `buffer`; return how many, 0 at the end.

        Raises PeerUnreachable.
        """
        self._records.into = buffer
        try:
            with self._faults():
                return len(await self._tls.receive_some(min(len(buffer), PIECE_BYTES)))
        finally:
            self._records.into = None

    async def aclose(self) -> None:
        """Close at once, without waiting for the other side."""
        await trio.aclose_forcefully(self._tls)

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except trio.ClosedResourceError as error:
            raise PeerUnreachable(self._peer, "stream was closed here") from error
        except trio.BrokenResourceError as error:
            reason = str(error.__cause__ or error) or "connection lost"
            raise PeerUnreachable(self._peer, reason) from error


async def shake_hands(
    tcp: trio.SocketStream, context: TlsContext, *, server_side: bool
) -> TlsStream:
    """Return the encrypted stream over `tcp`. Who closes `tcp` on an error is the caller.

    Raises trio.BrokenResourceError, whose cause says why, and RemoteProtocolError if the
    certificate is for no peer.
    """
    _tune(tcp)
    # https_compatible: no close_notify is sent or awaited; frames show where messages end
    tls = trio.SSLStream(_WideReads(tcp), context, server_side=server_side, https_compatible=True)
    records = context.newest
    await tls.do_handshake()
    return TlsStream(tls, records, peer_of(records.getpeercert(binary_form=True)))


def _tune(tcp: trio.SocketStream) -> None:
    """Keep the kernel's send queue short, and notice a machine that is gone."""
    options = {"TCP_NOTSENT_LOWAT": _NOTSENT_LOWAT_BYTES, **_KEEPALIVE_SECONDS}
    options["TCP_USER_TIMEOUT"] = _UNANSWERED_MILLISECONDS
    with contextlib.suppress(OSError):  # the other side may be gone already
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):
                tcp.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
