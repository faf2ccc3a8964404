"""A scenario: what is trained, by which peers, over which network, and what happens to them.

The rule: seconds, bytes and bytes per second, whatever the file says them in.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.records import Training
from swarm.simulation.country import Map
from swarm.simulation.physics import Costs
from swarm.simulation.scenario_tables import EventTable
from swarm.simulation.world import Rule

MEGA, GIGA, BYTES_PER_MEGABIT = 1e6, 1e9, 125_000.0


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """One peer."""

    group: str
    region: str
    speed: float
    memory_bytes: int
    has_data: bool
    joins_at_seconds: float
    steady: bool


@dataclass(frozen=True, slots=True)
class ChurnLine:
    """A machine comes or goes."""

    at_seconds: float
    is_there: bool
    node: str


@dataclass(frozen=True)
class Scenario:
    """All that a simulation depends on."""

    name: str
    seed: int
    duration_seconds: float
    """0: until the last step is complete."""
    rule: Rule
    solver: bool
    noise: float
    checked: bool
    costs: Costs
    training: Training
    stages: int
    peers: tuple[PeerSpec, ...]
    country: Map
    events: tuple[EventTable, ...] = ()
    churn: tuple[ChurnLine, ...] = ()

    @property
    def work_seconds(self) -> float:
        """Return forward and backward seconds of one microbatch of the whole model at speed 1."""
        return sum(each.forward_seconds + each.backward_seconds for each in self.costs.layers)

    @property
    def founders(self) -> tuple[int, ...]:
        """Return the peers that are there from the start."""
        return tuple(number for number, peer in enumerate(self.peers) if not peer.joins_at_seconds)


def ways_between(peers: Sequence[PeerSpec], regions: Sequence[str]) -> list[tuple[int, int]]:
    """Return every directed pair of peers, one in each of two regions, or both in the same."""
    one, other = (
        [i for i, peer in enumerate(peers) if peer.region == region]
        for region in (regions[0], regions[-1])
    )
    pairs = [(i, j) for i in one for j in other if i != j]
    return pairs if one == other else pairs + [(j, i) for i, j in pairs]


def limit_of(megabits: float) -> float:
    """Return bytes per second of megabits per second; 0 means no limit."""
    return megabits * BYTES_PER_MEGABIT or math.inf
