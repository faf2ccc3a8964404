"""The other process of the transport benchmark: it listens, answers, and computes when told to.

Run as `python -m benchmarks.far FOLDER LARGEST_BYTES`: prints its addresses as JSON,
then does what its standard input says, line by line, and ends with it.
"""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import trio

from benchmarks.computing import computing
from benchmarks.streams import (
    FAR,
    NEAR,
    LinkEnd,
    choose_congestion_control,
    payload_of,
    serve_hivemind,
    serve_trio_tls,
)
from swarm.adapters.asyncio_thread import AsyncioThread

COMPUTE, REST = b"compute", b"rest"
DONE = b"done"


class Far:
    """The far process as the near one sees it."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        assert process.stdout is not None
        self._lines = _lines(process.stdout)
        self.addresses: dict[str, Any] = {}
        """By what listens there: HOST:PORT, or a list of multiaddresses."""

    async def hear(self) -> bytes:
        """Return its next line."""
        return await anext(self._lines)

    async def tell(self, command: bytes) -> None:
        """Give a command and wait until it is done."""
        assert self._process.stdin is not None
        await self._process.stdin.send_all(command + b"\n")
        assert await self.hear() == DONE


@asynccontextmanager
async def open_far(folder: Path, largest_bytes: int) -> AsyncIterator[Far]:
    """Start the far process, which sends no more than `largest_bytes` in a message; end it when
    the block ends."""
    command = [sys.executable, "-m", "benchmarks.far", str(folder), str(largest_bytes)]
    process = await trio.lowlevel.open_process(command, stdin=PIPE, stdout=PIPE)
    try:
        far = Far(process)
        far.addresses = json.loads(await far.hear())
        yield far
    finally:
        with trio.CancelScope(shield=True):
            assert process.stdin is not None and process.stdout is not None
            await process.stdin.aclose()
            await process.wait()
            await process.stdout.aclose()


async def _lines(stream: trio.abc.ReceiveStream) -> AsyncIterator[bytes]:
    rest = b""
    async for data in stream:
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line


# --- inside the far process -------------------------------------------------------------------


async def _main(folder: Path, largest_bytes: int) -> None:
    choose_congestion_control()
    thread = AsyncioThread("hivemind")
    try:
        async with trio.open_nursery() as nursery:
            end = LinkEnd(FAR, NEAR.peer, folder)
            addresses = {
                "link": await nursery.start(end.run),
                "trio": await nursery.start(serve_trio_tls, folder),
                "hivemind": await nursery.start(serve_hivemind, thread),
            }
            payload_of(largest_bytes)  # made now, not while something is measured
            print(json.dumps(addresses), flush=True)
            await _obey()
            nursery.cancel_scope.cancel()
    finally:
        await thread.aclose()


async def _obey() -> None:
    lines = _lines(trio.lowlevel.FdStream(0))
    async for line in lines:
        if line == COMPUTE:
            async with computing():
                print(DONE.decode(), flush=True)
                assert await anext(lines) == REST
            print(DONE.decode(), flush=True)


if __name__ == "__main__":
    trio.run(_main, Path(sys.argv[1]), int(sys.argv[2]))
