"""Data sources: bytes of text, arrays of token ids, and datasets by import path.

The rule: a sample is a function of its id and of the data's content, and the digest covers
that content (a factory's: a spread of it). Shapes: B samples, T tokens per sample.
"""

import glob
import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import trio

from protocol.records import DataSpec, LossSpec, Training
from swarm.adapters.factory_source import Array, FactorySource, check_id, raw_bytes
from swarm.errors import DataError
from swarm.ports import Buffer

STDLIB = "${stdlib}"

_CHUNK_BYTES = 1 << 20  # a multiple of every item size
_NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__"}


class SampleReader(Protocol):
    """Reads samples; its methods block."""

    def digest(self) -> bytes:
        """Return SHA-256 over the data's content (32 bytes). Raises DataError."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def microbatch(self, sample_ids: Sequence[int]) -> tuple[Buffer, Buffer, int]:
        """Return inputs, targets and weight (what counts in the mean). Raises DataError."""
        ...


class ThreadedSource:
    """The DataSource port over a reader, which works in a thread, one call at a time: an owner's
    own dataset need not be made for more. A caller that is cancelled waits for its call."""

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader
        self._turn = trio.CapacityLimiter(1)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._reader)

    async def digest(self) -> bytes:
        """Return SHA-256 over the data's content (ports.DataSource.digest)."""
        return await trio.to_thread.run_sync(self._reader.digest, limiter=self._turn)

    async def microbatch(self, sample_ids: Sequence[int]) -> tuple[Buffer, Buffer, int]:
        """Return inputs, targets and weight (ports.DataSource.microbatch)."""
        return await trio.to_thread.run_sync(
            self._reader.microbatch, sample_ids, limiter=self._turn
        )


def open_source(training: Training, data_dir: Path) -> SampleReader:
    """Return the data of `training`; relative paths start at `data_dir`.

    Raises DataError if data is missing, too short, or not what the manifest says.
    """
    data, loss = training.data, training.loss
    match data.source:
        case "text":
            return WindowSource(data, loss, _text_pieces(data.files, data_dir), np.dtype("u1"))
        case "tokens":
            piece, dtype = _token_piece(data, data_dir)
            return WindowSource(data, loss, [piece], dtype)
        case "factory":
            return FactorySource(data, loss)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [offset, offset + size) of a file."""

    path: Path
    offset: int
    size: int


class WindowSource:
    """A long run of token ids, cut into windows of T tokens that do not overlap.

    Sample i has inputs [i*T, (i+1)*T) and, one further, targets [i*T + 1, (i+1)*T + 1). Files
    are read piecewise with ordinary reads: a file that shrinks is an error, not a signal.
    """

    def __init__(
        self, data: DataSpec, loss: LossSpec, pieces: Sequence[Piece], dtype: np.dtype[Any]
    ) -> None:
        self._length = data.sequence_length
        self._vocabulary = data.vocabulary
        self._weighs_samples = loss.weight == "samples"
        self._dtype = dtype
        self._pieces = [piece for piece in pieces if piece.size]
        self._ends = [0]
        for piece in self._pieces:
            self._ends.append(self._ends[-1] + piece.size)
        self._tokens = self._ends[-1] // dtype.itemsize
        if self._tokens < self._length + 1:
            raise DataError(
                f"{self._tokens} tokens are too few for one sample",
                evidence=(f"data.sequence_length = {self._length} needs {self._length + 1}",),
                hint="add files, or shorten data.sequence_length",
            )

    def __len__(self) -> int:
        """Return the number of samples."""
        return (self._tokens - 1) // self._length

    def digest(self) -> bytes:
        """Return SHA-256 of the ids' type, their number, and all ids as little-endian (32 bytes).

        Neither file names nor borders between files count. Raises DataError if an id is not
        in the vocabulary, or a file changed its size.
        """
        digest = hashlib.sha256(b"tokens %s %d\n" % (self._dtype.name.encode(), self._tokens))
        for start in range(0, self._ends[-1], _CHUNK_BYTES):
            chunk = self._read(start, min(start + _CHUNK_BYTES, self._ends[-1]))
            self._check(chunk, start)
            digest.update(chunk)
        return digest.digest()

    def microbatch(self, sample_ids: Sequence[int]) -> tuple[Buffer, Buffer, int]:
        """Return inputs_BT and targets_BT (int64) and the number of targets, or of samples.

        Raises DataError if an id is not in the vocabulary, or a file changed its size.
        """
        width = self._dtype.itemsize
        windows_BT = np.empty((len(sample_ids), self._length + 1), np.int64)
        for row, sample in enumerate(sample_ids):
            check_id(sample, len(self))
            start = sample * self._length * width
            chunk = self._read(start, start + (self._length + 1) * width)
            windows_BT[row] = self._check(chunk, start)
        weight = len(sample_ids) * (1 if self._weighs_samples else self._length)
        return raw_bytes(windows_BT[:, :-1]), raw_bytes(windows_BT[:, 1:]), weight

    def _read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of all pieces end to end."""
        found = []
        number = bisect_right(self._ends, start) - 1
        while start < stop:
            piece, skip = self._pieces[number], start - self._ends[number]
            size = min(stop - start, piece.size - skip)
            found.append(_read_piece(piece, skip, size))
            start += size
            number += 1
        return b"".join(found)

    def _check(self, chunk: bytes, start: int) -> Array:
        ids: Array = np.frombuffer(chunk, self._dtype)
        if self._vocabulary > np.iinfo(self._dtype).max and self._dtype.kind == "u":
            return ids
        wrong = np.flatnonzero((ids < 0) | (ids >= self._vocabulary))
        if wrong.size:
            place = int(wrong[0])
            raise DataError(
                f"token id {ids[place]} is not in the vocabulary",
                evidence=(
                    f"position {start // self._dtype.itemsize + place} of {self._tokens}"
                    f" in {self._pieces[0].path}",
                    f"data.vocabulary = {self._vocabulary}: ids lie in [0, {self._vocabulary})",
                ),
                hint="set data.vocabulary and data.dtype to what the file was written with",
            )
        return ids


