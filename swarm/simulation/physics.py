"""A model of integers: every mistake in training changes them, and no rounding hides it.

Activations and their gradients are hashes chained along the layers, so that a layer of another
version, another sample or another route is noticed. A microbatch's gradient of a tensor is a few
integers of the same hash; their sum does not depend on order. The update mixes weights,
momentum, sum and totals, and wraps at 64 bits. The rule: everything here is a function of its
arguments; what is right follows from it by a plain loop (reference.py).

With `Costs` the model pretends to be another one: its tensors are as large as that one's, and take
as long. Then only their first bytes mean something, and of a parameter a few elements only.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy

from protocol.messages import Flag, Microbatch, Totals
from protocol.records import (
    CheckpointSpec,
    DataSpec,
    ExecutionSpec,
    LayerProfile,
    ModelSpec,
    SampleSpec,
    SlicingSpec,
    TensorSpec,
    Training,
)
from swarm.core.model import LayerShape, ModelShape, Profile, TensorUse
from swarm.core.scheduling.problem import Layer
from swarm.ports import Buffer

HASH_BYTES = 32
GRADIENT_BOUND = 1 << 38
SAMPLES = 64
NUMERICS = "integers"
MEMORY_BYTES = 1 << 40
FORWARD_SECONDS, BACKWARD_SECONDS = 0.01, 0.02
"""Of one layer on a peer of speed 1, in virtual time."""

STATE_CHUNK_BYTES = 64
"""What stands for the 4 MiB that are asked for at once of a state."""
STATE_SCALE = 4 * 1024 * 1024 // STATE_CHUNK_BYTES
"""Where a model has costs a byte of a state, or of a gradient that is fetched, stands for so many:
they are hashed and copied, so they cannot be hollow."""
LAZY_BYTES = 64 * 1024
"""Of larger buffers the memory behind what means something is never touched."""
LEAST_ELEMENTS = 1024

Values = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """State of one parameter: what is exported, and what only the optimiser needs."""

    weights: Values
    momentum: Values


@dataclass(frozen=True)
class Costs:
    """What the model costs that is pretended: seconds at speed 1, bytes of one microbatch."""

    layers: tuple[Layer, ...]
    input_bytes: int = 0
    target_bytes: int = 0
    optimiser_seconds: float = 0.0
    """Of a step, for the whole model."""


@dataclass(frozen=True)
class Physics:
    """What is trained, and how many integers it has."""

    training: Training
    layers: int = 6
    """Those of `costs`, if there are any."""
    elements: int = 3
    """Of a tensor; with costs, those that mean something."""
    tied: bool = False
    """Whether the last layer uses the first one's tensor too."""
    nonfinite: frozenset[tuple[int, int, int]] = frozenset()
    """(step, index, layer) whose forward is not finite."""
    costs: Costs | None = None
    shape: ModelShape = field(init=False)

    def __post_init__(self) -> None:
        if self.costs is not None:
            object.__setattr__(self, "layers", len(self.costs.layers))
        object.__setattr__(self, "shape", self._shape())

    def profile(self, speed: float = 1.0, memory_bytes: int = MEMORY_BYTES) -> Profile:
        """Return what a peer of this speed measures."""
        return Profile(
            self.shape,
            tuple(self._layer_profile(number, speed) for number in range(self.layers)),
            NUMERICS,
            memory_bytes,
        )

    def _layer_profile(self, number: int, speed: float) -> LayerProfile:
        shape = self.shape.layers[number]
        if self.costs is None:
            size, kept = 4 * sum(use.elements for use in shape.tensors), 0
        else:
            layer = self.costs.layers[number]
            size, kept = layer.parameter_bytes, layer.activation_bytes
        return LayerProfile(
            shape.name,
            self.forward_seconds(number, number + 1) / speed,
            self.backward_seconds(number, number + 1) / speed,
            size,
            shape.output,
            kept,
        )

    # --- how long it takes, at speed 1 -----------------------------------------------------

    def forward_seconds(self, first: int, last: int) -> float:
        """Return seconds of the forward of layers [first, last) of one microbatch."""
        if self.costs is None:
            return FORWARD_SECONDS * (last - first)
        return sum(layer.forward_seconds for layer in self.costs.layers[first:last])

    def backward_seconds(self, first: int, last: int) -> float:
        """Return seconds of the backward of layers [first, last) of one microbatch."""
        if self.costs is None:
            return BACKWARD_SECONDS * (last - first)
        return sum(layer.backward_seconds for layer in self.costs.layers[first:last])

    def update_seconds(self, first: int, last: int) -> float:
        """Return seconds of the optimiser's step of layers [first, last)."""
        if self.costs is None:
            return 0.0
        sizes = [layer.parameter_bytes for layer in self.costs.layers]
        return self.costs.optimiser_seconds * sum(sizes[first:last]) / max(1, sum(sizes))

    # --- what tensors mean -------------------------------------------------------------------

    @property
    def item_bytes(self) -> int:
        """Return how many bytes an element of a gradient takes on the wire."""
        exact = self.costs is None or self.training.execution.determinism == "exact"
        return 8 if exact else 4

    @property
    def sample_bytes(self) -> int:
        """Return how many bytes of inputs, or of targets, mean something."""
        return 8 * self.training.microbatch_size

    def spread(self, elements: int) -> tuple[int, ...]:
        """Return which elements of a tensor mean something."""
        return tuple(number * elements // self.elements for number in range(self.elements))

    def scaled(self, data: bytes, size: int) -> bytes:
        """Return `data` with zeros behind it, as long as what stands for `size` bytes."""
        if self.costs is None:
            return data
        return data.ljust(-(-size // STATE_SCALE), b"\0")

    def layer_bytes(self, layer: int) -> int:
        """Return how many bytes a layer's parameters have."""
        return self.costs.layers[layer].parameter_bytes if self.costs is not None else 0

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
        """Return what inputs and targets mean, and the weight, of a microbatch of these samples."""
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
            (use.tied_to, _integers(b"w", self.elements, use.name.encode(), below)) for use in uses
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
        data = b"weights %d " % layer + self._weights(layer, tensors)
        return self.scaled(data, self.layer_bytes(layer))

    def state(self, layer: int, version: int, tensors: Mapping[str, Tensor]) -> bytes:
        """Return a layer's whole state at a version."""
        used = [tensors[name] for name in self.names(layer, layer + 1)]
        values = [value for each in used for value in (*each.weights, *each.momentum)]
        data = struct.pack(f"<qq{len(values)}q", layer, version, *values)
        return self.scaled(data, 3 * self.layer_bytes(layer))

    def parse_state(self, layer: int, version: int, data: bytes) -> dict[str, Tensor]:
        """Return a layer's tensors from its state. Raises ValueError if it is another's."""
        names = self.names(layer, layer + 1)
        count = 2 * len(names) * self.elements
        size = 8 * (2 + count)
        if len(data) != len(self.scaled(bytes(size), 3 * self.layer_bytes(layer))):
            raise ValueError(f"{len(data)} bytes are no state of layer {layer}")
        found, at, *values = struct.unpack(f"<qq{count}q", data[:size])
        if (found, at) != (layer, version):
            raise ValueError(f"layer {found} at version {at} for layer {layer} at {version}")
        pairs = iter([tuple(values[i : i + self.elements]) for i in range(0, count, self.elements)])
        return {name: Tensor(next(pairs), next(pairs)) for name in names}

    def _weights(self, layer: int, tensors: Mapping[str, Tensor]) -> bytes:
        values = [v for name in self.names(layer, layer + 1) for v in tensors[name].weights]
        return struct.pack(f"<{len(values)}q", *values)

    def _shape(self) -> ModelShape:
        names = [f"layers.{number}.weight" for number in range(self.layers)]
        layers = []
        for number, name in enumerate(names):
            tensors = []
            if self.costs is None or self.costs.layers[number].parameter_bytes:
                tensors = [TensorUse(name, self._elements(number), name)]
            if self.tied and number == self.layers - 1:
                tensors.append(TensorUse(f"layers.{number}.tied", self._elements(0), names[0]))
            layers.append(LayerShape(f"layers.{number}", tuple(tensors), self._output(number)))
        if self.costs is None:
            batch = TensorSpec("int64", (self.training.microbatch_size,))
            return ModelShape(tuple(layers), batch, batch)
        return ModelShape(
            tuple(layers),
            TensorSpec("uint8", (max(self.sample_bytes, self.costs.input_bytes),)),
            TensorSpec("uint8", (max(self.sample_bytes, self.costs.target_bytes),)),
        )

    def _elements(self, layer: int) -> int:
        if self.costs is None:
            return self.elements
        return max(LEAST_ELEMENTS, self.costs.layers[layer].parameter_bytes // 4)

    def _output(self, layer: int) -> TensorSpec:
        if self.costs is None:
            return TensorSpec("float32", (HASH_BYTES // 4,))
        return TensorSpec("uint8", (max(HASH_BYTES, self.costs.layers[layer].output_bytes),))


def hollow(meaning: bytes, size: int) -> Buffer:
    """Return `size` bytes of which the first are `meaning`.

    Raises ValueError if it does not fit."""
    if size <= LAZY_BYTES:
        if len(meaning) > size:
            raise ValueError(f"{len(meaning)} bytes do not fit into {size}")
        return memoryview(meaning.ljust(size, b"\0"))
    buffer = numpy.empty(size, dtype=numpy.uint8).data
    buffer[: len(meaning)] = meaning
    return buffer


def integer_training(
    *,
    steps: int = 8,
    microbatches: int = 6,
    microbatch_size: int = 2,
    cuts: tuple[int, ...] = (),
    checkpoint_every: int = 0,
    on_nonfinite: str = "skip",
    max_replicas: int = 0,
    determinism: Literal["standard", "exact"] = "exact",
    sizes: tuple[int, int] | None = None,
) -> Training:
    """Return the definition of a run whose model is of integers: no factory is ever called.

    `sizes` is how many bytes inputs and targets of a microbatch have, if anybody is to know."""
    samples = (
        [SampleSpec("float32", (max(1, size // 4 // microbatch_size),)) for size in sizes]
        if sizes is not None
        else [None, None]
    )
    return Training(
        name="simulated",
        steps=steps,
        microbatches_per_step=microbatches,
        microbatch_size=microbatch_size,
        model=ModelSpec("swarm.simulation.physics:Physics"),
        data=DataSpec("factory", sample=samples[0], target=samples[1]),
        execution=ExecutionSpec(
            determinism=determinism, on_nonfinite="halt" if on_nonfinite == "halt" else "skip"
        ),
        slicing=SlicingSpec(cuts=cuts, max_replicas=max_replicas),
        checkpoints=CheckpointSpec(every_steps=checkpoint_every),
    )


def flags_of(physics: Physics, step: int) -> tuple[Flag, ...]:
    """Return the flags that a step must have, one per index."""
    names = [layer.name for layer in physics.shape.layers]
    first: dict[int, int] = {}
    for at, index, layer in sorted(physics.nonfinite):
        if at == step:
            first.setdefault(index, layer)
    return tuple(Flag(index, names[layer]) for index, layer in sorted(first.items()))


def _integers(purpose: bytes, count: int, *parts: bytes) -> Values:
    raw = struct.unpack(f"<{count}q", _hash(purpose, 8 * count, *parts))
    return tuple(value % (2 * GRADIENT_BOUND) - GRADIENT_BOUND for value in raw)


def _hash(purpose: bytes, size: int, *parts: bytes) -> bytes:
    return hashlib.shake_128(purpose + b"\0".join(parts)).digest(size)


def _wrapped(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
