"""Puts one peer together: its home, its adapters, its daemon and its control socket."""

import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import trio

from protocol.errors import RemoteProtocolError
from protocol.invitation import Invitation, parse
from protocol.records import Manifest, Training
from protocol.signing import Identity
from swarm.adapters.checkpoints import has_checkpoint, read_checkpoint, write_checkpoint
from swarm.adapters.control_socket import serve_commands
from swarm.adapters.disk import Home
from swarm.adapters.durable import write_file_durably
from swarm.adapters.tls import TlsTransport
from swarm.config import PeerSettings, manifest_of, settings_of
from swarm.daemon import Daemon, Outside, Settings
from swarm.errors import DataError, ExportError, HomeError, JoinError, SwarmError
from swarm.peer.joining import fetch_manifest
from swarm.ports import Buffer, DataSource, Dht

log = logging.getLogger(__name__)

INVITATION = "invitation"
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line says instead of the home's peer.toml; None leaves it."""

    listen: str | None = None
    device: str | None = None
    data_dir: str | None = None
    threads: int | None = None
    host_label: str | None = None

    def apply(self, settings: PeerSettings) -> PeerSettings:
        """Return `settings` with these changes. Raises ConfigError."""
        changes = {
            name: getattr(self, name)
            for name in ("listen", "device", "data_dir", "threads", "host_label")
            if getattr(self, name) is not None
        }
        changed = replace(settings, **changes)
        return settings_of(
            {name: getattr(changed, name) for name in PeerSettings.__dataclass_fields__},
            "command line",
        )


# --- homes --------------------------------------------------------------------------------


def create_home(folder: Path, training: Training, settings: PeerSettings) -> Manifest:
    """Make the founder's home of a new run. Raises HomeError."""
    seed = secrets.token_bytes(KEY_BYTES)
    founder = Identity.from_seed(seed).peer
    manifest = manifest_of(training, founder, secrets.token_bytes(KEY_BYTES))
    swarm_key = secrets.token_bytes(KEY_BYTES)
    Home.create(
        folder, manifest=manifest, swarm_key=swarm_key, settings=settings, seed=seed
    ).close()
    return manifest


def join_home(folder: Path, invitation: Invitation, settings: PeerSettings) -> None:
    """Make a newcomer's home: ask the swarm for the manifest and keep it. Raises JoinError."""
    seed = secrets.token_bytes(KEY_BYTES)

    async def fetch() -> Manifest:
        with TemporaryDirectory(prefix="swarm-join-") as scratch:
            transport = TlsTransport(
                Identity.from_seed(seed), invitation.swarm_key, Path(scratch)
            )
            return await fetch_manifest(transport, invitation.run, invitation.addresses)

    manifest = trio.run(fetch)
    with Home.create(
        folder,
        manifest=manifest,
        swarm_key=invitation.swarm_key,
        settings=settings,
        seed=seed,
    ) as home:
        home.storage.save(INVITATION, invitation.encode().encode())


def parse_invitation(text: str) -> Invitation:
    """Return the invitation in `text`. Raises JoinError."""
    try:
        return parse(text)
    except RemoteProtocolError as error:
        raise JoinError(
            "this is not an invitation",
            evidence=(str(error),),
            hint="copy the whole line that `swarm invite` prints",
        ) from error


def invitation_of(home: Home, addresses: tuple[str, ...], dht: tuple[str, ...] = ()) -> Invitation:
    """Return an invitation to the run of `home`, naming these addresses."""
    return Invitation(home.run_id(), home.swarm_key(), addresses, dht)


# --- the peer ---------------------------------------------------------------------------------


class DiskCheckpoints:
    """The Checkpoints port over a home's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, version: int, layers: Mapping[int, Buffer]) -> tuple[bytes, ...]:
        """Write layers durably (ports.Checkpoints.write)."""
        return write_checkpoint(self._folder, version, layers)

    def read(self, version: int, layer: int) -> Buffer | None:
        """Return a layer's checked bytes (ports.Checkpoints.read)."""
        if not has_checkpoint(self._folder, version, [layer]):
            return None
        return memoryview(read_checkpoint(self._folder, version, [layer])[layer])


