"""Runs the nodes of an experiment as processes, and never leaves one behind.

The coordinator executes the decisions of
:class:`~gossamer.runtime.processes.coordinator.lifecycle.Lifecycle`, to which it passes the messages of nodes
and workers. Only the coordinator writes the record and assembles checkpoints. Workers
(:mod:`gossamer.runtime.processes.coordinator.workers`) start nodes, and end them with the run. The system
ends the nodes of a worker that dies."""

from __future__ import annotations

import math
import selectors
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from gossamer.errors import RunFailed
from gossamer.learning.evaluate import Evaluator
from gossamer.messages.tags import Model
from gossamer.results.checkpoints import RunCheckpoint
from gossamer.results.folder import RunFolder
from gossamer.results.observer import Observer
from gossamer.results.reading import read_metrics
from gossamer.results.schema import Totals
from gossamer.runtime.events import EstimatedClock, EventLog
from gossamer.runtime.outcome import Outcome, add_up, nothing_sent
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.coordinator.checkpoints import CheckpointCoordinator
from gossamer.runtime.processes.coordinator.checks import MAX_EVENTS, Checks
from gossamer.runtime.processes.coordinator.lifecycle import (
    Decision,
    End,
    Fail,
    HoldCheckpoints,
    Lifecycle,
    RecordEvent,
    Rejoin,
    ReleaseCheckpoints,
    Show,
    Without,
)
from gossamer.runtime.processes.coordinator.listener import WorkerListener
from gossamer.runtime.processes.coordinator.reports import TrafficReports
from gossamer.runtime.processes.coordinator.workers import JoinedWorkers, LocalWorker, Reminder, Workers
from gossamer.runtime.processes.fork_server import ForkServer
from gossamer.runtime.processes.protocol import Fork, Signal, Tell, Violation
from gossamer.runtime.recording import UNCOUNTED, UNCOUNTED_S, RunRecord, extrapolated, never_mixed
from gossamer.runtime.setup import Setup

PROGRESS_S = 0.1


class EndOfRun(Exception):
    """The run must end gracefully, for this reason."""


