"""Runs the nodes of an experiment as processes, and never leaves one behind.

The coordinator carries out what :class:`~gossamer.runtime.processes.coordinator.lifecycle.Lifecycle` decides, passes on what
nodes and workers say, and alone writes the record and puts checkpoints together. Workers
(:mod:`gossamer.runtime.processes.coordinator.workers`) start nodes, and end them when the run ends; the system ends the nodes
of a worker that dies.

It is a separate process, because it forks: it imports everything and loads the data once, with one torch thread and no event
loop, and every node of a run on one machine is a fork of it.
"""

from __future__ import annotations

import math
import selectors
import signal
import socket
import time
import traceback
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gossamer.config import Experiment
from gossamer.errors import BadInput, RecordError, RunFailed, cause
from gossamer.faults import StartFrom
from gossamer.learning.malloc import keep_freed_memory
from gossamer.messages.tags import Model, Traffic
from gossamer.results.checkpoints import Cut, read_cut
from gossamer.results.folder import RunFolder
from gossamer.results.recorder import read_metrics
from gossamer.runtime.events import EventLog, HeardClock
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.channel import Channel
from gossamer.runtime.processes.coordinator.checkpoints import CheckpointCoordinator
from gossamer.runtime.processes.coordinator.door import Door
from gossamer.runtime.processes.coordinator.lifecycle import Lifecycle, Over
from gossamer.runtime.processes.coordinator.workers import JoinedWorkers, OwnPool
from gossamer.runtime.processes.node_process.host import Stage
from gossamer.runtime.processes.protocol import Fork, Signal, Tell
from gossamer.runtime.processes.shared_models import FINAL, SharedModels
from gossamer.runtime.processes.system import raise_descriptor_limit
from gossamer.runtime.processes.worker.pool import ProcessPool
from gossamer.runtime.recording import RunRecord
from gossamer.runtime.setup import Setup, prepare

TRAFFIC = tuple(field.name for field in fields(Traffic))
"""The counters in a row."""
PROGRESS_S = 0.1


