"""Who gets in and who does not, over real sockets and real TLS."""

import errno
import logging
import os
import socket
import ssl
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from protocol.signing import Identity
from swarm.adapters import certificates, tls
from swarm.adapters.certificates import authority_certificate, peer_certificate, peer_of
from swarm.adapters.tls import Limits, TlsTransport, parse_address
from swarm.errors import AddressError, Overloaded, PeerRefused, PeerUnreachable
from swarm.ports import ByteStream

ALICE = Identity.from_seed(b"a" * 32)
BOB = Identity.from_seed(b"b" * 32)
CAROL = Identity.from_seed(b"c" * 32)
KEY = b"k" * 32
OTHER_KEY = b"o" * 32
SHORT = Limits(handshake_seconds=0.3)
PATIENT_SECONDS = 20
"""Ends a test that hangs; nothing waits for it."""


async def echo(stream: ByteStream) -> None:
    while data := await stream.receive_some(1 << 16):
        await stream.send_all(data)


@asynccontextmanager
async def serving(
    transport: TlsTransport, handler: Callable[[ByteStream], Awaitable[None]] = echo
) -> AsyncIterator[str]:
    """Yield the address at which `transport` serves."""
    bound = trio.Event()
    addresses: list[str] = []

    def started(address: str) -> None:
        addresses.append(address)
        bound.set()

    async def serve() -> None:
        await transport.serve(handler, started=started)

    with trio.fail_after(PATIENT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            await bound.wait()
            yield addresses[0]
            nursery.cancel_scope.cancel()


class Refusals(logging.Handler):
    """Collects what the accepting side logs; a test can wait for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.logged = trio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.logged.set()


@pytest.fixture
def refusals() -> Iterator[Refusals]:
    handler = Refusals()
    logging.getLogger("swarm.adapters.tls").addHandler(handler)
    yield handler
    logging.getLogger("swarm.adapters.tls").removeHandler(handler)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no such limit")
def test_a_machine_that_takes_in_nothing_any_more_is_given_up(tmp_path: Path) -> None:
    """Keepalive alone does not: it probes only while nothing is on its way."""

    async def main() -> None:
        async with serving(TlsTransport(ALICE, KEY, tmp_path)) as address:
            stream = await TlsTransport(BOB, KEY, tmp_path).dial(address, ALICE.peer)
            tcp = stream._tls.transport_stream._tcp.socket  # type: ignore[attr-defined]
            limit = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert 10_000 <= limit <= 60_000
            await stream.aclose()

    trio.run(main)


def test_a_flood_of_strangers_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        refusals = tls._RefusalLog()
        for _ in range(3):
            for number in range(1000):
                refusals.note("127.0.0.1:9", f"reason {number}")
            await trio.sleep(tls.REFUSALS_SECONDS)
        refusals.note("127.0.0.1:9", "the last")

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3 * (tls.REFUSALS_LOGGED + 1) + 1
    assert said[-2:] == [
        f"handshakes refused besides count={1000 - tls.REFUSALS_LOGGED}",
        "handshake refused address=127.0.0.1:9 reason='the last'",
    ]


async def receive_exactly(stream: ByteStream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await stream.receive_some(size - len(data))
        assert more, "the stream ended early"
        data += more
    return data


async def assert_works(transport: TlsTransport, address: str) -> None:
    async with aclosing(await transport.dial(address, None)) as stream:
        await stream.send_all(b"ping")
        assert await receive_exactly(stream, 4) == b"ping"


# --- members -------------------------------------------------------------------------------


def test_members_meet_and_know_each_other(tmp_path: Path) -> None:
    seen: list[str] = []

    async def handler(stream: ByteStream) -> None:
        seen.append(stream.peer)
        await echo(stream)

    async def main() -> None:
        alice, bob = (TlsTransport(who, KEY, tmp_path) for who in (ALICE, BOB))
        async with serving(alice, handler) as address:
            stream = await bob.dial(address, ALICE.peer)
            async with aclosing(stream):
                await stream.send_all(b"hello")
                assert await receive_exactly(stream, 5) == b"hello"
                assert stream.peer == ALICE.peer
                assert seen == [BOB.peer]

    trio.run(main)


def test_large_messages_arrive_whole_in_both_directions_at_once(tmp_path: Path) -> None:
    message = os.urandom(5_000_001)

    async def main() -> None:
        alice, bob = (TlsTransport(who, KEY, tmp_path) for who in (ALICE, BOB))
        received = bytearray(len(message))
        async with serving(alice) as address:
            stream = await bob.dial(address, None)
            async with aclosing(stream), trio.open_nursery() as nursery:
                nursery.start_soon(stream.send_all, memoryview(message))
                filled = 0
                while filled < len(received):
                    filled += await stream.receive_into(memoryview(received)[filled:])
        assert received == message

    trio.run(main)


def test_the_end_of_a_stream_is_an_empty_read(tmp_path: Path) -> None:
    async def handler(stream: ByteStream) -> None:
        await stream.send_all(b"last words")

    async def main() -> None:
        alice, bob = (TlsTransport(who, KEY, tmp_path) for who in (ALICE, BOB))
        async with serving(alice, handler) as address:
            stream = await bob.dial(address, None)
            async with aclosing(stream):
                buffer = memoryview(bytearray(100))
                filled = 0
                while more := await stream.receive_into(buffer[filled:]):
                    filled += more
                assert bytes(buffer[:filled]) == b"last words"

    trio.run(main)


def test_a_closed_or_broken_stream_is_an_unreachable_peer(tmp_path: Path) -> None:
    async def handler(stream: ByteStream) -> None:
        await stream.receive_some(1)  # and leave the rest unread, so that TCP resets

    async def main() -> None:
        alice, bob = (TlsTransport(who, KEY, tmp_path) for who in (ALICE, BOB))
        async with serving(alice, handler) as address:
            stream = await bob.dial(address, None)
            with pytest.raises(PeerUnreachable) as caught:
                while True:
                    await stream.send_all(bytes(1 << 20))
            assert caught.value.peer == ALICE.peer
            await stream.aclose()
            with pytest.raises(PeerUnreachable):
                await stream.send_all(b"x")
            with pytest.raises(PeerUnreachable):
                await stream.receive_some(1)
            with pytest.raises(PeerUnreachable):
                await stream.receive_into(memoryview(bytearray(1)))

    trio.run(main)


def test_closing_does_not_wait_for_a_peer_that_does_not_read(tmp_path: Path) -> None:
    async def handler(stream: ByteStream) -> None:
        await trio.sleep_forever()

    async def main() -> None:
        alice, bob = (TlsTransport(who, KEY, tmp_path) for who in (ALICE, BOB))
        async with serving(alice, handler) as address:
            stream = await bob.dial(address, None)
            with trio.move_on_after(0.1) as blocked:
                await stream.send_all(bytes(64 << 20))
            assert blocked.cancelled_caught
            with trio.fail_after(1):
                await stream.aclose()

    trio.run(main)


# --- who is not let in ----------------------------------------------------------------------


def test_another_swarm_key_is_refused_on_both_sides(tmp_path: Path, refusals: Refusals) -> None:
    async def handler(stream: ByteStream) -> None:
        raise AssertionError("a stranger got in")

    async def main() -> None:
        alice = TlsTransport(ALICE, KEY, tmp_path)
        stranger = TlsTransport(BOB, OTHER_KEY, tmp_path)
        async with serving(alice, handler) as address:
            with pytest.raises(PeerRefused, match="certificate is not of this swarm"):
                await stranger.dial(address, ALICE.peer)
            await refusals.logged.wait()
            assert refusals.lines[0].startswith("handshake refused address=127.0.0.1:")

    trio.run(main)


def test_a_stranger_who_ignores_our_certificate_is_refused_for_his_own(
    tmp_path: Path, refusals: Refusals
) -> None:
    async def handler(stream: ByteStream) -> None:
        raise AssertionError("a stranger got in")

    async def main(context: ssl.SSLContext) -> None:
        async with serving(TlsTransport(ALICE, KEY, tmp_path), handler) as address:
            tcp = await trio.open_tcp_stream(*parse_address(address))
            async with trio.SSLStream(tcp, context, https_compatible=True) as tls:
                await tls.do_handshake()  # over for the client before we judge his certificate
                assert await tls.receive_some(1) == b""
        assert refusals.lines[0].endswith("reason='certificate is not of this swarm'")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    certificates.configure(context, BOB, OTHER_KEY, tmp_path)
    context.verify_mode = ssl.CERT_NONE
    trio.run(main, context)


def test_no_certificate_at_all_is_refused(tmp_path: Path, refusals: Refusals) -> None:
    async def main() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        async with serving(TlsTransport(ALICE, KEY, tmp_path)) as address:
            tcp = await trio.open_tcp_stream(*parse_address(address))
            async with trio.SSLStream(tcp, context, https_compatible=True) as tls:
                await tls.do_handshake()
                assert await tls.receive_some(1) == b""
        assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in refusals.lines[0]

    trio.run(main)


def test_older_tls_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        async with serving(TlsTransport(ALICE, KEY, tmp_path)) as address:
            tcp = await trio.open_tcp_stream(*parse_address(address))
            async with trio.SSLStream(tcp, context) as tls:
                with pytest.raises(trio.BrokenResourceError):
                    await tls.do_handshake()

    trio.run(main)


def test_a_peer_other_than_the_expected_one_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        alice, bob = (TlsTransport(who, KEY, tmp_path) for who in (ALICE, BOB))
        async with serving(alice) as address:
            with pytest.raises(PeerRefused, match="another peer answered") as caught:
                await bob.dial(address, CAROL.peer)
            assert caught.value.peer == CAROL.peer

    trio.run(main)


def test_the_allow_list_narrows_both_sides(tmp_path: Path) -> None:
    async def main() -> None:
        alice = TlsTransport(ALICE, KEY, tmp_path, frozenset({BOB.peer}))
        bob, carol = (TlsTransport(who, KEY, tmp_path) for who in (BOB, CAROL))
        picky = TlsTransport(BOB, KEY, tmp_path, frozenset({CAROL.peer}))
        async with serving(alice) as address:
            await assert_works(bob, address)
            with pytest.raises(PeerRefused, match="not on the allow-list"):
                await carol.dial(address, None)
            with pytest.raises(PeerRefused, match="not on our allow-list"):
                await picky.dial(address, None)

    trio.run(main)


def test_bytes_that_are_not_tls_end_only_their_connection(
    tmp_path: Path, refusals: Refusals
) -> None:
    async def main() -> None:
        alice, bob = (TlsTransport(who, KEY, tmp_path) for who in (ALICE, BOB))
        async with serving(alice) as address:
            async with await trio.open_tcp_stream(*parse_address(address)) as tcp:
                await tcp.send_all(b"GET / HTTP/1.1\r\nHost: swarm\r\n\r\n")
                assert await tcp.receive_some() == b""
            assert len(refusals.lines) == 1
            await assert_works(bob, address)

    trio.run(main)


def test_a_server_that_does_not_speak_tls_is_refused(tmp_path: Path) -> None:
    async def greet(tcp: trio.SocketStream) -> None:
        await tcp.send_all(b"220 mail.example.org ESMTP\r\n")
        await trio.sleep_forever()

    async def main() -> None:
        bob = TlsTransport(BOB, KEY, tmp_path)
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(partial(trio.serve_tcp, greet, 0, host="127.0.0.1"))
            port = listeners[0].socket.getsockname()[1]
            with pytest.raises(PeerRefused, match="does not speak the swarm's TLS"):
                await bob.dial(f"127.0.0.1:{port}", None)
            nursery.cancel_scope.cancel()

    trio.run(main)


# --- limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [b"", b"\x16", b"\x16\x03\x01\x40\x00"])
def test_a_silent_or_trickling_handshake_ends_and_holds_up_nobody(
    tmp_path: Path, first: bytes, refusals: Refusals
) -> None:
    async def main() -> None:
        alice = TlsTransport(ALICE, KEY, tmp_path, limits=SHORT)
        bob = TlsTransport(BOB, KEY, tmp_path)
        async with serving(alice) as address:
            trickler = await trio.open_tcp_stream(*parse_address(address))
            async with trickler:
                if first:
                    await trickler.send_all(first)
                await assert_works(bob, address)
                assert refusals.lines == []  # the trickler was still there
                assert await trickler.receive_some() == b""
        assert "handshake was not over in time" in refusals.lines[0]

    trio.run(main)


def test_too_many_handshakes_end_the_oldest(tmp_path: Path) -> None:
    async def main() -> None:
        limits = Limits(handshake_seconds=PATIENT_SECONDS, handshakes=3)
        alice = TlsTransport(ALICE, KEY, tmp_path, limits=limits)
        bob = TlsTransport(BOB, KEY, tmp_path)
        async with serving(alice) as address:
            idle = [await trio.open_tcp_stream(*parse_address(address)) for _ in range(3)]
            await assert_works(bob, address)
            assert await idle[0].receive_some() == b""
            for tcp in idle:
                await tcp.aclose()

    trio.run(main)


def test_a_dial_to_a_silent_listener_ends_in_time(tmp_path: Path) -> None:
    async def main() -> None:
        bob = TlsTransport(BOB, KEY, tmp_path, limits=SHORT)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            with trio.fail_after(PATIENT_SECONDS):
                with pytest.raises(PeerUnreachable, match="no answer within 0.3 s"):
                    await bob.dial(address, None)

    trio.run(main)


@pytest.mark.parametrize("limits", [Limits(connections_per_peer=2), Limits(connections=2)])
def test_connections_are_bounded_and_given_back(tmp_path: Path, limits: Limits) -> None:
    ended: list[trio.Event] = []

    async def handler(stream: ByteStream) -> None:
        ended.append(trio.Event())
        mine = ended[-1]
        await echo(stream)
        mine.set()

    async def main() -> None:
        alice = TlsTransport(ALICE, KEY, tmp_path, limits=limits)
        bob = TlsTransport(BOB, KEY, tmp_path)
        async with serving(alice, handler) as address:
            first, second = [await bob.dial(address, None) for _ in range(2)]
            with pytest.raises(Overloaded, match="too many connections"):
                await bob.dial(address, None)
            await first.send_all(b"?")
            assert await receive_exactly(first, 1) == b"?"
            await first.aclose()
            await ended[0].wait()
            await assert_works(bob, address)
            await second.aclose()

    trio.run(main)


# --- addresses --------------------------------------------------------------------------------


def test_addresses_are_read() -> None:
    assert parse_address("127.0.0.1:31337") == ("127.0.0.1", 31337)
    assert parse_address("[::1]:0") == ("::1", 0)
    assert parse_address("peer.example.org:65535") == ("peer.example.org", 65535)


@pytest.mark.parametrize(
    "text", ["", "host", ":1", "host:", "host:x", "host:-1", "host:65536", "::1:80", "[::1]", "h:٣"]
)
def test_other_text_is_no_address(tmp_path: Path, text: str) -> None:
    with pytest.raises(AddressError, match="HOST:PORT"):
        parse_address(text)
    with pytest.raises(PeerUnreachable, match="HOST:PORT"):
        trio.run(TlsTransport(BOB, KEY, tmp_path).dial, text, None)


def test_ipv6_works(tmp_path: Path) -> None:
    async def main() -> None:
        alice = TlsTransport(ALICE, KEY, tmp_path, listen="[::1]:0")
        async with serving(alice) as address:
            assert address.startswith("[::1]:")
            await assert_works(TlsTransport(BOB, KEY, tmp_path), address)

    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    trio.run(main)


def test_a_port_in_use_is_said_with_the_words_of_the_system(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            address = f"127.0.0.1:{other.getsockname()[1]}"
            with pytest.raises(AddressError) as caught:
                async with serving(TlsTransport(ALICE, KEY, tmp_path, listen=address)):
                    pass
            assert caught.value.what == f"cannot listen on {address}"
            assert os.strerror(errno.EADDRINUSE) in caught.value.evidence[0]
            assert "--listen" in caught.value.hint

    with pytest.RaisesGroup(AddressError, allow_unwrapped=True):
        trio.run(main)


def test_a_host_that_does_not_resolve_cannot_be_listened_on(tmp_path: Path) -> None:
    transport = TlsTransport(ALICE, KEY, tmp_path, listen="nowhere.invalid:0")

    async def main() -> None:
        await transport.serve(echo, started=lambda address: None)

    with pytest.raises(AddressError, match="cannot listen on nowhere.invalid:0") as caught:
        trio.run(main)
    assert caught.value.evidence


def test_nobody_listening_is_unreachable(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(PeerUnreachable, match=os.strerror(errno.ECONNREFUSED)) as caught:
        trio.run(TlsTransport(BOB, KEY, tmp_path).dial, address, ALICE.peer)
    assert caught.value.peer == ALICE.peer


# --- certificates -------------------------------------------------------------------------------


def test_every_peer_derives_the_same_authority() -> None:
    assert authority_certificate(KEY) == authority_certificate(KEY)
    assert authority_certificate(KEY) != authority_certificate(OTHER_KEY)


def test_a_certificate_names_the_owner_of_its_key() -> None:
    pem = peer_certificate(ALICE, KEY).decode()
    assert peer_of(ssl.PEM_cert_to_DER_cert(pem)) == ALICE.peer


def test_the_private_key_is_in_a_private_file_and_only_while_it_is_read(tmp_path: Path) -> None:
    modes: list[int] = []

    class Watching(ssl.SSLContext):
        def load_cert_chain(self, certfile: str) -> None:  # type: ignore[override]
            modes.append(stat.S_IMODE(os.stat(certfile).st_mode))
            assert Path(certfile).parent == tmp_path
            super().load_cert_chain(certfile)

    certificates.configure(Watching(ssl.PROTOCOL_TLS_CLIENT), ALICE, KEY, tmp_path)
    assert modes == [0o600]
    assert list(tmp_path.iterdir()) == []
