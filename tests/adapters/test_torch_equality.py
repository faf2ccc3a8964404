"""Stages and replicas, driven by hand in one process, give the weights of the reference."""

from collections import OrderedDict

import pytest
import safetensors.torch
import torch
from torch import nn

from protocol.records import ModelSpec, OptimiserSpec, Training
from swarm.adapters.weights import weights_hash
from swarm.models import convnet, gpt
from tests.adapters.torch_swarm import (
    GPT,
    MICROBATCHES,
    PICTURES,
    STEPS,
    TOKENS,
    Swarm,
    execution,
    reference,
    sample_ids,
    source_of,
    with_,
)

MOMENTUM = OptimiserSpec("sgd", 0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
CLIPPED = OptimiserSpec(
    "adamw", 0.01, weight_decay=0.1, clip_norm=0.05, schedule="cosine", warmup_steps=1
)


def dropping(training: Training) -> Training:
    model = training.model
    return with_(training, model=ModelSpec(model.factory, {**model.arguments, "dropout": 0.2}))


EXACT = {
    "gpt adamw clipped": with_(GPT, optimiser=CLIPPED),
    "gpt sgd dropout recomputed": execution(
        dropping(with_(GPT, optimiser=MOMENTUM)), recompute=True
    ),
    "pictures sgd": with_(PICTURES, optimiser=MOMENTUM),
    "pictures adamw clipped recomputed": execution(
        with_(PICTURES, optimiser=CLIPPED), recompute=True
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_mode_gives_the_bits_of_the_reference(name: str) -> None:
    training = EXACT[name]
    expected = reference(training)
    hashes = {weights_hash(expected)}
    for cuts, counts in (((), [3]), ((1, 2, 3), [1, 1, 1, 1]), ((1, 3), [2, 3, 2])):
        hashes.add(weights_hash(Swarm.start(training, cuts, counts).train()))
    assert hashes == {weights_hash(expected)}
    assert weights_hash(expected) != weights_hash(Swarm.start(training, (), [1]).export())


def test_recomputation_and_dropout_change_bits_only_where_they_should() -> None:
    training = dropping(with_(GPT, optimiser=MOMENTUM))
    plain = reference(training)
    assert plain == reference(execution(training, recompute=True))
    assert plain != reference(with_(GPT, optimiser=MOMENTUM))
    assert plain != reference(with_(training, seed=4))


def tensors(data: bytes) -> dict[str, torch.Tensor]:
    return safetensors.torch.load(data)


def relative_error(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    difference = sum(float((one[n] - other[n]).double().square().sum()) for n in one)
    size = sum(float(other[n].double().square().sum()) for n in one)
    return float((difference / size) ** 0.5)


def test_standard_mode_gives_the_reference_up_to_the_order_of_sums() -> None:
    training = with_(execution(GPT, determinism="standard"), optimiser=CLIPPED)
    expected = tensors(reference(training))
    found = tensors(Swarm.start(training, (1, 3), [2, 1, 2]).train())
    assert relative_error(found, expected) < 1e-5
    exact = tensors(reference(with_(GPT, optimiser=CLIPPED)))
    assert relative_error(exact, expected) < 1e-5


def test_standard_mode_of_convolutions_errs_by_the_order_of_sums_alone() -> None:
    """A reordered reference: the whole model in every replica, sums regrouped and nothing else."""
    training = with_(execution(PICTURES, determinism="standard"), optimiser=MOMENTUM)
    reordered = Swarm.start(training, (), [3]).train()
    pipelined = Swarm.start(training, (1, 3), [3, 3, 3]).train()
    assert pipelined == reordered
    assert 0 < relative_error(tensors(reordered), tensors(reference(training))) < 3e-3


def plain_gpt(training: Training) -> nn.Module:
    """The GPT as an ordinary module, made without the project's slicing."""
    made = gpt.layers(**training.model.arguments)  # type: ignore[arg-type]
    module = nn.Sequential(OrderedDict((name, make()) for name, make in made["layers"]))  # type: ignore[attr-defined]
    module.head.project.weight = module.embed.token.weight  # type: ignore[union-attr]
    return module


@pytest.mark.parametrize("optimiser", [CLIPPED, MOMENTUM], ids=lambda spec: spec.name)
@pytest.mark.parametrize("kind", ["gpt", "pictures"])
def test_the_reference_is_an_ordinary_training_loop(kind: str, optimiser: OptimiserSpec) -> None:
    training = execution(
        with_(GPT if kind == "gpt" else PICTURES, optimiser=optimiser), determinism="standard"
    )
    initial = Swarm.start(training, (), [1]).export()
    losses: list[float | None] = []
    trained = reference(training, progress=lambda version, loss: losses.append(loss))
    if kind == "gpt":
        module = plain_gpt(training)
    else:
        module = convnet.classifier(channels=4, image=8)
    module.load_state_dict(tensors(initial), strict=True)
    expected_losses = ordinary_loop(training, module)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert relative_error(tensors(trained), dict(module.state_dict())) < 1e-5
    assert relative_error(tensors(initial), tensors(trained)) > 1e-3


def ordinary_loop(training: Training, module: nn.Module) -> list[float]:
    source, spec = source_of(training), training.optimiser
    optimiser: torch.optim.Optimizer
    if spec.name == "sgd":
        optimiser = torch.optim.SGD(
            module.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=0.01
        )
        rates = [0.1, 0.1, 0.1]
    else:
        optimiser = torch.optim.AdamW(module.parameters(), 0.01, weight_decay=0.1)
        rates = [0.01, 0.01, 0.0]  # one step of warm-up, then half a cosine over one step
    losses = []
    for step in range(STEPS):
        optimiser.param_groups[0]["lr"] = rates[step]
        optimiser.zero_grad()
        ids = [i for index in range(MICROBATCHES) for i in sample_ids(step, index)]
        raw_inputs, raw_targets, _ = source.microbatch(ids)
        count = len(ids)
        if training.data.source == "text":
            inputs = torch.frombuffer(bytearray(raw_inputs), dtype=torch.int64).view(count, TOKENS)
        else:
            floats = torch.frombuffer(bytearray(raw_inputs), dtype=torch.float32)
            inputs = floats.view(count, 3, 8, 8)
        targets = torch.frombuffer(bytearray(raw_targets), dtype=torch.int64)
        logits = module(inputs)
        loss = nn.functional.cross_entropy(logits.view(len(targets), -1), targets)
        loss.backward()
        if spec.clip_norm:
            norm = nn.utils.clip_grad_norm_(module.parameters(), spec.clip_norm)
            assert norm > spec.clip_norm
        optimiser.step()
        losses.append(loss.item())
    return losses
