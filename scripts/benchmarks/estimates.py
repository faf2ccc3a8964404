"""How well bandwidth is measured on links of a known rate, and a whole network known from a few.

The rule: the rate is the kernel's (token buckets between two hosts of their own, real TLS, two
processes); the networks are matrices of which each peer is shown its links to its partners, and the
error is that of all other pairs. Without the right to make hosts the first part is left out.

A network is a JSON object {n, delay_ms[n][n], bandwidth_gbps[n][n], regions[n]}.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Report, Row
from benchmarks.shaped import ADDRESSES, cable, why_not
from protocol.records import Estimates, LinkEstimate
from swarm.core.measuring.network import Network, completed
from swarm.core.measuring.partners import partners

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "dtfm"
MEGABITS = (10, 50, 200)
REPEATS = 3
SEEDS = 4
PORT = 31337
LEAST_SECONDS = 50e-6
"""A latency of nothing is written as this."""

Matrix = NDArray[np.float64]


def measure(*, quick: bool) -> Report:
    """Return errors by rate and by network."""
    report = Report("estimates")
    reason = why_not()
    if reason:
        print(f"no shaped links: {reason}", file=sys.stderr)
    else:
        for megabits in MEGABITS:
            for _ in range(1 if quick else REPEATS):
                report.rows += list(_probes(megabits))
        errors = [abs(float(row["error"] or 0.0)) for row in report.rows]
        report.summary["links_median_error"] = statistics.median(errors)
        report.summary["links_worst_error"] = max(errors)
        report.summary["most_bytes"] = max(int(row["bytes"] or 0) for row in report.rows)
    for path in sorted(FOLDER.glob("*.json")):
        report.rows += list(_completions(path, 1 if quick else SEEDS))
    return report


# --- links of a known rate -----------------------------------------------------------------------


def _probes(megabits: int) -> Iterator[Row]:
    """Yield what each end of a shaped cable says of it."""
    with cable(megabits) as hosts, _ends(hosts) as ends:
        for end in ends:
            began = time.perf_counter()
            found = json.loads(_tell(end))
            measured = found["bytes_per_second"] * 8e-6
            yield {
                "mbit_per_s": megabits,
                "measured": measured,
                "error": measured / megabits - 1,
                "spread": found["spread"],
                "bytes": found["probe_bytes"],
                "seconds": time.perf_counter() - began,
            }


@contextmanager
def _ends(hosts: Sequence[tuple[str, ...]]) -> Iterator[list["subprocess.Popen[str]"]]:
    ends = []
    for number, prefix in enumerate(hosts):
        own, other = ADDRESSES[number], ADDRESSES[1 - number]
        command = [sys.executable, "-m", "benchmarks.probing", str(number)]
        ends.append(
            subprocess.Popen(
                [*prefix, *command, f"{own}:{PORT}", f"{other}:{PORT}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for end in ends:
            assert end.stdout is not None
            end.stdout.readline()
        yield ends
    finally:
        for end in ends:
            end.communicate()


def _tell(end: "subprocess.Popen[str]") -> str:
    assert end.stdin is not None and end.stdout is not None
    end.stdin.write("go\n")
    end.stdin.flush()
    return end.stdout.readline()


# --- whole networks ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A network of which everything is known."""

    name: str
    latency: Matrix
    bandwidth: Matrix
    places: tuple[str, ...]


def _completions(path: Path, seeds: int) -> Iterator[Row]:
    """Yield the median errors of pairs that nobody measured, without and with labels of places."""
    case = _load(path)
    errors: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for seed in range(seeds):
        for is_labelled in errors:
            errors[is_labelled].append(_errors(case, str(seed), is_labelled))
    yield {
        "network": case.name,
        "latency": _worst(errors[False], 0),
        "bandwidth": _worst(errors[False], 1),
        "latency_labelled": _worst(errors[True], 0),
        "bandwidth_labelled": _worst(errors[True], 1),
        "cpu_s": _worst(errors[False], 2),
    }


def _load(path: Path) -> Case:
    given = json.loads(path.read_text())
    return Case(
        given["name"],
        np.maximum(np.array(given["delay_ms"], dtype=np.float64) / 1e3, LEAST_SECONDS),
        np.array(given["bandwidth_gbps"], dtype=np.float64) * 125e6,
        tuple(given["regions"]),
    )


def _worst(errors: Sequence[tuple[float, float, float]], column: int) -> float:
    return max(each[column] for each in errors)


def _errors(case: Case, seed: str, is_labelled: bool) -> tuple[float, float, float]:
    """Return median relative errors of latency and bandwidth, and CPU seconds of completing."""
    peers = [f"{seed}-{number:04d}" for number in range(len(case.latency))]
    told = {peer: _told(case, seed, peers, number) for number, peer in enumerate(peers)}
    places = dict(zip(peers, case.places, strict=True)) if is_labelled else None
    began = time.process_time()
    network = completed(peers, told, places)
    seconds = time.process_time() - began
    index = {peer: number for number, peer in enumerate(peers)}
    hidden = ~np.eye(len(peers), dtype=bool)
    for peer, own in told.items():
        for link in own.links:
            hidden[index[peer], index[link.peer]] = hidden[index[link.peer], index[peer]] = False
    return (*_medians(case, network, hidden), seconds)


def _medians(case: Case, network: Network, hidden: NDArray[np.bool_]) -> tuple[float, float]:
    latency = np.abs(network.latency / case.latency - 1)[hidden]
    bandwidth = np.abs(network.bandwidth / case.bandwidth - 1)[hidden]
    return float(np.median(latency)), float(np.median(bandwidth))


def _told(case: Case, seed: str, peers: Sequence[str], number: int) -> Estimates:
    """Return what a peer tells: of its links to its partners, as they are."""
    known = dict(zip(peers, case.latency[number].tolist(), strict=True))
    chosen = {peers.index(p) for p in partners(peers[number], peers, seed, known)}
    links = tuple(
        LinkEstimate(peers[j], case.bandwidth[number, j], case.latency[number, j], 0.05)
        for j in sorted(chosen)
    )
    return Estimates(b"r" * 32, peers[number], 1, 1, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, links)
