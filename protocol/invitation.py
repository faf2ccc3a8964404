"""The invitation text that lets a peer into a swarm, and the keys that come from the swarm key.

The rule: every key has one use. Each is derived with a label of its own, so that what one of
them protects tells nothing about another.
"""

import base64
import binascii

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protocol.errors import RemoteProtocolError
from protocol.packing import canonical
from protocol.records import Addresses, Hash, Record, RunId, decode_record, sha256

MAX_INVITATION_CHARS = 16384
_PREFIX = "swarm1-"
_CHECKSUM_BYTES = 4


class Invitation(Record, frozen=True):
    """What a newcomer needs: which run, the key that proves membership, whom to ask.

    Whoever reads an invitation can join. Its `repr` does not show the key.
    """

    run: Hash
    swarm_key: Hash
    addresses: Addresses
    """HOST:PORT of peers."""
    dht_addresses: Addresses
    """libp2p multiaddresses of DHT nodes."""

    def encode(self) -> str:
        """Return the invitation as one word of lower-case letters and digits after `swarm1-`."""
        payload = canonical(self)
        return _PREFIX + base64.b32encode(payload + _checksum(payload)).decode().rstrip("=").lower()

    def __repr__(self) -> str:
        return f"Invitation(run={self.run.hex()!r}, addresses={self.addresses!r})"


def parse(text: str) -> Invitation:
    """Return the invitation in `text`; white space and case do not matter.

    Raises RemoteProtocolError with a reason for a person if it is not exactly what `encode`
    returned.
    """
    if len(text) > MAX_INVITATION_CHARS:
        raise RemoteProtocolError("too long for an invitation")
    word = "".join(text.split()).lower()
    if not word.startswith(_PREFIX):
        raise RemoteProtocolError(f"not an invitation: it does not start with {_PREFIX}")
    data = _from_base32(word.removeprefix(_PREFIX))
    payload, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if checksum != _checksum(payload):
        raise RemoteProtocolError("the invitation has a typing error or is cut off")
    invitation = decode_record(payload, Invitation)
    if invitation.encode() != word:
        raise RemoteProtocolError("the invitation has a typing error at its end")
    return invitation


def authority_seed(swarm_key: bytes) -> bytes:
    """Return the private key (32 bytes) of the authority that signs this swarm's certificates."""
    return _derive(swarm_key, b"authority")


def dht_key(swarm_key: bytes, run: RunId) -> bytes:
    """Return the key (32 bytes) that encrypts records of `run` in the DHT."""
    return _derive(swarm_key, b"dht-record\0" + run)


def rendezvous(swarm_key: bytes, run: RunId) -> bytes:
    """Return the DHT key (32 bytes) of the records of `run`, which outsiders cannot guess."""
    return _derive(swarm_key, b"dht-rendezvous\0" + run)


def _derive(swarm_key: bytes, label: bytes) -> bytes:
    return HKDF(SHA256(), length=32, salt=None, info=b"swarm/1/" + label).derive(swarm_key)


def _checksum(payload: bytes) -> bytes:
    return sha256(_PREFIX.encode() + payload)[:_CHECKSUM_BYTES]


def _from_base32(digits: str) -> bytes:
    try:
        return base64.b32decode(digits.upper() + "=" * (-len(digits) % 8))
    except (binascii.Error, ValueError) as error:
        raise RemoteProtocolError("the invitation has a typing error or is cut off") from error
