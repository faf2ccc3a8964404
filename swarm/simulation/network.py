"""A modelled network: streams with latency, bandwidth, cuts and resets (`ports.Transport`).

Bytes of one stream arrive in order, as TCP's do. A reader waits for the arrival of what is on
its way, so nothing runs between a send and its delivery; only rare events (an answer of the
other side's kernel, a timeout) have a task of their own. Identity is the simulation's word:
there is no TLS. The rule: chance comes from the network's own generator.
"""

import heapq
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import trio

from protocol.signing import PeerId
from swarm.errors import AddressError, NobodyListens, PeerRefused, PeerUnreachable
from swarm.ports import ByteStream
from swarm.simulation.process import Process
from swarm.simulation.streams import Half, Path, SimStream, Tap

DIAL_SECONDS = 5.0
KEEPALIVE_SECONDS = 30.0
"""After so much silence of a cut or a dead machine the kernel gives a connection up."""
FORGETTING_SECONDS = 5.0
"""A longer cut may make something in between forget a connection."""


@dataclass(frozen=True, slots=True)
class Weather:
    """What every path is like unless it is told otherwise."""

    latency_seconds: float = 0.02
    jitter_seconds: float = 0.01
    bytes_per_second: float = 12_500_000.0


@dataclass
class _Listener:
    process: Process
    streams: trio.MemorySendChannel[SimStream]


@dataclass(order=True)
class _Timer:
    at: float
    number: int
    call: Callable[[], None] = field(compare=False)


