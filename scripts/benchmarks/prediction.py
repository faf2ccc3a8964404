"""Predicted against measured step times, for the plan that the swarm chooses and for an even split.

Six daemons on this machine: three may use four times as much of a processor as the others, and
links between them have different rates and delays (proxies in TCP's way). The same swarm runs
twice: once it chooses its plan, once its stages have equal numbers of peers for good, in order (so
the three fast ones are in the first two stages).

The rule: what is predicted is what `swarm plan` says at the leader, once everybody has told what
its work takes; what is measured are the daemons' own commits, by the same plan.
"""

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.report import Report, Row
from tests.processes.director import Director
from tests.processes.places import Place
from tests.processes.proxies import Proxies
from tests.processes.swarms import SGD, manifest

CGROUP = Path("/sys/fs/cgroup/cpu")
PERIOD_MICROSECONDS = 100_000
QUOTAS = (0.4, 0.4, 0.4, 0.1, 0.1, 0.1)
"""Parts of a processor, by daemon."""
MEGABIT = 1e6 / 8
NEAR, FAR = (200 * MEGABIT, 0.002), (50 * MEGABIT, 0.03)
"""Rate and delay of links within the two places (even and odd daemons), and between them."""
STAGES = 3
GPT = """
[model]
factory = "swarm.models.gpt:layers"
arguments = {{ width = 320, depth = 6, heads = 4, context = 128, dropout = {dropout} }}
[data]
source = "text"
files = ["${{stdlib}}/[a-d]*.py"]
sequence_length = 128
"""
TEXT = manifest(GPT, SGD, steps=100_000, microbatches=64, determinism="standard")
WARM_STEPS, STEPS = 8, 12
RUNS = ("chosen", "even")


def why_not() -> str:
    """Return why this cannot be measured here; empty if it can."""
    if os.geteuid() != 0:
        return "quotas of processor time need root"
    if not (CGROUP / "cpu.cfs_quota_us").exists() and not CGROUP.is_dir():
        return f"{CGROUP} is not there"
    return ""


class Quotas(Proxies):
    """A network of shaped links between daemons with parts of a processor."""

    def __enter__(self) -> "Quotas":
        super().__enter__()
        return self

    def place(self, name: str) -> Place:
        """Return where a daemon lives: in a group of processes of its own."""
        known = set(self._daemons)
        place = super().place(name)
        if name not in known:
            for other in known:
                for one, two in permutations((name, other)):
                    near = (int(one[-1]) - int(two[-1])) % 2 == 0
                    self.shape(one, two, *(NEAR if near else FAR))
        group = self.group(name)
        group.mkdir(exist_ok=True)
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
        quota = round(QUOTAS[int(name[-1])] * PERIOD_MICROSECONDS)
        (group / "cpu.cfs_quota_us").write_text(str(quota))
        words = ("sh", "-c", f'echo $$ > {group}/tasks; exec "$@"', "sh")
        return Place(place.listen, place.advertise, words)

    def group(self, name: str) -> Path:
        """Return the control group of a daemon."""
        return CGROUP / f"swarm-{os.getpid()}-{name}"

    def remove_groups(self) -> None:
        """Remove them; their processes have ended."""
        for name in self._daemons:
            with contextlib.suppress(OSError):
                self.group(name).rmdir()


def measure(*, quick: bool) -> Report:
    """Run the swarm both ways."""
    reason = why_not()
    if reason:
        return Report("prediction", [], {"skipped": reason})
    runs = {name: _run(name, steps=3 if quick else STEPS) for name in RUNS}
    rows: list[Row] = list(runs.values())
    chosen, even = runs["chosen"], runs["even"]
    return Report(
        "prediction",
        rows,
        {
            "chosen_predicted_over_measured": _ratio(chosen, "predicted_s", chosen, "measured_s"),
            "even_predicted_over_measured": _ratio(even, "predicted_s", even, "measured_s"),
            "predicted_factor": _ratio(even, "predicted_s", chosen, "predicted_s"),
            "measured_factor": _ratio(even, "measured_s", chosen, "measured_s"),
        },
    )


def _ratio(one: Row, key: str, other: Row, other_key: str) -> float:
    return float(one[key] or 0.0) / float(other[other_key] or 1.0)


def _run(name: str, steps: int) -> Row:
    with _swarm(name) as director:
        director.start()
        plan = _steady(director, steps)
        parts = plan["step_seconds"]
        return {
            "plan": name,
            "groups": "/".join(str(len(stage["replicas"])) for stage in plan["stages"]),
            "predicted_s": parts["predicted"],
            "measured_s": plan["measured_step_seconds"],
            "fill_s": parts["fill"],
            "steady_s": parts["steady"],
            "reduction_s": parts["reduction"],
            "epoch": plan["epoch"],
        }


@contextlib.contextmanager
def _swarm(name: str) -> Iterator[Director]:
    stages = STAGES if name == "even" else 0
    with TemporaryDirectory(prefix="swarm-bench-") as folder, Quotas() as network:
        director = _Director(Path(folder), TEXT, peers=len(QUOTAS), stages=stages, network=network)
        director.is_even = name == "even"
        try:
            with director:
                yield director
        finally:
            network.remove_groups()


class _Director(Director):
    """Starts daemons that keep an even split, if it is told so."""

    is_even = False

    def _launch(self, name: str, points: Any, *arguments: str) -> None:
        super()._launch(name, _Even(self.folder) if self.is_even else points, *arguments)


class _Even:
    """How a daemon is started that keeps an even split (even_daemon.py)."""

    def __init__(self, folder: Path) -> None:
        self.start = (sys.executable, "-m", "scripts.benchmarks.even_daemon")
        self.variables: dict[str, str] = {}


def _steady(director: Director, steps: int) -> dict[str, Any]:
    """Return the leader's word of a plan by which so many steps have been committed."""
    seen: tuple[int, int] | None = None
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline:
        status = director.status(director.living[0])
        leader = next((n for n in director.names if director.id_of(n) == status["leader"]), None)
        if seen is None or seen[0] != status["epoch"]:
            seen = status["epoch"], status["version"]
        if leader and status["version"] >= max(seen[1], WARM_STEPS) + steps:
            plan = director.ask(leader, "plan")
            told = [director.ask(name, "plan") for name in director.living]
            # Who stands by has committed nothing.
            measured = [took for each in told if (took := each["measured_step_seconds"])]
            if plan["epoch"] == seen[0] and measured:
                return {**plan, "measured_step_seconds": statistics.median(measured)}
        time.sleep(1.0)
    raise RuntimeError("no plan stayed for long enough")
