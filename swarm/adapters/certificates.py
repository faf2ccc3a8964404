"""The swarm's certificate authority, which every peer derives, and each peer's own certificate.

The rule: a certificate proves two things, that its holder knows the swarm key and that it owns
the Ed25519 key inside. Nothing else in it is believed. Everything is derived, nothing drawn:
two peers with one swarm key build the same authority, to the bit. Validity spans from 2000 to
9999, so a wrong clock keeps nobody out; leaving a swarm for good means a new swarm key.
"""

import ssl
import tempfile
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protocol.errors import RemoteProtocolError
from protocol.invitation import authority_seed
from protocol.records import sha256
from protocol.signing import Identity, PeerId, peer_id_of

_VALID_FROM = datetime(2000, 1, 1)
_VALID_UNTIL = datetime(9999, 12, 31, 23, 59, 59)  # RFC 5280: no well-defined expiration
_AUTHORITY_NAME = "swarm"


def authority_certificate(swarm_key: bytes) -> bytes:
    """Return the authority's own certificate (DER); its private key stays in `swarm_key`."""
    authority = Identity.from_seed(authority_seed(swarm_key))
    usage = _key_usage(certificates=True)
    builder = _builder(authority, _AUTHORITY_NAME, authority)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    return builder.sign(authority.private_key, None).public_bytes(Encoding.DER)


def peer_certificate(identity: Identity, swarm_key: bytes) -> bytes:
    """Return the certificate (PEM) of `identity`, signed by the swarm's authority."""
    authority = Identity.from_seed(authority_seed(swarm_key))
    roles = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = _builder(identity, identity.peer, authority)
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    builder = builder.add_extension(_key_usage(certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(roles), critical=False)
    return builder.sign(authority.private_key, None).public_bytes(Encoding.PEM)


def peer_of(certificate: bytes | None) -> PeerId:
    """Return the peer that owns the key in `certificate` (DER), whose chain was verified.

    Raises RemoteProtocolError if the key is not an Ed25519 key.
    """
    try:
        key = x509.load_der_x509_certificate(certificate or b"").public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise RemoteProtocolError(f"certificate does not parse: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise RemoteProtocolError("certificate is not for an Ed25519 key")
    return peer_id_of(key.public_bytes(Encoding.Raw, PublicFormat.Raw))


def configure(context: ssl.SSLContext, identity: Identity, swarm_key: bytes, folder: Path) -> None:
    """Make `context` speak TLS 1.3 as `identity` with members of the swarm, and nothing else.

    The ssl module takes private keys from files only: one of mode 0600 is in `folder` while
    this function runs.
    """
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the key in the certificate is the name
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority_certificate(swarm_key))
    private_key = identity.private_key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    with tempfile.NamedTemporaryFile(dir=folder, prefix="tls-", suffix=".pem") as file:
        file.write(private_key + peer_certificate(identity, swarm_key))
        file.flush()
        context.load_cert_chain(file.name)


def _builder(subject: Identity, name: str, authority: Identity) -> x509.CertificateBuilder:
    issuer_key = authority.private_key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _AUTHORITY_NAME)]))
        .public_key(subject.private_key.public_key())
        .serial_number(int.from_bytes(sha256(subject.public_key)[:16]) | 1)
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_UNTIL)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(subject.private_key.public_key()),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False
        )
    )


def _key_usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not certificates,
        key_cert_sign=certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
