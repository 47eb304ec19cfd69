"""A coroutine of ``Node`` that is never awaited fails its node; Python itself only warns."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gossamer.errors import GossamerError
from gossamer.node import Node, NodeRuntime

_UNAWAITED = rf"coroutine '{Node.__name__}\.\w+' was never awaited"


@contextmanager
def unawaited_calls_fail(nodes: Sequence[NodeRuntime]) -> Iterator[None]:
    """Within this context, a node fails if one of its tasks drops a coroutine of :class:`Node` that was never awaited.

    Args:
        nodes: the nodes of this process, by rank; the sequence may change meanwhile.
    """

    def show(message: Warning | str, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        node = None
        if re.fullmatch(_UNAWAITED, str(message)):
            try:
                task = asyncio.current_task()
            except RuntimeError:  # no event loop in this thread
                task = None
            node = next((node for node in nodes if node.owns(task)), None)
        if node is None:
            shown(message, category, filename, lineno, *rest)
        else:
            node.fail(GossamerError(f"{message} ({Path(filename).name}, line {lineno})"))

    with warnings.catch_warnings():
        warnings.filterwarnings("always", _UNAWAITED, RuntimeWarning)
        shown = warnings.showwarning
        warnings.showwarning = show  # type: ignore[assignment]
        yield
