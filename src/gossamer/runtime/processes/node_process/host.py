"""The interface of the engine ``processes`` to a node, in the node's process: its context, its clock, and its
:class:`~gossamer.node.setup.Host`."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gossamer.learning.mixing import Mix
from gossamer.learning.rows import Rows
from gossamer.messages import encode
from gossamer.messages.tags import Payload, Sending, Traffic
from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder
from gossamer.runtime.processes.security import Security
from gossamer.runtime.processes.transport.transport import Transport

if TYPE_CHECKING:
    from gossamer.runtime.processes.node_process.computing import Computing

SHORTEST_S = 0.001
"""Seconds that a node sleeps at least: its clock may stand still meanwhile."""


@dataclass(frozen=True, eq=False)
class NodeContext:
    """What a node's process gets from the worker that forks it."""

    listener: socket.socket
    channel: socket.socket  # to the worker
    addresses: Sequence[tuple[str, int]]  # (host, port) of every rank
    token: bytes  # by which the nodes of this run know each other
    memory: int  # descriptor of the shared file: models, and the CPU slots
    at_once: int  # how many nodes of this machine may compute at the same time
    wakeup: tuple[int, int]  # where they tell each other that a CPU slot is free
    trims: bool  # hand memory back after computing
    folder: RunFolder
    security: Security | None  # None is for loopback
    cut: Cut | None  # the checkpoint from which it goes on; None is the start
    checkpoints: (
        tuple[str, int] | None
    )  # their digest, and the number of the next one; None: as the folder says
    incarnation: int  # how often the node was started before
    crashes: Sequence[int]  # rounds after which it kills itself


class Timer:
    """A call that is due later, noted among a node's timers until then."""

    def __init__(self, pending: set[Timer], seconds: float, call: Callable[[], None]) -> None:
        self._pending, self._call = pending, call
        self._handle = asyncio.get_running_loop().call_later(seconds, self._due)
        pending.add(self)

    def _due(self) -> None:
        self.cancel()  # the handle holds what holds it, which only the collector of cyclic garbage would find
        self._call()

    def cancel(self) -> None:
        self._pending.discard(self)
        self._handle.cancel()


class Clock:
    """Seconds since the run's start, without those in which the node was evaluated: it stands still then. It goes on at
    ``time_s``, in a run that has taken ``wall_s`` real seconds before."""

    def __init__(self, time_s: float = 0.0, wall_s: float = 0.0) -> None:
        self._before_s, self._wall_before_s = time_s, wall_s
        self._paused_s = 0.0
        self._pauses: list[float] = []  # since when evaluations go on
        self._timers: set[Timer] = set()
        self.begin(time.monotonic())

    def begin(self, start: float) -> None:
        """The run starts, or goes on, at this instant of the monotonic clock."""
        self.start = start - self._before_s
        self._wall_start = start - self._wall_before_s

    def now(self) -> float:
        now = self._pauses[0] if self._pauses else time.monotonic()
        return now - self.start - self._paused_s

    def wall(self) -> float:
        return time.monotonic() - self._wall_start

    @property
    def quiet(self) -> bool:
        return not (self._timers or self._pauses)

    @contextmanager
    def pause(self) -> Iterator[None]:
        self._pauses.append(time.monotonic())
        try:
            yield
        finally:
            began = self._pauses[0]
            self._pauses.pop()
            if not self._pauses:
                self._paused_s += time.monotonic() - began

    async def until(self, time_s: float) -> None:
        while (left := time_s - self.now()) > 0:
            await asyncio.sleep(max(left, SHORTEST_S))

    def timer(self, seconds: float, call: Callable[[], None], *, background: bool) -> Timer:
        """Call after some seconds; the clock is quiet in spite of calls in the background."""
        return Timer(set() if background else self._timers, seconds, call)


class NodeHost:
    """The host of one node."""

    transport: Transport

    def __init__(
        self,
        rows: Rows,
        clock: Clock,
        computing: Computing,
        rounds: int | None,
        end_round: Callable[[], Awaitable[None]],
    ) -> None:
        self.lost: set[int] = set()
        self.leaving = False  # whether it was told to leave
        self._clock, self._rounds = clock, rounds
        self.now, self.compute, self.end_round = clock.now, computing.compute, end_round
        self.store, self.is_stored, self.fresh = rows.store, rows.owns, rows.vector

    @property
    def traffic(self) -> Traffic:
        return replace(self.counters)

    @property
    def counters(self) -> Traffic:
        return self.transport.traffic

    def timer(self, seconds: float, call: Callable[[], None], *, background: bool = False) -> Timer:
        return self._clock.timer(seconds, call, background=background)

    def send(self, to: Sequence[int], payload: Payload, tag: tuple[str | int, ...]) -> list[Sending]:
        encoded = encode(payload)
        return [self.transport.send(rank, encoded, tag) for rank in to]

    async def mix(self, prepare: Callable[[], Mix], commit: Callable[[Any], Any], *, read: bool) -> Any:
        # Tasks that were spawned before get their turn first, as in the simulator, where mixing comes last of an instant.
        await asyncio.sleep(0)
        return commit(prepare().run(self.fresh))

    def settle(self, vector: Tensor) -> None:
        """Nothing is put off here."""

    def finished(self, rounds: int) -> bool:
        return self.leaving or (self._rounds is not None and rounds >= self._rounds)

    def secret(self, n: int) -> bytes:
        return os.urandom(n)
