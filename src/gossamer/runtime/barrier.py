"""Whose report of a moment is still to come: nodes go and come back meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

Moment = int | tuple[str, int] | str
"""What rows belong together by: a node's own round, ("tick", k) for an instant of the grid of time, or "end"."""

T = TypeVar("T")


class _Open(Generic[T]):
    """A moment of which not all have reported."""

    def __init__(self, missing: set[int]) -> None:
        self.missing = missing
        self.values: dict[int, T] = {}


class Barrier(Generic[T]):
    """Gathers a value of every node for each moment. A node's own moments come in ascending order.

    Args:
        ranks: the nodes; others are ignored.
        most: moments that are open at most; before another one is opened, the oldest is given up.
    """

    def __init__(self, ranks: Iterable[int], most: int | None = None) -> None:
        self.ranks = frozenset(ranks)
        self._there = set(self.ranks)
        self._most = most
        self._first: dict[
            int, tuple[int, int]
        ] = {}  # from which round and tick a node that came back reports
        self._open: dict[Moment, _Open[T]] = {}
        self._skipped: set[Moment] = set()
        self._past: dict[bool, int] = {}  # the last complete round, and the last complete tick

    def take(self, moment: Moment, rank: int, value: T) -> dict[int, T] | None:
        """A node's value; gives all of the moment, by rank, when it is the last one."""
        if rank not in self._there or moment in self._skipped or self._is_past(moment, rank):
            return None
        pending = self._open.get(moment)
        if pending is None:
            expected = {each for each in self._there if self._reports(each, moment)}
            pending = self._open[moment] = _Open(expected)
            if self._most is not None and len(self._open) > self._most:
                self.skip(next(iter(self._open)))
        pending.values[rank] = value
        pending.missing.discard(rank)
        return self._completed(moment)

    def skip(self, moment: Moment) -> None:
        """A node's value for a moment can't be had: the moment will not be complete."""
        self._open.pop(moment, None)
        self._skipped.add(moment)

    def without(self, rank: int, *, keep: bool = False) -> list[tuple[Moment, dict[int, T]]]:
        """A node is gone; gives the moments that waited for it alone.

        Args:
            rank: the node.
            keep: whether what it reported counts nevertheless, where others are still missing.
        """
        self._there.discard(rank)
        self._first.pop(rank, None)
        complete: list[tuple[Moment, dict[int, T]]] = []
        for moment, pending in list(self._open.items()):
            pending.missing.discard(rank)
            if not keep:
                pending.values.pop(rank, None)
            values = self._completed(moment)
            if values:
                complete.append((moment, values))
        return complete

    def back(self, rank: int, round: int, tick: int) -> None:
        """A node is there (again): it reports its rounds, and the ticks, from these on."""
        if rank not in self.ranks:
            return
        self._there.add(rank)
        self._first[rank] = round, tick
        for moment, pending in self._open.items():
            if self._reports(rank, moment):
                pending.missing.add(rank)

    def _reports(self, rank: int, moment: Moment) -> bool:
        if rank not in self._first or isinstance(moment, str):
            return True
        round, tick = self._first[rank]
        return moment >= round if isinstance(moment, int) else moment[1] >= tick

    def _is_past(self, moment: Moment, rank: int) -> bool:
        """Whether a moment was complete before a node came back, or comes before those that it reports."""
        if not self._first or isinstance(moment, str):
            return False
        number = moment if isinstance(moment, int) else moment[1]
        return number <= self._past.get(isinstance(moment, int), -1) or not self._reports(rank, moment)

    def _completed(self, moment: Moment) -> dict[int, T] | None:
        pending = self._open.get(moment)
        if pending is None or pending.missing:
            return None
        del self._open[moment]
        if not isinstance(moment, str):
            self._past[isinstance(moment, int)] = moment if isinstance(moment, int) else moment[1]
        return dict(sorted(pending.values.items()))
