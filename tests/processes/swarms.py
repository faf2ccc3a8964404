"""Manifests and real processes for the tests in this folder."""

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

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
