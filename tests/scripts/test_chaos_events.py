"""The scripts of the chaos demo keep their promises for every seed, and so does who dies; what is
measured is what is said."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.chaos import Recovery
from scripts.chaos_events import (
    JOIN,
    LEADER_KILLS,
    LEAST_KILLS,
    Event,
    Victims,
    is_whole,
    script,
)
from scripts.chaos_report import Outcome, as_json, medians_of, seconds
from tests.processes.director import Roles

seeds = st.integers(0, 2**32)
ROLES = Roles("c", ("a", "c", "e"), "a", ("a", "b"), (("a", "b"), ("c", "d"), ("e", "f")), ())


@given(seeds, st.integers(LEAST_KILLS, 20), st.integers(0, 5))
def test_every_script_has_what_it_must(seed: int, kills: int, more_joins: int) -> None:
    events = script(seed, kills, kills + more_joins)
    targets = [event.target for event in events]
    assert sum(event.is_kill for event in events) == kills
    assert targets.count("newcomer") == kills + more_joins
    assert targets.count("founder") == 1 and targets.count("leader") == LEADER_KILLS
    assert targets.index("founder") < targets.index("leader")
    first = targets.index("replica of a stage")
    nexts = [target for target in targets[first + 1 :] if target != "newcomer"]
    assert nexts[0] == "its other replica"
    assert targets.count("plain replica") == kills - LEAST_KILLS


@given(seeds, st.integers(LEAST_KILLS, 20), st.integers(0, 5))
def test_somebody_joins_after_each_kill(seed: int, kills: int, more_joins: int) -> None:
    events = script(seed, kills, kills + more_joins)
    for event, following in itertools.pairwise(events):
        assert not event.is_kill or following == JOIN
    assert events[-1] == JOIN


def test_a_seed_is_a_script_and_seeds_differ() -> None:
    assert script(1, 10, 10) == script(1, 10, 10)
    assert len({tuple(script(seed, 10, 12)) for seed in range(20)}) > 10


def test_too_few_kills_or_joins_are_refused() -> None:
    with pytest.raises(ValueError, match="kills"):
        script(0, LEAST_KILLS - 1, 10)
    with pytest.raises(ValueError, match="joins"):
        script(0, 10, 9)


def test_an_event_says_what_it_is() -> None:
    assert str(Event("leader")) == "kill the leader"
    assert str(JOIN) == "a newcomer joins"


@given(seeds)
def test_victims_are_what_was_asked_for(seed: int) -> None:
    victims = Victims(seed, founder="a")
    assert victims.choose("leader", ROLES, "abcdef") == "c"
    assert victims.choose("leader", ROLES, "abdef") is None
    assert victims.choose("plain replica", ROLES, "abcdef") in ("d", "f")
    assert victims.choose("founder", ROLES, "abcdef") == "a"


@given(seeds)
def test_both_replicas_of_one_stage_die_and_the_founder_is_spared(seed: int) -> None:
    victims = Victims(seed, founder="a")
    first = victims.choose("replica of a stage", ROLES, "abcdef")
    assert first is not None and first in "cdef"
    other = {"c": "d", "d": "c", "e": "f", "f": "e"}[first]
    stages = tuple(
        tuple(peer for peer in ("g", *stage) if peer != first) if other in stage else stage
        for stage in ROLES.stages
    )
    later = Roles("a", ("a",), "a", ("a",), stages, ())
    assert victims.choose("its other replica", later, "abcdefg") == other
    moved = Roles("a", ("a",), "a", ("a",), (("a", "b"), ("g",), ("g",)), ())
    assert victims.choose("its other replica", moved, "abg") == "g"


def status_of(**versions: int | None) -> dict[str, Any]:
    """Three stages of the replicas in order, two each."""
    replicas = [
        {"peer": peer, "version": version, "state": "filling"} for peer, version in versions.items()
    ]
    stages = [{"replicas": replicas[start::3]} for start in range(3)]
    return {"council": ["a", "b", "c"], "stages": stages}


def test_a_swarm_is_whole_when_all_stages_have_living_replicas_of_the_version() -> None:
    six = status_of(a=5, b=5, c=5, d=5, e=6, f=5)
    assert is_whole(six, "abcdef", 5)
    assert not is_whole(six, "abcdef", 6), "some are behind"
    assert not is_whole(six, "abcde", 5), "the dead are named"
    joining = status_of(a=5, b=5, c=5, d=5, e=6, f=5)
    joining["stages"][2]["replicas"][1]["state"] = "ready"
    assert not is_whole(joining, "abcdef", 5), "one is promoted and not at work yet"
    assert not is_whole(status_of(a=5, b=5, c=5, d=5, e=5), "abcdef", 5), "one replica of two"
    assert is_whole(status_of(a=5, b=5, c=5, d=5, e=5), "abcde", 5), "there is nobody for it"
    assert not is_whole(status_of(a=5, b=5), "ab", 5), "a stage of nobody"
    assert not is_whole(status_of(a=5, b=5, c=None), "abc", 5), "not heard of"
    assert not is_whole(six | {"stages": []}, "abcdef", 0), "no plan"
    assert not is_whole(six | {"council": ["a"]}, "abcdef", 5), "one voter, who must not be lost"
    assert not is_whole(six | {"council": ["a", "b", "z"]}, "abcdef", 5), "a dead voter"


def seen(version: int, *replicas: str) -> dict[str, Any]:
    """A status of one stage."""
    stages = [{"replicas": [{"peer": peer} for peer in replicas]}]
    plan = {"leader": "a", "council": ["a"], "feeders": ["a"], "stages": stages, "members": []}
    return plan | {"version": version}


def test_after_a_kill_the_next_step_is_one_of_a_plan_without_the_dead() -> None:
    outcome = Outcome("kill", True, "peer-2", step=5)
    recovery = Recovery(outcome, begun=10.0)
    recovery.note(seen(5, "a", "b"), "b", 10.5)
    recovery.note(seen(6, "a", "b"), "b", 11.0)  # it was prepared before the kill
    recovery.note(seen(6, "a"), "b", 12.0)
    assert outcome.seconds_to_step is None
    recovery.note(seen(7, "a"), "b", 13.0)
    recovery.note(seen(8, "a"), "b", 14.0)
    assert outcome.seconds_to_step == 3.0


def test_after_a_join_the_next_step_is_any() -> None:
    outcome = Outcome("join", False, "peer-2", step=5)
    recovery = Recovery(outcome, begun=10.0)
    recovery.note(seen(5, "a", "b"), "b", 10.5)
    recovery.note(seen(6, "a", "b"), "b", 11.0)
    assert outcome.seconds_to_step == 1.0


def test_medians_leave_out_what_was_not_measured() -> None:
    outcomes = [
        Outcome("kill", True, "a", 1, 2.0, 8.0),
        Outcome("join", False, "b", 2, 1.0, 3.0),
        Outcome("kill", True, "c", 3, 4.0),
        Outcome("kill", True, "d", 4),
    ]
    assert medians_of(outcomes) == {
        "seconds_to_step": {"kill": 3.0, "join": 1.0},
        "seconds_to_whole": {"kill": 8.0, "join": 3.0},
    }
    assert medians_of([])["seconds_to_step"] == {"kill": None, "join": None}
    assert (seconds(None), seconds(1.25)) == ("-", "1.2")
    assert as_json(1, outcomes, ["no"])["failures"] == ["no"]
