"""How late heartbeats are while tensors flow and while models compute.

The rule: a delay counts from the moment at which a Ping was due, so a loop that is busy cannot
hide its own lateness, until its Pong has been handled. Both ends carry the same load.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import trio

from benchmarks.computing import Computed, computing
from benchmarks.far import COMPUTE, REST, Far
from benchmarks.streams import ECHO, LinkEnd

INTERVAL_SECONDS = 0.02
LARGE_MESSAGES_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Load:
    """What goes on beside the heartbeats."""

    name: str
    bulk: bool
    compute: bool


LOADS = (
    Load("nothing else", bulk=False, compute=False),
    Load("bulk data", bulk=True, compute=False),
    Load("computing", bulk=False, compute=True),
    Load("bulk data and computing", bulk=True, compute=True),
)


@dataclass(slots=True)
class Delays:
    """What was seen under one load."""

    answered_seconds: list[float] = field(default_factory=list)
    """From due to answered, by heartbeat."""
    bulk_bytes_per_second: float = 0.0
    """In each direction."""
    microbatches_per_second: float = 0.0
    """In the near process."""


async def measure_delays(
    end: LinkEnd, far: Far, large_bytes: int, seconds: float
) -> dict[str, Delays]:
    """Beat for `seconds` under every load; return what was seen, by the load's name."""
    found = {}
    for load in LOADS:
        async with AsyncExitStack() as stack:
            computed = Computed()
            if load.compute:
                computed = await stack.enter_async_context(_both_computing(far))
            begun, before = trio.current_time(), computed.microbatches
            delays = await _measure(end, large_bytes if load.bulk else 0, seconds)
            lasted = trio.current_time() - begun
            delays.microbatches_per_second = (computed.microbatches - before) / lasted
            found[load.name] = delays
    return found


@asynccontextmanager
async def _both_computing(far: Far) -> AsyncIterator[Computed]:
    async with computing() as computed:
        await far.tell(COMPUTE)
        yield computed
        await far.tell(REST)


async def _measure(end: LinkEnd, bulk_bytes: int, seconds: float) -> Delays:
    delays = Delays()
    await end.beat()  # opens the connection
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        if bulk_bytes:
            nursery.start_soon(_flow, end, bulk_bytes, stop, delays)
        until = trio.current_time() + seconds
        due = trio.current_time()
        async with trio.open_nursery() as beats:
            while due < until:
                due += INTERVAL_SECONDS
                await trio.sleep_until(due)
                beats.start_soon(_beat, end, due, delays)
        stop.set()
    return delays


async def _beat(end: LinkEnd, due: float, delays: Delays) -> None:
    await end.beat()
    delays.answered_seconds.append(trio.current_time() - due)


async def _flow(end: LinkEnd, size: int, stop: trio.Event, delays: Delays) -> None:
    """Keep large messages under way in both directions."""
    begun, count = trio.current_time(), 0
    for _ in range(LARGE_MESSAGES_AT_ONCE):
        end.post(size, ECHO)
    while not stop.is_set():
        await end.answer()
        count += 1
        end.post(size, ECHO)
    delays.bulk_bytes_per_second = count * size / (trio.current_time() - begun)
    for _ in range(LARGE_MESSAGES_AT_ONCE):
        await end.answer()
