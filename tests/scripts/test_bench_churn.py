"""`scripts/bench churn`: one table of a scenario with all rules, ours first, on the same events."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCENARIO = """
duration_seconds = 60
[[model.layers]]
count = 4
forward_seconds = 0.02
parameter_mb = 1
output_mb = 0.1
[training]
microbatches = 16
stages = 2
[[peers]]
count = 5
uplink_mbps = 1000
downlink_mbps = 1000
[[events]]
action = "kill"
at_seconds = 20
peers = [3]
seconds = 5
"""


@pytest.mark.processes
def test_all_rules_meet_the_same_events(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "churn", "--json", "--scenario", str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["rule"] for row in report["rows"]] == ["ours", "none", "swarm", "petals"]
    for row in report["rows"]:
        assert row["scenario"] == "small" and row["repairs"] >= 1 and row["steps"] > 0
        assert 0 < row["fraction"] <= 1.0 and row["virtual_seconds"] == 60
    assert report["summary"]["ours_least_fraction"] == report["rows"][0]["fraction"]