# --- files --------------------------------------------------------------------------------


def _text_pieces(patterns: Sequence[str], data_dir: Path) -> list[Piece]:
    """Return the files of all patterns: in the patterns' order, sorted within one, each once."""
    pieces: dict[Path, Piece] = {}
    for pattern in patterns:
        matches = list(_matches(pattern, data_dir))
        if not matches:
            raise DataError(
                f"no file matches {pattern}",
                evidence=(f"looked for {_expanded(pattern, data_dir)}",),
                hint="check data.files in the manifest, and --data-dir",
            )
        for path in matches:
            pieces.setdefault(path, Piece(path, 0, _size(path)))
    return list(pieces.values())


def _matches(pattern: str, data_dir: Path) -> Iterator[Path]:
    path = _expanded(pattern, data_dir)
    if path.is_file():
        yield path
        return
    own_sources = pattern.startswith(STDLIB)
    depth = len(_expanded(STDLIB, data_dir).parts)
    for match in sorted(map(Path, glob.glob(str(path), recursive=True))):
        skipped = own_sources and _NOT_SOURCES & set(match.parts[depth:])
        if match.is_file() and not skipped:
            yield match


def _expanded(pattern: str, data_dir: Path) -> Path:
    path = Path(pattern.replace(STDLIB, sysconfig.get_path("stdlib"))).expanduser()
    return Path(os.path.normpath(Path.cwd() / data_dir.expanduser() / path))


def _token_piece(data: DataSpec, data_dir: Path) -> tuple[Piece, np.dtype[Any]]:
    """Return where the ids are and their type; a .npy file's header must agree."""
    path = _expanded(data.files[0], data_dir)
    dtype = np.dtype(data.dtype).newbyteorder("<")
    size = _size(path)
    if path.suffix == ".npy":
        return _npy_piece(path, dtype), dtype
    if size % dtype.itemsize:
        raise DataError(
            f"{path} is no array of {dtype.name}",
            evidence=(f"{size} bytes are not a multiple of {dtype.itemsize}",),
            hint="set data.dtype to what the file was written with",
        )
    return Piece(path, 0, size), dtype


def _npy_piece(path: Path, dtype: np.dtype[Any]) -> Piece:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(
            f"{path} is no .npy array", evidence=(str(error),), hint="write it with numpy.save"
        ) from error
    if not isinstance(array, np.memmap) or array.dtype != dtype or array.ndim != 1:
        raise DataError(
            f"{path} is not the array that the manifest says",
            evidence=(
                f"it is {array.dtype.str} with {array.ndim} dimensions",
                f"the manifest says {dtype.str} with 1 dimension",
            ),
            hint="set data.dtype to what the file was written with",
        )
    return Piece(path, array.offset, array.nbytes)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _read_piece(piece: Piece, skip: int, size: int) -> bytes:
    try:
        with piece.path.open("rb") as file:
            file.seek(piece.offset + skip)
            chunk = file.read(size)
    except OSError as error:
        raise _unreadable(piece.path, error) from error
    if len(chunk) != size:
        raise DataError(
            f"{piece.path} became shorter while it was in use",
            evidence=(f"{piece.size} bytes when it was opened, {_size(piece.path)} now",),
            hint="start again with data that stays as it is",
        )
    return chunk


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot read {path}",
        evidence=(error.strerror or str(error),),
        hint="check data.files in the manifest, and --data-dir",
    )
