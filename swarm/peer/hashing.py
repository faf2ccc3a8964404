"""SHA-256 of what may be large, beside the event loop: nobody's heartbeat waits for it.

The rule: what is small is hashed at once. So a world on a virtual clock, where all is small, needs
no threads.
"""

import trio

from protocol.records import sha256
from swarm.ports import Buffer

LARGE_BYTES = 128 * 1024
"""Hashed in less than a millisecond."""


async def hash_of(data: Buffer) -> bytes:
    """Return SHA-256 of `data` (32 bytes), which must not change meanwhile."""
    if data.nbytes < LARGE_BYTES:
        return sha256(data)
    return await trio.to_thread.run_sync(sha256, data, abandon_on_cancel=True)
