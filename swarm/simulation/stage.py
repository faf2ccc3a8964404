"""One stage of the integer model, in the calling task: what every executor's method does.

The rule: whatever goes in and whatever comes out is compared with what a plain loop computes, at
once, so that a wrong version, a lost index or a double one is reported where it happens.
"""

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence

from protocol.messages import Microbatch, Totals
from swarm.core.ledger import DoubleCount, Ledger
from swarm.core.model import Profile
from swarm.core.reduction import Bucket, buckets
from swarm.ports import Buffer, Outcome, Turn
from swarm.simulation.physics import Physics, Reference, Tensor

ITEM_BYTES = 8


class SimStage:
    """What `ports.StageExecutor` says, without its time: every call is one of its tasks."""

    def __init__(
        self,
        physics: Physics,
        reference: Reference,
        name: str,
        violate: Callable[[str, str], None],
        speed: float,
    ) -> None:
        """`violate(rule, text)` is called for what must not be, with `name` in the text."""
        self._physics = physics
        self._reference = reference
        self._name = name
        self._violate = violate
        self._speed = speed
        self._first = self._last = 0
        self._buckets: tuple[Bucket, ...] = ()
        self._counted: tuple[Bucket, ...] = ()
        self._tensors: dict[str, Tensor] = {}
        self._sums: dict[int, list[int]] = {}
        self._reduced: dict[int, list[int | None]] = {}
        self._before: tuple[int, dict[int, Buffer]] | None = None
        self._passes: dict[Microbatch, list[bytes]] = {}
        self.ledger = Ledger(physics.training.microbatches_per_step)
        self.version = 0

    @property
    def layer_count(self) -> int:
        """Return how many layers are held."""
        return self._last - self._first

    # --- what is held ---------------------------------------------------------------------

    def profile(self) -> Profile:
        """Return the profile of a peer of this speed."""
        return self._physics.profile(self._speed)

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
        wanted = {bucket.index: bucket.elements for bucket in self._buckets}
        given = {index: len(data) // ITEM_BYTES for index, data in buckets.items()}
        if step != self.version or given != wanted:
            raise ValueError(f"gradient {given} of step {step} at {self.version}, {wanted}")
        for index, data in buckets.items():
            self._reduced[index] = list(_unpack(data))

    # --- microbatches ----------------------------------------------------------------------

    def forward(self, mb: Microbatch, inputs: Buffer, keep: bool = True) -> Outcome:
        """Run the layers."""
        self._check_microbatch(mb)
        passed, bad = self._run(mb, bytes(inputs))
        if bad:
            return Outcome(None, bad)
        if keep:
            self._passes[mb] = passed
        return Outcome(memoryview(passed[-1]))

    def backward(
        self, mb: Microbatch, gradient: Buffer, weight: int, accumulate: bool = True
    ) -> Outcome:
        """Differentiate, accumulate, enter the index into the ledger."""
        self._check_microbatch(mb)
        if mb not in self._passes:
            raise ValueError(f"no forward of {mb} is waiting for its backward")
        self._refuse_double(mb, accumulate)
        passed = self._passes.pop(mb)
        below = self._differentiate(mb, passed, bytes(gradient), accumulate)
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
        passed, bad = self._run(mb, bytes(inputs))
        if bad:
            self._enter(mb, weight, accumulate, nonfinite=bad)
            return Turn(None, bad)
        loss_sum, gradient = self._physics.loss(passed[-1], bytes(targets))
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
        return _pack(self._sums[bucket][start:stop])

    def begin_reduction(self) -> None:
        """Forget what has been reduced of the step in hand."""
        self._forget_reduced()

    def reduce(self, bucket: int, start: int, stop: int, parts: Sequence[Buffer | None]) -> Buffer:
        """Sum parts into the reduced gradient."""
        given = [_unpack(part) for part in parts if part is not None]
        if any(len(each) != stop - start for each in given):
            raise ValueError(f"a part is not of {stop - start} elements")
        total = [sum(values) for values in zip(*given, strict=True)] or [0] * (stop - start)
        self._reduced[bucket][start:stop] = total
        return _pack(total)

    def gather(self, bucket: int, start: int, stop: int, shard: Buffer) -> None:
        """Put an owner's sum into the reduced gradient."""
        values = _unpack(shard)
        if len(values) != stop - start:
            raise ValueError(f"{len(values)} values for elements [{start}, {stop})")
        self._reduced[bucket][start:stop] = values

    def square_norms(self) -> tuple[float, ...]:
        """Return the squared norms that this stage counts. Raises RuntimeError."""
        self._check_whole()
        return tuple(
            float(sum(value * value for value in self._slot(bucket, slot.start, slot.stop)))
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
                    total = self._slot(bucket, slot.start, slot.stop)
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
        self.version = version
        self._before = None
        self._passes.clear()
        self._forget_reduced()
        self._empty()

    def _let_go(self) -> None:
        self._first = self._last = 0
        self._buckets = self._counted = ()
        self._tensors = {}
        self._before = None
        self._passes.clear()
        self._forget_reduced()
        self._empty()

    def _run(self, mb: Microbatch, inputs: bytes) -> tuple[list[bytes], str]:
        """Return what goes into each layer and what the last one gives, or the bad layer."""
        passed = self._reference.passed(mb)
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
        truth = self._reference.passed(mb)
        if truth is not None and truth.gradients[self._last] != gradient:
            self._violate("A5", f"{self._name} mb={mb}: wrong gradient at {self._last}")
        places = {slot.name: (b.index, slot) for b in self._buckets for slot in b.slots}
        for layer in reversed(self._layers):
            gradient, found = self._physics.backward(
                layer, self._tensors, passed[layer - self._first], gradient
            )
            for name, values in found if accumulate else ():
                bucket, slot = places[name]
                sums = self._sums[bucket]
                for offset, value in enumerate(values):
                    sums[slot.start + offset] += value
        return memoryview(gradient) if self._first > 0 else None

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
        self._sums = {bucket.index: [0] * bucket.elements for bucket in self._buckets}
        self.ledger.clear()

    def _forget_reduced(self) -> None:
        self._reduced = {bucket.index: [None] * bucket.elements for bucket in self._buckets}

    def _is_whole(self) -> bool:
        return all(value is not None for values in self._reduced.values() for value in values)

    def _check_whole(self) -> None:
        if not self._is_whole():
            raise RuntimeError(f"the reduced gradient of step {self.version} has holes")

    def _slot(self, bucket: Bucket, start: int, stop: int) -> list[int]:
        values = self._reduced[bucket.index][start:stop]
        return [value for value in values if value is not None]

    def _whole_gradient(self) -> dict[int, Buffer]:
        return {b.index: _pack(self._slot(b, 0, b.elements)) for b in self._buckets}

    # --- compared with the plain loop --------------------------------------------------------

    def _check_sums(self, step: int) -> None:
        truth = self._reference.summed(step)
        for bucket in self._buckets:
            for slot in bucket.slots:
                found = self._slot(bucket, slot.start, slot.stop)
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
        truth = self._reference.at(self.version)
        for name, tensor in self._tensors.items():
            if tensor != truth[name]:
                self._violate(
                    "A5", f"{self._name} {when}: {name} differs at version {self.version}"
                )


def _pack(values: Sequence[int]) -> Buffer:
    return memoryview(struct.pack(f"<{len(values)}q", *values))


def _unpack(data: Buffer) -> Sequence[int]:
    return struct.unpack(f"<{len(data) // ITEM_BYTES}q", data)
