"""Runs the nodes of an experiment as processes, and never leaves one behind.

The coordinator decides everything that is about more than one node: when the run starts, which faults happen, who is dead and
who comes back, when a checkpoint is complete, and when the run ends. It alone writes the record. Where nodes are is the
workers' business (:mod:`gossamer.runtime.processes.coordinator.workers`): they end their nodes when the run ends, and the
system ends the nodes of a worker that dies.
"""

from __future__ import annotations

import math
import selectors
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import partial

import torch

from gossamer.config import Processes
from gossamer.faults import StartFrom
from gossamer.messages.tags import Model, Traffic
from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.channel import Channel
from gossamer.runtime.processes.coordinator.checkpoints import CheckpointCoordinator
from gossamer.runtime.processes.coordinator.deadlock import DeadlockWatch
from gossamer.runtime.processes.coordinator.ended import Ended
from gossamer.runtime.processes.coordinator.fault_runner import FaultRunner
from gossamer.runtime.processes.coordinator.node_state import NodeState
from gossamer.runtime.processes.coordinator.record import Record
from gossamer.runtime.processes.coordinator.remote import Door, RemoteWorkers
from gossamer.runtime.processes.coordinator.workers import RESTART_S, LocalWorkers, Workers
from gossamer.runtime.processes.node_process.warmup import Stage
from gossamer.runtime.processes.system.memory import FINAL, SharedModels
from gossamer.runtime.processes.worker.pool import ProcessPool
from gossamer.runtime.recording import end_is_due, returned_early
from gossamer.runtime.setup import Setup

