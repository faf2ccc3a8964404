"""What a plan changes: a body for who has the one before, without what is equal in both.

A body repeats what all members have signed, some kilobytes of each; from plan to plan a few of them
change. The rule: what comes out is the whole body, byte for byte, or nothing: its hash is checked
against the header as that of any other.
"""

import zlib

from msgspec.structs import replace

from protocol.errors import RemoteProtocolError
from protocol.messages import PLAN_CAP_BYTES
from protocol.packing import canonical
from protocol.records import BodyChanges, PlanBody, decode_body, decode_record

LEAST_BYTES = 64 * 1024
"""Smaller bodies travel whole."""
FAST = 1
"""How hard to compress: most of it is repetition."""
MAX_KEPT = 8

_rebuilt: dict[tuple[int, bytes], tuple[PlanBody, bytes]] = {}


def changes_of(before: PlanBody, after: PlanBody) -> bytes:
    """Return what makes the body `after` of `before`."""
    pairs = list(zip(before.members, before.requests, strict=True))
    known = set(pairs)
    now = list(zip(after.members, after.requests, strict=True))
    kept = set(now)
    changes = BodyChanges(
        left=tuple(number for number, pair in enumerate(pairs) if pair not in kept),
        came=tuple(pair for pair in now if pair not in known),
        rest=replace(after, members=(), requests=()),
    )
    return zlib.compress(canonical(changes), FAST)


def rebuilt_body(before: PlanBody, changes: bytes) -> bytes:
    """Return the body that `changes_of` was made of, in its canonical bytes.

    Raises RemoteProtocolError if the changes are malformed or too large."""
    key = id(before), changes
    known = _rebuilt.get(key)
    if known is not None and known[0] is before:
        return known[1]
    body = _applied(before, _unzipped(changes))
    data = decode_body(canonical(body))[0]
    if len(_rebuilt) >= MAX_KEPT:
        del _rebuilt[next(iter(_rebuilt))]
    _rebuilt[key] = before, data
    return data


def _unzipped(changes: bytes) -> BodyChanges:
    inflating = zlib.decompressobj()
    try:
        data = inflating.decompress(changes, PLAN_CAP_BYTES)
    except zlib.error as error:
        raise RemoteProtocolError(f"changes of a plan do not decompress: {error}") from error
    if not inflating.eof:
        raise RemoteProtocolError(f"changes of a plan exceed {PLAN_CAP_BYTES} bytes")
    return decode_record(data, BodyChanges)


def _applied(before: PlanBody, changes: BodyChanges) -> PlanBody:
    left = set(changes.left)
    pairs = [
        pair
        for number, pair in enumerate(zip(before.members, before.requests, strict=True))
        if number not in left
    ]
    pairs += changes.came
    pairs.sort(key=lambda pair: pair[0].signer)
    return replace(
        changes.rest,
        members=tuple(record for record, _ in pairs),
        requests=tuple(request for _, request in pairs),
    )
