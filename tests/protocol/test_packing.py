"""Bytes that come from anywhere decode to what the schema says, or are refused; never worse."""

import math
import struct
import tracemalloc
from collections.abc import Callable
from typing import Annotated

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta, Struct

from protocol.errors import RemoteProtocolError
from protocol.messages import Certified, Forward, Hello, Ping, Prepared, Resume, Totals
from protocol.packing import canonical, unpack
from protocol.records import ModelSpec, PlanHeader, TensorSpec
from tests.protocol.strategies import STRUCTS, any_of

KIB = 1024


class Unusable(Struct):
    """Its bound is beyond what msgspec can convert: no bytes at all decode to it."""

    number: Annotated[int, Meta(lt=2**64)]


def peak_bytes(action: Callable[[], object]) -> int:
    """Return the most memory that was held at once during an action that is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__qualname__)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_struct_is_read_back(kind: type[Struct], data: st.DataObject) -> None:
    value = data.draw(any_of(kind))
    packed = canonical(value)
    for received in (packed, bytearray(packed), memoryview(packed)):
        again = unpack(received, kind)
        assert type(again) is kind
        assert canonical(again) == packed  # not ==, which NaN never is


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__qualname__)
def test_every_struct_refuses_fields_that_it_does_not_know(kind: type[Struct]) -> None:
    with pytest.raises(RemoteProtocolError, match="unknown field"):
        unpack(msgpack.packb({"no such field": 1}), kind)


def test_a_schema_that_does_not_compile_is_our_fault_and_not_the_senders() -> None:
    with pytest.raises(ValueError) as caught:
        unpack(msgpack.packb({"number": 1}), Unusable)
    assert not isinstance(caught.value, RemoteProtocolError | msgspec.MsgspecError)


def test_the_encoding_does_not_depend_on_the_order_in_which_a_dict_was_filled() -> None:
    one = ModelSpec("a:b", {"x": 1, "y": 2})
    other = ModelSpec("a:b", {"y": 2, "x": 1})
    assert canonical(one) == canonical(other)


def test_the_encoding_is_a_map_of_the_fields_in_order() -> None:
    # MessagePack specification: fixmap of one, fixstr of six, positive fixint
    assert canonical(Ping(number=1)) == b"\x81\xa6number\x01"


# --- hostile bytes ------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(STRUCTS))
def test_garbage_is_refused_or_is_valid(data: bytes, kind: type[Struct]) -> None:
    try:
        value = unpack(data, kind)
    except RemoteProtocolError:
        return
    assert unpack(canonical(value), kind) == value


any_object = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20)),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(STRUCTS), st.data())
def test_values_that_do_not_fit_are_refused(kind: type[Struct], data: st.DataObject) -> None:
    fields = {field.name: any_object for field in msgspec.structs.fields(kind)}
    packed = msgpack.packb(data.draw(st.fixed_dictionaries({}, optional=fields)))
    try:
        value = unpack(packed, kind)
    except RemoteProtocolError:
        return
    assert canonical(unpack(canonical(value), kind)) == canonical(value)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(STRUCTS), st.data())
def test_what_is_cut_short_or_has_something_behind_it_is_refused(
    kind: type[Struct], data: st.DataObject
) -> None:
    packed = canonical(data.draw(any_of(kind)))
    with pytest.raises(RemoteProtocolError):
        unpack(packed[: data.draw(st.integers(0, len(packed) - 1))], kind)
    with pytest.raises(RemoteProtocolError, match="bytes too many"):
        unpack(packed + data.draw(st.binary(min_size=1, max_size=9)), kind)


BOMBS = {
    "nested arrays": b"\x91" * 60_000,
    "nested arrays that each claim 65535 elements": b"\xdc\xff\xff" * 20_000,
    "nested arrays that each claim 2**32 - 1 elements": b"\xdd\xff\xff\xff\xff" * 12_000,
    "nested maps": b"\x81" * 60_000,
    "nested maps that each claim 65535 pairs": b"\xde\xff\xff" * 20_000,
    "maps as keys of maps": b"\x81\x80" * 30_000,
    "arrays as keys of maps": b"\x81\x91" * 30_000,
    "many empty maps": b"\xdc\xea\x60" + b"\x80" * 60_000,
    "many empty arrays": b"\xdc\xea\x60" + b"\x90" * 60_000,
    "a string that claims 4 GiB": b"\xdb\xff\xff\xff\xff" + b"a" * 60_000,
    "bytes that claim 4 GiB": b"\xc6\xff\xff\xff\xff" + b"a" * 60_000,
    "an extension that claims 4 GiB": b"\xc9\xff\xff\xff\xff\x05" + b"a" * 60_000,
    "an empty extension": b"\xc7\x00\x05",
    "an empty timestamp": b"\xc7\x00\xff",
    "a timestamp": b"\xd6\xff\x00\x00\x00\x01",
    "the byte that is never used": b"\xc1",
    "nothing": b"",
}


@pytest.mark.parametrize("kind", [Hello, Certified, PlanHeader, Forward])
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_take_hardly_more_memory_than_they_have_bytes(
    bomb: bytes, kind: type[Struct]
) -> None:
    assert peak_bytes(lambda: unpack(bomb, kind)) < 4 * len(bomb) + 256 * KIB


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_inside_a_message_take_hardly_more_memory_than_they_have_bytes(bomb: bytes) -> None:
    """The place of a field that is an array: what stands in it must fit, element by element."""
    packed = b"\x83\xa5fence\x80\xa4step\x00\xa7missing" + bomb
    assert peak_bytes(lambda: unpack(packed, Resume)) < 4 * len(packed) + 256 * KIB


def test_memory_grows_with_the_bytes_that_came_at_the_worst_place_of_all() -> None:
    """One byte per element that becomes a float of 24 and a place of 8."""
    packed = b"\x82\xacsquare_norms\xdc\xea\x60" + b"\x00" * 60_000 + b"\xa4nope\x00"
    assert peak_bytes(lambda: unpack(packed, Prepared)) < 40 * len(packed) + 256 * KIB


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (b"\x81\xa6number\xcf" + b"\xff" * 8, "int"),  # 2**64 - 1
        (b"\x81\xa6number\xcf" + struct.pack("!Q", 2**53 + 1), "int"),
        (b"\x81\xa6number\xff", "int"),  # -1
        (b"\x81\xa6number\xcb" + struct.pack("!d", 0.5), "int"),
        (b"\x81\xa6number\xc3", "int"),  # true
        (b"\x81\xa6number\xa11", "int"),  # "1"
        (b"\x81\xc4\x06number\x01", "str"),  # the key is bytes
        (b"\x81\x01\x01", "str"),
        (b"\x81\xa6numbe\xff\x01", ""),  # the key is no UTF-8
        (b"\x80", "required field `number`"),
        (b"\x91\x01", "object"),
    ],
)
def test_what_does_not_fit_the_schema_is_refused_with_the_reason(
    packed: bytes, reason: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=f"Ping does not decode: .*{reason}"):
        unpack(packed, Ping)


def test_invalid_utf8_is_refused() -> None:
    packed = canonical(ModelSpec("models:xy", {}))
    assert packed.count(b"xy") == 1
    with pytest.raises(RemoteProtocolError):
        unpack(packed.replace(b"xy", b"\xc3\x28"), ModelSpec)
    with pytest.raises(RemoteProtocolError):  # a surrogate
        unpack(packed.replace(b":xy", b"\xed\xa0\x80"), ModelSpec)


def test_a_tensor_has_a_bounded_number_of_dimensions() -> None:
    """Else multiplying them costs a thousand times what sending them costs."""
    shape = (2**53,) * 64
    spec = unpack(canonical(TensorSpec("uint8", shape)), TensorSpec)
    assert spec.nbytes == 2 ** (53 * 64)
    with pytest.raises(RemoteProtocolError, match="length <= 64"):
        unpack(canonical(TensorSpec("uint8", (*shape, 1))), TensorSpec)


@pytest.mark.parametrize("value", [math.nan, -math.inf, -1.0])
def test_totals_have_no_norm_that_is_not_one(value: float) -> None:
    with pytest.raises(RemoteProtocolError, match="square_norm"):
        unpack(canonical(Totals(1, value, (), "apply", None)), Totals)
