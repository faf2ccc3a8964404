"""When a peer without work times its layers again, and what comes of it.

The rule: what its machine did beside when it joined may be over, and nobody would know: only who
works shows how fast it is. So who waits for work looks again now and then, if that is quick.
"""

from collections.abc import Awaitable, Callable

import trio

from swarm.core.model import Profile, microbatch_seconds

FIRST_SECONDS = 30.0
"""After so long without work a peer times its layers again,"""
AGAIN_SECONDS = 300.0
"""and then as often."""
MOST_SECONDS = 5.0
"""What took longer is not done again: it would hold up the work that may come meanwhile."""


class Retiming:
    """Times the layers of one peer again while it has no work."""

    def __init__(
        self,
        measure: Callable[[], Awaitable[Profile]],
        is_idle: Callable[[], bool],
        on_slowdown: Callable[[float], None],
    ) -> None:
        """`on_slowdown` is given how much longer the layers take now than when this peer joined."""
        self._measure = measure
        self._is_idle = is_idle
        self._on_slowdown = on_slowdown

    async def run(self, told: Profile, taken_seconds: float) -> None:
        """Look again, until cancelled; `told` is what this peer joined with, which it took
        `taken_seconds` to measure."""
        before = microbatch_seconds(told.layers)
        idle_seconds, due_seconds = 0.0, FIRST_SECONDS
        while before > 0 and taken_seconds <= MOST_SECONDS:
            await trio.sleep(FIRST_SECONDS)
            if not self._is_idle():
                idle_seconds, due_seconds = 0.0, FIRST_SECONDS
                continue
            idle_seconds += FIRST_SECONDS
            if idle_seconds < due_seconds:
                continue
            began = trio.current_time()
            again = await self._measure()
            taken_seconds = trio.current_time() - began
            idle_seconds, due_seconds = 0.0, AGAIN_SECONDS
            if self._is_idle():
                self._on_slowdown(microbatch_seconds(again.layers) / before)
