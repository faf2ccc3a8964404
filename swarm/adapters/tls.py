"""Mutual TLS 1.3 over TCP: the transport that lets in members of the swarm and nobody else.

The rule: what has not proved membership gets little and soon ends. A handshake has a deadline
and there are only so many at a time, where the oldest makes room; a member gets only so many
connections. After its checks the accepting side sends one byte, its verdict: in TLS 1.3 the
dialler's own handshake is over before the other side has looked at its certificate.
"""

import errno
import ipaddress
import logging
import math
import os
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from protocol.errors import RemoteProtocolError
from protocol.signing import Identity, PeerId
from swarm.adapters.certificates import configure
from swarm.adapters.tls_stream import TlsContext, TlsStream, shake_hands
from swarm.errors import AddressError, NobodyListens, Overloaded, PeerRefused, PeerUnreachable
from swarm.ports import ByteStream

log = logging.getLogger(__name__)

REFUSALS_LOGGED, REFUSALS_SECONDS = 20, 60.0
"""So many lines about refused handshakes in so many seconds."""
NOT_OF_THIS_SWARM = "certificate is not of this swarm"

_WELCOME = b"\x01"
_NOT_ALLOWED = b"\x02"
_TOO_MANY = b"\x03"
_REFUSALS: dict[bytes, tuple[type[PeerRefused], str]] = {
    _NOT_ALLOWED: (PeerRefused, "not on the allow-list"),
    _TOO_MANY: (Overloaded, "too many connections"),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What strangers and members may take of this peer."""

    handshake_seconds: float = 5.0
    """For a whole handshake, and for a whole dial."""
    handshakes: int = 64
    """At a time; a handshake takes milliseconds, so only a flood meets this."""
    connections_per_peer: int = 16
    """A peer needs two or three; the rest is for reconnecting while old ones still linger."""
    connections: int = 512
    """Accepted ones, of all peers together."""


class TlsTransport:
    """A `ports.Transport`: who holds `swarm_key` is in, if `allowed` is None or has its id."""

    def __init__(
        self,
        identity: Identity,
        swarm_key: bytes,
        folder: Path,
        allowed: frozenset[PeerId] | None = None,
        *,
        listen: str = "127.0.0.1:0",
        limits: Limits | None = None,
    ) -> None:
        """`listen` is the HOST:PORT that `serve` binds; port 0 takes a free one.

        `folder` must exist; it holds the private key while the ssl module reads it.
        """
        self._allowed = allowed
        self._listen = listen
        self._limits = limits or Limits()
        self._dialling = TlsContext(ssl.PROTOCOL_TLS_CLIENT)
        self._accepting = TlsContext(ssl.PROTOCOL_TLS_SERVER)
        self._accepting.num_tickets = 0  # a resumed session would show no certificate
        for context in (self._dialling, self._accepting):
            configure(context, identity, swarm_key, folder)
        self._refusals = _RefusalLog()
        self._handshakes: list[trio.CancelScope] = []
        self._connections: Counter[PeerId] = Counter()

    async def dial(self, address: str, expected: PeerId | None) -> ByteStream:
        """Open a stream to HOST:PORT and shake hands within the deadline.

        Raises PeerUnreachable if nobody answers there in time; PeerRefused if the other side
        is not of this swarm, is not `expected`, or does not want us. Their `peer` is
        `expected`, or the address where none is.
        """
        whom = expected or address
        try:
            with trio.fail_after(self._limits.handshake_seconds):
                return await self._dial(address, whom, expected)
        except trio.TooSlowError as error:
            seconds = self._limits.handshake_seconds
            raise PeerUnreachable(whom, f"no answer within {seconds:g} s") from error

    async def serve(
        self,
        handler: Callable[[ByteStream], Awaitable[None]],
        *,
        started: Callable[[str], None],
    ) -> None:
        """Listen until cancelled; call `started` with the bound HOST:PORT, then `handler` for
        every stream whose handshake succeeded, and close the stream when it returns.

        What `handler` raises ends this call. Raises AddressError if it cannot listen.
        """
        listener = await _bind(self._listen)
        async with listener:
            started(_join(listener.socket.getsockname()))
            await trio.serve_listeners(partial(self._serve_one, handler), [listener])

    # --- dialling ---------------------------------------------------------------------------

    async def _dial(self, address: str, whom: str, expected: PeerId | None) -> TlsStream:
        try:
            tcp = await trio.open_tcp_stream(*parse_address(address))
        except AddressError as error:  # peers hand out addresses: theirs is the mistake
            raise PeerUnreachable(whom, error.what) from error
        except (OSError, UnicodeError) as error:
            reason = _why_not_connected(error)
            refused = reason == os.strerror(errno.ECONNREFUSED)
            raise (NobodyListens if refused else PeerUnreachable)(whom, reason) from error
        try:
            stream = await self._greet(tcp, whom)
            if expected is not None and stream.peer != expected:
                raise PeerRefused(whom, f"another peer answered: {stream.peer}")
            if not self._admits(stream.peer):
                raise PeerRefused(whom, f"not on our allow-list: {stream.peer}")
            await _hear_verdict(stream, whom)
        except BaseException:
            await trio.aclose_forcefully(tcp)
            raise
        return stream

    async def _greet(self, tcp: trio.SocketStream, whom: str) -> TlsStream:
        try:
            return await shake_hands(tcp, self._dialling, server_side=False)
        except RemoteProtocolError as error:
            raise PeerRefused(whom, str(error)) from error
        except trio.BrokenResourceError as error:
            definite, reason = _why(error)
            raise (PeerRefused if definite else PeerUnreachable)(whom, reason) from error

    def _admits(self, peer: PeerId) -> bool:
        return self._allowed is None or peer in self._allowed

    # --- accepting --------------------------------------------------------------------------

    async def _serve_one(
        self, handler: Callable[[ByteStream], Awaitable[None]], tcp: trio.SocketStream
    ) -> None:
        address = _remote(tcp)
        stream = await self._shake_in_time(tcp, address)
        if stream is None:
            return
        with self._slot(stream.peer) as verdict:
            try:
                await stream.send_all(verdict)  # one record: fits an empty socket buffer
            except PeerUnreachable as error:
                self._refusals.note(address, str(error))
                return
            if verdict == _WELCOME:
                await handler(stream)
            else:
                self._refusals.note(address, f"{_REFUSALS[verdict][1]}: {stream.peer}")

    async def _shake_in_time(self, tcp: trio.SocketStream, address: str) -> TlsStream | None:
        """Return the stream to a member of the swarm; log why not otherwise."""
        with self._handshake() as scope:
            try:
                return await shake_hands(tcp, self._accepting, server_side=True)
            except trio.BrokenResourceError as error:
                self._refusals.note(address, _why(error)[1])
            except RemoteProtocolError as error:
                self._refusals.note(address, str(error))
        if scope.cancelled_caught:
            self._refusals.note(address, "handshake was not over in time")
        return None

    @contextmanager
    def _handshake(self) -> Iterator[trio.CancelScope]:
        """Bound a handshake in time; where there are too many, end the oldest."""
        if len(self._handshakes) >= self._limits.handshakes:
            self._handshakes.pop(0).cancel()
        with trio.move_on_after(self._limits.handshake_seconds) as scope:
            self._handshakes.append(scope)
            try:
                yield scope
            finally:
                if scope in self._handshakes:
                    self._handshakes.remove(scope)

    @contextmanager
    def _slot(self, peer: PeerId) -> Iterator[bytes]:
        """Take a connection's place where there is one; yield the verdict."""
        verdict = self._verdict(peer)
        taken = Counter([peer] if verdict == _WELCOME else [])
        self._connections += taken
        try:
            yield verdict
        finally:
            self._connections -= taken

    def _verdict(self, peer: PeerId) -> bytes:
        if not self._admits(peer):
            return _NOT_ALLOWED
        if self._connections[peer] >= self._limits.connections_per_peer:
            return _TOO_MANY
        if self._connections.total() >= self._limits.connections:
            return _TOO_MANY
        return _WELCOME


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [IPV6]:PORT. Raises AddressError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else -1
    if not colon or not host or len(host) > 253 or not 0 <= number <= 65535:
        hint = "write it like 127.0.0.1:31337 or [::1]:31337"
        raise AddressError(f"not an address of the form HOST:PORT: {text[:300]!r}", hint=hint)
    return host, number


async def _bind(address: str) -> trio.SocketListener:
    """Return a listener on the first address that HOST stands for. Raises AddressError."""
    host, port = parse_address(address)
    try:
        found = await trio.socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        (listener,) = await trio.open_tcp_listeners(port, host=str(found[0][4][0]))
    except (OSError, UnicodeError) as error:
        hint = "choose another address with --listen HOST:PORT"
        if isinstance(error, socket.gaierror | UnicodeError):
            hint = "give an IP address of this machine with --listen HOST:PORT"
        elif getattr(error, "errno", None) == errno.EACCES:
            hint = "choose a port above 1023 with --listen HOST:PORT"
        raise AddressError(
            f"cannot listen on {address}", evidence=(str(error),), hint=hint
        ) from error
    return listener


def _join(name: tuple[object, ...]) -> str:
    host, port = str(name[0]), name[1]
    return f"[{host}]:{port}" if ipaddress.ip_address(host).version == 6 else f"{host}:{port}"


async def _hear_verdict(stream: TlsStream, whom: str) -> None:
    try:
        verdict = await stream.receive_some(1)
    except PeerUnreachable as error:
        raise PeerUnreachable(whom, error.reason) from error
    if verdict == _WELCOME:
        return
    if not verdict:
        raise PeerUnreachable(whom, "connection was closed after the handshake")
    kind, reason = _REFUSALS.get(verdict, (PeerRefused, f"verdict {verdict!r} is unknown"))
    raise kind(whom, reason)


def _why(error: trio.BrokenResourceError) -> tuple[bool, str]:
    """Return why a handshake failed; True if the other side is certainly not of this swarm."""
    match error.__cause__:
        case ssl.SSLCertVerificationError():
            return True, NOT_OF_THIS_SWARM
        case ssl.SSLEOFError() | ssl.SSLSyscallError():
            return False, "connection was closed during the handshake"
        case ssl.SSLError() as fault:
            return True, f"does not speak the swarm's TLS 1.3: {fault.reason or fault}"
        case OSError(strerror=str() as text):
            return False, text
        case _:
            return False, "connection was closed during the handshake"


def _why_not_connected(error: OSError | UnicodeError) -> str:
    match error.__cause__:
        case BaseExceptionGroup(exceptions=(OSError(errno=int() as code), *_)):
            return os.strerror(code)
    return getattr(error, "strerror", None) or str(error)


def _remote(tcp: trio.SocketStream) -> str:
    try:
        return _join(tcp.socket.getpeername())
    except OSError:
        return "unknown"


class _RefusalLog:
    """Says who was refused, and why: a few lines a minute, however many there are."""

    def __init__(self) -> None:
        self._since = -math.inf
        self._said = self._unsaid = 0

    def note(self, address: str, reason: str) -> None:
        now = trio.current_time()
        if now - self._since >= REFUSALS_SECONDS:
            if self._unsaid:
                log.warning("handshakes refused besides count=%d", self._unsaid)
            self._since, self._said, self._unsaid = now, 0, 0
        if self._said < REFUSALS_LOGGED:
            self._said += 1
            log.warning("handshake refused address=%s reason=%r", address, reason)
        else:
            self._unsaid += 1