class Coordinator:
    """One run, which resumes from ``checkpoint``, if given. A fork server as ``server`` runs all nodes. With a
    listener, the run starts once ``min_workers`` workers have joined; ``replaceable``: others may join in place of one that
    is refused. The run's files are closed with ``resources``."""

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder,
        observer: Observer,
        checkpoint: RunCheckpoint | None,
        server: ForkServer | WorkerListener,
        min_workers: int,
        resources: ExitStack,
        *,
        replaceable: bool = False,
    ) -> None:
        self._setup, self._folder, self._observer, self._resumed_from = setup, folder, observer, checkpoint
        opened = resources.enter_context
        selector = self._selector = opened(selectors.DefaultSelector())
        common = setup, folder, checkpoint, selector, self._take, self.show
        self._local = isinstance(server, ForkServer)
        self._checks = Checks(setup, checkpoint, local=self._local)
        self._workers: Workers
        if isinstance(server, WorkerListener):
            record = partial(self.record, None)
            self._workers = JoinedWorkers(server, min_workers, replaceable, record, *common)
        else:
            self._workers = LocalWorker(server, *common)
        self._lifecycle = Lifecycle(setup, None if checkpoint is None else checkpoint.rounds)
        experiment = setup.experiment
        samples = experiment.evaluation.samples
        evaluator = Evaluator(setup.task, experiment.seed, samples, metrics=setup.metrics)
        metrics, graphs = opened(folder.segment("metrics")), opened(folder.segment("graphs"))
        self._rows = RunRecord(setup, metrics, graphs, evaluator.columns, self._show_row)
        self._clock = EstimatedClock(time.monotonic)
        self._events = EventLog(
            opened(folder.segment("events")), self._clock.now, self._wall, lambda: self._reports.bytes_sent
        )
        self._checkpoints = CheckpointCoordinator(
            experiment, folder, checkpoint, self._tell, partial(self.record, None, "checkpoint")
        )
        self._start: float | None = None
        self._reported_at = 0.0
        self._diverged = False
        # Whether the run resumes without nodes that had been lost, whose traffic is unknown.
        self._incomplete = checkpoint is not None and len(checkpoint.rounds) < experiment.nodes
        self._start_failure: str | None = None
        self._faulty: set[int] = set()  # ranks that have failed by themselves, or whose processes have died
        self._reports = TrafficReports()
        self._most_bytes = experiment.stop.most_bytes(experiment.nodes)
        self._final: dict[int, Model] = {}
        self._private: list[int] = []
        self._has_mixed: dict[int, bool] = {}
        self._counts_rounds: dict[int, bool] = {}  # by rank, once a node has reported
        self._heard_uncounted = False
        # The nodes' time and the wall time, as in the rows.
        self._time_s, self._wall_s = 0.0, 0.0 if checkpoint is None else checkpoint.wall_s

    def run(self) -> Outcome:
        """Run to the end. The failure of a node is part of the outcome; rows recorded before it are kept."""
        reason, failure, parameters, buffers = "failed", None, None, None
        try:
            reason = self._run()
            parameters, buffers = self._models()
            if reason not in ("stopped", "diverged") and (missed := self._lifecycle.missed()) is not None:
                reason, failure = "failed", missed
        except RunFailed as error:
            failure = error
        finally:
            counted = self._totals()
            self._workers.close(reason, failure, self._faulty)
        sizes = self._private
        return Outcome(
            reason,
            self._time_s,
            self._wall_s,
            parameters,
            buffers,
            failure,
            self._setup.trainer,
            counted,
            private_bytes={"mean": sum(sizes) / len(sizes), "max": float(max(sizes))} if sizes else None,
        )

    def stop(self) -> None:
        """End the run gracefully, at the user's request."""
        self._lifecycle.end("stopped")

    def fail_to_start(self, why: str) -> None:
        """Fail the run, unless it has started."""
        self._start_failure = why

    def _run(self) -> str:
        try:
            self._begin()
            while True:
                self._poll(self._lifecycle.timeout(time.monotonic(), 0.2))
                self._execute(self._lifecycle.run_due(time.monotonic()))
                for rank in self._lifecycle.to_restart:
                    if self._workers.has_room(rank):
                        self._execute(self._lifecycle.restart(rank, time.monotonic()))
        except EndOfRun as over:
            reason = str(over)
        self._execute(self._lifecycle.finish(reason, self._checkpoints.last(), time.monotonic()))
        while not self._lifecycle.over(time.monotonic()):
            self._poll(0.2)
        self._execute(self._lifecycle.give_up())
        self._show_uncounted()
        if self._setup.experiment.evaluation.of == "mixed":
            outcome = [mixed for rank, mixed in self._has_mixed.items() if rank in self._setup.outcome_ranks]
            if (text := never_mixed(outcome)) is not None:
                self.record(None, "never-mixed", text)
        return "diverged" if self._diverged else reason

    def _totals(self) -> Totals:
        now, lifecycle = time.monotonic(), self._lifecycle
        nodes = [node for node in lifecycle.nodes.values() if self._setup.takes_part(node.rank, node.round)]
        for node in lifecycle.nodes.values():
            self._reports.ends(node.rank, now)
        exact = not lifecycle.killed and all(node.final for node in lifecycle.nodes.values())
        counted = add_up(
            self._time_s,
            self._reports.all(),
            [node.round for node in nodes],
            [node.round for node in nodes if node.rank not in lifecycle.presence.lost],
            exact=exact and not self._incomplete,
        )
        return {**counted, "report_age_s": self._reports.age_s}

    def _models(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last model of every node; NaN where it is unknown."""
        sizes = self._setup.layout.size, self._setup.layout.buffer_size
        unknown = Model(*(torch.full((size,), math.nan) for size in sizes))
        # A process that has not been let in yet has the model with which it would have begun.
        final = {
            rank: self._final[rank] for rank, node in self._lifecycle.nodes.items() if node.final and node.met
        }
        models = [final.get(rank, unknown) for rank in range(self._setup.experiment.nodes)]
        parameters, buffers = (torch.stack(vectors) for vectors in zip(*models, strict=True))
        return parameters, buffers if buffers.shape[1] else None

    def _begin(self) -> None:
        if self._resumed_from is not None:
            self._clock.update(max(self._resumed_from.times_s.values()), runs=False)
        self._workers.assemble(self._wait)
        self._execute(self._lifecycle.start(time.monotonic()))
        if self._resumed_from is not None:
            metrics = read_metrics(self._folder.path)
            self._rows.resume(self._resumed_from, metrics)
            self._checks.resume(metrics)
        reminder = Reminder()
        while not self._lifecycle.up:
            self._wait()
            if reminder.due() and (late := self._lifecycle.not_up):
                since_s = time.monotonic() - reminder.since
                self.show(f"waiting for the start of {self._workers.where(late)} (since {since_s:.0f} s)")
        start = self._start = time.monotonic()
        self._clock.update(self._clock.now())  # the clock runs from here on
        self._checkpoints.begin(self._lifecycle.alive, start)
        for rank in self._lifecycle.alive:
            self._reports.begins(rank, start)
        self._execute(self._lifecycle.begin(start))

    def _wait(self) -> None:
        self._poll(0.2)
        self._execute(self._lifecycle.run_due(time.monotonic()))
        if self._start_failure is not None:
            raise RunFailed(self._start_failure)

    # --- incoming messages

    def _poll(self, timeout: float) -> None:
        """Wait for messages, and handle all that have arrived."""
        until = time.monotonic() + timeout
        while ready := self._selector.select(timeout):
            for key, events in ready:
                key.data(events)
            timeout = 0.0
            if time.monotonic() > until:
                break
        now = time.monotonic()
        if now - self._reported_at > PROGRESS_S:
            self._reported_at = now
            self._workers.look_after()
            if rounds := [self._lifecycle.nodes[rank].round for rank in self._lifecycle.awaited()]:
                self._time_s = max(self._time_s, self._clock.now())
                self._observer.progress(extrapolated(rounds, self._setup.experiment.nodes), self._time_s)
                if self._start is not None and now - self._start > UNCOUNTED_S:
                    self._show_uncounted()
                if self._observer.stopping:
                    self.stop()

    def _show_uncounted(self) -> None:
        """Say once that no node counts rounds, if all of them have reported so."""
        reported = self._counts_rounds
        silent = len(reported) < self._setup.experiment.nodes or any(reported.values())
        if not (silent or self._heard_uncounted):
            self._heard_uncounted = True
            self.show(UNCOUNTED)

    def _show_row(self, row: Mapping[str, Any]) -> None:
        self._time_s, self._wall_s = max(self._time_s, row["time_s"]), max(self._wall_s, row["wall_s"])
        self._observer.row(row)

    def _take(self, report: protocol.NodeReport) -> None:
        rank, node, message = report.rank, self._lifecycle.nodes.get(report.rank), report.message
        if node is None or node.incarnation != report.incarnation or rank not in self._lifecycle.alive:
            return
        try:
            self._checks.check(rank, message)
            self._lifecycle.check(rank, message)
            self._checkpoints.check(rank, message)
            message = self._workers.keep(report)
        except Violation as error:
            if not self._local:
                raise  # the worker is cut off
            self._workers.do(Signal(rank, signal.SIGKILL))
            message = protocol.Exited(f"it sent {error}")
        self._note(rank, message)
        self._execute(self._lifecycle.take(rank, message, time.monotonic()))
        if self._rows.target_met():
            self._lifecycle.end("target")
        if (sent := self._reports.bytes_sent) >= self._most_bytes:
            self._lifecycle.end("bytes")
        if not sent and self._most_bytes < math.inf:
            rounds = [node.round for node in self._lifecycle.nodes.values()]
            failure = nothing_sent(self._setup.experiment.stop, sent, sum(rounds) / len(rounds))
            if failure is not None:
                raise failure

    def _note(self, rank: int, message: protocol.FromProcess) -> None:
        match message:
            case protocol.Progress(time_s=time_s, traffic=traffic, counts_rounds=counts):
                self._counts_rounds[rank] = counts
                self._reports.take(rank, traffic, time_s, time.monotonic())
                if self._start is not None:
                    self._clock.update(time_s)
            case protocol.Row(moment=moment, values=values, model=model, view=view):
                self._reports.take(rank, message.traffic, values.time_s, time.monotonic())
                network_bytes = self._reports.bytes_by(values.time_s - values.model_age_s)
                self._rows.graph(values.round)
                row = message.row(rank, network_bytes)
                self._rows.row(moment, row, None if model is None else self._model(model), view)
                if model is not None:
                    self._tell(rank, protocol.Command("read"))
            case protocol.Event(kind=kind, text=text):
                self._record_event(rank, kind, text)
                if kind == "diverged" and self._setup.experiment.stop.diverged == "end":
                    self._diverged = True
                    self._lifecycle.end("diverged")
            case protocol.Done() | protocol.Marked() | protocol.Saved():
                self._checkpoints.hear(rank, message)
            case protocol.Exited():
                self._faulty.add(rank)
                self._reports.ends(rank, time.monotonic())
            case protocol.Failed(traceback=trace) if trace:  # not because of a peer
                self._faulty.add(rank)
            case protocol.FinalModel(model=model, private=private, has_mixed=has_mixed):
                self._reports.ends(rank, time.monotonic())
                self._final[rank] = self._model(model)
                self._has_mixed[rank] = has_mixed
                if private is not None:
                    self._private.append(private)

    def _model(self, data: bytearray) -> Model:
        vector = torch.frombuffer(data, dtype=torch.float32).clone()  # so that it is aligned
        size = self._setup.layout.size
        return Model(vector[:size], vector[size:])

    def _wall(self) -> float:
        """Real seconds of the run so far."""
        now_s = 0.0 if self._start is None else time.monotonic() - self._start
        return now_s + (0.0 if self._resumed_from is None else self._resumed_from.wall_s)

    # --- actions

    def _execute(self, decisions: Iterable[Decision]) -> None:
        """Carry out decisions of the lifecycle. Raises EndOfRun or RunFailed at the one that ends the run."""
        for decision in decisions:
            match decision:
                case Fork() | Signal() | Tell():
                    if isinstance(decision, Fork):
                        self._faulty.discard(decision.rank)
                    self._workers.do(decision)
                case RecordEvent(rank=rank, event=event, text=text, show=show):
                    self.record(rank, event, text, show=show)
                case Show(text=text):
                    self.show(text)
                case Without(rank=rank, keep=keep, gone=gone):
                    self._checkpoints.away(rank)
                    self._rows.without(rank, gone_s=self._clock.now() if gone else None, keep=keep)
                case Rejoin():
                    self._rejoin(decision)
                case HoldCheckpoints(why=why):
                    self._checkpoints.hold(why)
                case ReleaseCheckpoints():
                    self._checkpoints.release()
                case End(reason=reason):
                    raise EndOfRun(reason)
                case Fail(error=error):
                    raise error

    def _rejoin(self, node: Rejoin) -> None:
        rank, now_s, every_s = node.rank, self._clock.now(), self._setup.experiment.evaluation.every_s
        tick = 0 if every_s is None else int(now_s / every_s) + 1
        if node.start_from is None:
            self._tell(rank, protocol.Meet(node.together, node.first))
        else:  # the node's clock starts at the others' time; their clocks pause during evaluations
            self._reports.begins(rank, time.monotonic())
            traffic = self._reports.of(rank)
            arrival = protocol.Arrival(node.first, node.together, node.start_from, tick, traffic)
            self._tell(rank, protocol.Go(time.monotonic() - now_s, arrival))
        self._checkpoints.back(rank)
        self._rows.back(rank, node.first + 1, tick, now_s)

    def record(self, rank: int | None, event: str, text: str, *, show: bool = True) -> None:
        self._events.append(rank, event, text)
        if show:
            self.show(text or event)

    def _record_event(self, rank: int, kind: str, text: str) -> None:
        recorded = self._checks.records(rank)
        if recorded is None:
            self._events.append(rank, "left-out", f"only the first {MAX_EVENTS:,} of its events are recorded")
        elif recorded:
            self._events.append(rank, kind, text)

    def show(self, text: str) -> None:
        self._observer.say(text)

    def _tell(self, rank: int, message: protocol.ToNode) -> None:
        self._workers.do(Tell(rank, message))
