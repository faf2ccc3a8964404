"""Peer records as they lie in the DHT: signed, then encrypted under a key of swarm and run.

The rule: whatever comes out of the DHT is hostile until `open` has returned it. The expiry is
bound into the encryption, so nobody outside the swarm can make an old record look fresh.
"""

import math
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.invitation import dht_key
from protocol.packing import canonical, unpack
from protocol.records import (
    PEER_RECORD_PURPOSE,
    PeerRecord,
    RunId,
    Signed,
    open_signed,
    sign_record,
)
from protocol.signing import Identity

MAX_SEALED_BYTES = 16 * 1024
RECORD_SECONDS = 90.0
"""Lifetime of a record; peers publish anew well before."""
MAX_FUTURE_SECONDS = 240.0
"""Readers ignore records that would live longer; the rest forgives clocks that go wrong."""

NONCE_BYTES = 12


class RecordSeal:
    """Seals and opens the peer records of one run."""

    def __init__(self, swarm_key: bytes, run: RunId) -> None:
        self._cipher = ChaCha20Poly1305(dht_key(swarm_key, run))
        self._run = run

    def seal(self, identity: Identity, record: PeerRecord, expiry: float, nonce: bytes) -> bytes:
        """Return `record`, signed by `identity` and encrypted; good until `expiry` (Unix time).

        `nonce` is 12 random bytes. Raises LocalProtocolError if the result is too large.
        """
        signed = canonical(sign_record(identity, PEER_RECORD_PURPOSE, record))
        sealed = nonce + self._cipher.encrypt(nonce, signed, _bound(expiry))
        if len(sealed) > MAX_SEALED_BYTES:
            raise LocalProtocolError(f"peer record of {len(sealed)} bytes is too large")
        return sealed

    def open(self, subkey: object, sealed: object, expiry: object, now: float) -> PeerRecord:
        """Return the record that lay under `subkey` until `expiry`.

        Raises RemoteProtocolError if it is not a record that the peer `subkey` made for this
        run and expiry, or if that is too far away from `now` (Unix time).
        """
        if not isinstance(expiry, float) or not expiry <= now + MAX_FUTURE_SECONDS:  # NaN: no
            raise RemoteProtocolError(f"record expires at {expiry!r}")
        if not isinstance(sealed, bytes) or len(sealed) > MAX_SEALED_BYTES:
            raise RemoteProtocolError("record is not bytes, or too many")
        nonce, encrypted = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:]
        try:
            signed = unpack(self._cipher.decrypt(nonce, encrypted, _bound(expiry)), Signed)
        except (InvalidTag, ValueError) as error:
            raise RemoteProtocolError("record is not of this swarm and run") from error
        record = open_signed(signed, PEER_RECORD_PURPOSE, PeerRecord)
        if not record.run == self._run or not signed.signer == record.peer == subkey:
            raise RemoteProtocolError("record is of another run or another peer")
        return record


def _bound(expiry: float) -> bytes:
    if not math.isfinite(expiry):
        raise ValueError(f"expiry is {expiry}")
    return struct.pack(">d", expiry)
