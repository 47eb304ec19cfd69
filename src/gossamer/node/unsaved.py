"""Local variables of an algorithm that no checkpoint has.

A resumed run calls ``run`` from its top again, with ``node.state`` as it was saved. Local variables then have the values that
they had before the first round (or, in a simulation, values of computations that were skipped). So a resumed run loses a
variable whose value changes in a round, unless each round begins by setting it. The node's own model is no such variable.

Only data and generators of random numbers are compared, on rank 0, in the first rounds. A variable that gets its first value
within the rounds may be a temporary one, and is not looked at. An algorithm that keeps anything in ``node.state`` is trusted
to keep there what it needs."""

from __future__ import annotations

import random
import sys
import zlib
from collections import deque
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gossamer.messages import encode, raw

if TYPE_CHECKING:
    from gossamer.node.node import Node

_ROUNDS = 2  # after which nobody looks any more


class UnsavedLocals:
    """Looks at the local variables of the code that iterates over a node's rounds; an event names those that are lost."""

    def __init__(self, node: Node) -> None:
        self._node, self._left = node, _ROUNDS
        self._before: dict[str, int] | None = None

    def look(self, frame: FrameType) -> None:
        """Call it before the first round, and after each."""
        if self._before is None:
            self._before = _data(frame)
        elif self._left > 0:
            model = self._node._own.snapshot()
            self._node._host.settle(model.parameters)
            own = {_checksum(each) for each in (model, *model)}
            now, kept = _data(frame), any(not name.startswith("~") for name in self._node.state)
            lost = [name for name, value in self._before.items() if now.get(name, value) not in (value, *own)]
            self._left = 0 if kept or lost else self._left - 1
            if lost and not kept:
                self._node._runtime.host.event(
                    "unsaved",
                    f"checkpoint: {', '.join(lost)} ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno}) changed in"
                    " a round, and a resumed run has them as they were before the rounds; keep in node.state what must"
                    " outlive a round",
                )


def _data(frame: FrameType) -> dict[str, int]:
    """Checksums of the local variables that are data."""
    found = {name: _checksum(value) for name, value in frame.f_locals.items()}
    if sys.version_info < (3, 13):
        frame.f_locals.clear()  # a copy, which would keep what the variables refer to
    return {name: checksum for name, checksum in found.items() if checksum is not None}


def _checksum(value: Any) -> int | None:
    """A checksum of a payload, an array, a generator or a plain collection of payloads; None for anything else."""
    match value:
        case torch.Generator():
            value = value.get_state()
        case np.random.Generator():
            value = repr(value.bit_generator.state)
        case random.Random():
            value = repr(value.getstate())
    try:
        if isinstance(value, np.ndarray | np.generic):
            value = torch.as_tensor(value)
        encoded = encode(list(value) if isinstance(value, deque | set | frozenset) else value)
    except (TypeError, ValueError):
        return None
    checksum = zlib.crc32(encoded.structure)
    for buffer in encoded.buffers:
        checksum = zlib.crc32(raw(buffer), checksum)
    return checksum
