"""Estimators: what is known after another measurement, and how far it is to be trusted.

Pure: times and bytes come in, numbers go out. The rule: a measurement that something has held up
(a sender that paused, a reader that came late, a transfer that shared its way) never lowers an
estimate by itself; it is left out, or counts as a lower bound.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from protocol.records import GUESS_SPREAD
from protocol.signing import PeerId

SHARE = 0.3
"""Of the newest measurement in an average."""
LEAST_SPREAD = 0.02
"""No measurement is better than this."""
BOUND_SPREAD = 0.5
"""Of what was measured, and is known to be more."""
MOST_SPREAD = 0.99
"""Whatever was measured, however noisily, is no guess."""

# --- averages ------------------------------------------------------------------------------------


MOST_BYTES_PER_SECOND = 1e15
"""What seems to be quicker was not measured but made up."""


@dataclass
class Average:
    """An exponentially weighted mean of positive numbers, and its relative standard error.

    It is of logarithms: twice and half as much are equally far off."""

    value: float = 0.0
    """0 before the first measurement."""
    spread: float = GUESS_SPREAD
    _variance: float = 0.0

    def take(self, value: float, spread: float = 0.1) -> None:
        """Take in a measurement with its own relative standard error."""
        own = max(spread, LEAST_SPREAD) ** 2
        if self.value <= 0 or (self.spread >= GUESS_SPREAD and value > self.value):
            self.value, self._variance = value, own
            self.spread = min(math.sqrt(own), MOST_SPREAD)
            return
        off = math.log(value / self.value)
        self.value *= math.exp(SHARE * off)
        self._variance = (1 - SHARE) * self._variance + SHARE * max(own, off**2)
        spread = math.sqrt(self._variance * SHARE / (2 - SHARE) + LEAST_SPREAD**2)
        self.spread = min(spread, MOST_SPREAD)

    def bound(self, value: float) -> None:
        """It is at least so much. Where nothing was measured, that is all that is known."""
        if value > self.value:
            self.spread = GUESS_SPREAD if self.spread >= GUESS_SPREAD else BOUND_SPREAD
            self.value, self._variance = value, BOUND_SPREAD**2

    def replace(self, value: float, spread: float) -> None:
        """Forget what was measured before."""
        self.value = 0.0
        self.take(value, spread)


# --- a train of chunks, as the receiver sees it --------------------------------------------------

ALIKE = 1.25
"""Slopes within this factor are of one line."""
SKIPPED = 4
"""The first of so many parts of a train says nothing: a token bucket lets it through at once."""
WINDOWS = 3
"""So many fit into a train: one that something holds up spoils one of them."""


@dataclass(frozen=True)
class Rate:
    """Bytes per second, and its relative standard error."""

    bytes_per_second: float
    spread: float


def train_rate(arrivals: Sequence[float], chunk_bytes: int) -> Rate | None:
    """Return how fast equal chunks came that were sent back to back; None if that cannot be said.

    `arrivals` are seconds. Bytes by elapsed time would be wrong by half while a connection learns
    its speed. And a reader that comes late finds much at once: what it notes is never early, so the
    link shows in what came earliest, the lower hull of the points (chunk, seconds). The median of
    the hulls of some windows counts, so a pause of the sender does not either."""
    steps = len(arrivals) - 1
    if steps < SKIPPED or any(late < early for early, late in pairwise(arrivals)):
        return None
    width = max(SKIPPED, steps // WINDOWS)
    first = min(len(arrivals) // SKIPPED, steps - width)
    windows = [arrivals[at : at + width + 1] for at in range(first, steps - width + 1)]
    slopes = [slope for slope in map(_line, windows) if slope > 0]
    if not slopes:
        return None
    seconds = statistics.median(slopes)
    if seconds * MOST_BYTES_PER_SECOND < chunk_bytes:
        return None
    deviation = statistics.median([abs(slope - seconds) for slope in slopes]) / seconds
    missing = len(windows) / len(slopes) - 1
    return Rate(chunk_bytes / seconds, max(deviation + missing, LEAST_SPREAD))


def _line(times: Sequence[float]) -> float:
    """Return the slope of the longest line in the lower hull of the points (place, time)."""
    hull: list[int] = []
    for point in range(len(times)):
        while len(hull) > 1 and _slope(times, hull[-2], hull[-1]) >= _slope(times, hull[-1], point):
            hull.pop()
        hull.append(point)
    best = (0, 0)
    for start, begin in enumerate(hull[:-1]):
        steepest = ALIKE * _slope(times, begin, hull[start + 1])
        end = begin
        for one, other in pairwise(hull[start:]):
            if _slope(times, one, other) > steepest:
                break
            end = other
        if end - begin > best[1] - best[0]:
            best = begin, end
    return _slope(times, *best)


def _slope(times: Sequence[float], one: int, other: int) -> float:
    return (times[other] - times[one]) / (other - one)


# --- a probe: trains of growing size -------------------------------------------------------------

PROBE_BYTES = 1_900_000
"""Of chunks in one probe; with all that is around them it is less than 2 MB."""
FIRST_BYTES, FIRST_CHUNKS = 60_000, 12
MOST_CHUNKS = 32
LEAST_GROWTH, MOST_GROWTH = 2, 8
"""By so much each train is larger than the one before,"""
WANTED_SECONDS = 0.1
"""so that it takes about so long."""
GOOD_SPREAD = 0.1
"""This good an estimate ends a probe."""
LONG_SECONDS = 0.5
"""Whoever takes so long for a train is slow enough to be measured by that one."""


HINT_SECONDS = 0.02
"""A train that is shorter says how large the next one should be, and little more: some of it was in
a token bucket's burst, and the receiver has other things to do meanwhile."""
SLEPT = 2.0
"""If an answer takes so much longer than its chunks came in, somebody slept."""


