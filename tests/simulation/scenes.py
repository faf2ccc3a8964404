"""Small scenarios for tests of `swarm simulate`."""

from pathlib import Path

from swarm.simulation.scenario import Scenario
from swarm.simulation.scenario_file import Overrides, parse_scenario

SMALL = """
duration_seconds = 120

[model]
input_mb = 0.01
target_mb = 0.01

[[model.layers]]
count = 8
forward_seconds = 0.05
parameter_mb = 10
output_mb = 1
activation_mb = 5

[training]
microbatches = 32
stages = 4

[network]
latency_ms = 10
jitter_ms = 0

[[peers]]
count = 4
uplink_mbps = 1000
downlink_mbps = 1000
"""


def small(changes: dict[str, str] | None = None, more: str = "", **overrides: object) -> Scenario:
    """Return a scenario of four peers in a row, with some lines of it replaced, and more behind."""
    text = SMALL
    for line, other in (changes or {}).items():
        assert text.count(f"\n{line}\n") == 1, line
        text = text.replace(f"\n{line}\n", f"\n{other}\n")
    return parse_scenario(text + more, "small.toml", Path(), Overrides(**overrides))  # type: ignore[arg-type]
