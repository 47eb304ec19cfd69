"""The core of the simulator: virtual time, with events in a fixed order, and the coroutines that they wake.

Within one instant, results of computations are committed, then messages arrive and are delivered, then timers
fire; each in the order (rank, sequence number of that rank). Then the coroutines that these events woke run.
When all of them wait, the mixing steps run. This repeats until nothing is left to do at the instant; then the
instant is observed and recorded."""

from __future__ import annotations

import heapq
import math
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from enum import IntEnum
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

from gossamer.errors import Deadlock, RunFailed
from gossamer.runtime.simulate.adapter import Adapter, Ready
from gossamer.runtime.simulate.fiber import Fiber, SimSlot

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


class ScheduledCall(list[Any]):
    """A call at an instant: time, kind, rank, number of that rank, function, arguments, whether it is in the background,
    and the core. Calls are compared by the first four, which no two share."""

    __slots__ = ()

    def cancel(self) -> None:
        if self[4] is not None:
            self[4], self[5] = None, ()
            self[7].forget(self)


class Core:
    """Virtual time: which call comes next, and which coroutines may go on.

    ``waiting`` describes what every node waits for, for the message of a deadlock. ``new_instant`` is called
    whenever time has advanced.

    Attributes:
        now_ns: nanoseconds since the start, an integer.
        pending: the number of scheduled calls that could wake a node.
        ready: what runs next at this instant.
        slot: makes a new slot.
        adapter: the event loop of asyncio's objects."""

    def __init__(
        self, waiting: Callable[[], str] = str, new_instant: Callable[[], None] = lambda: None
    ) -> None:
        self.now_ns = self.pending = 0
        self.waiting, self._new_instant = waiting, new_instant
        self.ready: Ready = deque()
        self.slot = partial(SimSlot, self.ready)
        self.adapter = Adapter(self.ready)
        self._instants: list[int] = []  # a heap of those with scheduled calls
        self._calls: dict[int, list[ScheduledCall]] = {}  # by instant; those of the present one are a heap
        self._numbers: dict[int, int] = {}
        self._quiet: list[tuple[int, Callable[[], None]]] = []
        self._passes = self._turns = 0  # at this instant
        self._scheduled = self._cancelled = 0  # calls that are listed, and those of them that are cancelled
        self._stopped = self._over = False

    # --- coroutines

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> Fiber[T]:
        """Run a coroutine as a fiber, which starts when the running one next waits."""
        return Fiber(self.adapter, coroutine)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run until a coroutine ends. Returns its result."""
        main, ready, adapter, hooks = (
            self.spawn(coroutine),
            self.ready,
            self.adapter,
            sys.get_asyncgen_hooks(),
        )
        main.add_done_callback(self._end)
        self._over = False
        adapter.begin()
        sys.set_asyncgen_hooks(None, None)  # those of an event loop outside
        try:
            while not self._over:
                if ready:
                    self._count_turn()
                else:
                    self.advance()
                with adapter:
                    for _ in range(len(ready)):  # a turn: what it wakes runs in the next one
                        call, first, second = ready.popleft()
                        call(first, second)
        finally:
            sys.set_asyncgen_hooks(*hooks)
            main.close()
        return main.result()

    def _end(self, _: Fiber[Any]) -> None:
        self._over = True

    # --- calls

    def now(self) -> float:
        return self.now_ns / NS

    def at(
        self,
        time_ns: int,
        order: Order,
        rank: int,
        call: Callable[..., object],
        *arguments: Any,
        background: bool = False,
    ) -> ScheduledCall:
        """Schedule a call for a node; a past instant means now. No node waits for a background call."""
        # Each rank has its own numbers, so that no node can reorder another node's events.
        number = self._numbers.get(rank, 0)
        self._numbers[rank] = number + 1
        if time_ns < self.now_ns:
            time_ns = self.now_ns
        scheduled = ScheduledCall((time_ns, order, rank, number, call, arguments, background, self))
        if (calls := self._calls.get(time_ns)) is None:
            self._calls[time_ns] = [scheduled]
            heapq.heappush(self._instants, time_ns)
        elif time_ns == self.now_ns:
            heapq.heappush(calls, scheduled)
        else:
            calls.append(scheduled)
        self._scheduled += 1
        self.pending += not background
        return scheduled

    def after(
        self,
        seconds: float,
        order: Order,
        rank: int,
        call: Callable[..., object],
        *arguments: Any,
        background: bool = False,
    ) -> ScheduledCall:
        """Schedule a call some seconds from now; less than half a nanosecond means now."""
        return self.at(self.now_ns + to_ns(seconds), order, rank, call, *arguments, background=background)

    def when_quiet(self, rank: int, call: Callable[[], None]) -> None:
        """Make a call at this instant, once every coroutine waits and no event of the instant is left."""
        self._quiet.append((rank, call))

    def forget(self, scheduled: ScheduledCall) -> None:
        """Count a call as cancelled. Cancelled calls are removed when they are most of all."""
        self.pending -= not scheduled[6]
        self._cancelled += 1
        if self._cancelled > 1000 + self._scheduled // 2:
            self._remove_cancelled()

    def _remove_cancelled(self) -> None:
        for time_ns, calls in [*self._calls.items()]:
            calls[:] = [call for call in calls if call[4] is not None]  # in place: these may be running
            if not calls and time_ns != self.now_ns:
                del self._calls[time_ns]
        self._instants = [*self._calls]
        heapq.heapify(self._instants)
        heapq.heapify(self._calls.get(self.now_ns, []))
        self._scheduled, self._cancelled = sum(map(len, self._calls.values())), 0

    def advance(self) -> None:
        """Run the events of this instant if any are left, otherwise its mixing steps, otherwise the next
        instant's events. Raises Deadlock if no event is left that could wake a node, or none before the end of
        virtual time, and RunFailed if time is stuck or was stopped."""
        if self._stopped:
            raise RunFailed("the run is over")
        present = self._calls.get(self.now_ns)
        if self._quiet and not (present and present[0][1] < Order.OBSERVE):
            rank = self._run_quiet()
        elif not self._instants or self.pending == 0:
            raise Deadlock(f"all nodes wait and nothing is under way: {self.waiting()}")
        elif (next_ns := self._instants[0]) >= NEVER_NS:
            raise Deadlock(
                f"nothing happens in {NEVER_NS / NS:.2g} s, the longest virtual time: {self.waiting()}"
            )
        else:
            if next_ns > self.now_ns:
                self.now_ns = next_ns
                heapq.heapify(self._calls[next_ns])
                self._passes = self._turns = 0
                self._new_instant()
            rank = self._run_events()
        self._passes += 1
        if self._passes > MAX_PASSES:
            raise self._spinning(f"node {rank} keeps running without letting time pass", rank)

    def _run_events(self) -> int:
        calls, rank = self._calls[self.now_ns], 0
        while calls:
            scheduled = heapq.heappop(calls)
            self._scheduled -= 1
            _, order, rank, _, call, arguments, background, _ = scheduled
            if call is None:
                self._cancelled -= 1
            else:
                # To cancel it now has no effect, and a message that knows its event is not kept by it.
                scheduled[4], scheduled[5] = None, ()
                self.pending -= not background
                call(*arguments)
            if order >= Order.OBSERVE or (calls and calls[0][1] >= Order.OBSERVE):
                break  # the coroutines that were woken run before the instant is observed
        if not calls:
            del self._calls[self.now_ns]
            heapq.heappop(self._instants)
        return rank

    def _run_quiet(self) -> int:
        calls, self._quiet = sorted(self._quiet, key=itemgetter(0)), []  # stable: keeps each rank's order
        for _, call in calls:
            call()
        return calls[-1][0]

    def _count_turn(self) -> None:
        self._turns += 1
        if self._turns > MAX_PASSES:
            raise self._spinning("a task keeps running without letting time pass")

    def _spinning(self, reason: str, rank: int | None = None) -> RunFailed:
        return RunFailed(f"virtual time is stuck at {self.now():.9f} s: {reason}", node=rank)

    def stop(self) -> None:
        """Stop time at the end of a run. Tasks may still end at this instant."""
        self._stopped, self._turns = True, 0


def to_ns(seconds: float) -> int:
    """Seconds as a whole number of nanoseconds, at most :data:`NEVER_NS`. ValueError if they are negative or infinite."""
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds: got {seconds}; accepted: a finite number, at least 0")
    return round(seconds * NS) if seconds < NEVER_NS / NS else NEVER_NS
