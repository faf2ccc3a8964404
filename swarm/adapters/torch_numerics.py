"""How numbers are computed and added, so that equal settings give equal bits on like hardware.

The rule: a bit may depend on the manifest, on the microbatch and on the kind of hardware; never
on the slicing, on the number of replicas or on the order of arrival.
"""

import hashlib
import math
import os
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 15
"""Elements converted at a time: scratch of this size stays in the cache (ten times faster)."""
NORM_ROW = 1024
VECTOR_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "sin", "tan", "cosh", "sinh", "tanh"),
    *("exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "sqrt", "rsqrt"),
    *("erf", "erfc", "erfinv", "lgamma", "sigmoid", "ceil", "floor", "round", "trunc"),
)

_resolving = threading.Lock()
_resolved = False


@dataclass(frozen=True, slots=True)
class Settings:
    """What the manifest says about computing, on one device."""

    device: torch.device
    threads: int
    exact: bool
    recompute: bool
    seed: int

    def apply(self) -> None:
        """Bring this thread (and torch's process-wide switches) to these settings.

        Threads and grad mode belong to a thread, so every task calls this where it runs.
        """
        _resolve_kernels()
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        torch.set_grad_enabled(True)
        torch.set_flush_denormal(False)  # a library built with -ffast-math may have set it
        if torch.are_deterministic_algorithms_enabled() != self.exact:
            if self.device.type == "cuda":
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                torch.backends.cudnn.benchmark = False
            torch.use_deterministic_algorithms(self.exact)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _resolve_kernels() -> None:
    """Call every function of MKL's vector library once, in one thread.

    It chooses a kernel at a function's first call, and where two threads make that call together
    one of them may get a kernel of low accuracy: an AdamW step was seen to be wrong by 3e-4 of
    itself (https://github.com/pytorch/pytorch/issues/188792).
    """
    global _resolved
    with _resolving:
        if not _resolved:
            for name in VECTOR_FUNCTIONS:
                for dtype in (torch.float32, torch.float64):
                    getattr(torch, name)(torch.full((1,), 0.5, dtype=dtype))
            _resolved = True


def seed_of(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) that is a hash of the parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed the process's default generators, those that modules draw from.

    Not `torch.manual_seed`: that takes 80 µs where CUDA is not in use, this 1 µs.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


# --- finite numbers ------------------------------------------------------------------------------


class Record:
    """Smallest and largest values of tensors on their way, looked at once when a task ends."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, str, Tensor, Tensor, float]] = []

    def see(self, order: int, layer: str, tensor: Tensor, bound: float = math.inf) -> None:
        """Note that `layer` made this tensor; all must lie strictly within -bound .. bound."""
        if tensor.numel():
            low, high = torch.aminmax(tensor.detach())
            self._seen.append((order, layer, low, high, bound))

    def first_bad(self) -> str:
        """Return the layer of the lowest order with a value out of bounds, or "". Forgets all.

        NaN compares false with everything, so it is out of every bound.
        """
        seen, self._seen = self._seen, []
        for _, layer, low, high, bound in sorted(seen, key=lambda entry: entry[0]):
            if not (-bound < low.item() and high.item() < bound):
                return layer
        return ""


class Boundary(torch.autograd.Function):
    """Identity between two layers: canonical strides both ways, and numbers noted both ways.

    Strides change the bits of convolutions and norms, and a tensor that crosses a link loses
    them; so every boundary drops them, whether or not a link is there. What is not finite is
    put down to the layer that made it: forward the one below, backward the one above.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        record: Record,
        exact: bool,
        number: int,
        below: str,
        above: str,
    ) -> Tensor:
        """Return `tensor`, the output of layer `number`, in canonical strides."""
        ctx.record, ctx.exact, ctx.number, ctx.above = record, exact, number, above
        record.see(number, below, tensor)
        return canonical(tensor, exact)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient in canonical strides; later layers come first in its order."""
        (gradient,) = gradients
        ctx.record.see(-(ctx.number + 1), ctx.above, gradient)
        return canonical(gradient, ctx.exact), None, None, None, None, None


def canonical(tensor: Tensor, exact: bool) -> Tensor:
    """Return `tensor` with contiguous strides: in exact mode always freshly allocated."""
    if exact:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


# --- sums of gradients ------------------------------------------------------------------------


class Format(Protocol):
    """How gradients are kept while they are summed."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of accumulators and reduced gradients."""
        ...

    def bound(self, uses: int) -> float:
        """Return what a microbatch's gradient must stay below, for a tensor of so many uses."""
        ...

    def add(self, total: Tensor, gradient: Tensor) -> None:
        """Add a flat gradient of any floating dtype to a flat total."""
        ...

    def to_float64(self, total: Tensor) -> Tensor:
        """Return a total as float64."""
        ...


