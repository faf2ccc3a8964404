"""How often plans change though nothing does: measurements are noisy, links flap.

Daemons as they ship, on a virtual clock: a week of quiet peers whose measurements vary by 5 %, and
a day with a line between two sites that goes bad every two minutes. The rule: a plan counts
whatever it is for, and times are processor seconds of this one process.
"""

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Report, Row
from swarm.simulation.scenario_file import Overrides, read_scenario
from swarm.simulation.simulate import simulate

SCENARIOS = Path(__file__).parents[2] / "docs" / "scenarios"
HOUR_SECONDS, DAY_SECONDS = 3600.0, 86400.0


@dataclass(frozen=True, slots=True)
class Case:
    """A scenario, and for how long it runs."""

    file: str
    seconds: float
    quick_seconds: float


CASES = (
    Case("quiet-week.toml", 7 * DAY_SECONDS, DAY_SECONDS),
    Case("flapping-day.toml", DAY_SECONDS, DAY_SECONDS / 6),
)


def measure(*, quick: bool) -> Report:
    """Simulate both; `quick` is a day and four hours of them."""
    rows = [_row(case, case.quick_seconds if quick else case.seconds) for case in CASES]
    quiet, flapping = rows
    summary: Row = {
        "quiet_plans_after_first_hour": quiet["later_plans"],
        "flapping_plans_per_hour": flapping["plans_per_hour"],
        "flapping_most_plans_in_an_hour": flapping["most_in_an_hour"],
    }
    return Report("stability", rows, summary)


def _row(case: Case, seconds: float) -> Row:
    overrides = Overrides(duration_seconds=seconds)
    done = simulate(read_scenario(SCENARIOS / case.file, overrides))
    began = done.report.summary.began_at_seconds or 0.0
    later = [plan for plan in done.report.plans if plan.seconds >= began + HOUR_SECONDS]
    hours = Counter(int((plan.seconds - began) / HOUR_SECONDS) for plan in later)
    name = done.report.summary.name
    print(f"{name}: {len(later)} plans after the first hour", file=sys.stderr)  # it takes hours
    return {
        "scenario": name,
        "virtual_h": seconds / HOUR_SECONDS,
        "steps": done.report.summary.steps,
        "first_hour_plans": len(done.report.plans) - len(later),
        "later_plans": len(later),
        "plans_per_hour": len(later) / max((seconds - began) / HOUR_SECONDS - 1.0, 1e-9),
        "most_in_an_hour": max(hours.values(), default=0),
        "cpu_s": done.cpu_seconds,
        "reasons": "; ".join(sorted({plan.reason for plan in later}))[:200],
    }
