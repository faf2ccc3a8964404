"""A peer's home: its keys, its run, its settings and its hard state, in one folder.

The rule: one process at a time works in a home, and a key is never used without the state
that belongs to it: a peer that forgot its votes could vote twice.

    lock              held while a process works here; holds its process id
    identity.key      raw Ed25519 seed, mode 0600; written last, so a home with it is complete
    swarm.key         what lets its holder join, mode 0600
    recovery.key      the founder's only: starts a new generation of councils, mode 0600
    manifest          the run's definition, in the canonical bytes that its id is the hash of
    run               that id, in hexadecimal digits
    peer.toml         this peer's own settings
    state/            hard state (DiskStorage), among it the boot number and a hash of the keys
    checkpoints/      one folder per version (DiskCheckpoints)
"""

import fcntl
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from protocol.errors import RemoteProtocolError
from protocol.packing import canonical
from protocol.records import Manifest, RunId, decode_record, sha256
from protocol.signing import Identity
from swarm.adapters.durable import (
    PRIVATE_MODE,
    make_folder,
    read_file,
    remove_leftovers,
    write_file_durably,
)
from swarm.config import PeerSettings, read_settings, render_settings
from swarm.core.agreement import Agreement
from swarm.core.chain import HARD_STATE, HardState
from swarm.errors import HomeError
from swarm.peer.keeping import load_state

__all__ = [
    "DiskStorage",
    "Home",
    "write_file_durably",
]

KEY_BYTES = 32
SEAL_BYTES = 66
RESTORE_HINT = "restore the whole folder, or join again as a new peer with another --home"
BOOT, KEYS = "boot", "keys"
RECOVERY_KEY = "recovery.key"


