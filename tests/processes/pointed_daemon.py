"""The daemon, with named points at its doors where it can be killed, stopped or held.

The rule: the daemon is the shipped one; only what it calls outside goes through here. Arguments are
those of `swarm`; $SWARM_POINTS names a folder (points.py makes it). The points, in which `*` stands
for a name:

- before-save:* after-save:*              the storage's durable state
- before-executor:* after-executor:*      methods of the executor
- before-checkpoint:* after-checkpoint:*  methods of the checkpoints
- before-send:* after-send:*              frames, by message type
- received:*                              frames, before the daemon looks at them

A point counts for an order that names it, or the part before its colon. $SWARM_CLOCK_SHIFT are the
seconds by which this process's wall clock is wrong.
"""

import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import trio

from protocol.codec import PREFIX, PREFIX_BYTES
from protocol.messages import BY_NUMBER
from protocol.signing import PeerId
from swarm import cli
from swarm.daemon import Outside
from swarm.node import Node
from swarm.ports import ByteStream, Checkpoints, StageExecutor, Storage, Transport

FOLDER_VARIABLE = "SWARM_POINTS"
CLOCK_VARIABLE = "SWARM_CLOCK_SHIFT"
ORDERS, ANNOUNCED, GO = "orders", "announced", "go"


def main(arguments: list[str]) -> int:
    """Run a swarm command whose daemon, if it starts one, has points."""
    _shift_clock(float(os.environ.get(CLOCK_VARIABLE, "0")))
    points = Points(Path(os.environ[FOLDER_VARIABLE]))
    vars(cli)["Node"] = partial(Node, wrap=points.wrap)
    return cli.main(arguments)


def _shift_clock(seconds: float) -> None:
    """Make the wall clock of this process wrong; others take it from `time` later."""
    right = time.time
    vars(time)["time"] = lambda: right() + seconds


@dataclass
class Order:
    """What to do at a point."""

    action: str
    """kill, stop, or hold: wait there until told to go on."""
    point: str
    occurrence: int
    """The how-manieth from now on; the first is 1."""

    def counts(self, point: str) -> bool:
        """Count this point; return whether it is the one."""
        if self.point not in (point, point.partition(":")[0]):
            return False
        self.occurrence -= 1
        return self.occurrence == 0


class Points:
    """Announces the points as they are reached, and does there what it was told."""

    def __init__(self, folder: Path) -> None:
        self._announced = os.open(folder / ANNOUNCED, os.O_WRONLY | os.O_APPEND)
        self._file = os.open(folder / ORDERS, os.O_RDONLY)
        self._go = os.open(folder / GO, os.O_RDONLY)  # the director has opened it already
        self._rest = b""
        self._orders: list[Order] = []
        self._lock = threading.Lock()

    def wrap(self, outside: Outside) -> Outside:
        """Put the points between the daemon and its adapters."""
        return replace(
            outside,
            storage=PointedStorage(outside.storage, self),
            executor=cast(StageExecutor, Pointed(outside.executor, "executor", self)),
            checkpoints=cast(Checkpoints, Pointed(outside.checkpoints, "checkpoint", self)),
            transport=PointedTransport(outside.transport, self),
        )

    def reach(self, point: str) -> None:
        """Reach a point; who holds there holds the whole thread."""
        if self._obey(point):
            os.read(self._go, 1)

    async def reach_async(self, point: str) -> None:
        """Reach a point; who holds there holds this task alone."""
        if self._obey(point):
            await trio.to_thread.run_sync(os.read, self._go, 1, abandon_on_cancel=True)

    def _obey(self, point: str) -> bool:
        """Announce the point and do what is to be done; return whether to hold."""
        with self._lock:
            os.write(self._announced, f"{point}\n".encode())
            self._read_orders()
            due = [order.action for order in self._orders if order.counts(point)]
        if "kill" in due:
            os.kill(os.getpid(), signal.SIGKILL)
        if "stop" in due:
            os.kill(os.getpid(), signal.SIGSTOP)
        return "hold" in due

    def _read_orders(self) -> None:
        self._rest += os.read(self._file, 65536)
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            action, point, occurrence = line.decode().split()
            self._orders.append(Order(action, point, int(occurrence)))


