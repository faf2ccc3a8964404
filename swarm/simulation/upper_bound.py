"""The best rate that the peers alive at a time could carry: what a swarm's throughput is held to.

Two answers. The *upper bound* holds for every schedule: all the peers' compute together by the
work of a microbatch, one peer's compute by the same while a step has no more microbatches than
that, and all uplinks and downlinks together by the bytes that must cross between as few stages as
memory allows. The *best plan* is the rate of the best schedule that the solver (or, with many
peers, its greedy beginning) finds for exactly these peers, by the cost model; that counts fill and
drain, latency and reduction, which no schedule avoids.

The rule: nothing here knows what the swarm did.
"""

import math
from collections.abc import Sequence

from swarm.core.scheduling.greedy import greedy_answer
from swarm.core.scheduling.problem import Links, Peer, Problem, Terms
from swarm.core.scheduling.solver import solve
from swarm.errors import NoFeasiblePlan
from swarm.simulation.conditions import State
from swarm.simulation.country import Map
from swarm.simulation.scenario import Scenario

MOST_SOLVED = 8
"""For more peers the greedy answer is the best plan: a search takes seconds."""
MOST_PLANNED = 40
"""For more there is none."""
WIDE = 1e12
"""Bytes per second of what has no limit."""


class UpperBounds:
    """Bounds of one scenario, by how things are and who is alive; each is computed once."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._maps: list[Map] = []
        self._rates: dict[_Key, float] = {}
        self._planned: dict[_Key, float | None] = {}

    def rate(self, state: State, alive: Sequence[int]) -> float:
        """Return microbatches per second that no schedule of these peers can exceed."""
        key = self._key(state, alive)
        if key not in self._rates:
            self._rates[key] = rate_bound(self.problem(state, alive)) if alive else 0.0
        return self._rates[key]

    def best_plan(self, state: State, alive: Sequence[int]) -> float | None:
        """Return microbatches per second of the best plan that is found; 0 if there is none, None
        if so many peers would take too long."""
        key = self._key(state, alive)
        if key not in self._planned:
            self._planned[key] = _best_plan(self.problem(state, alive)) if alive else 0.0
        return self._planned[key]

    def _key(self, state: State, alive: Sequence[int]) -> "_Key":
        number = next((i for i, each in enumerate(self._maps) if each is state.country), None)
        if number is None:
            number = len(self._maps)
            self._maps.append(state.country)
        return (state.slowness, number, tuple(alive))

    def problem(self, state: State, alive: Sequence[int]) -> Problem:
        """Return the problem of these peers as things were then, with true figures."""
        scenario, country, peers = self._scenario, state.country, list(alive)
        training, costs = scenario.training, scenario.costs
        exact = training.execution.determinism == "exact"
        return Problem(
            layers=costs.layers,
            peers=tuple(
                Peer(
                    f"{number:06}",
                    scenario.peers[number].speed / state.slowness[number],
                    scenario.peers[number].memory_bytes,
                    min(WIDE, country.uplinks[number]),
                    min(WIDE, country.downlinks[number]),
                    scenario.peers[number].region,
                    scenario.peers[number].has_data,
                )
                for number in peers
            ),
            links=Links(
                tuple(tuple(min(WIDE, country.bandwidths[i][j]) for j in peers) for i in peers),
                tuple(tuple(country.latencies_seconds[i][j] for j in peers) for i in peers),
            ),
            terms=Terms(
                training.microbatches_per_step,
                max_replicas=training.slicing.max_replicas,
                input_bytes=costs.input_bytes,
                target_bytes=costs.target_bytes,
                reduction_ratio=2.0 if exact else 1.0,
                state_ratio=8.0 if exact else 6.0,
            ),
        )


_Key = tuple[tuple[float, ...], int, tuple[int, ...]]


def rate_bound(problem: Problem) -> float:
    """Return microbatches per second that no schedule can exceed; 0 if the model does not fit."""
    work = problem.seconds(0, len(problem.layers))
    speeds = problem.speed
    stages = _least_stages(problem)
    if stages == 0 or not problem.data_holders:
        return 0.0
    rate = min(
        float(speeds.sum()) / work,
        problem.terms.microbatches_per_step * float(speeds.max()) / work,
    )
    crossing = sorted(problem.forward_bytes(c) + problem.backward_bytes(c) for c in _cuts(problem))
    needed = sum(crossing[: stages - 1])
    if needed > 0:
        rate = min(rate, float(problem.uplink.sum()) / needed)
        rate = min(rate, float(problem.downlink.sum()) / needed)
    return rate


def _cuts(problem: Problem) -> range:
    return range(1, len(problem.layers))


def _least_stages(problem: Problem) -> int:
    """Return how many stages there are at least; 0 if a layer fits nowhere or peers are too few."""
    largest = max(peer.memory_bytes for peer in problem.peers)
    stages, held = 1, 0.0
    for layer in problem.layers:
        needed = problem.terms.state_ratio * layer.parameter_bytes
        if needed > largest:
            return 0
        if held + needed > largest:
            stages, held = stages + 1, 0.0
        held += needed
    return stages if stages <= len(problem.peers) else 0


def _best_plan(problem: Problem) -> float | None:
    if len(problem.peers) > MOST_PLANNED:
        return None
    try:
        if len(problem.peers) <= MOST_SOLVED:
            prediction = solve(problem).prediction
        else:
            _, prediction = greedy_answer(problem)
    except NoFeasiblePlan:
        return 0.0
    seconds = prediction.kept_seconds
    if not (math.isfinite(seconds) and seconds > 0):
        return 0.0
    return problem.terms.microbatches_per_step / seconds
