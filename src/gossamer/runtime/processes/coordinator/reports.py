"""The traffic of all nodes as their processes have reported it, now and at earlier instants."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from gossamer.messages.tags import Traffic

MAX_HISTORY = 1000
"""Instants at which the total is known. Beyond it, every other one of the older half is forgotten."""


class TrafficReports:
    """Each node's last report, and the sum over all nodes. ``now`` is always the coordinator's monotonic clock, and
    ``time_s`` the nodes' clock, in seconds.

    Attributes:
        bytes_sent: by all nodes, as far as reported.
        age_s: the longest time between a process's last report and its end."""

    def __init__(self) -> None:
        self.bytes_sent, self.age_s = 0, 0.0
        self._last: dict[int, Traffic] = {}
        self._reported_at: dict[int, float] = {}  # of the processes that have not ended
        self._times_s, self._totals = [0.0], [0]  # ascending

    def begins(self, rank: int, now: float) -> None:
        """A node's process takes part. Its counters go on from those of the process before it."""
        self._reported_at[rank] = now

    def take(self, rank: int, traffic: Traffic, time_s: float, now: float) -> None:
        """Take a report that a node made at ``time_s``, at least 0. A report of less than the node has sent already is
        that of a new process which has not taken part, and does not continue the counters."""
        sent = traffic.bytes_sent - self.of(rank).bytes_sent
        if sent < 0:
            return
        self._last[rank], self._reported_at[rank] = traffic, now
        self.bytes_sent += sent
        times_s, totals = self._times_s, self._totals
        place = bisect_right(times_s, max(time_s, 0.0))
        for later in range(place, len(totals)):  # of nodes whose clock, or whose report, is ahead
            totals[later] += sent
        if times_s[place - 1] == time_s:
            totals[place - 1] += sent
            return
        times_s.insert(place, time_s)
        totals.insert(place, totals[place - 1] + sent)
        if len(times_s) > MAX_HISTORY:
            half = MAX_HISTORY // 2
            self._times_s = [*times_s[:half:2], *times_s[half:]]
            self._totals = [*totals[:half:2], *totals[half:]]

    def ends(self, rank: int, now: float) -> None:
        """A node's process has ended, or has made its last report."""
        if (reported_at := self._reported_at.pop(rank, None)) is not None:
            self.age_s = max(self.age_s, now - reported_at)

    def of(self, rank: int) -> Traffic:
        """A node's traffic as last reported."""
        return self._last.get(rank, Traffic())

    def all(self) -> Iterable[Traffic]:
        """The traffic of each node that has reported any."""
        return self._last.values()

    def bytes_by(self, time_s: float) -> int:
        """The bytes that all nodes had sent by an instant, as far as reported; 0 before the first report."""
        place = bisect_right(self._times_s, time_s)
        return self._totals[place - 1] if place else 0
