"""How long a role lasts."""

import pytest

from swarm.core.scheduling.horizon import KEPT, LONGEST_SECONDS, SHORTEST_SECONDS, Horizon


def test_without_losses_roles_last_long() -> None:
    horizon = Horizon()
    assert horizon.seconds(4) == LONGEST_SECONDS
    horizon.left(5.0, 1)
    assert horizon.seconds(4) == LONGEST_SECONDS


@pytest.mark.parametrize(
    ("pause", "members", "seconds"),
    [
        (0.1, 10, SHORTEST_SECONDS),
        (60.0, 1, 64.0),
        (10.0, 10, 128.0),
        (30.0, 80, 2048.0),
        (1e6, 2, LONGEST_SECONDS),
    ],
)
def test_as_long_as_it_takes_until_all_have_left(
    pause: float, members: int, seconds: float
) -> None:
    horizon = Horizon()
    horizon.left(0.0, 1)
    for number in range(KEPT + 1):
        horizon.left(1e4 + number * pause, 1)  # the long pause before them is forgotten
    assert horizon.seconds(members) == seconds


def test_who_leaves_with_others_counts_for_itself() -> None:
    one, four = Horizon(), Horizon()
    for number in range(KEPT + 1):
        one.left(number * 10.0, 1)
        four.left(number * 40.0, 4)
    assert four.seconds(20) == one.seconds(20) == 256.0
