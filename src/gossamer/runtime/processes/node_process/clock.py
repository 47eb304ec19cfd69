"""A node's clock, and what is due by it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHORTEST_S = 0.001
"""Seconds that a node sleeps at least: its clock may stand still meanwhile."""


class Timer:
    """A call that is due later, noted among a node's timers until then."""

    def __init__(self, pending: set[Timer], seconds: float, call: Callable[[], None]) -> None:
        self._pending, self._call = pending, call
        self._handle = asyncio.get_running_loop().call_later(seconds, self._due)
        pending.add(self)

    def _due(self) -> None:
        self._pending.discard(self)
        self._handle.cancel()  # it holds what holds it, which only the collector of cyclic garbage would find
        self._call()

    def cancel(self) -> None:
        """Don't make the call."""
        self._pending.discard(self)
        self._handle.cancel()


class Clock:
    """Seconds since the run's start, but for those in which the node was evaluated: it stands still then.

    Args:
        time_s: where it goes on.
        wall_s: seconds that the run has taken before.
    """

    def __init__(self, time_s: float = 0.0, wall_s: float = 0.0) -> None:
        self._before_s, self._wall_before_s = time_s, wall_s
        self._paused_s = 0.0
        self._pauses: list[float] = []  # since when evaluations go on
        self._timers: set[Timer] = set()
        self.begin(time.monotonic())

    def begin(self, start: float) -> None:
        """The run starts, or goes on, at this instant of the monotonic clock."""
        self.start = start - self._before_s
        self._wall_start = start - self._wall_before_s

    def now(self) -> float:
        """The time."""
        now = self._pauses[0] if self._pauses else time.monotonic()
        return now - self.start - self._paused_s

    def wall(self) -> float:
        """Real seconds since the run's start."""
        return time.monotonic() - self._wall_start

    @property
    def quiet(self) -> bool:
        """Whether nothing will happen by the clock."""
        return not (self._timers or self._pauses)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let it stand still."""
        self._pauses.append(time.monotonic())
        try:
            yield
        finally:
            began = self._pauses[0]
            self._pauses.pop()
            if not self._pauses:
                self._paused_s += time.monotonic() - began

    async def until(self, time_s: float) -> None:
        """Wait for an instant."""
        while (left := time_s - self.now()) > 0:
            await asyncio.sleep(max(left, SHORTEST_S))

    def timer(self, seconds: float, call: Callable[[], None], *, background: bool) -> Timer:
        """Call after some seconds; in the background is what makes the clock no less quiet."""
        return Timer(set() if background else self._timers, seconds, call)
