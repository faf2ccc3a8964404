"""What a scenario file says, table by table (docs/simulate.md).

The rule: units are in the names, and a default is what the file means by saying nothing.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from swarm.simulation.world import Rule

DEFAULT_LATENCY_MS = 20.0

MOST = 1e9
"""Of seconds, megabytes, megabits per second: beyond, nothing here means anything."""
Positive = Annotated[float, Meta(ge=1e-9, le=MOST)]
NotNegative = Annotated[float, Meta(ge=0, le=MOST)]
Whole = Annotated[int, Meta(ge=0, le=2**53)]
OneOrMore = Annotated[int, Meta(ge=1, le=2**31)]
Some = Annotated[int, Meta(ge=1, le=100_000)]
OrElse = Annotated[float, Meta(ge=-1, le=MOST)]
Action = Literal["join", "leave", "kill", "power_failure", "freeze", "slow", "partition", "link"]


class LayerTable(Struct, frozen=True):
    """One layer, or `count` equal ones, of one microbatch on a peer of speed 1."""

    forward_seconds: Positive
    parameter_mb: NotNegative
    output_mb: NotNegative
    count: Some = 1
    backward_seconds: NotNegative = 0.0
    """0: twice the forward."""
    activation_mb: NotNegative = 0.0
    """Kept between forward and backward."""


class ModelTable(Struct, frozen=True):
    """The model's own figures; its layers are in [[model.layers]]."""

    input_mb: NotNegative = 0.0
    target_mb: NotNegative = 0.0
    optimiser_seconds: NotNegative = 0.0
    """Of a step, for the whole model at speed 1."""


class TrainingTable(Struct, frozen=True):
    """How it is trained."""

    microbatches: Annotated[int, Meta(ge=1, le=65536)]
    microbatch_size: OneOrMore = 1
    steps: Whole = 0
    """0: as many as there is time for."""
    stages: Whole = 0
    """0: the swarm chooses."""
    max_replicas: Whole = 0
    checkpoint_every: Whole = 0
    determinism: Literal["standard", "exact"] = "standard"


class PeersTable(Struct, frozen=True):
    """A group of equal peers."""

    count: Some = 1
    name: str = ""
    speed: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    seconds: NotNegative = 0.0
    """Of the whole model, forward and backward of one microbatch; instead of `speed`."""
    memory_gb: NotNegative = 0.0
    """0: enough."""
    uplink_mbps: NotNegative = 0.0
    """Megabits per second; 0: no limit."""
    downlink_mbps: NotNegative = 0.0
    region: str = ""
    has_data: bool = True
    joins_at_seconds: NotNegative = 0.0
    steady: bool = False
    """A churn trace does not touch it."""


class NetworkTable(Struct, frozen=True):
    """All ways between peers; [[network.between]] has those between two regions."""

    latency_ms: NotNegative = DEFAULT_LATENCY_MS
    jitter_ms: NotNegative = 1.0
    bandwidth_mbps: NotNegative = 0.0
    """Of each way; 0: no limit."""
    file: str = ""
    """A matrix instead: {n, regions, delay_ms, bandwidth_gbps}."""


class BetweenTable(Struct, frozen=True):
    """Ways between two regions, both directions, or within one."""

    regions: tuple[str, str]
    latency_ms: OrElse = -1.0
    """-1: as elsewhere."""
    bandwidth_mbps: OrElse = -1.0


class EventTable(Struct, frozen=True):
    """Something that happens, once or again and again."""

    action: Action
    at_seconds: NotNegative = 0.0
    every_seconds: NotNegative = 0.0
    """0: once."""
    until_seconds: NotNegative = 0.0
    """With every_seconds; 0: to the end."""
    seconds: NotNegative = 0.0
    """After which it is undone: who was killed starts again, what was cut is healed; 0: never."""
    peers: tuple[int, ...] = ()
    """Numbers, from 0; with no selection at all everybody is meant."""
    group: str = ""
    region: str = ""
    random: Whole = 0
    """Only so many of those who are meant, drawn anew each time; 0: all."""
    factor: Positive = 1.0
    """slow: tasks take so many times longer."""
    regions: tuple[str, ...] = ()
    """link: the ways between these two regions."""
    latency_ms: OrElse = -1.0
    """link: the new figures; -1: as before."""
    bandwidth_mbps: OrElse = -1.0
    uplink_mbps: OrElse = -1.0
    downlink_mbps: OrElse = -1.0


class ChurnTable(Struct, frozen=True):
    """A trace of machines that come and go: `milliseconds,add|remove,node`."""

    file: str = ""
    """Empty: `--churn` names it, or there is no churn."""
    start_seconds: NotNegative = 0.0
    """Begin so late in the trace: whoever is there then is there from the start."""


class TopTable(Struct, frozen=True):
    """The top of the file."""

    name: str = ""
    seed: Whole = 1
    duration_seconds: NotNegative = 0.0
    """0: until the last step is complete."""
    rule: Rule = "ours"
    solver: bool = False
    noise: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Relative standard deviation of what a task, or a measurement, takes."""
    checked: bool = True
    """Whether everything that is computed is compared with a plain loop."""
