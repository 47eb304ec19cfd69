"""What a node reports for the record, from its own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from gossamer.node import NodeRuntime
from gossamer.runtime.barrier import Moment
from gossamer.runtime.processes.node_process.clock import Clock
from gossamer.runtime.processes.node_process.computing import Computing
from gossamer.runtime.processes.protocol import FromNode, Row, View
from gossamer.runtime.processes.system.memory import SNAPSHOTS, SharedModels
from gossamer.runtime.processes.transport.shaper import Shaper
from gossamer.runtime.processes.transport.transport import Transport
from gossamer.runtime.recording import Spent, Usage, node_row
from gossamer.runtime.setup import Setup

FLUSH_S = 5.0
"""Seconds in which the next bytes of a node's last round have to leave before its last row is written without them."""


class Recording:
    """The rows of one node, each with a snapshot of its model for the rows of the network.

    Args:
        node: who is recorded.
        setup: what is run.
        models: where its snapshots go.
        clock: the node's.
        computing: evaluates its models.
        usage: how it spent its time until its last row.
        transport: its connections.
        shaper: what the network does to messages; None is nothing.
        tell: tells the coordinator.
    """

    def __init__(
        self,
        node: NodeRuntime,
        setup: Setup,
        models: SharedModels,
        clock: Clock,
        computing: Computing,
        usage: Usage,
        transport: Transport,
        shaper: Shaper | None,
        tell: Callable[[FromNode], None],
    ) -> None:
        self._node, self._setup, self._models = node, setup, models
        self._clock, self._computing, self._usage = clock, computing, usage
        self._transport, self._shaper, self._tell = transport, shaper, tell
        self._given = self._consumed = 0  # snapshots
        self._freed = asyncio.Event()
        self._ending = False

    async def record(self, moment: Moment) -> None:
        """Evaluate a snapshot, off the node's clock, and report it."""
        node, setup = self._node, self._setup
        if node.rank not in setup.outcome_ranks and node.round == 0 and node.node.samples == 0:
            return  # it has no part in the algorithm
        model, time_s = node.model, self._clock.now()
        links = (None, None) if self._shaper is None else self._shaper.carried_seconds()
        spent = Spent(self._computing.seconds(), *links)
        last = moment == "end" or node.round == setup.experiment.stop.rounds
        with self._clock.pause():
            if last and not (self._shaper and moment == "end"):
                await self.flush()
            shares = self._usage.shares(time_s, spent)
            row = node_row(node, moment, self._transport.traffic, time_s, self._clock.wall(), shares)
            if node.rank in setup.evaluated:
                row |= await self._computing.evaluate(model)
            slot = await self._slot(last) if node.rank in setup.outcome_ranks else None
        if slot is not None:
            self._models.write(slot, node.rank, model)
        if (view := node.node.view) is not None:
            self._tell(View(moment, node.round, list(view)))
        self._tell(Row(moment, row, slot))

    async def flush(self) -> None:
        """Wait for what was sent, which is counted when it has left, as long as something leaves."""
        sent = -1
        while sent < self._transport.traffic.bytes_sent:
            sent = self._transport.traffic.bytes_sent
            with suppress(TimeoutError):
                await self._transport.flush(FLUSH_S)
                return

    def consumed(self) -> None:
        """The coordinator has taken up a snapshot."""
        self._consumed += 1
        self._freed.set()

    def end(self) -> None:
        """The run ends: nobody waits any more for snapshots to be taken up."""
        self._ending = True
        self._freed.set()

    async def _slot(self, last: bool) -> int | None:
        """A place for a snapshot, free again when the coordinator has taken its last one up. A node waits for that where
        the network's rows are all there is, and for the last of them; else it goes on without."""
        average = self._setup.experiment.evaluation.nodes == "average"
        while self._given - self._consumed >= SNAPSHOTS:
            if not (average or last) or self._ending:
                return None
            self._freed.clear()
            await self._freed.wait()
        self._given += 1
        return (self._given - 1) % SNAPSHOTS
