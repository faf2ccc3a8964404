"""Checkpoints: two safetensors files per layer, and a list of them that is written last.

The rule: a version without its list is not there, and a file that does not have the hash in
the list is damage, never data.

    checkpoints/LINEAGE-VERSION/                one folder per version
        layer-00003.weights.safetensors         parameters and buffers, as they are exported
        layer-00003.state.safetensors           what training goes on from
        checkpoint.json                         what belongs here, with hashes
"""

import hashlib
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
import trio

from protocol.messages import StateKind
from protocol.records import Count, Record
from swarm.adapters.durable import (
    make_folder,
    read_file,
    remove_durably,
    remove_leftovers,
    sync_folder,
    write_file_durably,
)
from swarm.errors import HomeError
from swarm.ports import Buffer, HeldVersion

log = logging.getLogger(__name__)

LIST_NAME = "checkpoint.json"


class CheckpointFile(Record, frozen=True):
    """One file of one layer."""

    layer: Count
    kind: Literal["weights", "state"]
    file: str
    nbytes: Count
    sha256: str
    """In hexadecimal digits."""


class CheckpointList(Record, frozen=True):
    """What a version's folder holds; readable without this project."""

    lineage: Count
    version: Count
    state_hash: str
    """Names the history of this version; in hexadecimal digits."""
    files: tuple[CheckpointFile, ...]


class DiskCheckpoints:
    """The Checkpoints port over a home's folder, which nobody else writes to."""

    def __init__(self, folder: Path) -> None:
        """Make the folder, and remove what writes that did not come to their end have left in it.

        Raises HomeError."""
        make_folder(folder)
        self._folder = folder
        self._changing = trio.Lock()
        self._last: tuple[tuple[str, int, int, int], Buffer] | None = None
        for place, _, _ in _places(folder):
            if not (place / LIST_NAME).exists():
                _remove_place(place)
            elif listed := _listed(place):
                _remove_files(place, listed)

    async def write(
        self,
        lineage: int,
        version: int,
        weights: Mapping[int, Buffer],
        states: Mapping[int, Buffer],
        state_hash: bytes,
    ) -> tuple[bytes, ...]:
        """Write layers durably (ports.Checkpoints.write). Raises HomeError."""
        async with self._changing:
            self._last = None
            return await trio.to_thread.run_sync(
                write_checkpoint, self._folder, lineage, version, weights, states, state_hash
            )

    async def read(self, kind: StateKind, lineage: int, version: int, layer: int) -> Buffer | None:
        """Return a layer's checked bytes (ports.Checkpoints.read).

        The last ones are kept, since they are asked for piece by piece."""
        wanted = (kind, lineage, version, layer)
        if self._last is not None and self._last[0] == wanted:
            return self._last[1]
        found = await trio.to_thread.run_sync(
            read_checkpoint, self._folder, kind, lineage, version, layer
        )
        if found is None:
            return None
        self._last = (wanted, memoryview(found))
        return self._last[1]

    async def held(self) -> tuple[HeldVersion, ...]:
        """Return what is held whole (ports.Checkpoints.held): lists are there, and all files in
        their sizes."""
        return await trio.to_thread.run_sync(held_checkpoints, self._folder)

    async def forget(self, lineage: int, version: int) -> None:
        """Remove a version, durably, if it is there. Raises HomeError."""
        async with self._changing:
            self._last = None
            await trio.to_thread.run_sync(forget_checkpoint, self._folder, lineage, version)


# --- in the calling thread ------------------------------------------------------------------


def write_checkpoint(
    folder: Path,
    lineage: int,
    version: int,
    weights: Mapping[int, Buffer],
    states: Mapping[int, Buffer],
    state_hash: bytes,
) -> tuple[bytes, ...]:
    """Write layers (index: safetensors bytes) as a version; return once all of it is durable.

    Returns the SHA-256 of each layer's weights, by ascending index. What the folder held of this
    version is replaced as the list is, at once. Raises HomeError; then nothing has changed, and
    nothing is left of the try.
    """
    if weights.keys() != states.keys():
        raise ValueError(f"weights of layers {sorted(weights)}, states of {sorted(states)}")
    if not folder.is_dir():
        raise HomeError(f"{folder} is gone", hint="restore the home, or join again with another")
    place = _place(folder, lineage, version)
    before = _listed(place)
    make_folder(place)
    try:
        _remove_files(place, before)
        files = _write_files(place, weights, states, before)
        listing = CheckpointList(lineage, version, state_hash.hex(), tuple(files))
        text = msgspec.json.format(msgspec.json.encode(listing), indent=2)
        write_file_durably(place / LIST_NAME, text + b"\n")
    except HomeError:
        with suppress(HomeError):
            if before:
                _remove_files(place, before)
            else:
                _remove_place(place)
        raise
    _remove_files(place, {file.file for file in files})
    return tuple(bytes.fromhex(file.sha256) for file in files if file.kind == "weights")


