"""`swarm simulate`: reads a scenario, runs it, and tells what came of it.

The rule: what cannot be written is refused before anything is simulated.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import SimulationError
from swarm.simulation.plot import check_drawing, draw
from swarm.simulation.report import span_of, told
from swarm.simulation.scenario_file import Overrides, duration_of, read_scenario
from swarm.simulation.simulate import simulate


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line asks for."""

    scenario: Path
    seed: int | None = None
    duration: str | None = None
    network: Path | None = None
    churn: Path | None = None
    as_json: bool = False
    trace: Path | None = None
    plot: Path | None = None


def simulate_command(wanted: Wanted) -> int:
    """Run `swarm simulate`; return its exit code. Raises ConfigError, SimulationError."""
    for path in (wanted.trace, wanted.plot):
        _check_folder(path)
    if wanted.plot is not None:
        check_drawing()
    duration = duration_of(wanted.duration) if wanted.duration is not None else None
    scenario = read_scenario(
        wanted.scenario, Overrides(wanted.seed, duration, wanted.network, wanted.churn)
    )
    done = simulate(scenario, whole_trace=wanted.trace is not None)
    report = done.report
    if wanted.trace is not None:
        wanted.trace.write_text("".join(f"{line}\n" for line in done.trace), encoding="utf-8")
    if wanted.as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print(told(report))
    if wanted.plot is not None:
        draw(report, wanted.plot)
    print(
        f"{span_of(report.summary.virtual_seconds)} of virtual time took "
        f"{span_of(done.cpu_seconds)} of one core",
        file=sys.stderr,
    )
    return 0


def _check_folder(path: Path | None) -> None:
    if path is not None and not path.parent.is_dir():
        raise SimulationError(
            f"{path} cannot be written",
            evidence=(f"{path.parent} is not a folder",),
            hint="name a file in a folder that exists",
        )
