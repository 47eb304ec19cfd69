"""The bytes that all nodes together have sent, known at every instant."""

from __future__ import annotations

import heapq
from collections.abc import Hashable

UNIT = 2**64
"""A byte, in the integers in which the total is kept: adding and removing a message leaves no error."""
ROUNDING = UNIT >> 20  # more than the rounding errors of all rates together, and much less than a byte
MANY_ENDS = 1000  # ends of messages that are kept without removing outdated ones


class SentBytes:
    """The total of a network. With m messages that are leaving, a message costs O(log m), and a question costs
    nothing more, however many nodes there are.

    Between two changes of its rate, a message leaves evenly: its bytes are a line over time, and so is the
    total. It includes the begun bytes of these messages, which the nodes' own counters leave out, so it may
    exceed the sum of those by one byte for each. When no message is leaving, it equals their sum."""

    def __init__(self) -> None:
        self._at_zero = self._per_ns = (
            0  # the line of the total: bytes at time 0 and per nanosecond, in units
        )
        # Of each message that is leaving: the same, and the time of its end and its bytes then, if they are known.
        self._lines: dict[Hashable, tuple[int, int, tuple[int, int] | None]] = {}
        self._ends: list[tuple[int, int, Hashable]] = []  # a heap: end, number and message
        self._number, self._ends_at_most = 0, MANY_ENDS

    def add(self, nbytes: int) -> None:
        """Add bytes that have left at once."""
        self._at_zero += nbytes * UNIT

    def flow(
        self, message: Hashable, gone: float, per_ns: float, now_ns: int, end: tuple[int, int] | None = None
    ) -> None:
        """Let a message leave at a rate from now on, when some of its bytes are gone. With ``end``, its time and
        its bytes then, it stops by itself."""
        self._remove(message)
        slope = int(per_ns * UNIT)
        line = int(gone * UNIT) - slope * now_ns, slope, end
        self._lines[message] = line
        self._at_zero += line[0]
        self._per_ns += slope
        if end is not None:
            self._stop_ended(now_ns)
            self._number += 1
            heapq.heappush(self._ends, (end[0], self._number, message))

    def stop(self, message: Hashable, nbytes: int) -> None:
        """No more of a message leaves, of which ``nbytes`` have left. Nothing happens if it stopped by itself."""
        if self._remove(message):
            self.add(nbytes)

    def by(self, now_ns: int) -> int:
        """The bytes sent by now. Time must not run backwards between two calls."""
        self._stop_ended(now_ns)
        return (self._at_zero + self._per_ns * now_ns + ROUNDING) // UNIT

    def _remove(self, message: Hashable) -> bool:
        if (line := self._lines.pop(message, None)) is None:
            return False
        self._at_zero -= line[0]
        self._per_ns -= line[1]
        return True

    def _stop_ended(self, now_ns: int) -> None:
        ends, lines = self._ends, self._lines
        while ends and ends[0][0] <= now_ns:
            end_ns, _, message = heapq.heappop(ends)
            if (line := lines.get(message)) is not None and line[2] is not None and line[2][0] == end_ns:
                self.stop(message, line[2][1])
        if len(ends) > self._ends_at_most:  # most are outdated, since rates have changed
            current = [
                end for end in ends if (line := lines.get(end[2])) and line[2] and line[2][0] == end[0]
            ]
            heapq.heapify(current)
            self._ends, self._ends_at_most = current, MANY_ENDS + 2 * len(current)
