"""hivemind's DHT node and its libp2p daemon, kept alive; everything here runs on asyncio.

The rule: the daemon is a hint machine that may die at any time. A watcher starts it anew under
the same identity and port, and introduces it to every peer that we know. The node stores only
records that `RecordSeal` opens, so outsiders in the DHT cannot fill our memory.

Importing this module imports hivemind, which takes seconds.
"""

import asyncio
import ipaddress
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from protocol.errors import RemoteProtocolError
from protocol.signing import Identity
from swarm.adapters.dht_records import MAX_FUTURE_SECONDS, RECORD_SECONDS, RecordSeal

log = logging.getLogger(__name__)

MAX_RECENT_ADDRESSES = 64

_START_SECONDS = 10.0
_STOP_SECONDS = 2.0
_INTRODUCTION_SECONDS = 3.0
_CHECK_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 30.0
_GUARD = Path(__file__).with_name("orphan_guard.py")
# libp2p specification, peer-ids: protobuf PrivateKey, type Ed25519, 64 bytes of data
_ED25519_PRIVATE_KEY = bytes([0x08, 0x01, 0x12, 0x40])

TROUBLE = (OSError, EOFError, ValueError, LookupError, asyncio.TimeoutError, P2PDaemonError)
"""What hivemind raises when its daemon does not start or does not answer."""


