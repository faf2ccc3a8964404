"""What enters and leaves a model: microbatches as bytes and as tensors, and the loss.

The rule: bytes that came over a link are checked against the manifest before a model sees them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protocol.records import ITEM_BYTES, DataSpec, LossSpec, SampleSpec, TensorSpec, Training
from swarm.adapters.author_code import import_function
from swarm.errors import ConfigError, ModelError
from swarm.ports import Buffer

IGNORED_TARGET = -100
"""A target of this value counts neither in the loss nor in the mean."""

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """The inputs or the targets of one microbatch."""

    tensor: TensorSpec
    high: int
    """Integers lie in [0, high); 0 where nothing is known."""


def batch_specs(training: Training) -> tuple[BatchSpec, BatchSpec]:
    """Return what the inputs and the targets of a microbatch look like.

    text and tokens: int64 (batch, sequence) both. factory: the manifest's samples with a batch
    dimension. Raises ConfigError if the manifest does not say.
    """
    data, size = training.data, training.microbatch_size
    if data.source != "factory":
        tokens = BatchSpec(TensorSpec("int64", (size, data.sequence_length)), data.vocabulary)
        return tokens, tokens
    return _batch(data, data.sample, "sample", size), _batch(data, data.target, "target", size)


def _batch(data: DataSpec, sample: SampleSpec | None, key: str, size: int) -> BatchSpec:
    if sample is None:
        raise ConfigError(
            f"the manifest does not say what a {key} of {data.factory!r} looks like",
            hint=f"add [data.{key}] with dtype, shape and, for integers, high",
        )
    return BatchSpec(TensorSpec(sample.dtype, (size, *sample.shape)), sample.high)


def random_batch(spec: BatchSpec, seed: int, *, size: int | None = None) -> Tensor:
    """Return a canonical batch: a function of the spec and the seed. `size` replaces its size."""
    shape = spec.tensor.shape if size is None else (size, *spec.tensor.shape[1:])
    generator = torch.Generator().manual_seed(seed)
    dtype = torch_dtype(spec.tensor)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randint(0, spec.high or 1, shape, generator=generator, dtype=dtype)


# --- bytes -----------------------------------------------------------------------------------


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """Return torch's dtype of that name."""
    return cast(torch.dtype, getattr(torch, spec.dtype))


def spec_of(tensor: Tensor) -> TensorSpec | None:
    """Return the spec of a tensor, or None if its dtype cannot travel."""
    name = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, tuple(tensor.shape)) if name in ITEM_BYTES else None  # type: ignore[arg-type]


def encode(tensor: Tensor) -> Buffer:
    """Return the bytes of a contiguous tensor: a view where the tensor is on the CPU."""
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data


def decode(data: Buffer, spec: TensorSpec, device: torch.device) -> Tensor:
    """Return a tensor of its own storage with these bytes.

    It is a copy because libraries may compute other bits from memory that is aligned otherwise.
    Raises ValueError if the number of bytes is wrong.
    """
    if data.nbytes != spec.nbytes:
        raise ValueError(f"{data.nbytes} bytes for {spec.dtype}{list(spec.shape)}")
    tensor = torch.empty(spec.shape, dtype=torch_dtype(spec))
    np.copyto(tensor.reshape(-1).view(torch.uint8).numpy(), np.frombuffer(data, dtype=np.uint8))
    return tensor.to(device)


def decode_batch(
    data: Buffer, spec: BatchSpec, device: torch.device, *, ignorable: bool = False
) -> Tensor:
    """Decode inputs or targets. Raises ValueError if integers lie outside the manifest's range.

    With `ignorable`, IGNORED_TARGET is allowed too.
    """
    tensor = decode(data, spec.tensor, device)
    if spec.high and tensor.numel() and not tensor.is_floating_point():
        counted = tensor.masked_fill(tensor == IGNORED_TARGET, 0) if ignorable else tensor
        low, high = torch.aminmax(counted)
        if low.item() < 0 or high.item() >= spec.high:
            raise ValueError(f"values {low.item()} .. {high.item()} outside 0 .. {spec.high - 1}")
    return tensor


# --- loss -----------------------------------------------------------------------------------------


def load_loss(spec: LossSpec) -> Loss:
    """Return f(output, target) -> sum over the targets (0-dim). Raises ModelError."""
    match spec.function:
        case "cross_entropy":
            return cross_entropy
        case "mse":
            return mean_square_error
        case path:
            return cast(Loss, import_function(path, "loss"))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the summed cross entropy of logits (..., classes) and class numbers (...)."""
    flat = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat, target.reshape(-1), ignore_index=IGNORED_TARGET, reduction="sum")


def mean_square_error(output: Tensor, target: Tensor) -> Tensor:
    """Return the summed square error; both of one shape."""
    return F.mse_loss(output, target, reduction="sum")


def check_classes(spec: LossSpec, output: TensorSpec, target: BatchSpec) -> None:
    """Raise ModelError if targets may name a class that the output does not have."""
    classes = output.shape[-1] if output.shape else 0
    if spec.function == "cross_entropy" and target.high > classes:
        raise ModelError(
            f"the model tells {classes} classes apart, but targets lie in 0 .. {target.high - 1}",
            evidence=(f"output {output.dtype}{list(output.shape)}",),
            hint="make the last dimension of the model's output as large as the vocabulary",
        )
