"""`scripts/bench estimates`: what real daemons' links measure of real links of a known rate."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from benchmarks.shaped import why_not  # noqa: E402

sys.path.pop(0)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "estimates", "--json", "--quick"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


@pytest.mark.processes
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("megabits", [10, 50, 200])
def test_a_shaped_link_is_measured_within_two_megabytes(
    report: dict[str, Any], megabits: int
) -> None:
    """Of both directions the one counts that trusts itself more: this machine may have other things
    to do, and a probe that was disturbed says so."""
    rows = [row for row in report["rows"] if row.get("mbit_per_s") == megabits]
    assert len(rows) == 2
    best = min(rows, key=lambda row: row["spread"])
    assert abs(best["error"]) < 0.15
    assert all(row["bytes"] <= 2_000_000 for row in rows)


@pytest.mark.processes
def test_networks_are_completed(report: dict[str, Any]) -> None:
    """As far as there are any beside the project."""
    for row in report["rows"]:
        if "network" in row:
            assert row["latency"] < 0.2 and row["bandwidth"] < 0.2
            assert row["bandwidth_labelled"] < 0.2
