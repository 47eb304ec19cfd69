"""Trust between the nodes of one run: mutual TLS 1.3 with a key for each rank, issued for this run.

The coordinator issues the keys: an Ed25519 key and a self-signed certificate for each rank. Workers get the keys of
their nodes, and the certificates of all, over a connection that the run's token authenticates
(:mod:`gossamer.runtime.processes.security.join`). There is no authority: TLS is told to trust exactly these certificates, and
after the handshake the certificate must be that of the rank that the peer claims. So a rank can only speak as itself. No
session is ever resumed: every connection proves its key. Dates in certificates mean nothing here; keys end with their run.
"""

from __future__ import annotations

import datetime
import hmac
import ssl
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gossamer.messages import FrameError

_SINCE = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)  # "no end" in RFC 5280
_NO_CHECK_TIME = 0x20_0000  # X509_V_FLAG_NO_CHECK_TIME, which the module ssl has no name for
_REASONS = {
    "CERTIFICATE_VERIFY_FAILED": "has a key that is none of this run's",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "shows no certificate",
    "UNSUPPORTED_PROTOCOL": "speaks an older TLS; accepted: 1.3",
    "WRONG_VERSION_NUMBER": "does not speak TLS",
    "HTTP_REQUEST": "does not speak TLS",
    "TLSV1_ALERT_UNKNOWN_CA": "does not know this node's key",
}


@dataclass(frozen=True)
class Identity:
    """A key and its certificate.

    Args:
        pem: both, as OpenSSL reads them.
        certificate: DER.
    """

    pem: bytes
    certificate: bytes


def issue() -> Identity:
    """Issue a new key."""
    from cryptography import x509  # large, and needed here only
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    public = key.public_key()
    # TLS looks up what it trusts by this name: no two nodes share one.
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
    return Identity(pem, certificate.public_bytes(serialization.Encoding.DER))


class Security:
    """A node's key, and the certificates of its peers.

    Args:
        pem: its key and certificate (:attr:`Identity.pem`).
        certificates: of every rank (DER).
        rank: this one.

    Raises:
        ValueError: for a key that does not fit the certificate of the rank.
    """

    def __init__(self, pem: bytes, certificates: Sequence[bytes], rank: int) -> None:
        self._certificates = certificates
        self.server = context(ssl.PROTOCOL_TLS_SERVER, pem, certificates)
        self.client = context(ssl.PROTOCOL_TLS_CLIENT, pem, certificates)
        text = pem[pem.index(b"-----BEGIN CERTIFICATE") :].decode("ascii")
        if not self.belongs_to(ssl.PEM_cert_to_DER_cert(text), rank):
            raise ValueError(f"the key is not that of rank {rank}")

    def belongs_to(self, certificate: bytes | None, rank: int) -> bool:
        """Whether a certificate (DER) is the one of a rank."""
        return (
            certificate is not None
            and 0 <= rank < len(self._certificates)
            and hmac.compare_digest(certificate, self._certificates[rank])
        )


def context(protocol: int, pem: bytes | None, trusted: Sequence[bytes]) -> ssl.SSLContext:
    """TLS 1.3 without resumption.

    Args:
        protocol: of a server or a client.
        pem: the own key and certificate; None for a client that shows none.
        trusted: the certificates (DER) that the other end may show; empty asks for none, and trusts any server: the
            caller must check the certificate.
    """
    made = ssl.SSLContext(protocol)
    made.minimum_version = made.maximum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # the certificate itself is expected, not a name in it
    made.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        made.num_tickets = 0
    if pem is not None:
        with tempfile.NamedTemporaryFile() as file:  # private; the module ssl reads keys from files only
            file.write(pem)
            file.flush()
            made.load_cert_chain(file.name)
    made.verify_mode = ssl.CERT_REQUIRED if trusted else ssl.CERT_NONE
    made.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
    if trusted:
        made.load_verify_locations(cadata=b"".join(trusted))
    return made


class Tls:
    """One end of a connection under TLS, without a socket.

    (asyncio's own TLS holds 256 KiB a connection, and a second write buffer from which nothing can be taken back.)

    Args:
        context: the own key, and the trusted certificates.
        server_side: whether the other end dialled.
        secured: called when the handshake is done, before any plain text comes.
    """

    def __init__(
        self, context: ssl.SSLContext, *, server_side: bool, secured: Callable[[], None] = lambda: None
    ) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._end = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._read: Callable[[int, memoryview], int] = self._end.read  # type: ignore[assignment]  # into a buffer
        self._secure, self._secured = False, secured

    @property
    def certificate(self) -> bytes | None:
        """The other end's certificate (DER), after the handshake."""
        return self._end.getpeercert(binary_form=True)

    def begin(self) -> bytes:
        """The first bytes of the side that dialled."""
        list(self.open(b"", memoryview(b"")))
        return self.due()

    def open(self, data: bytes | memoryview, into: memoryview) -> Iterator[memoryview]:
        """Take bytes of the wire, and yield their plain text, each piece in ``into``.

        Raises:
            FrameError: for anything that a peer would not have sent.
        """
        self._incoming.write(data)
        try:
            if not self._secure:
                self._end.do_handshake()
                self._secure = True
                self._secured()
            while length := self._read(len(into), into):
                yield into[:length]
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            return
        except ssl.SSLError as error:
            reason = error.reason or str(error)
            raise FrameError(_REASONS.get(reason, f"broke TLS: {reason}")) from None

    def due(self) -> bytes:
        """The bytes that TLS itself has to send."""
        return self._outgoing.read()

    def seal(self, frame: bytes) -> bytes:
        """The bytes to write to the wire for a frame."""
        self._end.write(frame)
        return self._outgoing.read()