class DiskStorage:
    """The Storage port over a folder: one file per name, which ends with its own hash."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder, mode=0o700)
        remove_leftovers(folder)
        self._folder = folder

    def save(self, name: str, data: bytes) -> None:
        """Replace `name` durably; returns after fsync. Raises HomeError."""
        write_file_durably(self._path(name), data + _seal(data), mode=PRIVATE_MODE)

    def load(self, name: str) -> bytes | None:
        """Return what was saved last under `name`, or None.

        Raises HomeError if it cannot be read, or is not what was saved."""
        path = self._path(name)
        found = read_file(path)
        if found is None:
            return None
        data, seal = found[:-SEAL_BYTES], found[-SEAL_BYTES:]
        if seal != _seal(data):
            raise HomeError(
                f"{path} is damaged: its hash is another than that at its end",
                hint=RESTORE_HINT,
            )
        return data

    def _path(self, name: str) -> Path:
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,99}", name):
            raise ValueError(f"not a name for state: {name!r}")
        return self._folder / name


def _seal(data: bytes) -> bytes:
    return b"\n" + sha256(data).hex().encode() + b"\n"


class Home:
    """A peer's folder, locked while this object is open. Use `create`, `open` or `exists`."""

    def __init__(self, folder: Path) -> None:
        """Lock `folder`, which must exist. Raises HomeError."""
        self.folder = folder
        self._lock = _locked(folder)
        try:
            remove_leftovers(folder)
            self.storage = DiskStorage(folder / "state")
        except HomeError:
            self.close()
            raise

    @staticmethod
    def exists(folder: Path) -> bool:
        """Return whether `folder` is a complete home."""
        return (folder / "identity.key").exists()

    @classmethod
    def create(
        cls,
        folder: Path,
        *,
        manifest: Manifest,
        swarm_key: bytes,
        settings: PeerSettings,
        seed: bytes | None = None,
        recovery_seed: bytes | None = None,
    ) -> "Home":
        """Make a home with a new identity (or that of `seed`, 32 bytes), and open it.

        What an interrupted create left is overwritten. Raises HomeError if `folder` is a home.
        """
        make_folder(folder, mode=0o700)
        home = cls(folder)
        try:
            if cls.exists(folder):
                raise HomeError(
                    f"{folder} is a home already",
                    evidence=(f"{folder / 'identity.key'} exists",),
                    hint="choose another folder with --home",
                )
            if recovery_seed is not None:
                home._write(RECOVERY_KEY, recovery_seed, PRIVATE_MODE)
            home._fill(manifest, swarm_key, settings, seed or secrets.token_bytes(KEY_BYTES))
        except BaseException:
            home.close()
            raise
        return home

    @classmethod
    def open(cls, folder: Path) -> "Home":
        """Open a home. Raises HomeError if it is none, is in use, or is not whole."""
        if not cls.exists(folder):
            raise HomeError(
                f"{folder} is not the home of a peer",
                evidence=(f"{folder / 'identity.key'} does not exist",),
                hint="make one with `swarm create`, or join with `swarm run --join INVITATION`",
            )
        home = cls(folder)
        try:
            home._check()
        except BaseException:
            home.close()
            raise
        return home

    def close(self) -> None:
        """Give the home free. May be called twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> "Home":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def checkpoints(self) -> Path:
        """Return the folder of checkpoints."""
        return self.folder / "checkpoints"

    @property
    def settings_path(self) -> Path:
        """Return where the owner's settings are."""
        return self.folder / "peer.toml"

    def boot(self) -> int:
        """Return how often this peer has started so far; 0 before the first start."""
        text = self.storage.load(BOOT)
        if text is None or not text.isdigit():
            raise self._not_whole("state/boot", "is missing" if text is None else "is no number")
        return int(text)

    def next_boot(self) -> int:
        """Count one more start, durably, and return its number."""
        boot = self.boot() + 1
        self.storage.save(BOOT, b"%d" % boot)
        return boot

    def identity(self) -> Identity:
        """Return this peer's identity. Raises HomeError."""
        return Identity.from_seed(self._secret("identity.key"))

    def swarm_key(self) -> bytes:
        """Return the swarm's key (32 bytes). Raises HomeError."""
        return self._secret("swarm.key")

    def recovery(self) -> Identity | None:
        """Return the recovery key, or None where it is not kept here. Raises HomeError."""
        if not (self.folder / RECOVERY_KEY).exists():
            return None
        return Identity.from_seed(self._secret(RECOVERY_KEY))

    def manifest(self) -> Manifest:
        """Return the run's manifest. Raises HomeError if its hash is not the run id."""
        data = self._need("manifest")
        if sha256(data) != self.run_id():
            raise self._not_whole("manifest", "is not the manifest of the run in the file `run`")
        try:
            return decode_record(data, Manifest)
        except RemoteProtocolError as error:
            raise self._not_whole("manifest", str(error)) from error

    def run_id(self) -> RunId:
        """Return the run id (32 bytes). Raises HomeError."""
        text = self._need("run").strip()
        if not re.fullmatch(rb"[0-9a-f]{64}", text):
            raise self._not_whole("run", "is not 64 hexadecimal digits")
        return bytes.fromhex(text.decode())

    def agreement(self, draw: Callable[[], float]) -> Agreement:
        """Return what this peer knows of the chain of plans, and its vote; `draw` returns random
        numbers in [0, 1). Raises HomeError."""
        try:
            state = load_state(self.storage)
            if state is None:
                raise self._not_whole(f"state/{HARD_STATE}", "is missing")
            return Agreement(self.manifest(), self.identity(), state, draw=draw)
        except RemoteProtocolError as error:
            raise self._not_whole(f"state/{HARD_STATE}", f"is damaged: {error}") from error

    def settings(self) -> PeerSettings:
        """Return the owner's settings. Raises ConfigError if they are wrong or missing."""
        return read_settings(self.settings_path)

    def _fill(
        self, manifest: Manifest, swarm_key: bytes, settings: PeerSettings, seed: bytes
    ) -> None:
        if len(swarm_key) != KEY_BYTES or len(seed) != KEY_BYTES:
            raise ValueError(f"keys have {KEY_BYTES} bytes")
        self.storage.save(BOOT, b"0")
        self.storage.save(KEYS, _keys_hash(seed, swarm_key))
        self.storage.save(HARD_STATE, canonical(HardState()))
        self._write("manifest", canonical(manifest))
        self._write("run", manifest.run.hex().encode() + b"\n")
        self._write("peer.toml", render_settings(settings).encode())
        self._write("swarm.key", swarm_key, PRIVATE_MODE)
        make_folder(self.checkpoints)
        self._write("identity.key", seed, PRIVATE_MODE)

    def _check(self) -> None:
        keys = self._secret("identity.key"), self._secret("swarm.key")
        if self.storage.load(KEYS) != _keys_hash(*keys):
            raise self._not_whole("state/keys", "is not of identity.key and swarm.key")
        self.agreement(lambda: 0.0)
        self.boot()

    def _write(self, name: str, data: bytes, mode: int = 0o644) -> None:
        write_file_durably(self.folder / name, data, mode=mode)

    def _need(self, name: str) -> bytes:
        data = read_file(self.folder / name)
        if data is None:
            raise self._not_whole(name, "is missing")
        return data

    def _secret(self, name: str) -> bytes:
        data = self._need(name)
        mode = (self.folder / name).stat().st_mode & 0o777
        if len(data) != KEY_BYTES:
            raise self._not_whole(name, f"has {len(data)} bytes, not {KEY_BYTES}")
        if mode & 0o077:
            raise HomeError(
                f"others can read {self.folder / name}",
                evidence=(f"its mode is {mode:04o}",),
                hint=f"chmod 600 {self.folder / name}",
            )
        return data

    def _not_whole(self, name: str, what: str) -> HomeError:
        return HomeError(
            f"home {self.folder} is not whole: {name} {what}",
            evidence=("a key must not be used without the state that belongs to it",),
            hint=RESTORE_HINT,
        )


def _keys_hash(seed: bytes, swarm_key: bytes) -> bytes:
    """Return what tells that neither key has been changed since the state was made."""
    return sha256(seed + swarm_key).hex().encode()


def _locked(folder: Path) -> int:
    """Return a descriptor that holds the lock of `folder` until it is closed."""
    path = folder / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise HomeError(
            f"cannot open {path}: {error.strerror}", hint="choose another folder with --home"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, b"%d\n" % os.getpid())
    except OSError as error:
        holder = os.read(descriptor, 20).strip().decode(errors="replace") or "unknown"
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise HomeError(f"cannot lock {path}: {error.strerror}") from error
        raise HomeError(
            f"home {folder} is in use",
            evidence=(f"process {holder} holds {path}",),
            hint=f"stop it with `swarm stop --home {folder}`",
        ) from error
    return descriptor
