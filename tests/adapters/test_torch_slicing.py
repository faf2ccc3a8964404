"""What a factory may return, what is refused and why, and initial weights."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protocol.records import DataSpec, LossSpec, ModelSpec, OptimiserSpec, SampleSpec, Training
from swarm.adapters.torch_slicing import load_model
from swarm.adapters.torch_stage import TorchStage
from swarm.adapters.weights import layer_bytes, merge
from swarm.errors import ConfigError, ModelError
from tests.adapters.torch_swarm import GPT, PICTURES, Swarm, execution, reference, with_

CPU = torch.device("cpu")
THIS = __name__


def vectors(factory: str, **arguments: int | str) -> Training:
    """A run over vectors of four numbers."""
    return Training(
        name="vectors",
        steps=2,
        microbatches_per_step=2,
        microbatch_size=3,
        model=ModelSpec(factory, dict(arguments)),
        data=DataSpec(
            "factory", sample=SampleSpec("float32", (4,)), target=SampleSpec("float32", (4,))
        ),
        loss=LossSpec("mse"),
    )


def made(function: Callable[..., object]) -> Training:
    return vectors(f"{THIS}:{function.__name__}")


def refusal(training: Training) -> ModelError:
    with pytest.raises(ModelError) as caught:
        TorchStage(training).build([(0, 1)], 0)
    return caught.value


# --- initial weights ---------------------------------------------------------------------------


@pytest.mark.parametrize("training", [GPT, PICTURES], ids=lambda training: training.name)
def test_initial_weights_do_not_depend_on_the_slicing(training: Training) -> None:
    whole = Swarm.start(training, (), [1]).export()
    assert Swarm.start(training, (1, 2, 3), [1, 1, 1, 1]).export() == whole
    assert Swarm.start(training, (2,), [1, 1]).export() == whole
    assert Swarm.start(with_(training, seed=4), (), [1]).export() != whole


def test_a_layer_is_built_without_the_others() -> None:
    model = load_model(GPT)
    alone = layer_bytes(model.layer(2, CPU).state)
    others = [model.layer(number, CPU) for number in range(4)]
    assert layer_bytes(others[2].state) == alone
    assert others[1].name == "block0"
    assert layer_bytes(others[1].state) != alone


def test_a_tied_tensor_starts_as_its_owner_although_the_owner_is_elsewhere() -> None:
    head = load_model(GPT).layer(3, CPU)
    embed = load_model(GPT).layer(0, CPU)
    assert head.owners["head.project.weight"] == "embed.token.weight"
    assert torch.equal(head.state["head.project.weight"], embed.state["embed.token.weight"])


# --- what may be returned -------------------------------------------------------------------


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 4))


class Exposed(nn.Module):
    """Layers by other names, one of them used twice, two tied, one without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.activation = nn.Tanh()
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("unused", None)

    @property
    def layers(self) -> list[nn.Module]:
        return [self.first, self.activation, self.first, self.activation, self.last]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.last(self.activation(self.first(self.activation(self.first(hidden)))))


def exposed() -> nn.Module:
    return Exposed()


def pairs() -> list[tuple[str, partial[nn.Module]]]:
    return [("a", partial(nn.Linear, 4, 4)), ("b", partial(nn.Linear, 4, 4))]


class Turned(nn.Module):
    """Output and gradient in other strides than they came."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.t()


class StridesMatter(torch.autograd.Function):
    """Stands for the kernels whose bits depend on strides."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden * (1.0 if hidden.is_contiguous() else 1.1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (1.0 if gradients[0].is_contiguous() else 1.1)


