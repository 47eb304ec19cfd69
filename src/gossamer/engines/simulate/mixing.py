"""Mixing steps of all nodes, when everything else of an instant is done: one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from gossamer.engines.profile import Profile
from gossamer.engines.simulate.clock import Clock
from gossamer.learning.mixing import Mix
from gossamer.learning.mixing_rows import Sum, mix_rows
from gossamer.learning.rows import Rows
from gossamer.learning.workers import Workers

LEAST_TERMS = 24
"""Terms of one instant's sums from which on they are done together; the bits are the same."""


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
        profile: told how long it takes.
    """

    def __init__(self, clock: Clock, rows: Rows, workers: Workers, profile: Profile) -> None:
        self._clock, self._rows, self._workers = clock, rows, workers
        self._profile = profile
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
            with self._profile.part("mix"):
                self._run(now)
            requests = later

    def _run(self, requests: list[_Request]) -> None:
        ready: list[tuple[_Request, Mix, Sum | None]] = []
        for request in requests:
            if request.future.done():  # cancelled
                continue
            try:
                mix = request.prepare()
                terms = mix.terms()
            except Exception as error:  # noqa: BLE001 - the author's inbox or weights; raised where they are awaited
                request.future.set_exception(error)
            else:
                ready.append((request, mix, None if terms is None else Sum(*terms)))
        sums = [total for _, _, total in ready if total is not None]
        together = sum(len(total.vectors) for total in sums) >= LEAST_TERMS
        mixed = mix_rows(self._rows, sums, self._workers) if together else None
        results = iter(mixed or ())
        for request, mix, total in ready:
            try:
                alone = mixed is None or total is None
                result = mix.run(self._rows.vector) if alone else next(results)
                request.future.set_result(request.commit(result))
            except Exception as error:  # noqa: BLE001 - as above
                request.future.set_exception(error)
