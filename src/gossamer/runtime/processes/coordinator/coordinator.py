"""Runs the nodes of an experiment as processes, and never leaves one behind.

The coordinator carries out what :class:`~gossamer.runtime.lifecycle.Lifecycle` decides: it passes on what nodes and workers
say, and turns commands into messages. It alone writes the record and puts checkpoints together. Where nodes are is the
workers' business (:mod:`gossamer.runtime.processes.coordinator.workers`): they end their nodes when the run ends, and the
system ends the nodes of a worker that dies.
"""

from __future__ import annotations

import math
import selectors
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from functools import partial

import torch

from gossamer.messages.tags import Model, Traffic
from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder
from gossamer.runtime import lifecycle
from gossamer.runtime.lifecycle import Command, Lifecycle
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.channel import Channel
from gossamer.runtime.processes.coordinator.checkpoints import CheckpointCoordinator
from gossamer.runtime.processes.coordinator.ended import Ended
from gossamer.runtime.processes.coordinator.record import Record
from gossamer.runtime.processes.coordinator.remote import Door, RemoteWorkers
from gossamer.runtime.processes.coordinator.workers import RESTART_S, LocalWorkers, Workers
from gossamer.runtime.processes.node_process.computing import Stage
from gossamer.runtime.processes.system.memory import FINAL, SharedModels
from gossamer.runtime.processes.worker.pool import ProcessPool
from gossamer.runtime.setup import Setup

TRAFFIC = tuple(field.name for field in fields(Traffic))
"""The counters in a row."""
PROGRESS_S = 0.1


