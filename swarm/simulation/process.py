"""One start of one simulated daemon: what dies with it, and what is not scheduled while it stops.

The rule: a process that is dead says and saves nothing any more. Whoever touches the world for
it asks `Process.dead` first.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import trio

from protocol.signing import PeerId

LIVELOCK_BATCHES = 10_000
"""Who runs so often without a moment passing runs for ever."""

running: ContextVar["Process | None"] = ContextVar("running", default=None)
"""The process that a task belongs to; None for the world's own tasks."""


class Process:
    """One boot of one peer."""

    def __init__(self, number: int, peer: PeerId, boot: int) -> None:
        self.number = number
        self.peer = peer
        self.boot = boot
        self.name = f"p{number}.{boot}"
        self.dead = False
        self.silent = False
        """Died as by a power cut: nobody is told."""
        self.frozen = False
        self.thawed = trio.Event()
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        """All of its tasks are gone."""
        self.on_death: list[Callable[[], None]] = []
        self.on_point: Callable[[Process, str], None] | None = None
        """Is told of every point that this process reaches; may kill it there."""
        self._stopped: list[Any] = []

    def die(self, *, silent: bool = False) -> None:
        """End at once: no task of it touches the world from now on."""
        if self.dead:
            return
        self.dead, self.silent = True, silent
        for call in self.on_death:
            call()
        self.scope.cancel()
        self.thaw()

    def reach(self, point: str) -> bool:
        """Be at a point of the daemon's life that has a name, such as "before commit"; return
        whether it lives on."""
        if self.on_point is not None and not self.dead:
            self.on_point(self, point)
        return not self.dead

    def freeze(self) -> None:
        """Schedule none of its tasks, as after SIGSTOP; its timers fire when it goes on."""
        if not self.frozen and not self.dead:
            self.frozen = True
            self.thawed = trio.Event()
            _scheduler().frozen += 1

    def thaw(self) -> None:
        """Schedule its tasks again, as after SIGCONT."""
        if not self.frozen:
            return
        self.frozen = False
        scheduler = _scheduler()
        scheduler.frozen -= 1
        stopped, self._stopped = self._stopped, []
        scheduler.go_on(stopped)
        self.thawed.set()

    def keep(self, task: Any) -> None:
        """Hold back a task that could run."""
        self._stopped.append(task)


class _Scheduler(random.Random):
    """Stands in for the generator with which trio shuffles the tasks that it runs next."""

    def __init__(self, seed: str, module: ModuleType, livelocked: Callable[[str], None]) -> None:
        super().__init__(seed)
        self._module = module
        self._livelocked = livelocked
        self._batches = 0
        self._looked_at = -1.0
        self.frozen = 0
        """How many processes are frozen."""

    def shuffle(self, batch: Any) -> None:
        """Order the tasks that run next, and hold back those of frozen processes."""
        self._batches += 1
        if self._batches % LIVELOCK_BATCHES == 0:
            self._look_for_livelock(batch)
        if self.frozen:
            for task in batch[:]:
                process = task.context.get(running)
                if process is not None and process.frozen:
                    process.keep(task)
                    batch.remove(task)
        if len(batch) > 1:
            super().shuffle(batch)

    def _look_for_livelock(self, batch: Any) -> None:
        now = trio.current_time()
        if now == self._looked_at and batch:
            owners = [(task.context.get(running), task.name) for task in batch]
            names = [f"{process.name if process else 'world'} {name}" for process, name in owners]
            self._livelocked(", ".join(sorted(names)))
        self._looked_at = now

    def go_on(self, tasks: list[Any]) -> None:
        """Let trio run tasks that were held back."""
        self._module.GLOBAL_RUN_CONTEXT.runner.runq.extend(tasks)


@contextlib.contextmanager
def seeded_scheduler(seed: str, livelocked: Callable[[str], None] | None = None) -> Iterator[None]:
    """Let trio run tasks in an order that follows from `seed` alone, within the context.

    Equal programs then run equally. `livelocked` is told which tasks run on and on while time
    stands still. This is the only place that touches trio's private names:
    its loop sorts what is runnable if the flag is set, and shuffles it with the generator `_r`.
    """
    module: Any = trio._core._run
    before = module._r, module._ALLOW_DETERMINISTIC_SCHEDULING
    module._r = _Scheduler(seed, module, livelocked or _no_matter)
    module._ALLOW_DETERMINISTIC_SCHEDULING = True
    try:
        yield
    finally:
        module._r, module._ALLOW_DETERMINISTIC_SCHEDULING = before


def _no_matter(tasks: str) -> None:
    """Let it run for ever."""


def _scheduler() -> _Scheduler:
    scheduler = trio._core._run._r
    assert isinstance(scheduler, _Scheduler), "processes live within `seeded_scheduler`"
    return scheduler
