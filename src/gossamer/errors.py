"""The errors that gossamer raises on purpose, and helpers for error messages."""

from __future__ import annotations

import difflib
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class GossamerError(Exception):
    """Base class of all errors that gossamer raises on purpose."""


class BadInput(GossamerError):
    """An invalid experiment, file or argument, detected before work starts if possible. Each problem is one
    line with the field, the value and the accepted values."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems

    def within(self, place: str) -> BadInput:
        """The same problems, prefixed with the place where they occur."""
        return BadInput(*(f"{place}: {problem}" for problem in self.problems))


class RunFailed(GossamerError):
    """A run that could not be finished: one line with the cause; rank, round and traceback of the failed
    node, if any; and the folder of the record, once it is known."""

    folder: Path | None = None

    def __init__(
        self, message: str, *, node: int | None = None, round: int | None = None, traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.node = node
        self.round = round
        self.traceback = traceback


class RecordError(RunFailed, OSError):
    """A file of a record can't be written, e.g. because the disk is full: one line with the file and the
    system's reason. It ends the run, unless the run can do without the file, such as a checkpoint's."""

    def __init__(self, path: Path, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        if (number := re.search(r"\(os error (\d+)\)", reason)) is not None:  # from libraries in Rust
            reason = os.strerror(int(number[1]))
        self.path, self.reason = path, reason
        super().__init__(f"{path} can't be written: {reason}")


class PeerFailure(GossamerError):
    """A failure of a node that a peer has caused, so the node's traceback would not help."""


class Deadlock(RunFailed):
    """Every node waits, and no event is left that could wake one. The message lists what each node waits
    for."""


def suggest(wrong: str, accepted: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the nearest accepted name, which may be in a folder; empty if none is
    near."""
    names = list(accepted)
    inside = [name for name in names if name.endswith(f"/{wrong}")]
    near = inside or difflib.get_close_matches(wrong, names, n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def listed(names: Iterable[str]) -> str:
    """Names as a sorted, comma separated list."""
    return ", ".join(sorted(names))


MAX_SHOWN = 500
"""Maximum number of characters of a value in a message."""


def shown(value: object) -> str:
    """A value as shown in messages, in one line that is cut if it is long. An empty value in a file is "null (empty)"."""
    if value is None:
        return "null (empty)"
    text = " ".join(repr(value).splitlines())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or else its type."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def cause(error: BaseException) -> str:
    """An error in one line: type, message, and the innermost line of the user's own code, including that of
    the error it was raised from. Without such a line, it has the innermost line of any code, unless gossamer
    raised the error on purpose."""
    message = " ".join(str(error).split())  # a syntax error's message has the line
    message = message if len(message) <= _LONGEST else f"{message[: _LONGEST - 1]}…"
    return f"{type(error).__name__}{': ' + message if message else ''}{place(error)}"


def place(error: BaseException) -> str:
    """The place of an error for :func:`cause`, as " (file, line number)"; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = traceback.extract_tb(error.__cause__.__traceback__) if error.__cause__ else []
    own = [frame for frame in (*inner, *frames) if _is_own(frame.filename)]
    if isinstance(error, SyntaxError) or not (own or (frames and not isinstance(error, GossamerError))):
        return ""
    frame = own[-1] if own else frames[-1]
    return f" ({Path(frame.filename).name}, line {frame.lineno})"


def running(frame: FrameType | None) -> str:
    """The line of the user's own code that gossamer has called and a stack of calls has reached, as in :func:`place`; empty
    if there is none."""
    own: FrameType | None = None
    while frame is not None:
        if own is None and _is_own(frame.f_code.co_filename):
            own = frame
        elif own is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            return f" ({Path(own.f_code.co_filename).name}, line {own.f_lineno})"
        frame = frame.f_back
    return ""


def begin_at_own_line(error: BaseException) -> None:
    """Make the traceback of an error, and of those from which it was raised, begin at the first line of the user's own code,
    if there is one. Before it are only the frames of who calls this code, which say nothing about it."""
    chained: BaseException | None = error
    seen = set[int]()
    while chained is not None and id(chained) not in seen:
        seen.add(id(chained))
        step = chained.__traceback__
        while step is not None and not _is_own(step.tb_frame.f_code.co_filename):
            step = step.tb_next
        if step is not None:
            chained.__traceback__ = step
        chained = chained.__cause__ or chained.__context__


@contextmanager
def beginning_at_own_lines() -> Iterator[None]:
    """Make the causes of an error begin at the user's own lines, as a notebook shows them."""
    try:
        yield
    except GossamerError as error:
        begin_at_own_line(error)
        raise


def is_own(error: BaseException) -> bool:
    """Whether the user's own code raised an error, rather than a library that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_own(frames[-1].filename)


_LONGEST = 2_000
"""Most characters of another error's message in a line."""
_PACKAGE = str(Path(__file__).parent) + os.sep
_NOT_OWN = tuple(
    folder + os.sep
    for folder in {
        str(Path(__file__).parent),
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    }
)
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")  # of any environment
_CYTHON = (".pyx", ".pxd", ".pxi")  # its frames have the names of files in a library's source


def _is_own(file: str) -> bool:
    """Whether a code file is the user's, rather than part of gossamer, Python or an installed library."""
    if file.startswith("<"):  # generated code, or code that is typed at a prompt
        return file.startswith(("<stdin", "<ipython", "<python-input"))
    return not (file.startswith(_NOT_OWN) or file.endswith(_CYTHON) or _PACKAGES.search(file))
