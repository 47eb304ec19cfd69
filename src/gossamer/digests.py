"""Hashes of files. A file is read again only if its size, one of its times or its inode has changed, so the hash of
gigabytes costs a look at their names. (Size and time of modification are not enough: both survive ``cp -p`` and
``rsync``. The time of the change of the inode can't be set.)"""

from __future__ import annotations

import errno
import hashlib
import logging
import secrets
import stat
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from gossamer import files
from gossamer.errors import BadInput

log = logging.getLogger("gossamer")

SMALL = 2**20
"""Bytes below which hashing files is as fast as looking up their hashes on disk."""
_SETTLED_NS = 2 * 10**9
"""How long ago the last change of a file must be. Two changes within a tick of the file system's clock look alike."""
_CHUNK = 2**20


class _Stamp(NamedTuple):
    """What changes with a file's contents."""

    path: str
    size: int
    modified_ns: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> _Stamp:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # it may have no end
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return cls(str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


_known: dict[_Stamp, str] = {}


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal. OSError if it can't be read."""
    return digests([path])[0]


def digests(paths: Sequence[Path]) -> list[str]:
    """The SHA-256 of each file, in hexadecimal. OSError if one can't be read. Hashes of large files are kept in the cache
    folder, those of one call together."""
    stamps = [_Stamp.of(path) for path in paths]
    if all(stamp in _known for stamp in stamps):
        return [_known[stamp] for stamp in stamps]
    large = sum(stamp.size for stamp in stamps) >= SMALL
    kept = files.cache_folder() / "digests" / f"{hashlib.sha256(repr(stamps).encode()).hexdigest()}.json"
    if large and (read := _read(kept, len(paths))) is not None:
        _known.update(zip(stamps, read, strict=True))
        return read
    computed = [_known.get(stamp) or _sha256(path) for path, stamp in zip(paths, stamps, strict=True)]
    now_ns = int(datetime.now(UTC).timestamp() * 1e9)
    if all(stamp.changed_ns < now_ns - _SETTLED_NS for stamp in stamps) and stamps == list(
        map(_Stamp.of, paths)
    ):
        _known.update(zip(stamps, computed, strict=True))
        if large:
            _store(kept, computed)
    return computed


def combined(names: Sequence[str], hashes: Sequence[str]) -> str:
    """One hash of named files."""
    listed = "".join(f"{name} {hash_}\n" for name, hash_ in zip(names, hashes, strict=True))
    return hashlib.sha256(listed.encode()).hexdigest()


def _sha256(path: Path) -> str:
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
    return hashed.hexdigest()


def _read(kept: Path, count: int) -> list[str] | None:
    """The hashes that are kept in a file of the cache; None without a readable one."""
    if not kept.exists():
        return None
    try:
        hashes: list[str] = files.read_json(kept, dict[str, list[str]], cap=files.MAX_ROWS_BYTES)["sha256"]
    except (BadInput, KeyError) as error:
        log.warning("kept hashes can't be read, and are computed again (%s)", error)
        return None
    return hashes if len(hashes) == count else None


def _store(kept: Path, hashes: Sequence[str]) -> None:
    """Keep hashes. A failure is only logged, since it merely makes the next run slower."""
    part = kept.with_suffix(f".{secrets.token_hex(8)}.part")
    quoted = ", ".join(f'"{hash_}"' for hash_ in hashes)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(files.seal(b'{"sha256": [%s]}' % quoted.encode())[0])
        part.replace(kept)
    except OSError as error:
        log.warning("hashes of files can't be kept (%s); set GOSSAMER_CACHE to a writable folder", error)
