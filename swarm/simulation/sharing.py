"""What the daemons of one simulation do once for all, since they are in one process.

The rule: nothing that a daemon decides depends on it: equal bytes are the same message, which
nobody can change.
"""

import gc
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
    """Decode large messages once, however many get the same one, and seldom look for garbage."""
    module: Any = codec
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
    try:
        yield
    finally:
        module.unpack = unpack
        gc.set_threshold(*thresholds)
