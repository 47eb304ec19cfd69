"""The peers file: which rank listens where, and by which certificate it is known.

::

    peers:
    - rank: 0
      address: 10.0.0.1:9000            or "[2001:db8::1]:9000", or a host's name
      certificate: MIHnMIGaoAMC...      DER in base64, one line
      fingerprint: sha256:9f86d08...    of the DER; people compare this one

Nothing in it is secret, but whoever can change it decides who is a peer: bring it to every machine by a way that
you trust, or compare the fingerprints. The certificate stands beside its fingerprint because TLS is told whole certificates
to trust.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from gossamer.config.mappings import read_mapping
from gossamer.config.validation import bad_input
from gossamer.errors import BadInput

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]/]+):(\d{1,5})")
_LARGEST = 4096
"""Bytes of a certificate; one of this project's has some 300."""


def fingerprint(certificate: bytes) -> str:
    """``sha256:`` and the digest of a certificate (DER) in hexadecimal."""
    return f"sha256:{hashlib.sha256(certificate).hexdigest()}"


class Peer(BaseModel):
    """One row of the file.

    Args:
        rank: of the node.
        address: where it listens, "host:port"; an IPv6 address stands in brackets.
        certificate: what it is known by, DER in base64.
        fingerprint: of the certificate, as :func:`fingerprint` writes it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(ge=0, strict=True)
    address: str
    certificate: str = Field(repr=False)
    fingerprint: str

    @field_validator("address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        parse_address(value)
        return value

    @field_validator("certificate")
    @classmethod
    def _is_base64(cls, value: str) -> str:
        try:
            der = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError("a certificate (DER) in base64 on one line") from None
        if not 0 < len(der) <= _LARGEST:
            raise ValueError(f"a certificate (DER) of at most {_LARGEST} bytes in base64")
        return value

    @classmethod
    def of(cls, rank: int, address: str, certificate: bytes) -> Peer:
        """The row of a node.

        Raises:
            ValueError: for an address that is none.
        """
        encoded = base64.b64encode(certificate).decode()
        return cls(rank=rank, address=address, certificate=encoded, fingerprint=fingerprint(certificate))

    @property
    def der(self) -> bytes:
        """The certificate's bytes."""
        return base64.b64decode(self.certificate)

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host (without brackets) and port."""
        return parse_address(self.address)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port"; an IPv6 address stands in brackets.

    Raises:
        ValueError: for anything else.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[2]) < 65_536 or not _can_be_looked_up(host := found[1].strip("[]")):
        raise ValueError('"host:port" with a port from 1 to 65535, e.g. 10.0.0.1:9000 or [::1]:9000')
    return host, int(found[2])


def _can_be_looked_up(host: str) -> bool:
    """Whether no label of a name is empty or too long, and nothing in it can't be written."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return host.isprintable()


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    peers: list[Peer] = Field(min_length=1)


class Peers:
    """All nodes of a deployment: rows of rank 0, 1, ..., each with an address and a certificate of its own.

    Args:
        rows: in any order.
        source: where they come from, for messages.

    Raises:
        BadInput: for rows that contradict each other or are not complete.
    """

    def __init__(self, rows: Iterable[Peer], source: str = "peers") -> None:
        self.rows: tuple[Peer, ...] = tuple(sorted(rows, key=lambda row: row.rank))
        problems = _contradictions(self.rows, source)
        missing = sorted(
            set(range(self.rows[-1].rank + 1 if self.rows else 1)) - {row.rank for row in self.rows}
        )
        if missing:
            problems.append(f"{source}: no row for rank {_some(missing)}; accepted: one for each from 0 on")
        if problems:
            raise BadInput(*problems)

    @classmethod
    def load(cls, path: str | Path) -> Peers:
        """Read a peers file.

        Raises:
            BadInput: for a missing file, and anything in it that can't be used.
        """
        return cls(read_rows(path), str(path))

    @classmethod
    def merged(cls, paths: Sequence[str | Path]) -> Peers:
        """What several files say together; a row may stand in more than one of them.

        Raises:
            BadInput: as :meth:`load`, for all of them.
        """
        rows = {row: None for path in paths for row in read_rows(path)}
        return cls(rows, " and ".join(map(str, paths)))

    def __len__(self) -> int:
        return len(self.rows)

    def save(self, path: str | Path) -> None:
        """Write a peers file."""
        write_rows(path, self.rows)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """(host, port) of every rank."""
        return [row.endpoint for row in self.rows]


def read_rows(path: str | Path) -> list[Peer]:
    """The rows of a file, of any ranks, each of them checked.

    Raises:
        BadInput: for a missing file, and rows that can't be used.
    """
    raw = read_mapping(path, "a peers file", "a mapping with the list 'peers'")
    try:
        rows = _File.model_validate(raw).peers
    except ValidationError as error:
        raise bad_input(error, _File, str(path)) from None
    problems = [problem for row in rows for problem in _mismatch(row, f"{path}: rank {row.rank}")]
    if problems:
        raise BadInput(*problems)
    check_certificates(rows, str(path))
    return rows


def write_rows(path: str | Path, rows: Iterable[Peer]) -> None:
    """Write rows, by rank, into a file."""
    listed = [row.model_dump() for row in sorted(rows, key=lambda row: row.rank)]
    Path(path).write_text(yaml.safe_dump({"peers": listed}, sort_keys=False, width=100_000), encoding="utf-8")


def check_certificates(rows: Iterable[Peer], source: str) -> None:
    """Whether TLS can be told to trust each row's certificate.

    Raises:
        BadInput: if not.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for row in {row.certificate: row for row in rows}.values():
        before = context.cert_store_stats()["x509"]
        try:
            context.load_verify_locations(cadata=row.der)
            count = context.cert_store_stats()["x509"] - before
        except ssl.SSLError:
            count = 0
        if count != 1 or not _is_one(row.der):
            raise BadInput(f"{source}: rank {row.rank}: certificate: accepted: one X.509 certificate (DER)")


def _is_one(der: bytes) -> bool:
    """Whether bytes begin with a DER sequence, and end with it."""
    width = (
        der[1] - 0x80 if len(der) > 1 else 0
    )  # bytes of the length, which a certificate's is too large to do without
    return 1 <= width <= 2 and len(der) == 2 + width + int.from_bytes(der[2 : 2 + width], "big")


def _mismatch(row: Peer, where: str) -> list[str]:
    if row.fingerprint == (due := fingerprint(row.der)):
        return []
    return [f"{where}: fingerprint: got {row.fingerprint}; the certificate beside it has {due}"]


def _contradictions(rows: Sequence[Peer], source: str) -> list[str]:
    kinds: list[tuple[str, Callable[[Peer], Any]]] = [
        ("rank", lambda row: row.rank),
        ("address", lambda row: row.address),
        ("certificate", lambda row: row.fingerprint),
    ]
    problems = []
    for what, of in kinds:
        for value, count in Counter(of(row) for row in rows).items():
            if count > 1:
                ranks = [row.rank for row in rows if of(row) == value]
                problems.append(
                    f"{source}: {what} {value} stands in {count} rows (ranks {_some(ranks)}); accepted: in one"
                )
    return problems


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
