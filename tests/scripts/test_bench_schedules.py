"""`scripts/bench` growth, ablations and optimality in their quick forms: that they report."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEYS = {
    "growth": {"greedy_exponent", "rebalance_exponent", "predict_exponent", "solve_exponent"},
    "optimality": {"search_gap_p50", "search_gap_worst", "greedy_gap_p50", "greedy_gap_p99"},
    "ablations": {"networks", "unified_is_best", "least_efficiency"},
}


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(KEYS))
def test_prints_one_json_object(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--json", "--quick"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if name == "ablations" and "cases are not at" in done.stderr:
        pytest.skip("the network cases are not here")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["name"] == name and report["rows"]
    assert all(math.isfinite(report["summary"][key]) for key in KEYS[name])
