"""Calls without ``await``, which do nothing: Python warns of them, a run fails by them."""

from __future__ import annotations

import asyncio
import opcode
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TextIO

from gossamer.node import Node, NodeRuntime

_UNAWAITED = "coroutine '(.+)' was never awaited"
_PATTERN = re.compile(_UNAWAITED, re.IGNORECASE)
"""As the filter below compiles it, which finds it done: here, once for all nodes that are forked."""
_DROP = opcode.opmap["POP_TOP"]
"""The instruction after a statement that is nothing but a call."""
_REPLACES = {code for name, code in opcode.opmap.items() if name.startswith("STORE_FAST")}
"""Those that give a variable its next value, when what it held is dropped."""
_NODES_OWN = f"{Node.__name__}."


@contextmanager
def unawaited_calls_fail(nodes: Sequence[NodeRuntime]) -> Iterator[None]:
    """Where a node fails whose task has a call that gives a coroutine for a statement, without ``await``: of :class:`Node`,
    or of its author's own; and where what a variable has of :class:`Node` makes room for another value. Of coroutines that
    are dropped elsewhere Python goes on to warn: that may be meant, as where what they were made for is cancelled first.

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
        found = _PATTERN.match(str(message)) if issubclass(category, RuntimeWarning) else None
        if found is not None and (filename, lineno) in failed:
            return
        frame = None if found is None else _at(filename, lineno)
        node = None if found is None or frame is None or not _forgotten(found[1], frame) else _at_work(nodes)
        if found is None or frame is None or node is None:
            shown(message, category, filename, lineno, file, line)
            return
        failed.add((filename, lineno))
        error = RuntimeError(f"{found[1]} was called without await, and so did nothing")
        node.fail(error.with_traceback(TracebackType(None, frame, frame.f_lasti, lineno)))

    with warnings.catch_warnings():
        warnings.filterwarnings("always", _UNAWAITED, RuntimeWarning)
        shown, warnings.showwarning = warnings.showwarning, show
        yield


def _forgotten(name: str, frame: FrameType) -> bool:
    instruction = frame.f_code.co_code[frame.f_lasti]
    return instruction == _DROP or (instruction in _REPLACES and name.startswith(_NODES_OWN))


def _at_work(nodes: Sequence[NodeRuntime]) -> NodeRuntime | None:
    """The node one of whose tasks runs at the moment, in this thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return None
    return next((node for node in nodes if node.owns(task)), None)


def _at(file: str, line: int) -> FrameType | None:
    """The frame in which a line is being run."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (file, line):
        frame = frame.f_back
    return frame