class Libp2pNode:
    """One DHT node at `host` (an IP address) and `port` (0: a free one, kept from then on)."""

    def __init__(
        self,
        identity: Identity,
        seal: RecordSeal,
        place: bytes,
        listen: tuple[str, int],
        folder: Path,
        sockets: Path,
    ) -> None:
        """`place` is the only key that the node serves. `folder` holds the private key while
        the daemon reads it, `sockets` the daemon's sockets."""
        self._identity = identity
        self._validator = _OnlyRecords(seal, place)
        self._place = place
        self._host, self._port = listen
        self._folder = folder
        self._daemon_type = _daemon_type(sockets)
        self._initial: tuple[str, ...] = ()
        self._recent: tuple[str, ...] = ()
        self._calls: set[asyncio.Task[Any]] = set()
        self._daemon: Any = None
        self._node: Any = None
        self._up = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.addresses: tuple[str, ...] = ()

    async def start(self, initial_peers: Iterable[str]) -> None:
        """Start the daemon, meet `initial_peers`, and keep watch. Raises `TROUBLE`."""
        self._initial = tuple(initial_peers)
        self._starting = asyncio.current_task()
        await self._start()
        self._watcher = asyncio.create_task(self._watch())

    async def remember(self, addresses: Iterable[str]) -> None:
        """Turn to peers at these multiaddresses from now on, besides the initial ones."""
        self._recent = tuple(addresses)[:MAX_RECENT_ADDRESSES]

    async def store(self, value: bytes, expiry: float) -> bool:
        """Store `value` under our peer id until `expiry` (Unix time); return whether it is there.

        What hivemind's `store` returns is the verdict of whichever node answered last, and with
        a dead daemon it is True: so read back, and then ask the daemon itself.
        """
        node, daemon = await self._ready()
        subkey = self._identity.peer
        await node.store(self._place, value, expiry, subkey=subkey)
        stored = (subkey, value, expiry) in await self._find(node)
        await daemon.list_peers()
        return stored

    async def find(self) -> list[tuple[object, object, object]]:
        """Return subkey, value and expiry of all records."""
        node, _ = await self._ready()
        return await self._find(node)

    async def aclose(self) -> None:
        """Stop watching, and stop the daemon. A cancelled `start` is let clean up first."""
        if self._watcher is not None:
            self._watcher.cancel()
        tasks = {task for task in (self._starting, self._watcher) if task is not None}
        if tasks:
            await asyncio.wait(tasks)
        await self._stop()

    # --- the daemon's life ------------------------------------------------------------------

    async def _start(self) -> None:
        self._daemon = await self._start_daemon()
        try:
            self._node = await DHTNode.create(
                self._daemon,
                record_validator=self._validator,
                # every search asks the others: the daemon is asked seldom, and wants news
                cache_locally=False,
                cache_nearest=0,
                cache_on_store=False,
                cache_refresh_before_expiry=0,
                reuse_get_requests=False,
            )
            self.addresses = tuple(map(str, await self._daemon.get_visible_maddrs()))
        except BaseException:  # also when cancelled
            await self._stop()
            raise
        self._port = int(Multiaddr(self.addresses[0])["tcp"])
        await self._meet()
        self._up.set()

    async def _start_daemon(self) -> Any:
        version = ipaddress.ip_address(self._host).version
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix="libp2p-", suffix=".key") as file:
            secret = self._identity.private_key.private_bytes_raw() + self._identity.public_key
            file.write(_ED25519_PRIVATE_KEY + secret)
            file.flush()
            try:
                daemon = await self._daemon_type.create(
                    host_maddrs=[f"/ip{version}/{self._host}/tcp/{self._port}"],
                    identity_path=file.name,
                    check_if_identity_free=False,  # hivemind can read RSA keys only
                    startup_timeout=_START_SECONDS,
                    **_reach(self._host),
                )
            except BaseException:  # also when cancelled; `create` leaves what it has begun
                await self._daemon_type.newest.end()
                raise
        if daemon.peer_id.to_base58() != self._identity.peer:
            await daemon.end()
            raise P2PDaemonError(f"libp2p daemon runs as {daemon.peer_id}")
        return daemon

    async def _ready(self) -> tuple[Any, Any]:
        """Wait for node and daemon; the calling task is cancelled when they end."""
        await self._up.wait()
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return self._node, self._daemon

    async def _find(self, node: Any) -> list[tuple[object, object, object]]:
        found = await node.get(self._place, latest=True)
        entries = found.value if found is not None else {}
        if not isinstance(entries, dict):
            return []
        return [(subkey, item.value, item.expiration_time) for subkey, item in entries.items()]

    async def _stop(self) -> None:
        self._up.clear()
        for call in self._calls:
            call.cancel()
        if self._node is not None:
            self._node.is_alive = False  # its own shutdown talks to the daemon, and may hang
        if self._daemon is not None:
            await self._daemon.end()
        self._node = self._daemon = None

    async def _watch(self) -> None:
        pause = 1.0
        while True:
            fault = "does not start" if self._daemon is None else await self._daemon.fault()
            if not fault:
                pause = 1.0
                await self._meet()
                continue
            log.warning("libp2p daemon is restarted fault=%r", fault)
            await self._stop()
            try:
                await self._start()
            except TROUBLE as trouble:
                log.warning("libp2p daemon did not start fault=%r retry_seconds=%g", trouble, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    # --- other peers --------------------------------------------------------------------------

    async def _meet(self) -> None:
        """Make ourselves known to the peers that we know and that are not in our table."""
        known = dict.fromkeys(self._initial + self._recent)
        attempts = [self._introduce(address) for address in known]
        await asyncio.gather(*attempts, return_exceptions=True)  # whoever is away is away

    async def _introduce(self, address: str) -> None:
        whole = Multiaddr(address)
        peer = PeerID.from_base58(whole["p2p"])
        if peer in self._node.protocol.routing_table or peer == self._daemon.peer_id:
            return
        way = whole.decapsulate(Multiaddr(f"/p2p/{peer.to_base58()}"))
        async with asyncio.timeout(_INTRODUCTION_SECONDS):
            await self._daemon.connect(peer, way)
            await self._node.protocol.call_ping(peer)
            await self._node.find_nearest_nodes([self._node.node_id])


class _OnlyRecords(RecordValidatorBase):  # type: ignore[misc]
    """Lets into our part of the DHT only records of our run, made by the peer they are about."""

    def __init__(self, seal: RecordSeal, place: bytes) -> None:
        self._seal = seal
        self._key = DHTID.generate(source=place).to_bytes()
        self._told: set[str] = set()

    def validate(self, record: DHTRecord) -> bool:
        """Return whether our node may store or return `record`."""
        if record.key != self._key:
            return False
        try:
            subkey = msgspec.msgpack.decode(record.subkey, type=str)
            value = msgspec.msgpack.decode(record.value, type=bytes)
            self._compare_clocks(subkey, value, record.expiration_time, time.time())
            self._seal.open(subkey, value, record.expiration_time, time.time())
        except (RemoteProtocolError, msgspec.MsgspecError, UnicodeDecodeError):
            return False
        return True

    def _compare_clocks(self, subkey: str, value: bytes, expiry: float, now: float) -> None:
        """Say so, once for each peer, if a record of this run does not fit our wall clock.

        Raises RemoteProtocolError if it is no such record."""
        ahead_seconds = expiry - RECORD_SECONDS - now
        most_seconds = MAX_FUTURE_SECONDS - RECORD_SECONDS
        if -RECORD_SECONDS - most_seconds <= ahead_seconds <= most_seconds or subkey in self._told:
            return
        self._seal.open(subkey, value, expiry, expiry)
        self._told.add(subkey)
        log.warning(
            "dht record does not fit the wall clock, here or at its peer: it is no help in finding "
            "others peer=%s ahead_seconds=%.0f",
            subkey,
            ahead_seconds,
        )


def _daemon_type(sockets: Path) -> Any:
    """Return hivemind's class for the daemon, with its sockets in a folder of ours, and guarded."""

    class GuardedDaemon(P2P):  # type: ignore[misc]
        _UNIX_SOCKET_PREFIX = f"/unix{sockets}/"
        newest: "GuardedDaemon"

        def __init__(self) -> None:
            super().__init__()
            type(self).newest = self

        @staticmethod
        def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
            guard = [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid())]
            return [*guard, *P2P._make_process_args(*args, **kwargs)]

        async def connect(self, peer: PeerID, way: Multiaddr) -> None:
            """Connect to `peer` at the address `way`."""
            await self._client.connect(peer, [way])

        async def fault(self) -> str:
            """Wait until the daemon ends, a few seconds at most; return what is wrong with it."""
            try:
                async with asyncio.timeout(_CHECK_SECONDS):
                    return f"exit status {await self._child.wait()}"
            except TimeoutError:
                pass
            try:
                async with asyncio.timeout(_CHECK_SECONDS):
                    await self.list_peers()
            except TROUBLE as trouble:
                return f"does not answer: {trouble!r}"
            return ""

        async def end(self) -> None:
            """End the daemon, by force if it must be."""
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await self.shutdown()
            except TimeoutError:
                self._child.kill()
                await self._child.wait()

    return GuardedDaemon


def _reach(host: str) -> dict[str, bool]:
    """Return what the daemon may do to be reached: nothing on loopback, all of it elsewhere."""
    open_to_others = not ipaddress.ip_address(host).is_loopback
    return {
        "auto_nat": open_to_others,
        "nat_port_map": open_to_others,
        "use_relay": open_to_others,
        "use_auto_relay": False,
    }
