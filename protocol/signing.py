"""Ed25519 identities and domain-separated signatures.

A peer id is the libp2p id of an Ed25519 key: the base58 text of an identity multihash of the
protobuf-encoded public key (libp2p specification, peer-ids). It contains the key, so anyone
can check a signature knowing only the id. Signatures cover the bytes as they were received,
never a re-encoding of them.
"""

from functools import lru_cache
from typing import Annotated

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from msgspec import Meta

from protocol.errors import RemoteProtocolError

PeerId = Annotated[str, Meta(max_length=64)]

# identity multihash (0x00), 36 bytes; protobuf: field 1 = Ed25519 (1), field 2 = 32 key bytes
_PEER_ID_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
_PEER_ID_TEXT_LIMIT = 64  # as in the annotation of PeerId


def peer_id_of(public_key: bytes) -> PeerId:
    """Return the peer id of a raw Ed25519 public key (32 bytes)."""
    return base58.b58encode(_PEER_ID_PREFIX + public_key).decode()


def public_key_of(peer: PeerId) -> bytes:
    """Return the raw public key (32 bytes) inside a peer id.

    Raises RemoteProtocolError if the text is not the id of an Ed25519 key.
    """
    try:
        raw = base58.b58decode(peer) if len(peer) <= _PEER_ID_TEXT_LIMIT else b""
    except ValueError:
        raw = b""
    if len(raw) != len(_PEER_ID_PREFIX) + 32 or not raw.startswith(_PEER_ID_PREFIX):
        raise RemoteProtocolError(f"not the peer id of an Ed25519 key: {peer[:80]!r}")
    return raw[len(_PEER_ID_PREFIX) :]


class Identity:
    """One peer's private key: who it is in the DHT, in TLS and in signatures."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self.private_key = private_key
        self.public_key = private_key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.peer = peer_id_of(self.public_key)

    @classmethod
    def from_seed(cls, seed: bytes) -> "Identity":
        """Return the identity whose raw private key is `seed` (32 bytes)."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    def sign(self, purpose: str, payload: bytes) -> bytes:
        """Return the signature (64 bytes) of `payload` for one purpose only."""
        return self.private_key.sign(_domain(purpose) + payload)


MAX_KEPT_BYTES = 16 * 1024
MAX_KEPT_ANSWERS = 8192


def verify(peer: PeerId, purpose: str, payload: bytes, signature: bytes) -> bool:
    """Return whether `peer` signed `payload` for `purpose`.

    Plans carry the same signatures again and again: the last answers are kept."""
    if len(payload) <= MAX_KEPT_BYTES:
        return _is_signed(peer, purpose, bytes(payload), bytes(signature))
    return _check(peer, purpose, payload, signature)


@lru_cache(maxsize=MAX_KEPT_ANSWERS)
def _is_signed(peer: PeerId, purpose: str, payload: bytes, signature: bytes) -> bool:
    return _check(peer, purpose, payload, signature)


def _check(peer: PeerId, purpose: str, payload: bytes, signature: bytes) -> bool:
    try:
        key = Ed25519PublicKey.from_public_bytes(public_key_of(peer))
        key.verify(signature, _domain(purpose) + payload)
    except (InvalidSignature, ValueError, RemoteProtocolError):
        return False
    return True


def _domain(purpose: str) -> bytes:
    return b"swarm/1/" + purpose.encode() + b"\0"
