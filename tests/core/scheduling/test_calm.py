"""How often plans change that nobody needs."""

import math

from hypothesis import given
from hypothesis import strategies as st

from swarm.core.scheduling.calm import (
    FIRST_SECONDS,
    LONGEST_SECONDS,
    MEMBERS_GAIN,
    MEMBERS_SECONDS,
    Calm,
)
from swarm.core.scheduling.rebalance import HYSTERESIS

HOUR = 3600.0


def test_a_plan_is_given_time_before_it_is_improved() -> None:
    calm = Calm()
    assert calm.least_gain(0.0) == HYSTERESIS
    calm.begin(100.0)
    assert calm.least_gain(100.0 + FIRST_SECONDS - 1) == math.inf
    assert calm.least_gain(100.0 + FIRST_SECONDS) == HYSTERESIS


@given(st.lists(st.floats(0, 600), min_size=50, max_size=200))
def test_the_number_of_improvements_per_hour_is_bounded(pauses: list[float]) -> None:
    """Whoever improves whenever it may, and however long it takes between: seven in an hour."""
    calm, now = Calm(), 0.0
    times = []
    for pause in pauses:
        now = max(now, calm.until) + pause
        calm.changed(now)
        times.append(now)
    for start in times:
        assert sum(start <= time < start + HOUR for time in times) <= 7


def test_a_quiet_time_is_forgotten() -> None:
    calm, now = Calm(), 0.0
    for _ in range(10):
        calm.changed(now)
        now = calm.until
    assert calm.until - now == 0
    calm.changed(now)
    assert calm.until == now + LONGEST_SECONDS
    later = calm.until + LONGEST_SECONDS + 1
    calm.changed(later)
    assert calm.until == later + 2 * FIRST_SECONDS


def test_other_members_are_a_reason_for_one_plan_that_gains_little() -> None:
    calm = Calm()
    calm.changed(0.0)
    assert calm.least_gain(10.0) == math.inf
    calm.members_changed(10.0)
    assert calm.least_gain(10.0) == MEMBERS_GAIN
    assert calm.least_gain(10.0 + MEMBERS_SECONDS) == HYSTERESIS
    calm.changed(20.0)
    assert calm.least_gain(20.0) == math.inf
    assert calm.least_gain(20.0 + FIRST_SECONDS) == HYSTERESIS


def test_other_members_are_no_reason_to_wait_longer_afterwards() -> None:
    calm = Calm()
    for now in range(0, 1000, 100):
        calm.members_changed(float(now))
        calm.changed(float(now))
    calm.changed(2000.0)
    assert calm.until == 2000.0 + 2 * FIRST_SECONDS
