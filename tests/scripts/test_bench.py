"""`scripts/bench`, in its quick form: that it measures and reports, not what it finds."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KEYS = {
    "transport": {"link_over_trio_tls", "link_over_hivemind", "heartbeat_p99_ms"},
    "overhead": {"cpu_ratio", "stage_ms"},
    "scale": {"control_per_peer_second", "cpu_seconds_per_hour"},
    "recovery": {"total_median_ms", "agree_median_ms", "report_median_ms"},
}


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(KEYS))
def test_prints_one_json_object(name: str) -> None:
    done = bench(name, "--json", "--quick")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert set(report) == {"name", "rows", "summary"}
    assert report["name"] == name
    assert report["rows"] and all(isinstance(row, dict) for row in report["rows"])
    for key in KEYS[name]:
        assert math.isfinite(report["summary"][key]) and report["summary"][key] > 0


def test_refuses_a_benchmark_that_does_not_exist() -> None:
    done = bench("speed")
    assert done.returncode == 2
    assert "speed" in done.stderr and not done.stdout
