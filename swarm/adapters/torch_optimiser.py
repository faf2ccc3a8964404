"""torch's optimisers, in the one variant whose bits are the same everywhere.

The rule: `foreach`, with the learning rate as a Python float (a fused step rounds otherwise).
"""

from collections.abc import Sequence

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