class Coordinator:
    """One run, from a checkpoint (``cut``) on if there is one. Without a door, this process forks the nodes; else the run
    starts when ``least_workers`` have joined there."""

    def __init__(
        self,
        setup: Setup,
        stage: Stage,
        folder: RunFolder,
        launcher: Channel[protocol.ToCoordinator],
        memory: int,
        cut: Cut | None = None,
        door: Door | None = None,
        least_workers: int = 1,
    ) -> None:
        self._setup, self._folder, self._launcher, self._cut = setup, folder, launcher, cut
        self._models = SharedModels(
            memory, setup.experiment.nodes, setup.layout.size, setup.layout.buffer_size
        )
        selector = self._selector = selectors.DefaultSelector()
        selector.register(launcher, selectors.EVENT_READ, self._hear_launcher)
        self._workers: OwnPool | JoinedWorkers
        if door is None:
            pool = ProcessPool(setup, folder, memory, stage, cut, selector, self._hear_pool)
            self._workers = OwnPool(pool, setup.experiment.nodes)
        else:
            refused, models = partial(self.record, None, "refused"), self._models
            self._workers = JoinedWorkers(
                setup, folder, models, cut, selector, door, least_workers, self._take, self.show, refused
            )
        self._lifecycle = Lifecycle(setup, self, self._workers.has_room, None if cut is None else cut.rounds)
        metrics, graphs = folder.segment("metrics"), folder.segment("graphs")
        self._rows = RunRecord(setup, metrics, graphs, stage.evaluator.columns, self.show)
        self._clock = HeardClock(time.monotonic)
        self._events = EventLog(folder.segment("events"), self._clock.now, self._wall)
        self._checkpoints = CheckpointCoordinator(
            setup.experiment, setup.trainer, folder, cut, self._tell, partial(self.record, None, "checkpoint")
        )
        self._start: float | None = None
        self._said = 0.0
        self._diverged = False
        self._traffic: dict[int, dict[str, int]] = {}  # of each node, in its last row
        self._private: list[int] = []

    def run(self) -> protocol.Ended:
        reason, failure = "failed", None
        try:
            reason = self._run()
        except RunFailed as error:
            failure = {"node": error.node, "round": error.round, "traceback": error.traceback}
            failure["message"] = str(error)
        finally:
            self._selector.unregister(self._launcher)
            self._workers.close(reason)
        own = self._private
        private = {"mean": sum(own) / len(own), "max": float(max(own))} if own else None
        return protocol.Ended(reason, failure, private)

    def _run(self) -> str:
        try:
            self._begin()
            while True:
                self._poll(self._lifecycle.timeout(time.monotonic(), 0.2))
                self._lifecycle.look(time.monotonic())
        except Over as over:
            reason = str(over)
        self._lifecycle.finish(reason, self._checkpoints.last(), time.monotonic())
        while not self._lifecycle.over(time.monotonic()):
            self._poll(0.2)
        self._lifecycle.give_up()
        reason = "diverged" if self._diverged else reason
        sizes = self._setup.layout.size, self._setup.layout.buffer_size
        unknown = Model(*(torch.full((size,), math.nan) for size in sizes))
        for rank in range(self._setup.experiment.nodes):
            if (node := self._lifecycle.nodes.get(rank)) is None or not node.final:
                self._models.write(FINAL, rank, unknown)
        return reason

    def _begin(self) -> None:
        self._workers.assemble(self._wait)
        self._lifecycle.start(time.monotonic())
        if self._cut is not None:
            self._clock.hear(max(self._cut.times_s.values()), runs=False)
            self._rows.resume(self._cut, read_metrics(self._folder.path))
        while not self._lifecycle.up:
            self._wait()
        start = self._start = time.monotonic()
        self._clock.hear(self._clock.now())  # it runs from here on
        self._checkpoints.begin(self._lifecycle.alive, start)
        self._lifecycle.begin(start)

    def _wait(self) -> None:
        self._poll(0.2)
        self._lifecycle.look(time.monotonic())

    # --- what is heard

    def _poll(self, timeout: float) -> None:
        for key, events in self._selector.select(timeout):
            key.data(events)
        now = time.monotonic()
        if now - self._said > PROGRESS_S:
            self._said = now
            self._workers.look()
            rounds = sum(node.round for node in self._lifecycle.nodes.values())
            self.show((rounds, self._clock.now()))

    def _hear_launcher(self, events: int) -> None:
        match self._launcher.receive():
            case None:
                raise RunFailed("the launcher died")
            case protocol.Stop(why=None):
                self._lifecycle.end("stopped")
            case protocol.Stop(why=str(why)) if self._start is None:
                raise RunFailed(why)

    def _hear_pool(self, event: protocol.FromPool) -> None:
        if isinstance(event, protocol.Said):
            self._take(event)

    def _take(self, said: protocol.Said) -> None:
        rank, node, message = said.rank, self._lifecycle.nodes.get(said.rank), said.message
        if node is None and isinstance(message, protocol.Exited):
            raise RunFailed(f"node {rank}: {message.how}")
        if node is None or node.incarnation != said.incarnation or rank not in self._lifecycle.alive:
            return
        self._note(rank, message)
        self._lifecycle.take(rank, message, time.monotonic())
        if self._rows.reached:
            self._lifecycle.end("target")

    def _note(self, rank: int, message: protocol.FromProcess) -> None:
        match message:
            case protocol.Progress(time_s=time_s):
                self._clock.hear(time_s)
            case protocol.Row(moment=moment, row=row, slot=slot, view=view):
                self._traffic[rank] = {name: row[name] for name in TRAFFIC}
                if view is not None:
                    self._rows.view(rank, moment, row["round"], view)
                self._rows.graph(row["round"])
                self._rows.row(moment, row, None if slot is None else self._models.read(slot, rank))
                if slot is not None:
                    self._tell(rank, protocol.Note("consumed"))
            case protocol.Event(kind=kind, text=text):
                self.record(rank, kind, text, show=False)
                if kind == "diverged" and self._setup.experiment.stop.diverged == "end":
                    self._diverged = True
                    self._lifecycle.end("diverged")
            case protocol.Done() | protocol.Marked() | protocol.Saved():
                self._checkpoints.hear(rank, message)
            case protocol.Final(private=private):
                if private is not None:
                    self._private.append(private)

    def _wall(self) -> float:
        """Real seconds of the run so far."""
        now_s = 0.0 if self._start is None else time.monotonic() - self._start
        return now_s + (0.0 if self._cut is None else self._cut.wall_s)

    # --- what is done

    def do(self, command: Fork | Signal | Tell) -> None:
        self._workers.do(command)

    def without(self, rank: int, *, keep: bool) -> None:
        """Wait for nothing more of a node. Its values for incomplete evaluation points count only if ``keep``."""
        self._checkpoints.away(rank)
        self._rows.without(rank, keep=keep)

    def rejoin(
        self, rank: int, first: int, together: list[tuple[int, int]], start_from: StartFrom | None
    ) -> None:
        """Let a node take part (again) from round ``first`` on, and with each of the others from a round. A new process
        begins with the model ``start_from``; None is one that was only taken for dead."""
        now_s, every_s = self._clock.now(), self._setup.experiment.evaluation.every_s
        tick = 0 if every_s is None else int(now_s / every_s) + 1
        if start_from is None:
            self._tell(rank, protocol.Meet(together, first))
        else:  # the node's clock starts at the others' time; their clocks pause during evaluations
            arrival = protocol.Arrival(first, together, start_from, tick, self._traffic.get(rank, {}))
            self._tell(rank, protocol.Go(time.monotonic() - now_s, arrival))
        self._checkpoints.back(rank)
        self._rows.back(rank, first + 1, tick)

    def record(self, rank: int | None, event: str, text: str, *, show: bool = True) -> None:
        self._events.append(rank, event, text)
        if show:
            self.show(text or event)

    def show(self, what: tuple[int, float] | dict[str, Any] | str) -> None:
        self._launcher.send(protocol.Shown(what))

    def _tell(self, rank: int, message: protocol.ToNode) -> None:
        self._workers.do(Tell(rank, message))


