"""Peers find each other in a real DHT, and survive everything that goes wrong in it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.invitation import rendezvous
from protocol.records import PeerRecord
from protocol.signing import Identity
from swarm.adapters import orphan_guard
from swarm.adapters.asyncio_thread import AsyncioThread
from swarm.adapters.dht_records import (
    MAX_FUTURE_SECONDS,
    MAX_SEALED_BYTES,
    RECORD_SECONDS,
    RecordSeal,
)
from swarm.adapters.hivemind_dht import HivemindDht
from swarm.errors import DhtError

ALICE = Identity.from_seed(b"a" * 32)
BOB = Identity.from_seed(b"b" * 32)
CAROL = Identity.from_seed(b"c" * 32)
KEY = b"k" * 32
OTHER_KEY = b"o" * 32
RUN = b"r" * 32
OTHER_RUN = b"s" * 32
NONCE = bytes(12)
NOW = 1_800_000_000.0
PATIENT_SECONDS = 60
"""Ends a test that hangs; nothing waits for it."""

needs_proc = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs Linux")


def record_of(identity: Identity, *, run: bytes = RUN, sequence: int = 1) -> PeerRecord:
    return PeerRecord(
        run=run,
        peer=identity.peer,
        boot=1,
        addresses=("203.0.113.7:31337",),
        dht_addresses=(),
        sequence=sequence,
    )


def folder_of(identity: Identity, parent: Path) -> Path:
    folder = parent / identity.peer
    folder.mkdir(exist_ok=True)
    return folder


@asynccontextmanager
async def node(
    identity: Identity,
    parent: Path,
    initial_peers: Iterable[str] = (),
    *,
    key: bytes = KEY,
    run: bytes = RUN,
) -> AsyncIterator[HivemindDht]:
    with trio.fail_after(PATIENT_SECONDS):
        folder = folder_of(identity, parent)
        dht = await HivemindDht.start(identity, key, run, "127.0.0.1", tuple(initial_peers), folder)
        try:
            yield dht
        finally:
            await dht.aclose()


def daemons_of(folder: Path) -> list[int]:
    """Return the process ids of the libp2p daemons that serve the node of `folder`."""
    sockets = (folder / "dht-sockets").read_bytes()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        if any(argument.startswith(b"-listen=/unix" + sockets) for argument in arguments):
            found.append(int(path.parent.name))
    return found


def sockets_of(folder: Path) -> trio.Path:
    return trio.Path((folder / "dht-sockets").read_text())


async def wait_for_end(process: int) -> None:
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    try:
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)


# --- finding each other -----------------------------------------------------------------------


def test_peers_find_each_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            alice = await stack.enter_async_context(node(ALICE, tmp_path))
            assert await alice.lookup() == ()
            assert await alice.publish(record_of(ALICE))
            # Bob knows one who is there, one who is not, and a line of nonsense
            peers = (*alice.addresses, f"/ip4/127.0.0.1/tcp/1/p2p/{CAROL.peer}", "nonsense")
            bob = await stack.enter_async_context(node(BOB, tmp_path, peers))
            assert await bob.publish(record_of(BOB))
            carol = await stack.enter_async_context(node(CAROL, tmp_path, bob.addresses))
            assert await carol.publish(record_of(CAROL))
            everyone = tuple(sorted(map(record_of, (ALICE, BOB, CAROL)), key=lambda r: r.peer))
            for dht in (alice, bob, carol):
                assert await dht.lookup() == everyone
            assert await alice.publish(record_of(ALICE, sequence=2))
            assert record_of(ALICE, sequence=2) in await carol.lookup()

    trio.run(main)


def test_the_libp2p_id_is_our_peer_id_and_the_node_stays_on_loopback(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(ALICE, tmp_path) as alice:
            (address,) = alice.addresses
            assert address.startswith("/ip4/127.0.0.1/tcp/")
            assert address.endswith(f"/p2p/{ALICE.peer}")

    trio.run(main)


def test_another_run_and_another_key_are_invisible(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            alice = await stack.enter_async_context(node(ALICE, tmp_path))
            known = alice.addresses
            bob = await stack.enter_async_context(node(BOB, tmp_path, known, run=OTHER_RUN))
            carol = await stack.enter_async_context(node(CAROL, tmp_path, known, key=OTHER_KEY))
            assert await alice.publish(record_of(ALICE))
            assert await bob.publish(record_of(BOB, run=OTHER_RUN))
            assert await carol.publish(record_of(CAROL))
            assert await alice.lookup() == (record_of(ALICE),)
            assert await bob.lookup() == (record_of(BOB, run=OTHER_RUN),)
            assert await carol.lookup() == (record_of(CAROL),)

    trio.run(main)


# --- hostile records ---------------------------------------------------------------------------


def open_record(sealed: object, expiry: object, peer: str = ALICE.peer) -> PeerRecord:
    return RecordSeal(KEY, RUN).open(peer, sealed, expiry, NOW)


def test_what_was_sealed_is_opened() -> None:
    sealed = RecordSeal(KEY, RUN).seal(ALICE, record_of(ALICE), NOW + 90, NONCE)
    assert open_record(sealed, NOW + 90) == record_of(ALICE)


def test_an_expiry_that_is_far_or_no_number_is_refused() -> None:
    seal = RecordSeal(KEY, RUN)
    far = NOW + MAX_FUTURE_SECONDS + 1
    with pytest.raises(RemoteProtocolError, match="expires"):
        open_record(seal.seal(ALICE, record_of(ALICE), far, NONCE), far)
    sealed = seal.seal(ALICE, record_of(ALICE), NOW, NONCE)
    for expiry in (float("nan"), float("inf"), float("-inf"), None, "soon", 10**400):
        with pytest.raises(RemoteProtocolError):
            open_record(sealed, expiry)


def test_an_old_record_cannot_be_made_to_look_fresh() -> None:
    sealed = RecordSeal(KEY, RUN).seal(ALICE, record_of(ALICE), NOW, NONCE)
    with pytest.raises(RemoteProtocolError):
        open_record(sealed, NOW + 90)


@pytest.mark.parametrize(
    "sealed",
    [
        RecordSeal(OTHER_KEY, RUN).seal(ALICE, record_of(ALICE), NOW, NONCE),
        RecordSeal(KEY, OTHER_RUN).seal(ALICE, record_of(ALICE), NOW, NONCE),
        RecordSeal(KEY, RUN).seal(ALICE, record_of(ALICE, run=OTHER_RUN), NOW, NONCE),
        RecordSeal(KEY, RUN).seal(BOB, record_of(ALICE), NOW, NONCE),  # Bob signs for Alice
        RecordSeal(KEY, RUN).seal(ALICE, record_of(BOB), NOW, NONCE),
        RecordSeal(KEY, RUN).seal(BOB, record_of(BOB), NOW, NONCE),  # under Alice's subkey
        RecordSeal(KEY, RUN).seal(ALICE, record_of(ALICE), NOW, NONCE)[:-1],
        b"",
        b"x" * 11,
        b"x" * (MAX_SEALED_BYTES + 1),
        "text",
        None,
    ],
)
def test_what_alice_did_not_make_for_this_run_is_refused(sealed: object) -> None:
    with pytest.raises(RemoteProtocolError):
        open_record(sealed, NOW)


def test_a_record_that_is_too_large_is_our_mistake(tmp_path: Path) -> None:
    large = PeerRecord(RUN, ALICE.peer, 1, ("x" * 200,) * 100, (), 1)
    with pytest.raises(LocalProtocolError, match="too large"):
        RecordSeal(KEY, RUN).seal(ALICE, large, NOW, NONCE)


Entry = tuple[str, object, float]
"""Subkey, value, expiry."""


@asynccontextmanager
async def outsider(
    initial_peers: tuple[str, ...], entries: list[Entry], place: bytes = rendezvous(KEY, RUN)
) -> AsyncIterator[list[object]]:
    """Run a plain hivemind node, which checks nothing; store `entries` at `place`, and yield
    the subkeys that it then finds there."""
    from hivemind.dht.node import DHTNode

    async def start() -> DHTNode:
        made = await DHTNode.create(initial_peers=initial_peers, nat_port_map=False, auto_nat=False)
        for subkey, value, expiry in entries:
            await made.store(place, value, expiry, subkey=subkey)
        return made

    async def look() -> list[object]:
        found = await running.get(place, latest=True)
        return list(found.value) if found is not None else []

    thread = AsyncioThread("outsider")
    try:
        running = (await thread.finished(start())).result()
        try:
            yield (await thread.finished(look())).result()
        finally:
            with trio.CancelScope(shield=True):
                (await thread.finished(running.shutdown())).result()
    finally:
        await thread.aclose()


def hostile_entries() -> list[Entry]:
    """Return records of Carol, who never published, each wrong in one way."""
    seal, soon = RecordSeal(KEY, RUN), time.time() + 60
    far, nan = time.time() + 2 * MAX_FUTURE_SECONDS, float("nan")
    own = record_of(CAROL)
    return [
        (CAROL.peer, seal.seal(BOB, own, soon, NONCE), soon),
        (CAROL.peer, seal.seal(CAROL, own, far, NONCE), far),
        (CAROL.peer, seal.seal(CAROL, own, soon, NONCE), nan),
        (CAROL.peer, RecordSeal(OTHER_KEY, RUN).seal(CAROL, own, soon, NONCE), soon),
        (CAROL.peer, RecordSeal(KEY, OTHER_RUN).seal(CAROL, own, soon, NONCE), soon),
        (CAROL.peer, bytes(100_000), soon),
        (CAROL.peer, {"not": ["bytes"]}, soon),
    ]


@pytest.mark.parametrize("entry", hostile_entries(), ids=range(7))
def test_records_that_an_outsider_planted_are_invisible(tmp_path: Path, entry: Entry) -> None:
    async def main() -> None:
        async with node(ALICE, tmp_path) as alice:
            assert await alice.publish(record_of(ALICE))
            async with outsider(alice.addresses, [entry]) as found:
                assert CAROL.peer in found
                assert await alice.lookup() == (record_of(ALICE),)
                async with node(BOB, tmp_path, alice.addresses) as bob:
                    assert await bob.lookup() == (record_of(ALICE),)

    trio.run(main)


def test_a_wall_clock_that_is_wrong_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = time.time() + RECORD_SECONDS + 3600
    entry = (CAROL.peer, RecordSeal(KEY, RUN).seal(CAROL, record_of(CAROL), late, NONCE), late)

    async def main() -> None:
        async with node(ALICE, tmp_path) as alice:
            async with outsider(alice.addresses, [entry, entry]) as found:
                assert CAROL.peer in found

    trio.run(main)
    told = [each.getMessage() for each in caplog.records if "wall clock" in each.getMessage()]
    assert len(told) == 1
    assert CAROL.peer in told[0] and "ahead_seconds=3" in told[0]


def test_outsiders_cannot_fill_our_memory(tmp_path: Path) -> None:
    entries: list[Entry] = [("subkey", b"value", time.time() + 60)]

    async def main() -> None:
        async with node(ALICE, tmp_path) as alice:
            async with outsider(alice.addresses, entries, b"another place") as found:
                assert found == ["subkey"]  # in the outsider's own store
            async with outsider(alice.addresses, [], b"another place") as found:
                assert found == []

    trio.run(main)


# --- daemons that die --------------------------------------------------------------------------


@needs_proc
def test_a_killed_daemon_is_restarted_and_found_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(ALICE, tmp_path) as alice, node(BOB, tmp_path, alice.addresses) as bob:
            addresses = alice.addresses
            assert await alice.publish(record_of(ALICE))
            assert await bob.lookup() == (record_of(ALICE),)
            (daemon,) = daemons_of(folder_of(ALICE, tmp_path))
            os.kill(daemon, signal.SIGKILL)
            await wait_for_end(daemon)
            while not await alice.publish(record_of(ALICE, sequence=2)):
                pass  # every call waits for the restart, up to its deadline
            (restarted,) = daemons_of(folder_of(ALICE, tmp_path))
            assert restarted != daemon
            assert alice.addresses == addresses
            while await bob.lookup() != (record_of(ALICE, sequence=2),):
                await trio.lowlevel.checkpoint()

    trio.run(main)


@needs_proc
def test_a_node_that_forgot_everybody_meets_again_whom_it_had_looked_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(ALICE, tmp_path) as alice, node(BOB, tmp_path, alice.addresses) as bob:
            record = PeerRecord(RUN, BOB.peer, 1, ("203.0.113.7:31337",), bob.addresses, 1)
            assert await bob.publish(record)
            assert await alice.lookup() == (record,)
            (daemon,) = daemons_of(folder_of(ALICE, tmp_path))
            os.kill(daemon, signal.SIGKILL)
            await wait_for_end(daemon)
            while await alice.lookup() != (record,):
                await trio.lowlevel.checkpoint()

    trio.run(main)


async def line_of(stream: trio.abc.ReceiveStream) -> bytes:
    """Return a line, which may come in pieces, without its end."""
    line = b""
    while not line.endswith(b"\n"):
        piece = await stream.receive_some()
        assert piece, f"the stream ended after {line!r}"
        line += piece
    return line[:-1]


CHILD = """
import sys, trio
from pathlib import Path
from protocol.signing import Identity
from swarm.adapters.hivemind_dht import HivemindDht

