"""One node, one process: the node's side of the engine ``processes``."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.engines.outcome import cause
from gossamer.engines.processes.channel import AsyncChannel
from gossamer.engines.processes.memory import FINAL, SNAPSHOTS, SharedModels, one_of
from gossamer.engines.processes.transport import Transport
from gossamer.engines.recording import is_due, node_row
from gossamer.engines.setup import Setup
from gossamer.learning.computation import Computation, execute
from gossamer.learning.evaluate import Evaluator
from gossamer.learning.memory import trim
from gossamer.learning.mixing import Mix
from gossamer.learning.rows import Rows
from gossamer.learning.trainer import SequentialTrainer
from gossamer.messages import Payload, Sending, Traffic
from gossamer.node import Node
from gossamer.payload import encode
from gossamer.results.folder import RunFolder

PROGRESS_S = 0.2
"""Seconds between two reports of a node's progress."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where a node's process finds what it shares with the others.

    Args:
        listener: its listening socket.
        channel: its end of the channel to the supervisor.
        addresses: (host, port) of every rank.
        token: what the nodes of this run know each other by.
        memory: descriptor of the shared file: models, and the places to compute in.
        at_once: how many nodes may compute at the same time.
        trims: hand memory back after computing (nodes outnumber cores).
    """

    listener: socket.socket
    channel: socket.socket
    addresses: Sequence[tuple[str, int]]
    token: bytes
    memory: int
    at_once: int
    trims: bool


def main(rank: int, setup: Setup, place: Place, folder: RunFolder) -> int:
    """A node's whole life, in a process that was just forked; gives its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the launcher, which ends the run in order
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return asyncio.run(_Worker(rank, setup, place, folder).live())


