"""Which replica is next: windows hold, weights hold, and no step can block another."""

import itertools
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import RemoteProtocolError
from protocol.messages import Microbatch
from protocol.signing import PeerId
from swarm.core.routing import Inflow, Router, credit_windows
from tests.core.plans import body

PEERS = ("a", "b", "c", "d")
weight_lists = st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any)


def router(weights: list[int], window: int = 10**6) -> Router:
    floats = [float(weight) for weight in weights]
    return Router(PEERS[: len(weights)], floats, [window] * len(weights))


@settings(max_examples=60, deadline=None)
@given(weight_lists, st.integers(1, 5))
def test_turns_are_as_the_weights_over_every_round(weights: list[int], rounds: int) -> None:
    """Exactly: after every sum(weights) turns, each replica had as many as its weight."""
    chooser = router(weights)
    for _ in range(rounds):
        turns = Counter(chooser.choose(0) for _ in range(sum(weights)))
        assert turns == Counter(dict(zip(PEERS, weights, strict=False)))


def test_turns_of_the_heaviest_are_spread() -> None:
    """The example of the commit that brought this rule to nginx: weights 5, 1, 1."""
    chooser = router([5, 1, 1])
    assert "".join(chooser.choose(0) or "" for _ in range(7)) == "aabacaa"


@settings(max_examples=60, deadline=None)
@given(weight_lists, st.integers(1, 4), st.data())
def test_windows_hold_and_nobody_waits_while_there_is_credit(
    weights: list[int], window: int, data: st.DataObject
) -> None:
    """A replica is chosen if and only if one with a weight has credit for that parity; what it
    is sent is what its Inflow takes."""
    chooser = router(weights, window)
    inflows = {peer: Inflow({"me": window}) for peer in PEERS}
    held: list[tuple[PeerId, Microbatch]] = []
    for number in range(data.draw(st.integers(1, 60))):
        give_back: bool = data.draw(st.booleans())
        if held and give_back:
            peer, mb = held.pop(data.draw(st.integers(0, len(held) - 1)))
            inflows[peer].release("me", mb)
            chooser.give_back(peer, mb.step)
            continue
        mb = Microbatch(data.draw(st.integers(4, 5)), number)
        target = chooser.choose(mb.step)
        full = Counter(peer for peer, each in held if each.step == mb.step)
        room = [
            peer
            for peer, weight in zip(PEERS, weights, strict=False)
            if weight and full[peer] < window
        ]
        if target is None:
            assert room == []
        else:
            assert target in room
            inflows[target].take("me", mb)
            held.append((target, mb))


@given(weight_lists, st.integers(1, 4), st.integers(0, 9))
def test_a_step_that_holds_all_its_credit_leaves_that_of_the_next(
    weights: list[int], window: int, step: int
) -> None:
    """Else early arrivals of the next step would wait for the last of this one, and they for
    the places of those."""
    chooser = router(weights, window)
    places = window * sum(weight > 0 for weight in weights)
    for each in (step + 1, step):
        chosen = [chooser.choose(each) for _ in range(places)]
        assert None not in chosen
        assert chooser.choose(each) is None


def test_a_replica_without_weight_gets_nothing() -> None:
    chooser = router([0, 1], window=2)
    assert [chooser.choose(0) for _ in range(3)] == ["b", "b", None]


def test_a_replica_without_credit_misses_turns_and_does_not_get_them_back() -> None:
    """What it missed went elsewhere: a burst of its own would only fill its queue."""
    chooser = router([1, 1], window=4)
    assert [chooser.choose(0) for _ in range(8)] == ["a", "b"] * 4
    for _ in range(5):  # a is quick, b is not
        chooser.give_back("a", 0)
        assert chooser.choose(0) == "a"
    for peer in "aaabbb":
        chooser.give_back(peer, 0)
    chosen = [chooser.choose(0) for _ in range(6)]
    assert sorted(chosen, key=str) == ["a", "a", "a", "b", "b", "b"]
    assert all(one != next_one for one, next_one in itertools.pairwise(chosen))


# --- the receiver's side --------------------------------------------------------------------------


def test_a_microbatch_is_taken_once_from_a_source() -> None:
    inflow = Inflow({"a": 3})
    inflow.take("a", Microbatch(1, 5))
    with pytest.raises(RemoteProtocolError, match="mb=1/5 was sent twice by a"):
        inflow.take("a", Microbatch(1, 5))
    inflow.take("a", Microbatch(3, 5))  # the same index of another step
    inflow.release("a", Microbatch(1, 5))
    inflow.take("a", Microbatch(1, 5))


