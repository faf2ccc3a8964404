"""What is left of a swarm's throughput while its peers die and come back, by four rules.

Each scenario is simulated with our own placing and with those of others
(swarm/simulation/rules.py): same daemons, same peers, same misfortunes; only who gets which stage
differs. The rule: throughput is microbatches of committed steps per second from the first plan on,
so that detection, repairs, lost work and moving states are in it, and it stands beside what the
peers alive at each moment could have computed (swarm/simulation/upper_bound.py).
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Report, Row
from swarm.simulation.scenario import Scenario
from swarm.simulation.scenario_file import Overrides, duration_of, read_scenario
from swarm.simulation.simulate import simulate

RULES = ("ours", "none", "swarm", "petals")
SCENARIOS = Path("docs/scenarios")
KILLS, TRACE = SCENARIOS / "kill-every-30-s.toml", SCENARIOS / "spot-churn.toml"
QUICK_DURATION = "30s"


def measure(
    *,
    quick: bool,
    scenario: Sequence[str] = (),
    trace: str = "",
    duration: str = "",
    rule: Sequence[str] = (),
) -> Report:
    """Simulate scenarios, by default kills every 30 s, with every rule. With `trace`, a churn
    trace, also spot instances that follow it, or all that are named."""
    report = Report("churn")
    rules = [each for each in RULES if not rule or each in rule]
    wanted = _wanted(scenario, trace)
    for path, churn in wanted[:1] if quick else wanted:
        report.rows += _rows(path, churn, duration or (QUICK_DURATION if quick else ""), rules)
    for name in rules:
        fractions = [float(row["fraction"] or 0) for row in report.rows if row["rule"] == name]
        report.summary[f"{name}_least_fraction"] = min(fractions)
    return report


def _wanted(scenarios: Sequence[str], trace: str) -> list[tuple[Path, Path | None]]:
    churn = Path(trace) if trace else None
    if scenarios:
        return [(Path(each), churn) for each in scenarios]
    made: list[tuple[Path, Path | None]] = [(KILLS, None)]
    return made if churn is None else [*made, (TRACE, churn)]


def _rows(path: Path, churn: Path | None, duration: str, rules: Sequence[str]) -> list[Row]:
    seconds = duration_of(duration) if duration else None
    scenario = read_scenario(path, Overrides(None, seconds, None, churn))
    return [_row(path.stem, replace(scenario, rule=rule)) for rule in rules]


def _row(name: str, scenario: Scenario) -> Row:
    done = simulate(scenario)
    summary = done.report.summary
    print(f"{name} {summary.rule}: {summary.fraction_of_upper_bound:.4f}", file=sys.stderr)
    return {
        "scenario": name,
        "rule": summary.rule,
        "fraction": summary.fraction_of_upper_bound,
        "mb_per_second": summary.microbatches_per_second,
        "upper_bound": summary.upper_bound,
        "virtual_seconds": summary.virtual_seconds,
        "steps": summary.steps,
        "plans": summary.plans,
        "repairs": summary.repairs,
        "lost_mb": summary.lost_microbatches,
        "lost_percent": 100 * summary.lost_fraction,
        "cpu_seconds": done.cpu_seconds,
    }
