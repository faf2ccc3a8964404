"""What tests of a swarm in trouble have in common: a paced run, when it may be hurt, its end.

The rule: whatever happened, the run ends with the weights of one process, bit by bit.
"""

import functools
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

from swarm.peer.leading import NOT_SETTLED
from tests.processes.director import Director, Roles, Status
from tests.processes.swarms import ADAMW, hash_in, manifest, swarm

STEPS = 60
PACE_SECONDS = 0.7
HEARD_SECONDS = 3.0
PACED = """
[model]
factory = "tests.processes.paced_models:layers"
[data]
source = "text"
files = ["${{stdlib}}/[a-d]*.py"]
sequence_length = 16
"""
TEXT = manifest(PACED, ADAMW, steps=STEPS, microbatches=6, clip=0.5)


def may_lose(one_of: int, council: int = 3) -> Callable[[Status], bool]:
    """Every stage has so many replicas at work, the council has so many voters at least, and its
    majority is heard without any one of them."""

    def holds(status: Status) -> bool:
        heard = {
            member["peer"]
            for member in status["members"]
            if member["silent_seconds"] < HEARD_SECONDS
        }
        working = [
            [each for each in stage["replicas"] if _works(each) and each["peer"] in heard]
            for stage in status["stages"]
        ]
        return (
            status["phase"] == "training"
            and int(status["version"]) >= 1
            and len(status["council"]) >= council
            and status["leader"] in heard
            and len(heard.intersection(status["council"])) - 1 > len(status["council"]) // 2
            and all(len(stage) >= one_of for stage in working)
        )

    return holds


may_lose_one = may_lose(2)


def _works(replica: Status) -> bool:
    return replica["state"] not in NOT_SETTLED | {"unknown"}


def without(peer: str) -> Callable[[Status], bool]:
    """Training goes on by a plan in which a peer has no part; it may have a vote still."""

    def holds(status: Status) -> bool:
        roles = Roles.of(status)
        part = (*roles.replicas, *roles.feeders, roles.leader)
        return bool(roles.stages) and peer not in part

    return holds


def hears(peers: Collection[str]) -> Callable[[Status], bool]:
    """These are members, and said so lately to the leader."""

    def holds(status: Status) -> bool:
        heard = {
            member["peer"]
            for member in status["members"]
            if member["silent_seconds"] < HEARD_SECONDS
        }
        return heard >= set(peers)

    return holds


def let_pass(director: Director, seconds: float, then: Callable[[], object] = bool) -> None:
    """Let a swarm go on for so long; do `then` whenever its daemons have been looked at."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        then()
        director.wait_until(lambda status: True)
        time.sleep(0.1)


def commits_more(director: Director, steps: int, names: Collection[str] | None = None) -> Status:
    """Wait until so many further steps are committed, as one of `names` tells."""
    version = int(director.wait_until(lambda status: True, names)["version"])
    return director.wait_for_version(version + steps, names)


def finish(director: Director, tmp_path: Path) -> Status:
    """Let the run end without a pace, and compare what somebody exports with one process's
    weights; return the last status."""
    before = director.wait_until(lambda status: True)
    assert before["version"] < before["steps"], "it has ended before everything has happened"
    director.pace(0.0)
    last = director.wait_until_all(lambda status: status["phase"] == "ended")
    exported = director.export(director.living[-1], tmp_path / "weights.safetensors")
    assert exported == reference_hash(director.text)
    return last[director.living[-1]]


@functools.cache
def reference_hash(text: str) -> str:
    """Return the hash of the weights that one process ends with."""
    with tempfile.TemporaryDirectory(prefix="swarm-reference-") as folder:
        path = Path(folder) / "run.toml"
        path.write_text(text)
        return hash_in(swarm("reference", path))
