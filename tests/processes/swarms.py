"""Manifests and real processes for the tests in this folder."""

import contextlib
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.adapters.control_socket import call

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 180

GPT = """
[model]
factory = "swarm.models.gpt:layers"
arguments = {{ width = 32, depth = 4, heads = 2, context = 16, dropout = {dropout} }}
[data]
source = "text"
files = ["${{stdlib}}/[a-d]*.py"]
sequence_length = 16
"""

CONVNET = """
[model]
factory = "swarm.models.convnet:classifier"
arguments = {{ channels = 8, image = 8 }}
[data]
source = "factory"
factory = "swarm.models.convnet:shapes"
arguments = {{ samples = 256, image = 8 }}
sample = {{ dtype = "float32", shape = [3, 8, 8] }}
target = {{ dtype = "int64", high = 10 }}
"""

ADAMW = 'name = "adamw"\nlearning_rate = 3e-3\nweight_decay = 0.1'
SGD = 'name = "sgd"\nlearning_rate = 0.05\nmomentum = 0.9'


def manifest(
    model: str,
    optimiser: str = ADAMW,
    *,
    steps: int = 6,
    microbatches: int = 5,
    clip: float = 0.0,
    recompute: bool = False,
    dropout: float = 0.0,
    determinism: str = "exact",
) -> str:
    """Return the text of a RUN.toml for a small model."""
    text = f"""
[run]
name = "small"
steps = {steps}
microbatches_per_step = {microbatches}
microbatch_size = 2
seed = 11
{model.format(dropout=dropout)}
[optimiser]
{optimiser}
clip_norm = {clip}
[execution]
determinism = "{determinism}"
recompute = {str(recompute).lower()}
"""
    tomllib.loads(text)
    return text


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str


def swarm(*arguments: str | Path, deadline: float = DEADLINE_SECONDS) -> Finished:
    """Run a swarm command to its end."""
    done = subprocess.run(
        command(*arguments),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=deadline,
        env=environment(),
        stdin=subprocess.DEVNULL,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def command(*arguments: str | Path) -> list[str]:
    """Return the words that start a swarm command."""
    return [sys.executable, "-m", "swarm.cli", *map(str, arguments)]


def environment() -> dict[str, str]:
    """Return this process's environment with the project importable."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def hash_in(finished: Finished) -> str:
    """Return the SHA-256 that a command printed, after checking that it succeeded."""
    assert finished.code == 0, finished.err
    return finished.out.split()[0]


class Peer:
    """A daemon in its own process; `with` ends it.

    `start` are the words that start the program, instead of `python -m swarm.cli`; `variables`
    are added to its environment."""

    def __init__(
        self,
        home: Path,
        *arguments: str | Path,
        start: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.home = home
        self.log = home.with_suffix(".log")
        run = ("--log-level", "info", "run", "--home", home, "--with-parent")
        words = map(str, (*run, *arguments))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*(start or command()), *words],
                cwd=ROOT,
                env=environment() | dict(variables or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def ready(self) -> "Peer":
        """Wait until the daemon listens."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(b"ready "), self.log.read_text()
        return self

    def ended(self) -> int:
        """Wait until the daemon has ended by itself; return its exit code."""
        return self.process.wait(DEADLINE_SECONDS)

    def status(self) -> dict[str, Any]:
        """Return what `swarm status --json` prints."""
        finished = swarm("status", "--json", "--home", self.home)
        assert finished.code == 0, finished.err
        return dict(json.loads(finished.out))

    def status_when(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask again and again until `condition` holds; return that status.

        The daemon is another process: asking is the only way to see what it does, and the pause
        leaves it a processor to do it on."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            status = call(self.home, "status")
            if condition(status):
                return status
            assert time.monotonic() < deadline, status
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)

    def invitation(self) -> str:
        """Return what `swarm invite` prints."""
        finished = swarm("invite", "--home", self.home)
        assert finished.code == 0, finished.err
        return finished.out.strip()


def found(home: Path, text: str, *, peers: int, stages: int = 0) -> Path:
    """Make the home of a run's founder."""
    path = home.with_suffix(".toml")
    path.write_text(text)
    shape = ("--peers", str(peers), "--stages", str(stages), "--listen", "127.0.0.1:0")
    finished = swarm("create", path, "--home", home, *shape)
    assert finished.code == 0, finished.err
    assert finished.out.startswith("swarm1-")
    return home


def pids_naming(*texts: str | Path) -> list[int]:
    """Return the living processes whose command lines contain all of `texts`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if all(str(text) in line for text in texts):
                    found.append(int(entry.name))
    return found
