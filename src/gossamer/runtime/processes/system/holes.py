"""CpuSlots in memory that is shared with forks: who takes one writes to it, and so copies the page that it lies in."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

POOL = 16 * 1024
"""Bytes from which CPython's allocator gives objects of one size."""
_MOST = 1 << 20
"""Bytes that are taken of each size at most, where another allocator is at work."""
_STEP, _LARGEST = 16, 512
_HEADER = bytes(0).__sizeof__()


def fill_holes() -> list[object]:
    """Objects in all places for small objects that are free between others, as many as a process forked from now on would
    take one by one, with a page of its own for each. Hold them: then its new objects lie together in new pages.
    """
    filled: list[object] = []
    for size in range(_STEP, _LARGEST + 1, _STEP):
        filled += _filled(size, _maker(size))
    return filled


def _maker(size: int) -> Callable[[int], object]:
    """What makes objects of a size, none of which is shared or kept for reuse."""
    if size <= _STEP:
        return lambda number: object()
    if size <= 2 * _STEP:
        return lambda number: 1_000_000 + number
    return lambda number: bytes(size - _HEADER)


def _filled(size: int, make: Callable[[int], object]) -> list[object]:
    """Objects of a size until a pool's worth of them lie one behind the other: new pools are taken last."""
    filled: list[object] = []
    at_once, in_order = POOL // size, 0
    while in_order < 0.9 * at_once and len(filled) * size < _MOST:
        made = [make(number) for number in range(at_once)]
        in_order = sum(id(later) - id(one) == size for one, later in pairwise(made))
        filled += made
    return filled
