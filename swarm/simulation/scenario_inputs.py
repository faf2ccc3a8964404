"""Files that a scenario names: a network as a matrix, and a trace of machines that come and go.

The rule: what is in them is checked line by line, and a mistake is told with its place.
"""

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import ConfigError
from swarm.simulation.scenario import GIGA, ChurnLine
from swarm.tables import read_text


@dataclass(frozen=True, slots=True)
class Matrix:
    """Every pair of hosts, and where each host is."""

    regions: list[str]
    latencies_seconds: list[list[float]]
    bandwidths: list[list[float]]


def read_network(path: Path) -> Matrix:
    """Return the matrix of a network file. Raises ConfigError."""
    try:
        found = json.loads(read_text(path))
        count = int(found["n"])
        delays, rates = found["delay_ms"], found["bandwidth_gbps"]
        regions = [str(region) for region in found.get("regions") or [""] * count]
        latencies = [[float(delays[i][j]) / 1000 for j in range(count)] for i in range(count)]
        bandwidths = [[float(rates[i][j]) * GIGA / 8 for j in range(count)] for i in range(count)]
    except (json.JSONDecodeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is no network",
            evidence=(f"{type(error).__name__}: {error}",),
            hint="it is JSON: n, delay_ms and bandwidth_gbps, n rows of n, and perhaps regions",
        ) from error
    for i in range(count):
        for j in range(count):
            wrong = not (0 <= latencies[i][j] < math.inf and 0 < bandwidths[i][j] < math.inf)
            if i != j and wrong:
                raise ConfigError(
                    f"{path} has a way that carries nothing",
                    evidence=(f"from {i} to {j}: {rates[i][j]} Gbit/s, {delays[i][j]} ms",),
                    hint="bandwidths are above 0; who cannot be reached is not in the network",
                )
    if len(regions) != count:
        raise ConfigError(f"{path} has {len(regions)} regions for {count} hosts")
    return Matrix(regions, latencies, bandwidths)


def read_churn(path: Path) -> tuple[ChurnLine, ...]:
    """Return the lines of a churn trace, in order of time. Raises ConfigError."""
    made = []
    for number, row in enumerate(csv.reader(read_text(path).splitlines()), 1):
        try:
            at, what, node = row
            made.append(ChurnLine(float(at) / 1000, {"add": True, "remove": False}[what], node))
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"{path} is no churn trace",
                evidence=(f"line {number}: {','.join(row)[:100]}",),
                hint="every line is milliseconds,add|remove,node",
            ) from error
    return tuple(sorted(made, key=lambda line: line.at_seconds))
