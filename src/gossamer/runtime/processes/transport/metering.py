"""What holds bytes and calls back until it's their turn: a link of a rate, a delay in order, and a node's downlink.

What a real machine adds comes on top: timers are late by a millisecond or more, and then bytes pass in bursts. A
bucket goes on from where it should have been, so lateness doesn't add up.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

LATE_S = 0.02
"""Seconds by which timers and credit may be late without slowing a flow: a downlink acknowledges bytes so much before their
turn (what it delivers isn't early), and an uplink goes on from so long ago."""
CATCH_UP_S = 0.1
"""The same within a message, for a process that had to wait for a core. What is caught up is at most a window ahead of the
receiver's downlink."""
SLOWEST = 1.0
"""Bytes a second of a link whose rate is 0: what waits there goes on when the rate changes."""


@runtime_checkable
class Loop(Protocol):
    """What is asked of an event loop."""

    def time(self) -> float:
        """Seconds of a monotonic clock."""

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """Call at an instant of that clock, or a little later."""


class Bucket:
    """A link: bytes pass it one after another at a rate (a token bucket that holds nothing).

    Args:
        rate: bytes a second.
    """

    def __init__(self, rate: float = math.inf) -> None:
        self.rate = max(rate, SLOWEST)
        self.free = -math.inf
        """When all that was taken has passed."""
        self._used_s = 0.0  # by all that was taken
        self._part = _part(self.rate, rate)

    def take(self, nbytes: int, since: float) -> float:
        """The instant at which the last of some bytes has passed, if the first could have done so from ``since`` on."""
        self._used_s += nbytes / self.rate * self._part
        self.free = max(self.free, since) + nbytes / self.rate
        return self.free

    def give_back(self, now: float) -> None:
        """What was taken and has not passed by now won't."""
        if self.free > now:
            self._used_s -= (self.free - now) * self._part
            self.free = now

    def used_seconds(self, now: float) -> float:
        """For how long all that has passed by now would have kept the link busy at the link's own rate."""
        return self._used_s - max(self.free - now, 0.0) * self._part

    def change(self, rate: float, now: float, own: float | None = None) -> float:
        """Another rate from now on, also for what was taken and has not passed; gives the ratio of its times.

        Args:
            rate: bytes a second.
            now: the instant.
            own: the link's own rate, where what passes is held back by something else; None is ``rate``.
        """
        part, own = self._part, rate if own is None else own
        rate = max(rate, SLOWEST)
        stretch = 1.0 if rate == self.rate else self.rate / rate
        self.rate, self._part = rate, _part(rate, own)
        if self.free > now:
            left = self.free - now
            self._used_s += left * (stretch * self._part - part)
            self.free = now + left * stretch
        return stretch


def _part(rate: float, own: float) -> float:
    """How much of a link is in use while bytes pass it at a rate; what passes where nothing can, to find out when it can
    again, uses none."""
    if own <= 0:
        return 0.0
    return 1.0 if rate == own else rate / own


class Line:
    """Calls that are due at an instant each, made in the order in which they were added: none overtakes another."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[float, Callable[[float], None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, instant: float, call: Callable[[float], None]) -> None:
        """Make a call, with its instant, when that has come and all calls before it are made."""
        if self._waiting:
            instant = max(instant, self._waiting[-1][0])
        self._waiting.append((instant, call))
        if self._timer is None:
            self._run()

    def stretch(self, factor: float, now: float) -> None:
        """Multiply the time that is left for each call."""
        self._waiting = deque(
            (now + (instant - now) * factor if instant > now else instant, call)
            for instant, call in self._waiting
        )
        self._run()

    def clear(self) -> None:
        """Make no call any more."""
        self._waiting.clear()
        self._run()

    def _run(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self._waiting[0][0] <= self._loop.time():
            instant, call = self._waiting.popleft()
            call(instant)
        if self._waiting and self._timer is None:
            self._timer = self._loop.call_at(self._waiting[0][0], self._run)


@dataclass(order=True, slots=True)
class _Waiting:
    """Some bytes before a downlink."""

    order: tuple[int, int]
    nbytes: int
    since: float
    here: float
    taken: Callable[[], None]
    passed: Callable[[float], None] | None


class Downlink:
    """What a receiver takes in, from all its senders, at one rate.

    Whatever is here when the link is free passes in order of its turn; the link never waits for one sender while
    another's bytes are here.

    Args:
        rate: bytes a second.
        loop: the clock.
    """

    def __init__(self, rate: float, loop: Loop) -> None:
        self._bucket = Bucket(rate)
        self._loop = loop
        self._queue: list[_Waiting] = []
        self._numbers = itertools.count()
        self._passing = Line(loop)
        self._timer: asyncio.TimerHandle | None = None

    def enter(
        self,
        nbytes: int,
        since: float,
        turn: int,
        taken: Callable[[], None],
        passed: Callable[[float], None] | None = None,
    ) -> None:
        """Let some bytes pass.

        Args:
            nbytes: how many came in.
            since: when the first of them did.
            turn: what has the lowest goes first; of equal ones, what came first.
            taken: called when they are about to pass: their place may be filled again.
            passed: called when the last of them has passed, with that instant.
        """
        order = turn, next(self._numbers)
        heapq.heappush(self._queue, _Waiting(order, nbytes, since, self._loop.time(), taken, passed))
        if self._timer is None:
            self._serve()

    def used_seconds(self) -> float:
        """As :meth:`Bucket.used_seconds`."""
        return self._bucket.used_seconds(self._loop.time())

    def change(self, rate: float) -> None:
        """Another rate from now on."""
        now = self._loop.time()
        self._passing.stretch(self._bucket.change(rate, now), now)
        self._serve()

    def clear(self) -> None:
        """Let nothing pass any more."""
        self._queue.clear()
        self._passing.clear()
        self._serve()

    def _serve(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._queue and self._bucket.free <= self._loop.time() + LATE_S:
            first = heapq.heappop(self._queue)
            last_byte = max(self._bucket.take(first.nbytes, first.since), first.here)
            first.taken()
            if first.passed is not None:
                self._passing.add(last_byte, first.passed)
        if self._queue and self._timer is None:
            self._timer = self._loop.call_at(self._bucket.free - LATE_S, self._serve)
