"""Whoever is killed, wherever that is: the run ends with the weights of the plain loop.

A sample of the table in kill_points.py, whose command runs the whole of it.
"""

import pytest

from tests.simulation.disturbances import DISTURBANCES
from tests.simulation.kill_points import (
    POINTS,
    ROLES,
    SAMPLE,
    cell,
    moments,
    run_cell,
    sampled,
)


def test_every_point_is_reached_by_somebody() -> None:
    reached = {each.point for name in DISTURBANCES for each in moments(name)}
    assert reached == set(POINTS)


def test_the_sample_has_everything_that_is_done_and_every_role() -> None:
    assert {point.partition(" ")[2] for point in SAMPLE} == {
        point.partition(" ")[2] for point in POINTS
    }
    assert {sampled(point).role for point in SAMPLE} == set(ROLES)


def test_a_cell_that_no_peer_of_its_role_reaches_is_empty() -> None:
    assert cell("before send Prepared", "standby", 0) is None  # it has no gradient
    assert cell("before send Commit", "replica", 0) is None  # the step coordinator alone does


@pytest.mark.parametrize("point", SAMPLE)
def test_who_is_killed_at_a_point_is_no_loss(point: str) -> None:
    run_cell(sampled(point))