def test_more_than_the_window_is_refused_per_source_and_parity() -> None:
    inflow = Inflow({"a": 2, "b": 2})
    for index in range(2):
        inflow.take("a", Microbatch(0, index))
    with pytest.raises(RemoteProtocolError, match="mb=0/2 has no credit: a has 2 here of 2"):
        inflow.take("a", Microbatch(0, 2))
    with pytest.raises(RemoteProtocolError, match="no credit"):
        inflow.take("a", Microbatch(2, 0))
    inflow.take("a", Microbatch(1, 2))
    inflow.take("b", Microbatch(0, 2))
    inflow.release("a", Microbatch(0, 1))
    inflow.take("a", Microbatch(0, 2))


@pytest.mark.parametrize(
    ("groups", "feeders", "windows"),
    [
        # depth S - s + 1 microbatches, divided among the sources, two at least
        ([["a"]], ["f"], [2]),
        ([["a"], ["b"], ["c"]], ["f"], [4, 3, 2]),
        ([["a"], ["b"], ["c"], ["d"]], ["f", "g", "h"], [2, 4, 3, 2]),
        ([["a", "b"], ["c", "d"], ["e"]], ["a", "b"], [2, 2, 2]),
        ([["a"], *([f"s{n}"] for n in range(9))], ["a"], [11, 10, 9, 8, 7, 6, 5, 4, 3, 2]),
    ],
)
def test_the_window_keeps_the_pipeline_full(
    groups: list[list[str]], feeders: list[str], windows: list[int]
) -> None:
    plan = body(groups, feeders)
    assert [
        {window for row in credit_windows(plan, stage) for window in row}
        for stage in range(len(groups))
    ] == [{window} for window in windows]


def test_a_source_has_the_part_of_the_window_that_the_wiring_gives_it() -> None:
    """Stage 0: each feeds itself, so the whole window is its own. Stage 1: a has 1 of 2 parts of
    the flow and sends all of it to c, b sends d a quarter. So d has a seventh of what c has: it
    takes the 3 that 1F1B needs, and a seventh of the 5 that c takes beyond that."""
    plan = body([["a", "b"], ["c", "d"], ["e"]], ["a", "b"])
    plan = msgspec.structs.replace(
        plan,
        stages=tuple(msgspec.structs.replace(stage, window=8) for stage in plan.stages),
        wiring=(((1.0, 0.0), (0.0, 1.0)), ((1.0, 0.0), (0.75, 0.25)), ((1.0,), (1.0,))),
    )
    assert credit_windows(plan, 0) == ((8, 2), (2, 8))
    assert credit_windows(plan, 1) == ((5, 2), (4, 4))
    assert credit_windows(plan, 2) == ((7,), (2,))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 30))
def test_sources_that_begin_together_do_not_meet(sources: int, targets: int, turns: int) -> None:
    """At any turn no target is chosen by more sources than it must be, if weights are equal."""
    peers = [f"t{number}" for number in range(targets)]
    routers = [
        Router(peers, [1.0] * targets, [10**6] * targets, phase=source / sources)
        for source in range(sources)
    ]
    for _ in range(turns):
        chosen = Counter(each.choose(0) for each in routers)
        assert max(chosen.values()) == -(-sources // targets)


def test_of_few_ways_one_that_is_closed_loses_a_turn_and_no_more() -> None:
    """Two of eight ways are used, in turns: with the first closed, the second gets its own turns
    and one of the other's; when credit comes back the first gets what it has lost."""
    chooser = Router("abcdefgh", [1.0, 1.0, *[0.0] * 6], [1, *[10] * 7])
    assert chooser.choose(0) == "a"
    assert [chooser.choose(0) for _ in range(4)] == ["b", "b", "b", None]
    chooser.give_back("a", 0)
    assert chooser.choose(0) == "a"
    chooser.give_back("a", 0)
    assert chooser.choose(0) == "a"


def test_of_many_ways_all_that_are_open_are_used() -> None:
    chooser = Router(PEERS[:2], [1.0, 1.0], [1, 10])
    assert [chooser.choose(0) for _ in range(6)] == ["a", *"bbbbb"]
