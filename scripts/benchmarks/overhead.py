"""What a swarm costs in CPU time over one process that trains the same, and where it goes.

The rule: both sides are counted between the same two commits, so neither start nor end counts;
one after the other, in the same run, with the same manifest and in exact mode.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.cpu_time import DaemonTime, children, daemon_time, process_seconds
from benchmarks.report import Report, Row
from protocol.records import Training
from swarm.adapters.torch_stage import TorchStage
from swarm.config import parse_training

MANIFEST = """
[run]
name = "overhead"
steps = {steps}
microbatches_per_step = 8
microbatch_size = {batch}
seed = 1

[model]
factory = "swarm.models.gpt:layers"
arguments = {{ width = {width}, depth = {depth}, heads = 4, context = {context} }}

[slicing]
cuts = {cuts}

[data]
source = "text"
files = ["${{stdlib}}/*.py"]
sequence_length = {context}

[optimiser]
name = "adamw"
learning_rate = 1e-3
clip_norm = 1.0

[execution]
determinism = "exact"
"""
POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    cuts: tuple[int, ...]
    """Layers at which stages begin: given, so that no stage is short by accident."""
    repetitions: int
    first: int
    last: int
    """Steps: from the commit of the first to that of the last."""
    width: int
    depth: int
    context: int
    batch: int

    def manifest(self) -> str:
        """Return the manifest of a run that goes one step beyond the last."""
        return MANIFEST.format(
            steps=self.last + 2,
            cuts=list(self.cuts),
            batch=self.batch,
            width=self.width,
            depth=self.depth,
            context=self.context,
        )

    @property
    def stages(self) -> int:
        """Return the number of stages, and of peers: one for each."""
        return len(self.cuts) + 1

    @property
    def tokens(self) -> int:
        """Return how many tokens are trained between the two commits."""
        return (self.last - self.first) * 8 * self.batch * self.context


FULL = Size(
    cuts=(3, 5, 7), repetitions=2, first=0, last=8, width=256, depth=8, context=128, batch=6
)
QUICK = Size(cuts=(2,), repetitions=1, first=0, last=2, width=128, depth=2, context=64, batch=4)


def measure(*, quick: bool) -> Report:
    """Train with both, in turns, and compare."""
    size = QUICK if quick else FULL
    reference: list[float] = []
    swarm: list[DaemonTime] = []
    with TemporaryDirectory(prefix="swarm-bench-") as text:
        folder = Path(text)
        manifest = folder / "run.toml"
        manifest.write_text(size.manifest())
        for number in range(size.repetitions):
            reference.append(_reference(size, manifest))
            swarm.append(_swarm(size, manifest, folder / str(number)))
        status = json.loads((folder / "0" / "report.json").read_text())
    training = parse_training(size.manifest())
    stage_seconds = _stage_seconds(training, status)
    return _report(size, reference, swarm, stage_seconds)


# --- the two sides ------------------------------------------------------------------------------


def _reference(size: Size, manifest: Path) -> float:
    """Return the CPU seconds of `swarm reference` between the two commits."""
    with _started(["reference", str(manifest)], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        begun = None
        for line in process.stderr:
            match line.split():
                case [b"step", steps, *_] if steps.startswith(b"%d/" % (size.first + 1)):
                    begun = process_seconds(process.pid)
                case [b"step", steps, *_] if steps.startswith(b"%d/" % (size.last + 1)):
                    assert begun is not None
                    return process_seconds(process.pid) - begun
        raise RuntimeError("swarm reference ended early")


def _swarm(size: Size, manifest: Path, folder: Path) -> DaemonTime:
    """Return the CPU seconds of the daemons of `swarm local` between the two commits."""
    peers = str(size.stages)
    arguments = ["local", str(manifest), "--peers", peers, "--stages", peers]
    folder.mkdir()
    arguments += ["--home", str(folder / "homes"), "--report", str(folder / "report.json")]
    with _started(arguments, stderr=subprocess.DEVNULL) as process:
        log = folder / "homes" / "peer-0.log"
        _wait_for(process, log, f"committed step={size.first} ")
        daemons = children(process.pid)
        assert len(daemons) == size.stages
        begun = _sum(daemons)
        _wait_for(process, log, f"committed step={size.last} ")
        used = _sum(daemons) - begun
        if process.wait() != 0:
            raise RuntimeError("swarm local failed")
    return used


def _sum(daemons: list[int]) -> DaemonTime:
    return sum((daemon_time(pid) for pid in daemons), DaemonTime())


def _wait_for(process: "subprocess.Popen[bytes]", log: Path, text: str) -> None:
    while not (log.exists() and text in log.read_text()):
        if process.poll() is not None:
            raise RuntimeError("swarm local ended early")
        time.sleep(POLL_SECONDS)


@contextmanager
def _started(arguments: list[str], stderr: int) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "swarm.cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def _stage_seconds(training: Training, status: dict[str, list[dict[str, int]]]) -> list[float]:
    """Return seconds per microbatch, forward and backward, of every stage on one core alone."""
    layers = TorchStage(training).profile().layers
    return [
        sum(
            layer.forward_seconds + layer.backward_seconds
            for layer in layers[stage["first_layer"] : stage["last_layer"] + 1]
        )
        for stage in status["stages"]
    ]


# --- what it means ------------------------------------------------------------------------------


def _report(
    size: Size, reference: list[float], swarm: list[DaemonTime], stage_seconds: list[float]
) -> Report:
    base = statistics.median(reference)
    names = {field.name: field.name.replace("_", " ") for field in fields(DaemonTime)}
    total = statistics.median(used.total for used in swarm)
    rows: list[Row] = [_row("reference", base, base, size)]
    rows.append(_row("swarm", total, base, size))
    for number, name in enumerate(names.values()):
        part = statistics.median(astuple(used)[number] for used in swarm)
        rows.append(_row(f"swarm: {name}", part, base, size))
    return Report(
        "overhead",
        rows,
        {
            "cpu_ratio": total / base,
            "stage_ms": 1000 * min(stage_seconds),
            "stages": size.stages,
            "tokens": size.tokens,
            "determinism": "exact",
        },
    )


def _row(part: str, seconds: float, base: float, size: Size) -> Row:
    return {
        "part": part,
        "cpu_us_per_token": 1e6 * seconds / size.tokens,
        "over_reference": seconds / base,
    }