@dataclass(frozen=True, slots=True)
class Floating:
    """Standard mode: float32 sums."""

    dtype: torch.dtype = torch.float32

    def bound(self, uses: int) -> float:
        """Return infinity: any finite gradient will do."""
        return math.inf

    def add(self, total: Tensor, gradient: Tensor) -> None:
        """Add a flat gradient to a flat float32 total."""
        total.add_(gradient)

    def to_float64(self, total: Tensor) -> Tensor:
        """Return a total as float64."""
        return total.double()


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Exact mode: each gradient is rounded once, and integers are summed in any order."""

    fraction_bits: int
    microbatches: int
    dtype: torch.dtype = torch.int64

    def bound(self, uses: int) -> float:
        """Return 2**(62 - fraction_bits - ceil(log2(microbatches * uses))): no sum can wrap.

        A tied tensor gets one gradient per microbatch from each of its uses.
        """
        carries = (self.microbatches * uses - 1).bit_length()
        return float(2.0 ** (62 - self.fraction_bits - carries))

    def add(self, total: Tensor, gradient: Tensor) -> None:
        """Add a flat gradient, rounded to multiples of 2**-fraction_bits, to an int64 total."""
        size = min(CHUNK_ELEMENTS, total.numel())
        scaled = torch.empty(size, dtype=torch.float64, device=total.device)
        rounded = torch.empty(size, dtype=torch.int64, device=total.device)
        for start in range(0, total.numel(), CHUNK_ELEMENTS):
            part = gradient[start : start + CHUNK_ELEMENTS]
            scaled_part, rounded_part = scaled[: part.numel()], rounded[: part.numel()]
            scaled_part.copy_(part)
            scaled_part.mul_(2.0**self.fraction_bits).round_()
            rounded_part.copy_(scaled_part)
            total[start : start + CHUNK_ELEMENTS].add_(rounded_part)

    def to_float64(self, total: Tensor) -> Tensor:
        """Return a total as float64, rounded where it has more than 53 bits."""
        return total.double().mul_(2.0**-self.fraction_bits)


def square_norm(total: Tensor, form: Format) -> float:
    """Return the squared L2 norm of a flat total: the same for any number of threads.

    float64 sums over rows of 1024 elements, and their exactly rounded sum.
    """
    rows: list[float] = []
    for start in range(0, total.numel(), CHUNK_ELEMENTS):
        part = form.to_float64(total[start : start + CHUNK_ELEMENTS])
        short = -part.numel() % NORM_ROW
        squares = torch.nn.functional.pad(part.square_(), (0, short)).view(-1, NORM_ROW)
        rows.extend(squares.sum(dim=1).tolist())
    return math.fsum(rows) if all(map(math.isfinite, rows)) else math.inf


def scaled(total: Tensor, form: Format, scale: float, like: Tensor) -> Tensor:
    """Return `total * scale` (computed in float64), in the shape, dtype and device of `like`."""
    result = torch.empty(total.numel(), dtype=like.dtype, device=like.device)
    for start in range(0, total.numel(), CHUNK_ELEMENTS):
        part = form.to_float64(total[start : start + CHUNK_ELEMENTS]).mul_(scale)
        result[start : start + CHUNK_ELEMENTS].copy_(part)
    return result.view(like.shape)
