"""The weights of a swarm of real processes are the weights of one: bit for bit in exact mode."""

import hashlib
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.processes.swarms import ADAMW, CONVNET, GPT, SGD, hash_in, manifest, swarm

pytestmark = pytest.mark.processes

# (stages, replicas) and what is trained. Together: both models and both optimisers in every
# shape, clipping, recomputation, dropout, and microbatches that replicas cannot share evenly.
CASES = {
    "1x1-gpt": (1, 1, manifest(GPT, ADAMW, clip=0.5, recompute=True, dropout=0.2)),
    "1x1-conv": (1, 1, manifest(CONVNET, SGD, clip=0.5)),
    "4x1-gpt": (4, 1, manifest(GPT, SGD, clip=0.5, dropout=0.2)),
    "4x1-conv": (4, 1, manifest(CONVNET, ADAMW, recompute=True)),
    "1x4-gpt": (1, 4, manifest(GPT, ADAMW, microbatches=6, clip=0.5)),
    "1x4-conv": (1, 4, manifest(CONVNET, SGD, microbatches=3, recompute=True)),
    "3x2-gpt": (3, 2, manifest(GPT, ADAMW, microbatches=7, clip=0.5, recompute=True, dropout=0.2)),
    "3x2-conv": (3, 2, manifest(CONVNET, SGD, microbatches=7, clip=0.5)),
}


def run_both(tmp_path: Path, stages: int, replicas: int, text: str) -> tuple[Path, Path]:
    """Train with a swarm and in one process; return both files, hashes as printed checked."""
    (tmp_path / "run.toml").write_text(text)
    files = tmp_path / "swarm.safetensors", tmp_path / "reference.safetensors"
    shape = ("--peers", str(stages * replicas), "--stages", str(stages))
    home = ("--home", tmp_path / "home")
    trained = swarm("local", tmp_path / "run.toml", *shape, *home, "--out", files[0])
    reference = swarm("reference", tmp_path / "run.toml", "--out", files[1])
    for file, finished in zip(files, (trained, reference), strict=True):
        assert hash_in(finished) == hashlib.sha256(file.read_bytes()).hexdigest()
    return files


@pytest.mark.parametrize("name", CASES)
def test_exact_mode_gives_the_bits_of_one_process(name: str, tmp_path: Path) -> None:
    stages, replicas, text = CASES[name]
    trained, reference = run_both(tmp_path, stages, replicas, text)
    assert trained.read_bytes() == reference.read_bytes()


def test_another_seed_gives_other_bits(tmp_path: Path) -> None:
    """The comparison above can fail."""
    hashes = set()
    for seed in (11, 12):
        path = tmp_path / f"run-{seed}.toml"
        path.write_text(manifest(GPT, steps=1).replace("seed = 11", f"seed = {seed}"))
        hashes.add(hash_in(swarm("reference", path)))
    assert len(hashes) == 2


def test_standard_mode_differs_by_no_more_than_the_order_of_sums(tmp_path: Path) -> None:
    """Relative error of the weights below 1e-5 after 20 steps, for the GPT."""
    text = manifest(GPT, SGD, steps=20, microbatches=7, clip=0.5, determinism="standard")
    trained, reference = (load_file(file) for file in run_both(tmp_path, 3, 2, text))
    assert trained.keys() == reference.keys()
    for name, weights in reference.items():
        error = (trained[name] - weights).norm() / weights.norm()
        assert error < 1e-5, name