class SimNetwork:
    """All hosts and what lies between them. Hosts are numbers; address "sim-N:PORT"."""

    def __init__(self, seed: str, tap: Tap, weather: Weather | None = None) -> None:
        self.rng = random.Random(f"{seed}/network")
        self._tap = tap
        self._weather = weather or Weather()
        self._paths: dict[tuple[int, int], Path] = {}
        self._listeners: dict[str, _Listener] = {}
        self._unplugged: dict[int, Process] = {}
        self._streams: list[SimStream] = []
        self._timers: list[_Timer] = []
        self._numbers = itertools.count()
        self._sooner = trio.Event()

    async def run(self) -> None:
        """Let rare events happen in time, until cancelled."""
        while True:
            self._sooner = trio.Event()
            at = self._timers[0].at if self._timers else float("inf")
            with trio.move_on_at(at):
                await self._sooner.wait()
            while self._timers and self._timers[0].at <= trio.current_time():
                heapq.heappop(self._timers).call()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call something later."""
        timer = _Timer(trio.current_time() + seconds, next(self._numbers), call)
        heapq.heappush(self._timers, timer)
        if self._timers[0] is timer:
            self._sooner.set()

    # --- faults ------------------------------------------------------------------------

    def path(self, source: int, target: int) -> Path:
        """Return the way from one host to another; its figures may be changed."""
        key = (source, target)
        if key not in self._paths:
            weather = self._weather
            own = source == target
            self._paths[key] = Path(
                *key,
                0.0001 if own else weather.latency_seconds,
                0.0 if own else weather.jitter_seconds,
                weather.bytes_per_second,
            )
        return self._paths[key]

    def cut(self, source: int, target: int) -> None:
        """Let nothing through in this direction until `heal`."""
        path = self.path(source, target)
        if path.cut_at is None:
            path.cut_at = at = trio.current_time()
            self.after(KEEPALIVE_SECONDS, lambda: self._time_out(path, at))

    def heal(self, source: int, target: int) -> None:
        """Let bytes through again: what was on its way arrives now.

        After a long cut some of its connections are dead without knowing it."""
        path = self.path(source, target)
        if path.cut_at is None:
            return
        was_long = trio.current_time() - path.cut_at > FORGETTING_SECONDS
        for stream in self._between(source, target):
            stream.out.heal(trio.current_time() + path.latency_seconds, path.cut_at)
            if was_long and self.rng.random() < 0.5:
                stream.out.forgotten = True
        path.cut_at = None
        path.healed.set()
        path.healed = trio.Event()

    def reset(self, source: int, target: int, after_bytes: int) -> int:
        """Break all streams between two hosts once they have carried `after_bytes` more bytes
        from `source`; what comes later is lost. Returns how many streams there are."""
        broken = self._between(source, target)
        for stream in broken:
            stream.out.break_after(after_bytes)
        return len(broken)

    def unplug(self, process: Process) -> None:
        """Its host is without power: others hear nothing, and what it said last may be lost."""
        self._unplugged[process.number] = process
        for stream in self._of(process):
            stream.vanish()
            self.after(KEEPALIVE_SECONDS, partial(stream.other.fail, "timed out"))
        self._forget(process)

    def hang_up(self, process: Process) -> None:
        """The process has ended: its kernel closes what it had open."""
        for stream in self._of(process):
            stream.close()
        self._forget(process)

    # --- transport ---------------------------------------------------------------------

    async def dial(self, process: Process, address: str, expected: PeerId | None) -> SimStream:
        """Open a stream (ports.Transport.dial)."""
        whom = expected or address
        with trio.move_on_after(DIAL_SECONDS):
            target = _host_of(address)
            there, back = self.path(process.number, target), self.path(target, process.number)
            await self._cross(there)
            listener = self._listeners.get(address)
            if listener is None:
                if target in self._unplugged:
                    await trio.sleep_forever()
                await self._cross(back)
                raise NobodyListens(whom, "connection refused")
            await self._cross(back)
            await self._cross(there)
            while listener.process.frozen:
                await listener.process.thawed.wait()
            await self._cross(back)
            if expected not in (None, listener.process.peer):
                raise PeerRefused(whom, f"{listener.process.peer} answers at {address}")
            if listener.process.dead or process.dead:
                raise PeerUnreachable(whom, "connection reset")
            return self._connect(process, listener, there, back)
        raise PeerUnreachable(whom, f"no answer within {DIAL_SECONDS:g} s")

    async def serve(
        self,
        process: Process,
        address: str,
        handler: Callable[[ByteStream], Awaitable[None]],
        started: Callable[[str], None],
    ) -> None:
        """Take in streams at an address (ports.Transport.serve)."""
        if address in self._listeners:
            raise AddressError(f"{address} is in use")
        send, receive = trio.open_memory_channel[SimStream](float("inf"))
        self._listeners[address] = _Listener(process, send)
        self._unplugged.pop(process.number, None)
        try:
            async with trio.open_nursery() as nursery:
                started(address)
                async for stream in receive:
                    nursery.start_soon(_serve_one, handler, stream)
        finally:
            listener = self._listeners.get(address)
            if listener is not None and listener.process is process:
                del self._listeners[address]

    # --- inside ------------------------------------------------------------------------

    def _connect(self, process: Process, listener: _Listener, there: Path, back: Path) -> SimStream:
        out, into = Half(there), Half(back)
        mine = SimStream(self, self._tap, process, listener.process.peer, out, into)
        theirs = SimStream(self, self._tap, listener.process, process.peer, into, out)
        mine.other, theirs.other = theirs, mine
        self._streams += [mine, theirs]
        listener.streams.send_nowait(theirs)
        return mine

    def forget_stream(self, stream: SimStream) -> None:
        """A stream has been closed on both sides."""
        for each in (stream, stream.other):
            if each in self._streams:
                self._streams.remove(each)

    def host_is_up(self, number: int) -> bool:
        """Return whether a host has power."""
        return number not in self._unplugged

    async def _cross(self, path: Path) -> None:
        while path.cut_at is not None:
            await path.healed.wait()
        await trio.sleep(path.latency_seconds + path.jitter_seconds * self.rng.random())

    def _between(self, source: int, target: int) -> list[SimStream]:
        ends = (source, target)
        return [s for s in self._streams if (s.out.path.source, s.out.path.target) == ends]

    def _of(self, process: Process) -> list[SimStream]:
        return [stream for stream in self._streams if stream.process is process]

    def _forget(self, process: Process) -> None:
        for address, listener in list(self._listeners.items()):
            if listener.process is process:
                del self._listeners[address]

    def _time_out(self, path: Path, cut_at: float) -> None:
        if path.cut_at != cut_at:
            return
        for stream in self._between(path.source, path.target):
            stream.fail("timed out")
            stream.other.fail("timed out")


class SimTransport:
    """One process's way into the network (`ports.Transport`)."""

    def __init__(self, network: SimNetwork, process: Process, address: str) -> None:
        """`address` is where it listens."""
        self._network = network
        self._process = process
        self._address = address

    async def dial(self, address: str, expected: PeerId | None) -> ByteStream:
        """Open a stream to sim-N:PORT. Raises PeerUnreachable, PeerRefused."""
        return await self._network.dial(self._process, address, expected)

    async def serve(
        self,
        handler: Callable[[ByteStream], Awaitable[None]],
        *,
        started: Callable[[str], None],
    ) -> None:
        """Listen until cancelled."""
        await self._network.serve(self._process, self._address, handler, started)


async def _serve_one(handler: Callable[[ByteStream], Awaitable[None]], stream: SimStream) -> None:
    try:
        await handler(stream)
    finally:
        if not stream.process.dead:
            stream.close()


def _host_of(address: str) -> int:
    """Return the number in "sim-N:PORT"; a host that nobody has is -1."""
    host = address.rpartition(":")[0]
    name, _, number = host.rpartition("-")
    return int(number) if name == "sim" and number.isdigit() else -1
