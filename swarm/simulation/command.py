"""`swarm simulate`: reads a scenario, runs it, and tells what came of it.

The rule: what cannot be written is refused before anything is simulated.
"""

import json
import os
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
    _check_files(wanted)
    duration = duration_of(wanted.duration) if wanted.duration is not None else None
    scenario = read_scenario(
        wanted.scenario, Overrides(wanted.seed, duration, wanted.network, wanted.churn)
    )
    done = simulate(scenario, whole_trace=wanted.trace is not None)
    report = done.report
    if wanted.as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print(told(report))
    print(
        f"{span_of(report.summary.virtual_seconds)} of virtual time took "
        f"{span_of(done.cpu_seconds)} of one core",
        file=sys.stderr,
    )
    if wanted.trace is not None:
        _write(wanted.trace, "".join(f"{line}\n" for line in done.trace))
    if wanted.plot is not None:
        draw(report, wanted.plot)
    return 0


def _check_files(wanted: Wanted) -> None:
    """Raise SimulationError if what is to be written cannot be, or would replace what is read."""
    if wanted.plot is not None:
        check_drawing(wanted.plot)
    read = [path for path in (wanted.scenario, wanted.network, wanted.churn) if path is not None]
    written: list[Path] = []
    for path in (wanted.trace, wanted.plot):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise _unwritable(path, f"{path.parent} is not a folder")
        if path.is_dir():
            raise _unwritable(path, f"{path} is a folder")
        if path.resolve() in [other.resolve() for other in (*read, *written)]:
            raise _unwritable(path, "another option names the same file")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise _unwritable(path, "permission denied")
        written.append(path)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error


def _unwritable(path: Path, why: str) -> SimulationError:
    return SimulationError(
        f"{path} cannot be written", evidence=(why,), hint="name another file, in a folder of yours"
    )
