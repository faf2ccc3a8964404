"""Whether a module is its layers: the gate that every whole module has to pass.

The rule: a module whose layers, applied in order, do not give its own outputs and gradients is
refused with the reason; so is a forward that changes a buffer.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from protocol.records import Training
from swarm.adapters.author_code import FAULTS, describe
from swarm.adapters.torch_batches import batch_specs, encode, random_batch
from swarm.adapters.torch_numerics import seed_generator, seed_of
from swarm.errors import ModelError

TOLERANCE = 1e-4
"""Largest relative difference of a tensor: other strides alone give about 1e-6."""
FLOOR = 1e-6
"""The same, relative to the largest norm of all: gradients that are zero but for rounding."""
CPU = torch.device("cpu")


def check_forward(
    training: Training, module: nn.Module, names: Sequence[str], layers: Sequence[nn.Module]
) -> None:
    """Raise ModelError unless `layers` in order equal `module`, at two batch sizes.

    Random draws are compared too: both runs seed the generator alike before every layer.
    """
    handles = []
    draws = _Draws(training.seed)
    for layer in {id(layer): layer for layer in layers}.values():
        handles.append(layer.register_forward_pre_hook(draws))
    try:
        for size in (training.microbatch_size, training.microbatch_size + 1):
            inputs = random_batch(
                batch_specs(training)[0], seed_of(training.seed, "gate"), size=size
            )
            parameters = [p for p in module.parameters() if p.requires_grad]
            staged = _differentiate(
                draws, lambda x: _in_order(names, layers, x), inputs, parameters
            )
            eager = _differentiate(draws, module, inputs, parameters)
            _compare(training, module, eager, staged, size)
    finally:
        for handle in handles:
            handle.remove()


def apply_checked(name: str, layer: nn.Module, inputs: Tensor) -> Tensor:
    """Return the layer's output for one tensor.

    Raises ModelError if it raises, returns anything but one floating-point tensor, or changes
    a parameter or buffer.
    """
    before = _marks(layer)
    try:
        output = layer(inputs)
    except FAULTS as fault:
        raise does_not_run(name, inputs, fault) from fault
    after = _marks(layer)
    for tensor in before | after:
        if before.get(tensor) != after.get(tensor):
            raise ModelError(
                f"layer {name!r} changes {tensor!r} in its forward",
                evidence=("its output is not a function of its weights and the microbatch",),
                hint="use GroupNorm or LayerNorm instead of BatchNorm; keep no state in forward",
            )
    if not isinstance(output, Tensor):
        raise ModelError(
            f"layer {name!r} returns a {type(output).__name__}",
            hint="a layer takes one tensor and returns one tensor",
        )
    if not output.is_floating_point():
        raise ModelError(
            f"layer {name!r} returns {output.dtype}, which carries no gradient",
            hint="join it with the layer after it",
        )
    return output


def does_not_run(name: str, inputs: Tensor, fault: BaseException) -> ModelError:
    """Return the error for a layer that raised `fault`."""
    no_operator = "deterministic" in str(fault)
    return ModelError(
        f"layer {name!r} does not run",
        evidence=(describe(fault), f"input {inputs.dtype}{list(inputs.shape)}"),
        hint='use another operator, or determinism = "standard"' if no_operator else "",
    )


class _Draws:
    """Seeds the generator before each layer, by how many have run before it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.count = 0

    def __call__(self, *_: object) -> None:
        seed_generator(CPU, seed_of(self._seed, "gate", self.count))
        self.count += 1


def _marks(layer: nn.Module) -> dict[str, tuple[int, int, bytes]]:
    """Return what changes with a tensor: its identity, its version, and a buffer's bytes.

    Fused norms write their running statistics without a new version.
    """
    marks = {name: (id(p), p._version, b"") for name, p in layer.named_parameters()}
    for name, buffer in layer.named_buffers():
        marks[name] = (id(buffer), buffer._version, hashlib.sha256(encode(buffer)).digest())
    return marks


def _in_order(names: Sequence[str], layers: Sequence[nn.Module], inputs: Tensor) -> Tensor:
    for name, layer in zip(names, layers, strict=True):
        inputs = apply_checked(name, layer, inputs).contiguous()
    return inputs


def _differentiate(
    draws: _Draws,
    function: Callable[[Tensor], object],
    inputs: Tensor,
    parameters: Sequence[Tensor],
) -> list[Tensor]:
    """Return the output, the gradients of the parameters and that of a floating input."""
    draws.count = 0
    wanted = list(parameters)
    if inputs.is_floating_point():
        inputs = inputs.clone().requires_grad_()
        wanted.append(inputs)
    try:
        with torch.enable_grad():
            output = function(inputs.clone())
            if not isinstance(output, Tensor) or not output.is_floating_point():
                raise ModelError("the model does not return one floating-point tensor")
            generator = torch.Generator().manual_seed(0)
            cotangent = torch.randn(output.shape, generator=generator, dtype=output.dtype)
            gradients: Sequence[Tensor | None] = [None] * len(wanted)
            if output.requires_grad:
                gradients = torch.autograd.grad(output, wanted, cotangent, allow_unused=True)
    except FAULTS as fault:
        raise ModelError("the model does not run", evidence=(describe(fault),)) from fault
    missing = zip(wanted, gradients, strict=True)
    return [output.detach()] + [torch.zeros_like(w) if g is None else g for w, g in missing]


def _compare(
    training: Training,
    module: nn.Module,
    eager: Sequence[Tensor],
    staged: Sequence[Tensor],
    size: int,
) -> None:
    labels = ["output"]
    labels += [f"gradient of {name}" for name, p in module.named_parameters() if p.requires_grad]
    labels += ["gradient of the input"]
    largest = max(cast(float, gradient.norm().item()) for gradient in eager[1:] or eager)
    for label, one, other in zip(labels, eager, staged, strict=False):
        floor = FLOOR * largest if label != "output" else 0.0
        if one.shape == other.shape:
            error = (one - other).norm().item()
            if error <= TOLERANCE * one.norm().item() + floor:
                continue
        raise ModelError(
            f"the layers of {training.model.factory!r}, applied in order, are not the model",
            evidence=(f"the {label} differs at batch size {size}",),
            hint="let forward() do nothing but call `layers` one after the other",
        )
