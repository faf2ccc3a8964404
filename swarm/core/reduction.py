"""Which tensors are reduced together, and who owns which shard.

A *bucket* is a flat run of parameters that the same stages use: one for the untied parameters
of each stage, one for each set of stages that share tied tensors. All replicas of all its
stages contribute to a bucket; replicas of its first (lowest) stage own the shards, sum them and
send the sums to everyone who contributes. A tensor tied within one stage is summed there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.core.model import ModelShape


@dataclass(frozen=True, slots=True)
class Slot:
    """Elements [start, stop) of a bucket are the gradient of tensor `name`."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat gradient buffer; `stages` use it and `stages[0]` owns it."""

    index: int
    stages: tuple[int, ...]
    slots: tuple[Slot, ...]

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return self.slots[-1].stop if self.slots else 0


def buckets(shape: ModelShape, stages: Sequence[tuple[int, int]]) -> tuple[Bucket, ...]:
    """Return the buckets of a slicing: a function of the model's shape and the ranges alone.

    `stages[s]` is the range [first, last) of layers of stage s. Buckets are ordered by their
    stages, slots by the first use of their tensor in the model.
    """
    users: dict[str, list[int]] = {}
    elements: dict[str, int] = {}
    for stage, (first, last) in enumerate(stages):
        for layer in shape.layers[first:last]:
            for use in layer.tensors:
                using = users.setdefault(use.tied_to, [])
                elements[use.tied_to] = use.elements
                if stage not in using:
                    using.append(stage)
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, using in users.items():
        groups.setdefault(tuple(sorted(using)), []).append(name)
    made = []
    for index, key in enumerate(sorted(groups)):
        slots = []
        start = 0
        for name in groups[key]:
            slots.append(Slot(name, start, start + elements[name]))
            start += elements[name]
        made.append(Bucket(index, key, tuple(slots)))
    return tuple(made)


def shard_bounds(elements: int, shares: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return [start, stop) of each owner's shard, sized in proportion to `shares`."""
    total = sum(shares)
    ends = []
    so_far = 0
    for share in shares:
        so_far += share
        ends.append(elements * so_far // total)
    return tuple(zip([0, *ends[:-1]], ends, strict=True))
