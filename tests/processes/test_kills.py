"""Real daemons are killed while they train: the run goes on to its end, and its weights are those
of one process, bit by bit.

The cases are those of the agreement's design: whoever dies, leader and founder included, from the
first council of three on (P4); nothing is lost or counted twice (P1, P2).
"""

import contextlib
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from protocol.messages import TABLE
from swarm.ports import StageExecutor
from tests.processes.director import FOUNDER, Director, Roles
from tests.processes.points import PointsOf
from tests.processes.trials import (
    PACE_SECONDS,
    TEXT,
    commits_more,
    finish,
    hears,
    may_lose_one,
    without,
)

pytestmark = pytest.mark.processes

Victim = Callable[[Director, Roles], str]

VICTIMS: dict[str, Victim] = {
    "leader": lambda director, roles: director.name_of(roles.leader),
    "founder": lambda director, roles: FOUNDER,
    "plain replica": lambda director, roles: director.name_of(roles.plain_replicas[0]),
    "coordinator": lambda director, roles: director.name_of(roles.coordinator),
    "feeder": lambda director, roles: director.name_of(roles.feeders[-1]),
    "voter": lambda director, roles: director.name_of(roles.plain_voters[0]),
}

Deaths = Mapping[str, str]
"""Where one dies, and who."""

OFTEN: Deaths = {
    "before-save": "leader",
    "after-send:Propose": "leader",
    "after-send:Accepted": "voter",
    "before-send:Commit": "coordinator",
    "after-executor:commit": "plain replica",
}
"""What each of them does when a newcomer joins, or at every step."""

SELDOM: tuple[Deaths, ...] = (
    {
        "after-save": "leader",
        "after-send:Review": "leader",
        "before-send:Propose": "leader",
        "before-send:Certified": "leader",
        "after-send:Vote": "voter",
    },
    {
        "before-send:Accepted": "voter",
        "before-send:Resume": "coordinator",
        "after-send:Commit": "coordinator",
        "before-executor:commit": "plain replica",
        "before-send:GatherShard": "plain replica",
    },
    {
        "after-executor:reduce": "coordinator",
        "before-send:Prepared": "plain replica",
        "after-send:Prepared": "plain replica",
        "after-send:Forward": "feeder",
        "after-send:Report": "plain replica",
    },
)
"""The other places: for soaks (scripts/soak processes)."""


def test_one_after_the_other_is_killed_and_newcomers_join(tmp_path: Path) -> None:
    """The founder first: it leads, and decides alone until the first plan is there."""
    with Director(tmp_path, TEXT, peers=4, stages=2) as director:
        director.pace(PACE_SECONDS)
        director.start()
        for who in ("founder", "leader", "plain replica"):
            victim = VICTIMS[who](director, Roles.of(director.wait_until(may_lose_one)))
            director.kill(victim)
            print(f"killed {victim}, the {who}")
            director.begin_to_join()
            director.wait_until(without(director.id_of(victim)))
            commits_more(director, 1)
            director.wait_until(lambda status: True, director.names[-1:])
            director.meet(director.names[-1])
        director.wait_until(hears([director.id_of(director.names[-1])]))
        finish(director, tmp_path)


@pytest.mark.parametrize(
    "deaths",
    [OFTEN, *(pytest.param(each, marks=pytest.mark.slow) for each in SELDOM)],
    ids=lambda deaths: ",".join(deaths),
)
def test_they_are_killed_where_it_matters(deaths: Deaths, tmp_path: Path) -> None:
    """A newcomer's join brings each of the points about."""
    with contextlib.ExitStack() as stack:
        points: dict[str, PointsOf] = {}

        def pointed() -> PointsOf:
            made = stack.enter_context(PointsOf(tmp_path / f"points-{len(points)}"))
            points[f"peer-{len(points)}"] = made
            return made

        director = stack.enter_context(Director(tmp_path, TEXT, peers=4, stages=2))
        director.pace(PACE_SECONDS)
        director.found(points=pointed())
        director.join_many([pointed() for _ in range(3)])
        for point, who in deaths.items():
            victim = VICTIMS[who](director, Roles.of(director.wait_until(may_lose_one)))
            points[victim].order("kill", point)
            newcomer = director.begin_to_join(points=pointed())
            assert director.wait_for_end(victim) == -signal.SIGKILL
            print(f"{victim}, {who}, has died at {point}")
            director.wait_until(without(director.id_of(victim)))
            director.wait_until(lambda status: True, [newcomer])
            director.meet(newcomer)
        director.wait_until(may_lose_one)
        finish(director, tmp_path)


def test_the_points_exist() -> None:
    kinds = {kind.__name__ for kind in TABLE}
    methods = set(dir(StageExecutor))
    for point in (point for deaths in (OFTEN, *SELDOM) for point in deaths):
        door, _, name = point.partition("-")[2].partition(":")
        assert name in {"send": kinds, "executor": methods, "save": {""}}[door]
