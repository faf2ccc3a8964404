"""The gradients of a stage: what a replica has accumulated, and what the swarm has reduced.

The rule: an accumulator is written by `accumulate` and emptied by `clear` and `advance`, and by
nothing else; so a reduction can be done again. Nobody reads a reduced gradient that has holes.
"""

from collections.abc import Iterable, Mapping, Sequence
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
    """Flat buffers per bucket that the stage uses: an accumulator, the reduced gradient of the
    step in hand, and that of the step before."""

    def __init__(
        self, buckets: Sequence[Bucket], stage: int, form: Format, device: torch.device
    ) -> None:
        used = [bucket for bucket in buckets if stage in bucket.stages]
        self._form = form
        self._totals = {b.index: _zeros(b.elements, form, device) for b in used}
        elements = {b.index: b.elements for b in used}
        self._reduced, self._committed = _Reduced(elements, form), _Reduced(elements, form)
        self._begun = False
        self.places = {s.name: Place(b.index, s) for b in used for s in b.slots}
        """By the name of the owner of a value: all that the stage uses."""
        self._counted = [Place(b.index, s) for b in used if b.stages[0] == stage for s in b.slots]

    # --- what this replica has accumulated ------------------------------------------------------

    def accumulate(self, gradients: Iterable[tuple[Place, Tensor]]) -> None:
        """Add the gradients of one microbatch, which have been found to be within bounds."""
        for place, gradient in gradients:
            total = self._totals[place.bucket][place.slot.start : place.slot.stop]
            self._form.add(total, gradient.reshape(-1))

    def part(self, bucket: int, start: int, stop: int) -> Buffer:
        """Return elements [start, stop) of an accumulator: a view where it is on the CPU."""
        self._reduced.check_range(bucket, start, stop)
        return encode(self._totals[bucket][start:stop])

    def clear(self) -> None:
        """Empty the accumulators."""
        for total in self._totals.values():
            total.zero_()

    # --- what the swarm has reduced -------------------------------------------------------------

    def begin(self) -> None:
        """Forget what has been reduced of the step in hand."""
        self._reduced.forget()
        self._begun = True

    def reduce(self, bucket: int, start: int, stop: int, parts: Sequence[Buffer | None]) -> Buffer:
        """Sum parts in order into the reduced gradient (None is zero) and return the sum.

        Raises ValueError if a part has another size.
        """
        total = self._reduced.sum(bucket, start, stop, parts)
        self._begun = True
        return total

    def gather(self, bucket: int, start: int, stop: int, shard: Buffer) -> None:
        """Put an owner's sum into the reduced gradient. Raises ValueError for a wrong size."""
        self._reduced.put(bucket, start, stop, shard)
        self._begun = True

    def load(self, buckets: Mapping[int, Buffer]) -> None:
        """Take the whole reduced gradient of the step in hand.

        Raises ValueError for other buckets or sizes than the stage's; then nothing changes."""
        self._reduced.put_all(buckets)
        self._begun = True

    @property
    def whole(self) -> bool:
        """Return whether the reduced gradient of the step in hand is there without holes.

        That of a stage without parameters is, as soon as its reduction has begun."""
        return self._begun and not self._reduced.hole()

    def reduced(self) -> dict[int, Buffer] | None:
        """Return a copy of the reduced gradient of the step in hand, None if it is not whole."""
        return self._reduced.copy() if self.whole else None

    def committed(self) -> dict[int, Buffer] | None:
        """Return a copy of the reduced gradient of the step before, None if it is not whole."""
        return None if self._committed.hole() else self._committed.copy()

    def advance(self) -> None:
        """Go on to the next step: empty the accumulators, keep what has been reduced."""
        self.clear()
        self._reduced, self._committed = self._committed, self._reduced
        self._reduced.forget()
        self._begun = False

    def square_norms(self) -> tuple[float, ...]:
        """Return the squared norm of every tensor whose first stage is this one.

        Raises RuntimeError if the reduced gradient is not whole."""
        self._check_whole()
        return tuple(square_norm(self._reduced.slot(place), self._form) for place in self._counted)

    def updates(self, scale: float, like: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the reduced gradients times `scale`, shaped and typed as the tensors `like`.

        Raises RuntimeError if the reduced gradient is not whole."""
        self._check_whole()
        return {
            name: scaled(self._reduced.slot(self.places[name]), self._form, scale, tensor)
            for name, tensor in like.items()
        }

    def _check_whole(self) -> None:
        if hole := self._reduced.hole():
            raise RuntimeError(hole)


class _Reduced:
    """The reduced gradient of one step, on the CPU, and which elements of it are there."""

    def __init__(self, elements: Mapping[int, int], form: Format) -> None:
        self._elements = elements
        self._form = form
        self._values: dict[int, Tensor] = {}
        self._filled: dict[int, dict[int, int]] = {}

    def sum(self, bucket: int, start: int, stop: int, parts: Sequence[Buffer | None]) -> Buffer:
        target = self._range(bucket, start, stop)
        values = target.numpy()
        given = [self._decoded(part, stop - start) for part in parts if part is not None]
        if given:
            np.copyto(values, given[0])
        else:
            values.fill(0)
        for part in given[1:]:
            np.add(values, part, out=values)
        self._filled.setdefault(bucket, {})[start] = stop
        return encode(target)

    def put(self, bucket: int, start: int, stop: int, shard: Buffer) -> None:
        np.copyto(self._range(bucket, start, stop).numpy(), self._decoded(shard, stop - start))
        self._filled.setdefault(bucket, {})[start] = stop

    def put_all(self, buckets: Mapping[int, Buffer]) -> None:
        if buckets.keys() != self._elements.keys():
            raise ValueError(f"buckets {sorted(buckets)} instead of {sorted(self._elements)}")
        for bucket, elements in self._elements.items():
            self._decoded(buckets[bucket], elements)
        for bucket, elements in self._elements.items():
            self.put(bucket, 0, elements, buckets[bucket])

    def copy(self) -> dict[int, Buffer]:
        return {
            bucket: encode(self._range(bucket, 0, elements).clone())
            for bucket, elements in self._elements.items()
        }

    def slot(self, place: Place) -> Tensor:
        return self._range(place.bucket, place.slot.start, place.slot.stop)

    def forget(self) -> None:
        self._filled.clear()

    def hole(self) -> str:
        """Say where the first hole is; "" if there is none."""
        for bucket, elements in self._elements.items():
            end = 0
            for start, stop in sorted(self._filled.get(bucket, {}).items()):
                if start <= end:
                    end = max(end, stop)
            if end < elements:
                return f"bucket {bucket} is reduced up to {end} of {elements} only"
        return ""

    def check_range(self, bucket: int, start: int, stop: int) -> None:
        elements = self._elements.get(bucket)
        if elements is None or not 0 <= start <= stop <= elements:
            raise ValueError(f"no elements [{start}, {stop}) of bucket {bucket} in this stage")

    def _range(self, bucket: int, start: int, stop: int) -> Tensor:
        self.check_range(bucket, start, stop)
        if bucket not in self._values:
            cpu = torch.device("cpu")
            self._values[bucket] = _zeros(self._elements[bucket], self._form, cpu)
        return self._values[bucket][start:stop]

    def _decoded(self, data: Buffer, count: int) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
        dtype = np.dtype(np.int64 if self._form.dtype is torch.int64 else np.float32)
        if data.nbytes != count * dtype.itemsize:
            raise ValueError(f"{data.nbytes} bytes for {count} elements of {dtype}")
        return np.frombuffer(data, dtype=dtype)


def _zeros(elements: int, form: Format, device: torch.device) -> Tensor:
    return torch.zeros(elements, dtype=form.dtype, device=device)
