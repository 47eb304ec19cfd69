"""The errors that gossamer raises on purpose, and how errors are worded."""

from __future__ import annotations

import difflib
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path


class GossamerError(Exception):
    """Base of everything that gossamer raises on purpose."""


class BadInput(GossamerError):
    """An experiment, file or argument that can't be used, found before work starts where that is possible. Each problem is
    one line with the field, the value and the accepted values."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems

    def within(self, place: str) -> BadInput:
        """The same problems, which begin with the place where they are."""
        return BadInput(*(f"{place}: {problem}" for problem in self.problems))


class RunFailed(GossamerError):
    """A run that could not be finished: one line that names the cause; rank, round and traceback of the node that failed, if
    one did; and the folder of the record, once it is known."""

    folder: Path | None = None

    def __init__(
        self, message: str, *, node: int | None = None, round: int | None = None, traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.node = node
        self.round = round
        self.traceback = traceback


class RecordError(RunFailed, OSError):
    """A file of a record can't be written (a full disk, ...): one line with the file and the system's reason. It ends the
    run, unless the run can do without the file, as with one of a checkpoint."""

    def __init__(self, path: Path, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        if (number := re.search(r"\(os error (\d+)\)", reason)) is not None:  # as libraries in Rust put it
            reason = os.strerror(int(number[1]))
        self.path, self.reason = path, reason
        super().__init__(f"{path} can't be written: {reason}")


class PeerFailure(GossamerError):
    """A node fails because of what a peer does, so that no traceback is of use."""


class Deadlock(RunFailed):
    """Every node waits and no event is left that could wake one. The message names what each node waits for."""


def suggest(wrong: str, accepted: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the nearest accepted name, which may be in a folder; empty when none is near."""
    names = list(accepted)
    inside = [name for name in names if name.endswith(f"/{wrong}")]
    near = inside or difflib.get_close_matches(wrong, names, n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def listed(names: Iterable[str]) -> str:
    """Names as a sorted, comma separated list."""
    return ", ".join(sorted(names))


def shown(value: object) -> str:
    """A value as messages show it; the empty value of a file is "null (empty)"."""
    return "null (empty)" if value is None else repr(value)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or else its type."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def cause(error: BaseException) -> str:
    """An error in one line: type, message, and the innermost line of the user's own code, also of the error that it was
    raised from. Without such a line, the innermost line of any code, unless gossamer raised the error on purpose."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = traceback.extract_tb(error.__cause__.__traceback__) if error.__cause__ else []
    own = [frame for frame in (*inner, *frames) if _is_own(frame.filename)]
    where = ""
    if not isinstance(error, SyntaxError) and (own or (frames and not isinstance(error, GossamerError))):
        frame = own[-1] if own else frames[-1]
        where = f" ({Path(frame.filename).name}, line {frame.lineno})"
    message = " ".join(str(error).split())  # that of a syntax error names the line
    return f"{type(error).__name__}{': ' + message if message else ''}{where}"


def is_own(error: BaseException) -> bool:
    """Whether the user's own code raised an error, rather than a library that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_own(frames[-1].filename)


_NOT_OWN = tuple(
    folder + os.sep
    for folder in {
        str(Path(__file__).parent),
        *(sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib")),
    }
)


def _is_own(file: str) -> bool:
    """Whether a file of code is the user's, not a part of gossamer, Python or an installed library."""
    if file.startswith("<"):  # generated code, or code that is typed at a prompt
        return file.startswith(("<stdin", "<ipython", "<python-input"))
    return not file.startswith(_NOT_OWN)
