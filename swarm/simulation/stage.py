"""One stage of the integer model, in the calling task: what every executor's method does.

The rule: whatever goes in and whatever comes out is compared with what a plain loop computes, at
once, so that a wrong version, a lost index or a double one is reported where it happens.
"""

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from protocol.messages import Microbatch, Totals
from swarm.core.ledger import DoubleCount, Ledger
from swarm.core.model import Profile
from swarm.core.reduction import Bucket, Slot, buckets
from swarm.ports import Buffer, Outcome, Turn
from swarm.simulation.physics import HASH_BYTES, MEMORY_BYTES, Physics, Tensor, hollow
from swarm.simulation.reference import Reference

ITEM_BYTES = 8
"""Of an element that means something."""


class SimStage:
    """What `ports.StageExecutor` says, without its time: every call is one of its tasks."""

    def __init__(
        self,
        physics: Physics,
        reference: Reference,
        name: str,
        violate: Callable[[str, str], None],
        speed: float,
        *,
        memory_bytes: int = MEMORY_BYTES,
        checked: bool = True,
    ) -> None:
        """`violate(rule, text)` is called for what must not be, with `name` in the text.

        What is not `checked` is not compared with the plain loop, which then computes nothing."""
        self._physics = physics
        self._memory_bytes = memory_bytes
        self._checked = checked
        self._reference = reference
        self._name = name
        self._violate = violate
        self._speed = speed
        self._first = self._last = 0
        self._buckets: tuple[Bucket, ...] = ()
        self._counted: tuple[Bucket, ...] = ()
        self._tensors: dict[str, Tensor] = {}
        self._places: dict[int, list[int]] = {}
        """By bucket: which elements mean something; sums and reduced gradients are of these."""
        self._sums: dict[int, list[int]] = {}
        self._reduced: dict[int, list[int | None]] = {}
        self._shards: dict[int, set[tuple[int, int]]] = {}
        """By bucket: which ranges of elements have been reduced."""
        self._before: tuple[int, dict[int, Buffer]] | None = None
        self._passes: dict[Microbatch, list[bytes]] = {}
        self.ledger = Ledger(physics.training.microbatches_per_step)
        self.version = 0

    @property
    def layer_count(self) -> int:
        """Return how many layers are held."""
        return self._last - self._first

    @property
    def forward_seconds(self) -> float:
        """Return seconds of a forward at speed 1."""
        return self._physics.forward_seconds(self._first, self._last)

    @property
    def backward_seconds(self) -> float:
        """Return seconds of a backward at speed 1."""
        return self._physics.backward_seconds(self._first, self._last)

    @property
    def update_seconds(self) -> float:
        """Return seconds of the optimiser's step at speed 1."""
        return self._physics.update_seconds(self._first, self._last)

    # --- what is held ---------------------------------------------------------------------

    def profile(self) -> Profile:
        """Return the profile of a peer of this speed."""
        return self._physics.profile(self._speed, self._memory_bytes)

    def build(self, stages: Sequence[tuple[int, int]], stage: int) -> bytes:
        """Hold the layers of a stage at version 0."""
        first, last = stages[stage]
        self._hold(stages, stage, 0, self._physics.initial(first, last))
        exported = (self._physics.exported(layer, self._tensors) for layer in self._layers)
        return hashlib.sha256(b"".join(exported)).digest()

    def load(
        self,
        stages: Sequence[tuple[int, int]],
        stage: int,
        version: int,
        layers: Mapping[int, Buffer],
    ) -> None:
        """Hold the layers of a stage as they were at `version`."""
        first, last = stages[stage]
        self._let_go()
        if sorted(layers) != list(range(first, last)):
            raise ValueError(f"layers {sorted(layers)} for stage [{first}, {last})")
        tensors: dict[str, Tensor] = {}
        for layer in range(first, last):
            found = self._physics.parse_state(layer, version, bytes(layers[layer]))
            for name, tensor in found.items():
                if tensors.setdefault(name, tensor) != tensor:
                    raise ValueError(f"layers disagree about {name}")
        self._hold(stages, stage, version, tensors)
        self._check_weights("load")

    def snapshot(self, version: int) -> dict[int, Buffer] | None:
        """Return the state of every held layer; None if another version is held."""
        if not self._layers or version != self.version:
            return None
        return {
            layer: memoryview(self._physics.state(layer, self.version, self._tensors))
            for layer in self._layers
        }

    def layer_state(self, layer: int) -> Buffer:
        """Return a held layer's weights as they are exported."""
        if layer not in self._layers:
            raise ValueError(f"layer {layer} is not held")
        return memoryview(self._physics.exported(layer, self._tensors))

    def settle(self) -> bool:
        """Drop activations; return whether the reduced gradient in hand is whole."""
        self._passes.clear()
        return bool(self._layers) and self._is_whole()

    def discard(self) -> None:
        """Empty accumulator and ledger."""
        self._empty()

    def gradient(self, step: int) -> dict[int, Buffer] | None:
        """Return the reduced gradient of a step by bucket, if it is here and whole."""
        if self._layers and step == self.version and self._is_whole():
            return self._whole_gradient()
        if self._before is not None and self._before[0] == step:
            return dict(self._before[1])
        return None

    def load_gradient(self, step: int, buckets: Mapping[int, Buffer]) -> None:
        """Take the reduced gradient of the step in hand."""
        wanted = {bucket.index: self._gradient_bytes(bucket) for bucket in self._buckets}
        given = {index: len(data) for index, data in buckets.items()}
        if step != self.version or given != wanted:
            raise ValueError(f"gradient {given} of step {step} at {self.version}, {wanted}")
        for bucket in self._buckets:
            places = self._places[bucket.index]
            self._reduced[bucket.index] = list(_unpack(buckets[bucket.index], len(places)))
            self._shards[bucket.index] = {(0, bucket.elements)}

    # --- microbatches ----------------------------------------------------------------------

    def forward(self, mb: Microbatch, inputs: Buffer, keep: bool = True) -> Outcome:
        """Run the layers."""
        self._check_microbatch(mb)
        passed, bad = self._run(mb, self._input(inputs))
        if bad:
            return Outcome(None, bad)
        if keep:
            self._passes[mb] = passed
        return Outcome(self._sent_on(passed[-1], self._last))

    def backward(
        self, mb: Microbatch, gradient: Buffer, weight: int, accumulate: bool = True
    ) -> Outcome:
        """Differentiate, accumulate, enter the index into the ledger."""
        self._check_microbatch(mb)
        if mb not in self._passes:
            raise ValueError(f"no forward of {mb} is waiting for its backward")
        self._refuse_double(mb, accumulate)
        passed = self._passes.pop(mb)
        below = self._differentiate(mb, passed, bytes(gradient[:HASH_BYTES]), accumulate)
        self._enter(mb, weight, accumulate)
        return Outcome(below)

    def turn(
        self,
        mb: Microbatch,
        inputs: Buffer,
        targets: Buffer,
        weight: int,
        accumulate: bool = True,
    ) -> Turn:
        """Forward, loss and backward of the last stage."""
        self._check_microbatch(mb)
        self._refuse_double(mb, accumulate)
        passed, bad = self._run(mb, self._input(inputs))
        if bad:
            self._enter(mb, weight, accumulate, nonfinite=bad)
            return Turn(None, bad)
        meant = bytes(targets[: self._physics.sample_bytes])
        loss_sum, gradient = self._physics.loss(passed[-1], meant)
        below = self._differentiate(mb, passed, gradient, accumulate)
        self._enter(mb, weight, accumulate, loss_sum=loss_sum)
        return Turn(below)

    def flag(self, mb: Microbatch, layer: str, weight: int, accumulate: bool = True) -> None:
        """Enter a non-finite microbatch."""
        self._check_microbatch(mb)
        self._refuse_double(mb, accumulate)
        self._passes.pop(mb, None)
        self._enter(mb, weight, accumulate, nonfinite=layer)

    # --- the end of a step -----------------------------------------------------------------

    def part(self, bucket: int, start: int, stop: int) -> Buffer:
        """Return a part of an accumulator."""
        first, last = self._within(bucket, start, stop)
        return self._packed(self._sums[bucket][first:last], start, stop)

    def begin_reduction(self) -> None:
        """Forget what has been reduced of the step in hand."""
        self._forget_reduced()

    def reduce(self, bucket: int, start: int, stop: int, parts: Sequence[Buffer | None]) -> Buffer:
        """Sum parts into the reduced gradient."""
        first, last = self._within(bucket, start, stop)
        given = [
            self._unpacked(part, start, stop, last - first) for part in parts if part is not None
        ]
        total = [sum(values) for values in zip(*given, strict=True)] or [0] * (last - first)
        self._reduced[bucket][first:last] = total
        self._shards[bucket].add((start, stop))
        return self._packed(total, start, stop)

    def gather(self, bucket: int, start: int, stop: int, shard: Buffer) -> None:
        """Put an owner's sum into the reduced gradient."""
        first, last = self._within(bucket, start, stop)
        self._reduced[bucket][first:last] = self._unpacked(shard, start, stop, last - first)
        self._shards[bucket].add((start, stop))

    def square_norms(self) -> tuple[float, ...]:
        """Return the squared norms that this stage counts. Raises RuntimeError."""
        self._check_whole()
        return tuple(
            float(sum(value * value for value in self._slot(bucket, slot)))
            for bucket in self._counted
            for slot in bucket.slots
        )

    def commit(self, step: int, totals: Totals) -> None:
        """Apply or skip the step, and compare with the plain loop."""
        if step != self.version:
            raise ValueError(f"commit of step {step} at version {self.version}")
        if totals.verdict == "halt":
            return
        if self._passes:
            kept = ", ".join(str(mb) for mb in sorted(self._passes))
            self._violate("A5", f"{self._name} commits step {step}: activations are left of {kept}")
        if totals.verdict == "apply":
            self._check_whole()
            self._check_sums(step)
            for bucket in self._buckets:
                for slot in bucket.slots:
                    total = self._slot(bucket, slot)
                    old = self._tensors[slot.name]
                    self._tensors[slot.name] = self._physics.update(step, old, total, totals)
        self._before = (step, self._whole_gradient()) if self._is_whole() else None
        self._forget_reduced()
        self._passes.clear()
        self._empty()
        self.version = step + 1
        self._check_weights("commit")

    # --- inside ------------------------------------------------------------------------------

    @property
    def _layers(self) -> range:
        return range(self._first, self._last)

    def _hold(
        self,
        stages: Sequence[tuple[int, int]],
        stage: int,
        version: int,
        tensors: dict[str, Tensor],
    ) -> None:
        self._first, self._last = stages[stage]
        every = buckets(self._physics.shape, stages)
        self._buckets = tuple(each for each in every if stage in each.stages)
        self._counted = tuple(each for each in self._buckets if each.stages[0] == stage)
        self._tensors = tensors
        self._places = {
            bucket.index: [
                slot.start + place
                for slot in bucket.slots
                for place in self._physics.spread(slot.stop - slot.start)
            ]
            for bucket in self._buckets
        }
        self.version = version
        self._before = None
        self._passes.clear()
        self._forget_reduced()
        self._empty()

    def _let_go(self) -> None:
        self._first = self._last = 0
        self._buckets = self._counted = ()
        self._places = {}
        self._tensors = {}
        self._before = None
        self._passes.clear()
        self._forget_reduced()
        self._empty()

    def _input(self, inputs: Buffer) -> bytes:
        """Return what an input means."""
        return bytes(inputs[: HASH_BYTES if self._first else self._physics.sample_bytes])

    def _sent_on(self, meaning: bytes, boundary: int) -> Buffer:
        """Return what goes over the boundary before layer `boundary`, or its gradient."""
        return hollow(meaning, self._physics.shape.layers[boundary - 1].output.nbytes)

    def _run(self, mb: Microbatch, inputs: bytes) -> tuple[list[bytes], str]:
        """Return what goes into each layer and what the last one gives, or the bad layer."""
        passed = self._reference.passed(mb) if self._checked else None
        if passed is not None and passed.inputs[self._first] != inputs:
            self._violate("A5", f"{self._name} mb={mb}: wrong input of layer {self._first}")
        values = [inputs]
        for layer in self._layers:
            if not self._physics.is_finite(mb, layer):
                return values, self._physics.shape.layers[layer].name
            values.append(self._physics.forward(layer, self._tensors, values[-1]))
        return values, ""

    def _differentiate(
        self, mb: Microbatch, passed: list[bytes], gradient: bytes, accumulate: bool
    ) -> Buffer | None:
        truth = self._reference.passed(mb) if self._checked else None
        if truth is not None and truth.gradients[self._last] != gradient:
            self._violate("A5", f"{self._name} mb={mb}: wrong gradient at {self._last}")
        places = {slot.name: (b.index, slot) for b in self._buckets for slot in b.slots}
        where = self._places
        for layer in reversed(self._layers):
            gradient, found = self._physics.backward(
                layer, self._tensors, passed[layer - self._first], gradient
            )
            for name, values in found if accumulate else ():
                bucket, slot = places[name]
                sums, first = self._sums[bucket], bisect_left(where[bucket], slot.start)
                for offset, value in enumerate(values):
                    sums[first + offset] += value
        return self._sent_on(gradient, self._first) if self._first > 0 else None

    def _check_microbatch(self, mb: Microbatch) -> None:
        if not self._layers:
            raise ValueError("no stage is held")
        if mb.step != self.version:
            raise ValueError(f"microbatch {mb} at version {self.version}")

    def _refuse_double(self, mb: Microbatch, accumulate: bool) -> None:
        if accumulate and mb.index in self.ledger:
            raise DoubleCount(f"index {mb.index} is in the ledger already")

    def _enter(
        self,
        mb: Microbatch,
        weight: int,
        accumulate: bool,
        *,
        loss_sum: float = 0.0,
        nonfinite: str = "",
    ) -> None:
        if accumulate:
            self.ledger.add(mb.index, weight, loss_sum=loss_sum, nonfinite=nonfinite)

    def _empty(self) -> None:
        self._sums = {bucket: [0] * len(places) for bucket, places in self._places.items()}
        self.ledger.clear()

    def _forget_reduced(self) -> None:
        self._reduced = {bucket: [None] * len(places) for bucket, places in self._places.items()}
        self._shards = {bucket: set() for bucket in self._places}

    def _is_whole(self) -> bool:
        return all(_cover(self._shards[each.index], each.elements) for each in self._buckets)

    def _check_whole(self) -> None:
        if not self._is_whole():
            raise RuntimeError(f"the reduced gradient of step {self.version} has holes")

    def _within(self, bucket: int, start: int, stop: int) -> tuple[int, int]:
        """Return where in `_places` the elements [start, stop) of a bucket are."""
        places = self._places[bucket]
        return bisect_left(places, start), bisect_left(places, stop)

    def _slot(self, bucket: Bucket, slot: Slot) -> list[int]:
        first, last = self._within(bucket.index, slot.start, slot.stop)
        return [value for value in self._reduced[bucket.index][first:last] if value is not None]

    def _packed(self, values: Sequence[int | None], start: int, stop: int) -> Buffer:
        known = [value for value in values if value is not None]
        return hollow(_pack(known), (stop - start) * self._physics.item_bytes)

    def _unpacked(self, data: Buffer, start: int, stop: int, count: int) -> Sequence[int]:
        if len(data) != (stop - start) * self._physics.item_bytes:
            raise ValueError(f"{len(data)} bytes for elements [{start}, {stop})")
        return _unpack(data, count)

    def _gradient_bytes(self, bucket: Bucket) -> int:
        """Return how many bytes a whole gradient has when it is handed on."""
        size = bucket.elements * self._physics.item_bytes
        return len(self._physics.scaled(bytes(ITEM_BYTES * len(self._places[bucket.index])), size))

    def _whole_gradient(self) -> dict[int, Buffer]:
        found: dict[int, Buffer] = {}
        for bucket in self._buckets:
            values = [value for value in self._reduced[bucket.index] if value is not None]
            found[bucket.index] = hollow(_pack(values), self._gradient_bytes(bucket))
        return found

    # --- compared with the plain loop --------------------------------------------------------

    def _check_sums(self, step: int) -> None:
        if not self._checked:
            return
        truth = self._reference.summed(step)
        for bucket in self._buckets:
            for slot in bucket.slots:
                found = self._slot(bucket, slot)
                if found != truth[slot.name]:
                    why = self._explain(step, slot.name, found[0] - truth[slot.name][0])
                    self._violate("A5", f"{self._name} commits step {step}: {slot.name} {why}")

    def _explain(self, step: int, name: str, difference: int) -> str:
        """Return which indices make the difference, if it is only one or two."""
        terms = []
        for index in range(self._physics.training.microbatches_per_step):
            passed = self._reference.passed(Microbatch(step, index))
            if passed is not None:
                gradient = passed.of_tensors[name][0]
                terms += [(f"has {index} twice", gradient), (f"lacks {index}", -gradient)]
        for text, value in terms:
            if value == difference:
                return text
        for text, value in terms:
            for other, more in terms:
                if value + more == difference and text != other:
                    return f"{text}, {other}"
        return f"is off by {difference}"

    def _check_weights(self, when: str) -> None:
        if not self._checked:
            return
        truth = self._reference.at(self.version)
        for name, tensor in self._tensors.items():
            if tensor != truth[name]:
                self._violate(
                    "A5", f"{self._name} {when}: {name} differs at version {self.version}"
                )


def _cover(ranges: set[tuple[int, int]], elements: int) -> bool:
    """Return whether ranges [start, stop) leave none of so many elements out."""
    end = 0
    for start, stop in sorted(ranges):
        if start > end:
            return False
        end = max(end, stop)
    return end >= elements


def _pack(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def _unpack(data: Buffer, count: int) -> Sequence[int]:
    return struct.unpack(f"<{count}q", data[: ITEM_BYTES * count])
