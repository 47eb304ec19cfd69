"""The bytes that all nodes together have sent, known at every instant."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Any

UNIT = 2**64
"""A byte, in the integers in which the total is kept: adding and removing a message leaves no error."""
ROUNDING = UNIT >> 20  # more than the rounding errors of all rates together, and much less than a byte
MANY_ENDS = 1000  # ends of lines that are kept without removing outdated ones


class SentBytes:
    """The total of a network. It is a sum of lines over time: between two changes of its rate, what a source sends
    leaves evenly. A source is whatever its links choose, such as a message or an uplink. With m lines, a new one costs
    O(log m), and a question costs nothing more, however many nodes there are.

    The total includes the begun bytes of messages that are leaving, which the nodes' own counters leave out, so it may
    exceed the sum of those by one byte for each. When no message is leaving, it equals their sum."""

    def __init__(self) -> None:
        # The line of the total, and of each source: bytes at time 0 and per nanosecond, in units.
        self._at_zero = self._per_ns = 0
        self._lines: dict[Hashable, tuple[int, int]] = {}
        self._ends: list[tuple[int, int, Hashable]] = []  # a heap: end of a line, number and source
        self._numbers: dict[Hashable, int] = {}  # of each source whose line ends: that of its end
        self._number, self._ends_at_most = 0, MANY_ENDS

    def add(self, nbytes: int) -> None:
        """Add bytes that have left at once."""
        self._at_zero += nbytes * UNIT

    def flow(
        self,
        source: Hashable,
        whole: int,
        gone: float,
        per_ns: float,
        since_ns: int,
        end_ns: int | None = None,
    ) -> None:
        """A new line of a source, of which ``whole + gone`` bytes had left at an instant. It holds until ``end_ns``,
        if that is given (:meth:`ended`)."""
        self._remove(source)
        slope = int(per_ns * UNIT)
        self._lines[source] = line = whole * UNIT + int(gone * UNIT) - slope * since_ns, slope
        self._at_zero += line[0]
        self._per_ns += slope
        if end_ns is not None:
            self._number += 1
            self._numbers[source] = self._number
            heapq.heappush(self._ends, (end_ns, self._number, source))
            if len(self._ends) > self._ends_at_most:  # most are outdated, since rates have changed
                current = [end for end in self._ends if self._numbers.get(end[2]) == end[1]]
                heapq.heapify(current)
                self._ends, self._ends_at_most = current, MANY_ENDS + 2 * len(current)

    def ended(self, now_ns: int) -> list[Any]:
        """The sources whose lines have ended by now, and need new ones."""
        ends, numbers = self._ends, self._numbers
        sources = []
        while ends and ends[0][0] <= now_ns:
            _, number, source = heapq.heappop(ends)
            if numbers.get(source) == number:
                del numbers[source]
                sources.append(source)
        return sources

    def stop(self, source: Hashable, nbytes: int) -> None:
        """Nothing more of a source leaves, of which ``nbytes`` have left. Nothing happens if it has no line."""
        if self._remove(source):
            self.add(nbytes)

    def by(self, now_ns: int) -> int:
        """The bytes sent by now, if no line has ended."""
        return (self._at_zero + self._per_ns * now_ns + ROUNDING) // UNIT

    def _remove(self, source: Hashable) -> bool:
        if (line := self._lines.pop(source, None)) is None:
            return False
        self._at_zero -= line[0]
        self._per_ns -= line[1]
        self._numbers.pop(source, None)
        return True
