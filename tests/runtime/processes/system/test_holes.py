"""New objects of a fork lie together, whatever was free between the old ones."""

from __future__ import annotations

import os
import sys
from itertools import pairwise

import pytest

from gossamer.runtime.processes.system.holes import fill_holes


@pytest.mark.skipif(
    sys.implementation.name != "cpython" or "PYTHONMALLOC" in os.environ, reason="places are CPython's own"
)
@pytest.mark.parametrize("size", [64, 160, 512])
def test_what_is_made_after_holes_were_filled_lies_together(size: int) -> None:
    length = size - sys.getsizeof(b"")
    old = [bytes(length) for _ in range(800_000 // size)]
    del old[::2]
    between = [bytes(length) for _ in range(200)]
    filling = fill_holes()
    after = [bytes(length) for _ in range(200)]
    assert neighbours(between, size) < 20  # there were holes to begin with
    assert neighbours(after, size) > 150
    assert filling


def neighbours(objects: list[bytes], size: int) -> int:
    return sum(id(later) - id(one) == size for one, later in pairwise(objects))
