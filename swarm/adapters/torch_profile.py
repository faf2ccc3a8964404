"""What a peer finds out about a model before it joins: shapes, seconds, and which bits it makes.

The rule: one layer is held at a time, so a model that fits no single peer can be surveyed. All
input comes from the manifest, so that equal settings on like hardware give equal fingerprints.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from protocol.records import LayerProfile, TensorSpec, Training
from swarm.adapters.author_code import FAULTS, describe
from swarm.adapters.processors import stretch_of
from swarm.adapters.torch_batches import (
    batch_specs,
    check_classes,
    encode,
    load_loss,
    random_batch,
    spec_of,
)
from swarm.adapters.torch_gate import apply_checked, does_not_run
from swarm.adapters.torch_numerics import Boundary, Record, Settings, seed_generator, seed_of
from swarm.adapters.torch_slicing import Layer, SlicedModel
from swarm.adapters.weights import layer_bytes
from swarm.core.model import LayerShape, ModelShape
from swarm.errors import ModelError

SLOW_SECONDS = 0.3
"""A layer whose runs took longer together is not run again."""
RUNS = 3
"""A layer is run so often at least,"""
TIMED_SECONDS = 0.2
"""and all together for so long."""


Laps = tuple[Sequence[float], Sequence[float]]
"""Seconds of each forward and of each backward of one layer."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What one pass through the layers showed."""

    shape: ModelShape
    layers: tuple[LayerProfile, ...]
    in_place: tuple[bool, ...]
    """Whether the layer writes into its input: then it is given a copy."""
    numerics: str


@dataclass(slots=True)
class _Runs:
    """Results of running one layer: the first run's bits, and every run's seconds."""

    tensors: list[Tensor] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)
    backward_seconds: list[float] = field(default_factory=list)
    activation_bytes: int = 0
    """Kept from forward to backward."""


def survey(model: SlicedModel, training: Training, settings: Settings, *, timed: bool) -> Survey:
    """Run every layer once, and again for its time if `timed`.

    Raises ModelError if a layer or the loss does not run, is not deterministic although the
    manifest wants exact results, or is not a function of its input.
    """
    inputs, target = batch_specs(training)
    hidden = random_batch(inputs, seed_of(training.seed, "input")).to(settings.device)
    shapes, profiles, in_place, digest = [], [], [], hashlib.sha256()
    laps: list[Laps] = []
    for number, name in enumerate(model.names):
        layer = model.layer(number, settings.device)
        writes, output = _examine(layer, hidden, settings)
        in_place.append(writes)
        seconds = TIMED_SECONDS / len(model.names) if timed else 0.0
        runs = _run(layer, hidden, writes, settings, seconds)
        digest.update(layer_bytes(layer.state))
        for tensor in runs.tensors:
            digest.update(encode(tensor))
        shapes.append(LayerShape(name, layer.uses, output))
        profiles.append(_profile(layer, output, runs))
        laps.append((runs.forward_seconds, runs.backward_seconds))
        hidden = runs.tensors[0]
    check_classes(training.loss, shapes[-1].output, target)
    target_batch = random_batch(target, seed_of(training.seed, "target")).to(settings.device)
    for tensor in _try_loss(training, hidden, target_batch):
        digest.update(encode(tensor))
    shape = ModelShape(tuple(shapes), inputs.tensor, target.tensor)
    numerics = f"{_facts(settings)} sha256={digest.hexdigest()}"
    on_processors = settings.device.type == "cpu"  # another device has no quota of them
    factor = sustained_factor(laps, stretch_of(settings.threads) if on_processors else 1.0)
    return Survey(
        shape, tuple(_slowed(each, factor) for each in profiles), tuple(in_place), numerics
    )


def sustained_factor(laps: Sequence[Laps], least: float = 1.0) -> float:
    """Return how many times as long as the quickest run of each the runs of all layers took
    together; at least `least`.

    Layers are compared by their quickest runs, which nothing has disturbed. What a machine does
    beside, or a quota of processor time, which stops a run now and then for long, concerns all of
    them: in the mean, which is what counts in training, that is a slow peer."""
    taken = sum(sum(lap) for layer in laps for lap in layer)
    quickest = sum(len(lap) * min(lap) for layer in laps for lap in layer if lap)
    return max(taken / quickest if quickest else 1.0, least, 1.0)


def apply_layer(
    layer: Layer, hidden: Tensor, seed: int, *, in_place: bool, settings: Settings
) -> Tensor:
    """Return the layer's output. Its random draws depend on `seed`, when recomputed too."""

    def run(hidden: Tensor) -> Tensor:
        seed_generator(settings.device, seed)
        output: Tensor = layer.module(hidden.clone() if in_place else hidden)
        return output

    if not settings.recompute:
        return run(hidden)
    output: Tensor = checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False)
    return output


def _examine(layer: Layer, hidden: Tensor, settings: Settings) -> tuple[bool, TensorSpec]:
    """Return whether the layer writes into its input, and the spec of its output."""
    private = hidden.clone()
    before = private._version
    seed_generator(settings.device, seed_of(settings.seed, "examine", layer.number))
    with torch.no_grad():
        output = apply_checked(layer.name, layer.module, private)
    spec = spec_of(output)
    if spec is None:
        raise ModelError(f"layer {layer.name!r} returns {output.dtype}, which cannot travel")
    return private._version != before, spec


