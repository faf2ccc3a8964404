"""A model of integers: every mistake in training changes them, and no rounding hides it.

Activations and their gradients are hashes chained along the layers, so that a layer of another
version, another sample or another route is noticed. A microbatch's gradient of a tensor is a few
integers of the same hash; their sum does not depend on order. The update mixes weights,
momentum, sum and totals, and wraps at 64 bits. The rule: `Reference` trains by a plain loop that
knows nothing of stages, replicas or plans.
"""

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol.messages import Flag, Microbatch, Totals
from protocol.records import (
    CheckpointSpec,
    DataSpec,
    ExecutionSpec,
    LayerProfile,
    ModelSpec,
    SlicingSpec,
    TensorSpec,
    Training,
)
from swarm.core.dataorder import sample_ids
from swarm.core.model import LayerShape, ModelShape, Profile, TensorUse

HASH_BYTES = 32
GRADIENT_BOUND = 1 << 38
SAMPLES = 64
NUMERICS = "integers"
MEMORY_BYTES = 1 << 40
FORWARD_SECONDS, BACKWARD_SECONDS = 0.01, 0.02
"""Of one layer on a peer of speed 1, in virtual time."""

Values = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """State of one parameter: what is exported, and what only the optimiser needs."""

    weights: Values
    momentum: Values


