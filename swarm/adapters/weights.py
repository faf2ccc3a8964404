"""Weights as bytes: a layer's state, the exported file, and their hashes.

The rule: equal weights give equal bytes.
"""

import hashlib
from collections.abc import Mapping, Sequence

import safetensors
import safetensors.torch
from torch import Tensor

from swarm.errors import ExportError


def layer_bytes(state: Mapping[str, Tensor]) -> bytes:
    """Return named tensors as safetensors bytes; tensors may share memory."""
    return safetensors.torch.save(_plain(state))


def read_tensors(data: bytes | bytearray | memoryview) -> dict[str, Tensor]:
    """Return the named tensors of safetensors bytes, on the CPU. Raises ValueError."""
    try:
        return safetensors.torch.load(bytes(data))
    except (safetensors.SafetensorError, KeyError) as error:  # KeyError: a dtype torch has not
        raise ValueError(f"no safetensors: {error}") from error


def merge(layer_states: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """Return the exported file: the states of all layers, under the model's own names.

    It loads into the plain module with `safetensors.torch.load_file` and
    `load_state_dict(strict=True)`. Raises ExportError if two layers hold one name with unlike
    values.
    """
    merged: dict[str, Tensor] = {}
    for data in layer_states:
        for name, tensor in read_tensors(data).items():
            known = merged.setdefault(name, tensor)
            if known is not tensor and layer_bytes({name: known}) != layer_bytes({name: tensor}):
                raise ExportError(
                    f"two layers hold {name!r} with unlike values",
                    hint="their states are of different versions: fetch them again",
                )
    return safetensors.torch.save(_plain(merged), metadata={"format": "pt"})


def weights_hash(data: bytes | bytearray | memoryview) -> str:
    """Return the SHA-256 of an exported file, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def _plain(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: state[name].detach().cpu().contiguous().clone() for name in sorted(state)}
