"""MessagePack in and out: one canonical encoding, and a decoder that hostile bytes cannot hurt.

The rule: nothing is built before the whole structure is known to be backed by bytes that have
arrived. MessagePack lets three bytes announce 65,535 elements; a walk that builds nothing
(`Unpacker.skip`) refuses such claims first, so decoding takes memory in proportion to the
input. Depth is bounded by that walk's stack and then by the schema.
"""

from typing import TypeVar

import msgpack
import msgspec

from protocol.errors import RemoteProtocolError

S = TypeVar("S", bound=msgspec.Struct)

MAX_ELEMENTS = 1 << 20


def canonical(record: msgspec.Struct) -> bytes:
    """Return the one encoding of `record` that is sent, hashed and signed."""
    return msgspec.msgpack.encode(record, order="deterministic")


def unpack(data: bytes | bytearray | memoryview, kind: type[S]) -> S:
    """Decode exactly one `kind` from `data`.

    Raises RemoteProtocolError if the bytes are no MessagePack, claim more than they hold, or
    do not fit the schema.
    """
    try:
        walker = msgpack.Unpacker(max_buffer_size=max(len(data), 1))
        walker.feed(data)
        walker.skip()
        if walker.tell() != len(data):
            raise RemoteProtocolError(f"{kind.__name__}: {len(data) - walker.tell()} bytes too many")
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_array_len=MAX_ELEMENTS,
            max_map_len=MAX_ELEMENTS,
            max_ext_len=0,
        )
        return msgspec.convert(value, kind, strict=True)
    except RemoteProtocolError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException, msgspec.MsgspecError) as error:
        detail = f"{type(error).__name__}: {str(error)[:200]}"
        raise RemoteProtocolError(f"{kind.__name__} does not decode: {detail}") from error
