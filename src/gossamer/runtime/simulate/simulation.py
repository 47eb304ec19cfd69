"""A simulation: one run of all nodes on one machine, in virtual time."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from gossamer.config import Simulate
from gossamer.errors import RunFailed
from gossamer.learning.computation import Computation, Kind
from gossamer.learning.memory import keep_freed_memory
from gossamer.learning.rows import Rows
from gossamer.learning.workers import Workers
from gossamer.messages.tags import Message, Model
from gossamer.node import NodeRuntime
from gossamer.node.checkpoint import Checkpoint
from gossamer.node.host import Host
from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder
from gossamer.results.segment import Segment
from gossamer.runtime.events import EventLog
from gossamer.runtime.outcome import Outcome, describe_waits
from gossamer.runtime.profile import Profile
from gossamer.runtime.recording import Observer, returned_early
from gossamer.runtime.rejoin import newcomer
from gossamer.runtime.setup import Setup
from gossamer.runtime.signals import ending_signals
from gossamer.runtime.simulate.checkpoints import RunCheckpoints
from gossamer.runtime.simulate.clock import NS, Clock, Order, new_loop, to_ns
from gossamer.runtime.simulate.compute import Compute
from gossamer.runtime.simulate.context import SimContext
from gossamer.runtime.simulate.evaluation_schedule import Moments
from gossamer.runtime.simulate.execution import Execution
from gossamer.runtime.simulate.fair import FairLinks
from gossamer.runtime.simulate.fault_runner import FaultRunner
from gossamer.runtime.simulate.fifo import FifoLinks
from gossamer.runtime.simulate.host import NodeHost
from gossamer.runtime.simulate.links import Links
from gossamer.runtime.simulate.mixing import Mixing
from gossamer.runtime.simulate.node_tasks import NodeTasks
from gossamer.runtime.simulate.recording import Recording, model_of, stacked
from gossamer.runtime.simulate.settings import calm_collector, torch_settings
from gossamer.runtime.simulate.store import store_device
from gossamer.runtime.timeline import TimelineLog
from gossamer.runtime.unawaited import unawaited_calls_fail

TELL_S = 1.0
"""Real seconds after which it's said how far the run is, though no round ends."""


