"""Virtual time: events in a fixed order, drained by the event loop when nothing else is ready.

asyncio runs the coroutines; its own timers are not used (they wake ties in heap order, which an unrelated
timer changes). The loop's selector is where a real loop would wait for sockets: there, virtual time advances
instead.

At one instant: commits of computations, arrivals and deliveries, then timers, each in the order (rank,
per-rank sequence); the coroutines they woke; when these are quiet, mixing steps; and again until nothing is
left of this instant. Then who looks at it from outside does so.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import selectors
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context
from enum import IntEnum
from typing import Any

from gossamer.errors import Deadlock, RunFailed

NS = 1_000_000_000
MAX_PASSES = 1_000_000
"""Passes through one instant after which a node is taken to be spinning."""
LAST_INSTANTS = 10_000
"""Instants that tasks have to end in, once they are to."""


class Order(IntEnum):
    """What comes first at one instant."""

    COMMIT = 0
    ARRIVAL = 1
    DELIVERY = 2
    TIMER = 3
    LOOK = 4
    """At what the instant ends with: when all else of it is done."""
    END = 5
    """The end of time, after that."""


class Event:
    """A call at an instant; ``cancel()`` takes it back."""

    __slots__ = ("_clock", "background", "call")

    def __init__(self, call: Callable[[], None], clock: Clock, background: bool) -> None:
        self.call: Callable[[], None] | None = call
        self.background = background
        self._clock = clock

    def cancel(self) -> None:
        """Don't make the call."""
        if self.call is not None:
            self.call = None
            self._clock.forget(self)


class Clock:
    """The virtual clock and its events.

    Attributes:
        now_ns: nanoseconds since the start, a whole number.
        waiting: set by the engine; says what every node waits for, for the message of a deadlock.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.waiting: Callable[[], str] = str
        self._heap: list[tuple[int, int, int, int, Event]] = []
        self._sequences: dict[int, int] = {}
        self._mixes: list[tuple[int, int, Callable[[], None]]] = []
        self._passes = self._turns = 0
        self._instants = math.inf  # still to come
        self._pending = 0  # events that could wake a node
        self._cancelled = 0  # events in the heap that are taken back

    def now(self) -> float:
        """Seconds since the start."""
        return self.now_ns / NS

    @property
    def pending(self) -> int:
        """Events to come that could wake a node."""
        return self._pending

    def at(
        self, time_ns: int, order: Order, rank: int, call: Callable[[], None], *, background: bool = False
    ) -> Event:
        """Make a call at an instant, for a node. A call in the background only watches: it is nothing that
        a node could wait for."""
        event = Event(call, self, background)
        sequence = self._sequences.get(rank, 0)  # as in _next(); a call less for every event
        self._sequences[rank] = sequence + 1
        heapq.heappush(
            self._heap, (time_ns if time_ns > self.now_ns else self.now_ns, order, rank, sequence, event)
        )
        self._pending += not background
        return event

    def forget(self, event: Event) -> None:
        """An event was taken back. Such events leave the heap when they are the greater part of it."""
        self._pending -= not event.background
        self._cancelled += 1
        if self._cancelled > 1000 + len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[-1].call is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def after(
        self, seconds: float, order: Order, rank: int, call: Callable[[], None], *, background: bool = False
    ) -> Event:
        """Make a call some seconds from now; less than half a nanosecond is now."""
        return self.at(self.now_ns + to_ns(seconds), order, rank, call, background=background)

    def when_quiet(self, rank: int, call: Callable[[], None]) -> None:
        """Make a call at this instant, when every coroutine waits and no event of this instant is left."""
        self._mixes.append((rank, self._next(rank), call))

    def _next(self, rank: int) -> int:
        # Sequences are per rank, so that what one node does can't reorder what another one does.
        sequence = self._sequences.get(rank, 0)
        self._sequences[rank] = sequence + 1
        return sequence

    def advance(self) -> None:
        """Run the next events: of this instant if any are left, then this instant's mixing steps, else of the
        next instant.

        Raises:
            Deadlock: if nothing is left that could wake a node, while someone still waits.
            RunFailed: if time does not move any more, or is over.
        """
        event = self._heap[0] if self._heap else None
        of_this_instant = event is not None and event[0] == self.now_ns and event[1] < Order.LOOK
        if self._mixes and not of_this_instant:
            self._run_mixes()
        elif event is None or self._pending == 0:
            raise Deadlock(f"all nodes wait and nothing is under way: {self.waiting()}")
        else:
            if event[0] > self.now_ns:
                self.now_ns = event[0]
                self.start_counting()
                self._instants -= 1
                if self._instants < 0:
                    raise RunFailed(f"{LAST_INSTANTS} instants after the end of the run, some tasks go on")
            self._run_events()

    def _run_events(self) -> None:
        last = 0
        while self._heap and self._heap[0][0] == self.now_ns:
            _, order, last, _, event = heapq.heappop(self._heap)
            call, event.call = event.call, None
            if call is None:
                self._cancelled -= 1
            else:
                self._pending -= not event.background
                call()
            if order >= Order.LOOK or (self._heap and self._heap[0][1] >= Order.LOOK):
                break  # what these come after may not be all there yet
        self._count_pass(last)

    def _run_mixes(self) -> None:
        mixes, self._mixes = sorted(self._mixes, key=lambda mix: mix[:2]), []
        for _, _, call in mixes:
            call()
        self._count_pass(mixes[-1][0])

    def start_counting(self) -> None:
        """Forget how long time has stood still."""
        self._passes = self._turns = 0

    def end_soon(self) -> None:
        """Let no more than some last instants come, however many events there are: tasks are about to end, and one that goes
        on in spite of that must not hold the run up."""
        self._instants = LAST_INSTANTS
        self.start_counting()

    def turn(self) -> None:
        """The loop runs what is ready; it does so a limited number of times at one instant."""
        self._turns += 1
        if self._turns > MAX_PASSES:
            raise RunFailed(
                f"virtual time stands still at {self.now():.9f} s: a task keeps going without letting time pass (a"
                " loop around asyncio.sleep(0)?)"
            )

    def _count_pass(self, rank: int) -> None:
        self._passes += 1
        if self._passes > MAX_PASSES:
            raise RunFailed(
                f"virtual time stands still at {self.now():.9f} s: node {rank} keeps going without letting"
                " time pass (a loop around an await that takes no time?)",
                node=rank,
            )


def to_ns(seconds: float) -> int:
    """Whole nanoseconds.

    Raises:
        ValueError: for a negative or infinite time.
    """
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds: got {seconds}; accepted: a finite number, at least 0")
    return round(seconds * NS)


class _VirtualSelector(selectors.BaseSelector):
    """Instead of waiting for file descriptors, let virtual time pass."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        return self._keys[fd]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:  # nothing is ready to run, and no timer of asyncio's is set
            self._clock.advance()
        elif timeout == 0:
            self._clock.turn()
        else:
            raise RunFailed(
                "a timer of asyncio's is set, which virtual time knows nothing of: use node.sleep()"
            )
        return []


class _Loop(asyncio.SelectorEventLoop):
    """An event loop of one thread, which asks for no more than that when something is to be called."""

    _ready: deque[asyncio.Handle]

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle


def new_loop(clock: Clock) -> asyncio.AbstractEventLoop:
    """An asyncio event loop whose time is a clock's. It serves coroutines, tasks and futures only: no
    sockets, no executors."""
    loop = _Loop(_VirtualSelector(clock))
    loop.time = clock.now  # type: ignore[method-assign]
    return loop
