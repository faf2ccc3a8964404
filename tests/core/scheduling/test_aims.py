"""The roles that a plan leads to: what all moves together have to gain."""

import math
from dataclasses import replace

import pytest

from swarm.core.scheduling.aims import aimed
from swarm.core.scheduling.rebalance import HYSTERESIS
from tests.core.problems import assignment_of, plain_problem


@pytest.mark.parametrize(
    ("first", "least_gain", "after"),
    [
        (42, HYSTERESIS, 32),
        (34, HYSTERESIS, 34),
        (34, 0.02, 32),
        (33, 0.02, 32),
        (42, math.inf, 42),
    ],
)
def test_moves_of_large_stages_have_to_gain_something_together(
    first: int, least_gain: float, after: int
) -> None:
    """Each of the moves gains a thirtieth at most. Of 64 equal peers `first` are in stage 0."""
    plain = plain_problem([1.0] * 64, layers=2)
    problem = replace(plain, terms=replace(plain.terms, microbatches_per_step=50_000))
    now = assignment_of(problem, [1], [list(range(first)), list(range(first, 64))])
    wanted = aimed(problem, now, workers=now.groups, least_gain=least_gain)
    assert [len(group) for group in wanted.groups] == [after, 64 - after]
