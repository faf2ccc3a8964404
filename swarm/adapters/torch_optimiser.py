"""torch's optimisers, in the one variant whose bits are the same everywhere.

The rule: `foreach`, with the learning rate as a Python float (a fused step rounds otherwise).
What an optimiser remembers of a tensor is made by its first step: before that there is nothing,
and zeros would not be the same.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from protocol.records import OptimiserSpec
from swarm.errors import ConfigError


def make_optimiser(spec: OptimiserSpec, tensors: Sequence[Tensor]) -> torch.optim.Optimizer | None:
    """Return the optimiser of these leaves, or None if there are none.

    Raises ConfigError if torch refuses the arguments.
    """
    if not tensors:
        return None
    try:
        match spec.name:
            case "sgd":
                return torch.optim.SGD(
                    tensors,
                    lr=spec.learning_rate,
                    momentum=spec.momentum,
                    nesterov=spec.nesterov,
                    weight_decay=spec.weight_decay,
                    foreach=True,
                )
            case "adam" | "adamw":
                kind = torch.optim.Adam if spec.name == "adam" else torch.optim.AdamW
                return kind(
                    tensors,
                    lr=spec.learning_rate,
                    betas=spec.betas,
                    eps=spec.eps,
                    weight_decay=spec.weight_decay,
                    foreach=True,
                )
    except ValueError as error:
        raise ConfigError(
            f"the optimiser {spec.name!r} cannot be made",
            evidence=(str(error),),
            hint="correct the table [optimiser]",
        ) from error


def memory_of(optimiser: torch.optim.Optimizer | None, tensor: Tensor) -> dict[str, Tensor]:
    """Return what the optimiser remembers of one of its tensors, by its own keys: live."""
    if optimiser is None:
        return {}
    remembered: Mapping[str, Tensor | None] = optimiser.state.get(tensor, {})
    return {key: value for key, value in remembered.items() if value is not None}


def blank_memory(spec: OptimiserSpec, tensor: Tensor) -> dict[str, Tensor]:
    """Return what the optimiser would remember of `tensor` after a step, to be filled in.

    Keys, dtypes, devices and strides are those that a step makes; values mean nothing. ({} for
    an optimiser without memory.)"""
    twin = tensor.detach().clone().requires_grad_()
    twin.grad = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    optimiser = make_optimiser(spec, [twin])
    assert optimiser is not None
    optimiser.step()
    return memory_of(optimiser, twin)
