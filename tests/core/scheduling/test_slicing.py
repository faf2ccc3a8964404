"""Cutting layers into stages, against every possible way to cut them."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.scheduling.slicing import balanced_cuts, ranges_of

# whole numbers, so that sums are exact in any order
times = st.lists(st.integers(0, 50).map(float), min_size=1, max_size=8)


def slowest(seconds: Sequence[float], cuts: Sequence[int]) -> float:
    return max(sum(seconds[first:last]) for first, last in ranges_of(cuts, len(seconds)))


@settings(max_examples=200, deadline=None)
@given(times, st.data())
def test_no_way_to_cut_is_better(seconds: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(seconds)))
    ways = itertools.combinations(range(1, len(seconds)), stages - 1)
    best = min(slowest(seconds, cuts) for cuts in ways)
    cuts = balanced_cuts(seconds, stages)
    assert len(cuts) == stages - 1
    assert slowest(seconds, cuts) == best


@given(times, st.data())
def test_among_equally_good_ways_the_last_cut_is_the_earliest(
    seconds: list[float], data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(seconds)))
    cuts = balanced_cuts(seconds, stages)
    ways = itertools.combinations(range(1, len(seconds)), stages - 1)
    good = [way for way in ways if slowest(seconds, way) == slowest(seconds, cuts)]
    assert cuts[-1:] == min(way[-1:] for way in good)
    if cuts:
        assert cuts[:-1] == balanced_cuts(seconds[: cuts[-1]], stages - 1)


@given(st.floats(0, 1e9), st.integers(1, 9), st.data())
def test_equal_layers_are_dealt_out_evenly(
    seconds: float, layers: int, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, layers))
    sizes = [b - a for a, b in ranges_of(balanced_cuts([1.0] * layers, stages), layers)]
    assert max(sizes) == -(-layers // stages)
    assert balanced_cuts([seconds] * layers, layers) == tuple(range(1, layers))


@pytest.mark.parametrize(("layers", "stages"), [(3, 4), (3, 0), (0, 1), (2, -1)])
def test_more_stages_than_layers_cannot_be(layers: int, stages: int) -> None:
    with pytest.raises(ValueError, match=f"{layers} layers cannot make {stages} stages"):
        balanced_cuts([1.0] * layers, stages)


@given(st.integers(1, 30), st.data())
def test_ranges_cover_every_layer_once(layers: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, layers - 1))) if layers > 1 else [])
    ranges = ranges_of(cuts, layers)
    assert [layer for first, last in ranges for layer in range(first, last)] == list(range(layers))
    assert len(ranges) == len(cuts) + 1


@pytest.mark.parametrize("cuts", [(0,), (4,), (5,), (2, 2), (3, 1)])
def test_cuts_that_leave_a_stage_empty_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not cut 4 layers into non-empty stages"):
        ranges_of(cuts, 4)