END_S = 30.0
"""Seconds without a sign of life after which nodes that should end are killed."""
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
        experiment = setup.experiment
        assert isinstance(experiment.engine, Processes)
        self._setup, self._folder, self._launcher, self._cut = setup, folder, launcher, cut
        self._options = experiment.engine
        self._models = SharedModels(memory, experiment.nodes, setup.layout.size, setup.layout.buffer_size)
        self._evaluator = stage.evaluator
        self._selector = selectors.DefaultSelector()
        self._faults = FaultRunner(setup, self)
        self.nodes: dict[int, NodeState] = {}
        """The newest process of each node, by rank."""
        self.alive: set[int] = set()
        """The ranks whose process has not ended."""
        self._workers: Workers
        if door is None:
            pool = partial(ProcessPool, setup, folder, memory, stage, cut, self._selector)
            self._workers = LocalWorkers(pool, self._take)
        else:
            self._workers = RemoteWorkers(
                setup,
                folder,
                self._models,
                cut,
                door,
                least_workers,
                self._selector,
                self._take,
                self.show,
            )
        self._checkpoints = CheckpointCoordinator(
            experiment, folder, cut, self.tell, partial(self.say, None, "checkpoint")
        )
        self._record: Record
        self._deadlock = DeadlockWatch(
            experiment, self.nodes, self.alive, lambda *said: self._record.events.append(*said)
        )
        self._said = 0.0
        self._start: float | None = None
        self._due: str | None = None  # why the run is to end in order
        self._ending = False
        self._heard = 0.0

    def run(self) -> Ended:
        """From the first process to the last."""
        end = Ended("failed", message="interrupted")
        try:
            self._begin()
            self._supervise()
        except Ended as ended:
            end = ended
            if end.failure is None:
                end = self._finish(end)
        finally:
            self._workers.close(end.reason)
        return end

    # --- starting

    def _begin(self) -> None:
        self._record = Record(
            self._setup,
            self._folder,
            self._models,
            self._evaluator,
            lambda rank: self.tell(rank, protocol.Consumed()),
            lambda row: self._launcher.send(protocol.NewRow(row)),
            self.show,
        )
        self._selector.register(self._launcher, selectors.EVENT_READ, self._hear_launcher)
        for request in self._launcher.pending():
            self._obey(request)
        self._workers.assemble(range(self._setup.experiment.nodes), self._wait)
        absent = self._absent()
        for rank in range(self._setup.experiment.nodes):
            if rank not in absent:
                self._fork(rank, 0.0)
        if self._cut is not None:
            self._resume(self._cut)
        self._await_ready()

    def _wait(self) -> None:
        self._poll(0.2)
        self._end_if_due()

    def _absent(self) -> set[int]:
        """The ranks that have no process at the start: they come later, or were lost before the checkpoint."""
        absent = self._faults.absent()
        self._forget_models(absent)
        return absent | self._lost_before()

    def _lost_before(self) -> set[int]:
        nodes = range(self._setup.experiment.nodes)
        return set() if self._cut is None else set(nodes) - self._cut.rounds.keys()

    def _fork(self, rank: int, wait_s: float) -> bool:
        before = self.nodes.get(rank)
        incarnation = 0 if before is None else before.incarnation + 1
        if not self._workers.fork(rank, incarnation, self._faults.crash_rounds(rank), wait_s):
            return False
        self.nodes[rank] = NodeState(rank, incarnation)
        self.alive.add(rank)
        return True

    def _resume(self, cut: Cut) -> None:
        for rank in self._lost_before():
            self.without(rank, keep=False)
            self._forget_models([rank])
        for node in self.nodes.values():
            node.round = cut.rounds[node.rank]
        self._record.resume(cut)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self._options.start_timeout_s
        while not all(node.ready for node in self.nodes.values()):
            if time.monotonic() > deadline:
                late = [node.rank for node in self.nodes.values() if not node.ready]
                raise Ended(
                    "failed",
                    message=f"nodes {late} were not up within engine.start_timeout_s = {self._options.start_timeout_s}",
                )
            self._wait()
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
            if awaited and all(self.nodes[rank].done for rank in awaited):
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
        """The nodes whose rounds the run waits for: those that are there, or will be again. One that stands still, and not by
        the schedule, may do so for good."""
        away = self._faults.away
        return [
            rank
            for rank in sorted(self.alive)
            if rank not in away or self.nodes[rank].frozen or self.nodes[rank].arriving
        ]

    def _poll(self, timeout: float) -> None:
        for key, events in self._selector.select(timeout):
            if key.fileobj in self._selector.get_map():  # what came before may have closed it
                key.data(events)
        now = time.monotonic()
        if now - self._said > PROGRESS_S:
            self._said = now
            self._workers.look()
            rounds = sum(node.round for node in self.nodes.values())
            self._launcher.send(protocol.RunProgress(rounds, self._record.clock.now()))

    def _hear_launcher(self, events: int) -> None:
        requests = self._launcher.read()
        if requests is None:
            raise Ended("failed", message="the launcher died")
        for request in requests:
            self._obey(request)

    def _obey(self, request: protocol.ToCoordinator) -> None:
        if isinstance(request, protocol.Stop):
            self._due = self._due or "stopped"

    def _take(self, event: protocol.PoolEvent) -> None:
        """Take what happens at a worker."""
        if isinstance(event, protocol.Listening):
            return
        node = self.nodes.get(event.rank)
        if node is None or node.incarnation != event.incarnation:
            if isinstance(event, protocol.NotForked) and self._start is None:  # no port for it
                raise Ended("failed", message=f"node {event.rank} can't be started: {event.why}")
            return
        match event:
            case protocol.Said(message=message):
                self._hear(node, message)
            case protocol.Exited(how=how):
                self._died(node, how)
            case protocol.NotForked(why=why):
                self.alive.discard(node.rank)
                if self._start is None:
                    raise Ended("failed", message=f"node {node.rank} can't be started: {why}")
                self._faults.not_forked(node.rank, why)
            case protocol.Stood(still=still):
                self._faults.stands(node, still=still)

    def _hear(self, node: NodeState, message: protocol.FromNode) -> None:
        rank = node.rank
        self._heard = time.monotonic()
        if rank in self._faults.away and self._start is not None and node.ready:
            self._faults.heard(node)
        match message:
            case protocol.Ready():
                node.ready = True
                if self._start is not None:
                    node.arriving = True
                    self._faults.ready(node)
            case protocol.Progress(round=round, time_s=time_s):
                node.round = round
                self._record.clock.hear(time_s)
            case protocol.TimeUp():
                self._due = self._due or "time"
            case protocol.Row(moment=moment, row=row, slot=slot):
                # (The row of a tick may be behind what the node has said since.)
                node.round = max(node.round, row["round"])
                node.traffic = {name: row[name] for name in TRAFFIC}
                self._record.row(rank, moment, row, slot)
            case protocol.View(moment=moment, round=round, ranks=ranks):
                self._record.view(rank, moment, round, ranks)
            case protocol.Done(round=round):
                node.done, node.round = True, round
                self._checkpoints.done(rank)
                if node.leaving:
                    self.tell(rank, protocol.Finish("left"))
            case protocol.Marked(number=number, ranks=ranks):
                self._checkpoints.marked(rank, number, ranks)
            case protocol.Saved(number=number, round=round, time_s=time_s):
                self._checkpoints.saved(rank, number, round, time_s)
            case protocol.Broken(number=number, peer=peer):
                self._checkpoints.broken(rank, number, peer)
            case protocol.Final(round=round, private=private):
                node.final, node.round, node.private = True, round, private
                if node.leaving and not self._ending:
                    self._faults.left(node)
            case protocol.At(rank=about, round=round):
                self._faults.told(node, about, round)
            case protocol.Crash(number=number):
                self._faults.crashes_itself(node, number)
            case protocol.Idle(sent=sent, received=received, waits=waits):
                node.idle = None if waits is None else (sent, received, waits)
                node.idle_reports = node.idle_reports + 1 if node.idle else 0
            case protocol.Event(kind=kind, text=text):
                self._record.events.append(rank, kind, text)
            case protocol.Unreachable(rank=peer, why=why) if not self._ending:
                if self._setup.experiment.gather.lost_peer == "fail":
                    self._deadlock.unreachable(rank, peer, why)
                else:
                    self._faults.doubt(node, peer, why)
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

    def _died(self, node: NodeState, how: str) -> None:
        """The process of a node is gone."""
        self.alive.discard(node.rank)
        if node.final and (self._ending or node.leaving):
            return
        said = "crashed" if node.planned else "died"
        text = f"node {node.rank} {said} in round {node.round}: {how}"
        self._record.events.append(node.rank, "lost", text)
        if self._ending:
            self._forget_models([node.rank])
            return
        again = self._options.restart == "always" and node.restarts < self._options.restart_limit
        fails = self._setup.experiment.gather.lost_peer == "fail" and not (node.planned or again)
        if fails or self._start is None:
            raise Ended("failed", message=text, node=node.rank, round=node.round)
        self.show(text)
        self._faults.died(node, text)
        self._forget_models([node.rank])
        if again and not node.planned:
            node.restarts += 1
            self._faults.bring_back(node.rank, "checkpoint")
        if not self.alive and not self._faults.expects():
            raise Ended("failed", message=f"every node died; the last one: {text}")

    def _forget_models(self, ranks: Iterable[int]) -> None:
        """Their models at the end are not known; nobody shall take zeros for a model."""
        sizes = self._setup.layout.size, self._setup.layout.buffer_size
        unknown = Model(*(torch.full((n,), math.nan) for n in sizes))
        for rank in ranks:
            self._models.write(FINAL, rank, unknown)

    # --- what faults ask for

    def say(self, rank: int | None, event: str, text: str) -> None:
        """Record an event, and show it."""
        self._record.events.append(rank, event, text)
        self.show(text or event)

    def show(self, text: str) -> None:
        """Show the user something that is not recorded."""
        self._launcher.send(protocol.Say(text))

    def fork(self, rank: int, start_from: StartFrom) -> bool:
        """Restart a node, or start one that comes later; False where no worker has room for it yet."""
        before = self.nodes.get(rank)
        if not self._fork(rank, RESTART_S):
            return False
        node = self.nodes[rank]
        node.start_from = start_from
        if before is not None:
            node.round, node.traffic, node.restarts = before.round, before.traffic, before.restarts
        return True

    def signal(self, rank: int, number: int) -> None:
        """Send the process of a node a signal."""
        self._workers.signal(rank, number)

    def again(self, rank: int, first: int) -> None:
        """A node that takes part from a round on is recorded again."""
        self._checkpoints.back(rank)
        self._record.again(rank, first)

    def without(self, rank: int, *, keep: bool) -> None:
        """Nobody waits for a node any more. What it gave for evaluation points that are not complete counts if ``keep``."""
        self._deadlock.wiped()
        if rank in self.alive and not self.nodes[rank].leaving:
            self._checkpoints.away(rank)
        else:
            self._checkpoints.lost(rank)
        self._record.without(rank, keep=keep)

    def go(self, node: NodeState, first: int, together: Sequence[tuple[int, int]]) -> None:
        """Let a node that was restarted go on from a round, and with each of the others from one."""
        start = (
            time.monotonic() - self._record.clock.now()
        )  # the nodes' clocks stand still while they are evaluated
        tick, traffic = self._record.next_tick(), dict(node.traffic or {})
        arrival = protocol.Arrival(first, together, node.start_from, tick, traffic)
        self.tell(node.rank, protocol.Go(start, arrival))

    def tell(self, rank: int, message: protocol.ToNode) -> None:
        """Send a node a message; that a node is gone is noticed by its closed channel."""
        self._workers.tell(rank, message)

    # --- ending

    def _finish(self, end: Ended) -> Ended:
        """Have every node write its last row and its model; gives how it went. Only a failure ends that early."""
        self._ending = True
        there = [self.nodes[rank] for rank in self._awaited()]
        rounds = {node.rank: node.round for node in there if not (node.leaving and node.done)}
        self._faults.thaw_all()
        again = end_is_due(self._setup, end.reason, rounds)
        self._tell_all(protocol.Finish(end.reason, self._checkpoints.last(), again))
        self._heard = time.monotonic()
        awaited = set(self._awaited())
        try:
            while any(not self.nodes[rank].final for rank in awaited & self.alive):
                if time.monotonic() > self._heard + END_S:
                    break
                self._poll(0.2)
            for rank in sorted(self.alive):
                if not self.nodes[rank].final:
                    self._give_up(rank)
        except Ended as failure:
            return failure
        if end.reason == "rounds" and (early := returned_early(self._setup, rounds)) is not None:
            self.say(None, "ended-early", early)
        if (away := self._record.events.summary()) is not None:
            self.show(away)
        return end

    def _give_up(self, rank: int) -> None:
        """A node does not end: it is killed, and lost; the others' outcome stands."""
        self.signal(rank, signal.SIGKILL)
        self.show(f"node {rank} did not end with the others, and was killed")
        self._died(self.nodes[rank], "killed by SIGKILL")

    def private_bytes(self) -> dict[str, float] | None:
        """The memory that nodes had to themselves at their end, as far as they said."""
        said = [node.private for node in self.nodes.values() if node.private is not None]
        return {"mean": sum(said) / len(said), "max": max(said)} if said else None

    def _tell_all(self, message: protocol.ToNode) -> None:
        for rank in sorted(self.alive):
            self.tell(rank, message)
