"""`scripts/soak`: what it says of seeds that pass, and of one that fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BROKEN = """
import swarm.core.agreement, swarm.core.register
swarm.core.agreement.majority = swarm.core.register.majority = lambda council: 1
"""


def soak(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([str(folder), str(ROOT / "scripts")])
    return subprocess.run(
        [sys.executable, "-m", "soak", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.processes
def test_seeds_that_pass_are_counted(tmp_path: Path) -> None:
    done = soak(tmp_path, "agreement", "--seeds", "3", "--first", "1")
    assert done.returncode == 0, done.stderr
    assert "3 seeds in" in done.stdout
    assert "0 failed" in done.stdout


@pytest.mark.processes
def test_a_seed_that_fails_is_told_with_its_transcript_and_how_to_replay_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    done = soak(tmp_path, "agreement", "--seeds", "9", "--first", "1")
    assert done.returncode == 1, done.stdout
    assert " leads epoch " in done.stdout
    assert "replay: python -m tests.core.agreement_world " in done.stdout
