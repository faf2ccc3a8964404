"""Reads a scenario from its TOML file (docs/simulate.md).

The rule: nothing is guessed. What cannot be meant raises ConfigError with the key, what was found
there and what was expected.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from protocol.records import Training
from swarm.core.scheduling.problem import Layer
from swarm.errors import ConfigError
from swarm.simulation.country import Map
from swarm.simulation.physics import MEMORY_BYTES, Costs, integer_training
from swarm.simulation.scenario import (
    GIGA,
    MEGA,
    ChurnLine,
    PeerSpec,
    Scenario,
    limit_of,
    ways_between,
)
from swarm.simulation.scenario_inputs import Matrix, read_churn, read_network
from swarm.simulation.scenario_tables import (
    BetweenTable,
    ChurnTable,
    EventTable,
    LayerTable,
    ModelTable,
    NetworkTable,
    PeersTable,
    TopTable,
    TrainingTable,
)
from swarm.tables import Reader, parse_toml, read_text

MANUAL = "docs/simulate.md"
ENDLESS_STEPS = 1 << 40

TABLES: dict[str, type[Struct]] = {
    "model": ModelTable,
    "training": TrainingTable,
    "network": NetworkTable,
    "churn": ChurnTable,
}
LISTS = ("peers", "events")


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line says otherwise."""

    seed: int | None = None
    duration_seconds: float | None = None
    network: Path | None = None
    churn: Path | None = None


def read_scenario(path: Path, overrides: Overrides | None = None) -> Scenario:
    """Return the scenario of a file. Raises ConfigError."""
    return parse_scenario(read_text(path), str(path), path.parent, overrides or Overrides())


def parse_scenario(text: str, source: str, folder: Path, overrides: Overrides) -> Scenario:
    """Return the scenario of a TOML text; names of files in it start from `folder`.

    Raises ConfigError."""
    raw = parse_toml(text, source)
    reader = Reader(source, MANUAL)
    top = {key: value for key, value in raw.items() if not isinstance(value, dict | list)}
    rest = {key: value for key, value in raw.items() if key not in top}
    known = (*TABLES, *LISTS)
    reader.refuse_unknown(rest, known, "", {})
    head = reader.build(top, TopTable, "")
    layers, model = _model(reader, rest.get("model"))
    training = reader.build(
        reader.table(rest.get("training"), "training"), TrainingTable, "training"
    )
    costs = Costs(layers, _bytes(model.input_mb), _bytes(model.target_mb), model.optimiser_seconds)
    groups = [
        reader.build(table, PeersTable, place)
        for place, table in _tables(reader, rest.get("peers"), "peers")
    ]
    if not groups:
        reader.fail("peers", None, "at least one table [[peers]]")
    matrix = _matrix(reader, rest, folder, overrides)
    peers = _peers(reader, groups, costs, matrix)
    country = _country(reader, rest.get("network"), groups, peers, matrix)
    duration = head.duration_seconds
    if overrides.duration_seconds is not None:
        duration = overrides.duration_seconds
    if not duration and not training.steps:
        raise ConfigError(
            f"{source}: this simulation would never end",
            evidence=("neither duration_seconds nor training.steps is given",),
            hint="write duration_seconds = 600, or say --duration 10m",
        )
    scenario = Scenario(
        name=head.name or Path(source).stem,
        seed=head.seed if overrides.seed is None else overrides.seed,
        duration_seconds=duration,
        rule=head.rule,
        solver=head.solver,
        noise=head.noise,
        checked=head.checked,
        costs=costs,
        training=_training(training, costs),
        stages=training.stages,
        peers=peers,
        country=country,
        events=_events(reader, rest.get("events"), groups, peers),
        churn=_churn(reader, rest.get("churn"), folder, overrides),
    )
    if not scenario.founders:
        reader.fail("peers[0].joins_at_seconds", groups[0].joins_at_seconds, "0 for somebody")
    if 0 not in scenario.founders:
        reader.fail("peers[0].joins_at_seconds", groups[0].joins_at_seconds, "0: it founds the run")
    return scenario


# --- model and training --------------------------------------------------------------------------


