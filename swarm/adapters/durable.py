"""Files that are whole or not there, whenever the machine stops.

The rule: write to a temporary file in the same folder, fsync it, rename it, fsync the folder.
What fails is told as HomeError and leaves nothing behind.
"""

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swarm.errors import HomeError

PRIVATE_MODE = 0o600
PUBLIC_MODE = 0o666
"""Before the process's umask."""

_CHUNK_BYTES = 1 << 20
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_file_durably(path: Path, data: bytes | memoryview, *, mode: int = PUBLIC_MODE) -> bytes:
    """Replace the file `path` by `data`; return its SHA-256 (32 bytes), taken while writing.

    Raises HomeError; then the old file, if any, is as it was.
    """
    digest = hashlib.sha256()
    if not path.name:
        raise HomeError(
            f"cannot write {path}", evidence=("it is no file name",), hint="name a file"
        )
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    with _told("write", path):
        try:
            with open(
                temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)
            ) as file:
                for chunk in _chunks(data):
                    digest.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    return digest.digest()


def read_file(path: Path) -> bytes | None:
    """Return a file's content, or None if there is no such file. Raises HomeError."""
    with _told("read", path):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Make a folder and its parents, durably, unless it is there. Raises HomeError."""
    with _told("make the folder", path):
        if path.is_dir():
            return
        make_folder(path.parent)
        path.mkdir(mode, exist_ok=True)
        sync_folder(path.parent)


def remove_durably(path: Path) -> None:
    """Remove a file if it is there. Raises HomeError."""
    with _told("remove", path):
        path.unlink(missing_ok=True)
        sync_folder(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that a crash left in a folder that nobody else writes to."""
    with _told("clean", folder):
        for path in sorted(folder.glob(".*.tmp")):
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _chunks(data: bytes | memoryview) -> Iterator[memoryview]:
    view = memoryview(data)
    for start in range(0, len(view), _CHUNK_BYTES):
        yield view[start : start + _CHUNK_BYTES]


@contextmanager
def _told(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise HomeError(
            f"cannot {verb} {path}: {reason}",
            evidence=_evidence(error, path),
            hint=_hint(error),
        ) from error


def _evidence(error: OSError, path: Path) -> tuple[str, ...]:
    code = f"errno {error.errno} ({errno.errorcode.get(error.errno or 0, 'unknown')})"
    if error.errno not in _NO_SPACE:
        return (code,)
    with suppress(OSError):
        free_bytes = shutil.disk_usage(path.parent).free
        return (code, f"{free_bytes} bytes are free in {path.parent}")
    return (code,)


def _hint(error: OSError) -> str:
    if error.errno in _NO_SPACE:
        return "free some space or raise the limit, then try again; nothing is half written"
    if isinstance(error, PermissionError):
        return f"give user {os.getuid()} the right to it, or choose another path"
    return "check the path"
