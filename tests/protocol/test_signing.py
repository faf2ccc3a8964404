"""Peer ids and signatures, against the vectors of the libp2p specification."""

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import RemoteProtocolError
from protocol.signing import Identity, peer_id_of, public_key_of, verify

# libp2p specification, peer-ids, "Test vectors", Ed25519: protobuf of private and public key
PRIVATE = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)
PUBLIC = bytes.fromhex("080112201ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
# the same specification, "String representation": an Ed25519 and an RSA id
ED25519_ID = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
RSA_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"

seeds = st.binary(min_size=32, max_size=32)


def test_an_identity_has_the_public_key_of_the_specification() -> None:
    identity = Identity.from_seed(PRIVATE[4:36])
    assert identity.public_key == PUBLIC[4:]


def test_a_peer_id_is_the_identity_multihash_of_the_protobuf_key() -> None:
    identity = Identity.from_seed(PRIVATE[4:36])
    assert base58.b58decode(identity.peer) == bytes([0x00, len(PUBLIC)]) + PUBLIC


def test_ids_of_the_specification_are_read() -> None:
    assert peer_id_of(public_key_of(ED25519_ID)) == ED25519_ID
    with pytest.raises(RemoteProtocolError, match="Ed25519"):
        public_key_of(RSA_ID)


@given(seeds)
def test_the_key_comes_back_out_of_the_id(seed: bytes) -> None:
    identity = Identity.from_seed(seed)
    assert public_key_of(identity.peer) == identity.public_key


@given(st.text())
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError):
        public_key_of(text)


@given(seeds, st.binary(max_size=200))
def test_a_signature_holds_for_one_purpose_payload_and_peer(seed: bytes, payload: bytes) -> None:
    identity = Identity.from_seed(seed)
    other = Identity.from_seed(bytes(byte ^ 1 for byte in seed))
    signature = identity.sign("ballot", payload)
    assert verify(identity.peer, "ballot", payload, signature)
    assert not verify(identity.peer, "peer-record", payload, signature)
    assert not verify(identity.peer, "ballot", payload + b"\0", signature)
    assert not verify(other.peer, "ballot", payload, signature)


def test_a_purpose_does_not_flow_into_the_payload() -> None:
    identity = Identity.from_seed(bytes(32))
    assert not verify(identity.peer, "ab", b"c", identity.sign("a", b"bc"))


@given(st.text(max_size=70), st.binary(max_size=80))
def test_nonsense_is_a_bad_signature_and_no_error(peer: str, signature: bytes) -> None:
    assert not verify(peer, "ballot", b"payload", signature)
    assert not verify(ED25519_ID, "ballot", b"payload", signature)