class Picky(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = StridesMatter.apply(hidden)
        return result


def strided() -> list[tuple[str, Callable[[], nn.Module]]]:
    linear = partial(nn.Linear, 4, 4)
    turned = [("turn", Turned), ("picky", Picky), ("back", Turned)]
    return [("first", linear), *turned, ("last", linear)]


@pytest.mark.parametrize("factory", [sequential, exposed, pairs, strided])
def test_every_form_trains_alike_in_every_slicing(factory: Callable[[], Any]) -> None:
    training = execution(with_(made(factory), optimiser=OptimiserSpec("sgd", 0.01)))
    training = execution(training, determinism="exact")
    layers = len(load_model(training).names)
    source = Vectors()
    expected = reference(training, source)
    cuts = tuple(range(1, layers))
    assert Swarm.start(training, cuts, [1] * layers).train(source) == expected
    assert Swarm.start(training, (1,), [2, 2]).train(source) == expected
    recomputed = execution(training, recompute=True)
    assert Swarm.start(recomputed, cuts, [1] * layers).train(source) == expected
    assert Swarm.start(training, (), [1]).export() != expected


class Vectors:
    def digest(self) -> bytes:
        return b"\0" * 32

    def __len__(self) -> int:
        return 100

    def microbatch(self, sample_ids: Any) -> tuple[memoryview, memoryview, int]:
        draw = torch.Generator().manual_seed(sample_ids[0])
        inputs, targets = torch.randn(3, 4, generator=draw), torch.randn(3, 4, generator=draw)
        return (
            inputs.numpy().reshape(-1).data.cast("B"),
            targets.numpy().reshape(-1).data.cast("B"),
            12,
        )


def test_names_and_ties_of_a_whole_module_are_its_own() -> None:
    model = load_model(made(exposed))
    layers = [model.layer(number, CPU) for number in range(5)]
    assert model.names == ("first", "activation", "layers[2]", "layers[3]", "last")
    assert layers[4].owners == {"last.weight": "first.weight", "last.bias": "last.bias"}
    assert layers[2].owners == {"first.weight": "first.weight", "first.bias": "first.bias"}
    assert list(layers[1].parameters) == []
    leaves = [id(leaf) for layer in layers for leaf in layer.parameters.values()]
    assert len(set(leaves)) == len(leaves) == 6
    state = merge([layer_bytes(layer.state) for layer in layers])
    Exposed().load_state_dict(safetensors.torch.load(state), strict=True)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, what",
    [
        ("no_such_package.models:gpt", "does not import"),
        ("swarm.models.gpt:no_such_function", "does not exist"),
        ("swarm.models.gpt:INITIAL_DEVIATION", "cannot be called"),
        ("swarm.models.gpt", "is no import path"),
        (":layers", "is no import path"),
    ],
)
def test_a_factory_that_cannot_be_found(path: str, what: str) -> None:
    error = refusal(vectors(path))
    assert what in error.what and path in error.what
    assert error.hint


def test_a_factory_that_raises_is_named_with_its_arguments() -> None:
    error = refusal(vectors("swarm.models.gpt:layers", width=10, heads=3))
    assert error.what == "the model factory 'swarm.models.gpt:layers' raised"
    assert error.evidence == (
        "ValueError: width 10 is not a multiple of 3 heads",
        "called with heads=3, width=10",
    )
    error = refusal(vectors("swarm.models.gpt:layers", widht=10))
    assert "unexpected keyword argument 'widht'" in error.evidence[0]


def test_the_working_folder_is_searched(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_model.py").write_text("def broken():\n    raise KeyError('lost')\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert refusal(vectors("my_own_model:broken")).evidence[0] == "KeyError: 'lost'"


class NotItsLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.layers[1](self.layers[0](hidden))


class ScalesGradients(nn.Module):
    """Equal outputs, other gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, hidden: Tensor) -> Tensor:
        between = self.layers[0](hidden)
        return self.layers[1](between.detach() + 0.0 * between)


class DependsOnBatch(nn.Module):
    """Right at the manifest's batch size only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layers[0](hidden) * (len(hidden) / 3)


class OutsideParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layers[0](hidden)


class NoLayers(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


class TwoResults(nn.Module):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, hidden


class WholeNumbers(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.long()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return hidden


class WrongWidth(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, torch.ones(3, 5))


def not_its_layers() -> nn.Module:
    return NotItsLayers()


def scales_gradients() -> nn.Module:
    return ScalesGradients()


def depends_on_batch() -> nn.Module:
    return DependsOnBatch()


def outside_parameter() -> nn.Module:
    return OutsideParameter()


def no_layers() -> nn.Module:
    return NoLayers()


def a_number() -> int:
    return 7


def wrong_key() -> dict[str, object]:
    return {"layers": pairs(), "tie": {}}


def same_name_twice() -> list[object]:
    return [*pairs(), *pairs()]


def not_pairs() -> list[object]:
    return [nn.Linear(4, 4)]


def tie_to_nothing() -> dict[str, object]:
    return {"layers": pairs(), "tied": {"b.weight": "c.weight"}}


def tie_without_tensor() -> dict[str, object]:
    return {"layers": pairs(), "tied": {"b.weight": "a.gewicht"}}


def tie_of_unlike_shapes() -> dict[str, object]:
    return {"layers": pairs(), "tied": {"b.weight": "a.bias"}}


def chain_of_ties() -> dict[str, object]:
    layers = [*pairs(), ("c", partial(nn.Linear, 4, 4))]
    return {"layers": layers, "tied": {"c.weight": "b.weight", "b.weight": "a.weight"}}


def with_layer(layer: type[nn.Module]) -> list[tuple[str, Callable[[], nn.Module]]]:
    return [("fine", partial(nn.Linear, 4, 4)), ("wrong", layer)]


def two_results() -> object:
    return with_layer(TwoResults)


def whole_numbers() -> object:
    return with_layer(WholeNumbers)


def counts() -> object:
    return with_layer(Counts)


def wrong_width() -> object:
    return with_layer(WrongWidth)


def lazy() -> object:
    return [("lazy", partial(nn.LazyLinear, 4))]


def batch_norm_layer() -> object:
    return [("fine", partial(nn.Linear, 4, 4)), ("norm", partial(nn.BatchNorm1d, 4))]


def instance_norm() -> object:
    """It writes its statistics without a new version of the tensor."""
    norm = partial(nn.InstanceNorm1d, 3, track_running_stats=True)
    return [("fine", partial(nn.Linear, 4, 4)), ("norm", norm)]


def batch_norm_module() -> object:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4)))


