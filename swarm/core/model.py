"""What every peer knows of the model without holding it; the same on every peer of a run."""

from collections.abc import Iterable
from dataclasses import dataclass

from protocol.records import LayerProfile, TensorSpec


@dataclass(frozen=True, slots=True)
class TensorUse:
    """One parameter of one layer."""

    name: str
    """Name in the model's own state_dict."""
    elements: int
    tied_to: str
    """Name of the tensor that owns this value: its own name unless it is tied."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer: its parameters and what it sends on (for a whole microbatch)."""

    name: str
    tensors: tuple[TensorUse, ...]
    output: TensorSpec


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The whole model, layer by layer, for one microbatch."""

    layers: tuple[LayerShape, ...]
    input: TensorSpec
    target: TensorSpec


@dataclass(frozen=True, slots=True)
class Profile:
    """What a peer measured before it joined."""

    shape: ModelShape
    layers: tuple[LayerProfile, ...]
    numerics: str
    """Fingerprint: peers with equal fingerprints compute equal bits."""
    memory_bytes: int


def microbatch_seconds(layers: Iterable[LayerProfile]) -> float:
    """Return how long a microbatch takes in these layers, there and back."""
    return sum(layer.forward_seconds + layer.backward_seconds for layer in layers)
