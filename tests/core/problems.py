"""Problems for the tests of the scheduler: made by hand, and drawn from a seed."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from swarm.core.scheduling.problem import Assignment, Layer, Links, Peer, Problem, Standby, Terms

MEGABYTE = 1_000_000


def assignment_of(
    problem: Problem,
    cuts: Sequence[int],
    groups: Sequence[Sequence[int]],
    feeders: Sequence[int] | None = None,
) -> Assignment:
    """These groups; everybody else stands by, and all who have the data feed."""
    edges = [0, *cuts, len(problem.layers)]
    busy = {peer for group in groups for peer in group}
    idle = [peer for peer in range(len(problem.peers)) if peer not in busy]
    return Assignment(
        ranges=tuple(pairwise(edges)),
        groups=tuple(tuple(sorted(group)) for group in groups),
        feeders=problem.data_holders if feeders is None else tuple(feeders),
        standby=tuple(Standby(peer, "") for peer in idle),
    )


def plain_problem(
    speeds: Sequence[float],
    layers: int = 4,
    *,
    bandwidth: float = 1e15,
    latency: float = 0.0,
    terms: Terms | None = None,
    layer: Layer | None = None,
) -> Problem:
    """Equal layers of 1 + 2 seconds; a network that does not matter unless told."""
    count = len(speeds)
    return Problem(
        layers=(layer or Layer(1.0, 2.0, 100, 10, 5),) * layers,
        peers=tuple(
            Peer(f"peer{i:03}", speed, 10**12, bandwidth, bandwidth)
            for i, speed in enumerate(speeds)
        ),
        links=Links(((bandwidth,) * count,) * count, ((latency,) * count,) * count),
        terms=terms or Terms(10),
    )


def with_links(problem: Problem, bandwidth: Sequence[Sequence[float]]) -> Problem:
    """The same with these bandwidths."""
    return replace(problem, links=Links(bandwidth, problem.links.latency_seconds))


def random_problem(
    seed: int, *, most_peers: int = 8, least_peers: int = 2, most_layers: int = 8
) -> Problem:
    """A heterogeneous swarm: up to three places, wide and narrow links, fast and slow peers, large
    and small memories; sometimes cuts, replicas or data are limited. A function of the seed."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(least_peers, most_peers + 1))
    layer_count = int(rng.integers(2, most_layers + 1))
    layers = _layers(rng, layer_count)
    state = sum(layer.parameter_bytes for layer in layers) * 6
    places = [f"place{int(rng.integers(3))}" for _ in range(count)]
    tight = rng.random() < 0.4
    data = rng.random(count) < (1.0 if rng.random() < 0.5 else 0.6)
    data[int(rng.integers(count))] = True
    peers = tuple(
        Peer(
            f"peer{i:03}",
            speed=float(np.exp(rng.normal(0, 0.7))),
            memory_bytes=int(state * (rng.uniform(0.4, 1.5) if tight else 10)),
            uplink=float(10 ** rng.uniform(6, 9)),
            downlink=float(10 ** rng.uniform(6.5, 9)),
            place=places[i],
            has_data=bool(data[i]),
        )
        for i in range(count)
    )
    terms = Terms(
        microbatches_per_step=int(rng.choice([4, 8, 16, 32, 64])),
        max_replicas=int(rng.integers(2, 5)) if rng.random() < 0.15 else 0,
        max_stages=4,
        input_bytes=int(10 ** rng.uniform(3, 6)),
        target_bytes=int(10 ** rng.uniform(2, 5)),
        forward_ratio=float(rng.choice([1.0, 0.5, 0.25])),
        backward_ratio=float(rng.choice([1.0, 0.5])),
    )
    return Problem(layers, peers, _links(rng, places), terms)


def random_assignment(problem: Problem, seed: int) -> Assignment:
    """Peers dealt to stages, some to none, by a seed."""
    rng = np.random.default_rng(seed)
    most = min(len(problem.peers), len(problem.layers), 4)
    stages = int(rng.integers(1, most + 1))
    cuts = np.sort(rng.choice(np.arange(1, len(problem.layers)), stages - 1, replace=False))
    order = rng.permutation(len(problem.peers)).tolist()
    groups = [[peer] for peer in order[:stages]]
    for peer in order[stages:]:
        place = int(rng.integers(stages + 1))
        if place < stages:
            groups[place].append(peer)
    return assignment_of(problem, cuts.tolist(), groups)


def _layers(rng: np.random.Generator, count: int) -> tuple[Layer, ...]:
    scale = 10 ** rng.uniform(-2.5, -0.5)
    width = 10 ** rng.uniform(4, 6.5)
    made = []
    for _ in range(count):
        forward = float(scale * rng.uniform(0.3, 2.0))
        made.append(
            Layer(
                forward,
                forward * float(rng.uniform(1.5, 2.5)),
                parameter_bytes=int(10 ** rng.uniform(5, 7.5)),
                output_bytes=int(width * rng.uniform(0.5, 2.0)),
                activation_bytes=int(width * rng.uniform(1, 4)),
            )
        )
    return tuple(made)


def _links(rng: np.random.Generator, places: Sequence[str]) -> Links:
    bandwidth, latency = [], []
    for a in places:
        near = [a == b for b in places]
        bandwidth.append(
            tuple(
                float(10 ** (rng.uniform(7.5, 9) if here else rng.uniform(5.5, 8))) for here in near
            )
        )
        latency.append(
            tuple(
                float(rng.uniform(1e-4, 2e-3) if here else rng.uniform(0.01, 0.12)) for here in near
            )
        )
    return Links(tuple(bandwidth), tuple(latency))
