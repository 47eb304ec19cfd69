"""Calls without ``await``, which do nothing: Python warns of them, a run fails by them."""

from __future__ import annotations

import asyncio
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TextIO

from gossamer.node import Node

_UNAWAITED = "coroutine '(.+)' was never awaited"


@contextmanager
def unawaited_calls_fail(nodes: Sequence[Node]) -> Iterator[None]:
    """Where a node fails whose task drops a coroutine that was not awaited: a call of :class:`Node`, or one of its author's.
    Of other code's Python goes on to warn.

    Args:
        nodes: those that live meanwhile, in the life that each is in.
    """
    failed: set[tuple[str, int]] = set()  # in these lines; that other nodes do the same need not be said

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        found = re.match(_UNAWAITED, str(message)) if issubclass(category, RuntimeWarning) else None
        if found is not None and (filename, lineno) in failed:
            return
        node = None if found is None else _at_work(nodes)
        if found is None or node is None:
            shown(message, category, filename, lineno, file, line)
            return
        failed.add((filename, lineno))
        error = RuntimeError(f"{found[1]} was called without await, and so did nothing")
        node.fail(error.with_traceback(_at(filename, lineno)))

    with warnings.catch_warnings():
        warnings.filterwarnings("always", _UNAWAITED, RuntimeWarning)
        shown, warnings.showwarning = warnings.showwarning, show
        yield


def _at_work(nodes: Sequence[Node]) -> Node | None:
    """The node one of whose tasks runs at the moment, in this thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return None
    return next((node for node in nodes if node.owns(task)), None)


def _at(file: str, line: int) -> TracebackType | None:
    """A traceback that ends with a line that is being run."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (file, line):
        frame = frame.f_back
    return None if frame is None else TracebackType(None, frame, frame.f_lasti, line)
