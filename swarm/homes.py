"""Making a peer's home: as the founder of a run, or as a newcomer with an invitation."""

import logging
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import trio

from protocol.errors import RemoteProtocolError
from protocol.invitation import Invitation, parse
from protocol.records import Manifest, Training
from protocol.signing import Identity
from swarm.adapters.disk import Home
from swarm.adapters.tls import TlsTransport
from swarm.config import PeerSettings, manifest_of, settings_of
from swarm.errors import HomeError, JoinError
from swarm.peer.joining import fetch_manifest

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
    advertise: str | None = None

    def apply(self, settings: PeerSettings) -> PeerSettings:
        """Return `settings` with these changes. Raises ConfigError."""
        changes = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if getattr(self, name) is not None
        }
        changed = replace(settings, **changes)
        return settings_of(
            {name: getattr(changed, name) for name in PeerSettings.__dataclass_fields__},
            "command line",
        )


def create_home(folder: Path, training: Training, settings: PeerSettings) -> Manifest:
    """Make the founder's home of a new run. Raises HomeError."""
    seed = secrets.token_bytes(KEY_BYTES)
    founder = Identity.from_seed(seed).peer
    recovery_seed = secrets.token_bytes(KEY_BYTES)
    recovery = Identity.from_seed(recovery_seed).peer
    manifest = manifest_of(training, founder, recovery, secrets.token_bytes(KEY_BYTES))
    with Home.create(
        folder,
        manifest=manifest,
        swarm_key=secrets.token_bytes(KEY_BYTES),
        settings=settings,
        seed=seed,
        recovery_seed=recovery_seed,
    ):
        return manifest


def join_home(folder: Path, invitation: Invitation, settings: PeerSettings) -> None:
    """Make a newcomer's home: ask the swarm for the manifest and keep it. Raises JoinError."""
    seed = secrets.token_bytes(KEY_BYTES)

    async def fetch() -> Manifest:
        with TemporaryDirectory(prefix="swarm-join-") as scratch:
            transport = TlsTransport(Identity.from_seed(seed), invitation.swarm_key, Path(scratch))
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


def bootstrap_addresses(home: Home) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the addresses and DHT multiaddresses of the invitation that made this home."""
    try:
        saved = home.storage.load(INVITATION)
    except HomeError as error:  # who has been in the swarm knows others
        log.warning("not used: %s", error.what)
        saved = None
    if saved is None:
        return (), ()
    invitation = parse_invitation(saved.decode())
    return invitation.addresses, invitation.dht_addresses
