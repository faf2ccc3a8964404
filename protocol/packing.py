"""MessagePack in and out: one canonical encoding, and a decoder that hostile bytes cannot hurt.

The rule: nothing is built before the whole structure is known to be backed by bytes that have
arrived. MessagePack lets three bytes announce 65,535 elements; a walk that builds nothing
(`Unpacker.skip`) refuses such claims first. Then msgspec decodes by the schema, and stops at the
first thing that does not fit it: nothing is built that the schema has no place for. Depth is
bounded by the walk's stack and then by the schema.
"""

from typing import TypeVar

import msgpack
import msgspec

from protocol.errors import RemoteProtocolError

S = TypeVar("S", bound=msgspec.Struct)


def canonical(record: msgspec.Struct) -> bytes:
    """Return the one encoding of `record` that is sent, hashed and signed."""
    return msgspec.msgpack.encode(record, order="deterministic")


def unpack(data: bytes | bytearray | memoryview, kind: type[S]) -> S:
    """Decode exactly one `kind` from `data`.

    Raises RemoteProtocolError if the bytes are no MessagePack, claim more than they hold, or
    do not fit the schema.
    """
    try:
        _walk(data)
        return msgspec.msgpack.decode(data, type=kind)
    # Not ValueError as a whole: it would hide a schema of ours that cannot be compiled.
    except (msgpack.UnpackException, msgspec.DecodeError) as error:
        detail = f"{type(error).__name__}: {str(error)[:200]}"
        raise RemoteProtocolError(f"{kind.__name__} does not decode: {detail}") from error


def _walk(data: bytes | bytearray | memoryview) -> None:
    """Raise an UnpackException or RemoteProtocolError unless `data` is one whole object."""
    walker = msgpack.Unpacker(max_buffer_size=max(len(data), 1))
    walker.feed(data)
    walker.skip()
    if walker.tell() != len(data):
        raise RemoteProtocolError(f"{len(data) - walker.tell()} bytes too many")
