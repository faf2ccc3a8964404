"""Puts one peer together: its home, its adapters, its daemon and its control socket."""

import ipaddress
import logging
import os
import random
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import trio

from protocol.records import Training
from protocol.signing import Identity
from swarm.adapters.checkpoints import DiskCheckpoints
from swarm.adapters.control_socket import serve_commands
from swarm.adapters.disk import KEY_BYTES, RECOVERY_KEY, Home
from swarm.adapters.durable import write_file_durably
from swarm.adapters.solver_process import ProcessSolver
from swarm.adapters.tls import TlsTransport
from swarm.config import PeerSettings
from swarm.core.roles import Placing
from swarm.daemon import Daemon, Outside, Settings
from swarm.errors import (
    AddressError,
    DataError,
    DhtError,
    ExportError,
    HomeError,
    RecoveryError,
    SwarmError,
)
from swarm.homes import Overrides, bootstrap_addresses, invitation_of
from swarm.ports import DataSource, Dht

log = logging.getLogger(__name__)

DHT_PORT = "dht-port"


class Node:
    """One peer: a daemon with its adapters."""

    def __init__(
        self,
        home: Home,
        overrides: Overrides,
        wrap: Callable[[Outside], Outside] | None = None,
        place: Placing | None = None,
    ) -> None:
        """Put together the peer of `home`; counts one more start of it. `wrap` may put something
        between the daemon and its adapters.

        Raises ConfigError, ModelError, DataError, HomeError for what is wrong with it."""
        # torch's compiler makes this folder as soon as an optimiser exists, by default in /tmp.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(home.folder / "torch-cache"))
        # Imported here: torch takes seconds, and other commands do not need it.
        from swarm.adapters.torch_executor import ThreadedExecutor
        from swarm.adapters.torch_stage import TorchStage

        settings = overrides.apply(home.settings())
        manifest, identity = home.manifest(), home.identity()
        addresses, dht_peers = bootstrap_addresses(home)
        training = manifest.training
        source = _open_data(
            training, Path(settings.data_dir), required=manifest.founder == identity.peer
        )
        stage = TorchStage(training, settings.device, settings.threads or None)
        stage.layer_names()  # a model that does not import is told before anybody connects
        self._home = home
        self._executor = ThreadedExecutor(stage)
        outside = Outside(
            transport=_transport(home, settings),
            storage=home.storage,
            checkpoints=DiskCheckpoints(home.checkpoints),
            executor=self._executor,
            source=source,
            start_dht=lambda members: _start_dht(home, settings, (*dht_peers, *members)),
            draw=random.SystemRandom().random,
            solver=ProcessSolver(),
        )
        self.daemon = Daemon(
            manifest=manifest,
            agreement=home.agreement(outside.draw),
            identity=identity,
            boot=home.next_boot(),
            outside=wrap(outside) if wrap is not None else outside,
            settings=Settings(
                addresses=addresses,
                advertised_hosts=advertised_hosts(settings),
                device=settings.device,
                host_label=settings.host_label or os.uname().nodename,
                wait_for_peers=settings.wait_for_peers,
                stages=settings.stages,
                place=place,
            ),
        )

    async def run(self, *, with_parent: bool, ready: Callable[[str], None]) -> None:
        """Live until told to stop: by a signal, a command, or the parent's end."""
        commands = _Commands(self._home, self.daemon)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(serve_commands, self._home.folder, commands.handle)
                nursery.start_soon(_stop_on_signal, self.daemon)
                if with_parent:
                    nursery.start_soon(_stop_with_parent, self.daemon)
                await self.daemon.run(ready=ready)
                nursery.cancel_scope.cancel()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Stop the executor's thread, after the task that it computes."""
        with trio.CancelScope(shield=True):
            await self._executor.aclose()


def advertised_hosts(settings: PeerSettings) -> tuple[str, ...]:
    """Return the hosts under which others reach this peer; () for the one it listens on.

    A peer that listens on every address of its machine is reached under the machine's own, unless
    `advertise` says otherwise. Raises AddressError if the machine does not know its own."""
    if settings.advertise:
        return (settings.advertise,)
    if _host_of(settings.listen) not in ("0.0.0.0", "::"):
        return ()
    family = socket.AF_INET if _host_of(settings.listen) == "0.0.0.0" else socket.AF_INET6
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)
    except OSError:
        found = []
    hosts = sorted({str(address[0]) for *_, address in found})
    reachable = tuple(host for host in hosts if not ipaddress.ip_address(host).is_loopback)
    if not reachable:
        raise AddressError(
            f"listening on {settings.listen}, but under which address can others reach this peer?",
            evidence=(f"the host name {name} stands for {', '.join(hosts) or 'no address'}",),
            hint="name it with --advertise HOST",
        )
    return reachable


