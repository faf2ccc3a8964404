"""Training the integer model by a plain loop: what every executor is compared with.

The rule: it knows nothing of stages, replicas or plans.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.messages import Microbatch, Totals
from swarm.core.dataorder import sample_ids
from swarm.simulation.physics import SAMPLES, Physics, Tensor

KEPT_STEPS = 4
KEPT_VERSIONS = 64
"""What a plain loop remembers whole; older versions it computes again."""


@dataclass(frozen=True, slots=True)
class Passed:
    """What a microbatch is at every boundary between layers: `inputs[l]` goes into layer l,
    `gradients[l]` is the gradient of that; both have one entry more than there are layers."""

    inputs: tuple[bytes, ...]
    gradients: tuple[bytes, ...]
    of_tensors: dict[str, list[int]]
    weight: int
    loss_sum: float


@dataclass(frozen=True, slots=True)
class _Step:
    passes: list[Passed | None]
    sums: dict[str, list[int]]


class Reference:
    """Training by a plain loop, step after step, as far as somebody asks."""

    def __init__(self, physics: Physics) -> None:
        self.physics = physics
        self._newest = 0
        self._versions = {0: physics.initial(0, physics.layers)}
        self._steps: dict[int, _Step] = {}

    def at(self, version: int) -> dict[str, Tensor]:
        """Return all tensors at a version, by the name of the owner."""
        if version in self._versions:
            return self._versions[version]
        known = max(each for each in self._versions if each <= version)
        tensors = self._versions[known]
        for step in range(known, version):
            tensors = self._updated(step, tensors)
        self._remember(version, tensors)
        return tensors

    def passed(self, mb: Microbatch) -> Passed | None:
        """Return what a microbatch is at every boundary; None if it is not finite."""
        return self._whole(mb.step).passes[mb.index]

    def summed(self, step: int) -> dict[str, list[int]]:
        """Return the sum of all gradients of a step, tensor by tensor."""
        return self._whole(step).sums

    def layer_hashes(self, version: int) -> tuple[bytes, ...]:
        """Return the SHA-256 of every layer's exported weights at a version."""
        tensors = self.at(version)
        layers = range(self.physics.layers)
        return tuple(
            hashlib.sha256(self.physics.exported(layer, tensors)).digest() for layer in layers
        )

    def _remember(self, version: int, tensors: dict[str, Tensor]) -> None:
        self._versions[version] = tensors
        if version > self._newest:
            self._newest = version
            if version % KEPT_VERSIONS == 0:
                self._versions = {
                    each: tensors
                    for each, tensors in self._versions.items()
                    if each % KEPT_VERSIONS == 0 or version - each <= KEPT_VERSIONS
                }

    def _whole(self, step: int, tensors: dict[str, Tensor] | None = None) -> "_Step":
        """Return all of a step; computed once more if it was long ago."""
        found = self._steps.pop(step, None)
        if found is None:
            found = self._compute(step, self.at(step) if tensors is None else tensors)
        self._steps[step] = found  # the last of them
        while len(self._steps) > KEPT_STEPS:
            del self._steps[next(iter(self._steps))]
        return found

    def _compute(self, step: int, tensors: dict[str, Tensor]) -> "_Step":
        count = self.physics.training.microbatches_per_step
        passes = [self._pass(Microbatch(step, index), tensors) for index in range(count)]
        sums = {name: [0] * self.physics.elements for name in tensors}
        for passed in passes:
            if passed is not None:
                _add(sums, passed.of_tensors)
        return _Step(passes, sums)

    def _updated(self, step: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        whole = self._whole(step, tensors)
        if None in whole.passes:
            return tensors
        passes = [passed for passed in whole.passes if passed is not None]
        norm = math.fsum(float(sum(v * v for v in values)) for values in whole.sums.values())
        weight = sum(passed.weight for passed in passes)
        totals = Totals(weight, norm, (), "apply", math.fsum(p.loss_sum for p in passes) / weight)
        return {
            name: self.physics.update(step, tensor, whole.sums[name], totals)
            for name, tensor in tensors.items()
        }

    def _pass(self, mb: Microbatch, tensors: Mapping[str, Tensor]) -> Passed | None:
        physics = self.physics
        layers = range(physics.layers)
        if not all(physics.is_finite(mb, layer) for layer in layers):
            return None
        data, targets, weight = physics.sample(
            sample_ids(
                physics.training.seed,
                mb.step,
                mb.index,
                microbatches=physics.training.microbatches_per_step,
                microbatch_size=physics.training.microbatch_size,
                samples=SAMPLES,
            )
        )
        inputs = [data]
        for layer in layers:
            inputs.append(physics.forward(layer, tensors, inputs[-1]))
        loss_sum, gradient = physics.loss(inputs[-1], targets)
        gradients = [gradient]
        of_tensors: dict[str, list[int]] = {}
        for layer in reversed(layers):
            below, found = physics.backward(layer, tensors, inputs[layer], gradients[-1])
            gradients.append(below)
            for name, values in found:
                _add(of_tensors, {name: values})
        return Passed(tuple(inputs), tuple(reversed(gradients)), of_tensors, weight, loss_sum)


def _add(sums: dict[str, list[int]], values: Mapping[str, Sequence[int]]) -> None:
    for name, each in values.items():
        old = sums.get(name)
        sums[name] = list(each) if old is None else [a + b for a, b in zip(old, each, strict=True)]
