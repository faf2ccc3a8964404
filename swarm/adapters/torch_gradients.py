"""The gradients of a stage: what a replica has accumulated, and what the swarm has reduced.

The rule: an accumulator is written by `accumulate` and emptied by `clear`, and by nothing else;
so a reduction can be done again. Nobody reads a reduced gradient that has holes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarm.adapters.torch_batches import encode
from swarm.adapters.torch_numerics import Format, scaled, square_norm
from swarm.core.reduction import Bucket, Slot
from swarm.ports import Buffer


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's gradient lies."""

    bucket: int
    slot: Slot


class Gradients:
    """Flat buffers, one accumulator and one reduced gradient per bucket that the stage uses."""

    def __init__(
        self, buckets: Sequence[Bucket], stage: int, form: Format, device: torch.device
    ) -> None:
        used = [bucket for bucket in buckets if stage in bucket.stages]
        self._form = form
        self._totals = {b.index: _zeros(b.elements, form, device) for b in used}
        self._elements = {b.index: b.elements for b in used}
        self._reduced: dict[int, Tensor] = {}
        self._filled: dict[int, dict[int, int]] = {}
        self.places = {s.name: Place(b.index, s) for b in used for s in b.slots}
        """By the name of the owner of a value: all that the stage uses."""
        self._counted = [Place(b.index, s) for b in used if b.stages[0] == stage for s in b.slots]

    def accumulate(self, gradients: Iterable[tuple[Place, Tensor]]) -> None:
        """Add the gradients of one microbatch, which have been found to be within bounds."""
        for place, gradient in gradients:
            total = self._totals[place.bucket][place.slot.start : place.slot.stop]
            self._form.add(total, gradient.reshape(-1))

    def part(self, bucket: int, start: int, stop: int) -> Buffer:
        """Return elements [start, stop) of an accumulator: a view where it is on the CPU."""
        self._check_range(bucket, start, stop)
        return encode(self._totals[bucket][start:stop])

    def reduce(self, bucket: int, start: int, stop: int, parts: Sequence[Buffer | None]) -> Buffer:
        """Sum parts in order into the reduced gradient (None is zero) and return the sum.

        Raises ValueError if a part has another size.
        """
        target = self._range(bucket, start, stop)
        values = target.numpy()
        given = [self._values(part, stop - start) for part in parts if part is not None]
        if given:
            np.copyto(values, given[0])
        else:
            values.fill(0)
        for part in given[1:]:
            np.add(values, part, out=values)
        self._filled.setdefault(bucket, {})[start] = stop
        return encode(target)

    def gather(self, bucket: int, start: int, stop: int, shard: Buffer) -> None:
        """Put an owner's sum into the reduced gradient. Raises ValueError for a wrong size."""
        np.copyto(self._range(bucket, start, stop).numpy(), self._values(shard, stop - start))
        self._filled.setdefault(bucket, {})[start] = stop

    def square_norms(self) -> tuple[float, ...]:
        """Return the squared norm of every tensor whose first stage is this one."""
        self._check_whole()
        return tuple(square_norm(self._reduced_slot(place), self._form) for place in self._counted)

    def updates(self, scale: float, like: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the reduced gradients times `scale`, shaped and typed as the tensors `like`."""
        self._check_whole()
        return {
            name: scaled(self._reduced_slot(self.places[name]), self._form, scale, tensor)
            for name, tensor in like.items()
        }

    def clear(self) -> None:
        """Empty the accumulators and forget which shards have been reduced."""
        for total in self._totals.values():
            total.zero_()
        self._filled.clear()

    def _reduced_slot(self, place: Place) -> Tensor:
        return self._reduced[place.bucket][place.slot.start : place.slot.stop]

    def _range(self, bucket: int, start: int, stop: int) -> Tensor:
        self._check_range(bucket, start, stop)
        if bucket not in self._reduced:
            cpu = torch.device("cpu")
            self._reduced[bucket] = _zeros(self._elements[bucket], self._form, cpu)
        return self._reduced[bucket][start:stop]

    def _check_range(self, bucket: int, start: int, stop: int) -> None:
        elements = self._elements.get(bucket)
        if elements is None or not 0 <= start <= stop <= elements:
            raise ValueError(f"no elements [{start}, {stop}) of bucket {bucket} in this stage")

    def _values(self, data: Buffer, count: int) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
        dtype = np.dtype(np.int64 if self._form.dtype is torch.int64 else np.float32)
        if data.nbytes != count * dtype.itemsize:
            raise ValueError(f"{data.nbytes} bytes for {count} elements of {dtype}")
        return np.frombuffer(data, dtype=dtype)

    def _check_whole(self) -> None:
        for bucket, elements in self._elements.items():
            end = 0
            for start, stop in sorted(self._filled.get(bucket, {}).items()):
                if start <= end:
                    end = max(end, stop)
            if end < elements:
                raise RuntimeError(f"bucket {bucket} is reduced up to {end} of {elements} only")


def _zeros(elements: int, form: Format, device: torch.device) -> Tensor:
    return torch.zeros(elements, dtype=form.dtype, device=device)
