"""How fast a link is beside bare trio TLS and hivemind's stream, and how late heartbeats are.

The rule: two processes over loopback, one repetition of each way after the other, medians.
"""

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import trio

from benchmarks.far import Far, open_far
from benchmarks.heartbeats import LOADS, Delays, measure_delays
from benchmarks.report import Report, Row, percentile
from benchmarks.streams import (
    FAR,
    NEAR,
    HivemindStream,
    LinkEnd,
    TrioTls,
    Way,
    choose_congestion_control,
)
from swarm.adapters.asyncio_thread import AsyncioThread

LARGE_BYTES = 16 * 1024 * 1024
MESSAGES = {LARGE_BYTES: 8, 64 * 1024: 256, 0: 512}
"""How many messages of a size make a repetition."""
TRIO_PIECES = {"trio TLS, sent whole": LARGE_BYTES, "trio TLS, 256 KiB pieces": 256 * 1024}
REPETITIONS = 15
ROUND_TRIPS = {LARGE_BYTES: 2, 64 * 1024: 20, 0: 50}
HEARTBEAT_SECONDS = 12.0
QUICK_HEARTBEAT_SECONDS = 0.5

Times = dict[tuple[str, int], tuple[list[float], list[float]]]
"""By way and size: seconds per message one way, and per round trip."""


def measure(*, quick: bool) -> Report:
    """Measure throughput and round trips, then the delay of heartbeats."""
    return trio.run(_measure, quick)


async def _measure(quick: bool) -> Report:
    congestion_control = choose_congestion_control()
    with TemporaryDirectory(prefix="swarm-bench-") as folder:
        async with open_far(Path(folder), LARGE_BYTES) as far, trio.open_nursery() as nursery:
            end = LinkEnd(NEAR, FAR.peer, Path(folder))
            await nursery.start(end.run)
            end.links.know(FAR.peer, (far.addresses["link"],))
            times = await _compare(end, far, Path(folder), 1 if quick else REPETITIONS)
            seconds = QUICK_HEARTBEAT_SECONDS if quick else HEARTBEAT_SECONDS
            delays = await measure_delays(end, far, LARGE_BYTES, seconds)
            nursery.cancel_scope.cancel()
    rows = [_speed_row(*key, *found) for key, found in times.items()]
    rows += [_delay_row(load.name, delays[load.name]) for load in LOADS]
    summary = _summary(times, delays)
    return Report("transport", rows, summary | {"congestion_control": congestion_control})


async def _compare(end: LinkEnd, far: Far, folder: Path, repetitions: int) -> Times:
    times: Times = {}
    thread = AsyncioThread("hivemind")
    try:
        ways: list[Way] = [end]
        for name, piece in TRIO_PIECES.items():
            ways.append(await TrioTls.connect(name, far.addresses["trio"], folder, piece))
        hivemind = await HivemindStream.connect(thread, far.addresses["hivemind"])
        ways.append(hivemind)
        for size in MESSAGES:
            for way in ways:  # the first messages find windows closed and memory cold
                await way.exchange(size, 2)
            for _ in range(repetitions):
                for way in ways:
                    await _repeat(way, size, times)
        await hivemind.aclose()
    finally:
        await thread.aclose()
    return times


async def _repeat(way: Way, size: int, times: Times) -> None:
    one_way, round_trips = times.setdefault((way.name, size), ([], []))
    one_way.append(await way.exchange(size, MESSAGES[size]) / MESSAGES[size])
    round_trips.extend([await way.exchange(size, 1) for _ in range(ROUND_TRIPS[size])])


# --- what it means ----------------------------------------------------------------------------


def _speed_row(way: str, size: int, one_way: list[float], round_trips: list[float]) -> Row:
    return {
        "way": way,
        "payload_bytes": size,
        "gb_per_s": size / statistics.median(one_way) / 1e9,
        "messages_per_s": 1 / statistics.median(one_way),
        "round_trip_ms": 1000 * statistics.median(round_trips),
    }


def _delay_row(load: str, delays: Delays) -> Row:
    answered = [1000 * seconds for seconds in delays.answered_seconds]
    return {
        "heartbeats_while": load,
        "count": len(answered),
        "p50_ms": percentile(answered, 50),
        "p99_ms": percentile(answered, 99),
        "largest_ms": max(answered),
        "bulk_gb_per_s_each_way": delays.bulk_bytes_per_second / 1e9,
        "microbatches_per_s": delays.microbatches_per_second,
    }


def _summary(times: Times, delays: dict[str, Delays]) -> Row:
    seconds = {way: one_way for (way, size), (one_way, _) in times.items() if size == LARGE_BYTES}
    best_trio = min(TRIO_PIECES, key=lambda way: statistics.median(seconds[way]))
    answered = delays[LOADS[-1].name].answered_seconds
    return {
        "link_over_trio_tls": _times_faster(seconds[LinkEnd.name], seconds[best_trio]),
        "link_over_hivemind": _times_faster(seconds[LinkEnd.name], seconds[HivemindStream.name]),
        "heartbeat_p99_ms": 1000 * percentile(answered, 99),
        "heartbeat_is": "from when a Ping is due until its Pong is handled: a whole round trip",
        "best_trio_tls": best_trio,
        "payload_bytes": LARGE_BYTES,
    }


def _times_faster(ours: list[float], theirs: list[float]) -> float:
    """Return the median over the repetitions: both sides of each ran one after the other."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
