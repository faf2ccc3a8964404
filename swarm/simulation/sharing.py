"""What the daemons of one simulation do once for all, since they are in one process.

The rule: nothing that a daemon decides depends on it: equal bytes are the same message, which
nobody can change.
"""

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from protocol import codec

LARGE_BYTES = 2048
MAX_KEPT = 64
RARE = (100_000, 50, 100)
"""A thousand daemons are millions of objects that live long: looking for garbage among them again
and again takes a fifth of the time."""


@contextmanager
def shared_work() -> Iterator[None]:
    """Decode large messages once, however many get the same one, and seldom look for garbage; and
    ask for no huge pages: of a hollow tensor one page has memory, which should be a small one."""
    module: Any = codec
    arrays: Any = importlib.import_module("numpy._core.multiarray")
    unpack, thresholds = module.unpack, gc.get_threshold()
    known: dict[tuple[bytes, type], Any] = {}

    def unpack_once(data: bytes | bytearray | memoryview, kind: type) -> Any:
        if len(data) < LARGE_BYTES:
            return unpack(data, kind)
        key = bytes(data), kind
        message = known.get(key)
        if message is None:
            message = unpack(data, kind)
            if len(known) >= MAX_KEPT:
                del known[next(iter(known))]
            known[key] = message
        return message

    module.unpack = unpack_once
    gc.set_threshold(*RARE)
    had_huge_pages = arrays._set_madvise_hugepage(False)
    try:
        yield
    finally:
        arrays._set_madvise_hugepage(had_huge_pages)
        module.unpack = unpack
        gc.set_threshold(*thresholds)
