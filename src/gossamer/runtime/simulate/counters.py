"""The traffic counters of all nodes: a column of whole numbers for each counter, in which a rank is an index."""

from __future__ import annotations

from array import array

from gossamer.messages.tags import COUNTERS, Traffic

Columns = dict[str, "array[int]"]
"""By name of a counter, its values, int64 [nodes]."""


def columns(nodes: int) -> Columns:
    """Counters that are all 0."""
    return {name: array("q", bytes(8 * nodes)) for name in COUNTERS}


def traffic_of(counters: Columns, rank: int) -> Traffic:
    """A node's counters."""
    return Traffic(*[column[rank] for column in counters.values()])


def total_of(counters: Columns) -> Traffic:
    """The sums over all nodes."""
    return Traffic(*map(sum, counters.values()))


class _Counter:
    """An attribute that is a node's value in a column."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, node: NodeCounters, owner: type) -> int:
        return node.columns[self._name][node.rank]

    def __set__(self, node: NodeCounters, value: int) -> None:
        node.columns[self._name][node.rank] = value


class NodeCounters:
    """One node's view of the counters that it increases itself (:class:`~gossamer.node.host.Counters`)."""

    __slots__ = ("columns", "rank")

    def __init__(self, columns: Columns, rank: int) -> None:
        self.columns, self.rank = columns, rank

    messages_cancelled = _Counter()
    messages_late = _Counter()
    messages_superseded = _Counter()
    messages_taken = _Counter()
    messages_refused = _Counter()
