"""The process of one node: from its start to its end, and its conversation with the coordinator."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import cause
from gossamer.messages.tags import Traffic
from gossamer.node import NodeRuntime
from gossamer.runtime.events import begins
from gossamer.runtime.processes.channel import AsyncChannel
from gossamer.runtime.processes.node_process.checkpoints import NodeCheckpoints
from gossamer.runtime.processes.node_process.clock import Clock
from gossamer.runtime.processes.node_process.computing import Computing
from gossamer.runtime.processes.node_process.context import NodeContext
from gossamer.runtime.processes.node_process.cutting import Cutting
from gossamer.runtime.processes.node_process.host import NodeHost
from gossamer.runtime.processes.node_process.recording import Recording
from gossamer.runtime.processes.node_process.restart import RestartFile
from gossamer.runtime.processes.node_process.warmup import Stage
from gossamer.runtime.processes.protocol import (
    Arrival,
    At,
    Consumed,
    Crash,
    Done,
    Drop,
    Event,
    Expect,
    Failed,
    Final,
    Find,
    Finish,
    FromNode,
    Go,
    Idle,
    Kept,
    Leave,
    Lost,
    Meet,
    Met,
    Moved,
    Progress,
    Reachable,
    Ready,
    Slots,
    Snapshot,
    TimeUp,
    ToNode,
    Unreachable,
)
from gossamer.runtime.processes.system.memory import FINAL, SharedModels, private_bytes
from gossamer.runtime.processes.transport.peer import Endpoint
from gossamer.runtime.processes.transport.shaper import Shaper
from gossamer.runtime.processes.transport.transport import Transport
from gossamer.runtime.recording import Spent, Usage, is_due
from gossamer.runtime.rejoin import newcomer
from gossamer.runtime.setup import Setup
from gossamer.runtime.timeline import timeline_log
from gossamer.runtime.unawaited import unawaited_calls_fail

PROGRESS_S = 0.2
"""Seconds between two reports of a node's progress."""
ALIVE_S = 1.0
"""Seconds between two signs of life of a node that waits, or evaluates its last model."""
NODES_HEARD_A_SECOND = 256
"""How many waiting nodes may say so in a second."""
TASKS_END_S = 5.0
"""Seconds that a node waits at its end for tasks that were cancelled."""
LAST_CUT_S = 20.0
"""Seconds in which the last checkpoint of a run has to be written, before its nodes end without it."""


