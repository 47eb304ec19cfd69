"""Segments: append-only files of JSON lines, one for each writing process.

Each row is passed to the operating system at once, so a killed process loses at most the line it was writing.
A row's checksum (:func:`gossamer.files.seal`) continues that of the previous row, and the first one continues
the checksum of the run's name. Rows that are changed, missing in the middle, or from another run are thus
detected.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from gossamer import files
from gossamer.errors import BadInput, RecordError

_LONGEST_LINE = 2**28

log = logging.getLogger(__name__)


class Segment:
    """Append-only JSON lines. NaN and infinities are kept; numpy and torch scalars and arrays become numbers and lists.

    Opening a segment removes an incomplete last line, which a killed process may leave. A segment that can't
    be opened or written (e.g. because the disk is full) raises :class:`~gossamer.errors.RecordError`. ``run``
    identifies the segment's run.
    """

    def __init__(self, path: Path, run: str = "") -> None:
        self.path = path
        self._crc = zlib.crc32(run.encode())
        try:
            path.parent.mkdir(exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            self._file.seek(0)
            lines = self._file.read()
            end = lines.rfind(b"\n") + 1
            self._file.truncate(end)
        except OSError as error:
            raise RecordError(path, error) from error
        _, crc = files.unseal(lines[lines.rfind(b"\n", 0, max(end - 1, 0)) + 1 : end], None)
        self._crc = self._crc if crc is None else crc

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row and pass it to the operating system. BadInput for a value that is not a number, text,
        boolean, None, or a list or mapping of these."""
        try:
            line = json.dumps(row, default=_plain, separators=(",", ":"), ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise BadInput(f"recorded row with {', '.join(map(str, row))}: {error}") from None
        sealed, crc = files.seal(line.encode(), self._crc)
        remaining = memoryview(sealed + b"\n")
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            with suppress(OSError):  # a later row must not follow a partial one
                written = len(sealed) + 1 - len(remaining)
                self._file.truncate(os.fstat(self._file.fileno()).st_size - written)
            raise RecordError(self.path, error) from error
        self._crc = crc

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_segment(path: Path, run: str | None = None, root: Path | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a segment, in order. An incomplete last line is skipped and logged. BadInput for any other
    line that can't be read, or was moved. ``run`` is the run to which it must belong (None is any)."""
    crc, sealed = zlib.crc32(run.encode()) if run else None, False  # older versions do not seal rows
    with files.opened(path, files.MAX_ROWS_BYTES, root, "a segment") as file:
        for number in count(1):
            if not (line := file.readline(_LONGEST_LINE)):
                return
            if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                log.warning("%s: line %d is torn (its writer was killed) and left out", path, number)
                return
            where = f"{path}, line {number}"
            try:
                text, checksum = files.unseal(line[:-1], crc)
                if checksum is None and sealed:
                    raise ValueError("it has no checksum")
            except ValueError as error:
                raise BadInput(f"{where}: {error}; accepted: rows as they were written") from None
            crc, sealed = checksum, checksum is not None
            yield files.conforming(files.parse_json(text, where), dict[str, Any], where)


def read_appended(path: Path, start: int) -> tuple[list[dict[str, Any]], int]:
    """The complete rows of a segment that is being written, from byte ``start`` on, and the position after
    them. Checksums are not verified. BadInput for a segment that can't be read."""
    with files.opened(path, files.MAX_ROWS_BYTES, path.parent, "a segment") as file:
        file.seek(start)
        lines = file.read()
    end = lines.rfind(b"\n") + 1
    rows = [files.parse_json(files.unseal(line, None)[0], str(path)) for line in lines[:end].splitlines()]
    return rows, start + end


def _plain(value: Any) -> Any:
    """A numpy or torch scalar or array in a form that JSON can represent."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"can't record a {type(value).__name__}; accepted: numbers, text, None, lists, mappings")
