"""Hypothesis strategies made from the schemas themselves: any valid value of any struct.

Tensors are kept small, because their bytes have to follow the message.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

import protocol.invitation
import protocol.messages
import protocol.records
from protocol.codec import encode, payload_bytes_of
from protocol.connection import PROTOCOL_VERSION
from protocol.messages import TABLE, Channel, Hello, Message
from protocol.records import TensorSpec
from swarm.core.agreement import HardState

S = TypeVar("S", bound=msgspec.Struct)

RUN = bytes(range(32))
MAX_ITEMS = 3
MAX_CHARS = 12

small_tensors = st.builds(
    TensorSpec,
    st.sampled_from(sorted(protocol.records.ITEM_BYTES)),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
)


def _all_structs() -> Iterator[type[msgspec.Struct]]:
    for module in (protocol.records, protocol.messages, protocol.invitation):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, msgspec.Struct):
                yield value
    yield HardState


STRUCTS: Sequence[type[msgspec.Struct]] = sorted(
    set(_all_structs()) - {msgspec.Struct}, key=lambda kind: kind.__qualname__
)
"""Every struct that travels or is kept, bases included."""


def any_of(kind: type[S]) -> st.SearchStrategy[S]:
    """Return a strategy of valid values of a struct."""
    strategy: st.SearchStrategy[S] = _values(inspect.type_info(kind))
    return strategy


def messages_on(channel: Channel) -> st.SearchStrategy[Message]:
    """Return a strategy of everything that may be said after Hello on a connection."""
    kinds = [kind for kind, how in TABLE.items() if how.channel in (None, channel)]
    return st.sampled_from([kind for kind in kinds if kind is not Hello]).flatmap(any_of)


def hello_on(channel: Channel) -> Hello:
    """Return the Hello of a peer of the run RUN."""
    return Hello(version=PROTOCOL_VERSION, run=RUN, channel=channel, boot=1)


def frame(message: Message, fill: int = 7) -> bytes:
    """Return a whole frame whose tensors consist of the byte `fill`."""
    return encode(message) + bytes([fill]) * payload_bytes_of(message)


def _values(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.StructType(cls=cls) if cls is TensorSpec:
            return small_tensors
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: _values(field.type) for field in fields})
        case inspect.IntType():
            low = info.ge if info.ge is not None else -(2**63)
            return st.integers(low, _highest(info))
        case inspect.FloatType(ge=None, gt=None, le=None):
            return st.floats()
        case inspect.FloatType(ge=ge, gt=gt, le=le):
            least = gt if ge is None else ge
            return st.floats(least, le, exclude_min=gt is not None, allow_nan=False)
        case inspect.StrType(min_length=low, max_length=high):
            return st.text(min_size=low or 0, max_size=min(high or MAX_CHARS, MAX_CHARS))
        case inspect.BytesType(min_length=low, max_length=high):
            least = low or 0
            return st.binary(min_size=least, max_size=max(least, min(high or 40, 40)))
        case inspect.VarTupleType(item_type=item, max_length=high):
            most = min(high or MAX_ITEMS, MAX_ITEMS)
            return st.lists(_values(item), max_size=most).map(tuple)
        case _:
            return _compound(info)


def _compound(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.ListType(item_type=item):
            return st.lists(_values(item), max_size=MAX_ITEMS)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(_values, items))
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_values(key), _values(value), max_size=MAX_ITEMS)
        case inspect.UnionType(types=types):
            return st.one_of(*map(_values, types))
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case _:
            raise NotImplementedError(f"no strategy of {info}")


def _highest(info: inspect.IntType) -> int:
    if info.lt is not None:
        return info.lt - 1
    return info.le if info.le is not None else 2**63 - 1