class Coordinator:
    """One run.

    Args:
        setup: what is run.
        stage: what nodes of this process compute with, warmed up.
        folder: where the run is recorded.
        launcher: the channel to the launcher.
        memory: descriptor of the file that the launcher, this process and its nodes share.
        cut: the checkpoint from which it goes on; None is the start.
        door: where workers join; None: the nodes are this process's own.
        least_workers: how many must have joined before the run starts.
    """

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
        self._setup, self._launcher, self._cut = setup, launcher, cut
        self._models = SharedModels(
            memory, setup.experiment.nodes, setup.layout.size, setup.layout.buffer_size
        )
        self._selector = selectors.DefaultSelector()
        self._workers: Workers
        if door is None:
            pool = partial(ProcessPool, setup, folder, memory, stage, cut, self._selector)
            self._workers = LocalWorkers(pool, self._take)
        else:
            models, selector = self._models, self._selector
            self._workers = RemoteWorkers(
                setup, folder, models, cut, door, least_workers, selector, self._take, self._show
            )
        self._lifecycle = Lifecycle(setup, self._workers.has_room, None if cut is None else cut.rounds)
        self._record: Record  # there from the beginning of the run on
        self._new_record = partial(
            Record,
            setup,
            folder,
            self._models,
            stage.evaluator,
            lambda rank: self._tell(rank, protocol.Consumed()),
            lambda row: self._launcher.send(protocol.NewRow(row)),
            self._show,
        )
        self._checkpoints = CheckpointCoordinator(
            setup.experiment, folder, cut, self._tell, partial(self._event, None, "checkpoint")
        )
        self._said = 0.0
        self._traffic: dict[int, dict[str, int]] = {}  # of each node, in its last row
        self._private: dict[int, int] = {}
        self._forms: dict[int, dict[str, dict[str, int]]] = {}

    def run(self) -> Ended:
        """From the first process to the last."""
        end = Ended("failed", message="interrupted")
        try:
            self._begin()
            while True:
                self._poll(self._lifecycle.timeout(time.monotonic(), 0.2))
                self._do(self._lifecycle.look(time.monotonic()))
        except Ended as ended:
            end = ended if ended.failure is not None else self._finish(ended)
        finally:
            self._workers.close(end.reason)
        return end

    def _begin(self) -> None:
        self._record = self._new_record()
        self._selector.register(self._launcher, selectors.EVENT_READ, self._hear_launcher)
        for request in self._launcher.pending():
            self._obey(request)
        self._workers.assemble(range(self._setup.experiment.nodes), self._wait)
        self._do(self._lifecycle.start(time.monotonic()))
        if self._cut is not None:
            self._record.resume(self._cut)
        while not self._lifecycle.up:
            self._wait()
        self._do(self._lifecycle.begin(time.monotonic()))

    def _wait(self) -> None:
        self._poll(0.2)
        self._do(self._lifecycle.look(time.monotonic()))

    def _finish(self, end: Ended) -> Ended:
        """Have every node write its last row and its model; gives how it went. Only a failure ends that early."""
        try:
            self._do(self._lifecycle.finish(end.reason, time.monotonic()))
            while not self._lifecycle.over(time.monotonic()):
                self._poll(0.2)
            self._do(self._lifecycle.give_up())
        except Ended as failure:
            return failure
        if (away := self._record.events.summary()) is not None:
            self._show(away)
        return end

    # --- what is heard

    def _poll(self, timeout: float) -> None:
        for key, events in self._selector.select(timeout):
            if key.fileobj in self._selector.get_map():  # what came before may have closed it
                key.data(events)
        now = time.monotonic()
        if now - self._said > PROGRESS_S:
            self._said = now
            self._workers.look()
            rounds = sum(node.round for node in self._lifecycle.nodes.values())
            self._launcher.send(protocol.RunProgress(rounds, self._record.clock.now()))

    def _hear_launcher(self, events: int) -> None:
        requests = self._launcher.read()
        if requests is None:
            raise Ended("failed", message="the launcher died")
        for request in requests:
            self._obey(request)

    def _obey(self, request: protocol.ToCoordinator) -> None:
        if isinstance(request, protocol.Stop):
            self._lifecycle.end("stopped")

    def _take(self, event: protocol.PoolEvent) -> None:
        """Take what happens at a worker."""
        if isinstance(event, protocol.Listening):
            return
        rank, node = event.rank, self._lifecycle.nodes.get(event.rank)
        if node is None and isinstance(event, protocol.NotForked):
            raise Ended("failed", message=f"node {rank} can't be started: {event.why}")
        if node is None or node.incarnation != event.incarnation:
            return
        match event:
            case protocol.Said(message=message):
                self._pass_on(self._hear(rank, message))
            case protocol.Exited(how=how):
                self._pass_on(lifecycle.Exited(rank, how))
            case protocol.NotForked(why=why):
                self._pass_on(lifecycle.NotStarted(rank, why))
            case protocol.Stood(still=still):
                self._pass_on(lifecycle.Stood(rank, still))
        if self._record.target_reached:
            self._lifecycle.end("target")

    def _pass_on(self, event: lifecycle.Event) -> None:
        self._do(self._lifecycle.take(event, time.monotonic()))

    def _hear(self, rank: int, message: protocol.FromNode) -> lifecycle.Event:
        """Record what a node says, where it is for the record; gives what it means for the run."""
        match message:
            case protocol.Ready():
                return lifecycle.Ready(rank)
            case protocol.Progress(round=round, time_s=time_s):
                self._record.clock.hear(time_s)
                return lifecycle.Round(rank, round)
            case protocol.TimeUp():
                self._lifecycle.end("time")
            case protocol.Row(moment=moment, row=row, slot=slot):
                self._traffic[rank] = {name: row[name] for name in TRAFFIC}
                self._record.row(rank, moment, row, slot)
                return lifecycle.Round(rank, row["round"])
            case protocol.View(moment=moment, round=round, ranks=ranks):
                self._record.view(rank, moment, round, ranks)
            case protocol.Done(round=round):
                self._checkpoints.done(rank)
                return lifecycle.Done(rank, round)
            case protocol.Marked(number=number, ranks=ranks):
                self._checkpoints.marked(rank, number, ranks)
            case protocol.Saved(number=number, round=round, time_s=time_s):
                self._checkpoints.saved(rank, number, round, time_s)
            case protocol.Broken(number=number, peer=peer):
                self._checkpoints.broken(rank, number, peer)
            case protocol.Final(round=round, private=private, forms=forms):
                self._forms[rank] = forms
                if private is not None:
                    self._private[rank] = private
                return lifecycle.Final(rank, round)
            case protocol.At(rank=about, round=round):
                return lifecycle.At(rank, about, round)
            case protocol.Crash(number=number):
                return lifecycle.Crashing(rank, number)
            case protocol.Idle(sent=sent, received=received, waits=waits):
                return lifecycle.Idle(rank, None if waits is None else (sent, received, waits))
            case protocol.Event(kind=kind, text=text):
                self._record.events.append(rank, kind, text)
            case protocol.Unreachable(rank=peer, why=why):
                return lifecycle.Unreachable(rank, peer, why)
            case protocol.Reachable(rank=peer):
                return lifecycle.Reachable(rank, peer)
            case protocol.Failed(text=text, round=round, trace=trace):
                return lifecycle.Failed(rank, text, round, trace)
        return lifecycle.Heard(rank)

    # --- what is done

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case lifecycle.Start(rank=rank, incarnation=incarnation, crashes=crashes):
                self._workers.fork(rank, incarnation, crashes, RESTART_S if incarnation else 0.0)
            case lifecycle.Signal(rank=rank, signal=sent):
                self._workers.signal(rank, sent)
            case lifecycle.Begin():
                self._go()
            case lifecycle.Lost(to=to, rank=rank, why=why, incarnation=ended):
                self._tell(to, protocol.Lost(rank, why, ended))
            case lifecycle.Find(to=to, rank=rank, restarted=restarted):
                self._tell(to, protocol.Find(rank, restarted))
            case lifecycle.Meet(to=to, rank=rank, since=since):
                self._tell(to, protocol.Meet(rank, since))
            case lifecycle.Met(to=to, first=first, together=together):
                self._tell(to, protocol.Met(first, together))
            case lifecycle.Rejoin():
                self._rejoin(command)
            case lifecycle.Leave(to=to):
                self._tell(to, protocol.Leave())
            case lifecycle.Finish(to=to, reason=reason, last=last, row=row):
                number = self._checkpoints.last() if last else None
                self._tell(to, protocol.Finish(reason, number, row))
            case lifecycle.Without(rank=rank, keep=keep, alive=alive):
                (self._checkpoints.away if alive else self._checkpoints.lost)(rank)
                self._record.without(rank, keep=keep)
            case lifecycle.With(rank=rank, first=first):
                self._checkpoints.back(rank)
                self._record.again(rank, first)
            case lifecycle.Forget(rank=rank):
                self._forget_model(rank)
            case lifecycle.Record(rank=who, event=kind, text=text, show=show):
                self._record.events.append(who, kind, text)
                if show:
                    self._show(text or kind)
            case lifecycle.Show(text=text):
                self._show(text)
            case lifecycle.End(reason=reason, failure=failure):
                raise Ended(reason, **failure or {})

    def _go(self) -> None:
        start = time.monotonic()
        for rank in sorted(self._lifecycle.alive):
            self._tell(rank, protocol.Go(start))
        self._record.begin(start)
        self._checkpoints.begin(self._lifecycle.alive, start)

    def _rejoin(self, command: lifecycle.Rejoin) -> None:
        """Let a node begin that was started later."""
        rank, record = command.rank, self._record
        start = (
            time.monotonic() - record.clock.now()
        )  # the nodes' clocks stand still while they are evaluated
        arrival = protocol.Arrival(
            command.first,
            command.together,
            command.start_from,
            record.next_tick(),
            self._traffic.get(rank, {}),
        )
        self._tell(rank, protocol.Go(start, arrival))

    def _forget_model(self, rank: int) -> None:
        """A model at the end is not known; nobody shall take zeros for it."""
        sizes = self._setup.layout.size, self._setup.layout.buffer_size
        self._models.write(FINAL, rank, Model(*(torch.full((n,), math.nan) for n in sizes)))

    def _tell(self, rank: int, message: protocol.ToNode) -> None:
        """Send a node a message; that a node is gone is noticed by its closed channel."""
        self._workers.tell(rank, message)

    def _event(self, rank: int | None, kind: str, text: str) -> None:
        """Record an event, and show it."""
        self._record.events.append(rank, kind, text)
        self._show(text)

    def _show(self, text: str) -> None:
        """Show the user something."""
        self._launcher.send(protocol.Say(text))

    def private_bytes(self) -> dict[str, float] | None:
        """The memory that nodes had to themselves at their end, as far as they said."""
        said = list(self._private.values())
        return {"mean": sum(said) / len(said), "max": max(said)} if said else None

    def forms(self) -> dict[str, dict[str, int]]:
        """How the nodes' steps and evaluations were computed: for each part the number of nodes and shapes by form."""
        found: dict[str, Counter[str]] = {}
        for said in self._forms.values():
            for part, forms in said.items():
                found.setdefault(part, Counter()).update(forms)
        return {part: dict(forms) for part, forms in found.items()}
