"""What a process of gossamer needs before it works, however it was started: standard streams, the ends of its children, and a
path of modules on which the standard library comes first.

This module imports only what Python has imported at its own start, so that processes start fast.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from typing import Any

_PLAIN = {"±": "+/-", "×": "x", "−": "-", "–": "-", "·": "-", "…": "...", "≤": "<=", "≥": ">=", "→": "->"}
_PLAIN |= {"µ": "u", "α": "alpha", "β": "beta", "█": "#", "░": "."}
"""What a terminal shows that lacks a character."""
_PATH = "GOSSAMER_PATH"


def begin() -> None:
    """Give this process what a service, a shell or another program may have started it without: open standard streams that
    survive a reader's end and show every character in some way, and children whose exit codes are kept."""
    codecs.register_error("gossamer.plain", _in_plain)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        _provide(descriptor, name)
    import signal
    import threading

    if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _provide(descriptor: int, name: str) -> None:
    """Open a standard stream that is closed, so that no file of the run gets its number, and let its writes succeed."""
    mode = "r" if name == "stdin" else "w"
    try:
        os.fstat(descriptor)
    except OSError:
        nothing = os.open(os.devnull, os.O_RDWR)
        if nothing == descriptor:
            os.set_inheritable(descriptor, True)
        else:
            os.dup2(nothing, descriptor)
            os.close(nothing)
    stream = getattr(sys, name)
    if stream is None:  # Python found it closed; another file may have its number by now
        setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115
    elif name != "stdin" and stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
        stream.flush()
        output: Any = _Output(stream.fileno(), "w", closefd=False)
        if not isinstance(stream.buffer, io.RawIOBase):  # as it is with python -u
            output = io.BufferedWriter(output)
        kept: dict[str, Any] = {
            "line_buffering": stream.line_buffering,
            "write_through": stream.write_through,
        }
        replacement = io.TextIOWrapper(output, stream.encoding, "gossamer.plain", **kept)
        setattr(sys, name, replacement)


class _Output(io.FileIO):
    """A standard stream whose reader may end before the work does, as in ``gossamer sweep FILE | head``, or whose terminal
    may be closed."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._gone = (errno.EPIPE, errno.EIO) if self.isatty() else (errno.EPIPE,)

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in self._gone:
                raise
            return memoryview(data).nbytes


def _in_plain(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that a stream's encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    shown = [_PLAIN.get(char) or char.encode("ascii", "backslashreplace").decode() for char in lacking]
    return "".join(shown), error.end


# --- modules


def is_foreign(entry: str) -> bool:
    """Whether an entry of ``sys.path`` is not of the standard library."""
    library = os.path.dirname(os.__file__)  # noqa: PTH120
    archive = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    folders = (library, os.path.join(library, "lib-dynload"), os.path.join(sys.base_prefix, "DLLs"))  # noqa: PTH118
    return entry not in folders and os.path.basename(entry) != archive  # noqa: PTH119


def make_importable(folder: str) -> None:
    """Find the modules of a folder before installed packages, but after the standard library: a user's ``random.py`` must not
    replace Python's in libraries that import it later."""
    if folder not in sys.path and "" not in sys.path:
        first = next((i for i in reversed(range(len(sys.path))) if not is_foreign(sys.path[i])), -1)
        sys.path.insert(first + 1, folder)


def program(code: str, *arguments: str) -> list[str]:
    """The command of a Python process that executes ``code``. With :func:`environment`, it finds the same modules as this
    one, but the standard library's first. (``PYTHONPATH`` and ``python -m`` would put a user's folders before these.)"""
    path = f"import os, sys; sys.path[:] = os.environ.pop({_PATH!r}).split(os.pathsep)"
    return [sys.executable, "-P", "-c", f"{path}; {code}", *arguments]


def environment(**more: str) -> dict[str, str]:
    """The environment of a :func:`program`, with more variables."""
    path = sorted(filter(None, sys.path), key=is_foreign)
    return {**os.environ, _PATH: os.pathsep.join(path), **more}
