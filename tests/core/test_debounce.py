"""Changes that belong together."""

import math

from swarm.core.debounce import DEBOUNCE_SECONDS, Debounce


def test_changes_gather_from_the_first_one_and_later_ones_do_not_prolong_it() -> None:
    debounce = Debounce()
    assert debounce.deadline == math.inf
    assert not debounce.due(5.0)
    debounce.note(10.0)
    debounce.note(10.15)
    assert debounce.deadline == 10.0 + DEBOUNCE_SECONDS == 10.2
    assert not debounce.due(10.19)
    assert debounce.due(10.2)
    assert not debounce.due(10.3)
    debounce.note(10.3)
    assert debounce.deadline == 10.5


def test_changes_that_are_undone_are_not_due() -> None:
    debounce = Debounce()
    debounce.note(10.0)
    debounce.forget()
    assert debounce.deadline == math.inf
    assert not debounce.due(11.0)
