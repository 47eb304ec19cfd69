"""Keeps track of the nodes that have reported each evaluation point, while nodes leave and return."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

Moment = int | tuple[str, int] | str
"""An evaluation point, by which rows belong together: a node's round, ("tick", k) for an instant on the time grid, or
"end"."""

T = TypeVar("T")


class Barrier(Generic[T]):
    """Gathers a value of every node for each evaluation point. A node reports its evaluation points in ascending order.

    Args:
        ranks: the nodes; others are ignored.
        most: evaluation points that are open at most; before another one is opened, the oldest is given up.
    """

    def __init__(self, ranks: Iterable[int], most: int | None = None) -> None:
        self.ranks = frozenset(ranks)
        self._there = set(self.ranks)
        self._most = most
        self._first: dict[int, tuple[int, int]] = {}  # from which round and tick a node that returned reports
        self._missing: dict[Moment, set[int]] = {}
        self._values: dict[Moment, dict[int, T]] = {}
        self._skipped: set[Moment] = set()
        self._past: dict[bool, int] = {}  # the last complete round, and the last complete tick

    def take(self, moment: Moment, rank: int, value: T) -> dict[int, T] | None:
        """A node's value; returns all values of the evaluation point, by rank, if it is the last one."""
        if rank not in self._there or moment in self._skipped or self._is_past(moment, rank):
            return None
        if moment not in self._missing:
            self._missing[moment] = {each for each in self._there if self._reports(each, moment)}
            self._values[moment] = {}
            if self._most is not None and len(self._missing) > self._most:
                self.skip(next(iter(self._missing)))
        self._values[moment][rank] = value
        self._missing[moment].discard(rank)
        return self._completed(moment)

    def skip(self, moment: Moment) -> None:
        """A node's value can't be had: the evaluation point will not be complete."""
        self._missing.pop(moment, None)
        self._values.pop(moment, None)
        self._skipped.add(moment)

    def without(self, rank: int, *, keep: bool = False) -> list[tuple[Moment, dict[int, T]]]:
        """A node is gone; gives the evaluation points that waited for it alone.

        Args:
            rank: the node.
            keep: whether its values count nevertheless, where others are still missing.
        """
        self._there.discard(rank)
        self._first.pop(rank, None)
        complete: list[tuple[Moment, dict[int, T]]] = []
        for moment in list(self._missing):
            self._missing[moment].discard(rank)
            if not keep:
                self._values[moment].pop(rank, None)
            if values := self._completed(moment):
                complete.append((moment, values))
        return complete

    def back(self, rank: int, round: int, tick: int) -> None:
        """A node takes part (again): it reports its rounds and the ticks from these on."""
        if rank not in self.ranks:
            return
        self._there.add(rank)
        self._first[rank] = round, tick
        for moment, missing in self._missing.items():
            if self._reports(rank, moment):
                missing.add(rank)

    def _reports(self, rank: int, moment: Moment) -> bool:
        if rank not in self._first or isinstance(moment, str):
            return True
        round, tick = self._first[rank]
        return moment >= round if isinstance(moment, int) else moment[1] >= tick

    def _is_past(self, moment: Moment, rank: int) -> bool:
        """Whether a moment was complete before a node returned, or comes before those that it reports."""
        if not self._first or isinstance(moment, str):
            return False
        number = moment if isinstance(moment, int) else moment[1]
        return number <= self._past.get(isinstance(moment, int), -1) or not self._reports(rank, moment)

    def _completed(self, moment: Moment) -> dict[int, T] | None:
        if self._missing.get(moment, True):
            return None
        del self._missing[moment]
        if not isinstance(moment, str):
            self._past[isinstance(moment, int)] = moment if isinstance(moment, int) else moment[1]
        return dict(sorted(self._values.pop(moment).items()))