class _Worker:
    """The node's :class:`~gossamer.host.Host`, and its conversation with the supervisor."""

    def __init__(self, rank: int, setup: Setup, place: Place, folder: RunFolder) -> None:
        self._rank, self._setup, self._place = rank, setup, place
        self.lost: set[int] = set()
        self._rows = Rows(setup.layout.size)
        experiment = setup.experiment
        self._trainer = SequentialTrainer(setup.task, experiment.optimizer, self._rows.fresh)
        self._evaluator = Evaluator(setup.task, experiment.seed, experiment.evaluation.samples)
        self._models = SharedModels(
            place.memory, experiment.nodes, setup.layout.size, setup.layout.buffer_size
        )
        self._metrics = folder.segment("metrics", rank)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._turn = asyncio.Lock()  # computations of this node, first come first served
        self._node = Node(setup.node(rank), self)
        self._start = time.monotonic()
        self._paused_s = 0.0
        self._said = 0.0
        self._evaluations = 0
        self._consumed = 0
        self._transport: Transport
        self._channel: AsyncChannel
        self._go: asyncio.Future[None]
        self._finish: asyncio.Future[str]

    # --- life

    async def live(self) -> int:
        loop = asyncio.get_running_loop()
        self._go, self._finish = loop.create_future(), loop.create_future()
        self._channel = AsyncChannel(self._place.channel, self._hear, lambda: os._exit(1))
        self._transport = Transport(
            self._rank,
            self._place.listener,
            self._place.addresses,
            self._place.token,
            limit=self._setup.message_limit,
            deliver=self._node.deliver,
            lost=lambda rank, why: self._channel.send("unreachable", rank, why),
            event=lambda kind, text: self._channel.send("event", kind, text),
            now=self.now,
        )
        try:
            await self._transport.start()
            self._channel.send("ready")
            await self._go
            await self._protocol()
        except Exception as error:  # noqa: BLE001 - an algorithm may raise anything; the supervisor is told
            text = "".join(traceback.format_exception(error))
            self._channel.send("failed", cause(error), self._node.round, text)
            await self._finish
            return 1
        await self._node.end()
        await self._transport.close()
        self._metrics.close()
        return 0

    async def _protocol(self) -> None:
        evaluation = self._setup.experiment.evaluation
        if evaluation.every_rounds is not None:
            await self._record(0)
        ticks = asyncio.ensure_future(self._ticks(evaluation.every_s)) if evaluation.every_s else None
        life = asyncio.ensure_future(self._life())
        await asyncio.wait((life, self._finish), return_when=asyncio.FIRST_COMPLETED)
        for task in (life, ticks):
            if task is not None and not task.done():
                task.cancel()
        if life.done() and not life.cancelled():
            life.result()  # its failure
        reason = await self._finish
        stop = self._setup.experiment.stop.rounds
        if reason in ("time", "target") and (stop is None or self._node.round < stop):
            await self._record("end")
        self._models.write(FINAL, self._rank, self._node.model)
        self._channel.send("final", self._node.round)

    async def _life(self) -> None:
        await self._node.live(self._setup.experiment.algorithm.run(self._node))
        self._report(final=True)
        self._channel.send("done", self._node.round)
        raise await self._node.failure()

    async def _ticks(self, every_s: float) -> None:
        number = 0
        while True:
            await asyncio.sleep(max(number * every_s - (time.monotonic() - self._start), 0))
            await self._record(("tick", number))
            number += 1

    def _hear(self, message: list[Any]) -> None:
        what, *rest = message
        if what == "go":
            self._start = rest[0]
            self._go.set_result(None)
        elif what == "finish" and not self._finish.done():
            self._finish.set_result(rest[0])
        elif what == "lost":
            self.lost.add(rest[0])
            self._transport.mark_lost(rest[0], rest[1])
            self._node.peer_lost()
        elif what == "consumed":
            self._consumed += 1

    # --- the host

    @property
    def traffic(self) -> Traffic:
        return self._transport.traffic

    def now(self) -> float:
        return time.monotonic() - self._start - self._paused_s

    def timer(self, seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, call)

    def store(self, vector: Tensor) -> Tensor:
        return self._rows.store(vector)

    def is_stored(self, tensor: Tensor) -> bool:
        return self._rows.owns(tensor)

    def fresh(self, length: int) -> Tensor:
        return self._rows.fresh() if length == self._rows.length else torch.empty(length)

    def send(self, to: Sequence[int], payload: Payload, tag: tuple[str | int, ...]) -> list[Sending]:
        encoded = encode(payload)
        return [self._transport.send(rank, encoded, tag) for rank in to]

    async def compute(self, computation: Computation) -> Any:
        async with self._turn:
            job = computation.prepare()
            running = asyncio.get_running_loop().run_in_executor(
                self._thread, self._execute, computation, job
            )
            try:
                result = await asyncio.shield(running)
            except asyncio.CancelledError:
                # The thread can't be stopped; what it finds is not committed, and the next one waits behind
                # it.
                running.add_done_callback(lambda done: done.cancelled() or done.exception())
                raise
            return computation.commit(result)

    def _execute(self, computation: Computation, job: Any) -> Any:
        with one_of(self._place.memory, self._place.at_once, self._rank):
            [result] = execute(computation.kind, [job], self._trainer, self._evaluator)
        if self._place.trims:
            trim()
        return result

    async def mix(self, prepare: Callable[[], Mix], commit: Callable[[Any], Any]) -> Any:
        # What was spawned before gets its turn first, as in the simulator, where mixing comes last of an
        # instant.
        await asyncio.sleep(0)
        return commit(prepare().run(self.fresh))

    def finished(self, rounds: int) -> bool:
        last = self._setup.experiment.stop.rounds
        return last is not None and rounds >= last

    async def end_round(self) -> None:
        self._report()
        if is_due(self._setup, self._node.round):
            await self._record(self._node.round)
        else:
            await asyncio.sleep(0)  # a round that waits for nothing still lets the others speak

    def secret(self, n: int) -> bytes:
        return os.urandom(n)

    # --- recording

    def _report(self, final: bool = False) -> None:
        now = time.monotonic()
        if final or now - self._said > PROGRESS_S:
            self._said = now
            self._channel.send("progress", self._node.round, self.now())

    async def _record(self, moment: Any) -> None:
        """Judge a snapshot, off the node's clock, and record it."""
        node, setup = self._node, self._setup
        if self._rank not in setup.judged and node.round == 0 and node.samples == 0:
            return  # it has no part in the algorithm
        model, began, time_s = node.model, time.monotonic(), self.now()
        row = node_row(node, self.traffic, time_s, began - self._start, None)
        if self._rank in setup.evaluated:
            judged = asyncio.get_running_loop().run_in_executor(self._thread, self._judge, model)
            row |= {f"test_{name}": value for name, value in (await judged).items()}
        self._paused_s += time.monotonic() - began
        self._metrics.append(row)
        slot = None
        # A slot is free again when every node's snapshot of its last use was taken up; no node waits for
        # that.
        if self._rank in setup.judged and self._evaluations - self._consumed < SNAPSHOTS:
            slot = self._evaluations % SNAPSHOTS
            self._models.write(slot, self._rank, model)
        self._evaluations += 1
        self._channel.send("row", moment, row, slot)

    def _judge(self, model: Any) -> dict[str, float]:
        with one_of(self._place.memory, self._place.at_once, self._rank):
            return self._evaluator.test(model)
