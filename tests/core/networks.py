"""Made-up networks of which everything is known, of the kinds that swarms live in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.records import Estimates, LinkEstimate
from swarm.core.measuring.partners import partners

Floats = NDArray[np.float64]
PEERS = 64
CITIES = {
    "Frankfurt": (50.1, 8.7),
    "Ireland": (53.3, -6.3),
    "London": (51.5, -0.1),
    "Ohio": (40.0, -83.0),
    "Oregon": (45.8, -119.7),
    "Seoul": (37.6, 127.0),
    "Singapore": (1.4, 103.8),
    "Sydney": (-33.9, 151.2),
    "Tokyo": (35.7, 139.7),
    "Virginia": (38.9, -77.4),
}
NEAREST_SECONDS = 0.002
SECONDS_PER_RADIAN = 0.05
"""One way, on a great circle, with the detours of real cables."""


@dataclass(frozen=True)
class World:
    """All links between peers; row: sender."""

    places: tuple[str, ...]
    latency: Floats
    """Seconds."""
    bandwidth: Floats
    """Bytes per second."""

    @property
    def names(self) -> list[str]:
        return [f"peer{number:04d}" for number in range(len(self.places))]


def datacenter(n: int = PEERS) -> World:
    """Machines of eight: within one a hundred times as fast as between two."""
    places = tuple(f"machine{number // 8}" for number in range(n))
    same = np.equal.outer(np.array(places), np.array(places))
    return World(places, np.full((n, n), 1e-4), np.where(same, 12.5e9, 0.39e9))


def two_sites(n: int = PEERS) -> World:
    places = tuple("east" if number < n // 2 else "west" for number in range(n))
    same = np.equal.outer(np.array(places), np.array(places))
    return World(places, np.where(same, 0.001, 0.011), np.where(same, 625e6, 140e6))


def cities(n: int = PEERS, jitter: float = 0.0, names: Sequence[str] = tuple(CITIES)) -> World:
    """A few peers in each of some cities: bandwidth falls with the latency, as TCP's does; every
    link is off by a random factor of about `jitter`."""
    chance = np.random.default_rng(1)
    places = tuple(names[number] for number in chance.integers(len(names), size=n))
    where = np.radians(np.array([CITIES[place] for place in places]))
    angle = np.sin(where[:, None, 0]) * np.sin(where[None, :, 0]) + np.cos(
        where[:, None, 0]
    ) * np.cos(where[None, :, 0]) * np.cos(where[:, None, 1] - where[None, :, 1])
    latency = NEAREST_SECONDS + SECONDS_PER_RADIAN * np.arccos(np.clip(angle, -1.0, 1.0))
    bandwidth = 250e6 / (1 + latency / 0.02)
    return World(places, latency * _noise(chance, n, jitter), bandwidth * _noise(chance, n, jitter))


def homes(n: int = PEERS) -> World:
    """Half of the peers are at home: their uplink is a tenth of their downlink."""
    world = cities(n)
    chance = np.random.default_rng(2)
    is_home = chance.random(n) < 0.5
    uplink, downlink = np.where(is_home, 1.25e6, 125e6), np.where(is_home, 12.5e6, 125e6)
    ends = np.minimum(uplink[:, None], downlink[None, :])
    return World(world.places, world.latency, np.minimum(world.bandwidth, ends))


WORLDS: Mapping[str, Callable[[], World]] = {
    "datacenter": datacenter,
    "two sites": two_sites,
    "four regions": lambda: cities(names=("Virginia", "Ohio", "Oregon", "Ireland")),
    "ten cities": cities,
    "ten cities, jitter": lambda: cities(jitter=0.15),
    "homes": homes,
}


def told(world: World, seed: str = "0", spread: float = 0.05) -> dict[str, Estimates]:
    """Return what the peers tell that have measured the ways to their partners exactly."""
    made = {}
    for number, peer in enumerate(world.names):
        known = dict(zip(world.names, world.latency[number].tolist(), strict=True))
        chosen = sorted(partners(peer, world.names, seed, known))
        made[peer] = estimates(
            peer,
            *(
                LinkEstimate(
                    other,
                    float(world.bandwidth[number, index]),
                    float(world.latency[number, index]),
                    spread,
                )
                for other in chosen
                for index in [world.names.index(other)]
            ),
        )
    return made


def estimates(peer: str, *links: LinkEstimate, sequence: int = 1, **own: float) -> Estimates:
    """Return what a peer tells of these links."""
    return Estimates(
        run=b"r" * 32,
        peer=peer,
        boot=1,
        sequence=sequence,
        slowdown=own.get("slowdown", 1.0),
        slowdown_spread=1.0,
        uplink=own.get("uplink", 0.0),
        uplink_spread=1.0,
        downlink=own.get("downlink", 0.0),
        downlink_spread=1.0,
        links=links,
    )


def hidden(world: World, given: Mapping[str, Estimates]) -> NDArray[np.bool_]:
    """Return which pairs nobody has measured, in neither direction."""
    index = {peer: number for number, peer in enumerate(world.names)}
    made = ~np.eye(len(index), dtype=bool)
    for peer, own in given.items():
        for link in own.links:
            made[index[peer], index[link.peer]] = made[index[link.peer], index[peer]] = False
    return made


def _noise(chance: np.random.Generator, n: int, jitter: float) -> Floats:
    one = np.exp(np.triu(chance.normal(0.0, jitter, (n, n)), 1))
    return np.where(one == 1.0, one.T, one)
