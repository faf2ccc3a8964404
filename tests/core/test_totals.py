"""Totals of a step: independent of the slicing, and never applied where they must not be."""

import itertools
import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import Flag
from swarm.core.totals import clip_coefficient, mean_norm, totals_of, update_scale

square = st.floats(0, 1e30)


@given(st.lists(square, max_size=20), st.lists(st.integers(0, 20), max_size=4), st.randoms())
def test_the_norm_depends_neither_on_the_slicing_nor_on_order(
    values: list[float], cuts: list[int], random: object
) -> None:
    whole = totals_of([values], 3, (), 1.0, "halt")
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    stages = [values[a:b] for a, b in itertools.pairwise(edges)]
    assert totals_of(stages[::-1], 3, (), 1.0, "halt") == whole
    assert whole.square_norm == math.fsum(values)


def test_the_mean_is_over_the_weight() -> None:
    totals = totals_of([[9.0], [16.0]], 10, (), 25.0, "halt")
    assert totals.verdict == "apply"
    assert totals.loss == 2.5
    assert mean_norm(totals) == 0.5
    assert clip_coefficient(totals, 0.0) == 1.0
    assert update_scale(totals, 0.0) == 0.1
    assert clip_coefficient(totals, 0.75) == 1.0
    assert clip_coefficient(totals, 0.25) == pytest.approx(0.5, rel=1e-5)
    assert update_scale(totals, 0.25) * 5.0 == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize("verdict", ["halt", "skip"])
def test_a_flag_decides_and_is_named_once(verdict: Literal["halt", "skip"]) -> None:
    flags = [Flag(4, "block1"), Flag(2, "loss"), Flag(4, "block1")]
    totals = totals_of([[1.0]], 10, flags, 25.0, verdict)
    assert totals.verdict == verdict
    assert totals.flags == (Flag(2, "loss"), Flag(4, "block1"))
    assert totals.loss is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
def test_a_norm_that_is_none_is_never_applied(bad: float) -> None:
    totals = totals_of([[1.0, bad]], 10, (), 25.0, "halt")
    assert (totals.verdict, totals.square_norm) == ("halt", math.inf)
    assert totals_of([[1.0], [bad]], 10, (), 25.0, "skip").verdict == "skip"


def test_a_sum_that_overflows_is_infinite() -> None:
    assert totals_of([[1e308] * 3], 1, (), 1.0, "halt").square_norm == math.inf


def test_a_step_in_which_nothing_counts_is_skipped() -> None:
    totals = totals_of([[0.0]], 0, (), 0.0, "halt")
    assert (totals.verdict, totals.loss) == ("skip", None)
    assert totals_of([[0.0]], 2, (), math.nan, "halt").loss is None
