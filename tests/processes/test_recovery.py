"""A council loses its majority while nobody with work is missing: training goes on, and the
recovery key gives the run a new council. The weights are those of one process, bit by bit.
"""

from pathlib import Path

import pytest

from swarm.errors import RecoveryError
from tests.processes.director import FOUNDER, Director, Roles
from tests.processes.swarms import ADAMW, manifest, swarm
from tests.processes.trials import PACE_SECONDS, PACED, STEPS, commits_more, finish, may_lose

pytestmark = pytest.mark.processes

ONE_HOLDER = "\n[slicing]\nmax_replicas = 1\n"
TEXT = manifest(PACED + ONE_HOLDER, ADAMW, steps=STEPS, microbatches=6, clip=0.5)


def test_recovery_after_the_loss_of_the_councils_majority(tmp_path: Path) -> None:
    """One of four peers has all the work; of the three voters one is killed and one frozen, who
    learns of the new generation when it wakes up."""
    with Director(tmp_path, TEXT, peers=4, stages=1) as director:
        director.pace(PACE_SECONDS / 2)
        director.start()
        roles = Roles.of(director.wait_until(may_lose(1)))
        assert len(roles.council) == 3
        worker = director.name_of(roles.coordinator)
        idle = [director.name_of(peer) for peer in roles.council if peer != roles.coordinator]
        killed, frozen = sorted(idle, key=lambda name: name != FOUNDER)[:2]
        director.kill(killed)
        director.stop(frozen)
        lost = {director.id_of(killed), director.id_of(frozen)}

        status = director.wait_until(lambda status: status["planning_trouble"], [worker])
        assert "1 of the council's 3 voters are reached, 2 are needed" in status["planning_trouble"]
        assert all(peer in status["planning_trouble"] for peer in lost)
        assert status["trouble"] == "" and status["phase"] == "training"
        commits_more(director, 2, [worker])
        shown = swarm("status", "--home", director.home(worker))
        assert "swarm recover" in shown.out, shown.out

        if worker != FOUNDER:
            refused = swarm("recover", "--home", director.home(worker))
            assert refused.code == RecoveryError.exit_code and "--key" in refused.err
        key = director.home(FOUNDER) / "recovery.key"
        done = swarm("recover", "--home", director.home(worker), "--key", key)
        assert done.code == 0, done.err
        assert "generation 1" in done.out

        status = director.wait_until(
            lambda status: status["generation"] == 1 and not lost & members_of(status), [worker]
        )
        assert not lost & set(status["council"])
        director.resume(frozen)
        director.wait_until(lambda status: status["generation"] == 1, [frozen])
        director.join()
        status = director.wait_until(may_lose(1), [worker])
        assert status["generation"] == 1 and len(status["council"]) == 3
        commits_more(director, 1, [worker])
        finish(director, tmp_path)


def members_of(status: dict[str, object]) -> set[str]:
    members = status["members"]
    assert isinstance(members, list)
    return {member["peer"] for member in members}