def serve(channel: int, memory: int) -> None:
    """Prepare the experiment that the launcher names, and run it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # before any operation: a fork after one with more threads hangs
    keep_freed_memory()
    launcher: Channel[protocol.ToCoordinator]
    launcher = Channel(socket.socket(fileno=channel), protocol.ToCoordinator)
    asked = launcher.receive()
    if not isinstance(asked, protocol.Prepare):
        return
    try:
        door = None if asked.listen is None else Door(asked.listen, asked.token)
        setup = prepare(Experiment.parse(asked.experiment))
        raise_descriptor_limit(setup.experiment.nodes)
    except BadInput as error:
        launcher.send(protocol.Refused(list(error.problems)))
        return
    layout, where = setup.layout, None if door is None else door.address
    launcher.send(
        protocol.Prepared(setup.description(), layout.size, layout.buffer_size, setup.trainer, where)
    )
    stage = Stage(setup)
    if door is None:
        stage.warm_up()  # while the launcher makes the folder
    answer = launcher.receive()
    if not isinstance(answer, protocol.Run):
        return
    folder = RunFolder.open(Path(answer.folder))
    cut = None if answer.checkpoint is None else read_cut(folder.checkpoints, answer.checkpoint)
    try:
        end = Coordinator(setup, stage, folder, launcher, memory, cut, door, asked.min_workers).run()
    except RecordError as error:  # a full disk, ...: a run without a record is useless
        end = protocol.Ended("failed", {"message": str(error)}, None)
    except OSError as error:  # no descriptor or process is left, ...
        trace = "".join(traceback.format_exception(error))
        failure = {"message": f"the coordinator failed: {cause(error)}", "traceback": trace}
        end = protocol.Ended("failed", failure, None)
    launcher.send(end)
