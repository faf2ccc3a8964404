"""An asyncio loop in a thread of its own, for libraries that need one, called from trio.

The rule: the two loops meet in `finished` only, and nothing of the thread outlives `aclose`.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import trio

log = logging.getLogger(__name__)

T = TypeVar("T")


class AsyncioThread:
    """Runs coroutines of asyncio. The thread lives until `aclose`, or until the process ends."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.SelectorEventLoop()
        self._loop.set_exception_handler(_log_stray)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def finished(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Return when `coroutine` is over: with its result, its exception, or cancelled.

        If the caller is cancelled, so is the coroutine, and nobody waits for that.
        """
        token = trio.lowlevel.current_trio_token()
        over = trio.Event()

        def wake(_: object) -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(over.set)

        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        future.add_done_callback(wake)
        try:
            await over.wait()
        finally:
            future.cancel()
        return future

    async def aclose(self) -> None:
        """Cancel what still runs, and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._thread.join)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()


def _log_stray(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    log.debug("stray fault what=%r fault=%r", context.get("message"), context.get("exception"))
