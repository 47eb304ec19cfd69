"""One node, one process: the node's life, and its conversation with the supervisor."""

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
from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder
from gossamer.runtime.events import begins
from gossamer.runtime.processes.system.channel import AsyncChannel
from gossamer.runtime.processes.system.memory import FINAL, SharedModels, private_bytes
from gossamer.runtime.processes.transport.shaper import Shaper
from gossamer.runtime.processes.transport.transport import Transport
from gossamer.runtime.processes.worker.checkpoints import NodeCheckpoints
from gossamer.runtime.processes.worker.clock import Clock
from gossamer.runtime.processes.worker.computing import Computing
from gossamer.runtime.processes.worker.cutting import Cutting
from gossamer.runtime.processes.worker.host import NodeHost
from gossamer.runtime.processes.worker.place import Arrival, Overseer, Place
from gossamer.runtime.processes.worker.recording import Recording
from gossamer.runtime.processes.worker.restart import RestartFile
from gossamer.runtime.processes.worker.warmup import Stage
from gossamer.runtime.recording import Spent, Usage, is_due
from gossamer.runtime.rejoin import come_back, meet_again, newcomer
from gossamer.runtime.setup import Setup
from gossamer.runtime.timeline import timeline_log
from gossamer.runtime.unawaited import unawaited_calls_fail

ALIVE_S = 1.0
"""Seconds between two signs of life of a node that waits, or evaluates its last model."""
NODES_HEARD_A_SECOND = 256
"""How many waiting nodes may say so in a second."""
TASKS_END_S = 5.0
"""Seconds that a node waits at its end for tasks that were cancelled."""
LAST_CUT_S = 20.0
"""Seconds in which the last checkpoint of a run has to be written, before its nodes end without it."""


