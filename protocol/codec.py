"""Frames: bytes <-> messages, with every limit checked before memory is taken.

A frame is a prefix of 16 bytes (type number, header length, payload length), a MessagePack
header and the raw bytes of its tensors. The cap of the header depends on the type, that of the
payload on the connection, and the payload must be as long as the header's tensor specs say.
"""

import struct
from typing import NamedTuple

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.messages import BY_NUMBER, TABLE, Channel, Message, tensors_of
from protocol.packing import canonical, unpack

PREFIX = struct.Struct("!B3xIQ")
PREFIX_BYTES = PREFIX.size


class FramePrefix(NamedTuple):
    """What is known of a frame before its header has arrived."""

    kind: type[Message]
    header_bytes: int
    payload_bytes: int


def payload_bytes_of(message: Message) -> int:
    """Return the number of raw bytes that follow `message`."""
    return sum(spec.nbytes for spec in tensors_of(message))


def encode(message: Message) -> bytes:
    """Return prefix and header of `message`; its tensors' bytes must follow.

    Raises LocalProtocolError if the message is larger than its type may be.
    """
    known = _encoded.get(id(message))
    if known is not None and known[0] is message:
        return known[1]
    kind = TABLE[type(message)]
    header = canonical(message)
    if len(header) > kind.header_cap_bytes:
        raise LocalProtocolError(
            f"{type(message).__name__} of {len(header)} bytes exceeds {kind.header_cap_bytes}"
        )
    frame = PREFIX.pack(kind.number, len(header), payload_bytes_of(message)) + header
    if len(frame) >= LARGE_BYTES:
        if len(_encoded) >= MAX_KEPT:
            del _encoded[next(iter(_encoded))]
        _encoded[id(message)] = message, frame
    return frame


LARGE_BYTES = 4096
MAX_KEPT = 4
_encoded: dict[int, tuple[Message, bytes]] = {}
"""The last large messages: who tells everybody something encodes it once."""


def decode_prefix(
    prefix: bytes | bytearray | memoryview, channel: Channel | None, max_payload_bytes: int
) -> FramePrefix:
    """Check a frame's prefix (16 bytes) against the limits of its type and connection.

    `channel` is None while it is not known, which is before Hello.
    Raises RemoteProtocolError if the type is unknown, travels on the other connection, or
    announces more bytes than it may have.
    """
    number, header_bytes, payload_bytes = PREFIX.unpack(prefix)
    message = BY_NUMBER.get(number)
    if message is None:
        raise RemoteProtocolError(f"unknown message type {number}")
    kind = TABLE[message]
    name = message.__name__
    if channel is not None and kind.channel not in (None, channel):
        raise RemoteProtocolError(f"{name} on the {channel} connection")
    if header_bytes > kind.header_cap_bytes:
        raise RemoteProtocolError(
            f"{name} header of {header_bytes} bytes exceeds {kind.header_cap_bytes}"
        )
    if payload_bytes > (max_payload_bytes if kind.has_payload else 0):
        raise RemoteProtocolError(f"{name} payload of {payload_bytes} bytes is too large")
    return FramePrefix(message, header_bytes, payload_bytes)


def decode_header(prefix: FramePrefix, header: bytes | bytearray | memoryview) -> Message:
    """Decode a frame's header. Raises RemoteProtocolError if it is not what it claims to be."""
    message = unpack(header, prefix.kind)
    if payload_bytes_of(message) != prefix.payload_bytes:
        raise RemoteProtocolError(
            f"{prefix.kind.__name__} announces {prefix.payload_bytes} payload bytes, "
            f"its tensors have {payload_bytes_of(message)}"
        )
    return message


def pack_forwarded(message: Message) -> bytes:
    """Return a message without tensors as another peer passes it on: its number and header."""
    return TABLE[type(message)].number.to_bytes(2, "big") + canonical(message)


def unpack_forwarded(frame: bytes) -> Message:
    """Return the message in a forwarded frame. Raises RemoteProtocolError if it is none."""
    kind = BY_NUMBER.get(int.from_bytes(frame[:2], "big"))
    if kind is None or len(frame) - 2 > TABLE[kind].header_cap_bytes:
        raise RemoteProtocolError(f"forwarded frame of {len(frame)} bytes is no message")
    message = unpack(frame[2:], kind)
    if payload_bytes_of(message):
        raise RemoteProtocolError(f"forwarded {kind.__name__} announces tensors")
    return message
