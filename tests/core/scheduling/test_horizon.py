"""How long plans last."""

import pytest

from swarm.core.scheduling.horizon import KEPT, LONGEST_SECONDS, SHORTEST_SECONDS, Horizon


def test_without_changes_plans_last_long() -> None:
    horizon = Horizon()
    assert horizon.seconds == LONGEST_SECONDS
    horizon.changed(5.0)
    assert horizon.seconds == LONGEST_SECONDS


@pytest.mark.parametrize(
    ("pause", "seconds"),
    [(0.1, SHORTEST_SECONDS), (60.0, 64.0), (100.0, 128.0), (1e6, LONGEST_SECONDS)],
)
def test_it_is_the_time_between_the_last_changes(pause: float, seconds: float) -> None:
    horizon = Horizon()
    horizon.changed(0.0)
    for number in range(KEPT + 1):
        horizon.changed(1e4 + number * pause)  # the long pause before them is forgotten
    assert horizon.seconds == seconds