def main(
    rank: int, setup: Setup, place: Place, stage: Stage, folder: RunFolder, cut: Cut | None = None
) -> int:
    """A node's whole life (or, from a checkpoint on, the rest of it), in a process that was just forked; gives its exit
    code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the launcher, which ends the run in order
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return asyncio.run(Worker(rank, setup, place, stage, folder, cut).live())


class Worker:
    """A node, and what its process does for it."""

    def __init__(
        self, rank: int, setup: Setup, place: Place, stage: Stage, folder: RunFolder, cut: Cut | None = None
    ) -> None:
        self._rank, self._setup, self._place, self._rows = rank, setup, place, stage.rows
        self._folder = folder
        experiment = setup.experiment
        self._models = SharedModels(
            place.memory, experiment.nodes, setup.layout.size, setup.layout.buffer_size
        )
        self._timeline = timeline_log(experiment, folder, rank)
        self._saved = None if cut is None else cut.read(rank, self._keep)
        self._clock = Clock(
            time_s=0.0 if self._saved is None else self._saved.time_s,
            wall_s=0.0 if cut is None else cut.wall_s,
        )
        self._computing = Computing(rank, setup, place, stage, self._clock, self._timeline)
        rounds = experiment.stop.rounds
        self._host = NodeHost(stage.rows, self._clock, self._computing, rounds, self._end_round)
        self._node = NodeRuntime(setup.node(rank, stage.initial(rank)), self._host)
        self._usage = Usage()
        self._said = 0.0
        self._checkpoints: NodeCheckpoints | None = None
        self._cutting: Cutting | None = None
        self._last_cut: int | None = None
        self._last_row = False
        # Who oversees itself has nobody who puts checkpoints together.
        if (
            place.oversee is None
            and not experiment.has_faults
            and (experiment.checkpoint.on or cut is not None)
        ):
            self._checkpoints = NodeCheckpoints(
                self._node, experiment, folder, self._clock.now, self._state, self._tell, cut, self._saved
            )
            self._cutting = self._checkpoints.cutting
            if self._saved is not None:
                self._usage.restore(self._saved.engine["usage"])
                self._computing.restore(self._saved.engine["computing_s"])
        self._arrival: Arrival | None = None
        self._crashes = list(place.crashes)
        self._saves = experiment.checkpoint.on and (experiment.has_faults or place.oversee is not None)
        self._restart = RestartFile(
            folder,
            self._node,
            experiment.checkpoint,
            self._clock.now,
            partial(self._tell, "event", "checkpoint"),
            keeps=place.oversee is not None,  # it may be stopped by itself
        )
        self._shaper: Shaper | None
        self._transport: Transport
        self._recording: Recording
        self._overseer: Overseer
        self._go: asyncio.Future[None]
        self._finish: asyncio.Future[str]

    def _tell(self, *message: Any) -> None:
        self._overseer.send(*message)

    # --- life

    async def live(self) -> int:
        """The node's whole life; gives the exit code of its process."""
        loop = asyncio.get_running_loop()
        self._go, self._finish = loop.create_future(), loop.create_future()
        if self._place.oversee is not None:
            self._overseer = self._place.oversee(self._hear)
        else:
            assert self._place.channel is not None
            self._overseer = AsyncChannel(self._place.channel, self._hear, lambda: os._exit(1))
        experiment, cutting, checkpoints = self._setup.experiment, self._cutting, self._checkpoints
        self._shaper = Shaper.of(self._rank, self._setup.network, experiment.nodes, experiment.seed, loop)
        self._host.transport = self._transport = self._place.connect(
            self._rank,
            self._place.listener,
            self._place.addresses,
            self._place.token,
            limit=self._setup.message_limit,
            deliver=self._node.deliver if checkpoints is None else checkpoints.deliver,
            lost=lambda rank, why: self._tell("unreachable", rank, why),
            event=lambda kind, text: self._tell("event", kind, text),
            now=self._clock.now,
            failed=self._node.fail,
            watch=None if self._timeline is None else partial(self._timeline.sent, self._rank),
            shaper=self._shaper,
            heartbeat_s=experiment.failures.heartbeat_s,
            detection_s=experiment.failures.detection_s,
            found=lambda rank: self._tell("reachable", rank),
            marked=None if cutting is None else cutting.marked,
            told=None if cutting is None else cutting.told,
            relinked=None if cutting is None else cutting.relinked,
            incarnation=self._place.life,
        )
        self._recording = Recording(
            self._node,
            self._setup,
            self._folder,
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
            self._tell("ready")
            await asyncio.wait((self._go, self._finish), return_when=asyncio.FIRST_COMPLETED)
            if self._go.done():
                with unawaited_calls_fail((self._node,)):
                    await self._protocol()
            self._leave()
        except Exception as error:  # noqa: BLE001 - an algorithm may raise anything; the supervisor is told
            text = "".join(traceback.format_exception(error))
            self._tell("failed", cause(error), self._node.round, text)
            await self._finish
            return 1
        await self._node.end()
        await self._transport.close()
        self._recording.close()
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
        elif reason == "stopped" and self._saves:
            self._restart.stopped()
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
                self._tell("crash", number)
                os.kill(os.getpid(), signal.SIGKILL)

    def _leave(self) -> None:
        if (slowness := self._computing.slowness) is not None:
            self._tell("event", "slow", slowness)
        self._models.write(FINAL, self._rank, self._node.model)
        self._tell("final", self._node.round, private_bytes())

    # --- what it tells

    def _report(self, final: bool = False) -> None:
        now = time.monotonic()
        if final or now - self._said > self._place.progress_s:
            self._said = now
            self._tell("progress", self._node.round, self._clock.now())

    async def _say_alive(self) -> None:
        """The last evaluation may take long; the supervisor is to know that it goes on."""
        while True:
            self._report(final=True)
            await asyncio.sleep(ALIVE_S)

    async def _watch(self) -> None:
        """Tell the supervisor when nothing but a message could wake this node, and what it waits for."""
        before = None
        # A thousand nodes that say every second that they wait would keep a core busy.
        every_s = max(ALIVE_S, self._setup.experiment.nodes / NODES_HEARD_A_SECOND)
        while True:
            await asyncio.sleep(every_s)
            traffic = self._transport.traffic
            counts = (traffic.messages_sent - self._transport.lost_on_the_way, traffic.messages_received)
            idle = self._clock.quiet and not (self._computing.under_way or self._transport.busy)
            if idle and counts == before:
                self._tell("idle", *counts, self._node.waiting())
            elif before is not None:
                self._tell("idle", -1, -1, [])
            before = counts if idle else None

    async def _life(self) -> None:
        run, arrival = self._setup.experiment.algorithm.run, self._arrival
        if arrival is None:
            await self._node.live(run(self._node.node))
        else:
            asks = self._setup.experiment.failures.detection_s if arrival.start_from == "neighbor" else None
            meet = None if arrival.meet is None else partial(self._come_back, arrival.meet)
            await self._node.live(newcomer(run, self._node, asks, meet))
        self._report(final=True)
        if self._checkpoints is not None:
            self._checkpoints.over()
        self._tell("done", self._node.round)
        raise await self._node.failure()

    async def _come_back(self, others: Sequence[int]) -> None:
        """Find the others without a supervisor; of the rounds that will be run again the record keeps nothing."""
        await come_back(self._node, others, self._setup.experiment.failures.detection_s)
        self._recording.drop_rounds(self._node.round)
        text = f"node {self._rank} takes part from round {self._node.round} on"
        self._tell("event", "returned", text)

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
        self._tell("time")

    # --- what it is told

    def _hear(self, message: list[Any]) -> None:
        what, *rest = message
        if what == "go":
            self._clock.begin(rest[0])
            if len(rest) > 1:
                self._arrive(Arrival(*rest[1]))
            if self._shaper is not None:
                self._shaper.start(self._clock.start)
            self._go.set_result(None)
        elif what == "finish" and not self._finish.done():
            self._last_cut = rest[1] if len(rest) > 1 else None
            self._last_row = len(rest) > 2 and rest[2]
            self._finish.set_result(rest[0])
            self._recording.end()
        elif what == "lost":
            self._host.lost.add(rest[0])
            if rest[1] is not None:  # else the transport knows, and looks for it
                self._transport.mark_lost(*rest)
            self._node.peer_lost()
            if self._cutting is not None:
                self._cutting.lost(rest[0])
        elif what == "cut" and self._cutting is not None:
            self._cutting.cut(rest[0])
        elif what == "expect" and self._cutting is not None:
            self._cutting.expect(rest[0], rest[1])
        elif what == "kept" and self._cutting is not None:
            self._cutting.kept(rest[0])
        elif what == "drop" and self._cutting is not None:
            self._cutting.drop(rest[0])
        elif what == "found":
            self._host.lost.discard(rest[0])
            self._transport.mark_found(rest[0])
        elif what == "meet-again":
            self._node.spawn(meet_again(self._node, rest[0], self._setup.experiment.failures.detection_s))
        elif what == "leave":
            self._host.leaving = True
        elif what == "find":
            self._find(rest[0], anew=rest[1])
        elif what == "meet":
            self._node.peer_found(rest[0], rest[1], anew=False)
        elif what == "met":
            self._meet(rest[1])
            self._node.rejoin(rest[0])
        elif what == "places":
            self._computing.cpu_slots.count = rest[0]
        elif what == "consumed":
            self._recording.consumed()

    def _find(self, rank: int, *, anew: bool) -> None:
        """A node comes, or comes back, perhaps this one: say which round this one is in."""
        if rank != self._rank:
            self._host.lost.discard(rank)
            self._transport.mark_found(rank)
            # Until it's known which round it begins with, it's in none that this node is in.
            waits = self._setup.experiment.algorithm.gathers
            self._node.peer_found(rank, self._node.round + 1 if waits else 0, anew=anew)
        self._tell("at", rank, self._node.round)

    def _meet(self, together: Sequence[Sequence[int]]) -> None:
        for rank, since in together:
            self._host.lost.discard(rank)
            self._transport.mark_found(rank)
            self._node.peer_found(rank, since, anew=False)

    def _arrive(self, arrival: Arrival) -> None:
        self._arrival = arrival
        saved = self._restart.restore() if arrival.start_from == "checkpoint" else None
        text = f"node {self._rank} begins with {begins(arrival.start_from, saved)}"
        self._tell("event", "begins", text)
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
