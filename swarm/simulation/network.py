"""A modelled network: streams with latency, bandwidth, cuts and resets (`ports.Transport`).

Bytes of one stream arrive in order, as TCP's do. A reader waits for the arrival of what is on
its way, so nothing runs between a send and its delivery; what happens outside of all processes is
called by the clock. Identity is the simulation's word:
there is no TLS. The rule: chance comes from the network's own generator.
"""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import trio

from protocol.signing import PeerId
from swarm.errors import AddressError, NobodyListens, PeerRefused, PeerUnreachable
from swarm.ports import ByteStream
from swarm.simulation.carriage import Carriage, Pipe
from swarm.simulation.clock import timeline
from swarm.simulation.process import Process
from swarm.simulation.streams import Half, Path, SimStream, Tap

DIAL_SECONDS = 5.0
KEEPALIVE_SECONDS = 30.0
"""After so much silence of a cut or a dead machine the kernel gives a connection up."""
LEAST_PACE = 0.2
"""However noisy it is, nothing is done in less than this part of the usual time."""
FORGETTING_SECONDS = 5.0
"""A longer cut may make something in between forget a connection."""


@dataclass(frozen=True, slots=True)
class Weather:
    """What every path is like unless it is told otherwise."""

    latency_seconds: float = 0.02
    jitter_seconds: float = 0.01
    bytes_per_second: float = 12_500_000.0


class Country(Protocol):
    """What lies between hosts, where that is not the same everywhere."""

    jitter_seconds: float

    def latency_seconds(self, source: int, target: int) -> float:
        """Return how long a byte is on its way."""
        ...

    def bytes_per_second(self, source: int, target: int) -> float:
        """Return what the way itself carries; infinite if only its ends limit it."""
        ...

    def uplink(self, host: int) -> float:
        """Return what a host sends to all others together, in bytes per second."""
        ...

    def downlink(self, host: int) -> float:
        """Return what a host receives from all others together, in bytes per second."""
        ...

    def wire_bytes(self, number: int, size: int) -> float:
        """Return as how many bytes `size` bytes of tensors count in a frame of this type."""
        ...


@dataclass
class _Listener:
    process: Process
    streams: trio.MemorySendChannel[SimStream]


class SimNetwork:
    """All hosts and what lies between them. Hosts are numbers; address "sim-N:PORT"."""

    def __init__(
        self,
        seed: str,
        tap: Tap,
        weather: Weather | None = None,
        country: Country | None = None,
        noise: float = 0.0,
    ) -> None:
        """A `country` says how paths differ, and that large transfers share what they use; what
        each of those takes varies by a relative standard deviation of `noise`."""
        self.rng = random.Random(f"{seed}/network")
        self._noise = noise
        self.carriage = Carriage(self.after) if country is not None else None
        self.sent_bytes: dict[int, float] = {}
        self._country = country
        self._uplinks: dict[int, Pipe] = {}
        self._downlinks: dict[int, Pipe] = {}
        self._tap = tap
        self._weather = weather or Weather()
        self._paths: dict[tuple[int, int], Path] = {}
        self._listeners: dict[str, _Listener] = {}
        self._unplugged: dict[int, Process] = {}
        self._on_way: dict[tuple[int, int], dict[SimStream, None]] = {}
        self._of_process: dict[Process, dict[SimStream, None]] = {}

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call something later."""
        timeline().call_at(trio.current_time() + seconds, call)

    # --- faults ------------------------------------------------------------------------

    def path(self, source: int, target: int) -> Path:
        """Return the way from one host to another; its figures may be changed."""
        key = (source, target)
        if key not in self._paths:
            weather = self._weather
            own = source == target
            if self._country is not None and not own and target >= 0:
                self._paths[key] = self._path_through(self._country, source, target)
            else:
                self._paths[key] = Path(
                    *key,
                    0.0001 if own else weather.latency_seconds,
                    0.0 if own else weather.jitter_seconds,
                    weather.bytes_per_second,
                )
        return self._paths[key]

    def _path_through(self, country: Country, source: int, target: int) -> Path:
        up = self._uplinks.setdefault(source, Pipe(country.uplink(source)))
        down = self._downlinks.setdefault(target, Pipe(country.downlink(target)))
        own = Pipe(country.bytes_per_second(source, target))
        return Path(
            source,
            target,
            country.latency_seconds(source, target),
            country.jitter_seconds,
            min(up.bytes_per_second, down.bytes_per_second, own.bytes_per_second),
            pipes=(up, down, own),
        )

    def survey(self) -> None:
        """The country has changed: take its figures anew. What is on its way arrives as before."""
        if self._country is None or self.carriage is None:
            return
        for host, pipe in self._uplinks.items():
            pipe.bytes_per_second = self._country.uplink(host)
        for host, pipe in self._downlinks.items():
            pipe.bytes_per_second = self._country.downlink(host)
        for (source, target), path in self._paths.items():
            if path.pipes:
                path.pipes[2].bytes_per_second = self._country.bytes_per_second(source, target)
                path.latency_seconds = self._country.latency_seconds(source, target)
                path.bytes_per_second = min(pipe.bytes_per_second for pipe in path.pipes)
                self.carriage.touch(path.pipes)

    def hindered(self, size: float) -> float:
        """Return how many bytes would take as long, where nothing was noisy."""
        if not self._noise:
            return size
        return size * max(LEAST_PACE, self.rng.gauss(1.0, self._noise))

    def wire_bytes(self, number: int, size: int) -> float:
        """Return as how many bytes `size` bytes of tensors count in a frame of this type."""
        return self._country.wire_bytes(number, size) if self._country is not None else size

    def cut(self, source: int, target: int) -> None:
        """Let nothing through in this direction until `heal`."""
        path = self.path(source, target)
        if path.cut_at is None:
            path.cut_at = at = trio.current_time()
            self._touch(path)
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
        self._touch(path)
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
        for stream in (mine, theirs):
            self._on_way.setdefault(_ends(stream), {})[stream] = None
            self._of_process.setdefault(stream.process, {})[stream] = None
        listener.streams.send_nowait(theirs)
        return mine

    def forget_stream(self, stream: SimStream) -> None:
        """A stream has been closed on both sides."""
        for each in (stream, stream.other):
            self._on_way.get(_ends(each), {}).pop(each, None)
            self._of_process.get(each.process, {}).pop(each, None)

    def host_is_up(self, number: int) -> bool:
        """Return whether a host has power."""
        return number not in self._unplugged

    def _touch(self, path: Path) -> None:
        if self.carriage is not None:
            self.carriage.touch(path.pipes)

    async def _cross(self, path: Path) -> None:
        while path.cut_at is not None:
            await path.healed.wait()
        await trio.sleep(path.latency_seconds + path.jitter_seconds * self.rng.random())

    def _between(self, source: int, target: int) -> list[SimStream]:
        return list(self._on_way.get((source, target), ()))

    def _of(self, process: Process) -> list[SimStream]:
        return list(self._of_process.get(process, ()))

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


def _ends(stream: SimStream) -> tuple[int, int]:
    return stream.out.path.source, stream.out.path.target


def _host_of(address: str) -> int:
    """Return the number in "sim-N:PORT"; a host that nobody has is -1."""
    host = address.rpartition(":")[0]
    name, _, number = host.rpartition("-")
    return int(number) if name == "sim" and number.isdigit() else -1
