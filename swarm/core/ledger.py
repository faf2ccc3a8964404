"""The set of microbatch indices whose gradients are in an accumulator.

The rule: an index enters once. Whoever adds a gradient adds the index in the same breath.
"""

import math
from collections.abc import Iterable

import numpy as np

from protocol.messages import Flag


class DoubleCount(Exception):
    """An index was offered to a ledger that has it: a bug, or a peer that repeats itself."""


class Ledger:
    """Indices of one step in one replica's accumulator, with their weights and losses."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self._weights: dict[int, int] = {}
        self._losses: dict[int, float] = {}
        self._flags: dict[int, str] = {}
        self._bits = bytearray((microbatches + 7) // 8)

    def __contains__(self, index: int) -> bool:
        return index in self._weights

    def __len__(self) -> int:
        return len(self._weights)

    def add(self, index: int, weight: int, *, loss_sum: float = 0.0, nonfinite: str = "") -> None:
        """Enter `index`. Raises DoubleCount if it is there, ValueError if it is no index."""
        if not 0 <= index < self.microbatches:
            raise ValueError(f"index {index} is not in 0..{self.microbatches - 1}")
        if index in self._weights:
            raise DoubleCount(f"index {index} is in the ledger already")
        self._weights[index] = weight
        self._bits[index // 8] |= 1 << index % 8
        if nonfinite:
            self._flags[index] = nonfinite
        else:
            self._losses[index] = loss_sum

    def copy(self) -> "Ledger":
        """Return a ledger with the same entries that changes on its own."""
        other = Ledger(self.microbatches)
        other._weights.update(self._weights)
        other._losses.update(self._losses)
        other._flags.update(self._flags)
        other._bits[:] = self._bits
        return other

    def clear(self) -> None:
        """Empty the ledger, as its accumulator is emptied."""
        self._weights.clear()
        self._losses.clear()
        self._flags.clear()
        self._bits = bytearray(len(self._bits))

    @property
    def bitmap(self) -> bytes:
        """Return the indices as a bitmap: bit i % 8 of byte i // 8 is index i."""
        return bytes(self._bits)

    @property
    def weight(self) -> int:
        """Return the sum of the weights of all indices, flagged ones included."""
        return sum(self._weights.values())

    @property
    def loss_sum(self) -> float:
        """Return the exactly rounded sum of the losses: it does not depend on order."""
        try:
            return math.fsum(self._losses.values())
        except OverflowError:
            return math.inf

    @property
    def flags(self) -> tuple[Flag, ...]:
        """Return the flagged indices with the layer that noticed, sorted."""
        return tuple(Flag(index, self._flags[index]) for index in sorted(self._flags))


def bitmap_of(indices: Iterable[int], microbatches: int) -> bytes:
    """Return a bitmap of `microbatches` bits with the given indices set."""
    bits = bytearray((microbatches + 7) // 8)
    for index in indices:
        bits[index // 8] |= 1 << index % 8
    return bytes(bits)


def indices_of(bitmap: bytes, microbatches: int) -> tuple[int, ...]:
    """Return the indices set in a bitmap, ascending.

    Raises ValueError if its length or a bit beyond `microbatches` is wrong.
    """
    if len(bitmap) != (microbatches + 7) // 8:
        raise ValueError(f"bitmap of {len(bitmap)} bytes for {microbatches} microbatches")
    bits = np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), bitorder="little")
    indices = tuple(np.flatnonzero(bits).tolist())
    if indices and indices[-1] >= microbatches:
        raise ValueError(f"bitmap has index {indices[-1]} of {microbatches} microbatches")
    return indices


def mask_of(bitmap: bytes) -> int:
    """Return a bitmap as a number whose bit i is index i."""
    return int.from_bytes(bitmap, "little")
