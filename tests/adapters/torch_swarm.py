"""A swarm without its network: stages and replicas driven by hand, in one thread."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from protocol.messages import Microbatch, Totals
from protocol.records import (
    DataSpec,
    ExecutionSpec,
    ModelSpec,
    SampleSpec,
    Training,
)
from swarm.adapters.datasets import SampleReader
from swarm.adapters.reference import run_reference
from swarm.adapters.torch_stage import TorchStage
from swarm.adapters.weights import merge
from swarm.core.model import ModelShape
from swarm.core.reduction import buckets, shard_bounds
from swarm.core.totals import totals_of
from swarm.models import convnet

STEPS, MICROBATCHES, SIZE, TOKENS = 3, 5, 2, 8

GPT = Training(
    name="gpt",
    steps=STEPS,
    microbatches_per_step=MICROBATCHES,
    microbatch_size=SIZE,
    model=ModelSpec(
        "swarm.models.gpt:layers",
        {"width": 16, "depth": 2, "heads": 2, "context": TOKENS, "vocabulary": 32},
    ),
    data=DataSpec("text", sequence_length=TOKENS, vocabulary=32),
    seed=3,
    execution=ExecutionSpec("exact"),
)
PICTURES = msgspec.structs.replace(
    GPT,
    name="pictures",
    model=ModelSpec("swarm.models.convnet:classifier", {"channels": 4, "image": 8}),
    data=DataSpec(
        "factory",
        factory="swarm.models.convnet:shapes",
        sample=SampleSpec("float32", (3, 8, 8)),
        target=SampleSpec("int64", (), 10),
    ),
)


class RandomTokens:
    """A reader of random token ids: the last of every sample is not a target."""

    def digest(self) -> bytes:
        return b"\0" * 32

    def __len__(self) -> int:
        return 1000

    def microbatch(self, sample_ids: Sequence[int]) -> tuple[memoryview, memoryview, int]:
        rows = [np.random.default_rng(i).integers(0, 32, TOKENS + 1) for i in sample_ids]
        inputs = np.stack([row[:-1] for row in rows])
        targets = np.stack([row[1:] for row in rows])
        targets[:, -1] = -100
        return inputs.reshape(-1).data.cast("B"), targets.reshape(-1).data.cast("B"), len(rows) * 7


class Pictures:
    """A reader of generated pictures."""

    def __init__(self) -> None:
        self.dataset = convnet.shapes(1000, 8)

    def digest(self) -> bytes:
        return b"\0" * 32

    def __len__(self) -> int:
        return 1000

    def microbatch(self, sample_ids: Sequence[int]) -> tuple[memoryview, memoryview, int]:
        samples = [self.dataset[i] for i in sample_ids]
        pictures = torch.stack([picture for picture, _ in samples]).numpy()
        classes = torch.stack([label for _, label in samples]).numpy()
        return (
            pictures.reshape(-1).data.cast("B"),
            classes.reshape(-1).data.cast("B"),
            len(samples),
        )


def source_of(training: Training) -> SampleReader:
    return RandomTokens() if training.data.source == "text" else Pictures()


def sent(tensor: memoryview) -> memoryview:
    """What arrives of a float32 tensor: other memory. No stage may send what is not finite."""
    assert np.isfinite(np.frombuffer(tensor, np.float32)).all()
    return memoryview(bytes(tensor))


def sample_ids(step: int, index: int) -> list[int]:
    first = (step * MICROBATCHES + index) * SIZE
    return list(range(first, first + SIZE))


def reference(
    training: Training,
    source: SampleReader | None = None,
    progress: Callable[[int, float | None], None] = lambda version, loss: None,
) -> bytes:
    return run_reference(training, source or source_of(training), sample_ids, progress)


@dataclass
class Swarm:
    """All replicas of all stages, in one thread."""

    training: Training
    stages: list[tuple[int, int]]
    replicas: list[list[TorchStage]]
    shares: list[list[int]]

    @classmethod
    def start(cls, training: Training, cuts: Sequence[int], counts: Sequence[int]) -> "Swarm":
        replicas = [[TorchStage(training) for _ in range(count)] for count in counts]
        layers = len(replicas[0][0].layer_names())
        stages = list(itertools.pairwise([0, *cuts, layers]))
        for stage, group in enumerate(replicas):
            assert len({one.build(stages, stage) for one in group}) == 1
        shares = [list(range(1, count + 1)) for count in counts]
        return cls(training, stages, replicas, shares)

    def train(self, source: SampleReader | None = None) -> bytes:
        for step in range(self.training.steps):
            self.commit(step, self.step(source or source_of(self.training), step))
        return self.export()

    def step(self, source: SampleReader, step: int) -> Totals:
        """All microbatches of a step, last first: not the order of the reference."""
        for index in reversed(range(self.training.microbatches_per_step)):
            self.microbatch(source, Microbatch(step, index))
        return self.reduce()

    def commit(self, step: int, totals: Totals) -> None:
        for one in itertools.chain(*self.replicas):
            one.commit(step, totals)

    def microbatch(self, source: SampleReader, mb: Microbatch) -> None:
        inputs, targets, weight = source.microbatch(sample_ids(mb.step, mb.index))
        path = [group[(mb.index * 7 + mb.step) % len(group)] for group in self.replicas]
        hidden = inputs
        for one in path[:-1]:
            outcome = one.forward(mb, hidden)
            if outcome.tensor is None:
                for every in path:
                    every.flag(mb, outcome.nonfinite, weight)
                return
            hidden = sent(outcome.tensor)
        turn = path[-1].turn(mb, hidden, targets, weight)
        gradient, bad = turn.gradient, turn.nonfinite
        for one in reversed(path[:-1]):
            if bad:
                one.flag(mb, bad, weight)
                continue
            assert gradient is not None
            outcome = one.backward(mb, sent(gradient), weight)
            gradient, bad = outcome.tensor, outcome.nonfinite

    def reduce(self) -> Totals:
        for one in itertools.chain(*self.replicas):
            one.begin_reduction()
        for bucket in buckets(self.shape, self.stages):
            owners = self.replicas[bucket.stages[0]]
            users = [one for stage in bucket.stages for one in self.replicas[stage]]
            bounds = shard_bounds(bucket.elements, self.shares[bucket.stages[0]])
            for owner, (start, stop) in zip(owners, bounds, strict=True):
                parts: list[memoryview | None] = [
                    one.part(bucket.index, start, stop) if len(one.ledger) else None
                    for one in users
                ]
                shard = owner.reduce(bucket.index, start, stop, parts)
                for one in users:
                    if one is not owner:
                        one.gather(bucket.index, start, stop, shard)
        groups = self.replicas
        for group in groups:
            for one in group[1:]:
                assert one.square_norms() == group[0].square_norms()
        weights = {sum(one.ledger.weight for one in group) for group in groups}
        assert len(weights) == 1
        return totals_of(
            [group[0].square_norms() for group in groups],
            weights.pop(),
            [flag for one in itertools.chain(*groups) for flag in one.ledger.flags],
            sum(one.ledger.loss_sum for one in groups[-1]),
            self.training.execution.on_nonfinite,
        )

    @property
    def shape(self) -> ModelShape:
        return self.replicas[0][0].shape

    def export(self) -> bytes:
        states = []
        for (first, last), group in zip(self.stages, self.replicas, strict=True):
            for layer in range(first, last):
                held = [bytes(one.layer_state(layer)) for one in group]
                assert len(set(held)) == 1, f"replicas of layer {layer} differ"
                states.append(held[0])
        return merge(states)


def with_(training: Training, **changes: Any) -> Training:
    return msgspec.structs.replace(training, **changes)


def execution(training: Training, **changes: Any) -> Training:
    return with_(training, execution=msgspec.structs.replace(training.execution, **changes))
