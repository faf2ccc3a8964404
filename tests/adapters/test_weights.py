"""The exported file loads into the plain module, and equal weights give equal bytes."""

import hashlib
from collections import OrderedDict
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from swarm.adapters.weights import layer_bytes, merge, weights_hash
from swarm.errors import ExportError
from swarm.models import convnet
from swarm.models.gpt import layers as gpt_layers
from tests.adapters.torch_swarm import GPT, PICTURES, Swarm


def test_a_trained_gpt_loads_into_the_plain_module(tmp_path: Path) -> None:
    swarm = Swarm.start(GPT, (1, 3), [1, 1, 1])
    path = tmp_path / "weights.safetensors"
    path.write_bytes(swarm.train())
    made = gpt_layers(width=16, depth=2, heads=2, context=8, vocabulary=32)["layers"]
    module = nn.Sequential(OrderedDict((name, make()) for name, make in made))  # type: ignore[attr-defined]
    module.head.project.weight = module.embed.token.weight  # type: ignore[union-attr]
    module.load_state_dict(safetensors.torch.load_file(path), strict=True)
    trained = safetensors.torch.load(bytes(swarm.replicas[2][0].layer_state(3)))
    assert torch.equal(module.embed.token.weight, trained["head.project.weight"])  # type: ignore[union-attr]
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_trained_classifier_loads_into_the_plain_module(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(Swarm.start(PICTURES, (2,), [2, 1]).train())
    module = convnet.classifier(channels=4, image=8)
    before = module.layers[0][0].weight.clone()  # type: ignore[index]
    module.load_state_dict(safetensors.torch.load_file(path), strict=True)
    assert not torch.equal(before, module.layers[0][0].weight)  # type: ignore[index]


def test_bytes_depend_on_the_weights_alone() -> None:
    one, other = torch.arange(6.0).view(2, 3), torch.ones(2, dtype=torch.int64)
    strided = torch.arange(12.0).view(2, 6)[:, ::2] / 2
    data = layer_bytes({"b": one, "a": other})
    assert layer_bytes({"a": other, "b": strided}) == data
    assert layer_bytes({"a": other, "b": strided + 1}) != data
    merged = merge([layer_bytes({"a": other}), memoryview(layer_bytes({"b": one}))])
    assert merge([layer_bytes({"b": one}), layer_bytes({"a": other})]) == merged
    assert weights_hash(merged) == hashlib.sha256(merged).hexdigest()


def test_tensors_may_share_memory_and_names_may_repeat_if_they_agree() -> None:
    one = torch.arange(6.0)
    data = layer_bytes({"a": one, "b": one})
    assert merge([data, layer_bytes({"b": one.clone()})]) == merge([data])
    with pytest.raises(ExportError, match="two layers hold 'b' with unlike values"):
        merge([data, layer_bytes({"b": one + 1})])
    with pytest.raises(ExportError, match="two layers hold 'b' with unlike values"):
        merge([data, layer_bytes({"b": one.view(2, 3)})])
