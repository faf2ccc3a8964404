"""`scripts/bench scheduler` on small networks, against DT-FM's definition tried out in full."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.random import PCG64, Generator

ROOT = Path(__file__).parents[2]
Group = tuple[int, ...]


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "scheduler", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        capture_output=True,
        text=True,
        timeout=120,
    )


def network(peers: int, seed: int, **task: int) -> dict[str, Any]:
    """Return peers in three places; the diagonal is nonsense, as in real cases."""
    rng = Generator(PCG64(seed))
    place = np.arange(peers) % 3
    far = place[:, None] != place
    delay = np.triu(np.where(far, 100.0, 1.0) * rng.random((peers, peers)), 1)
    bandwidth = np.triu(np.where(far, 0.5, 10.0) * (0.5 + rng.random((peers, peers))), 1)
    sizes = {"send_gradient_size_GB": 0.65, "send_activation_size_GB": 0.47}
    return {
        "n": peers,
        "delay_ms": (delay + delay.T - 7 * np.eye(peers)).tolist(),
        "bandwidth_gbps": (bandwidth + bandwidth.T).tolist(),
        "task": {**sizes, **task},
    }


def groupings(peers: frozenset[int], size: int) -> Iterator[list[Group]]:
    if not peers:
        yield []
        return
    first = min(peers)
    for others in itertools.combinations(sorted(peers - {first}), size - 1):
        group = (first, *others)
        for rest in groupings(peers - set(group), size):
            yield [group, *rest]


def optimum(case: dict[str, Any], replicas: int) -> float:
    """Return the least cost of all assignments: each is priced by matchings and shortest path."""
    delay, bandwidth, task = case["delay_ms"], case["bandwidth_gbps"], case["task"]

    def link(a: int, b: int, gigabytes: float) -> float:
        return float(delay[a][b] / 1000 + 8 * gigabytes / bandwidth[a][b])

    def exchange(group: Group) -> float:
        share = task["send_gradient_size_GB"] / replicas
        return max(sum(2 * link(i, j, share) for j in group if j != i) for i in group)

    def matched(one: Group, other: Group) -> float:
        ways = itertools.permutations(other)
        size = task["send_activation_size_GB"]
        return min(max(link(a, b, size) for a, b in zip(one, way, strict=True)) for way in ways)

    def pipeline(groups: Sequence[Group]) -> float:
        costs = {pair: matched(*pair) for pair in itertools.permutations(groups, 2)}
        return min(sum(costs[pair] for pair in pairwise(p)) for p in itertools.permutations(groups))

    every = groupings(frozenset(range(case["n"])), replicas)
    return min(max(map(exchange, groups)) + 2 * pipeline(groups) for groups in every)


def test_finds_the_optimum_of_small_networks(tmp_path: Path) -> None:
    cases = {
        "six": (network(6, 1, way=3, partition_size=2), 2),
        "eight": (network(8, 2, way=2, partition_size=4), 4),
        "nine": (network(9, 3), 3),
        "ten": (network(10, 4, way=5), 2),
    }
    named = []
    for name, (case, _) in cases.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(case))
        named += ["--case", str(tmp_path / f"{name}.json")]
    done = bench("--json", "--quick", *named)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads(done.stdout)["rows"]}
    assert list(rows) == list(cases)
    for name, (case, replicas) in cases.items():
        assert rows[name]["cost"] == pytest.approx(optimum(case, replicas))
        assert rows[name]["known"] is None and rows[name]["DT-FM best"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the case"),
        ("{}", "is not a network case"),
        (json.dumps(network(6, 1, way=4, partition_size=2)), "4 stages of 2 replicas"),
        (json.dumps(network(6, 1) | {"n": 4}), "for 4 peers"),
    ],
)
def test_says_what_is_wrong_with_a_case(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "case.json"
    if text is not None:
        path.write_text(text)
    done = bench("--case", str(path))
    assert done.returncode == 1 and not done.stdout
    assert message in done.stderr and str(path) in done.stderr
    assert "Traceback" not in done.stderr
