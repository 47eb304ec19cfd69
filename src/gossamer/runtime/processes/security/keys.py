"""Making keys: an Ed25519 key and a certificate that it signed itself, for each node."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from gossamer.errors import BadInput
from gossamer.runtime.processes.security.peers import parse_address
from gossamer.runtime.processes.security.trust import check_folder, key_file

_RANGE = re.compile(r"(.+:)(\d{1,5})-(\d{1,5})")
# The dates mean nothing (see trust.py), but a certificate must have some. RFC 5280 writes "no end" so.
_SINCE = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


def make_keys(folder: str | Path, ranks: Sequence[int], *, force: bool = False) -> dict[int, bytes]:
    """Make a key file for each rank, in a folder that only its owner may enter.

    Args:
        folder: where to; made if it is not there.
        ranks: of the nodes.
        force: replace keys that are there.

    Returns:
        The certificate (DER) of each rank.

    Raises:
        BadInput: for a folder that others may enter or that can't be written, or keys that are there already.
    """
    place = Path(folder)
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(place)
        there = [path for rank in ranks if (path := key_file(place, rank)).exists()]
        if there and not force:
            more = f" and {len(there) - 1} more" if len(there) > 1 else ""
            raise BadInput(
                f"{there[0]}{more}: there already; accepted: another folder, or --force to replace them"
            )
        return {rank: _make(key_file(place, rank)) for rank in ranks}
    except OSError as error:
        raise BadInput(f"{place}: {error.strerror}; accepted: a folder to write keys in") from None


def _make(path: Path) -> bytes:
    from cryptography import x509  # large, and needed here only
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    public = key.public_key()
    # TLS looks up what it trusts by this name: no two nodes share one.
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, public.public_bytes_raw().hex()[:32])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_SINCE)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, None)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write_private(path, private + certificate.public_bytes(serialization.Encoding.PEM))
    return certificate.public_bytes(serialization.Encoding.DER)


def _write_private(path: Path, content: bytes) -> None:
    """Write a file that was never anybody else's to read, whole or not at all."""
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def expand_addresses(texts: Iterable[str]) -> list[str]:
    """Addresses, one a node; "host:9000-9003" stands for four of them.

    Raises:
        BadInput: for anything that is no address.
    """
    addresses = []
    for text in texts:
        found = _RANGE.fullmatch(text)
        ports = range(int(found[2]), int(found[3]) + 1) if found else ()
        expanded = [f"{found[1]}{port}" for port in ports] if found and ports else [text]
        try:
            for address in expanded:
                parse_address(address)
        except ValueError as error:
            raise BadInput(
                f"--address: got {text!r}; accepted: {error}, or a range of ports, host:9000-9003"
            ) from None
        addresses.extend(expanded)
    return addresses
