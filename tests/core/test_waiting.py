"""Who is given up because others wait for it: chains, rings, and the order of a step."""

import pytest

from protocol.messages import Heartbeat
from protocol.signing import PeerId
from swarm.core.waiting import OVERDUE_SECONDS, Waits
from tests.core.plans import heartbeat

LONG = 31.0
PREDICTED = 0.1


def waits_for(*awaited: PeerId, state: str = "filling", seconds: float = LONG) -> Heartbeat:
    return heartbeat(state=state, awaits=awaited, awaits_seconds=seconds)


def overdue(heartbeats: dict[PeerId, Heartbeat], predicted: float = PREDICTED) -> list[PeerId]:
    """Return who is given up if that stays as it is; "c" is the step coordinator."""
    waits = Waits("c")
    assert waits.overdue(heartbeats, predicted, 0.0) == []
    return [peer for peer, _ in waits.overdue(heartbeats, predicted, OVERDUE_SECONDS)]


def test_of_those_who_wait_for_each_other_the_last_is_overdue() -> None:
    said = {"a": waits_for("b"), "b": waits_for("d"), "d": heartbeat()}
    assert overdue(said) == ["d"]


@pytest.mark.parametrize(
    ("waited", "theirs", "predicted"),
    [(29.0, 0.0, 0.1), (31.0, 5.0, 0.1), (31.0, 0.0, 2.0)],
)
def test_who_computes_or_has_time_left_is_not_overdue(
    waited: float, theirs: float, predicted: float
) -> None:
    said = {"a": waits_for("b", seconds=waited), "b": heartbeat(task_seconds=theirs)}
    assert overdue(said, predicted) == []


def test_whom_the_waiting_peer_does_not_hear_is_overdue_though_all_wait_in_a_ring() -> None:
    """Its frames reach others only: it waits for who waits for the one that does not hear it."""
    said = {
        "a": heartbeat(awaits=("b",), awaits_seconds=LONG, suspects=("b",)),
        "b": waits_for("a"),
    }
    assert overdue(said) == ["b"]


def test_what_has_come_meanwhile_is_not_missing() -> None:
    """Heartbeats of the two that concern each other come one after the other."""
    waits = Waits("c")
    said = {"a": waits_for("b"), "b": heartbeat()}
    assert waits.overdue(said, PREDICTED, 0.0) == []
    assert waits.overdue(said, PREDICTED, 1.0) == []
    assert waits.overdue({**said, "a": heartbeat()}, PREDICTED, 2.0) == []
    assert waits.overdue(said, PREDICTED, OVERDUE_SECONDS) == []


# In a reduction owners wait for parts ("reducing"), then all for the owners' sums ("gathering"),
# the step coordinator c for everybody who is not prepared, and who is prepared for c.


def test_an_owner_that_does_not_send_its_sum_is_overdue() -> None:
    said = {
        "a": waits_for("d", state="gathering"),
        "c": waits_for("a", state="prepared"),
        "d": waits_for("c", state="prepared"),
    }
    assert overdue(said) == ["d"]


def test_a_replica_that_does_not_send_its_parts_is_overdue() -> None:
    said = {
        "a": waits_for("d", state="reducing"),
        "b": waits_for("a", state="gathering"),
        "c": waits_for("a", "b", "d", state="prepared"),
        "d": waits_for("a", state="gathering"),
    }
    assert overdue(said) == ["d"]


def test_a_replica_that_does_not_say_that_it_is_prepared_is_overdue() -> None:
    said = {
        "a": waits_for("c", state="prepared"),
        "c": waits_for("d", state="prepared"),
        "d": waits_for("c", state="prepared"),
    }
    assert overdue(said) == ["d"]


def test_a_coordinator_that_does_not_send_commit_to_one_is_overdue() -> None:
    committed = heartbeat(state="filling", version=1)
    said = {"a": waits_for("c", state="prepared"), "c": committed, "d": committed}
    assert overdue(said) == ["c"]


@pytest.mark.parametrize("state", ["waiting", "recovering", "filling"])
def test_who_has_yet_to_get_to_the_reduction_is_not_overdue(state: str) -> None:
    said = {"c": waits_for("d", state="prepared"), "d": heartbeat(state=state)}
    assert overdue(said) == []


def test_who_has_only_just_passed_has_time_to_send() -> None:
    said = {
        "a": waits_for("d", state="gathering"),
        "d": waits_for("c", state="prepared", seconds=5.0),
        "c": waits_for("a", state="prepared", seconds=5.0),
    }
    assert overdue(said) == []