@dataclass
class Probing:
    """One probe: what to send next, and what is known so far."""

    rate: Rate | None = None
    sent_bytes: int = 0
    _train: tuple[int, int] = (0, 0)
    _own_spread: float = 1.0
    """Of the train that counts, by itself,"""
    _span: float = 0.0
    """and how long it took to arrive."""
    _is_over: bool = False

    def next_train(self) -> tuple[int, int] | None:
        """Return chunks and bytes of each for the next train; None if the probe is over."""
        size = self._next_bytes()
        if self._is_over or size <= 0:
            return None
        chunks = MOST_CHUNKS if self._train != (0, 0) else FIRST_CHUNKS
        self._train = chunks, size // chunks
        self.sent_bytes += chunks * (size // chunks)
        return self._train

    def _next_bytes(self) -> int:
        """Return how large the next train is; what would be left for another small one is added."""
        before = self._train[0] * self._train[1]
        if not before:
            return FIRST_BYTES
        wanted = self.rate.bytes_per_second * WANTED_SECONDS if self.rate is not None else 0.0
        size = int(min(max(wanted, LEAST_GROWTH * before), MOST_GROWTH * before))
        left = PROBE_BYTES - self.sent_bytes
        if left < LEAST_GROWTH * before:
            return 0
        return left if left < (1 + LEAST_GROWTH) * size else size

    def arrived(self, arrivals: Sequence[float], elapsed: float) -> None:
        """Take in when the chunks of the last train had arrived, in seconds since the first had,
        and after how many seconds, without the round trip, the answer came.

        A train that agrees with the one before is the last one. Of two that do not the one counts
        whose chunks agree better with each other."""
        chunks, chunk_bytes = self._train
        span = arrivals[-1] if len(arrivals) == chunks else 0.0
        found = train_rate(arrivals, chunk_bytes) if elapsed <= SLEPT * span else None
        if found is None:  # what came within so much less time had waited to be read
            return
        before, was_hint = self.rate, self._span < HINT_SECONDS
        if before is None or span >= LONG_SECONDS or (was_hint and span >= HINT_SECONDS):
            apart = 1.0 if before is None else 0.0
            self._count(found, span, apart / 2)
        else:
            apart = abs(math.log(found.bytes_per_second / before.bytes_per_second))
            is_faster = found.bytes_per_second > before.bytes_per_second  # still learning its speed
            if is_faster or found.spread <= 2 * self._own_spread:
                self._count(found, span, apart / 2)
            else:
                self._count(Rate(before.bytes_per_second, self._own_spread), self._span, apart / 2)
        is_good = span >= HINT_SECONDS and max(found.spread, apart) <= GOOD_SPREAD
        self._is_over = is_good or span >= LONG_SECONDS

    def _count(self, found: Rate, span: float, doubt: float) -> None:
        self._own_spread, self._span = found.spread, span
        self.rate = Rate(found.bytes_per_second, max(found.spread, min(doubt, 1.0)))


# --- what the writers of links see anyway --------------------------------------------------------

FILLING_BYTES = 512 * 1024
"""So much may disappear in buffers before writing is as slow as the link."""
STEADY_BYTES = 1024 * 1024
"""So much more says how fast that is."""
WINDOW_SECONDS = 10.0
"""In so much time bytes are counted, for what all transfers get together."""
MAX_SEEN = 256


@dataclass
class _Busy:
    """A time in which a writer always had something to write."""

    at: float
    """When it began, or the last frame was written."""
    is_alone: bool
    written: int = 0
    """Bytes since it began."""
    full_at: float | None = None
    """When the buffers were full; from then on `steady` bytes were written."""
    steady: int = 0


@dataclass(frozen=True)
class Transfer:
    """What a writer has seen of the way to a peer."""

    peer: PeerId
    bytes_per_second: float
    is_alone: bool
    """Whether nothing else was being written: else it is a lower bound."""


@dataclass
class Writers:
    """All writers of a peer's bulk links. A writer that never waits for more to write fills the
    buffers; from then on it is as fast as the link."""

    seen: deque[Transfer] = field(default_factory=lambda: deque(maxlen=MAX_SEEN))
    """What is to be taken in; whoever does clears it."""
    sent_bytes: float = 0.0
    """Of a frame that took longer than a window, what one window saw of it."""
    received_bytes: float = 0.0
    _busy: dict[PeerId, _Busy] = field(default_factory=dict)

    def begin(self, peer: PeerId, now: float) -> None:
        """A writer has something to write, after a pause."""
        for other in self._busy.values():
            other.is_alone = False
        self._busy[peer] = _Busy(now, is_alone=not self._busy)

    def wrote(self, peer: PeerId, size: int, now: float) -> None:
        """A frame has been handed to the stream."""
        busy = self._busy.get(peer)
        if busy is None:
            return
        self.sent_bytes += size * min(1.0, WINDOW_SECONDS / max(now - busy.at, 1e-9))
        busy.at = now
        busy.written += size
        if busy.full_at is not None:
            busy.steady += size
        elif busy.written >= FILLING_BYTES:
            busy.full_at = now
        self._look(peer, busy, now)

    def received(self, size: int) -> None:
        """Bytes have been read."""
        self.received_bytes += size

    def pause(self, peer: PeerId) -> None:
        """A writer has nothing to write any more, or its link has ended."""
        self._busy.pop(peer, None)

    def _look(self, peer: PeerId, busy: _Busy, now: float) -> None:
        if busy.full_at is None or busy.steady < STEADY_BYTES or now <= busy.full_at:
            return
        self.seen.append(Transfer(peer, busy.steady / (now - busy.full_at), busy.is_alone))
        busy.full_at, busy.steady, busy.is_alone = now, 0, len(self._busy) == 1


# --- compute -------------------------------------------------------------------------------------

FEW_MICROBATCHES = 4
"""So many, at least, make one measurement of the slowdown."""


@dataclass
class Slowdown:
    """How much longer microbatches take than the profile said."""

    average: Average = field(default_factory=Average)
    _seconds: float = 0.0
    _count: int = 0

    def take(self, seconds: float, count: int, profiled_seconds: float) -> None:
        """Take in that `count` more microbatches have taken `seconds` more of compute, and that one
        was expected to take `profiled_seconds`."""
        if profiled_seconds <= 0:
            return
        self._seconds += seconds / profiled_seconds
        self._count += count
        if self._count >= FEW_MICROBATCHES and self._seconds > 0:
            self.average.take(self._seconds / self._count)
            self._seconds, self._count = 0.0, 0
