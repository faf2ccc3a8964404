"""The director: it finds who does what, and what it does to daemons happens to them."""

import signal
from pathlib import Path

import pytest

from tests.processes.director import FOUNDER, Director, Roles, Status
from tests.processes.namespaces import Namespaces, why_not
from tests.processes.proxies import Proxies
from tests.processes.swarms import GPT, SGD, manifest, pids_naming

SILENT_SECONDS = 2.5
"""Longer than two heartbeats."""
LONG = manifest(GPT, SGD, steps=100_000, microbatches=6)


def status_of(
    *stages: str, leader: str, council: str, feeders: str = "", standbys: str = ""
) -> Status:
    """Return a status with one letter for each peer."""
    peers = sorted({*"".join(stages), *leader, *council, *feeders, *standbys})
    return {
        "leader": leader or None,
        "council": list(council),
        "feeders": list(feeders),
        "members": [{"peer": peer} for peer in peers],
        "stages": [{"replicas": [{"peer": peer} for peer in stage]} for stage in stages],
    }


def test_roles_are_read_from_a_status() -> None:
    roles = Roles.of(status_of("ab", "cd", "ef", leader="d", council="cdg", feeders="a"))
    assert (roles.leader, roles.coordinator, roles.feeders) == ("d", "a", ("a",))
    assert roles.plain_voters == ("c", "g")
    assert roles.standbys == ("g",)
    assert roles.plain_replicas == ("b", "e", "f")
    assert [roles.stage_of(peer) for peer in "acg"] == [0, 1, None]


def test_who_votes_is_plain_if_nobody_else_is() -> None:
    roles = Roles.of(status_of("a", "b", leader="a", council="ab"))
    assert roles.plain_replicas == ("b",)


def test_before_the_first_plan_there_are_no_roles() -> None:
    roles = Roles.of(status_of(leader="", council="a", standbys="ab"))
    assert (roles.leader, roles.coordinator, roles.replicas) == ("", "", ())
    assert roles.standbys == ("a", "b")


def trained(status: Status) -> bool:
    return int(status["version"]) >= 2


def is_one_swarm(status: Status) -> bool:
    """Four members, all heard: who is not heard is suspected, and left out soon after."""
    members = status["members"]
    return len(members) == 4 and all(each["silent_seconds"] < SILENT_SECONDS for each in members)


@pytest.mark.processes
def test_a_swarm_through_proxies_is_directed(tmp_path: Path) -> None:
    """Four daemons; across a cut nobody is heard, and after it training goes on."""
    with Proxies() as proxies:
        with Director(tmp_path, LONG, peers=4, stages=2, network=proxies) as director:
            director.start()
            roles = Roles.of(director.wait_until(trained))
            assert roles.leader == director.id_of(FOUNDER)
            assert [len(stage) for stage in roles.stages] == [2, 2]
            assert sorted(director.names_of(roles.replicas)) == director.names
            assert roles.coordinator == roles.stages[0][0] and roles.feeders
            far = [name for name in director.names if director.id_of(name) not in roles.stages[0]]
            near = [name for name in director.names if name not in far]
            director.cut(near, far)
            status = director.wait_until(lambda status: not is_one_swarm(status), [FOUNDER])
            director.heal()
            goes_on = int(status["version"]) + 2
            director.wait_until_all(lambda status: status["peer"]["version"] >= goes_on)
            director.wait_until(is_one_swarm, [FOUNDER])
    assert pids_naming(tmp_path) == []


@pytest.mark.processes
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_swarm_of_hosts_of_their_own_is_directed(tmp_path: Path) -> None:
    with Namespaces() as network:
        with Director(tmp_path, LONG, peers=2, stages=2, network=network) as director:
            director.start()
            director.wait_until_all(trained)
            for name in director.names:
                listens = director.status(name)["peer"]["listen"]
                assert listens.rpartition(":")[0] == network.address(name)
    assert pids_naming(tmp_path) == []


@pytest.mark.processes
def test_daemons_are_killed_stopped_and_started_again(tmp_path: Path) -> None:
    with Director(tmp_path, LONG, peers=3, stages=3) as director:
        director.found()
        other = director.join()
        director.stop(other)
        assert state_of(director.pid(other)) == "T" and director.living == [FOUNDER]
        director.resume(other)
        assert state_of(director.pid(other)) != "T" and director.living == [FOUNDER, other]
        assert director.status(other)["peer"]["boot"] == 1
        director.kill(other)
        assert director.wait_for_end(other) == -signal.SIGKILL
        director.restart(other)
        assert director.status(other)["peer"]["boot"] == 2
        assert director.leave(other) == 0
        assert director.living == [FOUNDER]
    assert pids_naming(tmp_path) == []


def state_of(pid: int) -> str:
    """Return the state of a process as the kernel tells it: one letter."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
