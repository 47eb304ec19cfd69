"""A clock and timers that a test controls."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any


class Timer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """A clock that the test sets; timers may be late by a set time."""

    def __init__(self) -> None:
        self.now, self.late = 100.0, 0.0
        self._timers: list[tuple[float, int, Timer, Callable[..., Any], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> Any:
        timer = Timer()
        heapq.heappush(self._timers, (when, next(self._numbers), timer, callback, args))
        return timer

    def run(self, until: float = math.inf) -> None:
        while self._timers and self._timers[0][0] + self.late <= until:
            when, _, timer, callback, args = heapq.heappop(self._timers)
            if not timer.cancelled:
                self.now = max(self.now, when + self.late)
                callback(*args)
        if not math.isinf(until):
            self.now = max(self.now, until)
