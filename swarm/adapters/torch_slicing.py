"""A model as layers: what a factory may return, and how one layer is had without the others.

The rule: initial weights are a function of the manifest alone. A layer made from its own
constructor is built under a hash of (seed, its name); a whole module is built once, on the CPU,
under the seed, and its layers are kept. Tied tensors start with the value of their owner.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from protocol.records import Training
from swarm.adapters.author_code import FAULTS, describe, import_function
from swarm.adapters.torch_gate import check_forward
from swarm.adapters.torch_numerics import seed_generator, seed_of
from swarm.core.model import TensorUse
from swarm.errors import ModelError

CPU = torch.device("cpu")
FORMS = (
    "return an nn.Sequential, a module with an attribute `layers`, a list of "
    '(name, constructor), or {"layers": [(name, constructor), ...], "tied": {name: owner}}'
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer with its weights. All names are the whole model's."""

    number: int
    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    """What is trained, each tensor once. No other layer holds these Parameter objects."""
    owners: dict[str, str]
    """For each of `parameters`, the name of the tensor that owns its value."""
    state: dict[str, Tensor]
    """Parameters and persistent buffers under all their names: live, not copies."""

    @property
    def uses(self) -> tuple[TensorUse, ...]:
        """Return what the rest of the swarm knows of these parameters."""
        return tuple(
            TensorUse(name, parameter.numel(), self.owners[name])
            for name, parameter in self.parameters.items()
        )


class SlicedModel(ABC):
    """A model that can be had layer by layer."""

    names: tuple[str, ...]
    """The layers, in the order in which they are applied. No name occurs twice."""

    @abstractmethod
    def layer(self, number: int, device: torch.device) -> Layer:
        """Return a layer with its initial weights. Raises ModelError."""

    @abstractmethod
    def release(self) -> None:
        """Forget weights that are kept: the next `layer` makes them anew."""


def load_model(training: Training) -> SlicedModel:
    """Call the manifest's factory and take what it returns apart.

    Raises ModelError if it does not import, raises, or returns what cannot be cut.
    """
    made = _call_factory(training)
    if isinstance(made, nn.Module):
        return WholeModel(training, made)
    if isinstance(made, Mapping):
        if not set(made) <= {"layers", "tied"} or "layers" not in made:
            raise _unusable(training, f"a dict with keys {sorted(map(str, made))}")
        return ConstructedModel(training, made["layers"], made.get("tied", {}))
    if isinstance(made, list | tuple):
        return ConstructedModel(training, made, {})
    raise _unusable(training, f"a {type(made).__name__}")


# --- from constructors ---------------------------------------------------------------------


