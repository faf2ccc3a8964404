"""What goes by another peer: nobody speaks in another's name, and nothing counts twice."""

from pathlib import Path

import pytest

from protocol.codec import pack_forwarded
from protocol.errors import RemoteProtocolError
from protocol.messages import Forwarded, Leave, Message, Ping
from protocol.records import LETTER_PURPOSE, Letter, Member, Signed, sign_record
from protocol.signing import Identity
from swarm.peer.forwarding import MAX_REMEMBERED, Forwarding
from tests.peer.test_links import RUN, End

ALICE, BOB, CAROL = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
MEMBERS = {ALICE.peer, BOB.peer, CAROL.peer}
LEAVE = Leave(boot=4)


@pytest.fixture
def bob(tmp_path: Path) -> Forwarding:
    end = End(BOB, tmp_path)
    return Forwarding(
        run=RUN,
        me=Member(BOB.peer, 1),
        identity=BOB,
        links=end.links,
        relay_to=lambda target: None,
    )


def letter(
    message: Message = LEAVE,
    signer: Identity = ALICE,
    purpose: str = LETTER_PURPOSE,
    number: int = 1,
    boot: int = 4,
    run: bytes = RUN,
    target: str = BOB.peer,
) -> Forwarded:
    text = Letter(run, boot, target, number, pack_forwarded(message))
    return Forwarded(target=BOB.peer, letter=sign_record(signer, purpose, text))


def test_who_signed_it_says_it_whoever_passes_it_on(bob: Forwarding) -> None:
    assert bob.take(CAROL.peer, letter(), MEMBERS) == (Member(ALICE.peer, 4), LEAVE)


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (letter(purpose="verdict"), "bad letter signature"),
        (letter(run=bytes(32)), "is sent here"),
        (letter(target=CAROL.peer), "is sent here"),
        (letter(Ping(number=1)), "Ping is not forwarded"),
    ],
    ids=["another purpose", "another run", "another receiver", "no such message"],
)
def test_what_is_not_said_to_this_peer_by_a_member_is_refused(
    bob: Forwarding, message: Forwarded, fault: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=fault):
        bob.take(CAROL.peer, message, MEMBERS)


def test_a_stranger_says_nothing_and_who_passes_it_on_is_not_at_fault(bob: Forwarding) -> None:
    """Who has been left out may go on for a while, by whoever knows it."""
    assert bob.take(CAROL.peer, letter(signer=Identity.from_seed(bytes(32))), MEMBERS) is None


def test_nobody_changes_what_it_passes_on(bob: Forwarding) -> None:
    said, other = letter().letter, letter(Leave(boot=5)).letter
    forged = Forwarded(target=BOB.peer, letter=Signed(other.payload, ALICE.peer, said.signature))
    with pytest.raises(RemoteProtocolError, match="bad letter signature"):
        bob.take(CAROL.peer, forged, MEMBERS)


def test_a_letter_counts_once_and_may_be_overtaken(bob: Forwarding) -> None:
    def taken(number: int, boot: int = 4) -> bool:
        return bob.take(CAROL.peer, letter(number=number, boot=boot), MEMBERS) is not None

    assert [taken(number) for number in (2, 1, 2, 1, 3)] == [True, True, False, False, True]
    assert taken(1, boot=5)
    assert not taken(9, boot=4)  # that start is over
    assert all(taken(number, boot=5) for number in range(100, 100 + MAX_REMEMBERED))
    assert not taken(2, boot=5)  # too old to know whether it has been taken
