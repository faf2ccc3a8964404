"""Discovery by hivemind's DHT: a `ports.Dht` that gives hints, late or never, and no trouble.

The rule: after `start`, nothing that happens in the DHT raises here. A call that fails or takes
too long is False or empty, and one log line. hivemind's import is lazy, because it takes
seconds, and what the import changes for the whole process is taken back.
"""

import errno
import logging
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Coroutine
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from protocol.errors import RemoteProtocolError
from protocol.invitation import rendezvous
from protocol.records import PeerRecord, RunId
from protocol.signing import Identity
from swarm.adapters.asyncio_thread import AsyncioThread
from swarm.adapters.dht_records import NONCE_BYTES, RECORD_SECONDS, RecordSeal
from swarm.errors import DhtError, HomeError

if TYPE_CHECKING:
    from swarm.adapters.libp2p_node import Libp2pNode

log = logging.getLogger(__name__)

T = TypeVar("T")

_CALL_SECONDS = 5.0
_START_SECONDS = 20.0
_CLOSE_SECONDS = 5.0
_SOCKETS_PREFIX = "swarm-dht-"
_SOCKETS_NOTE = "dht-sockets"


class HivemindDht:
    """A node of the DHT with its libp2p daemon. Make one with `start`; end it with `aclose`."""

    def __init__(self, identity: Identity, swarm_key: bytes, run: RunId, folder: Path) -> None:
        self._identity = identity
        self._seal = RecordSeal(swarm_key, run)
        self._place = rendezvous(swarm_key, run)
        self._folder = folder
        self._thread = AsyncioThread("dht")
        self._node: Libp2pNode | None = None

    @classmethod
    async def start(
        cls,
        identity: Identity,
        swarm_key: bytes,
        run: RunId,
        listen_host: str,
        initial_peers: tuple[str, ...],
        folder: Path,
        *,
        listen_port: int = 0,
    ) -> "HivemindDht":
        """Start a node that listens on `listen_host` and meets `initial_peers`.

        `initial_peers` are multiaddresses that end in /p2p/PEER; nobody need be there. `folder`
        must exist and belong to this peer alone. Raises DhtError if the daemon does not start.
        """
        listen = (await _ip_of(listen_host), listen_port)
        dht = cls(identity, swarm_key, run, folder)
        try:
            await dht._start(listen, initial_peers)
        except BaseException:  # also when cancelled
            await dht.aclose()
            raise
        return dht

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the multiaddresses at which this node can be reached."""
        return self._node.addresses if self._node is not None else ()

    async def publish(self, record: PeerRecord) -> bool:
        """Store this peer's record for `RECORD_SECONDS`. False if it did not get through.

        Raises LocalProtocolError if the record is too large.
        """
        expiry = time.time() + RECORD_SECONDS
        sealed = self._seal.seal(self._identity, record, expiry, os.urandom(NONCE_BYTES))
        if self._node is None:
            return False
        return bool(await self._ask("publish", self._node.store(sealed, expiry)))

    async def lookup(self) -> tuple[PeerRecord, ...]:
        """Return the valid records of this run, sorted by peer id; () if the DHT is no help."""
        if self._node is None:
            return ()
        records = {}
        for subkey, value, expiry in await self._ask("lookup", self._node.find()) or ():
            try:
                record = self._seal.open(subkey, value, expiry, time.time())
            except RemoteProtocolError as error:
                log.debug("dht record ignored fault=%r", str(error))
            else:
                records[record.peer] = record
        if ways := [way for record in records.values() for way in record.dht_addresses]:
            await self._ask("remember", self._node.remember(ways))
        return tuple(records[peer] for peer in sorted(records))

    async def aclose(self) -> None:
        """Stop the node, its libp2p daemon, its thread and its sockets."""
        node, self._node = self._node, None
        with trio.CancelScope(shield=True):
            if node is not None:
                with trio.move_on_after(_CLOSE_SECONDS):
                    await self._thread.finished(node.aclose())
            await self._thread.aclose()
        remove_sockets(self._folder)

    async def _start(self, listen: tuple[str, int], initial_peers: tuple[str, ...]) -> None:
        module = await trio.to_thread.run_sync(_import_libp2p_node)
        sockets = _make_sockets(self._folder)
        self._node = module.Libp2pNode(
            self._identity, self._seal, self._place, listen, self._folder, sockets
        )
        fault: BaseException = TimeoutError(f"no sign of life within {_START_SECONDS:g} s")
        with trio.move_on_after(_START_SECONDS):
            future = await self._thread.finished(self._node.start(initial_peers))
            if not future.exception():
                return
            fault = future.exception() or fault
        if isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HomeError(
                "the DHT node does not start: the disk is full",
                evidence=(str(fault),),
                hint=f"make room for {self._folder} and for {tempfile.gettempdir()}",
            ) from fault
        raise DhtError(
            f"the DHT node does not start on {listen[0]} port {listen[1]}",
            evidence=(str(fault) or repr(fault),),
            hint="check that the address belongs to this machine and that the port is free",
        ) from fault

    async def _ask(self, what: str, coroutine: Coroutine[Any, Any, T]) -> T | None:
        """Return the result, or None if there is trouble or no result in time."""
        fault: object = "no answer in time"
        with trio.move_on_after(_CALL_SECONDS):
            future = await self._thread.finished(coroutine)
            if future.cancelled():
                fault = "libp2p daemon ended"
            elif not (fault := future.exception()):
                return future.result()
        log.info("dht call failed call=%s fault=%r", what, fault)
        return None


async def _ip_of(host: str) -> str:
    """Return the first IP address that `host` stands for."""
    try:
        found = await trio.socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise DhtError(
            f"the DHT cannot listen on {host!r}",
            evidence=(str(error),),
            hint="give an IP address of this machine",
        ) from error
    return str(found[0][4][0])


def _import_libp2p_node() -> ModuleType:
    """Import hivemind and leave the process's logging, warnings and start method alone."""
    level_name = logging.getLevelName(logging.WARNING)
    start_method = multiprocessing.get_start_method(allow_none=True)
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")  # the libp2p daemon's too
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from swarm.adapters import libp2p_node
    from hivemind.utils.logging import use_hivemind_log_handler

    use_hivemind_log_handler("nowhere")
    logging.getLogger("hivemind").setLevel(os.environ["HIVEMIND_LOGLEVEL"])
    logging.addLevelName(logging.WARNING, level_name)
    multiprocessing.set_start_method(start_method, force=True)
    return libp2p_node


def _make_sockets(folder: Path) -> Path:
    """Return a new private folder with a short name: the path of a Unix socket is limited."""
    remove_sockets(folder)
    sockets = tempfile.mkdtemp(prefix=_SOCKETS_PREFIX)
    (folder / _SOCKETS_NOTE).write_text(sockets)
    return Path(sockets)


def remove_sockets(folder: Path) -> None:
    """Remove the folder of sockets that we, or a process before us that was killed, made."""
    note = folder / _SOCKETS_NOTE
    if not note.exists():
        return
    sockets = Path(os.fsdecode(note.read_bytes()))
    if sockets.name.startswith(_SOCKETS_PREFIX):
        shutil.rmtree(sockets, ignore_errors=True)
    note.unlink()