@dataclass(frozen=True)
class Physics:
    """What is trained, and how many integers it has."""

    training: Training
    layers: int = 6
    elements: int = 3
    tied: bool = False
    """Whether the last layer uses the first one's tensor too."""
    nonfinite: frozenset[tuple[int, int, int]] = frozenset()
    """(step, index, layer) whose forward is not finite."""
    shape: ModelShape = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", self._shape())

    def profile(self, speed: float = 1.0) -> Profile:
        """Return what a peer of this speed measures."""
        layers = tuple(
            LayerProfile(
                layer.name,
                FORWARD_SECONDS / speed,
                BACKWARD_SECONDS / speed,
                4 * sum(use.elements for use in layer.tensors),
                layer.output,
            )
            for layer in self.shape.layers
        )
        return Profile(self.shape, layers, NUMERICS, MEMORY_BYTES)

    def initial(self, first: int, last: int) -> dict[str, Tensor]:
        """Return the tensors of layers [first, last) at version 0, by the name of the owner."""
        zeros = (0,) * self.elements
        return {
            name: Tensor(_integers(b"i", self.elements, name.encode()), zeros)
            for name in self.names(first, last)
        }

    def names(self, first: int, last: int) -> tuple[str, ...]:
        """Return the owners' names of the tensors that layers [first, last) use, in order."""
        uses = [use.tied_to for layer in self.shape.layers[first:last] for use in layer.tensors]
        return tuple(dict.fromkeys(uses))

    # --- one microbatch -----------------------------------------------------------------

    def sample(self, ids: Sequence[int]) -> tuple[bytes, bytes, int]:
        """Return inputs, targets and weight of a microbatch of these samples."""
        size = self.training.microbatch_size
        inputs = struct.pack(f"<{size}q", *ids)
        targets = struct.pack(f"<{size}q", *(SAMPLES - each for each in ids))
        return inputs, targets, 1 + sum(ids) % size

    def is_finite(self, mb: Microbatch, layer: int) -> bool:
        """Return whether a layer's forward of a microbatch is finite."""
        return (mb.step, mb.index, layer) not in self.nonfinite

    def forward(self, layer: int, tensors: Mapping[str, Tensor], inputs: bytes) -> bytes:
        """Return the output of a layer (32 bytes)."""
        return _hash(b"f", HASH_BYTES, self._weights(layer, tensors), inputs)

    def loss(self, output: bytes, targets: bytes) -> tuple[float, bytes]:
        """Return the sum of the losses, and the gradient of the model's output (32 bytes)."""
        mixed = _hash(b"l", HASH_BYTES + 4, output, targets)
        return int.from_bytes(mixed[HASH_BYTES:], "little") / 2**20, mixed[:HASH_BYTES]

    def backward(
        self, layer: int, tensors: Mapping[str, Tensor], inputs: bytes, gradient: bytes
    ) -> tuple[bytes, list[tuple[str, Values]]]:
        """Return the gradient of a layer's input (32 bytes), and those of its tensors."""
        weights = self._weights(layer, tensors)
        below = _hash(b"b", HASH_BYTES, weights, inputs, gradient)
        uses = self.shape.layers[layer].tensors
        return below, [
            (use.tied_to, _integers(b"w", use.elements, use.name.encode(), below)) for use in uses
        ]

    # --- one step --------------------------------------------------------------------------

    def update(self, step: int, tensor: Tensor, total: Sequence[int], totals: Totals) -> Tensor:
        """Return a tensor after a step, given the sum of its gradients."""
        norm = int.from_bytes(struct.pack("<d", totals.square_norm), "little")
        momentum = tuple(
            _wrapped(3 * old + new) for old, new in zip(tensor.momentum, total, strict=True)
        )
        mixed = totals.weight + 7 * step + norm % 65521
        weights = tuple(
            _wrapped(5 * old + new + mixed)
            for old, new in zip(tensor.weights, momentum, strict=True)
        )
        return Tensor(weights, momentum)

    def exported(self, layer: int, tensors: Mapping[str, Tensor]) -> bytes:
        """Return a layer's weights as they are exported."""
        return b"weights %d " % layer + self._weights(layer, tensors)

    def state(self, layer: int, version: int, tensors: Mapping[str, Tensor]) -> bytes:
        """Return a layer's whole state at a version."""
        used = [tensors[name] for name in self.names(layer, layer + 1)]
        values = [value for each in used for value in (*each.weights, *each.momentum)]
        return struct.pack(f"<qq{len(values)}q", layer, version, *values)

    def parse_state(self, layer: int, version: int, data: bytes) -> dict[str, Tensor]:
        """Return a layer's tensors from its state. Raises ValueError if it is another's."""
        names = self.names(layer, layer + 1)
        count = 2 * len(names) * self.elements
        if len(data) != 8 * (2 + count):
            raise ValueError(f"{len(data)} bytes are no state of layer {layer}")
        found, at, *values = struct.unpack(f"<qq{count}q", data)
        if (found, at) != (layer, version):
            raise ValueError(f"layer {found} at version {at} for layer {layer} at {version}")
        pairs = iter([tuple(values[i : i + self.elements]) for i in range(0, count, self.elements)])
        return {name: Tensor(next(pairs), next(pairs)) for name in names}

    def _weights(self, layer: int, tensors: Mapping[str, Tensor]) -> bytes:
        values = [v for name in self.names(layer, layer + 1) for v in tensors[name].weights]
        return struct.pack(f"<{len(values)}q", *values)

    def _shape(self) -> ModelShape:
        output = TensorSpec("float32", (HASH_BYTES // 4,))
        batch = TensorSpec("int64", (self.training.microbatch_size,))
        names = [f"layers.{number}.weight" for number in range(self.layers)]
        layers = []
        for number, name in enumerate(names):
            tensors = [TensorUse(name, self.elements, name)]
            if self.tied and number == self.layers - 1:
                tensors.append(TensorUse(f"layers.{number}.tied", self.elements, names[0]))
            layers.append(LayerShape(f"layers.{number}", tuple(tensors), output))
        return ModelShape(tuple(layers), batch, batch)


def integer_training(
    *,
    steps: int = 8,
    microbatches: int = 6,
    microbatch_size: int = 2,
    cuts: tuple[int, ...] = (),
    checkpoint_every: int = 0,
    on_nonfinite: str = "skip",
    max_replicas: int = 0,
) -> Training:
    """Return the definition of a run whose model is of integers: no factory is ever called."""
    return Training(
        name="simulated",
        steps=steps,
        microbatches_per_step=microbatches,
        microbatch_size=microbatch_size,
        model=ModelSpec("swarm.simulation.physics:Physics"),
        data=DataSpec("factory"),
        execution=ExecutionSpec(
            determinism="exact", on_nonfinite="halt" if on_nonfinite == "halt" else "skip"
        ),
        slicing=SlicingSpec(cuts=cuts, max_replicas=max_replicas),
        checkpoints=CheckpointSpec(every_steps=checkpoint_every),
    )


@dataclass(frozen=True, slots=True)
class Passed:
    """What a microbatch is at every boundary between layers: `inputs[l]` goes into layer l,
    `gradients[l]` is the gradient of that; both have one entry more than there are layers."""

    inputs: tuple[bytes, ...]
    gradients: tuple[bytes, ...]
    of_tensors: dict[str, list[int]]
    weight: int
    loss_sum: float


class Reference:
    """Training by a plain loop, step after step, as far as somebody asks."""

    def __init__(self, physics: Physics) -> None:
        self.physics = physics
        self._versions = [physics.initial(0, physics.layers)]
        self._passes: list[list[Passed | None]] = []
        self._sums: list[dict[str, list[int]]] = []

    def at(self, version: int) -> dict[str, Tensor]:
        """Return all tensors at a version, by the name of the owner."""
        while len(self._versions) <= version:
            self._step()
        return self._versions[version]

    def passed(self, mb: Microbatch) -> Passed | None:
        """Return what a microbatch is at every boundary; None if it is not finite."""
        self.at(mb.step + 1)
        return self._passes[mb.step][mb.index]

    def summed(self, step: int) -> dict[str, list[int]]:
        """Return the sum of all gradients of a step, tensor by tensor."""
        self.at(step + 1)
        return self._sums[step]

    def layer_hashes(self, version: int) -> tuple[bytes, ...]:
        """Return the SHA-256 of every layer's exported weights at a version."""
        tensors = self.at(version)
        layers = range(self.physics.layers)
        return tuple(
            hashlib.sha256(self.physics.exported(layer, tensors)).digest() for layer in layers
        )

    def _step(self) -> None:
        physics, step = self.physics, len(self._versions) - 1
        tensors = self._versions[step]
        count = physics.training.microbatches_per_step
        passes = [self._pass(Microbatch(step, index), tensors) for index in range(count)]
        sums = {name: [0] * physics.elements for name in tensors}
        for passed in passes:
            if passed is not None:
                _add(sums, passed.of_tensors)
        self._passes.append(passes)
        self._sums.append(sums)
        if None in passes:
            self._versions.append(tensors)
            return
        whole = [passed for passed in passes if passed is not None]
        norm = math.fsum(float(sum(v * v for v in values)) for values in sums.values())
        weight = sum(passed.weight for passed in whole)
        totals = Totals(weight, norm, (), "apply", math.fsum(p.loss_sum for p in whole) / weight)
        self._versions.append(
            {
                name: physics.update(step, tensor, sums[name], totals)
                for name, tensor in tensors.items()
            }
        )

    def _pass(self, mb: Microbatch, tensors: Mapping[str, Tensor]) -> Passed | None:
        physics = self.physics
        layers = range(physics.layers)
        if not all(physics.is_finite(mb, layer) for layer in layers):
            return None
        data, targets, weight = physics.sample(
            sample_ids(
                physics.training.seed,
                mb.step,
                mb.index,
                microbatches=physics.training.microbatches_per_step,
                microbatch_size=physics.training.microbatch_size,
                samples=SAMPLES,
            )
        )
        inputs = [data]
        for layer in layers:
            inputs.append(physics.forward(layer, tensors, inputs[-1]))
        loss_sum, gradient = physics.loss(inputs[-1], targets)
        gradients = [gradient]
        of_tensors: dict[str, list[int]] = {}
        for layer in reversed(layers):
            below, found = physics.backward(layer, tensors, inputs[layer], gradients[-1])
            gradients.append(below)
            for name, values in found:
                _add(of_tensors, {name: values})
        return Passed(tuple(inputs), tuple(reversed(gradients)), of_tensors, weight, loss_sum)


def flags_of(physics: Physics, step: int) -> tuple[Flag, ...]:
    """Return the flags that a step must have, one per index."""
    names = [layer.name for layer in physics.shape.layers]
    first: dict[int, int] = {}
    for at, index, layer in sorted(physics.nonfinite):
        if at == step:
            first.setdefault(index, layer)
    return tuple(Flag(index, names[layer]) for index, layer in sorted(first.items()))


def _add(sums: dict[str, list[int]], values: Mapping[str, Sequence[int]]) -> None:
    for name, each in values.items():
        old = sums.get(name)
        sums[name] = list(each) if old is None else [a + b for a, b in zip(old, each, strict=True)]


def _integers(purpose: bytes, count: int, *parts: bytes) -> Values:
    raw = struct.unpack(f"<{count}q", _hash(purpose, 8 * count, *parts))
    return tuple(value % (2 * GRADIENT_BOUND) - GRADIENT_BOUND for value in raw)


def _hash(purpose: bytes, size: int, *parts: bytes) -> bytes:
    return hashlib.shake_128(purpose + b"\0".join(parts)).digest(size)


def _wrapped(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
