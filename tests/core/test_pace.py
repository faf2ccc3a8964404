"""How often members say how they are, to whom, and who consents."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.core.pace import CONSENTS, LISTENERS, SMALL, Pace, consents_now, listeners_of

COUNCIL = ("a", "b", "c")


@pytest.mark.parametrize("members", [0, 1, SMALL])
def test_few_hear_each_other_every_second(members: int) -> None:
    pace = Pace(members)
    assert pace.is_small
    assert pace.heartbeat_seconds == 1.0
    assert pace.leader_beat_seconds == 0.5
    assert listeners_of("b", COUNCIL, pace) == ("b", "a", "c")


@given(st.integers(SMALL + 1, 100_000))
def test_what_a_listener_hears_is_bounded_and_so_is_what_a_member_says(members: int) -> None:
    pace = Pace(members)
    assert members / pace.heartbeat_seconds <= 80.0 + 1e-9
    if members >= 40:
        assert (LISTENERS + 1) / pace.heartbeat_seconds < 1.0
    assert Pace(members + 1).heartbeat_seconds >= pace.heartbeat_seconds


def test_few_are_improved_at_once_and_many_now_and_then() -> None:
    assert Pace(SMALL).improvement_pause_seconds == 0.0
    assert Pace(1000).improvement_pause_seconds == 10.0


def test_of_many_two_listen_and_who_is_not_heard_is_replaced() -> None:
    pace = Pace(100)
    assert listeners_of("b", COUNCIL, pace) == ("b", "a")
    assert listeners_of("b", COUNCIL, pace, unheard=("a",)) == ("b", "c")
    assert listeners_of(None, COUNCIL, pace) == ("a", "b")
    assert listeners_of("a", ("a",), pace) == ("a",)


@given(st.integers(1, 200), st.integers(0, 50))
def test_everybody_consents_in_turn(members: int, first: int) -> None:
    peers = [f"{number:03}" for number in range(members)]
    turns = -(-members // CONSENTS)
    said = [
        [peer for peer in peers if consents_now(peer, peers, turn)]
        for turn in range(first, first + turns)
    ]
    assert sorted({peer for turn in said for peer in turn}) == peers
    assert all(len(turn) <= CONSENTS for turn in said)
