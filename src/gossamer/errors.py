"""The errors that gossamer raises on purpose.

::

    GossamerError
    ├── BadInput     what the user gave can't be run: exit code 2, one clear line a problem
    └── RunFailed    a run started and could not be finished: exit code 1, recorded rows are kept
        └── Deadlock     every node waits and nothing can wake one
"""

from __future__ import annotations

import difflib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType


class GossamerError(Exception):
    """Base of everything that gossamer raises on purpose."""


class BadInput(GossamerError):
    """An experiment, file or argument that can't be used, found before work starts.

    Args:
        problems: one line each, naming the field, the value and what is accepted.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class RunFailed(GossamerError):
    """A run that could not be finished.

    Args:
        message: one line that names the cause.
        node: rank of the node that failed, if one did.
        round: the round that the node was in, if one did.
        traceback: the node's traceback as text, where there is one.

    Attributes:
        folder: where what was recorded is kept, once that is known.
    """

    folder: Path | None = None

    def __init__(
        self, message: str, *, node: int | None = None, round: int | None = None, traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.node = node
        self.round = round
        self.traceback = traceback


class Deadlock(RunFailed):
    """Every node waits and no event is left that could wake one; the message names who waits for what."""


def suggest(wrong: str, accepted: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the nearest accepted name, or nothing when none is near."""
    near = difflib.get_close_matches(wrong, list(accepted), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def listed(names: Sequence[str]) -> str:
    """Names as a sorted, comma separated list."""
    return ", ".join(sorted(names))


def shown(value: object) -> str:
    """A value as messages show it: of what a file leaves empty, it says so."""
    return "null (empty)" if value is None else repr(value)


def cause(error: BaseException) -> str:
    """An error in one line: type, message, and the line of code that raised it, or what it is raised from: of the user's own,
    where that called the rest."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = traceback.extract_tb(error.__cause__.__traceback__) if error.__cause__ else []
    frame = next(
        (each for each in (*reversed(frames), *reversed(inner)) if _is_own(each.filename)),
        frames[-1] if frames else None,
    )
    # (A syntax error says by itself where it is.)
    where = (
        f" ({Path(frame.filename).name}, line {frame.lineno})"
        if frame and not isinstance(error, SyntaxError)
        else ""
    )
    message = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' + message if message else ''}{where}"


def is_own(error: BaseException) -> bool:
    """Whether the user's own code raised an error, not what it called."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_own(frames[-1].filename)


def own_frame() -> FrameType | None:
    """The user's own code that has called what runs now, where any has: the innermost frame of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


_NOT_OWN = tuple(
    folder + os.sep
    for folder in {
        str(Path(__file__).parent),
        *(sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib")),
    }
)


def _is_own(file: str) -> bool:
    """Whether a file with code is the user's: no part of gossamer, of Python or of an installed library."""
    if file.startswith("<"):  # generated code, but for what is typed at a prompt
        return file.startswith(("<stdin", "<ipython", "<python-input"))
    return not file.startswith(_NOT_OWN)