def _model(reader: Reader, raw: object) -> tuple[tuple[Layer, ...], ModelTable]:
    table = dict(reader.table(raw, "model"))
    made: list[Layer] = []
    for place, each in _tables(reader, table.pop("layers", None), "model.layers"):
        layer = reader.build(each, LayerTable, place)
        made += [
            Layer(
                layer.forward_seconds,
                layer.backward_seconds or 2 * layer.forward_seconds,
                _bytes(layer.parameter_mb),
                _bytes(layer.output_mb),
                _bytes(layer.activation_mb),
            )
        ] * layer.count
    if not made:
        reader.fail("model.layers", None, "at least one table [[model.layers]]")
    return tuple(made), reader.build(table, ModelTable, "model")


def _training(table: TrainingTable, costs: Costs) -> Training:
    return integer_training(
        steps=table.steps or ENDLESS_STEPS,
        microbatches=table.microbatches,
        microbatch_size=table.microbatch_size,
        checkpoint_every=table.checkpoint_every,
        max_replicas=table.max_replicas,
        determinism=table.determinism,
        sizes=(costs.input_bytes, costs.target_bytes),
    )


# --- peers and network ---------------------------------------------------------------------------


def _peers(
    reader: Reader, groups: Sequence[PeersTable], costs: Costs, matrix: Matrix | None
) -> tuple[PeerSpec, ...]:
    work = sum(each.forward_seconds + each.backward_seconds for each in costs.layers)
    made: list[PeerSpec] = []
    for number, group in enumerate(groups):
        if group.seconds and group.speed != 1.0:
            reader.fail(f"peers[{number}].seconds", group.seconds, "either speed or seconds")
        for _ in range(group.count):
            here = matrix.regions[len(made)] if matrix and len(made) < len(matrix.regions) else ""
            made.append(
                PeerSpec(
                    group=group.name or f"group {number}",
                    region=group.region or here,
                    speed=work / group.seconds if group.seconds else group.speed,
                    memory_bytes=int(group.memory_gb * GIGA) or MEMORY_BYTES,
                    has_data=group.has_data,
                    joins_at_seconds=group.joins_at_seconds,
                    steady=group.steady,
                )
            )
    if matrix is not None and len(made) > len(matrix.regions):
        reader.fail(
            "peers", len(made), f"at most {len(matrix.regions)} peers, the hosts of the network"
        )
    return tuple(made)


def _country(
    reader: Reader,
    raw: object,
    groups: Sequence[PeersTable],
    peers: Sequence[PeerSpec],
    matrix: Matrix | None,
) -> Map:
    table = dict(reader.table(raw, "network")) if raw is not None else {}
    between = [
        reader.build(each, BetweenTable, place)
        for place, each in _tables(reader, table.pop("between", None), "network.between")
    ]
    network = reader.build(table, NetworkTable, "network")
    count = len(peers)
    if matrix is not None:
        latencies = [row[:count] for row in matrix.latencies_seconds[:count]]
        bandwidths = [row[:count] for row in matrix.bandwidths[:count]]
    else:
        latencies = [[network.latency_ms / 1000] * count for _ in range(count)]
        bandwidths = [[limit_of(network.bandwidth_mbps)] * count for _ in range(count)]
    known = {peer.region for peer in peers}
    for number, each in enumerate(between):
        for region in each.regions:
            if region not in known:
                _unknown(reader, f"network.between[{number}].regions", region, "region", known)
        for i, j in ways_between(peers, each.regions):
            if each.latency_ms >= 0:
                latencies[i][j] = each.latency_ms / 1000
            if each.bandwidth_mbps >= 0:
                bandwidths[i][j] = limit_of(each.bandwidth_mbps)
    members = [group for group in groups for _ in range(group.count)]
    return Map(
        latencies,
        bandwidths,
        [limit_of(group.uplink_mbps) for group in members],
        [limit_of(group.downlink_mbps) for group in members],
        network.jitter_ms / 1000,
    )


def _matrix(
    reader: Reader, rest: Mapping[str, Any], folder: Path, overrides: Overrides
) -> Matrix | None:
    network = rest.get("network")
    name = network.get("file", "") if isinstance(network, dict) else ""
    path = overrides.network or (folder / name if isinstance(name, str) and name else None)
    return read_network(path) if path is not None else None