def _transport(home: Home, settings: PeerSettings) -> TlsTransport:
    identity = home.identity()
    allowed = frozenset({*settings.allowed_peers, identity.peer})
    return TlsTransport(
        identity,
        home.swarm_key(),
        home.folder,
        allowed if settings.allowed_peers else None,
        listen=settings.listen,
    )


async def _start_dht(home: Home, settings: PeerSettings, peers: tuple[str, ...]) -> Dht:
    """Start the DHT node, at the port that it had last time if that is free: others know it."""
    from swarm.adapters.hivemind_dht import HivemindDht

    async def start(port: int) -> HivemindDht:
        host = _host_of(settings.listen)
        keys = home.identity(), home.swarm_key(), home.run_id()
        return await HivemindDht.start(*keys, host, peers, home.folder, listen_port=port)

    saved = _saved_port(home)
    try:
        dht = await start(saved)
    except DhtError:
        if not saved:
            raise
        dht = await start(0)
    port = dht.addresses[0].split("/")[4]
    home.storage.save(DHT_PORT, port.encode())
    return dht


def _saved_port(home: Home) -> int:
    """Return the port of the DHT node's last start; 0, for any, where that is not known."""
    try:
        return int(home.storage.load(DHT_PORT) or 0)
    except HomeError as error:
        log.warning("not used: %s", error.what)
        return 0


def _open_data(training: Training, data_dir: Path, *, required: bool) -> DataSource | None:
    """Return the run's data, or None (logged) where this machine does not have it.

    The founder must: without it nobody could tell what the others should have."""
    from swarm.adapters.datasets import ThreadedSource, open_source

    try:
        return ThreadedSource(open_source(training, data_dir))
    except DataError as error:
        if required:
            raise
        log.warning("no data here, this peer does not feed reason=%r", error.what)
        return None


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


async def _stop_on_signal(daemon: Daemon) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            log.info("signal %s: leaving", signal.Signals(number).name)
            daemon.stop()


async def _stop_with_parent(daemon: Daemon) -> None:
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stdin:
        while await stdin.receive_some(1024):
            pass
    log.info("the parent has ended: leaving")
    daemon.stop()


class _Commands:
    """What the control socket answers."""

    def __init__(self, home: Home, daemon: Daemon) -> None:
        self._home = home
        self._daemon = daemon

    async def handle(self, command: str, arguments: dict[str, object]) -> dict[str, object]:
        """Answer one command. Raises SwarmError for the one who asked."""
        match command:
            case "status":
                return await self._daemon.fresh_status()
            case "plan":
                return self._daemon.plan()
            case "invite":
                invitation = invitation_of(
                    self._home,
                    self._daemon.discovery.ways_in(),
                    self._daemon.discovery.dht_addresses(),
                )
                return {"invitation": invitation.encode()}
            case "stop":
                self._daemon.stop()
                return {}
            case "recover":
                return self._recover(str(arguments.get("key", "")))
            case "export":
                return await self._export(Path(str(arguments.get("path", ""))))
            case _:
                raise SwarmError(f"the daemon knows no command {command!r}")

    def _recover(self, seed: str) -> dict[str, object]:
        """Start a new generation; `seed` is the recovery key in hexadecimal digits, or empty if
        it is kept in this home."""
        key = Identity.from_seed(bytes.fromhex(seed)) if seed else self._home.recovery()
        if key is None:
            raise RecoveryError(
                "the recovery key is not in this home",
                evidence=(f"{self._home.folder / RECOVERY_KEY} does not exist",),
                hint="name the founder's with --key FILE",
            )
        self._daemon.control.recover(key, secrets.token_bytes(KEY_BYTES))
        return {"generation": self._daemon.control.plan.header.generation.number}

    async def _export(self, path: Path) -> dict[str, object]:
        from swarm.adapters.weights import merge

        layers, donors = await self._daemon.layers()
        merged = await trio.to_thread.run_sync(merge, layers)
        try:
            digest = await trio.to_thread.run_sync(write_file_durably, path, merged)
        except HomeError as error:
            raise ExportError(error.what, evidence=error.evidence, hint=error.hint) from error
        return {"sha256": digest.hex(), "bytes": len(merged), "donors": sorted(set(donors))}