class ConstructedModel(SlicedModel):
    """Layers that are built one by one: no peer needs the whole model in memory."""

    def __init__(self, training: Training, layers: object, tied: object) -> None:
        self._seed = training.seed
        self._constructors = _checked_layers(training, layers)
        self.names = tuple(self._constructors)
        self._tied = _checked_ties(training, tied, self.names)

    def layer(self, number: int, device: torch.device) -> Layer:
        """Build layer `number`, and its ties' owners for as long as it takes to copy them."""
        name = self.names[number]
        module = self._construct(name)
        parameters = {
            f"{name}.{local}": parameter
            for local, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        ties = {
            use: owner for use, owner in self._tied.items() if _layer_of(use, self.names) == name
        }
        for use, owner in ties.items():
            self._copy_owner(parameters, use, owner)
        module.to(device)
        state = {f"{name}.{local}": value for local, value in _state_of(module, name).items()}
        return Layer(
            number, name, module, parameters, {n: ties.get(n, n) for n in parameters}, state
        )

    def release(self) -> None:
        """Do nothing: no weights are kept."""

    def _construct(self, name: str) -> nn.Module:
        seed_generator(CPU, seed_of(self._seed, "layer", name))
        try:
            module = self._constructors[name]()
        except FAULTS as fault:
            raise ModelError(
                f"the constructor of layer {name!r} raised", evidence=(describe(fault),)
            ) from fault
        if not isinstance(module, nn.Module):
            raise ModelError(
                f"the constructor of layer {name!r} returned no nn.Module",
                evidence=(f"it returned a {type(module).__name__}",),
            )
        return check_parameters(module.train(), name)

    def _copy_owner(self, own: Mapping[str, nn.Parameter], use: str, owner: str) -> None:
        owner_layer = _layer_of(owner, self.names)
        values: dict[str, Tensor] = dict(own)
        if owner not in own:
            module = self._construct(owner_layer)
            values = {f"{owner_layer}.{n}": value for n, value in module.named_parameters()}
        for name, known in ((use, own), (owner, values)):
            if name not in known:
                raise ModelError(
                    f"{use!r} cannot be tied to {owner!r}: no trained tensor {name!r}",
                    evidence=(f"the layer has {', '.join(sorted(known)) or 'none'}",),
                )
        target, source = own[use].data, values[owner].data
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ModelError(
                f"{use!r} cannot be tied to {owner!r}: they differ in shape or dtype",
                evidence=(
                    f"{target.dtype}{list(target.shape)}",
                    f"{source.dtype}{list(source.shape)}",
                ),
            )
        target.copy_(source)


def _checked_layers(training: Training, layers: object) -> dict[str, Callable[[], object]]:
    if not isinstance(layers, Sequence) or not layers:
        raise _unusable(training, "no layers")
    constructors: dict[str, Callable[[], object]] = {}
    for pair in layers:
        match pair:
            case (str(name), constructor) if name and len(name) <= 200 and callable(constructor):
                if name in constructors:
                    raise _unusable(training, f"two layers named {name!r}")
                constructors[name] = constructor
            case _:
                raise _unusable(training, f"a list with {pair!r:.100} in it")
    return constructors


def _checked_ties(training: Training, tied: object, names: Sequence[str]) -> dict[str, str]:
    if not isinstance(tied, Mapping):
        raise _unusable(training, f"ties as a {type(tied).__name__}")
    for name in (*tied, *tied.values()):
        if not isinstance(name, str) or not _layer_of(name, names):
            raise _unusable(training, f"a tie with {name!r:.100}, which is in none of its layers")
    for use, owner in tied.items():
        if owner in tied:
            raise _unusable(training, f"{use!r} tied to {owner!r}, which does not own its value")
    return dict(tied)


def _layer_of(tensor: str, names: Iterable[str]) -> str:
    return max((name for name in names if tensor.startswith(f"{name}.")), key=len, default="")


# --- from a whole module ----------------------------------------------------------------------


class WholeModel(SlicedModel):
    """A module that is, or exposes, a sequence of layers; built whole, on the CPU."""

    def __init__(self, training: Training, module: nn.Module) -> None:
        self._training = training
        self._module: nn.Module | None = module
        layers = _layers_of(training, module)
        self.names = _layer_names(module, layers)
        check_parameters(module.train(), training.model.factory)
        self._owners, self._locals = _name_tensors(module, self.names, layers)
        check_forward(training, module, self.names, layers)

    def layer(self, number: int, device: torch.device) -> Layer:
        """Return layer `number` of the kept module, which is built again after a release."""
        if self._module is None:
            self._module = cast(nn.Module, _call_factory(self._training)).train()
        layers = _layers_of(self._training, self._module)
        module, names = layers[number], self._locals[number]
        before = {id(tensor) for layer in layers[:number] for tensor in _tensors(layer)}
        if any(id(tensor) in before for tensor in _tensors(module)):
            module = copy.deepcopy(module)
        module.to(device)
        parameters = {
            names[local][0]: parameter
            for local, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        values = module.state_dict(keep_vars=True)
        state = {name: values[local] for local, taken in names.items() for name in taken}
        owners = {name: self._owners[name] for name in parameters}
        return Layer(number, self.names[number], module, parameters, owners, state)

    def release(self) -> None:
        """Let go of the module: layers that were handed out stay, the others are freed."""
        self._module = None


def _layers_of(training: Training, module: nn.Module) -> list[nn.Module]:
    found = module if isinstance(module, nn.Sequential) else getattr(module, "layers", None)
    if not isinstance(found, nn.Sequential | nn.ModuleList | list | tuple):
        raise _unusable(training, f"a {type(module).__name__} without a sequence `layers`")
    layers = list(found)
    if not layers or not all(isinstance(layer, nn.Module) for layer in layers):
        raise _unusable(training, f"a {type(module).__name__} whose `layers` are no modules")
    return layers


def _layer_names(module: nn.Module, layers: Sequence[nn.Module]) -> tuple[str, ...]:
    """Name layers as state_dict does where they are registered once, else by position."""
    prefixes = _prefixes(module)
    names: list[str] = []
    for number, layer in enumerate(layers):
        candidates = [name for name in prefixes.get(id(layer), ()) if name not in names]
        names.append(candidates[0] if candidates else f"layers[{number}]")
    return tuple(names)


def _prefixes(module: nn.Module) -> dict[int, list[str]]:
    prefixes: dict[int, list[str]] = {}
    for name, inner in module.named_modules(remove_duplicate=False):
        if name:
            prefixes.setdefault(id(inner), []).append(name)
    return prefixes


def _name_tensors(
    module: nn.Module, layer_names: Sequence[str], layers: Sequence[nn.Module]
) -> tuple[dict[str, str], list[dict[str, list[str]]]]:
    """Match the module's names with its layers' tensors, by identity.

    Returns the owner (first name) of every name, and for every layer its local names with the
    module's names that it stands for. A tensor in several layers gives each of them the names
    under its own prefix, and what is left to the first. Raises ModelError if the layers are not
    all that the module holds.
    """
    groups: dict[int, list[str]] = {}
    for name, tensor in _state_of(module, "the model").items():
        groups.setdefault(id(tensor), []).append(name)
    prefixes = _prefixes(module)
    tables: list[dict[str, list[str]]] = []
    holders: dict[int, list[str]] = {}
    for layer_name, layer in zip(layer_names, layers, strict=True):
        starts = tuple(f"{prefix}." for prefix in prefixes.get(id(layer), ()))
        table: dict[int, tuple[str, list[str]]] = {}
        for local, tensor in _state_of(layer, layer_name).items():
            group = groups.get(id(tensor))
            if group is None:
                raise ModelError(
                    f"{local!r} of layer {layer_name!r} is not in the module's state_dict",
                    hint="register every layer as a submodule",
                )
            own = [name for name in group if name.startswith(starts)] or group[:1]
            table.setdefault(id(tensor), (local, own))
            holders.setdefault(id(tensor), table[id(tensor)][1])
        tables.append(dict(table.values()))
    outside = [group[0] for key, group in groups.items() if key not in holders]
    if outside:
        raise ModelError(
            "the module holds tensors that are in none of its layers",
            evidence=tuple(outside[:10]),
            hint="move them into the layers that use them",
        )
    taken = {name for table in tables for own in table.values() for name in own}
    for key, group in groups.items():
        holders[key].extend(name for name in group if name not in taken)
    return {name: group[0] for group in groups.values() for name in group}, tables


# --- both ---------------------------------------------------------------------------------------


def check_parameters(module: nn.Module, where: str) -> nn.Module:
    """Return `module`. Raises ModelError for parameters that are no plain dense real numbers."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"{name!r} of {where!r} has no shape before its first input",
                hint="lazy modules are not supported: give the shapes",
            )
        if not parameter.is_floating_point() or parameter.layout is not torch.strided:
            raise ModelError(
                f"{name!r} of {where!r} is {parameter.dtype}, {parameter.layout}",
                hint="parameters must be dense tensors of real floating-point numbers",
            )
    return module


def _state_of(module: nn.Module, where: str) -> dict[str, Tensor]:
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"{name!r} of {where!r} is no tensor",
                evidence=(f"its state_dict holds a {type(value).__name__}",),
                hint="a model's state must be tensors only",
            )
    return dict(state)


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _call_factory(training: Training) -> object:
    factory = import_function(training.model.factory, "model factory")
    seed_generator(CPU, seed_of(training.seed, "model"))
    try:
        return factory(**training.model.arguments)
    except FAULTS as fault:
        arguments = ", ".join(f"{k}={v!r}" for k, v in sorted(training.model.arguments.items()))
        raise ModelError(
            f"the model factory {training.model.factory!r} raised",
            evidence=(describe(fault), f"called with {arguments or 'no arguments'}"),
        ) from fault


def _unusable(training: Training, what: str) -> ModelError:
    return ModelError(
        f"the model factory {training.model.factory!r} returned {what}",
        evidence=("that cannot be cut into layers",),
        hint=FORMS,
    )
