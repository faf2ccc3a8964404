"""Frames: what was framed is unframed, and every limit holds from the prefix on."""

import struct
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import protocol.messages
from protocol.codec import (
    PREFIX_BYTES,
    FramePrefix,
    decode_header,
    decode_prefix,
    encode,
    payload_bytes_of,
)
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.messages import (
    BY_NUMBER,
    TABLE,
    Certified,
    Channel,
    Goodbye,
    Kind,
    Message,
    Ping,
    StateChunk,
    tensors_of,
)
from protocol.records import CertifiedPlan, TensorSpec
from tests.protocol.strategies import any_of

LIMIT = 1 << 20


def said_classes() -> set[type[Message]]:
    """Return the messages of the protocol: those classes that are no base of another."""
    classes = [
        value
        for value in vars(protocol.messages).values()
        if isinstance(value, type) and issubclass(value, Message)
    ]
    return {kind for kind in classes if not kind.__subclasses__()}


# --- the table --------------------------------------------------------------------------------


def test_every_message_is_in_the_table_and_nothing_else() -> None:
    assert set(TABLE) == said_classes()


def test_every_number_is_one_byte_and_names_one_type() -> None:
    numbers = [kind.number for kind in TABLE.values()]
    assert len(set(numbers)) == len(numbers)
    assert all(0 < number < 256 for number in numbers)
    assert {BY_NUMBER[kind.number]: kind for kind in TABLE.values()} == TABLE


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_types_with_tensors_are_those_that_may_have_a_payload(kind: type[Message]) -> None:
    assert TABLE[kind].has_payload == ("tensors" in kind.__struct_fields__)
    assert TABLE[kind].channel in (None, *get_args(Channel))


# --- frames -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_what_was_framed_is_unframed(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(any_of(kind))
    frame = encode(message)
    channel = TABLE[kind].channel or data.draw(st.sampled_from(get_args(Channel)))
    prefix = decode_prefix(frame[:PREFIX_BYTES], channel, LIMIT)
    assert prefix == (kind, len(frame) - PREFIX_BYTES, payload_bytes_of(message))
    assert encode(decode_header(prefix, frame[PREFIX_BYTES:])) == frame
    assert sum(spec.nbytes for spec in tensors_of(message)) == prefix.payload_bytes


def test_a_frame_is_a_number_two_lengths_and_a_header() -> None:
    frame = encode(StateChunk(id=3, total=9, tensors=(TensorSpec("int32", (2,)),)))
    header = b"\x84\xa2id\x03\xa5total\x09\xa7refusal\xa0\xa7tensors"
    header += b"\x91\x82\xa5dtype\xa5int32\xa5shape\x91\x02"
    assert frame == bytes([35, 0, 0, 0]) + struct.pack("!IQ", len(header), 8) + header


def test_a_message_that_is_larger_than_its_type_may_be_is_our_fault() -> None:
    with pytest.raises(LocalProtocolError, match="Goodbye of 8203 bytes exceeds 8192"):
        encode(Goodbye(fault="x" * 8193))


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_the_prefix_alone_says_whether_a_frame_is_too_large(kind: type[Message]) -> None:
    how = TABLE[kind]
    channel: Channel = how.channel or "control"
    largest = LIMIT if how.has_payload else 0
    whole = struct.pack("!B3xIQ", how.number, how.header_cap_bytes, largest)
    assert decode_prefix(whole, channel, LIMIT) == (kind, how.header_cap_bytes, largest)
    with pytest.raises(RemoteProtocolError, match=f"{kind.__name__} header of .* exceeds"):
        decode_prefix(
            struct.pack("!B3xIQ", how.number, how.header_cap_bytes + 1, 0), channel, LIMIT
        )
    with pytest.raises(RemoteProtocolError, match=f"{kind.__name__} payload of .* is too large"):
        decode_prefix(struct.pack("!B3xIQ", how.number, 0, largest + 1), channel, LIMIT)


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_every_type_travels_on_its_own_connection_only(kind: type[Message]) -> None:
    how = TABLE[kind]
    prefix = struct.pack("!B3xIQ", how.number, 0, 0)
    for channel in get_args(Channel):
        if how.channel in (None, channel):
            assert decode_prefix(prefix, channel, 0).kind is kind
        else:
            with pytest.raises(RemoteProtocolError, match=f"on the {channel} connection"):
                decode_prefix(prefix, channel, 0)
    assert decode_prefix(prefix, None, 0).kind is kind  # not known yet: Connection sees to it


@pytest.mark.parametrize("number", sorted(set(range(256)) - set(BY_NUMBER)))
def test_an_unknown_type_is_refused(number: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"unknown message type {number}"):
        decode_prefix(struct.pack("!B3xIQ", number, 0, 0), "bulk", LIMIT)


@pytest.mark.parametrize("announced", [0, 23, 25, LIMIT])
def test_the_payload_is_as_long_as_the_tensors_say(announced: int) -> None:
    message = StateChunk(total=24, tensors=(TensorSpec("float64", (3,)),))
    header = encode(message)[PREFIX_BYTES:]
    assert decode_header(FramePrefix(StateChunk, len(header), 24), header) == message
    with pytest.raises(RemoteProtocolError, match=f"announces {announced} .* have 24"):
        decode_header(FramePrefix(StateChunk, len(header), announced), header)


def test_sizes_beyond_all_reason_are_refused_like_others() -> None:
    spec = TensorSpec("float64", (2**53,) * 64)
    assert spec.nbytes > 2**64  # no prefix can announce it
    header = encode(StateChunk(total=1, tensors=(TensorSpec("uint8", ()),)))[PREFIX_BYTES:]
    huge = header.replace(
        b"\xa5uint8\xa5shape\x90", b"\xa5uint8\xa5shape\xdc\x00\x40" + b"\xce\xff\xff\xff\xff" * 64
    )
    with pytest.raises(RemoteProtocolError, match="announces 1 payload bytes"):
        decode_header(FramePrefix(StateChunk, len(huge), 1), huge)


def test_thousands_of_dimensions_are_refused_before_they_are_multiplied() -> None:
    """Their product has more digits than Python is willing to print."""
    header = encode(StateChunk(total=1, tensors=(TensorSpec("uint8", ()),)))[PREFIX_BYTES:]
    largest = b"\xcf\x00\x20\x00\x00\x00\x00\x00\x00"  # 2**53
    huge = header.replace(b"\xa5shape\x90", b"\xa5shape\xdc\x03\x20" + largest * 800)
    with pytest.raises(RemoteProtocolError, match="does not decode"):
        decode_header(FramePrefix(StateChunk, len(huge), 1), huge)


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=PREFIX_BYTES, max_size=PREFIX_BYTES), st.integers(0, LIMIT), st.data())
def test_any_prefix_is_refused_or_keeps_the_limits(
    prefix: bytes, limit: int, data: st.DataObject
) -> None:
    number = data.draw(st.sampled_from(sorted(BY_NUMBER)) | st.integers(0, 255))
    try:
        found = decode_prefix(bytes([number]) + prefix[1:], None, limit)
    except RemoteProtocolError:
        return
    how: Kind = TABLE[found.kind]
    assert found.header_bytes <= how.header_cap_bytes
    assert found.payload_bytes <= (limit if how.has_payload else 0)


def test_messages_without_tensors_have_no_specs() -> None:
    assert tensors_of(Ping(number=1)) == ()
    assert tensors_of(Certified(plan=CertifiedPlan(b"", b"", None))) == ()
