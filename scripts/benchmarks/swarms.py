"""Problems for the scheduler's benchmarks: a GPT with 1.3 billion parameters, and networks for it.

The rule: a function of the arguments; figures of the model are computed from its shape. 24 layers
of width 2048, a vocabulary of 50,257, sequences of 2048 tokens, one a microbatch; activations are
recomputed, so that backward takes three times as long as forward and only a layer's input is kept;
activations travel in 2 bytes, parameters are kept in 4 and reduced in 2.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from swarm.core.scheduling.problem import Layer, Links, Peer, Problem, Terms

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "dtfm"
LAYERS, WIDTH, VOCABULARY, TOKENS = 24, 2048, 50_257, 2048
FLOPS = 40e12
"""What a peer of speed 1 does per second."""
MEMORY_BYTES = 16 * 10**9
GIGABIT = 1e9 / 8


def gpt_layers() -> tuple[Layer, ...]:
    """Return the layers; the first has the embedding as well, the last the head."""
    parameters = 12 * WIDTH**2
    forward = TOKENS * (2 * parameters + 4 * TOKENS * WIDTH) / FLOPS
    words = VOCABULARY * WIDTH
    activations = TOKENS * WIDTH * 2
    made = []
    for number in range(LAYERS):
        seconds = forward + (2 * TOKENS * words / FLOPS if number == LAYERS - 1 else 0.0)
        size = parameters + (words if number in (0, LAYERS - 1) else 0)
        made.append(Layer(seconds, 3 * seconds, 4 * size, activations, activations))
    return tuple(made)


def terms(microbatches: int) -> Terms:
    """Return free terms: any stages, any replicas."""
    tokens = TOKENS * 8
    return Terms(microbatches, input_bytes=tokens, target_bytes=tokens, reduction_ratio=0.5)


def random_swarm(peers: int, seed: int = 0, places: int = 5) -> Problem:
    """Return peers of uneven speed, memory and links in some places, far from each other."""
    rng = np.random.default_rng(seed)
    place = rng.integers(places, size=peers)
    near = place[:, None] == place
    bandwidth = 10 ** np.where(
        near, rng.uniform(8, 9.5, (peers, peers)), rng.uniform(6.7, 8.3, (peers, peers))
    )
    far = rng.uniform(0.01, 0.12, (places, places))
    latency = np.where(
        near, rng.uniform(1e-4, 2e-3, (peers, peers)), ((far + far.T) / 2)[place[:, None], place]
    )
    speed = np.exp(rng.normal(0, 0.5, peers))
    memory = rng.choice([8, 16, 24, 40], peers) * 10**9
    uplink, downlink = 10 ** rng.uniform(7.3, 8.9, peers), 10 ** rng.uniform(7.5, 9, peers)
    return Problem(
        gpt_layers(),
        tuple(
            Peer(
                f"peer{i:05}",
                float(speed[i]),
                int(memory[i]),
                float(uplink[i]),
                float(downlink[i]),
                f"place{place[i]}",
            )
            for i in range(peers)
        ),
        Links(bandwidth, latency),
        terms(512),
    )


def network(path: Path, microbatches: int, chosen: Sequence[int] = ()) -> Problem:
    """Return equal peers on the network of a case (benchmarks/scheduler.py), all or the chosen.

    A peer's uplink and downlink are as wide as its widest link."""
    found = json.loads(path.read_text())
    peers = list(chosen) or list(range(found["n"]))
    pairs = np.ix_(peers, peers)
    latency = np.array(found["delay_ms"], float)[pairs] / 1000
    bandwidth = np.array(found["bandwidth_gbps"], float)[pairs] * GIGABIT
    np.fill_diagonal(bandwidth, 0.0)
    np.fill_diagonal(latency, 0.0)
    widest = bandwidth.max(axis=1).tolist()
    return Problem(
        gpt_layers(),
        tuple(
            Peer(f"peer{i:05}", 1.0, MEMORY_BYTES, width, width, found["regions"][peer])
            for i, (peer, width) in enumerate(zip(peers, widest, strict=True))
        ),
        Links(bandwidth, latency),
        terms(microbatches),
    )