REFUSED = [
    (not_its_layers, "applied in order, are not the model", "the output differs at batch size 3"),
    (scales_gradients, "applied in order, are not the model", "the gradient of layers.0.weight"),
    (depends_on_batch, "applied in order, are not the model", "the output differs at batch size 4"),
    (outside_parameter, "tensors that are in none of its layers", "scale"),
    (no_layers, "returned a NoLayers without a sequence `layers`", ""),
    (a_number, "returned a int", ""),
    (wrong_key, "returned a dict with keys ['layers', 'tie']", ""),
    (same_name_twice, "returned two layers named 'a'", ""),
    (not_pairs, "returned a list with Linear", ""),
    (tie_to_nothing, "a tie with 'c.weight'", ""),
    (tie_without_tensor, "no trained tensor 'a.gewicht'", "the layer has a.bias, a.weight"),
    (tie_of_unlike_shapes, "they differ in shape", "torch.float32[4, 4]"),
    (chain_of_ties, "'c.weight' tied to 'b.weight', which does not own its value", ""),
    (two_results, "layer 'wrong' returns a tuple", ""),
    (whole_numbers, "layer 'wrong' returns torch.int64", ""),
    (counts, "layer 'wrong' changes 'calls' in its forward", ""),
    (wrong_width, "layer 'wrong' does not run", "RuntimeError"),
    (lazy, "has no shape before its first input", ""),
    (batch_norm_layer, "layer 'norm' changes 'running_mean' in its forward", ""),
    (instance_norm, "layer 'norm' changes 'running_mean' in its forward", ""),
    (batch_norm_module, "layer '1' changes '1.running_mean' in its forward", ""),
]


REFUSED_NAMES = [factory.__name__ for factory, _, _ in REFUSED]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("factory, what, evidence", REFUSED, ids=REFUSED_NAMES)
def test_what_cannot_be_cut_is_refused_with_the_reason(
    factory: Callable[[], object], what: str, evidence: str
) -> None:
    error = refusal(made(factory))
    assert what in error.what
    assert evidence in "\n".join(error.evidence)


def test_an_operator_without_a_deterministic_form_is_refused_in_exact_mode_only() -> None:
    assert TorchStage(made(puts)).build([(0, 1)], 0)
    error = refusal(execution(made(puts), determinism="exact"))
    assert error.what == "layer 'put' does not run"
    assert "deterministic" in error.evidence[0]
    assert 'determinism = "standard"' in error.hint


class Put(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.zeros_like(hidden).put(torch.arange(hidden.numel()), hidden.reshape(-1))


def puts() -> object:
    return [("put", Put)]


def test_a_layer_that_draws_from_elsewhere_is_refused_in_exact_mode() -> None:
    with pytest.raises(ModelError, match="gave other bits when it was run again"):
        TorchStage(execution(made(drifts), determinism="exact")).profile()


class Drifts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return hidden * self.calls


def drifts() -> object:
    return [("drifts", Drifts)]


def test_targets_and_losses_that_do_not_fit_the_output() -> None:
    data = with_(GPT, data=DataSpec("text", sequence_length=8, vocabulary=64))
    assert (
        "tells 32 classes apart"
        in refusal(
            with_(
                data, model=ModelSpec(GPT.model.factory, {**GPT.model.arguments, "vocabulary": 32})
            )
        ).what
        or "does not run" in refusal(data).what
    )
    assert (
        "does not run on the model's output"
        in refusal(with_(made(pairs), loss=LossSpec(f"{THIS}:raises"))).what
    )
    assert "returns no sum" in refusal(with_(made(pairs), loss=LossSpec(f"{THIS}:no_sum"))).what
    assert "does not exist" in refusal(with_(made(pairs), loss=LossSpec(f"{THIS}:nothing"))).what


def raises(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("no")


def no_sum(output: Tensor, target: Tensor) -> Tensor:
    return output - target


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / 2


def test_a_loss_of_ones_own() -> None:
    spec = OptimiserSpec("sgd", 0.01, momentum=0.0)
    plain = reference(with_(made(pairs), optimiser=spec), Vectors())
    halved = with_(
        made(pairs),
        loss=LossSpec(f"{THIS}:half_square"),
        optimiser=OptimiserSpec("sgd", 0.02, momentum=0.0),
    )
    assert reference(halved, Vectors()) == plain


def test_a_manifest_without_the_shape_of_samples_or_with_a_wrong_optimiser() -> None:
    with pytest.raises(ConfigError, match="what a target of"):
        TorchStage(with_(made(pairs), data=DataSpec("factory", sample=SampleSpec("float32", (4,)))))
    spec = OptimiserSpec("sgd", momentum=0.0, nesterov=True)
    with pytest.raises(ConfigError, match="cannot be made"):
        TorchStage(with_(made(pairs), optimiser=spec)).build([(0, 2)], 0)
