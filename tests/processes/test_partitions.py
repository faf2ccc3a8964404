"""Real daemons behind cuts: the minority decides nothing, the majority goes on, and once a cut has
healed all are back; the weights are those of one process, bit by bit.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.processes.director import Director, Roles, Status
from tests.processes.namespaces import Namespaces, why_not
from tests.processes.proxies import Proxies
from tests.processes.trials import (
    PACE_SECONDS,
    TEXT,
    commits_more,
    finish,
    hears,
    let_pass,
    may_lose,
    without,
)

pytestmark = pytest.mark.processes

PEERS, COUNCIL, CUT_SECONDS, BACK_SECONDS = 6, 5, 30.0, 10.0
needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


@contextlib.contextmanager
def swarm_of_six(tmp_path: Path, network: Proxies | Namespaces) -> Iterator[Director]:
    """Start six daemons on six hosts, of which five are the council."""
    with network, Director(tmp_path, TEXT, peers=PEERS, stages=2, network=network) as director:
        director.pace(2 * PACE_SECONDS)
        director.start()
        director.wait_until(whole)
        yield director


whole = may_lose(3, COUNCIL)


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(Proxies, id="proxies"),
        pytest.param(Namespaces, id="namespaces", marks=[needs_namespaces, pytest.mark.slow]),
    ],
)
def test_three_and_two_voters_are_cut_apart(
    network: Callable[[], Proxies | Namespaces], tmp_path: Path
) -> None:
    """The leader is among the two, who commit nothing without the others' part of the step."""
    with swarm_of_six(tmp_path, network()) as director:
        far, near = minority(director)
        director.cut(far, near)
        before = statuses(director, far)
        gone = [director.id_of(name) for name in far]
        for peer in gone:
            director.wait_until(without(peer), near, CUT_SECONDS)
        commits_more(director, 2, near)
        let_pass(director, CUT_SECONDS / 2)
        for name, after in statuses(director, far).items():
            assert after["epoch"] == before[name]["epoch"], "a minority has made a plan"
            # What all had prepared before the cut is all that may be committed behind it.
            assert after["version"] <= before[name]["version"] + 1
        director.heal()
        come_back(director, far, near)
        finish(director, tmp_path)


@pytest.mark.slow
def test_links_that_carry_one_way_only(tmp_path: Path) -> None:
    """Whom nobody hears is left out though it hears all; whom one peer does not hear is not."""
    with swarm_of_six(tmp_path, Proxies()) as director:
        roles = director.roles()
        mute = director.name_of(roles.plain_replicas[0])
        others = [name for name in director.names if name != mute]
        director.cut([mute], others, one_way=True)
        director.wait_until(without(director.id_of(mute)), others)
        commits_more(director, 1, others)
        director.heal()
        come_back(director, [mute], others)

        roles = Roles.of(director.wait_until(whole))
        one, two = (
            director.name_of([peer for peer in stage if peer != roles.leader][-1])
            for stage in roles.stages
        )
        director.cut([one], [two], one_way=True)
        commits_more(director, 3)
        director.heal()
        director.wait_until(whole)
        finish(director, tmp_path)


def minority(director: Director) -> tuple[Sequence[str], Sequence[str]]:
    """Return the leader with one voter, and all others: three voters and one more."""
    roles = director.roles()
    far = director.names_of([roles.leader, roles.plain_voters[0]])
    return far, [name for name in director.names if name not in far]


def statuses(director: Director, names: Sequence[str]) -> dict[str, Status]:
    return {name: director.status(name) for name in names}


def come_back(director: Director, names: Sequence[str], others: Sequence[str]) -> None:
    """Wait until these are members again and heard, as the leader and they themselves tell."""
    begun = time.monotonic()
    back = hears([director.id_of(name) for name in names])
    director.wait_until(
        lambda status: back(status) and status["leader"] == status["peer"]["id"],
        director.names,
        BACK_SECONDS,
    )
    director.wait_until_all(back, names, BACK_SECONDS)
    print(f"{', '.join(names)} back after {time.monotonic() - begun:.1f} s")