class Simulation:
    """One run of all nodes of a setup in virtual time.

    Args:
        setup: what is run.
        metrics: where rows are recorded.
        graphs: where graphs that change are recorded.
        observer: who watches.
        timeline: where it's written down when nodes compute and send; None is nowhere.
        folder: where checkpoints are written, and the record is that a checkpoint is of.
        cut: the checkpoint from which it goes on; None is the start.
        events: where it's written down what happens to nodes; needed if there are faults.

    Raises:
        BadInput: for a checkpoint that can't be read.
    """

    def __init__(
        self,
        setup: Setup,
        metrics: Segment,
        graphs: Segment,
        observer: Observer,
        timeline: TimelineLog | None = None,
        folder: RunFolder | None = None,
        cut: Cut | None = None,
        events: Segment | None = None,
    ) -> None:
        experiment, self._setup, self._observer = setup.experiment, setup, observer
        options = experiment.engine
        assert isinstance(options, Simulate)
        self._options = options
        self._profile = Profile()
        self._clock = Clock()
        self._clock.waiting = self._waiting
        self._store = store_device(options.device, setup)
        self._rows = rows = Rows(setup.layout.size, self._store)
        self._inboxes: list[Callable[[Message], None]] = []
        network, nodes, seed = setup.network, experiment.nodes, experiment.seed
        links = FifoLinks if network.sharing == "fifo" else FairLinks
        self._links: Links = links(
            self._clock,
            network,
            nodes,
            seed,
            setup.message_limit,
            self._inboxes,
            None if timeline is None else partial(_sent, timeline),
        )
        self._told = time.perf_counter()
        self._workers = Workers(options.workers, options.threads, self._tell)
        self.nodes: list[NodeRuntime] = []
        self._execution = Execution(
            setup,
            options,
            rows,
            self._workers,
            self._profile,
            lambda rank: self.nodes[rank].model,
            observer.say,
        )
        mixing = Mixing(self._clock, rows, self._workers, self._profile)
        compute = Compute(
            self._clock,
            self._seconds,
            self._execution.execute,
            mixing.settle,
            None if timeline is None else partial(_computed, timeline),
        )
        self._machinery = SimContext(self._clock, rows, self._links, compute, mixing)
        self._recording = Recording(
            setup,
            metrics,
            graphs,
            observer,
            self._execution.evaluate,
            self._profile,
            self._clock,
            reached=lambda: self._node_tasks.finish("target"),
        )
        self._moments = Moments(setup, self._machinery, self._recording, self._present)
        self._node_tasks: NodeTasks
        self._common: Model | None = None
        self.rounds = 0
        self._progress_every = max(experiment.nodes // 16, 1)
        self._hosts: dict[int, NodeHost] = {}
        self._folder, self._cut = folder, cut
        self._checkpoints: RunCheckpoints | None = None
        self._events = None if events is None else EventLog(events, self._clock.now, self._recording.wall)
        self._faults: FaultRunner | None = None
        if setup.faults:
            assert self._events is not None
            self._faults = FaultRunner(setup, self, self._clock, self._links, self._events)

    # --- the run

    def run(self) -> Outcome:
        """Run to the end."""
        keep_freed_memory()
        failure: RunFailed | None = None
        reason = "failed"
        parameters = buffers = None
        loop = new_loop(self._clock)
        self._node_tasks = NodeTasks(loop, self._setup.experiment.nodes, self.nodes, self._returned)
        with (
            torch_settings(self._options.threads),
            calm_collector(self._setup.experiment.nodes),
            ending_signals(lambda: self._node_tasks.finish("stopped")),
            unawaited_calls_fail(self.nodes),
        ):
            try:
                self._build()
                self._observer.start(self._setup.description())
                if self._store != self._options.device:
                    self._observer.say(
                        f"store: host memory, since the vectors of {len(self.nodes)} nodes do not fit"
                        f" {self._options.device}"
                    )
                reason = loop.run_until_complete(self._main())
                self._recording.flush()
                self._moments.end(reason)
                if self._checkpoints is not None:
                    self._checkpoints.end()
                if self._events is not None:
                    self._say_how_it_ended(reason, self._events)
                if (said := self._profile.remark(self._recording.wall())) is not None:
                    self._observer.say(said)
                parameters, buffers = stacked([self._last_model(node) for node in self.nodes], self._rows)
            except RunFailed as error:
                failure, reason = error, "failed"
                self._keep_what_was_recorded()
            finally:
                # A task that waits or goes on in spite of its cancellation is left behind with the loop.
                self._clock.end_soon()
                if isinstance(sys.exception(), KeyboardInterrupt):
                    self._node_tasks.abandon(loop)
                with suppress(RunFailed):
                    loop.run_until_complete(self._node_tasks.close())
                self._links.close()
                loop.close()
                if self._checkpoints is not None:
                    self._checkpoints.close()
                self._workers.close()
        # (What was carried before a run was resumed is not on record.)
        shares = self._links.inner_shares() if self._cut is None else []
        return Outcome(
            reason,
            self._clock.now(),
            self._recording.wall(),
            parameters,
            buffers,
            failure,
            self._execution.trainer.name,
            self._profile.seconds,
            self._rows.peak,
            link_shares={"mean": math.fsum(shares) / len(shares), "max": max(shares)} if shares else None,
        )

    def _say_how_it_ended(self, reason: str, events: EventLog) -> None:
        if reason == "rounds":
            early = returned_early(self._setup, {node.rank: node.round for node in self._present()})
            if early is not None:
                events.append(None, "ended-early", early)
                self._observer.say(early)
        if (away := events.summary()) is not None:
            self._observer.say(away)

    def _keep_what_was_recorded(self) -> None:
        with suppress(RunFailed):  # the run has failed already, and says why
            self._recording.flush()

    def _build(self) -> None:
        experiment = self._setup.experiment
        nodes = range(experiment.nodes)
        self.nodes.extend(map(self._make, nodes))
        if self._faults is not None:
            self._inboxes.extend(map(self._faults.inbox, nodes))
        elif self._folder is not None and (experiment.checkpoint.on or self._cut is not None):
            self._checkpoints = RunCheckpoints(
                self._setup,
                self._machinery,
                self._recording,
                self._folder,
                self._cut,
                self.nodes,
                self._hosts,
                self._place,
                lambda: self._execution.chosen,
                self._observer.say,
            )
            self._inboxes.extend(self._checkpoints.inboxes)
            self.rounds = sum(node.round for node in self.nodes)
        else:
            self._inboxes.extend(node.deliver for node in self.nodes)

    def _make(self, rank: int) -> NodeRuntime:
        """A node as it begins."""
        initial = self._common or self._setup.initial(rank)
        if self._common is None:
            if self._store != "cpu":
                initial = Model(*(vector.to(self._store) for vector in initial))
            if self._setup.experiment.initial == "common":
                initial = Model(self._rows.store(initial.parameters), initial.buffers)
                self._common = initial
        inner = NodeHost(self._machinery, self._setup.experiment, rank, self.round_ended)
        host: Host = inner if self._faults is None else self._faults.host(rank, inner)
        if rank in self._hosts:  # an earlier life of it
            inner.secrets = self._hosts[rank].secrets
        self._hosts[rank] = inner
        return NodeRuntime(self._setup.node(rank, initial), host)

    def _place(self, tensor: Tensor) -> Tensor:
        """Where a simulation keeps what was read from a file."""
        if tensor.dtype is torch.float32 and tensor.shape == (self._setup.layout.size,):
            return self._rows.store(tensor)
        return tensor.to(self._store)

    def _checkpoint(self, node: NodeRuntime) -> None:
        if self._faults is not None:
            self._faults.keep(node)
        elif self._checkpoints is not None:
            self._checkpoints.round_ended(node)

    async def _main(self) -> str:
        experiment = self._setup.experiment
        starts_ns = None if self._checkpoints is None else self._checkpoints.starts_ns
        if experiment.stop.time_s is not None:
            self._clock.at(
                to_ns(experiment.stop.time_s), Order.END, 0, lambda: self._node_tasks.finish("time")
            )
        if self._faults is not None:
            self._faults.begin()
        self._moments.begin(starts_ns)
        for node in self._present():
            begin = partial(self._node_tasks.begin, node, partial(experiment.algorithm.run, node.node))
            if starts_ns is None:
                self._checkpoint(node)
                begin()
            else:
                self._clock.at(starts_ns[node.rank], Order.TIMER, node.rank, begin)
        return await self._node_tasks.end

    def _returned(self, rank: int) -> None:
        """A node's protocol has returned."""
        if self._checkpoints is not None:
            self._checkpoints.over(rank)
        if self._faults is not None and self._faults.leaves(rank):
            self._node_tasks.running.discard(rank)
            self._faults.departed(rank)
        else:
            self.ended(rank)

    def _waiting(self) -> str:
        returned = {
            node.rank: node.round for node in self._present() if node.rank not in self._node_tasks.running
        }
        return describe_waits({node.rank: node.waiting() for node in self.nodes}, returned)

    # --- nodes that are away

    def _present(self) -> list[NodeRuntime]:
        """The nodes that are there."""
        return self.nodes if self._faults is None else [self.nodes[rank] for rank in sorted(self._faults.up)]

    def _last_model(self, node: NodeRuntime) -> Model:
        """What a node ended with; not a number where that is gone with it."""
        if self._faults is None or node.rank in self._faults.up | self._faults.left:
            return model_of(node)
        return Model(*(torch.full_like(part, math.nan) for part in node.model))

    def running(self, rank: int) -> bool:
        """Whether a node's protocol has not returned."""
        return rank in self._node_tasks.running

    def start(self, rank: int, saved: Checkpoint | None, *, asks: bool) -> NodeRuntime:
        """Make a node anew, which begins to live when this instant's events are done: as it was saved, or at the start; and
        asking a neighbour for its model, or not."""
        node = self.nodes[rank] = self._make(rank)
        if saved is not None:
            node.restore(saved)
        algorithm, failures = self._setup.experiment.algorithm, self._setup.experiment.failures
        asked = failures.detection_s if asks else None
        self._node_tasks.begin(node, partial(newcomer, algorithm.run, node, asked))
        self._node_tasks.running.add(rank)
        return node

    def cancel(self, rank: int) -> None:
        """End all tasks of a node."""
        self._node_tasks.cancel(rank)

    def ended(self, rank: int) -> None:
        """The run does not wait for a node any more. It's over when all nodes that are there have completed their rounds."""
        self._node_tasks.running.discard(rank)
        if not self._node_tasks.running and self._present():
            self._node_tasks.finish("rounds")

    def without(self, rank: int, *, keep: bool) -> None:
        """A node is recorded no more; what it gave for moments that are not complete counts if it is to be kept."""
        self._recording.without(rank, keep=keep)

    def again(self, rank: int, first: int) -> None:
        """A node that takes part from a round on is recorded again."""
        self._recording.back(rank, first + 1, self._moments.next_tick)

    def record_last(self, node: NodeRuntime) -> None:
        """Record a node as it ends, unless it was recorded in the same round."""
        self._moments.last(node)

    def fail(self, error: RunFailed) -> None:
        """End the run."""
        self._node_tasks.fail(error)

    # --- what nodes ask for

    def _seconds(self, computation: Computation) -> float:
        """How long a computation takes that starts now."""
        if computation.kind is Kind.APPLY:
            return 0.0
        return float(
            self._setup.compute.seconds(
                self._setup.experiment.seed,
                computation.rank,
                computation.first_step,
                computation.work,
                self._clock.now(),
            )
        )

    def round_ended(self, rank: int) -> None:
        """A node has completed a round."""
        node = self.nodes[rank]
        self.rounds += 1
        if self.rounds % self._progress_every == 0:
            self._observer.progress(self.rounds, self._clock.now())
        self._moments.round_ended(node)
        self._checkpoint(node)

    def _tell(self) -> None:
        """Something was computed: from time to time it's said where that is, since a round may take long."""
        now = time.perf_counter()
        if now - self._told >= TELL_S:
            self._told = now
            self._observer.progress(self.rounds, self._clock.now())


def _computed(timeline: TimelineLog, computation: Computation, start_ns: int, end_ns: int) -> None:
    timeline.computed(computation.rank, computation.kind, start_ns / NS, end_ns / NS)


def _sent(timeline: TimelineLog, source: int, to: int, start_ns: int, end_ns: int, nbytes: int) -> None:
    timeline.sent(source, to, start_ns / NS, end_ns / NS, nbytes)