def _write_files(
    place: Path,
    weights: Mapping[int, Buffer],
    states: Mapping[int, Buffer],
    taken: set[str],
) -> list[CheckpointFile]:
    """Write the files of all layers, under names that are not taken."""
    files = []
    for layer in sorted(weights):
        kinds: tuple[tuple[Literal["weights", "state"], Buffer], ...] = (
            ("weights", weights[layer]),
            ("state", states[layer]),
        )
        for kind, data in kinds:
            name = f"layer-{layer:05d}.{kind}.safetensors"
            if name in taken:
                name = f"layer-{layer:05d}.{kind}.again.safetensors"
            digest = write_file_durably(place / name, data)
            files.append(CheckpointFile(layer, kind, name, data.nbytes, digest.hex()))
    return files


def read_checkpoint(
    folder: Path, kind: StateKind, lineage: int, version: int, layer: int
) -> bytes | None:
    """Return the safetensors bytes of a layer, or None if they are not held.

    Raises HomeError if the list is damaged, or the bytes do not have the hash in it.
    """
    place = _place(folder, lineage, version)
    listing = _listing(place, lineage, version)
    for file in listing.files if listing is not None else ():
        if (file.kind, file.layer) == (kind, layer):
            try:
                return _checked(place, file)
            except HomeError:
                if not (place / LIST_NAME).exists():
                    return None  # removed while it was read
                raise
    return None


def held_checkpoints(folder: Path) -> tuple[HeldVersion, ...]:
    """Return the versions whose list and files are there, oldest first: lineages in order, and
    versions within each. Hashes are not checked; a damaged list is logged and left out."""
    held = []
    for place, lineage, version in _places(folder):
        try:
            listing = _listing(place, lineage, version)
        except HomeError as error:
            log.warning("checkpoint left out reason=%r evidence=%r", error.what, error.evidence)
            continue
        if listing is None or not all(_has_size(place, file) for file in listing.files):
            continue
        weights = [file for file in listing.files if file.kind == "weights"]
        layers = tuple(file.layer for file in weights)
        hashes = tuple(bytes.fromhex(file.sha256) for file in weights)
        state_hash = bytes.fromhex(listing.state_hash)
        held.append(HeldVersion(lineage, version, state_hash, layers, hashes))
    return tuple(held)


def forget_checkpoint(folder: Path, lineage: int, version: int) -> None:
    """Remove a version durably, its list first. Raises HomeError."""
    place = _place(folder, lineage, version)
    if place.is_dir():
        _remove_place(place)


def _place(folder: Path, lineage: int, version: int) -> Path:
    return folder / f"{lineage}-{version:010d}"


def _places(folder: Path) -> list[tuple[Path, int, int]]:
    """Return the folders of versions with lineage and version, in their order."""
    found = []
    for path in folder.glob("*-*"):
        if match := re.fullmatch(r"(\d+)-(\d{10,})", path.name):
            found.append((path, int(match[1]), int(match[2])))
    return sorted(found, key=lambda each: each[1:])


def _listing(place: Path, lineage: int, version: int) -> CheckpointList | None:
    data = read_file(place / LIST_NAME)
    if data is None:
        return None
    try:
        listing = msgspec.json.decode(data, type=CheckpointList)
        for digits in (listing.state_hash, *(file.sha256 for file in listing.files)):
            bytes.fromhex(digits)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _damaged(place / LIST_NAME, str(error)) from error
    if (listing.lineage, listing.version) != (lineage, version):
        raise _damaged(
            place / LIST_NAME,
            f"it is the list of version {listing.version}, lineage {listing.lineage}",
        )
    return listing


def _listed(place: Path) -> set[str]:
    """Return the names of the files in a folder's list; none if there is no list, or it is none."""
    data = read_file(place / LIST_NAME)
    try:
        files = msgspec.json.decode(data or b"", type=CheckpointList).files
    except msgspec.MsgspecError:
        return set()
    return {file.file for file in files}


def _checked(place: Path, file: CheckpointFile) -> bytes:
    path = place / Path(file.file).name
    data = read_file(path)
    if data is None:
        raise _damaged(path, "it is in the list and does not exist")
    digest = hashlib.sha256(data).hexdigest()
    if digest != file.sha256:
        raise _damaged(path, f"SHA-256 is {digest}, the list says {file.sha256}")
    return data


def _has_size(place: Path, file: CheckpointFile) -> bool:
    try:
        return (place / Path(file.file).name).stat().st_size == file.nbytes
    except OSError:
        return False


def _remove_place(place: Path) -> None:
    remove_durably(place / LIST_NAME)
    _remove_files(place, set())
    with suppress(OSError):  # somebody's own files may be in it
        place.rmdir()
        sync_folder(place.parent)


def _remove_files(place: Path, wanted: set[str]) -> None:
    """Remove all files of layers but the wanted ones."""
    remove_leftovers(place)
    for path in sorted(place.glob("layer-*.safetensors")):
        if path.name not in wanted:
            remove_durably(path)


def _damaged(path: Path, evidence: str) -> HomeError:
    return HomeError(
        f"{path} is damaged",
        evidence=(evidence,),
        hint="remove this version's folder; the layers can be had from other peers",
    )