# --- events and churn ----------------------------------------------------------------------------

LEAST_EVERY_SECONDS = 0.01

LINK_KEYS = ("latency_ms", "bandwidth_mbps", "uplink_mbps", "downlink_mbps")
OWN_KEYS: dict[str, tuple[str, ...]] = {
    "slow": ("factor",),
    "link": ("regions", *LINK_KEYS),
}
"""Keys of events that only one action has."""


def _events(
    reader: Reader, raw: object, groups: Sequence[PeersTable], peers: Sequence[PeerSpec]
) -> tuple[EventTable, ...]:
    made = []
    for place, table in _tables(reader, raw, "events"):
        event = reader.build(table, EventTable, place)
        for action, keys in OWN_KEYS.items():
            for key in keys:
                if key in table and event.action != action:
                    reader.fail(f"{place}.{key}", table[key], f'action = "{action}" with it')
        if event.action == "slow" and "factor" not in table:
            reader.fail(f"{place}.factor", None, "how many times longer tasks take")
        if 0 < event.every_seconds < LEAST_EVERY_SECONDS:
            wanted = f"0, or at least {LEAST_EVERY_SECONDS}"
            reader.fail(f"{place}.every_seconds", event.every_seconds, wanted)
        if event.action == "link":
            _check_link(reader, place, table, event)
        for number in event.peers:
            if not 0 <= number < len(peers):
                reader.fail(f"{place}.peers", event.peers, f"numbers from 0 to {len(peers) - 1}")
        names = {peer.group for peer in peers}
        if event.group and event.group not in names:
            _unknown(reader, f"{place}.group", event.group, "group", names)
        regions = {peer.region for peer in peers}
        for region in (*event.regions, *((event.region,) if event.region else ())):
            if region not in regions:
                _unknown(reader, f"{place}.region", region, "region", regions)
        made.append(event)
    return tuple(made)


def _check_link(reader: Reader, place: str, table: Mapping[str, Any], event: EventTable) -> None:
    if not set(LINK_KEYS) & set(table):
        reader.fail(f"{place}.latency_ms", None, "this or another figure of links")
    if len(event.regions) > 2:
        reader.fail(f"{place}.regions", event.regions, "one or two regions")
    if event.regions and {"uplink_mbps", "downlink_mbps"} & set(table):
        reader.fail(f"{place}.regions", event.regions, "none with an uplink or a downlink")


def _churn(
    reader: Reader, raw: object, folder: Path, overrides: Overrides
) -> tuple[ChurnLine, ...]:
    start = 0.0
    path = overrides.churn
    if raw is not None:
        table = reader.build(reader.table(raw, "churn"), ChurnTable, "churn")
        path, start = path or (folder / table.file if table.file else None), table.start_seconds
    if path is None:
        return ()
    lines = read_churn(path)
    there: dict[str, None] = {}
    for line in lines:
        if line.at_seconds <= start:
            there.pop(line.node, None)
            if line.is_there:
                there[line.node] = None
    later = [
        ChurnLine(line.at_seconds - start, line.is_there, line.node)
        for line in lines
        if line.at_seconds > start
    ]
    return (*(ChurnLine(0.0, True, node) for node in there), *later)


# --- helpers ------------------------------------------------------------------------------------


def _tables(reader: Reader, raw: object, path: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the tables of an array, each with its place."""
    if raw is None:
        return []
    if not isinstance(raw, list):
        reader.fail(path, raw, f"tables [[{path}]]")
    return [
        (f"{path}[{number}]", reader.table(each, f"{path}[{number}]"))
        for number, each in enumerate(raw)
    ]


def _unknown(reader: Reader, path: str, value: str, what: str, known: set[str]) -> None:
    names = ", ".join(sorted(name for name in known if name)) or "none has a name"
    reader.fail(path, value, f"a {what} of some peers: {names}")


def _bytes(megabytes: float) -> int:
    return round(megabytes * MEGA)


def duration_of(text: str) -> float:
    """Return seconds of "90", "90s", "10m", "2h" or "7d". Raises ConfigError."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1.0)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"--duration {text} is no time",
            hint="write 90s, 10m, 2h or 7d; plain numbers are seconds",
        )
    return seconds
