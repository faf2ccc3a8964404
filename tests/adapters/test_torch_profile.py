"""What a peer measures: shapes, seconds, and the fingerprint of its numerics."""

import subprocess
import sys
import time

import msgspec
import pytest

from protocol.records import TensorSpec, Training
from swarm.adapters.torch_profile import TIMED_SECONDS, sustained_factor
from swarm.adapters.torch_stage import TorchStage
from tests.adapters.torch_swarm import GPT, PICTURES, execution

CHILD = """
import sys
import msgspec
from protocol.records import Training
from swarm.adapters.torch_stage import TorchStage
training = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=Training)
print(TorchStage(training).profile().numerics)
"""


def fingerprint_elsewhere(training: Training) -> str:
    encoded = msgspec.msgpack.encode(training).hex()
    command = [sys.executable, "-c", CHILD, encoded]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("training", [GPT, PICTURES], ids=lambda training: training.name)
def test_fingerprints_are_equal_in_every_process(training: Training) -> None:
    here = TorchStage(training).profile().numerics
    assert fingerprint_elsewhere(training) == here
    assert TorchStage(training).profile().numerics == here


def test_fingerprints_tell_settings_apart() -> None:
    training = GPT
    one = TorchStage(training).profile().numerics
    two = TorchStage(training, threads=2).profile().numerics
    seed = TorchStage(msgspec.structs.replace(training, seed=9)).profile().numerics
    standard = TorchStage(execution(training, determinism="standard")).profile().numerics
    assert len({one, two, seed, standard}) == 4
    facts, digest = one.rsplit(" sha256=", 1)
    assert "torch=" in facts and "device=cpu" in facts and " threads=1 determinism=exact" in facts
    assert len(bytes.fromhex(digest)) == 32
    assert one.rsplit("=", 1)[1] != seed.rsplit("=", 1)[1]


def test_the_shape_of_the_model() -> None:
    profile = TorchStage(GPT).profile()
    shape = profile.shape
    assert [layer.name for layer in shape.layers] == ["embed", "block0", "block1", "head"]
    assert shape.input == shape.target == TensorSpec("int64", (2, 8))
    hidden = TensorSpec("float32", (2, 8, 16))
    outputs = [layer.output for layer in shape.layers]
    assert outputs == [hidden, hidden, hidden, TensorSpec("float32", (2, 8, 32))]
    (project,) = [use for use in shape.layers[3].tensors if use.name == "head.project.weight"]
    assert (project.elements, project.tied_to) == (32 * 16, "embed.token.weight")
    assert [layer.name for layer in profile.layers] == [layer.name for layer in shape.layers]
    assert [layer.output for layer in profile.layers] == outputs
    for measured, layer in zip(profile.layers, shape.layers, strict=True):
        assert measured.forward_seconds > 0 and measured.backward_seconds > 0
        assert measured.parameter_bytes == 4 * sum(use.elements for use in layer.tensors)
    assert profile.memory_bytes > 2**28


def test_what_is_kept_of_a_microbatch() -> None:
    """By hand: a block of the GPT saves several activations of the size of its input, and none of
    its weights; with recomputation every layer keeps its input alone."""
    whole = TorchStage(execution(GPT, recompute=False)).profile()
    lean = TorchStage(execution(GPT, recompute=True)).profile()
    tokens, hidden = 8 * 2 * 8, 4 * 2 * 8 * 16
    assert [layer.activation_bytes for layer in lean.layers] == [tokens, hidden, hidden, hidden]
    for layer in whole.layers[1:3]:
        # Two norms, queries, keys and values, attention's output, four times as wide inside.
        assert 8 * hidden <= layer.activation_bytes <= 24 * hidden
    assert tokens <= whole.layers[0].activation_bytes <= tokens + 2 * hidden


def test_building_finds_the_same_shape_as_profiling() -> None:
    profiled, built = TorchStage(PICTURES), TorchStage(PICTURES)
    root = built.build([(0, 2), (2, 5)], 1)
    assert profiled.profile().shape == built.shape
    assert profiled.build([(0, 2), (2, 5)], 1) == root
    assert profiled.build([(0, 2), (2, 5)], 0) != root
    assert profiled.build([(0, 2), (2, 5)], 1) == root


def test_a_quota_of_processor_time_shows_in_the_mean() -> None:
    """Of ten runs of 2 ms one is stopped for 180 ms: that is a tenth of a processor."""
    throttled = [0.002] * 9 + [0.182]
    assert sustained_factor([(throttled, throttled), (throttled, throttled)]) == pytest.approx(10.0)


def test_even_runs_take_what_they_take() -> None:
    assert sustained_factor([([0.1, 0.1, 0.1], [0.3]), ([0.0], [])]) == pytest.approx(1.0)
    assert sustained_factor([]) == 1.0
    assert sustained_factor([([0.0], [0.0])]) == 1.0


def test_a_known_quota_shows_before_it_has_stopped_anything() -> None:
    assert sustained_factor([([0.1, 0.1], [0.3])], least=4.0) == 4.0
    assert sustained_factor([([0.1, 1.1], [0.2])], least=2.0) == pytest.approx(1.4 / 0.4)
    assert sustained_factor([([0.1], [0.3])], least=0.25) == 1.0  # four processors, one thread


def test_layers_are_timed_for_some_time() -> None:
    began = time.perf_counter()
    profile = TorchStage(GPT).profile()
    assert time.perf_counter() - began >= TIMED_SECONDS
    assert all(layer.forward_seconds > 0 for layer in profile.layers)
