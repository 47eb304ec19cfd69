"""Deferred computation: what is computed together, and when its result is due, are two things.

A computation has a virtual duration; its result is due at the end of it and is committed then, never earlier.
When a due result is not there yet, everything that is under way and of the same kind is computed as one
batch, from immutable snapshots. So what nodes read does not depend on what was batched with what.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gossamer.learning.computation import Computation, Kind
from gossamer.runtime.simulate.clock import NS, Clock, Event, Order

_PENDING = object()


@dataclass(eq=False, slots=True)
class _Entry:
    computation: Computation
    future: asyncio.Future[Any]
    due: Event | None = None
    start_ns: int = 0
    result: Any = _PENDING


class Compute:
    """Carries out the computations of all nodes, one at a time per node, first come first served.

    Args:
        clock: says when results are due.
        seconds: duration of a computation on its node that starts now.
        execute: runs jobs of one kind as a batch, results in order.
        settle: writes all vectors that are not written yet; called before jobs are prepared.
        watch: told of every computation when it is over, or cancelled while it ran: the computation, its start and its
            end in nanoseconds.
    """

    def __init__(
        self,
        clock: Clock,
        seconds: Callable[[Computation], float],
        execute: Callable[[Kind, Sequence[Any]], list[Any]],
        settle: Callable[[], None] = lambda: None,
        watch: Callable[[Computation, int, int], None] | None = None,
    ) -> None:
        self._clock, self._seconds, self._execute, self._settle = clock, seconds, execute, settle
        self._watch = watch
        self._queues: dict[int, deque[_Entry]] = {}
        self._busy_ns: defaultdict[int, int] = defaultdict(int)
        self._under_way: dict[Kind, dict[int, _Entry]] = {kind: {} for kind in Kind}  # not computed yet
        self.batches = 0
        self.computations = 0

    def submit(self, computation: Computation) -> Awaitable[Any]:
        """Queue a computation at its node; gives what its ``commit`` returns, at its due instant."""
        entry = _Entry(computation, asyncio.get_running_loop().create_future())
        queue = self._queues.setdefault(computation.rank, deque())
        queue.append(entry)
        if len(queue) == 1:
            self._start(queue)
        return self._wait(entry)

    async def _wait(self, entry: _Entry) -> Any:
        try:
            return await entry.future
        except asyncio.CancelledError:
            self._cancel(entry)
            raise

    def _start(self, queue: deque[_Entry]) -> None:
        """Begin with the first of a node's queue, if there is one."""
        while queue:
            entry = queue[0]
            rank = entry.computation.rank
            entry.start_ns = self._clock.now_ns
            try:
                seconds = self._seconds(entry.computation)
                entry.due = self._clock.after(seconds, Order.COMMIT, rank, partial(self._due, entry))
            except Exception as error:  # noqa: BLE001 - a user's profile may raise anything; the node reports it
                queue.popleft()
                entry.future.set_exception(error)
            else:
                self._under_way[entry.computation.kind][rank] = entry
                break

    def _cancel(self, entry: _Entry) -> None:
        queue = self._queues[entry.computation.rank]
        if entry not in queue:
            return  # it was committed at this very instant
        running = queue[0] is entry
        queue.remove(entry)
        if running:
            self._under_way[entry.computation.kind].pop(entry.computation.rank, None)
            self._over(entry)
        if entry.due is not None:
            entry.due.cancel()
        if running:
            self._start(queue)

    def _over(self, entry: _Entry) -> None:
        now = self._clock.now_ns
        self._busy_ns[entry.computation.rank] += now - entry.start_ns
        if self._watch is not None:
            self._watch(entry.computation, entry.start_ns, now)

    def busy_seconds(self, rank: int) -> float:
        """For how many seconds one of a node's computations ran by now."""
        queue = self._queues.get(rank)
        running = self._clock.now_ns - queue[0].start_ns if queue else 0
        return (self._busy_ns[rank] + running) / NS

    def restore(self, rank: int, busy_s: float) -> None:
        """A node's computations have run for so many seconds, before the run was resumed."""
        self._busy_ns[rank] = round(busy_s * NS)

    def _due(self, entry: _Entry) -> None:
        if entry.result is _PENDING:
            self._flush(entry.computation.kind)
        queue = self._queues[entry.computation.rank]
        queue.popleft()
        self._over(entry)
        self._start(queue)
        if isinstance(entry.result, Exception):
            entry.future.set_exception(entry.result)
            return
        try:
            entry.future.set_result(entry.computation.commit(entry.result))
        except Exception as error:  # noqa: BLE001 - what the author did to the node meanwhile; raised where it is awaited
            entry.future.set_exception(error)

    def _flush(self, kind: Kind) -> None:
        """Compute everything of a kind that is under way: the first of each node's queue (the next ones build on it), in
        the order in which they began, since what was made one after the other lies together in the store."""
        under_way, self._under_way[kind] = self._under_way[kind], {}
        entries = list(under_way.values())
        self._settle()
        self.batches += 1
        self.computations += len(entries)
        jobs = []
        for entry in entries:
            try:
                jobs.append(entry.computation.prepare())
            except Exception as error:  # noqa: BLE001 - what reads a user's task may raise anything; the node reports it
                entry.result = error
        prepared = [entry for entry in entries if entry.result is _PENDING]
        for entry, result in zip(prepared, self._attempt(kind, jobs), strict=True):
            entry.result = result

    def _attempt(self, kind: Kind, jobs: list[Any]) -> list[Any]:
        """The jobs' results. If a user's model or loss raises, each job is run by itself, so that the error is its
        node's alone."""
        if not jobs:
            return []
        try:
            return self._execute(kind, jobs)
        except Exception as error:  # noqa: BLE001 - a user's model or loss may raise anything; the node reports it
            if len(jobs) == 1:
                return [error]
        return [result for job in jobs for result in self._attempt(kind, [job])]
