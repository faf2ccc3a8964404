"""How large transfers share uplinks, downlinks and links, in virtual time.

The rule: max-min fairness, which is what long-lived streams of equal claims come close to: nobody
gets more at a pipe than another that could use it, and no pipe is idle that somebody waits for.
A transfer takes two events, whatever its size, so a scenario of gigabytes costs as much as one of
bytes.

Every pipe has a *level*: what a transfer gets there that could use more. A transfer runs at the
least level of its pipes. Levels follow from each other; they are found by going round the pipes
that have changed until nothing changes (the distributed rule of A. Charny, D. Clark and R. Jain,
"Congestion control with explicit rate indication", ICC 1995, here in one place).
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import trio

TOLERANCE = 1e-3
"""Levels that changed by a smaller fraction have not changed."""
MOST_ROUNDS = 400
"""Pipes that are looked at for one event at most: rates may be a little off then, for a while."""
SOON_SECONDS = 1e-9


@dataclass(eq=False)
class Pipe:
    """Something that transfers share: an uplink, a downlink, or the way between two hosts."""

    bytes_per_second: float
    transfers: dict["Transfer", None] = field(default_factory=dict)
    level: float = math.inf
    """What a transfer gets here that could use more; infinite while there is room for all."""


@dataclass(eq=False)
class Transfer:
    """Bytes on their way through some pipes."""

    pipes: tuple[Pipe, ...]
    left_bytes: float
    done: Callable[[], None]
    """Is called when the last byte has gone."""
    open: Callable[[], bool]
    """Whether anything gets through at all."""
    rate: float = 0.0
    since: float = 0.0
    number: int = 0
    """Of its last rate: what was expected of an earlier one does not count."""
    finished: bool = False

    def wanted_at(self, pipe: Pipe) -> float:
        """Return what it could use at one of its pipes: what all the others grant."""
        if not self.open():
            return 0.0
        return min((each.level for each in self.pipes if each is not pipe), default=math.inf)


class Carriage:
    """All transfers of a network. `after(seconds, call)` calls something later."""

    def __init__(self, after: Callable[[float, Callable[[], None]], None]) -> None:
        self._after = after
        self._changed: dict[Pipe, None] = {}
        self._touched: dict[Transfer, None] = {}
        self._ends: list[tuple[float, int, Transfer]] = []
        self._numbers = itertools.count()
        self._armed_at = math.inf
        """When something is to be done next."""
        self._timers: set[float] = set()
        """When a timer goes off; only one that is due then counts."""

    def start(
        self,
        pipes: Iterable[Pipe],
        size: float,
        done: Callable[[], None],
        is_open: Callable[[], bool] = lambda: True,
    ) -> Transfer:
        """Begin to carry `size` bytes; call `done` when all have gone, unless it is stopped."""
        finite = tuple(pipe for pipe in pipes if pipe.bytes_per_second < math.inf)
        transfer = Transfer(finite, size, done, is_open, since=trio.current_time())
        for pipe in finite:
            pipe.transfers[transfer] = None
        self.touch(finite)
        self._touched[transfer] = None
        self._arm(trio.current_time())
        return transfer

    def stop(self, transfer: Transfer) -> None:
        """Forget a transfer, whether or not it has ended."""
        if transfer.finished:
            return
        transfer.finished = True
        for pipe in transfer.pipes:
            pipe.transfers.pop(transfer, None)
        self._touched.pop(transfer, None)
        self.touch(transfer.pipes)

    def touch(self, pipes: Iterable[Pipe]) -> None:
        """Find the levels of pipes anew: they, or what goes through them, have changed."""
        for pipe in pipes:
            self._changed[pipe] = None
            for transfer in pipe.transfers:
                self._touched[transfer] = None
        if self._changed:
            self._arm(trio.current_time())

    # --- inside ------------------------------------------------------------------------

    def _arm(self, at: float) -> None:
        if at < self._armed_at:
            self._armed_at = at
            if at not in self._timers:
                self._timers.add(at)
                self._after(max(0.0, at - trio.current_time()), partial(self._go_on, at))

    def _go_on(self, at: float) -> None:
        """Let end what is due, then find rates where something has changed."""
        self._timers.discard(at)
        if at != self._armed_at:
            return
        now = trio.current_time()
        self._armed_at = -math.inf  # what changes meanwhile is seen to below
        while self._ends and self._ends[0][0] <= now + SOON_SECONDS:
            end = heapq.heappop(self._ends)
            if not self._is_stale(end):
                self.stop(end[2])
                end[2].done()
        self._find_levels()
        touched, self._touched = self._touched, {}
        for transfer in touched:
            if not transfer.finished:
                self._set_rate(transfer, now)
        self._armed_at = math.inf
        while self._ends and self._is_stale(self._ends[0]):
            heapq.heappop(self._ends)
        if self._ends:
            self._arm(self._ends[0][0])

    @staticmethod
    def _is_stale(end: tuple[float, int, Transfer]) -> bool:
        return end[2].finished or end[2].number != end[1]

    def _find_levels(self) -> None:
        rounds = 0
        while self._changed and rounds < MOST_ROUNDS:
            rounds += 1
            pipe = next(iter(self._changed))
            del self._changed[pipe]
            level = _level(pipe)
            if math.isclose(level, pipe.level, rel_tol=TOLERANCE):
                continue
            pipe.level = level
            for transfer in pipe.transfers:
                self._touched[transfer] = None
                for other in transfer.pipes:
                    if other is not pipe:
                        self._changed[other] = None
        self._changed.clear()

    def _set_rate(self, transfer: Transfer, now: float) -> None:
        rate = min((pipe.level for pipe in transfer.pipes), default=math.inf)
        # A level is infinite where there is room for all: some other pipe is narrower.
        rate = min(rate, *(pipe.bytes_per_second for pipe in transfer.pipes), math.inf)
        rate = rate if transfer.open() else 0.0
        if rate == transfer.rate:
            return
        transfer.left_bytes = max(0.0, transfer.left_bytes - transfer.rate * (now - transfer.since))
        transfer.rate, transfer.since = rate, now
        transfer.number = number = next(self._numbers)
        if rate > 0:
            seconds = 0.0 if rate == math.inf else transfer.left_bytes / rate
            heapq.heappush(self._ends, (now + seconds, number, transfer))


def _level(pipe: Pipe) -> float:
    """Return the level at which everybody's use together is what the pipe carries."""
    room, users = pipe.bytes_per_second, len(pipe.transfers)
    for wanted in sorted(transfer.wanted_at(pipe) for transfer in pipe.transfers):
        if wanted * users >= room:
            return room / users
        room -= wanted
        users -= 1
    return math.inf