async def main():
    identity = Identity.from_seed(b"a" * 32)
    await HivemindDht.start(identity, b"k" * 32, b"r" * 32, "127.0.0.1", (), Path(sys.argv[1]))
    print("started", flush=True)
    await trio.sleep_forever()

trio.run(main)
"""


@needs_proc
def test_a_killed_process_leaves_no_daemon_and_its_sockets_go_at_the_next_start(
    tmp_path: Path,
) -> None:
    folder = folder_of(ALICE, tmp_path)

    async def main() -> None:
        with trio.fail_after(PATIENT_SECONDS):
            child = await trio.lowlevel.open_process(
                [sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE
            )
            assert child.stdout is not None
            async with child.stdout:
                assert await line_of(child.stdout) == b"started"
                (daemon,) = daemons_of(folder)
                child.kill()
                await child.wait()
                await wait_for_end(daemon)
        left = sockets_of(folder)
        assert await left.exists()
        async with node(ALICE, tmp_path):
            assert not await left.exists()

    trio.run(main)


PARENT = """
import os, subprocess, sys
sleeper = subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid()), *sys.argv[2:]])
print(sleeper.pid, flush=True)
sleeper.wait()
"""
SLEEPER = "import time; print('asleep', flush=True); time.sleep(1000)"


@needs_proc
def test_the_guard_ends_a_program_that_would_outlive_its_parent() -> None:
    async def main() -> None:
        command = [sys.executable, "-c", PARENT, orphan_guard.__file__]
        command += [sys.executable, "-c", SLEEPER]
        with trio.fail_after(PATIENT_SECONDS):
            parent = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
            assert parent.stdout is not None
            async with parent.stdout:
                said = b""
                while not said.endswith(b"asleep\n"):
                    said += await parent.stdout.receive_some()
                parent.kill()
                await parent.wait()
                await wait_for_end(int(said.split()[0]))

    trio.run(main)


def test_the_guard_runs_nothing_for_a_parent_that_is_gone() -> None:
    command = [sys.executable, orphan_guard.__file__, "-1", sys.executable, "-c", "print('ran')"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == ""


# --- start and end ----------------------------------------------------------------------------


@needs_proc
def test_closing_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = folder_of(ALICE, tmp_path)

    async def main() -> None:
        async with node(ALICE, tmp_path) as alice:
            sockets = sockets_of(folder)
            assert (await sockets.stat()).st_mode & 0o077 == 0
            (daemon,) = daemons_of(folder)
        assert not await sockets.exists()
        assert os.listdir(folder) == []
        assert not await trio.Path(f"/proc/{daemon}").exists()
        assert "dht" not in [thread.name for thread in threading.enumerate()]
        await alice.aclose()
        assert not await alice.publish(record_of(ALICE))
        assert await alice.lookup() == ()
        assert alice.addresses == ()

    trio.run(main)


def test_a_node_that_cannot_start_says_why_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = folder_of(ALICE, tmp_path)

    async def main(host: str, port: int) -> None:
        await HivemindDht.start(ALICE, KEY, RUN, host, (), folder, listen_port=port)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DhtError, match=f"127.0.0.1 port {port}") as caught:
            trio.run(main, "127.0.0.1", port)
    assert caught.value.evidence and caught.value.hint
    with pytest.raises(DhtError, match="cannot listen on 'nowhere.invalid'"):
        trio.run(main, "nowhere.invalid", 0)
    with pytest.raises(DhtError, match="does not start on 203.0.113.7"):
        trio.run(main, "203.0.113.7", 0)  # of nobody, by RFC 5737
    assert list(folder.iterdir()) == []
    assert "dht" not in [thread.name for thread in threading.enumerate()]


def test_a_cancelled_start_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = folder_of(ALICE, tmp_path)

    async def main() -> None:
        with trio.move_on_after(0.05):
            await HivemindDht.start(ALICE, KEY, RUN, "127.0.0.1", (), folder)

    trio.run(main)
    assert list(folder.iterdir()) == []
    assert "dht" not in [thread.name for thread in threading.enumerate()]


PROBE = """
import logging, multiprocessing, signal, sys, tempfile, trio
from pathlib import Path
from protocol.signing import Identity
from swarm.adapters.hivemind_dht import HivemindDht

assert not {"hivemind", "torch"} & set(sys.modules)

def state():
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    root = logging.getLogger()
    start_method = multiprocessing.get_start_method(allow_none=True)
    return handlers, root.level, list(root.handlers), logging.getLevelName(30), start_method

async def main():
    before = state()
    with tempfile.TemporaryDirectory() as folder:
        dht = await HivemindDht.start(
            Identity.from_seed(b"a" * 32), b"k" * 32, b"r" * 32, "127.0.0.1", (), Path(folder)
        )
        during = state()
        await dht.aclose()
    assert "hivemind" in sys.modules
    assert during == before, (before, during)
    hivemind = logging.getLogger("hivemind")
    assert hivemind.propagate and not hivemind.handlers and hivemind.level >= logging.ERROR

trio.run(main)
"""


def test_hivemind_is_imported_late_and_changes_nothing_of_the_process() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
