"""What the engine ``processes`` gives a node: its :class:`~gossamer.node.host.Host`, in its own process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from gossamer.learning.computation import Computation
from gossamer.learning.mixing import Mix
from gossamer.learning.rows import Rows
from gossamer.messages import encode
from gossamer.messages.tags import Payload, Sending, Traffic
from gossamer.runtime.processes.node_process.clock import Clock, Timer
from gossamer.runtime.processes.node_process.computing import Computing
from gossamer.runtime.processes.transport.transport import Transport


class NodeHost:
    """The host of one node.

    Args:
        rows: where its vectors are.
        clock: its clock.
        computing: its computations.
        rounds: after how many it is at its end; None is never.
        end_round: called when a round was counted.

    Attributes:
        transport: its connections; there from the start of its life on.
        leaving: whether it was told to leave.
    """

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
        self.leaving = False
        self._rows, self._clock, self._computing = rows, clock, computing
        self._rounds, self._end_round = rounds, end_round

    @property
    def traffic(self) -> Traffic:
        return replace(self.counters)

    @property
    def counters(self) -> Traffic:
        return self.transport.traffic

    def now(self) -> float:
        return self._clock.now()

    def timer(self, seconds: float, call: Callable[[], None], *, background: bool = False) -> Timer:
        return self._clock.timer(seconds, call, background=background)

    def store(self, vector: Tensor) -> Tensor:
        return self._rows.store(vector)

    def is_stored(self, tensor: Tensor) -> bool:
        return self._rows.owns(tensor)

    def fresh(self, length: int) -> Tensor:
        return self._rows.vector(length)

    def send(self, to: Sequence[int], payload: Payload, tag: tuple[str | int, ...]) -> list[Sending]:
        encoded = encode(payload)
        return [self.transport.send(rank, encoded, tag) for rank in to]

    async def compute(self, computation: Computation) -> Any:
        return await self._computing.compute(computation)

    async def mix(self, prepare: Callable[[], Mix], commit: Callable[[Any], Any], *, read: bool) -> Any:
        # What was spawned before gets its turn first, as in the simulator, where mixing comes last of an
        # instant.
        await asyncio.sleep(0)
        return commit(prepare().run(self.fresh))

    def settle(self, vector: Tensor) -> None:
        """Nothing is put off here."""

    def finished(self, rounds: int) -> bool:
        return self.leaving or (self._rounds is not None and rounds >= self._rounds)

    async def end_round(self) -> None:
        await self._end_round()

    def secret(self, n: int) -> bytes:
        return os.urandom(n)
