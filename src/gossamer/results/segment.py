"""Segments: files of JSON lines that are only ever appended to, one for each process that writes.

Each row is handed to the operating system at once, so a process that is killed loses at most the line it was writing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gossamer.errors import BadInput

log = logging.getLogger(__name__)


class RecordError(OSError):
    """Rows can't be written (a full disk, ...): the system's message, and the file."""


class Segment:
    """Append-only JSON lines. NaN and infinities are kept; numpy and torch scalars and arrays become numbers and lists.

    Opening a segment removes an incomplete last line, which a killed process may leave. One that can't be opened or written
    (disk full, ...) raises :class:`RecordError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            self._file.seek(0)
            self._file.truncate(self._file.read().rfind(b"\n") + 1)
        except OSError as error:
            raise RecordError(error.errno, error.strerror, str(path)) from error

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row and hand it to the operating system. A value that is no number, text, boolean, None, or list or
        mapping of these is bad input."""
        try:
            line = json.dumps(row, default=_plain, separators=(",", ":"), ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise BadInput(f"recorded row with {', '.join(map(str, row))}: {error}") from None
        left = memoryview(line.encode() + b"\n")
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise RecordError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_segment(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a segment, in order. An incomplete last line is left out, which is logged; any other line that can't be
    read is bad input."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                log.warning("%s: line %d is torn (its writer was killed) and left out", path, number)
                return
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("not a JSON object")
            except ValueError as error:
                raise BadInput(f"{path}, line {number}: {error}; accepted: one JSON object a line") from None
            yield row


def _plain(value: Any) -> Any:
    """A numpy or torch scalar or array as JSON takes it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"can't record a {type(value).__name__}; accepted: numbers, text, None, lists, mappings")
