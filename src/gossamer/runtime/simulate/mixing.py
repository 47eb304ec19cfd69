"""Mixing steps of all nodes, once everything else of an instant is done.

The sum of whole vectors is *owed*: the node gets its row at once, but the row is written only when somebody is about to read
parameters. Until then the sums of many nodes gather, at one instant or at many, and are computed together. No node can tell,
because what is mixed is immutable."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from operator import itemgetter
from typing import Any

from torch import Tensor

from gossamer.learning.mixing import Mix, Sum, mix_rows
from gossamer.learning.rows import Rows
from gossamer.learning.workers import Workers
from gossamer.runtime.recording import Profile
from gossamer.runtime.simulate.clock import Clock

LEAST_TERMS = 24  # with at least this many terms, owed sums are computed together; the bits are the same
MOST_OWED = 256
"""Above this number, owed sums are computed at the end of the instant, because they hold the rows that they read."""
MOST_RESERVED = 32  # the most rows that are taken ahead of need
_Request = tuple[int, Callable[[], Mix], Callable[[Any], Any], bool, asyncio.Future[Any]]


class Mixing:
    """Runs mixing steps in the order (rank, order of the calls). ``forms`` counts the sums that were computed together, and
    one at a time, by reason."""

    def __init__(self, clock: Clock, rows: Rows, workers: Workers, profile: Profile) -> None:
        self._clock, self._rows, self._workers = clock, rows, workers
        self._profile = profile
        # rank, what prepares, what commits, whether the result is read at once, and the future of the result
        self._requests: list[_Request] = []
        self._owed: list[tuple[Sum, Tensor]] = []
        self._unwritten: set[int] = set()  # ids of rows that are owed
        self._reserve: list[Tensor] = []
        self.forms: Counter[str] = Counter()
        self._whole: set[int] = set()  # ids of whole rows that the owed sums hold

    def submit(
        self, rank: int, prepare: Callable[[], Mix], commit: Callable[[Any], Any], *, read: bool
    ) -> Awaitable[Any]:
        """Queue a node's step; the awaitable gives what ``commit`` returns. Unless the result is ``read`` at once,
        :meth:`settle` is called before it is read."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._requests:
            self._clock.when_quiet(-1, self._flush)
        self._requests.append((rank, prepare, commit, read, future))
        return future

    def settle_for(self, vector: Any) -> None:
        if id(vector) in self._unwritten:
            self.settle()

    def settle(self) -> None:
        """Compute all owed sums."""
        if not self._owed:
            return
        with self._profile.part("mix"):
            sums, rows = [owed for owed, _ in self._owed], [row for _, row in self._owed]
            many = sum(len(owed.vectors) for owed in sums) >= LEAST_TERMS
            if many and mix_rows(self._rows, sums, self._workers, rows):
                form = "together"
            else:
                form = f"one at a time: {'no kernel sums whole rows in order here' if many else 'few terms'}"
                for owed, row in self._owed:
                    # (A write through .data does not count as a modification of a snapshot.)
                    owed.write(row.data)
            self.forms[form] += len(sums)
        self._owed = []
        self._unwritten.clear()
        self._whole.clear()

    def _flush(self) -> None:
        requests, self._requests = sorted(self._requests, key=itemgetter(0)), []
        with self._profile.part("mix"):
            for _, prepare, commit, _, future in requests:
                if future.done():  # cancelled
                    continue
                try:
                    mix = prepare()
                    self.settle_for(mix.own)
                    row = self._owe(mix)
                    future.set_result(commit(mix.run(self._rows.vector) if row is None else row))
                except Exception as error:  # noqa: BLE001 - the author's inbox or weights; raised where it is awaited
                    future.set_exception(error)
        if len(self._owed) > MOST_OWED or any(read for _, _, _, read, _ in requests):
            self.settle()

    def _owe(self, mix: Mix) -> Tensor | None:
        terms = mix.terms()
        if terms is None:
            return None
        whole = self._whole
        if not all(id(vector) in whole or self._rows.is_row(vector) for vector in terms[0]):
            return None
        row = self._fresh()
        self._owed.append((Sum(*terms), row))
        whole.update(map(id, terms[0]))  # the sum holds the vectors, so their ids stay valid
        self._unwritten.add(id(row))
        return row

    def _fresh(self) -> Tensor:
        # Rows that are mixed one after the other lie together, even if they are taken at different instants, because
        # the next batch reads them in that order.
        if not self._reserve:
            rows, _ = self._rows.block(max(1, min(MOST_RESERVED, self._rows.taken // 16)))
            self._reserve = rows[::-1]
        return self._reserve.pop()
