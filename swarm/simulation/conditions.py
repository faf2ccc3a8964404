"""What changes while a scenario runs: how fast peers are, and what lies between them.

The rule: every state is kept, so that what happened then can be judged by what was possible then.
"""

from dataclasses import dataclass

from swarm.simulation.country import Map
from swarm.simulation.scenario import Scenario


@dataclass(frozen=True, slots=True)
class State:
    """How things were for a while; states that are alike share their map."""

    slowness: tuple[float, ...]
    country: Map


class Conditions:
    """How things are now."""

    def __init__(self, scenario: Scenario) -> None:
        self.country: Map = scenario.country.copy()
        """Whoever changes it says so (`changed`)."""
        self.slowness = [1.0] * len(scenario.peers)
        """By peer: how many times longer its tasks take."""
        self._state = State(tuple(self.slowness), self.country.copy())

    @property
    def state(self) -> State:
        """Return how things are now."""
        return self._state

    def changed(self) -> None:
        """Take in what has been changed."""
        # 1/3 * 3 is not quite 1: what is undone is to be as it was.
        self.slowness = [round(each, 9) for each in self.slowness]
        before = self._state.country
        kept = before if before == self.country else self.country.copy()
        self._state = State(tuple(self.slowness), kept)
