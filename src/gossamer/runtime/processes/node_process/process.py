"""The process of one node: its start and end, its rows, and its messages to and from the coordinator."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from gossamer.layers.newcomer import run_newcomer
from gossamer.messages import raw
from gossamer.messages.tags import Model
from gossamer.node import NodeRuntime
from gossamer.node.runtime import unawaited_calls_fail
from gossamer.node.shown import CompleteModel
from gossamer.process_memory import private_bytes
from gossamer.runtime import life
from gossamer.runtime.events import timeline_log
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.channel import Channel
from gossamer.runtime.processes.node_process.checkpoints import NodeCheckpoints, RestartFile
from gossamer.runtime.processes.node_process.host import ComputeResources, NodeClock, NodeContext, NodeHost
from gossamer.runtime.processes.transport.shaper import Shaper
from gossamer.runtime.processes.transport.transport import Transport
from gossamer.runtime.recording import BusySeconds, Moment, Usage, is_due, node_row
from gossamer.runtime.setup import Setup

PROGRESS_S = 0.2  # seconds between two reports of a node's progress
TASKS_END_S = 5.0  # seconds that a node waits at its end for cancelled tasks
LAST_SNAPSHOT_S = 20.0  # seconds for the last checkpoint, before nodes end without it
MAX_UNREAD = 2  # models of a node that the coordinator has not read, before the node waits
FLUSH_S = 5.0  # seconds without progress before the last row omits unsent bytes


def main(rank: int, setup: Setup, context: NodeContext, resources: ComputeResources) -> int:
    """Run a node, from a checkpoint if there is one, in a newly forked process. Returns the exit code."""
    for number in (
        signal.SIGINT,
        signal.SIGHUP,
    ):  # they go to the launcher, too, which ends the run gracefully
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    async def run() -> int:  # creates the node in its loop
        return await NodeProcess(rank, setup, context, resources).run()

    return asyncio.run(run())


class NodeProcess:
    """A node and its process. Must be created in the process's event loop."""

    def __init__(self, rank: int, setup: Setup, context: NodeContext, resources: ComputeResources) -> None:
        self._rank, self._setup, self._rows = rank, setup, resources.rows
        self._address = context.listener.getsockname()[:2]
        loop = asyncio.get_running_loop()
        experiment, folder, checkpoint = setup.experiment, context.folder, context.checkpoint
        self._go: asyncio.Future[None] = loop.create_future()
        self._finish: asyncio.Future[protocol.Finish] = loop.create_future()
        self._arrival: protocol.Arrival | None = None
        self._crashes = context.fork.crashes
        self._reported = 0.0
        self._unread = 0  # rows with a model
        self._read = asyncio.Event()
        self._channel: Channel[protocol.ToNode] = Channel(context.channel, protocol.ToNode)
        context.channel.setblocking(True)
        loop.add_reader(context.channel, self._readable)
        self._timeline = timeline_log(experiment, folder, rank)

        saved = self._saved = None if checkpoint is None else checkpoint.read(rank, self._stored)
        self._clock = NodeClock(
            0.0 if saved is None else saved.time_s, 0.0 if checkpoint is None else checkpoint.wall_s
        )
        self._host = NodeHost(
            rank,
            setup,
            context,
            resources,
            self._clock,
            self._timeline,
            self._end_round,
            lambda kind, text: self._tell(protocol.Event(kind, text)),
        )
        self._node = NodeRuntime(setup, rank, resources.initial(rank), self._host)
        self._usage = Usage()
        self._last_shown: int | None = None  # the number of the model in the last row
        self._evaluated: tuple[int, dict[str, float]] | None = None  # of the last evaluated model
        self._diverged = False  # whether the run ends since a model is not finite
        self._checkpoints: NodeCheckpoints | None = None
        if not experiment.has_faults and (experiment.checkpoint.on or checkpoint is not None):
            self._checkpoints = NodeCheckpoints(self._node, experiment, context, self._tell)
        if saved is not None:
            self._node.restore(saved)
            self._host.computing_s = saved.engine["computing_s"]
            self._usage = Usage(saved.time_s, BusySeconds(self._host.computing_s, None, None))
        self._saves = experiment.checkpoint.on and experiment.has_faults
        self._restart = RestartFile(folder, self._node, experiment.checkpoint, self._tell)

        # Between machines, only silence shows that a peer is gone. On one machine, the worker notices.
        heartbeat_s = None if context.security is None else experiment.failures.detection_s / 5
        self._shaper = Shaper.of(rank, setup.network, experiment.nodes, experiment.seed, loop)
        self._transport = self._host.transport = Transport(
            context.listener,
            rank,
            [("127.0.0.1", 0)] * experiment.nodes,  # the real addresses arrive before anything is sent
            context.job.token,
            limit=setup.message_limit,
            deliver=(self._checkpoints or self._node).deliver,
            contact=self._report_contact,
            refused=lambda text: self._tell(protocol.Event("refused", text)),
            now=self._clock.now,
            failed=self._node.fail,
            watch=None if self._timeline is None else partial(self._timeline.sent, rank),
            shaper=self._shaper,
            security=context.security,
            heartbeat_s=experiment.failures.heartbeat_s or heartbeat_s,
            detection_s=experiment.failures.detection_s,
            incarnation=context.fork.incarnation,
        )

    def _report_contact(self, rank: int, why: str | None) -> None:
        if why is not None:
            self._tell(protocol.Unreachable(rank, why))
        elif self._transport.peers[rank].apart:
            self._tell(protocol.Reached(rank))

    def _tell(self, message: protocol.FromNode) -> None:
        """Write a message. The other end always reads, so this hardly ever blocks."""
        if not self._channel.send(message):
            os._exit(1)

    def _readable(self) -> None:
        if (message := self._channel.receive()) is None:
            os._exit(1)
        self._hear(message)

    # --- from start to end

    async def run(self) -> int:
        if self._checkpoints is not None:
            start = self._saved or self._node.checkpoint(**self._state())
            self._checkpoints.begin(self._transport, start, resumed=self._saved is not None)
        try:
            await self._transport.start()
            if self._saved is not None:
                self._report(always=True)  # the counters continue from those of the checkpoint
            self._tell(protocol.Ready(*self._address))
            await asyncio.wait((self._go, self._finish), return_when=asyncio.FIRST_COMPLETED)
            if self._go.done():
                with unawaited_calls_fail():
                    await self._take_part()
            if slow := self._host.slow:
                counts = f"{slow} of {self._host.computations} computations"
                self._tell(protocol.Event("slow", f"{counts} took longer than the compute profile says"))
            self._node.look_for_divergence()
            if self._shaper is None:
                await self._flush()
            model, has_mixed = _raw(self._shown().model), self._node.shown.has_mixed
            final = protocol.FinalModel(self._node.round, model, private_bytes(), has_mixed)
            self._report(always=True)
            self._tell(final)
        except Exception as error:  # noqa: BLE001 - an algorithm may raise anything; the coordinator is told
            round = self._node.failure_round if self._go.done() else None
            self._tell(protocol.Failed.of(error, self._rank, round))
            await self._finish
            return 1
        await self._node.end()
        await self._transport.close()
        if self._timeline is not None:
            self._timeline.close()
        return 0

    async def _take_part(self) -> None:
        experiment = self._setup.experiment
        if experiment.evaluation.every_rounds is not None and self._saved is None and self._arrival is None:
            await self._record(0)
        watch = self._spawn(self._watch())
        helpers = []
        if experiment.evaluation.every_s:
            helpers.append(self._spawn(self._ticks(experiment.evaluation.every_s)))
        if experiment.stop.time_s is not None:
            helpers.append(self._spawn(self._end_at(experiment.stop.time_s)))
        work = asyncio.ensure_future(self._protocol())
        await asyncio.wait((work, self._finish), return_when=asyncio.FIRST_COMPLETED)
        for task in (work, *helpers):
            task.cancel()
        if work.done() and not work.cancelled():
            work.result()  # raises its failure
        finish = await self._finish
        # The node's end is recorded and saved when its tasks are over. (A task that resists cancellation is
        # not awaited.)
        with suppress(TimeoutError):
            async with asyncio.timeout(TASKS_END_S):
                await self._node.end()
        self._diverged = finish.reason == "diverged" or (
            self._node.look_for_divergence() and experiment.stop.diverged == "end"
        )
        changed = self._last_shown not in (None, self._shown().number)
        if finish.row or (finish.reason in ("rounds", "stopped") and changed):
            await self._record("end")
        elif finish.reason == "left":
            await self._flush()
            if not is_due(self._setup, self._node.round):
                await self._record("end")
        if self._checkpoints is not None and finish.checkpoint is not None:
            await self._checkpoints.last(finish.checkpoint, LAST_SNAPSHOT_S)
        watch.cancel()

    async def _protocol(self) -> None:
        run, arrival = self._setup.experiment.algorithm.run, self._arrival
        ask_neighbor = arrival is not None and arrival.start_from == "neighbor"
        detection_s = self._setup.experiment.failures.detection_s
        await self._node.live(partial(run_newcomer, run, self._node, detection_s if ask_neighbor else None))
        self._report(always=True)
        if self._checkpoints is not None:
            self._checkpoints.over()
        self._tell(protocol.Done(self._node.round, leaves=self._host.leaves))
        raise await self._node.failure()

    async def _end_round(self) -> None:
        self._report()
        if is_due(self._setup, self._node.round):
            await self._record(self._node.round)
        else:
            await asyncio.sleep(0)  # let other tasks run, even if a round waits for nothing
        if self._checkpoints is not None:
            self._checkpoints.round_ended(self._node.checkpoint(**self._state()))
        if self._saves:
            self._restart.round_ended()
        for number, round in enumerate(self._crashes):
            if self._node.round >= round:
                self._report(always=True)
                self._tell(protocol.Crashing(number))
                os.kill(os.getpid(), signal.SIGKILL)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task alongside the algorithm. Its failure fails the node."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._helper_ended)
        return task

    def _helper_ended(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._node.fail(error)

    # --- rows

    async def _ticks(self, every_s: float) -> None:
        first = 0 if self._arrival is None else self._arrival.tick
        for number in count(math.ceil(self._clock.now() / every_s) if self._saved is not None else first):
            await self._clock.until(number * every_s)
            await self._record(("tick", number))

    async def _record(self, moment: Moment) -> None:
        """Evaluate a snapshot, off the node's clock, and report its row, with the model for network rows."""
        node, setup = self._node, self._setup
        if not setup.takes_part(node.rank, node.round):
            return
        shown, time_s = self._shown(), self._clock.now()
        self._last_shown = shown.number
        busy = BusySeconds(self._host.computing_s, None, None)
        last = moment == "end" or node.round == setup.experiment.stop.rounds
        # Messages that a shaped network holds back when the run ends count as unsent, as in a simulation.
        held_back = self._shaper is not None and moment == "end"
        with self._clock.pause():
            if last and not held_back:
                await self._flush()
            shares = self._usage.shares(time_s, busy)
            row = node_row(node, moment, shown, self._transport.traffic, time_s, self._clock.wall(), shares)
            if node.rank in setup.evaluated:
                row |= await self._evaluate(shown)
            snapshot = None
            if node.rank in setup.outcome_ranks:
                await self._wait_for_room()
                snapshot = _raw(shown.model)
            view = None if node.node.view is None else list(node.node.view)
            self._tell(protocol.Row.of(moment, row, snapshot, view))

    def _shown(self) -> CompleteModel:
        """The model that a record shows of the node; at the end of a diverged run, the model as it is."""
        return self._node.shown.instant() if self._diverged else self._node.shown.now()

    async def _evaluate(self, shown: CompleteModel) -> dict[str, float]:
        """The columns of all evaluation sets. A model that was shown before needs no new evaluation."""
        if self._evaluated is None or self._evaluated[0] != shown.number:
            self._evaluated = shown.number, await self._host.evaluate(shown.model)
        return self._evaluated[1]

    async def _wait_for_room(self) -> None:
        """Wait until the coordinator has read enough of this node's models for one more."""
        while self._unread >= MAX_UNREAD:
            self._read.clear()
            await self._read.wait()
        self._unread += 1

    async def _flush(self) -> None:
        """Wait until all messages have left, and are counted, as long as bytes keep leaving."""
        sent = -1
        while sent < self._transport.traffic.bytes_sent:
            sent = self._transport.traffic.bytes_sent
            with suppress(TimeoutError):
                await self._transport.flush(FLUSH_S)
                return

    # --- reports

    def _report(self, always: bool = False) -> None:
        now = time.monotonic()
        if always or now - self._reported > PROGRESS_S:
            self._reported = now
            traffic = replace(self._transport.traffic)
            node = self._node
            now, waits = self._clock.now(), node.waiting()
            self._tell(protocol.Progress(node.round, now, traffic, waits, node.counts_rounds))

    async def _watch(self) -> None:
        """Tell the coordinator that this node is alive, and what it waits for."""
        every_s = protocol.report_every_s(self._setup.experiment.nodes)
        while True:
            await asyncio.sleep(every_s)
            self._report()

    async def _end_at(self, time_s: float) -> None:
        await self._clock.until(time_s)
        self._report(always=True)

    # --- messages from the coordinator

    def _hear(self, message: protocol.ToNode) -> None:
        checkpoints = self._checkpoints
        match message:
            case protocol.Go(start=start, arrival=arrival):
                self._clock.begin(start)
                if arrival is not None:
                    self._arrive(arrival)
                if self._shaper is not None:
                    self._shaper.start(self._clock.start)
                self._go.set_result(None)
            case protocol.Finish():
                if not self._finish.done():
                    self._finish.set_result(message)
            case protocol.Lost(rank=rank, why=why, incarnation=incarnation, apart=apart):
                self._host.lost.add(rank)
                self._transport.mark_lost(rank, why, incarnation, apart=apart)
                self._node.mailbox.wake_all()
            case protocol.Command("snapshot" | "settled") | protocol.Expect():
                if checkpoints is not None:
                    checkpoints.hear(message)
            case protocol.Command("read"):
                self._unread -= 1
                self._read.set()
            case protocol.Addresses(nodes=nodes):
                for address in nodes:
                    self._transport.locate(*address)
            case protocol.Command("leave" | "stay" as what):
                self._host.leaving = what == "leave"
            case protocol.Find(rank=rank, restarted=restarted):
                if rank != self._rank:
                    # Until its first round is known, it takes part in none that this node is in.
                    waits = self._setup.experiment.algorithm.gathers
                    self._restore_peer(rank, self._node.round + 1 if waits else 0, restarted=restarted)
                self._tell(protocol.CurrentRound(rank, self._node.round))
            case protocol.Meet(together=together, first=first):
                self._meet(together)
                if first is not None:
                    self._node.peer_found(self._rank, first, restarted=False)

    def _restore_peer(self, rank: int, since: int, *, restarted: bool) -> None:
        """A node that was away is back, perhaps restarted, and takes part from a round on."""
        self._host.lost.discard(rank)
        self._transport.mark_found(rank)
        self._node.peer_found(rank, since, restarted=restarted)

    def _meet(self, together: Sequence[Sequence[int]]) -> None:
        for rank, since in together:
            self._restore_peer(rank, since, restarted=False)

    def _arrive(self, arrival: protocol.Arrival) -> None:
        self._arrival = arrival
        saved = self._restart.restore() if arrival.start_from == "checkpoint" else None
        begins = life.begins(self._rank, arrival.start_from, saved)
        self._tell(protocol.Event(begins.event, begins.text))
        self._transport.traffic.add(arrival.traffic)  # messages have been received already
        self._usage = Usage(self._clock.now())
        self._meet(arrival.together)
        self._node.peer_found(self._rank, arrival.first, restarted=False)
        self._node.catch_up()

    # --- saved state

    def _stored(self, tensor: Tensor) -> Tensor:
        """A tensor that was read from a file; a vector of parameters is moved to the node's store."""
        is_row = tensor.dtype is torch.float32 and tensor.shape == (self._setup.layout.size,)
        return self._rows.store(tensor) if is_row else tensor

    def _state(self) -> dict[str, Any]:
        return {
            "traffic": asdict(self._transport.send_queue.saved_traffic()),
            "computing_s": self._host.computing_s,
        }


def _raw(model: Model) -> bytearray:
    return bytearray().join(raw(vector.contiguous()) for vector in model)
