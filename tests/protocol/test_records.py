"""Records: one encoding, one hash; signed bytes are what was signed, and for one purpose."""

import hashlib
import itertools
from typing import get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import RemoteProtocolError
from protocol.packing import canonical
from protocol.records import (
    BALLOT_PURPOSE,
    ITEM_BYTES,
    JOIN_REQUEST_PURPOSE,
    MAX_TEXT_CHARS,
    MAX_VOTERS,
    PEER_RECORD_PURPOSE,
    Certificate,
    Generation,
    LayerProfile,
    Manifest,
    ModelSpec,
    PeerRecord,
    Signed,
    TensorSpec,
    clip,
    council_hash,
    decode_record,
    open_signed,
    sign_record,
)
from protocol.signing import Identity
from tests.protocol.strategies import any_of

ALICE = Identity.from_seed(b"a" * 32)
BOB = Identity.from_seed(b"b" * 32)
RECORD = PeerRecord(
    run=b"r" * 32,
    peer=ALICE.peer,
    boot=3,
    addresses=("192.0.2.1:31337",),
    dht_addresses=(),
    sequence=1,
)
PURPOSES = (BALLOT_PURPOSE, PEER_RECORD_PURPOSE, JOIN_REQUEST_PURPOSE)


def test_purposes_differ() -> None:
    assert len(set(PURPOSES)) == len(PURPOSES)


def test_a_signed_record_is_read_back() -> None:
    signed = sign_record(ALICE, PEER_RECORD_PURPOSE, RECORD)
    assert signed.signer == ALICE.peer
    assert open_signed(signed, PEER_RECORD_PURPOSE, PeerRecord) == RECORD


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_signature_covers_every_bit_and_the_purpose(data: st.DataObject) -> None:
    signed = sign_record(ALICE, PEER_RECORD_PURPOSE, RECORD)
    name = data.draw(st.sampled_from(["payload", "signature"]))
    changed = bytearray(getattr(signed, name))
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(RemoteProtocolError, match="bad peer-record signature claimed by"):
        open_signed(
            msgspec.structs.replace(signed, **{name: bytes(changed)}),
            PEER_RECORD_PURPOSE,
            PeerRecord,
        )


def test_a_signature_is_of_one_signer_for_one_purpose() -> None:
    signed = sign_record(ALICE, PEER_RECORD_PURPOSE, RECORD)
    with pytest.raises(RemoteProtocolError, match="bad ballot signature"):
        open_signed(signed, BALLOT_PURPOSE, PeerRecord)
    for signer in (BOB.peer, "", "nobody", "1" * 64):
        with pytest.raises(RemoteProtocolError, match="bad peer-record signature"):
            open_signed(
                msgspec.structs.replace(signed, signer=signer), PEER_RECORD_PURPOSE, PeerRecord
            )


@pytest.mark.parametrize("signature", [b"", b"x", b"x" * 63, b"x" * 65, b"x" * 1000])
def test_a_signature_of_another_length_is_refused(signature: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="bad ballot signature"):
        open_signed(Signed(b"\x80", ALICE.peer, signature), BALLOT_PURPOSE, PeerRecord)


def test_signed_bytes_that_are_another_record_are_refused() -> None:
    signed = sign_record(ALICE, PEER_RECORD_PURPOSE, Generation(1, b""))
    with pytest.raises(RemoteProtocolError, match="PeerRecord does not decode"):
        open_signed(signed, PEER_RECORD_PURPOSE, PeerRecord)


@settings(max_examples=40, deadline=None)
@given(any_of(Manifest))
def test_the_run_id_is_the_hash_of_the_bytes_that_travel(manifest: Manifest) -> None:
    received = canonical(manifest)
    again = decode_record(received, Manifest)
    assert again.run == manifest.run == hashlib.sha256(received).digest()
    other = msgspec.structs.replace(manifest, founder=manifest.founder[:63] + "x")
    assert (other.run == manifest.run) == (other.founder == manifest.founder)


def test_the_run_id_does_not_depend_on_the_order_of_arguments() -> None:
    one = ModelSpec("a:b", {"width": 1, "depth": [1, 2]})
    other = ModelSpec("a:b", {"depth": [1, 2], "width": 1})
    assert hashlib.sha256(canonical(one)).digest() == hashlib.sha256(canonical(other)).digest()


def test_a_council_is_named_with_its_order_and_its_boundaries() -> None:
    assert council_hash(("a", "b")) == council_hash(("a", "b"))
    councils = [("a", "b"), ("b", "a"), ("ab",), ("a", "b", "b"), ()]
    assert len({council_hash(council) for council in councils}) == len(councils)


def test_generations_are_totally_ordered_by_number_then_nonce() -> None:
    ordered = [Generation(0, b""), Generation(1, b"a"), Generation(1, b"b"), Generation(2, b"")]
    assert all(sorted([b, a]) == [a, b] for a, b in itertools.combinations(ordered, 2))


# --- tensors ----------------------------------------------------------------------------------


def test_every_dtype_has_a_size() -> None:
    assert set(get_args(get_type_hints(TensorSpec)["dtype"])) == set(ITEM_BYTES)


@pytest.mark.parametrize(
    ("dtype", "shape", "elements", "size"),
    [
        ("float32", (2, 3, 5), 30, 120),
        ("bfloat16", (7,), 7, 14),
        ("int64", (), 1, 8),
        ("bool", (4, 0), 0, 0),
    ],
)
def test_the_size_of_a_tensor(dtype: str, shape: tuple[int, ...], elements: int, size: int) -> None:
    spec = msgspec.convert({"dtype": dtype, "shape": shape}, TensorSpec)
    assert (spec.elements, spec.nbytes) == (elements, size)


# --- bounds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e10])
def test_measured_times_are_numbers_that_a_plan_can_be_made_of(seconds: float) -> None:
    profile = LayerProfile("embed", seconds, 0.1, 4, TensorSpec("float32", (1,)))
    with pytest.raises(RemoteProtocolError, match="forward_seconds"):
        decode_record(canonical(profile), LayerProfile)


def test_a_certificate_names_a_bounded_number_of_signers() -> None:
    """Checking a signature costs more than sending one."""
    full = Certificate(b"", ((ALICE.peer, b"s" * 64),) * MAX_VOTERS)
    assert decode_record(canonical(full), Certificate) == full
    longer = Certificate(b"", (*full.signatures, (BOB.peer, b"")))
    with pytest.raises(RemoteProtocolError, match="length <= 64"):
        decode_record(canonical(longer), Certificate)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("addresses", ("192.0.2.1:1",) * 65),
        ("addresses", ("x" * 201,)),
        ("addresses", ("",)),
        ("host_label", "x" * 201),
        ("peer", "x" * 65),
        ("boot", 0),
    ],
)
def test_a_peer_record_cannot_fill_a_plan(name: str, value: object) -> None:
    with pytest.raises(RemoteProtocolError, match=name):
        decode_record(canonical(msgspec.structs.replace(RECORD, **{name: value})), PeerRecord)


@given(st.text(max_size=9), st.integers(0, 1000))
def test_a_clipped_text_fits(text: str, times: int) -> None:
    whole = text * times
    if len(whole) <= MAX_TEXT_CHARS:
        assert clip(whole) == whole
    else:
        assert clip(whole) == whole[: MAX_TEXT_CHARS - 1] + "…"
