"""The layers of one stage with their weights: passes forward and back, and updates.

The rule: nothing here depends on the slicing. A layer gets the same input, the same seed and
the same strides wherever the stage begins, and bad numbers are put down to the same layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.messages import Microbatch, Totals
from protocol.records import Training, sha256
from swarm.adapters.author_code import FAULTS, describe
from swarm.adapters.torch_gradients import Gradients, Place
from swarm.adapters.torch_numerics import (
    Boundary,
    FixedPoint,
    Floating,
    Record,
    Settings,
    canonical,
    seed_of,
)
from swarm.adapters.torch_optimiser import blank_memory, make_optimiser, memory_of
from swarm.adapters.torch_profile import Survey, apply_layer
from swarm.adapters.torch_slicing import Layer
from swarm.adapters.torch_state import capture, check_alike, fill, read, values_of
from swarm.adapters.weights import layer_bytes
from swarm.core.model import ModelShape
from swarm.core.reduction import buckets
from swarm.core.schedule import learning_rate
from swarm.core.totals import update_scale
from swarm.errors import ModelError
from swarm.ports import Buffer


@dataclass(slots=True)
class Pass:
    """A microbatch on its way through the stage; what its backward needs."""

    inputs: Tensor
    output: Tensor
    record: Record


@dataclass(frozen=True, slots=True)
class Derivative:
    """What a backward found. Where `bad_layer` is named, nothing else is to be used."""

    bad_layer: str
    additions: tuple[tuple[Place, Tensor], ...]
    input_gradient: Tensor | None
    """Contiguous; None where the input takes no gradient."""


@dataclass(frozen=True, slots=True)
class _Use:
    """One use of a trained tensor: a leaf of its own, whose storage all uses share."""

    number: int
    layer: str
    leaf: Tensor
    place: Place
    bound: float


class StageLayers:
    """Layers [first, last) of a model, and the gradients and optimiser of their parameters."""

    def __init__(
        self,
        training: Training,
        settings: Settings,
        found: Survey,
        layers: Sequence[Layer],
        stages: Sequence[tuple[int, int]],
        stage: int,
    ) -> None:
        self._training = training
        self._settings = settings
        self._found = found
        self._layers = layers
        self._watched = [list(layer.module.named_buffers()) for layer in layers]
        execution = training.execution
        form: FixedPoint | Floating = Floating()
        if settings.exact:
            form = FixedPoint(execution.fraction_bits, training.microbatches_per_step)
        self.gradients = Gradients(buckets(found.shape, stages), stage, form, settings.device)
        counts = _use_counts(found.shape)
        self._masters: dict[str, Tensor] = {}
        self._uses: list[_Use] = []
        for layer in layers:
            for name, leaf in layer.parameters.items():
                owner = layer.owners[name]
                master = self._masters.setdefault(owner, leaf)
                if master is not leaf:
                    leaf.data = master.data
                place, bound = self.gradients.places[owner], form.bound(counts[owner])
                self._uses.append(_Use(layer.number, layer.name, leaf, place, bound))
        self._optimiser = make_optimiser(training.optimiser, list(self._masters.values()))

    @property
    def first(self) -> int:
        """Return the number of the first layer."""
        return self._layers[0].number

    @property
    def last(self) -> int:
        """Return one more than the number of the last layer."""
        return self._layers[-1].number + 1

    def run(self, mb: Microbatch, inputs: Tensor) -> Pass:
        """Apply all layers to `inputs`, a leaf."""
        record = Record()
        names = [layer.name for layer in self._found.shape.layers] + ["loss"]
        hidden = inputs
        for layer, watched in zip(self._layers, self._watched, strict=True):
            number = layer.number
            versions = [tensor._version for _, tensor in watched]
            try:
                hidden = apply_layer(
                    layer,
                    hidden,
                    seed_of(self._settings.seed, mb.step, mb.index, number),
                    in_place=self._found.in_place[number],
                    settings=self._settings,
                )
            except FAULTS as fault:
                raise ModelError(
                    f"layer {layer.name!r} does not run: {describe(fault)}",
                    evidence=(f"microbatch {mb}",),
                    hint="mend the model, and start a new run",
                ) from fault
            for (name, tensor), version in zip(watched, versions, strict=True):
                if tensor._version != version:
                    raise ModelError(f"layer {layer.name!r} changes {name!r} in its forward")
            hidden = Boundary.apply(  # type: ignore[no-untyped-call]
                hidden, record, self._settings.exact, number, layer.name, names[number + 1]
            )
        return Pass(inputs, hidden, record)

    def differentiate(self, passed: Pass, root: Tensor, cotangent: Tensor | None) -> Derivative:
        """Differentiate `root`, which is the output of `passed` or its loss.

        Of several layers with bad numbers the one nearest to the loss is named.
        """
        wanted = [use.leaf for use in self._uses]
        if passed.inputs.requires_grad:
            wanted.append(passed.inputs)
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if wanted and root.requires_grad:
            try:
                found = torch.autograd.grad(root, wanted, cotangent, allow_unused=True)
            except FAULTS as fault:
                names = f"{self._layers[0].name!r} to {self._layers[-1].name!r}"
                raise ModelError(
                    f"layers {names} do not run backward: {describe(fault)}",
                    hint="mend the model, and start a new run",
                ) from fault
        additions = []
        for use, gradient in zip(self._uses, found, strict=False):
            if gradient is not None:
                passed.record.see(-use.number, use.layer, gradient, use.bound)
                additions.append((use.place, gradient))
        input_gradient = None
        if passed.inputs.requires_grad:
            last = found[-1]
            input_gradient = torch.zeros_like(passed.inputs) if last is None else last
            passed.record.see(-self.first, self._layers[0].name, input_gradient)
            input_gradient = canonical(input_gradient, exact=False)
        return Derivative(passed.record.first_bad(), tuple(additions), input_gradient)

    def update(self, step: int, totals: Totals) -> None:
        """Apply the reduced gradient: the mean over the step's weight, clipped as a whole."""
        scale = update_scale(totals, self._training.optimiser.clip_norm)
        updates = self.gradients.updates(scale, self._masters)
        if self._optimiser is None:
            return
        rate = learning_rate(self._training.optimiser, step, self._training.steps)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        for owner, master in self._masters.items():
            master.grad = updates[owner]
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)

    def weights(self, number: int) -> bytes:
        """Return parameters and buffers of layer `number` as safetensors bytes, under the model's
        own names. Raises ValueError."""
        if not self.first <= number < self.last:
            raise ValueError(f"layer {number} is not in [{self.first}, {self.last})")
        return layer_bytes(self._layers[number - self.first].state)

    def root_hash(self) -> bytes:
        """Return SHA-256 over the SHA-256 of every layer's weights (32 bytes)."""
        return sha256(b"".join(sha256(self.weights(n)) for n in range(self.first, self.last)))

    # --- the whole state --------------------------------------------------------------------

    def snapshot(self) -> dict[int, bytes]:
        """Return the whole state of every layer (`torch_state`), by number."""
        return {layer.number: self._capture(layer) for layer in self._layers}

    def restore(self, states: Mapping[int, Buffer]) -> None:
        """Take over the state of every layer, into what has just been built.

        Raises ValueError if it is not that of these layers; then this object is of no use."""
        numbers = [layer.number for layer in self._layers]
        if sorted(states) != numbers:
            raise ValueError(f"states of layers {sorted(states)} instead of {numbers}")
        for layer in self._layers:
            found = read(layer, states[layer.number])
            fill(values_of(layer), found.values)
            for name, memory in found.memories.items():
                self._remember(layer.owners[name], memory)
        masters = self._masters.values()
        if len({bool(memory_of(self._optimiser, master)) for master in masters}) > 1:
            raise ValueError("the optimiser remembers some tensors and others not")
        for layer in self._layers:
            if self._capture(layer) != bytes(states[layer.number]):
                raise ValueError(
                    f"layer {layer.name!r} gives another state than it took: tied tensors differ"
                )

    def _capture(self, layer: Layer) -> bytes:
        memories = {
            name: memory_of(self._optimiser, self._masters[owner])
            for name, owner in layer.owners.items()
        }
        return capture(layer, memories)

    def _remember(self, owner: str, memory: Mapping[str, Tensor]) -> None:
        """Give the optimiser its memory of a tensor."""
        assert self._optimiser is not None
        master = self._masters[owner]
        blank = blank_memory(self._training.optimiser, master)
        check_alike(memory, blank, f"the optimiser on {owner!r}")
        fill(blank, memory)
        self._optimiser.state[master] = blank


def _use_counts(shape: ModelShape) -> dict[str, int]:
    """Return how often the value of each owner is used in the whole model."""
    counts: dict[str, int] = {}
    for layer in shape.layers:
        for use in layer.tensors:
            counts[use.tied_to] = counts.get(use.tied_to, 0) + 1
    return counts