class Pointed:
    """An adapter with a point before and after every method of it."""

    def __init__(self, inner: object, name: str, points: Points) -> None:
        self._inner = inner
        self._name = name
        self._points = points

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not inspect.ismethod(value):
            return value
        before, after = (f"{when}-{self._name}:{name}" for when in ("before", "after"))
        if not inspect.iscoroutinefunction(value):
            return partial(self._call, value, before, after)
        return partial(self._call_async, value, before, after)

    def _call(self, method: Callable[..., Any], before: str, after: str, *given: Any) -> Any:
        self._points.reach(before)
        result = method(*given)
        self._points.reach(after)
        return result

    async def _call_async(
        self,
        method: Callable[..., Awaitable[Any]],
        before: str,
        after: str,
        *given: Any,
        **named: Any,
    ) -> Any:
        await self._points.reach_async(before)
        result = await method(*given, **named)
        await self._points.reach_async(after)
        return result


class PointedStorage:
    """A Storage with a point before and after every save."""

    def __init__(self, inner: Storage, points: Points) -> None:
        self._inner = inner
        self._points = points

    def save(self, name: str, data: bytes) -> None:
        self._points.reach(f"before-save:{name}")
        self._inner.save(name, data)
        self._points.reach(f"after-save:{name}")

    def load(self, name: str) -> bytes | None:
        return self._inner.load(name)


class PointedTransport:
    """A Transport whose streams have points."""

    def __init__(self, inner: Transport, points: Points) -> None:
        self._inner = inner
        self._points = points

    async def dial(self, address: str, expected: PeerId | None) -> ByteStream:
        return PointedStream(await self._inner.dial(address, expected), self._points)

    async def serve(
        self,
        handler: Callable[[ByteStream], Awaitable[None]],
        *,
        started: Callable[[str], None],
    ) -> None:
        async def pointed(stream: ByteStream) -> None:
            await handler(PointedStream(stream, self._points))

        await self._inner.serve(pointed, started=started)


class PointedStream:
    """A ByteStream with points where frames begin and end."""

    def __init__(self, inner: ByteStream, points: Points) -> None:
        self._inner = inner
        self._points = points
        self._sent, self._received = FrameTracker(), FrameTracker()

    @property
    def peer(self) -> PeerId:
        return self._inner.peer

    async def send_all(self, data: bytes | memoryview) -> None:
        begun, ended = self._sent.follow(data)
        for name in begun:
            await self._points.reach_async(f"before-send:{name}")
        await self._inner.send_all(data)
        for name in ended:
            await self._points.reach_async(f"after-send:{name}")

    async def receive_some(self, max_bytes: int) -> bytes:
        data = await self._inner.receive_some(max_bytes)
        await self._note_received(data)
        return data

    async def receive_into(self, buffer: memoryview) -> int:
        count = await self._inner.receive_into(buffer)
        await self._note_received(buffer[:count])
        return count

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _note_received(self, data: bytes | memoryview) -> None:
        for name in self._received.follow(data)[1]:
            await self._points.reach_async(f"received:{name}")


class FrameTracker:
    """Tells where frames begin and end in one direction of a stream."""

    def __init__(self) -> None:
        self._prefix = bytearray()
        self._missing_bytes = 0
        """Of the frame whose prefix is whole."""

    def follow(self, data: bytes | memoryview) -> tuple[list[str], list[str]]:
        """Return the names of the messages whose prefixes, and whose last bytes, are in `data`."""
        begun, ended = [], []
        start = 0
        while start < len(data):
            if len(self._prefix) < PREFIX_BYTES:
                stop = min(len(data), start + PREFIX_BYTES - len(self._prefix))
                self._prefix += data[start:stop]
                if len(self._prefix) == PREFIX_BYTES:
                    _, *rest = PREFIX.unpack(self._prefix)
                    self._missing_bytes = sum(rest)
                    begun.append(self._name())
            else:
                stop = min(len(data), start + self._missing_bytes)
                self._missing_bytes -= stop - start
            start = stop
            if len(self._prefix) == PREFIX_BYTES and not self._missing_bytes:
                ended.append(self._name())
                self._prefix.clear()
        return begun, ended

    def _name(self) -> str:
        message = BY_NUMBER.get(self._prefix[0])
        return message.__name__ if message is not None else f"{self._prefix[0]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
