"""Checkpoints: one safetensors file per layer, and a list of them that is written last.

The rule: a version without its list is not there, and a file that does not have the hash in
the list is damage, never data.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from protocol.records import Count, Record
from swarm.adapters.durable import (
    make_folder,
    read_file,
    remove_durably,
    remove_leftovers,
    write_file_durably,
)
from swarm.errors import HomeError

LIST_NAME = "checkpoint.json"


class LayerFile(Record, frozen=True):
    """One layer's file."""

    layer: Count
    file: str
    nbytes: Count
    sha256: str
    """In hexadecimal digits."""


class CheckpointList(Record, frozen=True):
    """What a version's folder holds; readable without this project."""

    version: Count
    layers: tuple[LayerFile, ...]


def write_checkpoint(
    folder: Path, version: int, layers: Mapping[int, bytes | memoryview]
) -> tuple[bytes, ...]:
    """Write `layers` (index: safetensors bytes) as `version`; return once all of it is durable.

    Returns the SHA-256 of each layer's bytes, by ascending index. What the folder held of
    this version is replaced. Raises HomeError; then the version is not there.
    """
    place = _place(folder, version)
    make_folder(place)
    remove_leftovers(place)
    remove_durably(place / LIST_NAME)
    for stale in sorted(place.glob("layer-*.safetensors")):
        remove_durably(stale)
    files = []
    for layer in sorted(layers):
        name = f"layer-{layer:05d}.safetensors"
        digest = write_file_durably(place / name, layers[layer])
        files.append(LayerFile(layer, name, len(layers[layer]), digest.hex()))
    listing = msgspec.json.encode(CheckpointList(version, tuple(files)))
    write_file_durably(place / LIST_NAME, msgspec.json.format(listing, indent=2) + b"\n")
    return tuple(bytes.fromhex(file.sha256) for file in files)


def read_checkpoint(
    folder: Path, version: int, layers: Iterable[int] | None = None
) -> dict[int, bytes]:
    """Return the safetensors bytes of `layers` (None: all that are there) of a version.

    Raises HomeError if one is missing or its bytes do not have the hash in the list.
    """
    place = _place(folder, version)
    files = {file.layer: file for file in _listing(place, version).layers}
    wanted = sorted(files if layers is None else layers)
    missing = [layer for layer in wanted if layer not in files]
    if missing:
        raise HomeError(
            f"checkpoint {version} has no layer {missing[0]}",
            evidence=(f"{place} holds layers {sorted(files)}",),
            hint="get it from a peer whose stage has this layer",
        )
    return {layer: _checked(place, files[layer]) for layer in wanted}


def has_checkpoint(folder: Path, version: int, layers: Iterable[int] | None = None) -> bool:
    """Return whether `layers` (None: all in its list) of a version are there, undamaged."""
    try:
        place = _place(folder, version)
        files = {file.layer: file for file in _listing(place, version).layers}
        for layer in files if layers is None else layers:
            _checked(place, files[layer])
    except (HomeError, KeyError):
        return False
    return True


def checkpoint_versions(folder: Path) -> tuple[int, ...]:
    """Return the versions whose list is there, ascending; hashes are not checked."""
    lists = folder.glob(f"*/{LIST_NAME}")
    names = [path.parent.name for path in lists]
    return tuple(sorted(int(name) for name in names if name.isdecimal()))


def _place(folder: Path, version: int) -> Path:
    return folder / f"{version:010d}"


def _listing(place: Path, version: int) -> CheckpointList:
    data = read_file(place / LIST_NAME)
    if data is None:
        raise HomeError(
            f"there is no checkpoint {version}",
            evidence=(f"{place / LIST_NAME} does not exist",),
            hint="choose a version that was written to its end",
        )
    try:
        listing = msgspec.json.decode(data, type=CheckpointList)
    except msgspec.MsgspecError as error:
        raise _damaged(place / LIST_NAME, str(error)) from error
    if listing.version != version:
        raise _damaged(place / LIST_NAME, f"it is the list of version {listing.version}")
    return listing


def _checked(place: Path, file: LayerFile) -> bytes:
    path = place / Path(file.file).name
    data = read_file(path)
    if data is None:
        raise _damaged(path, "it is in the list and does not exist")
    digest = hashlib.sha256(data).hexdigest()
    if digest != file.sha256:
        raise _damaged(path, f"SHA-256 is {digest}, the list says {file.sha256}")
    return data


def _damaged(path: Path, evidence: str) -> HomeError:
    return HomeError(
        f"{path} is damaged",
        evidence=(evidence,),
        hint="remove this version's folder; the layers can be had from other peers",
    )
