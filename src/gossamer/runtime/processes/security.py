"""Authentication of nodes to each other, and of workers that join a run.

**Workers and the coordinator** both know the token of the run, and neither sends it. The worker connects over
TLS 1.3, where the coordinator presents a certificate made for this run. Then both prove that they know the
token, by an HMAC (SHA-256) over the certificate that each of them sees and a nonce of the worker
(``JoinRequest``, ``Welcome``). A man in the middle would have to present another certificate, for which the
proofs are invalid. An impostor coordinator receives one proof, against which it can test guesses of the token
offline. So a token has at least 16 characters, and a generated one has 128 bits.

**Nodes** use mutual TLS 1.3 with an Ed25519 key and a self-signed certificate for each rank, which the
coordinator issues. Workers get the keys of their own nodes and the certificates of all. TLS trusts exactly
these certificates, and after the handshake the certificate must be that of the rank that the peer claims.
Sessions are never resumed, so every connection proves its key. The dates in certificates are ignored: keys
are valid for one run."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import secrets
import ssl
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

from gossamer.errors import BadInput

NONCE_BYTES = 32
MIN_CHARACTERS = 16
_SINCE = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)  # "no end" in RFC 5280
_NO_CHECK_TIME = 0x20_0000  # X509_V_FLAG_NO_CHECK_TIME, for which the module ssl has no name


def new_token() -> str:
    """A random token of 128 bits."""
    return secrets.token_urlsafe(16)


def check_token(token: str) -> str:
    """Return the token. Raises BadInput if it is too short."""
    if len(token) < MIN_CHARACTERS:
        raise BadInput(f"token: {len(token)} characters; accepted: at least {MIN_CHARACTERS}, hard to guess")
    return token


def proof(token: str, side: str, certificate: bytes, nonce: bytes) -> bytes:
    """The proof of a side ("worker" or "coordinator") that it knows the token."""
    signed = b"".join((side.encode().ljust(16), hashlib.sha256(certificate).digest(), nonce))
    return hmac.new(token.encode(), signed, hashlib.sha256).digest()


class TLSIdentity(NamedTuple):
    """A key and its certificate."""

    pem: bytes  # both, as OpenSSL reads them
    certificate: bytes  # DER


def issue() -> TLSIdentity:
    """Issue a new key."""
    from cryptography import x509  # large, and needed only here
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    public = key.public_key()
    # TLS looks up trusted certificates by this name, so it must be unique.
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, public.public_bytes_raw().hex()[:32])])
    certificate = (
        x509.CertificateBuilder(name, name, public, x509.random_serial_number(), _SINCE, _UNTIL)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, None)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem = private + certificate.public_bytes(serialization.Encoding.PEM)
    return TLSIdentity(pem, certificate.public_bytes(serialization.Encoding.DER))


class Security:
    """A node's key (:attr:`TLSIdentity.pem`), and the certificates of all ranks (DER)."""

    def __init__(self, pem: bytes, certificates: Sequence[bytes]) -> None:
        self._pem, self._certificates = pem, certificates
        self.server = context(ssl.PROTOCOL_TLS_SERVER, pem, certificates)
        self.client = context(ssl.PROTOCOL_TLS_CLIENT, pem, certificates)

    def belongs_to(self, certificate: bytes | None, rank: int) -> bool:
        return (
            certificate is not None
            and 0 <= rank < len(self._certificates)
            and hmac.compare_digest(certificate, self._certificates[rank])
        )

    def sign(self, data: bytes) -> bytes:
        """This rank's signature (Ed25519)."""
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        key: Any = load_pem_private_key(self._pem, None)
        return bytes(key.sign(data))

    def verify(self, rank: int, data: bytes, signature: bytes) -> bool:
        """Whether this is a valid signature by a rank, whose certificate has its key."""
        if not 0 <= rank < len(self._certificates):
            return False
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature

        key: Any = x509.load_der_x509_certificate(self._certificates[rank]).public_key()
        try:
            key.verify(signature, data)
        except InvalidSignature:
            return False
        return True


def context(protocol: int, pem: bytes | None, trusted: Sequence[bytes]) -> ssl.SSLContext:
    """A TLS 1.3 context without resumption. ``pem`` holds this end's key and certificate; None is for a
    client without them. ``trusted`` holds the trusted certificates (DER). If it is empty, no certificate is
    requested, and any server is trusted: the caller must check it."""
    tls_context = ssl.SSLContext(protocol)
    tls_context.minimum_version = tls_context.maximum_version = ssl.TLSVersion.TLSv1_3
    tls_context.check_hostname = False  # the certificate itself is expected, not a name in it
    tls_context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        tls_context.num_tickets = 0
    if pem is not None:
        with tempfile.NamedTemporaryFile() as file:  # private; the module ssl reads keys only from files
            file.write(pem)
            file.flush()
            tls_context.load_cert_chain(file.name)
    tls_context.verify_mode = ssl.CERT_REQUIRED if trusted else ssl.CERT_NONE
    tls_context.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
    if trusted:
        tls_context.load_verify_locations(cadata=b"".join(trusted))
    return tls_context
