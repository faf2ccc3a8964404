"""A virtual clock: it stands still while anybody has something to do, then jumps to what is next.

What happens outside of the daemons (a byte that arrives, a kernel that gives up) is called from
here, without a task of its own. The rule: what is due at one moment happens in the order in which
it was asked for, before any task's own timeout of that moment.
"""

import heapq
import itertools
from collections.abc import Callable
from typing import Any

import trio
from trio.testing import MockClock

FOR_EVER_SECONDS = 1e9


class Timeline:
    """What is to be called when, in one simulation."""

    def __init__(self) -> None:
        self._now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def call_at(self, at: float, call: Callable[[], None]) -> None:
        """Call something at a time; if that has passed, as soon as nobody has anything to do."""
        heapq.heappush(self._calls, (at, next(self._numbers), call))

    # --- what trio asks for --------------------------------------------------------------

    def current_time(self) -> float:
        """Return the virtual time, in seconds since the start."""
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return how long to wait for a deadline: it comes by a jump, or has come."""
        return 0.0 if deadline <= self._now else FOR_EVER_SECONDS

    def jump(self) -> None:
        """Nobody has anything to do: go to what is next."""
        module: Any = trio._core._run
        at = module.GLOBAL_RUN_CONTEXT.runner.deadlines.next_deadline()
        if self._calls:
            at = min(at, self._calls[0][0])
        if at == float("inf"):
            return
        self._now = max(self._now, at)
        while self._calls and self._calls[0][0] <= self._now:
            heapq.heappop(self._calls)[2]()


def virtual_clock() -> MockClock:
    """Return a clock for `trio.run` that jumps along a timeline of its own.

    trio lets its MockClock alone jump, and nobody inherit from it: so one is told how."""
    clock: Any = MockClock(autojump_threshold=0)
    clock.timeline = timeline = Timeline()
    clock.current_time = timeline.current_time
    clock.deadline_to_sleep_time = timeline.deadline_to_sleep_time
    clock._autojump = timeline.jump
    made: MockClock = clock
    return made


def timeline() -> Timeline:
    """Return the timeline of the simulation that runs."""
    clock: Any = trio.lowlevel.current_clock()
    found: Timeline = clock.timeline
    return found