async def run_node(
    home: Home, overrides: Overrides, *, with_parent: bool, ready: Callable[[str], None]
) -> None:
    """Run the daemon of `home` until it is told to stop (signal, command, or parent's end)."""
    # Imported here: torch and hivemind take seconds, and other commands need neither.
    from swarm.adapters.hivemind_dht import HivemindDht
    from swarm.adapters.torch_executor import ThreadedExecutor
    from swarm.adapters.torch_stage import TorchStage

    settings = overrides.apply(home.settings())
    manifest, identity, swarm_key = home.manifest(), home.identity(), home.swarm_key()
    addresses, dht_peers = _bootstrap(home)
    training = manifest.training
    is_founder = manifest.founder == identity.peer
    source = _open_data(training, Path(settings.data_dir), required=is_founder)
    stage = TorchStage(training, settings.device, settings.threads or None)
    allowed = frozenset({*settings.allowed_peers, identity.peer})
    transport = TlsTransport(
        identity,
        swarm_key,
        home.folder,
        allowed if settings.allowed_peers else None,
        listen=settings.listen,
    )

    async def start_dht() -> Dht:
        return await HivemindDht.start(
            identity, swarm_key, manifest.run, _host_of(settings.listen), dht_peers, home.folder
        )

    executor = ThreadedExecutor(stage)
    daemon = Daemon(
        manifest=manifest,
        identity=identity,
        boot=home.next_boot(),
        outside=Outside(
            transport, home.storage, DiskCheckpoints(home.checkpoints), executor, source, start_dht
        ),
        settings=Settings(
            addresses=addresses,
            device=settings.device,
            host_label=settings.host_label or os.uname().nodename,
            wait_for_peers=settings.wait_for_peers,
            stages=settings.stages,
        ),
    )
    commands = _Commands(home, daemon)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_commands, home.folder, commands.handle)
            nursery.start_soon(_stop_on_signal, daemon)
            if with_parent:
                nursery.start_soon(_stop_with_parent, daemon)
            await daemon.run(ready=ready)
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await executor.aclose()


def _open_data(training: Training, data_dir: Path, *, required: bool) -> DataSource | None:
    """Return the run's data, or None (logged) where this machine does not have it.

    The founder must: without it nobody could tell what the others should have."""
    from swarm.adapters.datasets import open_source

    try:
        return open_source(training, data_dir)
    except DataError as error:
        if required:
            raise
        log.warning("no data here, this peer does not feed reason=%r", error.what)
        return None


def _bootstrap(home: Home) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the addresses and DHT multiaddresses of the invitation that made this home."""
    saved = home.storage.load(INVITATION)
    if saved is None:
        return (), ()
    invitation = parse_invitation(saved.decode())
    return invitation.addresses, invitation.dht_addresses


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
                return self._daemon.status()
            case "invite":
                addresses, dht = self._daemon.addresses()
                return {"invitation": invitation_of(self._home, addresses, dht).encode()}
            case "stop":
                self._daemon.stop()
                return {}
            case "export":
                return await self._export(Path(str(arguments.get("path", ""))))
            case _:
                raise SwarmError(f"the daemon knows no command {command!r}")

    async def _export(self, path: Path) -> dict[str, object]:
        from swarm.adapters.weights import merge

        layers, donors = await self._daemon.layers()
        merged = await trio.to_thread.run_sync(merge, layers)
        try:
            digest = await trio.to_thread.run_sync(write_file_durably, path, merged)
        except HomeError as error:
            raise ExportError(error.what, evidence=error.evidence, hint=error.hint) from error
        return {"sha256": digest.hex(), "bytes": len(merged), "donors": sorted(set(donors))}
