"""Notes on the files that a run reads: those that its readers name, and those that a user's own code opens."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_WRITES = os.O_WRONLY | os.O_RDWR


class Read(NamedTuple):
    """A file, or the files of a folder (below it too) whose names match one of some patterns, if there are any.
    ``opened``: it may be anything that a user's code has opened."""

    path: Path
    patterns: tuple[str, ...] = ()
    opened: bool = False

    def names(self) -> list[str]:
        """The names of the files relative to the path, in alphabetical order; "" for a file. OSError if there is nothing
        at the path."""
        if not self.path.is_dir():
            self.path.stat()
            return [""]
        found = [
            os.path.relpath(os.path.join(folder, name), self.path)  # noqa: PTH118 - there may be many thousands
            for folder, _, names in os.walk(self.path)
            for name in names
            if any(fnmatch(name, pattern) for pattern in self.patterns or ("*",))
        ]
        return sorted(found)

    def covers(self, path: Path) -> bool:
        """Whether a file is one of these."""
        matches = any(fnmatch(path.name, pattern) for pattern in self.patterns or ("*",))
        return path == self.path or (matches and path.is_relative_to(self.path))


_noted: ContextVar[dict[Read, None] | None] = ContextVar("noted", default=None)
_opened: set[str] | None = None


@contextmanager
def noting() -> Iterator[dict[Read, None]]:
    """Collect what is noted in this context, as the keys of the mapping, in order."""
    noted: dict[Read, None] = {}
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def note(path: Path, patterns: Sequence[str] = (), *, opened: bool = False) -> None:
    """Note that a file, or the files of a folder, are read, so that the run's fingerprint has their hashes. An own task calls
    this for files that it does not open with Python's functions.

    Args:
        path: the file or folder. Files below the folder count too.
        patterns: those files of a folder count whose names match one of these, such as "*.parquet"; none is all files.
        opened: whether it is only known that the file was opened."""
    if (noted := _noted.get()) is not None:
        noted[Read(path, tuple(patterns), opened)] = None


@contextmanager
def noting_opened() -> Iterator[None]:
    """Note the files that Python code opens for reading in this context. Readers that are not written in Python, such as
    that of polars, open files unseen."""
    global _opened
    _listen()
    outer, _opened = _opened, set()
    try:
        yield
    finally:
        opened, _opened = _opened, outer
        for path in sorted(opened):
            if Path(path).is_file():
                note(Path(path), opened=True)


@cache
def _listen() -> None:
    sys.addaudithook(_hear)  # it can't be removed


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open":
        path, _, flags = arguments
        if isinstance(path, str | bytes | os.PathLike) and not (flags or 0) & _WRITES:
            _opened.add(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100 - Path.absolute() costs more