def main(rank: int, setup: Setup, context: NodeContext, stage: Stage) -> int:
    """Be a node (from a checkpoint on, where there is one) in a process that was just forked; gives its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the launcher, which ends the run in order
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return asyncio.run(NodeProcess(rank, setup, context, stage).run())


class NodeProcess:
    """A node, and what its process does for it."""

    def __init__(self, rank: int, setup: Setup, context: NodeContext, stage: Stage) -> None:
        self._rank, self._setup, self._context, self._rows = rank, setup, context, stage.rows
        experiment, folder, cut = setup.experiment, context.folder, context.cut
        self._models = SharedModels(
            context.memory, experiment.nodes, setup.layout.size, setup.layout.buffer_size
        )
        self._timeline = timeline_log(experiment, folder, rank)
        self._saved = None if cut is None else cut.read(rank, self._keep)
        self._clock = Clock(
            time_s=0.0 if self._saved is None else self._saved.time_s,
            wall_s=0.0 if cut is None else cut.wall_s,
        )
        self._computing = Computing(rank, setup, context, stage, self._clock, self._timeline)
        rounds = experiment.stop.rounds
        self._host = NodeHost(stage.rows, self._clock, self._computing, rounds, self._end_round)
        self._node = NodeRuntime(setup.node(rank, stage.initial(rank)), self._host)
        self._usage = Usage()
        self._said = 0.0
        self._checkpoints: NodeCheckpoints | None = None
        self._cutting: Cutting | None = None
        self._last_cut: int | None = None
        self._last_row = False
        if not experiment.has_faults and (experiment.checkpoint.on or cut is not None):
            self._checkpoints = NodeCheckpoints(
                self._node, experiment, context, self._clock.now, self._state, self._tell, self._saved
            )
            self._cutting = self._checkpoints.cutting
            if self._saved is not None:
                self._usage.restore(self._saved.engine["usage"])
                self._computing.restore(self._saved.engine["computing_s"])
        self._arrival: Arrival | None = None
        self._crashes = list(context.crashes)
        self._saves = experiment.checkpoint.on and experiment.has_faults
        self._restart = RestartFile(
            folder,
            self._node,
            experiment.checkpoint,
            self._clock.now,
            self._tell,
        )
        self._shaper: Shaper | None
        self._transport: Transport
        self._recording: Recording
        self._channel: AsyncChannel[ToNode]
        self._go: asyncio.Future[None]
        self._finish: asyncio.Future[str]

    def _tell(self, message: FromNode) -> None:
        self._channel.send(message)

    # --- from start to end

    async def run(self) -> int:
        """Be the node to its end; gives the exit code of its process."""
        loop = asyncio.get_running_loop()
        self._go, self._finish = loop.create_future(), loop.create_future()
        context = self._context
        self._channel = AsyncChannel(context.channel, ToNode, self._hear, lambda: os._exit(1))
        experiment, cutting, checkpoints = self._setup.experiment, self._cutting, self._checkpoints
        self._shaper = Shaper.of(self._rank, self._setup.network, experiment.nodes, experiment.seed, loop)
        end = Endpoint(
            self._rank,
            list(context.addresses),
            context.token,
            limit=self._setup.message_limit,
            deliver=self._node.deliver if checkpoints is None else checkpoints.deliver,
            lost=lambda rank, why: self._tell(Unreachable(rank, why)),
            event=lambda kind, text: self._tell(Event(kind, text)),
            now=self._clock.now,
            failed=self._node.fail,
            watch=None if self._timeline is None else partial(self._timeline.sent, self._rank),
            shaper=self._shaper,
            security=context.security,
            heartbeat_s=experiment.failures.heartbeat_s or self._default_heartbeat_s(),
            detection_s=experiment.failures.detection_s,
            found=lambda rank: self._tell(Reachable(rank)),
            marked=None if cutting is None else cutting.marked,
            told=None if cutting is None else cutting.told,
            relinked=None if cutting is None else cutting.relinked,
            incarnation=context.incarnation,
        )
        self._host.transport = self._transport = Transport(context.listener, end)
        self._recording = Recording(
            self._node,
            self._setup,
            self._models,
            self._clock,
            self._computing,
            self._usage,
            self._transport,
            self._shaper,
            self._tell,
        )
        if checkpoints is not None:
            checkpoints.begin(self._transport)
        try:
            await self._transport.start()
            self._tell(Ready())
            await asyncio.wait((self._go, self._finish), return_when=asyncio.FIRST_COMPLETED)
            if self._go.done():
                with unawaited_calls_fail((self._node,)):
                    await self._protocol()
            self._leave()
        except Exception as error:  # noqa: BLE001 - an algorithm may raise anything; the coordinator is told
            text = "".join(traceback.format_exception(error))
            self._tell(Failed(cause(error), self._node.round, text))
            await self._finish
            return 1
        await self._node.end()
        await self._transport.close()
        if self._timeline is not None:
            self._timeline.close()
        return 0

    async def _protocol(self) -> None:
        evaluation = self._setup.experiment.evaluation
        if evaluation.every_rounds is not None and self._saved is None and self._arrival is None:
            await self._recording.record(0)
        beside = [asyncio.ensure_future(self._watch())]
        if evaluation.every_s:
            beside.append(asyncio.ensure_future(self._ticks(evaluation.every_s)))
        if (time_s := self._setup.experiment.stop.time_s) is not None:
            beside.append(asyncio.ensure_future(self._say_when(time_s)))
        for task in beside:
            task.add_done_callback(self._beside_ended)
        life = asyncio.ensure_future(self._life())
        await asyncio.wait((life, self._finish), return_when=asyncio.FIRST_COMPLETED)
        for task in (life, *beside):
            task.cancel()
        if life.done() and not life.cancelled():
            life.result()  # its failure
        reason = await self._finish
        # What is recorded and saved of its end is how it ends. (A task that does not let itself be cancelled is not awaited.)
        with suppress(TimeoutError):
            async with asyncio.timeout(TASKS_END_S):
                await self._node.end()
        if self._last_row:
            alive = asyncio.ensure_future(self._say_alive())
            await self._recording.record("end")
            alive.cancel()
        elif reason == "left":
            await self._recording.flush()
            if not is_due(self._setup, self._node.round):
                await self._recording.record("end")
        if self._cutting is not None and self._last_cut is not None:
            await self._cutting.last(self._last_cut, LAST_CUT_S)

    async def _end_round(self) -> None:
        """The node has completed a round."""
        self._report()
        if is_due(self._setup, self._node.round):
            await self._recording.record(self._node.round)
        else:
            await asyncio.sleep(0)  # a round that waits for nothing still lets the others speak
        if self._checkpoints is not None:
            self._checkpoints.round_ended()
        if self._saves:
            self._restart.round_ended()
        if self._crashes:
            self._crash_if_due()

    def _crash_if_due(self) -> None:
        for number, round in enumerate(self._crashes):
            if self._node.round >= round:
                self._report(final=True)
                self._tell(Crash(number))
                os.kill(os.getpid(), signal.SIGKILL)

    def _leave(self) -> None:
        if (slowness := self._computing.slowness) is not None:
            self._tell(Event("slow", slowness))
        self._models.write(FINAL, self._rank, self._node.model)
        self._tell(Final(self._node.round, private_bytes(), self._computing.forms()))

    # --- what it tells

    def _report(self, final: bool = False) -> None:
        now = time.monotonic()
        if final or now - self._said > PROGRESS_S:
            self._said = now
            self._tell(Progress(self._node.round, self._clock.now()))

    async def _say_alive(self) -> None:
        """The last evaluation may take long; the coordinator is to know that it goes on."""
        while True:
            self._report(final=True)
            await asyncio.sleep(ALIVE_S)

    async def _watch(self) -> None:
        """Tell the coordinator when nothing but a message could wake this node, and what it waits for."""
        before = None
        # A thousand nodes that say every second that they wait would keep a core busy.
        every_s = max(ALIVE_S, self._setup.experiment.nodes / NODES_HEARD_A_SECOND)
        while True:
            await asyncio.sleep(every_s)
            traffic = self._transport.traffic
            counts = (traffic.messages_sent - self._transport.lost_on_the_way, traffic.messages_received)
            idle = self._clock.quiet and not (self._computing.under_way or self._transport.busy)
            if idle and counts == before:
                self._tell(Idle(*counts, self._node.waiting()))
            elif before is not None:
                self._tell(Idle(0, 0, None))
            before = counts if idle else None

    async def _life(self) -> None:
        run, arrival = self._setup.experiment.algorithm.run, self._arrival
        if arrival is None:
            await self._node.live(run(self._node.node))
        else:
            asks = self._setup.experiment.failures.detection_s if arrival.start_from == "neighbor" else None
            await self._node.live(newcomer(run, self._node, asks))
        self._report(final=True)
        if self._checkpoints is not None:
            self._checkpoints.over()
        self._tell(Done(self._node.round))
        raise await self._node.failure()

    def _default_heartbeat_s(self) -> float | None:
        """Between machines, only silence tells that a peer is gone; on one, its worker sees it."""
        local = self._context.security is None
        return None if local else self._setup.experiment.failures.detection_s / 5

    def _beside_ended(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._node.fail(error)

    async def _ticks(self, every_s: float) -> None:
        first = 0 if self._arrival is None else self._arrival.tick
        for number in count(math.ceil(self._clock.now() / every_s) if self._saved is not None else first):
            await self._clock.until(number * every_s)
            await self._recording.record(("tick", number))

    async def _say_when(self, time_s: float) -> None:
        """The run ends when the first node's clock says so."""
        await self._clock.until(time_s)
        self._tell(TimeUp())

    # --- what it is told

    def _hear(self, message: ToNode) -> None:
        cutting = self._cutting
        match message:
            case Go(start=start, arrival=arrival):
                self._clock.begin(start)
                if arrival is not None:
                    self._arrive(arrival)
                if self._shaper is not None:
                    self._shaper.start(self._clock.start)
                self._go.set_result(None)
            case Finish(reason=reason, checkpoint=number, row=row):
                if not self._finish.done():
                    self._last_cut, self._last_row = number, row
                    self._finish.set_result(reason)
                    self._recording.end()
            case Lost(rank=rank, why=why, incarnation=incarnation):
                self._host.lost.add(rank)
                self._transport.mark_lost(rank, why, incarnation)
                self._node.peer_lost()
                if cutting is not None:
                    cutting.lost(rank)
            case Snapshot(number=number) if cutting is not None:
                cutting.cut(number)
            case Expect(number=number, ranks=ranks) if cutting is not None:
                cutting.expect(number, ranks)
            case Kept(number=number) if cutting is not None:
                cutting.kept(number)
            case Drop(number=number) if cutting is not None:
                cutting.drop(number)
            case Moved(rank=rank, host=host, port=port):
                self._transport.move(rank, (host, port))
            case Leave():
                self._host.leaving = True
            case Find(rank=rank, restarted=restarted):
                self._find(rank, restarted=restarted)
            case Meet(rank=rank, since=since):
                self._node.peer_found(rank, since, anew=False)
            case Met(first=first, together=together):
                self._meet(together)
                self._node.rejoin(first)
            case Slots(count=count):
                self._computing.cpu_slots.count = count
            case Consumed():
                self._recording.consumed()

    def _find(self, rank: int, *, restarted: bool) -> None:
        """A node comes, or comes back, perhaps this one: say which round this one is in."""
        if rank != self._rank:
            self._host.lost.discard(rank)
            self._transport.mark_found(rank)
            # Until it's known which round it begins with, it's in none that this node is in.
            waits = self._setup.experiment.algorithm.gathers
            self._node.peer_found(rank, self._node.round + 1 if waits else 0, anew=restarted)
        self._tell(At(rank, self._node.round))

    def _meet(self, together: Sequence[Sequence[int]]) -> None:
        for rank, since in together:
            self._host.lost.discard(rank)
            self._transport.mark_found(rank)
            self._node.peer_found(rank, since, anew=False)

    def _arrive(self, arrival: Arrival) -> None:
        self._arrival = arrival
        saved = self._restart.restore() if arrival.start_from == "checkpoint" else None
        text = f"node {self._rank} begins with {begins(arrival.start_from, saved)}"
        self._tell(Event("begins", text))
        self._transport.traffic = Traffic(**arrival.traffic)
        self._usage.restore([self._clock.now(), 0.0, 0.0, 0.0])
        self._meet(arrival.together)
        self._node.rejoin(arrival.first)
        self._node.catch_up()

    # --- what is saved

    def _keep(self, tensor: Tensor) -> Tensor:
        """Where a node keeps what was read from a file."""
        row = tensor.dtype is torch.float32 and tensor.shape == (self._setup.layout.size,)
        return self._rows.store(tensor) if row else tensor

    def _carried(self) -> tuple[float | None, float | None]:
        """What the links have carried, see :class:`Spent`: since the process began, not the run."""
        return (0.0, 0.0) if self._shaper is None else self._shaper.carried_seconds()

    def _state(self) -> dict[str, Any]:
        """What is saved with the node."""
        return {
            "traffic": asdict(self._transport.saved_traffic()),
            "computing_s": self._computing.seconds(),
            "usage": self._usage.saved(since=Spent(0.0, *self._carried())),
            "drawn": {},
            "secrets": 0,
        }
