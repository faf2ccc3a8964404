"""A plan's body made of the one before it, byte for byte."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.errors import RemoteProtocolError
from protocol.messages import PLAN_CAP_BYTES
from protocol.packing import canonical
from protocol.records import BodyChanges, PlanBody, decode_record
from swarm.core.changes import changes_of, rebuilt_body
from swarm.core.scheduling.planning import first_plan
from tests.core.plans import PEOPLE, candidate, manifest, request

RUN = manifest()


def body(*members: tuple[int, int], reason: str = "") -> PlanBody:
    """Return a plan of these (person, boot)."""
    those = [
        candidate(PEOPLE[who], RUN, request(PEOPLE[who], RUN.run, boot=boot))
        for who, boot in members
    ]
    return replace(first_plan(RUN.training, those, 2), reason=reason or "first")


people = st.dictionaries(st.integers(0, 9), st.integers(1, 3), min_size=2, max_size=8)


@given(people, people)
def test_the_body_comes_out_byte_for_byte(one: dict[int, int], two: dict[int, int]) -> None:
    before, after = body(*sorted(one.items())), body(*sorted(two.items()), reason="another")
    assert rebuilt_body(before, changes_of(before, after)) == canonical(after)


def test_what_is_equal_does_not_travel() -> None:
    before = body(*((who, 1) for who in range(9)))
    after = body(*((who, 1) for who in range(8)))
    changes = decode_record(zlib.decompress(changes_of(before, after)), BodyChanges)
    assert changes.left == (8,)
    assert changes.came == ()
    assert changes.rest.members == changes.rest.requests == ()


def test_whoever_rebuilds_the_same_gets_the_same_bytes_object() -> None:
    before, after = body((0, 1), (1, 1)), body((0, 1), (1, 2))
    first = rebuilt_body(before, changes_of(before, after))
    assert rebuilt_body(before, bytes(bytearray(changes_of(before, after)))) is first


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (b"no zlib", "do not decompress"),
        (zlib.compress(b"\x93"), "does not decode"),
        (zlib.compress(bytes(PLAN_CAP_BYTES + 1)), "exceed"),
        (b"", "exceed"),
    ],
)
def test_what_is_malformed_is_refused(changes: bytes, match: str) -> None:
    with pytest.raises(RemoteProtocolError, match=match):
        rebuilt_body(body((0, 1), (1, 1)), changes)
