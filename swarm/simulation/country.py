"""What lies between the hosts of a scenario: latencies, bandwidths, uplinks and downlinks.

The rule: figures may change while a world runs; whoever changes them lets the network take them
anew (`SimNetwork.survey`).
"""

import math
from dataclasses import dataclass

from protocol.messages import TABLE, StateChunk
from swarm.simulation.physics import STATE_SCALE

NUMBER_OF_STATE_CHUNKS = TABLE[StateChunk].number


@dataclass
class Map:
    """Every directed pair of hosts; row: sender, column: receiver (`network.Country`)."""

    latencies_seconds: list[list[float]]
    bandwidths: list[list[float]]
    """Bytes per second; infinite if only the ends limit a way."""
    uplinks: list[float]
    """Bytes per second, of each host, to all others together; infinite without a limit."""
    downlinks: list[float]
    jitter_seconds: float = 0.0

    def latency_seconds(self, source: int, target: int) -> float:
        """Return how long a byte is on its way."""
        return self.latencies_seconds[source][target]

    def bytes_per_second(self, source: int, target: int) -> float:
        """Return what the way itself carries."""
        return self.bandwidths[source][target]

    def uplink(self, host: int) -> float:
        """Return what a host sends to all others together."""
        return self.uplinks[host]

    def downlink(self, host: int) -> float:
        """Return what a host receives from all others together."""
        return self.downlinks[host]

    def wire_bytes(self, number: int, size: int) -> float:
        """Return as how many bytes `size` bytes of tensors count: those of a state stand for
        more."""
        return size * STATE_SCALE if number == NUMBER_OF_STATE_CHUNKS else size

    def copy(self) -> "Map":
        """Return a map that can be changed by itself."""
        return Map(
            [list(row) for row in self.latencies_seconds],
            [list(row) for row in self.bandwidths],
            list(self.uplinks),
            list(self.downlinks),
            self.jitter_seconds,
        )

    def alone(self, source: int, target: int) -> float:
        """Return what one transfer alone gets, in bytes per second."""
        return min(self.bandwidths[source][target], self.uplinks[source], self.downlinks[target])


def uniform(hosts: int, latency_seconds: float, jitter_seconds: float = 0.0) -> Map:
    """Return a map on which all ways are alike and nothing is narrow."""
    return Map(
        [[latency_seconds] * hosts for _ in range(hosts)],
        [[math.inf] * hosts for _ in range(hosts)],
        [math.inf] * hosts,
        [math.inf] * hosts,
        jitter_seconds,
    )
