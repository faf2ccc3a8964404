"""Real daemons stand still, hang, start again or have a wrong clock: nobody is fooled by who wakes
up late, and the weights are those of one process, bit by bit.
"""

import contextlib
from pathlib import Path

import pytest

from tests.processes.director import Director, Roles
from tests.processes.points import PointsOf
from tests.processes.trials import (
    PACE_SECONDS,
    TEXT,
    commits_more,
    finish,
    hears,
    let_pass,
    may_lose,
    may_lose_one,
    without,
)

pytestmark = pytest.mark.processes

FROZEN_SECONDS = 60.0
HOUR_SECONDS = 3600.0


@pytest.mark.slow
def test_a_leader_that_is_frozen_for_a_minute_is_replaced_and_comes_back(tmp_path: Path) -> None:
    with Director(tmp_path, TEXT, peers=4, stages=2) as director:
        director.pace(2 * PACE_SECONDS)
        director.start()
        leader = Roles.of(director.wait_until(may_lose_one)).leader
        frozen = director.name_of(leader)
        director.stop(frozen)
        director.wait_until(without(leader), seconds=FROZEN_SECONDS)
        commits_more(director, 2)
        let_pass(director, FROZEN_SECONDS / 2)
        newest = director.wait_until(lambda status: True)
        director.resume(frozen)
        # It learns what was agreed meanwhile, and asks to join.
        others = [name for name in director.living if name != frozen]
        director.wait_until(lambda status: status["epoch"] >= newest["epoch"], [frozen])
        director.wait_until(hears([leader]), others)
        assert newest["leader"] != leader
        finish(director, tmp_path)


@pytest.mark.slow
def test_a_replica_that_stands_still_in_a_reduction(tmp_path: Path) -> None:
    """Its half-sent shares are worth nothing once the others have gone on without it."""
    with contextlib.ExitStack() as stack:
        points = [stack.enter_context(PointsOf(tmp_path / f"points-{n}")) for n in range(4)]
        director = stack.enter_context(Director(tmp_path, TEXT, peers=4, stages=2))
        director.pace(PACE_SECONDS)
        director.found(points=points[0])
        director.join_many(points[1:])
        for point in ("before-send:GatherShard", "after-executor:reduce"):
            peer = Roles.of(director.wait_until(may_lose_one)).plain_replicas[0]
            victim = director.name_of(peer)
            points[director.names.index(victim)].order("stop", point)
            director.wait_for_stop(victim)
            director.wait_until(without(peer))
            commits_more(director, 1)
            director.resume(victim)
            director.wait_until(hears([peer]), [victim])
        finish(director, tmp_path)


def test_who_starts_again_before_it_is_missed_has_lost_what_it_held(tmp_path: Path) -> None:
    """A boot has no role that its predecessor had: it is given one like any newcomer."""
    with Director(tmp_path, TEXT, peers=4, stages=2) as director:
        director.pace(PACE_SECONDS)
        director.start()
        for number in range(2):
            roles = Roles.of(director.wait_until(may_lose_one))
            victim = director.name_of(roles.leader if number else roles.plain_replicas[0])
            boot = director.status(victim)["peer"]["boot"]
            director.kill(victim)
            director.restart(victim)
            assert director.status(victim)["peer"]["boot"] == boot + 1
            commits_more(director, 2)
        finish(director, tmp_path)


@pytest.mark.slow
def test_an_executor_that_hangs_in_a_living_daemon_is_replaced(tmp_path: Path) -> None:
    """The daemon answers every ping all the while."""
    with Director(tmp_path, TEXT, peers=4, stages=2) as director:
        director.pace(PACE_SECONDS)
        director.start()
        roles = Roles.of(director.wait_until(may_lose_one))
        (peer,) = [each for each in roles.stages[0] if each != roles.coordinator]
        director.hang(director.name_of(peer))
        director.wait_until(without(peer))
        commits_more(director, 2)
        assert director.is_alive(director.name_of(peer))
        finish(director, tmp_path)


@pytest.mark.slow
def test_a_wall_clock_that_is_an_hour_wrong_matters_to_the_dht_alone(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        wrong = stack.enter_context(PointsOf(tmp_path / "wrong", clock_shift_seconds=HOUR_SECONDS))
        director = stack.enter_context(Director(tmp_path, TEXT, peers=3, stages=2))
        director.pace(PACE_SECONDS)
        director.found()
        director.join_many([wrong, None])
        fast = director.id_of("peer-1")
        director.wait_until(may_lose(1))
        right = director.wait_until(
            lambda status: status["peer"]["dht"]["peers_found"], ["peer-0", "peer-2"]
        )
        assert fast not in right["peer"]["dht"]["peers_found"]
        last = finish(director, tmp_path)
        assert fast in [member["peer"] for member in last["members"]]
        logs = [(tmp_path / f"peer-{number}.log").read_text() for number in range(3)]
        assert any("wall clock" in log for log in logs)
