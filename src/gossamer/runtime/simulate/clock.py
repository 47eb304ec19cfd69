"""Virtual time: events in a fixed order.

Within one instant, results of computations are committed, then messages arrive and are delivered, then timers
fire; each in the order (rank, sequence number of that rank). Then the coroutines that these events woke run.
When all of them wait, the mixing steps run. This repeats until nothing is left to do at the instant; then the
instant is observed and recorded."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from enum import IntEnum
from operator import itemgetter
from typing import Any, NoReturn, TypeVar

from gossamer.errors import Deadlock, RunFailed
from gossamer.node.waiting import NodeTask, Slot

T = TypeVar("T")

NS = 1_000_000_000
NEVER_NS = 2**62  # an instant that never comes, after 146 years: no event happens then or later
MAX_PASSES = 1_000_000  # passes at one instant after which a node counts as spinning


class Order(IntEnum):
    """The order of events within one instant. OBSERVE comes after everything else; END ends the run."""

    COMMIT = 0
    ARRIVAL = 1
    DELIVERY = 2
    TIMER = 3
    OBSERVE = 4
    END = 5


class ClockEvent:
    """A call at an instant."""

    __slots__ = ("_clock", "background", "call")

    def __init__(self, call: Callable[[], None], clock: Clock, background: bool) -> None:
        self.call: Callable[[], None] | None = call
        self.background = background
        self._clock = clock

    def cancel(self) -> None:
        if self.call is not None:
            self.call = None
            self._clock.forget(self)


class Clock:
    """The virtual clock and its events.

    ``waiting`` describes what every node waits for, for the message of a deadlock. ``new_instant`` is called
    whenever time has advanced.

    Attributes:
        now_ns: nanoseconds since the start, an integer.
        pending: the number of scheduled events that could wake a node."""

    def __init__(
        self, waiting: Callable[[], str] = str, new_instant: Callable[[], None] = lambda: None
    ) -> None:
        self.now_ns = self.pending = 0
        self.waiting, self._new_instant = waiting, new_instant
        self._heap: list[tuple[int, int, int, int, ClockEvent]] = []
        self._sequences: dict[int, int] = {}
        self._quiet: list[tuple[int, Callable[[], None]]] = []
        self._passes = self._turns = 0  # at this instant
        self._cancelled = 0  # cancelled events that are still in the heap
        self._stopped = False

    def now(self) -> float:
        return self.now_ns / NS

    def slot(self) -> Slot:
        return asyncio.get_running_loop().create_future()

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> NodeTask[T]:
        return asyncio.get_running_loop().create_task(coroutine)

    def at(
        self, time_ns: int, order: Order, rank: int, call: Callable[[], None], *, background: bool = False
    ) -> ClockEvent:
        """Schedule a call for a node; a past instant means now. No node waits for a background call."""
        event = ClockEvent(call, self, background)
        # Each rank has its own sequence, so that no node can reorder another node's events.
        sequence = self._sequences.get(rank, 0)
        self._sequences[rank] = sequence + 1
        now_ns = self.now_ns
        heapq.heappush(self._heap, (time_ns if time_ns > now_ns else now_ns, order, rank, sequence, event))
        self.pending += not background
        return event

    def after(
        self, seconds: float, order: Order, rank: int, call: Callable[[], None], *, background: bool = False
    ) -> ClockEvent:
        """Schedule a call some seconds from now; less than half a nanosecond means now."""
        return self.at(self.now_ns + to_ns(seconds), order, rank, call, background=background)

    def when_quiet(self, rank: int, call: Callable[[], None]) -> None:
        """Make a call at this instant, once every coroutine waits and no event of the instant is left."""
        self._quiet.append((rank, call))

    def forget(self, event: ClockEvent) -> None:
        """Count an event as cancelled. Cancelled events leave the heap when they are most of it."""
        self.pending -= not event.background
        self._cancelled += 1
        if self._cancelled > 1000 + len(self._heap) // 2:
            self._heap[:] = [entry for entry in self._heap if entry[-1].call is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def advance(self) -> None:
        """Run the events of this instant if any are left, otherwise its mixing steps, otherwise the next
        instant's events. Raises Deadlock if no event is left that could wake a node, or none before the end of
        virtual time, and RunFailed if time is stuck or was stopped."""
        if self._stopped:
            raise RunFailed("the run is over")
        first = self._heap[0] if self._heap else None
        of_this_instant = first is not None and first[0] == self.now_ns and first[1] < Order.OBSERVE
        if self._quiet and not of_this_instant:
            rank = self._run_quiet()
        elif first is None or self.pending == 0:
            raise Deadlock(f"all nodes wait and nothing is under way: {self.waiting()}")
        elif first[0] >= NEVER_NS:
            raise Deadlock(
                f"nothing happens in {NEVER_NS / NS:.2g} s, the longest virtual time: {self.waiting()}"
            )
        else:
            if first[0] > self.now_ns:
                self.now_ns = first[0]
                self._passes = self._turns = 0
                self._new_instant()
            rank = self._run_events()
        self._passes += 1
        if self._passes > MAX_PASSES:
            raise self._spinning(f"node {rank} keeps running without letting time pass", rank)

    def _run_events(self) -> int:
        heap, now_ns, rank = self._heap, self.now_ns, 0
        while heap and heap[0][0] == now_ns:
            _, order, rank, _, event = heapq.heappop(heap)
            call, event.call = event.call, None
            if call is None:
                self._cancelled -= 1
            else:
                self.pending -= not event.background
                call()
            if order >= Order.OBSERVE or (heap and heap[0][1] >= Order.OBSERVE):
                break  # the coroutines that were woken run before the instant is observed
        return rank

    def _run_quiet(self) -> int:
        calls, self._quiet = sorted(self._quiet, key=itemgetter(0)), []  # stable: keeps each rank's order
        for _, call in calls:
            call()
        return calls[-1][0]

    def count_turn(self) -> None:
        self._turns += 1
        if self._turns > MAX_PASSES:
            raise self._spinning("a task keeps running without letting time pass")

    def _spinning(self, reason: str, rank: int | None = None) -> RunFailed:
        return RunFailed(f"virtual time is stuck at {self.now():.9f} s: {reason}", node=rank)

    def stop(self) -> None:
        """Stop time at the end of a run. Tasks may still end at this instant."""
        self._stopped, self._turns = True, 0


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time. asyncio's tasks and futures work, and so does everything that asyncio
    builds on them. asyncio's timers don't, because simultaneous timers fire in heap order, which an unrelated
    timer can change. Where a real loop waits for sockets, this one advances virtual time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._ready: deque[tuple[Callable[..., object], tuple[Any, ...], Context]] = deque()
        self.time = clock.now  # type: ignore[method-assign]

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> None:
        """Call after the current callback. Returns no handle: tasks and futures never cancel such a call."""
        self._ready.append((callback, args, copy_context() if context is None else context))

    def call_at(self, *_: object, **__: object) -> NoReturn:
        raise RunFailed("asyncio timers don't work in virtual time; accepted: node.sleep()")

    def _run_once(self) -> None:
        """Make all due calls. If there are none, advance virtual time first."""
        ready = self._ready
        if ready:
            self._clock.count_turn()
        else:
            self._clock.advance()
        for _ in range(len(ready)):
            callback, args, context = ready.popleft()
            context.run(callback, *args)


def to_ns(seconds: float) -> int:
    """Seconds as a whole number of nanoseconds, at most :data:`NEVER_NS`. ValueError if they are negative or infinite."""
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds: got {seconds}; accepted: a finite number, at least 0")
    return round(seconds * NS) if seconds < NEVER_NS / NS else NEVER_NS
