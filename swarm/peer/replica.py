"""What the parts of one replica share in one epoch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol.records import Training
from swarm.core.model import ModelShape
from swarm.core.step import Effect, ReplicaStep, Role
from swarm.peer.links import Links
from swarm.ports import StageExecutor


@dataclass(frozen=True, slots=True)
class Replica:
    """One peer's copy of one stage, as its pipeline and its reducer see it."""

    role: Role
    training: Training
    shape: ModelShape
    executor: StageExecutor
    links: Links
    step: ReplicaStep
    perform: Callable[[Sequence[Effect]], None]
