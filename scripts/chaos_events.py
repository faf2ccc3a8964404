"""What happens to a swarm in the chaos demo, to whom, and when it has recovered: pure decisions.

The rule: every script kills the founder once, the leader at least twice and both replicas of one
stage one after the other, and after each kill somebody joins, whatever the seed.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tests.processes.director import Roles

Target = Literal[
    "newcomer", "founder", "leader", "plain replica", "replica of a stage", "its other replica"
]

LEADER_KILLS = 2
LEAST_KILLS = 1 + LEADER_KILLS + 2
REPLICAS = 2
"""Of a stage that is whole, if there are peers enough."""
WORKING = ("filling", "reducing", "gathering", "prepared", "committing", "finished")
"""States of a replica that holds what its stage has in hand."""
LEAST_COUNCIL = 3
"""Voters of which one may be lost."""


@dataclass(frozen=True)
class Event:
    """A kill of somebody, or a newcomer."""

    target: Target

    @property
    def is_kill(self) -> bool:
        """Whether somebody dies."""
        return self.target != "newcomer"

    def __str__(self) -> str:
        return f"kill the {self.target}" if self.is_kill else "a newcomer joins"


JOIN = Event("newcomer")


def script(seed: int, kills: int, joins: int) -> list[Event]:
    """Return the events of a seed in their order.

    Raises ValueError if `kills` is below LEAST_KILLS, or `joins` below `kills`."""
    if kills < LEAST_KILLS:
        raise ValueError(f"at least {LEAST_KILLS} kills, so that everybody has its turn")
    if joins < kills:
        raise ValueError("a newcomer joins after each kill: as many joins as kills at least")
    rng = random.Random(seed)
    others: list[tuple[Target, ...]] = [("replica of a stage", "its other replica")]
    others += [("plain replica",)] * (kills - LEAST_KILLS)
    # The founder leads at first: it goes before a leader is asked for, or it would go as one.
    falls: list[tuple[Target, ...]] = [("founder",)]
    falls += [("leader",)] * LEADER_KILLS
    places = sorted(rng.sample(range(len(others) + len(falls)), len(falls)))
    rng.shuffle(others)
    for place, fall in zip(places, falls, strict=True):
        others.insert(place, fall)
    events = [event for group in others for target in group for event in (Event(target), JOIN)]
    for _ in range(joins - kills):
        events.insert(1 + rng.choice(_joins_in(events)), JOIN)
    return events


class Victims:
    """Chooses who dies."""

    def __init__(self, seed: int, founder: str) -> None:
        """`founder` is its peer id."""
        self._rng = random.Random(seed)
        self._founder = founder
        self._founder_lives = True
        self._pair: tuple[int, tuple[str, ...]] = (0, ())

    def choose(self, target: Target, roles: Roles, living: Collection[str]) -> str | None:
        """Return the peer id of somebody that fits; None if there is nobody now."""
        found = [peer for peer in self._fitting(target, roles) if peer in living]
        if not found:
            return None
        peer = found[0] if target == "its other replica" else self._rng.choice(sorted(found))
        if target == "replica of a stage":
            stage = roles.stage_of(peer) or 0
            self._pair = stage, tuple(each for each in roles.stages[stage] if each != peer)
        self._founder_lives &= peer != self._founder
        return peer

    def _fitting(self, target: Target, roles: Roles) -> Sequence[str]:
        spared = {self._founder} if self._founder_lives else set()
        match target:
            case "founder":
                return [self._founder]
            case "leader":
                return [roles.leader]
            case "plain replica":
                return [peer for peer in roles.plain_replicas if peer not in spared]
            case "replica of a stage":
                groups = [stage for stage in roles.stages if not spared.intersection(stage)]
                return [peer for stage in groups if len(stage) >= REPLICAS for peer in stage]
            case _:
                stage, pair = self._pair
                there = roles.stages[stage] if stage < len(roles.stages) else ()
                return [peer for peer in (*pair, *there) if peer in there and peer not in spared]


def is_whole(status: dict[str, Any], living: Collection[str], version: int) -> bool:
    """Whether the plan names the living alone, every stage has its replicas, they hold `version`
    or a newer one, and any one voter may be lost."""
    stages = [stage["replicas"] for stage in status["stages"]]
    council = status["council"]
    if not stages or len(council) < LEAST_COUNCIL or not all(peer in living for peer in council):
        return False
    least = min(REPLICAS, len(living) // len(stages))
    return all(len(stage) >= max(1, least) for stage in stages) and all(
        replica["peer"] in living
        and replica["state"] in WORKING
        and replica["version"] is not None
        and replica["version"] >= version
        for stage in stages
        for replica in stage
    )


def _joins_in(events: Sequence[Event]) -> list[int]:
    return [number for number, event in enumerate(events) if not event.is_kill]
