"""Who may speak: mutual TLS 1.3 between nodes that know each other's certificates, and nobody else.

There is no authority. Each node has a key and a certificate that it signed itself; the peers file
(:mod:`gossamer.runtime.processes.security.peers`) lists all of them, and TLS is told to trust these very certificates.
After the handshake the certificate must be that of the rank that the peer says it is, so a rank can only speak as itself.
No session is ever resumed: every connection proves its key anew. Dates in certificates mean nothing here; who is
no longer trusted is taken out of the peers file.

A key file is as good as the node: it must be its owner's alone, and so must be the folder that it is in.
"""

from __future__ import annotations

import hmac
import os
import re
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

from gossamer.errors import BadInput
from gossamer.runtime.processes.security.peers import Peers, fingerprint

_NO_CHECK_TIME = 0x20_0000  # X509_V_FLAG_NO_CHECK_TIME, which the module ssl has no name for
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def key_file(folder: str | Path, rank: int) -> Path:
    """Where a node's key and certificate are, in a folder of keys."""
    return Path(folder) / f"node-{rank}.pem"


class Security:
    """What one node proves who it is with, and knows its peers by.

    Args:
        key: its key file (PEM: private key and certificate), as ``gossamer keys`` makes it.
        peers: all nodes.
        rank: this one.

    Raises:
        BadInput: for a key file that is not there, that others may read, that is of another rank, or no key.
    """

    def __init__(self, key: str | Path, peers: Peers, rank: int) -> None:
        if not 0 <= rank < len(peers):
            raise BadInput(f"rank: {rank}; accepted: 0 to {len(peers) - 1}, the ranks of the peers file")
        self.key = Path(key)
        check_private(self.key)
        own = own_certificate(key)
        row = peers.rows[rank]
        if own != row.der:
            raise BadInput(
                f"{key}: its certificate is {fingerprint(own)}, but the peers file has {row.fingerprint} for rank {rank}"
            )
        self._certificates = [row.der for row in peers.rows]
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, key, b"".join(self._certificates))
        self.server.num_tickets = 0
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, key, b"".join(self._certificates))

    def belongs_to(self, certificate: bytes | None, rank: int) -> bool:
        """Whether a certificate (DER) is the one of a rank."""
        return (
            certificate is not None
            and 0 <= rank < len(self._certificates)
            and hmac.compare_digest(certificate, self._certificates[rank])
        )


def _context(protocol: int, key: str | Path, trusted: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is what is expected, not a name in it
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    try:
        context.load_cert_chain(key)
    except (ssl.SSLError, OSError) as error:
        raise BadInput(
            f"{key}: no private key that fits a certificate ({error}); accepted: a key file"
        ) from None
    context.load_verify_locations(cadata=trusted)
    return context


def own_certificate(key: str | Path) -> bytes:
    """The certificate (DER) in a key file.

    Raises:
        BadInput: if there is none.
    """
    try:
        found = _CERTIFICATE.search(Path(key).read_text(encoding="ascii"))
        if found is not None:
            return ssl.PEM_cert_to_DER_cert(found[0])
    except (OSError, ValueError) as error:
        raise BadInput(f"{key}: {error}; accepted: a key file, as `gossamer keys` makes it") from None
    raise BadInput(f"{key}: no certificate in it; accepted: a key file, as `gossamer keys` makes it")


def check_private(key: Path) -> None:
    """A key file and its folder must be this user's, and nobody else's to read or change.

    Raises:
        BadInput: if they are not.
    """
    _check_own(key, stat.S_ISREG, 0o600)
    check_folder(key.absolute().parent)


def check_folder(folder: Path) -> None:
    """The same of a folder of keys alone."""
    _check_own(folder, stat.S_ISDIR, 0o700)


def _check_own(path: Path, is_kind: Callable[[int], bool], accepted: int) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}; accepted: a key file that `gossamer keys` made") from None
    mode = stat.S_IMODE(status.st_mode)
    if not is_kind(status.st_mode):
        raise BadInput(f"{path}: accepted: a key file in a folder of its owner's")
    if status.st_uid != os.geteuid():
        raise BadInput(
            f"{path}: belongs to user {status.st_uid}; accepted: only user {os.geteuid()}, who runs the node"
        )
    if mode & 0o077:
        raise BadInput(
            f"{path}: mode {mode:04o}, which lets others in; accepted: {accepted:04o} (chmod {accepted:o} {path})"
        )
