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
        found = json.loads(read_text(path, "a network, in JSON"))
        count = int(found["n"])
        delays, rates = found["delay_ms"], found["bandwidth_gbps"]
        regions = [str(region) for region in found.get("regions") or [""] * count]
        latencies = _square(delays, count, 1e-3, "delay_ms")
        bandwidths = _square(rates, count, GIGA / 8, "bandwidth_gbps")
    except (json.JSONDecodeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is no network",
            evidence=(_wrong(error),),
            hint="it is JSON: n, delay_ms and bandwidth_gbps, n rows of n, and perhaps regions",
        ) from error
    for i in range(count):
        for j in range(count):
            wrong = not (0 <= latencies[i][j] < math.inf and 0 < bandwidths[i][j] < math.inf)
            if i != j and wrong:
                raise ConfigError(
                    f"{path} has a way on which nothing can go",
                    evidence=(f"from {i} to {j}: {rates[i][j]} Gbit/s, {delays[i][j]} ms",),
                    hint="bandwidths are above 0, delays at least 0; leave out who is not reached",
                )
    if len(regions) != count:
        raise ConfigError(
            f"{path} has {len(regions)} regions for {count} hosts",
            evidence=(f"regions: {', '.join(regions[:5])}, ...",),
            hint="name one for each host, in their order, or leave regions out",
        )
    return Matrix(regions, latencies, bandwidths)


def _square(rows: object, count: int, unit: float, name: str) -> list[list[float]]:
    """Return numbers in another unit; what is on the diagonal means nothing."""
    if not isinstance(rows, list) or len(rows) != count:
        raise ValueError(f"{name} has to be a list of {count} rows")
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != count:
            raise ValueError(f"{name}[{i}] has to be a list of {count} numbers")
    return [
        [float(each) * unit if i != j else 0.0 for j, each in enumerate(row)]
        for i, row in enumerate(rows)
    ]


def _wrong(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def read_churn(path: Path) -> tuple[ChurnLine, ...]:
    """Return the lines of a churn trace, in order of time. Raises ConfigError."""
    made = []
    for number, row in enumerate(csv.reader(read_text(path, "a churn trace").splitlines()), 1):
        try:
            at, what, node = row
            if not (0 <= float(at) < math.inf and node):
                raise ValueError
            made.append(ChurnLine(float(at) / 1000, {"add": True, "remove": False}[what], node))
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"{path} is no churn trace",
                evidence=(f"line {number}: {','.join(row)[:100]}",),
                hint="every line is milliseconds,add|remove,node",
            ) from error
    if not made:
        raise ConfigError(
            f"{path} is empty",
            evidence=("a churn trace has a line for each machine that comes or goes",),
            hint="every line is milliseconds,add|remove,node",
        )
    return tuple(sorted(made, key=lambda line: line.at_seconds))
