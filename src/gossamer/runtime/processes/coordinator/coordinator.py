"""Watches over the nodes of a run, and never leaves one behind: it ends them when the run ends, and the system ends them
when it dies."""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import partial

import torch

from gossamer.config import Processes
from gossamer.messages.tags import Model, Traffic
from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.channel import Channel
from gossamer.runtime.processes.coordinator.checkpoints import CheckpointCoordinator
from gossamer.runtime.processes.coordinator.deadlock import DeadlockWatch
from gossamer.runtime.processes.coordinator.ended import Ended
from gossamer.runtime.processes.coordinator.fault_runner import FaultRunner
from gossamer.runtime.processes.coordinator.node_state import Child
from gossamer.runtime.processes.coordinator.process_pool import ProcessPool
from gossamer.runtime.processes.coordinator.record import Record
from gossamer.runtime.processes.node_process.warmup import Stage
from gossamer.runtime.processes.system.memory import FINAL, SharedModels
from gossamer.runtime.recording import end_is_due, returned_early
from gossamer.runtime.setup import Setup

END_S = 30.0
"""Seconds without a sign of life after which nodes that should end are killed."""
TRAFFIC = tuple(field.name for field in fields(Traffic))
"""The counters in a row."""
PROGRESS_S = 0.1


class Coordinator:
    """Starts the nodes of a run, watches over them, and ends them.

    Args:
        setup: what is run.
        stage: what nodes compute with, rehearsed.
        folder: where rows are recorded.
        launcher: the channel to the launcher.
        memory: descriptor of the file that all processes share.
        cut: the checkpoint from which it goes on; None is the start.
    """

    def __init__(
        self,
        setup: Setup,
        stage: Stage,
        folder: RunFolder,
        launcher: Channel[protocol.ToCoordinator],
        memory: int,
        cut: Cut | None = None,
    ) -> None:
        experiment = setup.experiment
        assert isinstance(experiment.engine, Processes)
        self._setup, self._folder, self._launcher, self._cut = setup, folder, launcher, cut
        self._options = experiment.engine
        self._nodes = experiment.nodes
        self._models = SharedModels(memory, self._nodes, setup.layout.size, setup.layout.buffer_size)
        self._evaluator = stage.evaluator
        self._selector = selectors.DefaultSelector()
        self._faults = FaultRunner(setup, self)
        self._process_pool = ProcessPool(
            setup, folder, memory, stage, cut, self._selector, self._faults.crash_rounds
        )
        self.children, self.alive = self._process_pool.children, self._process_pool.alive
        self._checkpoints = CheckpointCoordinator(
            experiment, folder, cut, self.tell, partial(self.say, None, "checkpoint")
        )
        self._record: Record
        self._deadlock = DeadlockWatch(
            experiment, self.children, self.alive, lambda *said: self._record.events.append(*said)
        )
        self._said = 0.0
        self._places_told = self._process_pool.cpu_slots
        self._start: float | None = None
        self._due: str | None = None  # why the run is to end in order
        self._ending = False
        self._heard = 0.0

    def run(self) -> Ended:
        """From the first fork to the last exit."""
        try:
            self._process_pool.fill(self._absent())
            self._record = Record(
                self._setup,
                self._folder,
                self._models,
                self._evaluator,
                lambda rank: self.tell(rank, protocol.Consumed()),
                lambda row: self._launcher.send(protocol.NewRow(row)),
                self._say,
            )
            if self._cut is not None:
                self._resume(self._cut)
            self._selector.register(self._launcher, selectors.EVENT_READ, None)
            for message in self._launcher.pending():
                self._hear_launcher(message)
            self._await_ready()
            self._supervise()
        except Ended as end:
            if end.failure is None:
                end = self._finish(end)
            return end
        finally:
            self._process_pool.kill_all()
        raise AssertionError("a run ends by Ended")

    # --- starting

    def _absent(self) -> set[int]:
        """Who is not there at the start: comes later, or was lost before the checkpoint."""
        absent = self._faults.absent()
        self._forget_models(absent)
        return absent | self._lost_before()

    def _lost_before(self) -> set[int]:
        return set() if self._cut is None else set(range(self._nodes)) - self._cut.rounds.keys()

    def _resume(self, cut: Cut) -> None:
        for rank in self._lost_before():
            self.without(rank, keep=False)
            self._forget_models([rank])
        for child in self.children.values():
            child.round = cut.rounds[child.rank]
        self._record.resume(cut)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self._options.start_timeout_s
        while not all(child.ready for child in self.children.values()):
            if time.monotonic() > deadline:
                late = [child.rank for child in self.children.values() if not child.ready]
                raise Ended(
                    "failed",
                    message=f"nodes {late} were not up within engine.start_timeout_s = {self._options.start_timeout_s}",
                )
            self._poll(0.5)
            self._end_if_due()
        self._start = time.monotonic()
        for rank in self._faults.away:
            self._tell_all(protocol.Lost(rank, "not there yet"))
        self._tell_all(protocol.Go(self._start))
        self._record.begin(self._start)
        for rank in sorted(self._lost_before()):
            self._tell_all(protocol.Lost(rank, f"node {rank} was lost before the run was resumed"))
        self._checkpoints.begin(self.alive, self._start)
        self._faults.begin(self._start)

    # --- watching

    def _supervise(self) -> None:
        while True:
            self._poll(self._faults.timeout(0.2))
            self._faults.look()
            self._end_if_due()
            awaited = self._awaited()
            if awaited and all(self.children[rank].done for rank in awaited):
                raise Ended("rounds")
            if not self.alive and not self._faults.expects():
                raise Ended("failed", message=f"no node is left: {self._record.events.summary()}")
            self._deadlock.look()

    def _end_if_due(self) -> None:
        """An end in order waits until all that has come in is taken: none of it is lost."""
        if self._record.target_reached:
            raise Ended("target")
        if self._due is not None:
            raise Ended(self._due)

    def _awaited(self) -> list[int]:
        """Whose rounds the run waits for: who is there, or will be again. One that stands still, and not by the schedule,
        may do so for good."""
        away = self._faults.away
        return [
            rank
            for rank in sorted(self.alive)
            if rank not in away or self.children[rank].frozen or self.children[rank].arriving
        ]

    def _poll(self, timeout: float) -> None:
        for key, events in self._selector.select(timeout):
            child: Child | None = key.data
            if child is not None and events & selectors.EVENT_WRITE:
                self._process_pool.send_on(child)
            if not events & selectors.EVENT_READ:
                continue
            if child is not None:
                said = child.channel.read()
                for message in said or ():
                    self._hear(child, message)
                if said is None:
                    self._died(child)
                continue
            asked = self._launcher.read()
            if asked is None:
                raise Ended("failed", message="the launcher died")
            for request in asked:
                self._hear_launcher(request)
        now = time.monotonic()
        if now - self._said > PROGRESS_S:
            self._said = now
            self._look_at_stopped()
            rounds = sum(child.round for child in self.children.values())
            self._launcher.send(protocol.RunProgress(rounds, self._record.clock.now()))

    def _look_at_stopped(self) -> None:
        for child, stopped in self._process_pool.stopped():
            self._faults.stands(child, still=stopped)
        if self._places_told != self._process_pool.cpu_slots:
            self._places_told = self._process_pool.cpu_slots
            self._tell_all(protocol.Slots(self._places_told))

    def _hear_launcher(self, message: protocol.ToCoordinator) -> None:
        if isinstance(message, protocol.Stop):
            self._due = self._due or "stopped"

    def _hear(self, child: Child, message: protocol.FromNode) -> None:
        rank = child.rank
        self._heard = time.monotonic()
        if rank in self._faults.away and self._start is not None and child.ready:
            self._faults.heard(child)
        match message:
            case protocol.Ready():
                child.ready = True
                if self._start is not None:
                    child.arriving = True
                    self._faults.ready(child)
            case protocol.Progress(round=round, time_s=time_s):
                child.round = round
                self._record.clock.hear(time_s)
            case protocol.TimeUp():
                self._due = self._due or "time"
            case protocol.Row(moment=moment, row=row, slot=slot):
                # (The row of a tick may be behind what the node has said since.)
                child.round = max(child.round, row["round"])
                child.traffic = {name: row[name] for name in TRAFFIC}
                self._record.row(rank, moment, row, slot)
            case protocol.View(moment=moment, round=round, ranks=ranks):
                self._record.view(rank, moment, round, ranks)
            case protocol.Done(round=round):
                child.done, child.round = True, round
                self._checkpoints.done(rank)
                if child.leaving:
                    self.tell(rank, protocol.Finish("left"))
            case protocol.Marked(number=number, ranks=ranks):
                self._checkpoints.marked(rank, number, ranks)
            case protocol.Saved(number=number, round=round, time_s=time_s):
                self._checkpoints.saved(rank, number, round, time_s)
            case protocol.Broken(number=number, peer=peer):
                self._checkpoints.broken(rank, number, peer)
            case protocol.Final(round=round, private=private):
                child.final, child.round, child.private = True, round, private
                if child.leaving and not self._ending:
                    self._faults.left(child)
            case protocol.At(rank=about, round=round):
                self._faults.told(child, about, round)
            case protocol.Crash(number=number):
                self._faults.crashes_itself(child, number)
            case protocol.Idle(sent=sent, received=received, waits=waits):
                child.idle = None if waits is None else (sent, received, waits)
                child.idle_reports = child.idle_reports + 1 if child.idle else 0
            case protocol.Event(kind=kind, text=text):
                self._record.events.append(rank, kind, text)
            case protocol.Unreachable(rank=peer, why=why) if not self._ending:
                if self._setup.experiment.gather.lost_peer == "fail":
                    self._deadlock.unreachable(rank, peer, why)
                else:
                    self._faults.doubt(child, peer, why)
            case protocol.Reachable(rank=peer):
                self._deadlock.reachable(rank, peer)
            case protocol.Failed(text=text, round=round, trace=trace):
                where = f"in round {round}" if self._start is not None else "at start"
                raise Ended(
                    "failed",
                    message=f"node {rank} failed {where}: {text}",
                    node=rank,
                    round=round,
                    traceback=trace,
                )

    def _died(self, child: Child) -> None:
        """A channel was closed: that node's process is gone."""
        how = self._process_pool.bury(child)
        if child.final and (self._ending or child.leaving):
            return
        said = "crashed" if child.planned else "died"
        text = f"node {child.rank} {said} in round {child.round}: {how}"
        self._record.events.append(child.rank, "lost", text)
        if self._ending:
            self._forget_models([child.rank])
            return
        again = self._options.restart == "always" and child.restarts < self._options.restart_limit
        fails = self._setup.experiment.gather.lost_peer == "fail" and not (child.planned or again)
        if fails or self._start is None:
            raise Ended("failed", message=text, node=child.rank, round=child.round)
        self._say(text)
        self._faults.died(child, text)
        self._forget_models([child.rank])
        if again and not child.planned:
            child.restarts += 1
            self._faults.bring_back(child.rank, "checkpoint")
        if not self.alive and not self._faults.expects():
            raise Ended("failed", message=f"every node died; the last one: {text}")

    def _forget_models(self, ranks: Iterable[int]) -> None:
        """What these ended with is not known; nobody shall take zeros for a model."""
        sizes = self._setup.layout.size, self._setup.layout.buffer_size
        unknown = Model(*(torch.full((n,), math.nan) for n in sizes))
        for rank in ranks:
            self._models.write(FINAL, rank, unknown)

    # --- what faults ask for

    def say(self, rank: int | None, event: str, text: str) -> None:
        """Write an event down, and show it."""
        self._record.events.append(rank, event, text)
        self._say(text or event)

    def show(self, text: str) -> None:
        """Show what is no event."""
        self._say(text)

    def fork(self, rank: int) -> Child:
        """Start a node anew, on the port that it had.

        Raises:
            OSError: if its port is taken, or the system gives no process; its ``strerror`` says which.
        """
        return self._process_pool.fork(rank)

    def again(self, rank: int, first: int) -> None:
        """A node that takes part from a round on is recorded again."""
        self._checkpoints.back(rank)
        self._record.again(rank, first)

    def without(self, rank: int, *, keep: bool) -> None:
        """Nobody waits for a node any more; what it gave for moments that are not complete counts if it is to be kept."""
        self._deadlock.wiped()
        if rank in self.alive and not self.children[rank].leaving:
            self._checkpoints.away(rank)
        else:
            self._checkpoints.lost(rank)
        self._record.without(rank, keep=keep)

    def go(self, child: Child, first: int, together: Sequence[tuple[int, int]]) -> None:
        """Let a node live that was started anew, from this round on, and with each of the others from one."""
        start = (
            time.monotonic() - self._record.clock.now()
        )  # the nodes' clocks stand still while they are evaluated
        tick, traffic = self._record.next_tick(), dict(child.traffic or {})
        arrival = protocol.Arrival(first, together, child.start_from, tick, traffic)
        self.tell(child.rank, protocol.Go(start, arrival))

    def tell(self, rank: int, message: protocol.Message) -> None:
        """Send a node a message; one that is gone is noticed by its closed channel."""
        self._process_pool.tell(rank, message)

    # --- ending

    def _finish(self, end: Ended) -> Ended:
        """Have every node write its last row and its model; gives how it went. Only a failure ends that early."""
        self._ending = True
        there = [self.children[rank] for rank in self._awaited()]
        rounds = {child.rank: child.round for child in there if not (child.leaving and child.done)}
        self._faults.thaw_all()
        again = end_is_due(self._setup, end.reason, rounds)
        self._tell_all(protocol.Finish(end.reason, self._checkpoints.last(), again))
        self._heard = time.monotonic()
        awaited = set(self._awaited())
        try:
            while any(not self.children[rank].final for rank in awaited & self.alive):
                if time.monotonic() > self._heard + END_S:
                    break
                self._poll(0.2)
            for rank in sorted(self.alive):
                if not self.children[rank].final:
                    self._give_up(rank)
        except Ended as failure:
            return failure
        if end.reason == "rounds" and (early := returned_early(self._setup, rounds)) is not None:
            self.say(None, "ended-early", early)
        if (away := self._record.events.summary()) is not None:
            self._say(away)
        return end

    def _give_up(self, rank: int) -> None:
        """A node does not end: it is killed, and lost; the others' outcome stands."""
        child = self.children[rank]
        os.kill(child.pid, signal.SIGKILL)
        self._say(f"node {rank} did not end with the others, and was killed")
        self._died(child)

    def private_bytes(self) -> dict[str, float] | None:
        """What nodes had to themselves at their end, as far as they said."""
        said = [child.private for child in self.children.values() if child.private is not None]
        return {"mean": sum(said) / len(said), "max": max(said)} if said else None

    def _tell_all(self, message: protocol.Message) -> None:
        for rank in sorted(self.alive):
            self.tell(rank, message)

    def _say(self, text: str) -> None:
        self._launcher.send(protocol.Say(text))
