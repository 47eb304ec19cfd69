"""Mixing steps of all nodes, when everything else of an instant is done: one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from gossamer.engines.simulate.clock import Clock
from gossamer.learning.mixing import Fresh, Mix
from gossamer.learning.mixing_rows import Sum, mix_rows
from gossamer.learning.rows import Rows
from gossamer.learning.workers import Workers


@dataclass(eq=False, slots=True)
class _Request:
    rank: int
    prepare: Callable[[], Mix]
    commit: Callable[[Any], Any]
    future: asyncio.Future[Any]


class Mixing:
    """Carries out mixing steps in the order (rank, order of the calls); each step is indivisible.

    Args:
        clock: says when all else of an instant is done.
        rows: where vectors live.
        workers: share the work.
        fresh: makes vectors for sums of anything but whole rows.
    """

    def __init__(self, clock: Clock, rows: Rows, workers: Workers, fresh: Fresh) -> None:
        self._clock, self._rows, self._workers, self._fresh = clock, rows, workers, fresh
        self._requests: list[_Request] = []

    def submit(self, rank: int, prepare: Callable[[], Mix], commit: Callable[[Any], Any]) -> Awaitable[Any]:
        """Queue a node's step; gives what ``commit`` returns."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._requests:
            self._clock.when_quiet(-1, self._flush)
        self._requests.append(_Request(rank, prepare, commit, future))
        return future

    def _flush(self) -> None:
        requests, self._requests = self._requests, []
        requests.sort(key=lambda request: request.rank)
        while requests:
            # A node's second step reads what its first one wrote.
            ranks: set[int] = set()
            now: list[_Request] = []
            later: list[_Request] = []
            for request in requests:
                (later if request.rank in ranks else now).append(request)
                ranks.add(request.rank)
            self._run(now)
            requests = later

    def _run(self, requests: list[_Request]) -> None:
        batch: list[tuple[_Request, Sum]] = []
        for request in requests:
            if request.future.done():  # cancelled
                continue
            try:
                mix = request.prepare()
                terms = mix.terms()
                if terms is not None and all(self._rows.number(vector) is not None for vector in terms[0]):
                    batch.append((request, Sum(*terms)))
                else:
                    request.future.set_result(request.commit(mix.run(self._fresh)))
            except Exception as error:  # noqa: BLE001 - the author's inbox or weights; raised where they are awaited
                request.future.set_exception(error)
        if batch:
            results = mix_rows(self._rows, [terms for _, terms in batch], self._workers)
            for (request, _), result in zip(batch, results, strict=True):
                request.future.set_result(request.commit(result))
