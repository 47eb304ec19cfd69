"""Mixing steps of all nodes, which run after everything else at an instant.

A sum of whole vectors is *deferred* at first: the node gets the row of the result at once, but the row is written
only before parameters are read. Until then, the sums of many nodes accumulate, over one or more instants, and
are computed together. No node sees a difference, because the summed vectors are immutable."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor

from gossamer.learning.mixing import InboxJob, Sum, allow_compiled_loops, mix_rows
from gossamer.learning.rows import Rows
from gossamer.learning.thread_pool import ThreadPool
from gossamer.node.waiting import Slot
from gossamer.runtime.recording import Profile
from gossamer.runtime.simulate.core import Core

MAX_DEFERRED = 256
"""Above this number, deferred sums are computed at the end of the instant, since they keep the rows they read."""
MIN_LENGTH = 1 << 14  # for shorter vectors, a handover between threads takes longer than the sum
_Request = tuple[int, InboxJob, bool, Slot]


class Mixer:
    """Runs mixing steps in the order (rank, order of the calls)."""

    def __init__(self, core: Core, rows: Rows, threads: ThreadPool, profile: Profile) -> None:
        self._core, self._rows, self._threads = core, rows, threads
        self._profile = profile
        # By request: rank, step, whether its result is read at once, and the slot of the commit's result.
        self._requests: list[_Request] = []
        self._deferred: list[tuple[Sum, Tensor]] = []
        self._unwritten: set[int] = set()  # addresses of rows that are deferred
        self._whole: dict[int, Tensor] = {}  # by address: whole rows that the deferred sums hold
        allow_compiled_loops()

    def submit(self, rank: int, step: InboxJob, *, read: bool) -> Awaitable[Any]:
        """Queue a node's step. The awaitable gives the result of its ``commit``. Unless ``read``,
        :meth:`settle` must run before the result is read."""
        slot = self._core.slot()
        if not self._requests:
            self._core.when_quiet(-1, self._flush)
        self._requests.append((rank, step, read, slot))
        return slot

    def settle_for(self, vector: Any) -> None:
        if self._unwritten and type(vector) is Tensor and vector.data_ptr() in self._unwritten:
            self.settle()

    def settle(self) -> None:
        """Compute all deferred sums."""
        if not self._deferred:
            return
        with self._profile.part("mix"):
            sums, rows = [deferred for deferred, _ in self._deferred], [row for _, row in self._deferred]
            mix_rows(sums, rows, self._threads)
        self._deferred = []
        self._unwritten.clear()
        self._whole.clear()

    def _flush(self) -> None:
        requests, self._requests = sorted(self._requests, key=itemgetter(0)), []
        reads = any(read for _, _, read, _ in requests)
        with self._profile.part("mix"):
            while requests:  # one step of each node at a time, since its next one reads what this one commits
                steps: list[_Request] = []
                later: list[_Request] = []
                last = -1
                for request in requests:
                    (later if request[0] == last else steps).append(request)
                    last = request[0]
                self._run(steps)
                requests = later
        if len(self._deferred) > MAX_DEFERRED or reads:
            self.settle()

    def _run(self, requests: Sequence[_Request]) -> None:
        """Run steps of different nodes: sums of whole vectors become deferred, the others run on the threads. The nodes go on
        in the order of their ranks, whatever becomes of their steps: a resumed run may defer others."""
        done: list[tuple[InboxJob, Slot, Any, Exception | None]] = []
        others: list[int] = []
        for _, step, _, slot in requests:
            if slot.done():  # cancelled
                continue
            row, failure = None, None
            try:
                step.prepare()
                self.settle_for(step.own)
                if (row := self._defer(step)) is None:
                    others.append(len(done))
            except Exception as error:  # noqa: BLE001 - the author's inbox or weights; raised where it is awaited
                failure = error
            done.append((step, slot, row, failure))
        if others:
            shared = self._rows.length >= MIN_LENGTH
            steps = [done[place][0] for place in others]
            attempts = (self._threads.map if shared else map)(self._attempt, steps)
            for place, (result, failure) in zip(others, attempts, strict=True):
                done[place] = (*done[place][:2], result, failure)
        for step, slot, result, failure in done:
            try:
                if failure is not None:
                    raise failure
                slot.set_result(step.commit(result))
            except Exception as error:  # noqa: BLE001 - likewise
                slot.set_exception(error)

    def _attempt(self, step: InboxJob) -> tuple[Any, Exception | None]:
        try:
            return step.run(self._rows.vector), None
        except Exception as error:  # noqa: BLE001 - the author's inbox or weights, or an author's codec or aggregator
            return None, error

    def _defer(self, step: InboxJob) -> Tensor | None:
        """The row of a sum of whole vectors, which is written later; None for any other step."""
        terms = step.terms()
        if terms is None:
            return None
        vectors, weights, base = terms
        whole, new = self._whole, []
        for vector in vectors if base is None else [*vectors, base]:
            # All receivers of a broadcast sum the same tensor.
            if whole.get(vector.data_ptr()) is not vector:
                if not self._rows.is_row(vector):
                    return None
                new.append(vector)
        for vector in new:
            whole[vector.data_ptr()] = vector
        row = self._rows.fresh()
        self._deferred.append((Sum(vectors, weights, base), row))
        self._unwritten.add(row.data_ptr())
        return row