def _run(layer: Layer, hidden: Tensor, in_place: bool, settings: Settings, seconds: float) -> _Runs:
    """Run a layer once, and again for its time if `seconds` are given: for as long at least."""
    runs = _Runs()
    _run_once(layer, hidden, in_place, settings, runs)
    if seconds:
        runs.activation_bytes = _kept_bytes(layer, hidden, in_place, settings)
    if not seconds:
        return runs
    runs.forward_seconds.clear()  # the first run warms up: libraries are loaded, kernels chosen
    runs.backward_seconds.clear()
    while not _is_timed(runs, seconds):
        _run_once(layer, hidden, in_place, settings, runs)
    return runs


def _is_timed(runs: _Runs, seconds: float) -> bool:
    taken = _taken(runs)
    return taken > SLOW_SECONDS or (len(runs.forward_seconds) >= RUNS and taken >= seconds)


def _taken(runs: _Runs) -> float:
    return sum(runs.forward_seconds) + sum(runs.backward_seconds)


def _run_once(
    layer: Layer, hidden: Tensor, in_place: bool, settings: Settings, runs: _Runs
) -> None:
    leaf = hidden.clone()
    wanted: list[Tensor] = list(layer.parameters.values())
    if leaf.is_floating_point():
        wanted.append(leaf.requires_grad_())
    seed = seed_of(settings.seed, "profile", layer.number)
    clock = _Clock(settings.device)
    try:
        output = apply_layer(layer, leaf, seed, in_place=in_place, settings=settings)
        output = Boundary.apply(output, Record(), settings.exact, 0, "", "")  # type: ignore[no-untyped-call]
        runs.forward_seconds.append(clock.lap())
        gradients: Sequence[Tensor | None] = []
        if wanted and output.requires_grad:
            cotangent = _cotangent(output, seed)
            clock.lap()
            gradients = torch.autograd.grad(output, wanted, cotangent, allow_unused=True)
        runs.backward_seconds.append(clock.lap())
    except FAULTS as fault:
        raise does_not_run(layer.name, hidden, fault) from fault
    tensors = [output.detach(), *(g.contiguous() for g in gradients if g is not None)]
    if not runs.tensors:
        runs.tensors = tensors
    elif settings.exact and not all(map(_same_bits, runs.tensors, tensors)):
        raise ModelError(
            f"layer {layer.name!r} gave other bits when it was run again",
            evidence=("same weights, same input, same seed of torch's generator",),
            hint="draw random numbers from torch only, and keep no state in forward",
        )


def _kept_bytes(layer: Layer, hidden: Tensor, in_place: bool, settings: Settings) -> int:
    """Return how much a microbatch keeps from forward to backward: the layer's input and whatever
    autograd saves, every storage once, without parameters and buffers. With recomputation that is
    the input alone. It takes a forward of its own, since the hooks would hide faults of backward.
    """
    leaf = hidden.clone()
    if leaf.is_floating_point():
        leaf.requires_grad_()
    own = {_storage(tensor) for tensor in layer.state.values()}
    kept = {_storage(leaf): leaf.untyped_storage().nbytes()}

    def note(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in own:
            kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    seed = seed_of(settings.seed, "profile", layer.number)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        apply_layer(layer, leaf, seed, in_place=in_place, settings=settings)
    return sum(kept.values())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Clock:
    """Measures laps; waits for the device first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = self._now()

    def lap(self) -> float:
        """Return seconds since the last lap."""
        now = self._now()
        last, self._last = self._last, now
        return now - last

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _cotangent(output: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(output.shape, generator=generator).to(output.device, output.dtype)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return encode(one) == encode(other)


def _slowed(profile: LayerProfile, factor: float) -> LayerProfile:
    return replace(
        profile,
        forward_seconds=profile.forward_seconds * factor,
        backward_seconds=profile.backward_seconds * factor,
    )


def _profile(layer: Layer, output: TensorSpec, runs: _Runs) -> LayerProfile:
    tensors = {id(tensor): tensor for tensor in layer.state.values()}.values()
    return LayerProfile(
        name=layer.name,
        forward_seconds=min(runs.forward_seconds),
        backward_seconds=min(runs.backward_seconds),
        parameter_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        output=output,
        activation_bytes=runs.activation_bytes,
    )


def _try_loss(training: Training, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient. Raises ModelError if it is no differentiable scalar."""
    function = load_loss(training.loss)
    output = output.clone().requires_grad_()
    try:
        loss = function(output, target)
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            raise ModelError(
                f"the loss {training.loss.function!r} returns no sum",
                hint="return a tensor without dimensions that depends on the output",
            )
        (gradient,) = torch.autograd.grad(loss, output)
    except FAULTS as fault:
        raise ModelError(
            f"the loss {training.loss.function!r} does not run on the model's output",
            evidence=(
                describe(fault),
                f"output {output.dtype}{list(output.shape)}",
                f"target {target.dtype}{list(target.shape)}",
            ),
        ) from fault
    return loss.detach(), gradient.contiguous()


def _facts(settings: Settings) -> str:
    device = settings.device
    if device.type == "cuda":
        capability = torch.cuda.get_device_name(device).replace(" ", "_")
    else:
        capability = torch.backends.cpu.get_cpu_capability()
    return " ".join(
        (
            f"torch={torch.__version__}",
            f"device={device.type}",
            f"capability={capability}",
            f"threads={settings.threads}",
            f"determinism={'exact' if settings.exact else 'standard'}",
        )
    )
