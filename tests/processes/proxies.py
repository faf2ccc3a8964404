"""Links between daemons on this machine that can be cut, in one direction or in both.

The rule: a daemon is reached through its proxy alone, and the proxy knows who dials. Every daemon
listens at 127.0.0.N and advertises 127.1.0.N, where its proxy listens at the same port. All dial
from 127.0.0.1, so the kernel's tables tell the proxy whose process holds the other end of a
connection. A cut delivers nothing of a direction, neither bytes nor the end of a connection nor a
refusal; healed connections go on where they stopped. Their DHT nodes talk past the proxies: what
they carry are hints.
"""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import trio

from tests.processes.places import Place, ways_between

Address = tuple[str, int]


PIECE_BYTES = 8 * 1024
QUEUE_SECONDS = 0.05


class Shape:
    """Rate and delay of one way, of all its connections together."""

    def __init__(self, bytes_per_second: float, delay_seconds: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._delay_seconds = delay_seconds
        self._free_at = 0.0

    @property
    def pieces(self) -> int:
        """Return how many pieces may be on their way."""
        seconds = self._delay_seconds + QUEUE_SECONDS
        return max(2, round(seconds * self._bytes_per_second / PIECE_BYTES))

    def arrival(self, size: int, now: float) -> float:
        """Send `size` bytes; return when the last of them arrives."""
        self._free_at = max(self._free_at, now) + size / self._bytes_per_second
        return self._free_at + self._delay_seconds


class Proxies:
    """A network of proxies, one for each daemon, in a thread of their own; `with` ends it."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._daemons: dict[str, Address] = {}
        self._cut: frozenset[tuple[str, str]] = frozenset()
        self._shapes: dict[tuple[str, str], Shape] = {}
        self._changed = trio.Event()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._live, name="proxies")

    def __enter__(self) -> "Proxies":
        self._thread.start()
        self._started.result()
        return self

    def __exit__(self, *exception: object) -> None:
        self._token.run_sync_soon(self._nursery.cancel_scope.cancel)
        self._thread.join()

    def place(self, name: str) -> Place:
        """Open the proxy of a daemon; return where it must listen, and what to advertise."""
        if name not in self._daemons:
            trio.from_thread.run(self._open, name, trio_token=self._token)
        host, port = self._daemons[name]
        return Place(listen=f"{host}:{port}", advertise=_proxy_host(host))

    def running(self, name: str, pid: int) -> None:
        """Tell which process is this daemon now."""
        self._pids[name] = pid

    def cut(self, ones: Iterable[str], others: Iterable[str], *, one_way: bool = False) -> None:
        """Deliver nothing from `ones` to `others` any more; unless `one_way`, nor back."""
        self._change(self._cut | ways_between(ones, others, one_way))

    def heal(self) -> None:
        """End all cuts."""
        self._change(frozenset())

    def shape(self, one: str, other: str, bytes_per_second: float, delay_seconds: float) -> None:
        """Let what `one` sends to `other` have this rate, all connections together, and this way;
        for connections that are made from now on."""
        self._shapes[(one, other)] = Shape(bytes_per_second, delay_seconds)

    def _change(self, cut: frozenset[tuple[str, str]]) -> None:
        def change() -> None:
            self._cut = cut
            self._changed.set()
            self._changed = trio.Event()

        trio.from_thread.run_sync(change, trio_token=self._token)

    # --- in the thread ----------------------------------------------------------------------

    def _live(self) -> None:
        trio.run(self._main)

    async def _main(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._token = trio.lowlevel.current_trio_token()
            self._started.set_result(None)
            await trio.sleep_forever()

    async def _open(self, name: str) -> None:
        host = f"127.0.0.{len(self._daemons) + 2}"
        (listener,) = await trio.open_tcp_listeners(0, host=_proxy_host(host))
        self._daemons[name] = host, int(listener.socket.getsockname()[1])
        self._nursery.start_soon(trio.serve_listeners, partial(self._serve, name), [listener])

    async def _serve(self, target: str, client: trio.SocketStream) -> None:
        """Connect a client to a daemon, as far as the cuts let it."""
        async with client:
            source = self._who_dials(client)
            if source is None:
                print(f"proxy of {target}: nobody that we know dials", file=sys.stderr)
                return
            await self._passage(source, target)
            try:
                server = await trio.open_tcp_stream(*self._daemons[target])
            except OSError:
                await self._passage(target, source)
                return
            async with server, trio.open_nursery() as nursery:
                scope = nursery.cancel_scope
                nursery.start_soon(self._carry, client, server, (source, target), scope)
                nursery.start_soon(self._carry, server, client, (target, source), scope)

    def _who_dials(self, client: trio.SocketStream) -> str | None:
        with contextlib.suppress(OSError):
            ours, theirs = client.socket.getsockname(), client.socket.getpeername()
            return owner_of(theirs, ours, self._pids)
        return None

    async def _carry(
        self,
        source: trio.SocketStream,
        target: trio.SocketStream,
        way: tuple[str, str],
        scope: trio.CancelScope,
    ) -> None:
        """Carry bytes, and the end of them; a broken connection breaks the other."""
        shape = self._shapes.get(way)
        if shape is not None:
            await self._carry_shaped(source, target, way, shape, scope)
            return
        try:
            async for data in source:
                await self._passage(*way)
                await target.send_all(data)
            await self._passage(*way)
            await target.send_eof()
        except trio.BrokenResourceError:
            await self._passage(*way)
            scope.cancel()

    async def _carry_shaped(
        self,
        source: trio.SocketStream,
        target: trio.SocketStream,
        way: tuple[str, str],
        shape: "Shape",
        scope: trio.CancelScope,
    ) -> None:
        """Carry bytes at a rate and with a delay. What is on its way is bounded by rate and delay
        and `QUEUE_SECONDS`, as it is by a router's queue."""
        send, receive = trio.open_memory_channel[tuple[float, bytes]](shape.pieces)

        async def deliver() -> None:
            async for at, data in receive:
                await trio.sleep_until(at)
                await self._passage(*way)
                await target.send_all(data)
            await self._passage(*way)
            await target.send_eof()

        async def take() -> None:
            async with send:
                while data := await source.receive_some(PIECE_BYTES):
                    await send.send((shape.arrival(len(data), trio.current_time()), data))

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(deliver)
                nursery.start_soon(take)
        except* trio.BrokenResourceError:
            await self._passage(*way)
            scope.cancel()

    async def _passage(self, source: str, target: str) -> None:
        """Wait while what `source` sends does not reach `target`."""
        while (source, target) in self._cut:
            await self._changed.wait()


def owner_of(local: Address, remote: Address, pids: Mapping[str, int]) -> str | None:
    """Return whose process holds the socket at `local` that is connected to `remote`."""
    inode = _inode_of(local, remote)
    for name, pid in pids.items():
        with contextlib.suppress(OSError):  # it has ended
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # it is closed meanwhile
                    if os.readlink(descriptor) == f"socket:[{inode}]":
                        return name
    return None


def _inode_of(local: Address, remote: Address) -> str | None:
    ends = [_in_the_kernels_words(address) for address in (local, remote)]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[1:3] == ends:
            return words[9]
    return None


def _in_the_kernels_words(address: Address) -> str:
    number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
    return f"{number:08X}:{address[1]:04X}"


def _proxy_host(host: str) -> str:
    return host.replace("127.0.", "127.1.", 1)
