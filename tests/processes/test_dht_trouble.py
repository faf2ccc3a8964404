"""What goes wrong in the DHT is no trouble for those who train, and none for who joins by an
address; the weights are those of one process, bit by bit.
"""

import contextlib
import math
import os
import signal
import time
from pathlib import Path

import pytest
import trio

from protocol.invitation import Invitation, parse, rendezvous
from protocol.records import PeerRecord
from protocol.signing import Identity
from swarm.adapters.dht_records import MAX_FUTURE_SECONDS, NONCE_BYTES, RecordSeal
from swarm.errors import JoinError
from tests.adapters.test_hivemind_dht import daemons_of, needs_proc, outsider
from tests.processes.director import FOUNDER, Director, Status
from tests.processes.swarms import swarm
from tests.processes.trials import (
    PACE_SECONDS,
    TEXT,
    commits_more,
    finish,
    hears,
    let_pass,
)

pytestmark = [pytest.mark.processes, needs_proc]

DEAD_SECONDS = 60.0
LIE_SECONDS = 3600.0
YEAR_SECONDS = 365 * 24 * 3600.0
NOBODY = Identity.from_seed(b"n" * 32)


def is_at_work(status: Status) -> bool:
    return status["phase"] == "training" and int(status["version"]) >= 1


@pytest.mark.slow
def test_a_dht_that_is_dead_for_a_minute(tmp_path: Path) -> None:
    """The daemons of those who train are killed as often as they start; meanwhile a peer joins by
    an address."""
    with Director(tmp_path, TEXT, peers=2, stages=2) as director:
        director.pace(PACE_SECONDS)
        director.start()
        first = int(director.wait_until(is_at_work)["version"])
        killed = 0

        def kill_dht() -> None:
            nonlocal killed
            for name in trainers:
                killed += kill_dht_of(director.home(name))

        trainers = director.names
        kill_dht()
        newcomer = director.begin_to_join()
        let_pass(director, DEAD_SECONDS, kill_dht)
        assert killed > 2
        director.meet(newcomer)
        status = director.wait_until(hears([director.id_of(newcomer)]), [FOUNDER])
        assert int(status["version"]) >= first + DEAD_SECONDS / 20
        assert status["trouble"] == "" and status["epoch"] > 1
        finish(director, tmp_path)


def kill_dht_of(home: Path) -> int:
    """Kill the libp2p daemons of a peer; return how many there were."""
    if not (home / "dht-sockets").exists():
        return 0
    killed = 0
    for pid in daemons_of(home):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


def test_without_an_address_that_answers_a_newcomer_is_told_so(tmp_path: Path) -> None:
    nowhere = Invitation(bytes(32), bytes(32), ("127.0.0.1:1",), ("/ip4/127.0.0.1/tcp/1/p2p/Qm",))
    refused = swarm("run", "--home", tmp_path / "home", "--join", nowhere.encode())
    assert refused.code == JoinError.exit_code
    assert "127.0.0.1:1  " in refused.err and "swarm invite" in refused.err
    assert "Traceback" not in refused.err


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of hivemind's import
def test_a_dht_in_two_parts_and_full_of_lies(tmp_path: Path) -> None:
    """Who is invited without the DHT's addresses makes a DHT of its own: the swarm is one all
    the same. In one part lie records of somebody who does not exist, each wrong in one way."""
    with Director(tmp_path, TEXT, peers=3, stages=2) as director:
        director.pace(PACE_SECONDS)
        director.found()
        director.join()
        whole = parse(director.invitation(FOUNDER))
        apart = Invitation(whole.run, whole.swarm_key, whole.addresses, ())
        island = director.begin_to_join(invitation=apart.encode())
        director.wait_until(is_at_work)
        director.meet(island)
        found = director.wait_until(lambda status: status["peer"]["dht"]["peers_found"], [FOUNDER])
        assert found["peer"]["dht"]["peers_found"] == [director.id_of("peer-1")]
        alone = director.status(island)["peer"]["dht"]
        assert alone["published"] and not alone["peers_found"]

        trio.run(tell_lies, director, whole)
        found = director.status(FOUNDER)["peer"]["dht"]
        assert NOBODY.peer not in found["peers_found"]
        commits_more(director, 2)
        finish(director, tmp_path)


async def tell_lies(director: Director, invitation: Invitation) -> None:
    """Plant old records as if they were new, and records for ever, while two steps are made."""
    seal = RecordSeal(invitation.swarm_key, invitation.run)
    record = PeerRecord(
        run=invitation.run,
        peer=NOBODY.peer,
        boot=1,
        addresses=("203.0.113.7:31337",),
        dht_addresses=(),
        sequence=1,
    )
    now = time.time()
    old = seal.seal(NOBODY, record, now - 2 * MAX_FUTURE_SECONDS, bytes(NONCE_BYTES))
    far = seal.seal(NOBODY, record, now + YEAR_SECONDS, bytes(NONCE_BYTES))
    lies = [
        (NOBODY.peer, old, now + LIE_SECONDS),  # the newest wins: later than all true records
        (NOBODY.peer, far, now + YEAR_SECONDS),
        (NOBODY.peer, old, float("nan")),
    ]
    place = rendezvous(invitation.swarm_key, invitation.run)
    addresses = tuple(director.status(FOUNDER)["peer"]["dht"]["addresses"])
    for lie in lies:
        async with outsider(addresses, [lie], place) as found:
            # without an end no node keeps it, not even the outsider's own
            assert NOBODY.peer in found or math.isnan(lie[2])
            await trio.to_thread.run_sync(commits_more, director, 1)
