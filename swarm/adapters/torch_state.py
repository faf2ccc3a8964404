"""A layer's whole state as bytes, and back: from it another peer goes on with the same bits.

The rule: a tensor is there once, and what is read has exactly the names, shapes and dtypes of
the layer that it is read into. A layer's state does not depend on the slicing:

    weight/NAME             a parameter, under the model's own name
    buffer/NAME             a persistent buffer
    optimiser/NAME/KEY      what the optimiser remembers of a trained parameter, under torch's
                            key; none before the first update
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swarm.adapters.torch_slicing import Layer
from swarm.adapters.weights import layer_bytes, read_tensors
from swarm.ports import Buffer


@dataclass(frozen=True, slots=True)
class Restored:
    """What the bytes of a layer say."""

    values: dict[str, Tensor]
    """Parameters and buffers, by the names that `values_of` gives them."""
    memories: dict[str, dict[str, Tensor]]
    """What the optimiser remembers, by parameter and key; parameters without memory lack."""


def capture(layer: Layer, memories: Mapping[str, Mapping[str, Tensor]]) -> bytes:
    """Return the state of a layer; `memories` are the optimiser's, by trained parameter."""
    remembered = {
        f"optimiser/{name}/{key}": value
        for name, memory in memories.items()
        for key, value in memory.items()
    }
    return layer_bytes(values_of(layer) | remembered)


def values_of(layer: Layer) -> dict[str, Tensor]:
    """Return parameters and persistent buffers, each once under its first name: live."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, value in layer.state.items():
        kind = "weight" if isinstance(value, nn.Parameter) else "buffer"
        found.setdefault(id(value), (f"{kind}/{name}", value))
    return dict(found.values())


def read(layer: Layer, data: Buffer) -> Restored:
    """Take the bytes of a layer's state apart.

    Raises ValueError if they are not those of `layer`, as far as that shows in it: the memories
    must still be compared with what the optimiser makes."""
    values: dict[str, Tensor] = {}
    memories: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_tensors(data).items():
        if name.startswith("optimiser/"):
            parameter, _, key = name.removeprefix("optimiser/").rpartition("/")
            memories.setdefault(parameter, {})[key] = tensor
        else:
            values[name] = tensor
    check_alike(values, values_of(layer), f"layer {layer.name!r}")
    unknown = memories.keys() - layer.parameters.keys()
    if unknown:
        raise ValueError(f"layer {layer.name!r} has no trained tensor {min(unknown)!r}")
    return Restored(values, memories)


def check_alike(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str) -> None:
    """Raise ValueError unless names, shapes and dtypes are the same."""
    if found.keys() != wanted.keys():
        name = min(found.keys() ^ wanted.keys())
        raise ValueError(f"state of {where} {'lacks' if name in wanted else 'has'} {name!r}")
    for name, tensor in wanted.items():
        got, want = (f"{t.dtype}{list(t.shape)}" for t in (found[name], tensor))
        if got != want:
            raise ValueError(f"state of {where}: {name!r} is {got}, not {want}")


def fill(live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write `values` into the tensors of the same names, keeping their strides and ties."""
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(values[name])
