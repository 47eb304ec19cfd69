"""The engine ``simulate``: one run of all nodes on one machine, in virtual time."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial

import torch

from gossamer import numerics
from gossamer.config import Experiment, Simulate
from gossamer.errors import BadInput, RunFailed
from gossamer.layers.newcomer import run_newcomer
from gossamer.learning.computation import Computation, ComputationKind
from gossamer.learning.malloc import keep_freed_memory
from gossamer.learning.rows import Rows
from gossamer.learning.thread_pool import ThreadPool
from gossamer.messages.tags import Message, Model
from gossamer.network.network import BYTES_PER_MEGABIT
from gossamer.node import NodeRuntime
from gossamer.node.checkpoint import Checkpoint
from gossamer.node.runtime import unawaited_calls_fail
from gossamer.node.waiting import resolve
from gossamer.results.checkpoints import RunCheckpoint, rewind
from gossamer.results.folder import RunFolder
from gossamer.results.observer import Observer
from gossamer.results.reading import NETWORK, read_metrics, read_setup
from gossamer.results.schema import Totals
from gossamer.results.segment import Segment
from gossamer.runtime.events import EventLog, TimelineLog, timeline_log
from gossamer.runtime.outcome import Outcome, add_up, describe_waits, ending_signals, nothing_sent
from gossamer.runtime.recording import (
    EARLY,
    UNCOUNTED,
    UNCOUNTED_S,
    Profile,
    ended_early,
    extrapolated,
    never_mixed,
)
from gossamer.runtime.setup import Setup, prepare
from gossamer.runtime.simulate.checkpoints import SimCheckpoints
from gossamer.runtime.simulate.compute import Compute, Executor
from gossamer.runtime.simulate.core import NEVER_NS, NS, Core, Order, to_ns
from gossamer.runtime.simulate.fair import FairLinks
from gossamer.runtime.simulate.fault_runner import FaultRunner
from gossamer.runtime.simulate.fifo import FifoLinks
from gossamer.runtime.simulate.host import NodeTasks, SimContext, SimHost
from gossamer.runtime.simulate.mixing import Mixer
from gossamer.runtime.simulate.recording import SimRecorder, shown_model
from gossamer.runtime.simulate.replay import Replay, ReplayDiffers

PROGRESS_S = 1.0  # real seconds after which progress is reported even if no round ends
OBJECTS_PER_NODE = 200
"""An upper bound on the new objects of a node at any time, such as messages, tasks and futures."""


class SimulateEngine:
    """The simulator of one experiment. The constructor rejects bad input, and :meth:`run` does the work."""

    def __init__(self, experiment: Experiment) -> None:
        options = experiment.engine
        assert isinstance(options, Simulate)
        if options.device != "cpu" and not torch.cuda.is_available():
            raise BadInput(f"engine.device: {options.device!r}, but torch finds no GPU; accepted: cpu")
        self._threads, self._device = options.threads, options.device
        self._setup = prepare(experiment)
        _check_rates(self._setup)
        self.description = self._setup.description()
        self.fingerprint = self._setup.fingerprint

    def run(self, folder: RunFolder, observer: Observer, checkpoint: RunCheckpoint | None = None) -> Outcome:
        """Run to the end. The failure of a node is part of the outcome; rows recorded before it are kept."""
        if checkpoint is not None:
            try:
                return self._run(folder, observer, self._replay(folder, checkpoint))
            except ReplayDiffers as error:
                text = f"the run is computed again from its start: {error}"
            observer.say(text)
            _erase_record(folder)
            with folder.segment("events") as events:
                events.append(
                    {
                        "time_s": 0.0,
                        "wall_s": checkpoint.wall_s,
                        "node": NETWORK,
                        "event": "resumed",
                        "detail": text,
                    }
                )
        return self._run(folder, observer, None)

    def _replay(self, folder: RunFolder, checkpoint: RunCheckpoint) -> Replay:
        experiment, old_last = self._setup.experiment, checkpoint.experiment["stop"]["rounds"]
        last = experiment.stop.rounds
        extended = old_last in checkpoint.rounds.values() and last != old_last
        if extended and (not experiment.algorithm.gathers or checkpoint.ends_apart(old_last)):
            raise ReplayDiffers(f"nodes had ended after {old_last} rounds and now continue")
        if last is not None and (read_metrics(folder.path)["round"].max() or 0) > last:  # type: ignore[operator]
            raise ReplayDiffers(f"the run has gone beyond {last} rounds")
        return Replay(checkpoint, lambda tensor: tensor.to(self._device), extended=extended)

    def _run(self, folder: RunFolder, observer: Observer, replay: Replay | None) -> Outcome:
        experiment = self._setup.experiment
        timeline = timeline_log(experiment, folder)
        with (
            _tuned(self._threads, experiment.nodes, self._device),
            folder.segment("metrics") as metrics,
            folder.segment("graphs") as graphs,
            folder.segment("events") as events,
            nullcontext() if timeline is None else closing(timeline),
        ):
            return Simulation(self._setup, metrics, graphs, events, observer, timeline, folder, replay).run()

    def __enter__(self) -> SimulateEngine:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left to end."""


def _too_slow(rates: Iterable[float], setup: Setup) -> str:
    """What is wrong with the slowest of some links, if virtual time ends before a model has passed it. (A link that is
    stopped may recover.)"""
    nbytes = 4 * (setup.layout.size + setup.layout.buffer_size)
    slowest, least = min((rate for rate in rates if rate > 0), default=math.inf), nbytes * NS / NEVER_NS
    if slowest >= least:
        return ""
    return (
        f"a link of {slowest / BYTES_PER_MEGABIT:.3g} Mbit/s, which a model of {nbytes:,} bytes does not pass in"
        f" {NEVER_NS / NS:.2g} s, the longest virtual time; accepted: at least {least / BYTES_PER_MEGABIT:.3g}"
    )


def _check_rates(setup: Setup) -> None:
    network, nodes, seed = setup.experiment.network, setup.experiment.nodes, setup.experiment.seed
    rates = network.conditions(nodes, seed).rates
    if problem := _too_slow(rates, setup):
        mbps = min(rates[rates > 0]) / BYTES_PER_MEGABIT
        fields = [name for name in type(network).model_fields if name.endswith("_mbps")]
        numbers = {name: value for name in fields if isinstance(value := getattr(network, name), float)}
        guilty = [f"network.{name}" for name, value in numbers.items() if math.isclose(value, mbps)]
        raise BadInput(f"{', '.join(guilty) or 'network'}: {problem}")


def _erase_record(folder: RunFolder) -> None:
    """Erase the record of a run that is computed again from its start."""
    beginning = RunCheckpoint(
        folder.checkpoints, 0, rounds={}, times_s={}, wall_s=0.0, experiment={}, time_s=-1.0
    )
    rewind(folder, beginning, ())


@contextmanager
def _tuned(threads: int, nodes: int, device: str) -> Iterator[None]:
    """Set torch's threads for a run, and restore them and torch's random generators afterwards. During the
    run, Python's garbage collector visits only new objects, and rarely: repeated passes over all nodes can
    take longer than all events."""
    threads_before, threshold_before = torch.get_num_threads(), gc.get_threshold()
    torch.set_num_threads(threads)
    gc.freeze()
    gc.set_threshold(50_000 + OBJECTS_PER_NODE * nodes, 20, 100)
    gpus = [] if device == "cpu" else range(torch.cuda.device_count())
    try:
        with (
            torch.random.fork_rng(devices=gpus),
            numerics.repeatable(device),
            nullcontext() if device == "cpu" else torch.cuda.device(device),
        ):
            yield
    finally:
        gc.set_threshold(*threshold_before)
        gc.unfreeze()
        torch.set_num_threads(threads_before)


class Simulation:
    """One run of all nodes of a setup in virtual time. With a ``replay`` it resumes from a checkpoint. The
    folder receives the checkpoints and, if the run is resumed, holds its earlier record."""

    def __init__(
        self,
        setup: Setup,
        metrics: Segment,
        graphs: Segment,
        events: Segment,
        observer: Observer,
        timeline: TimelineLog | None = None,
        folder: RunFolder | None = None,
        replay: Replay | None = None,
    ) -> None:
        experiment, options = setup.experiment, setup.experiment.engine
        assert isinstance(options, Simulate)
        self._setup, self._observer, self._folder, self._replay = setup, observer, folder, replay
        self._most_bytes = experiment.stop.most_bytes(experiment.nodes)
        known_s = -1.0 if replay is None else replay.until_s
        if timeline is not None:
            timeline.known_s = known_s
        self._core = core = Core(self._waiting, self._report_if_due)
        rows, profile = Rows(setup.layout.size, options.device), Profile()
        count = options.workers if options.device == "cpu" else 1  # one thread is enough to launch kernels
        self._workers = workers = ThreadPool(count, options.threads, self._report_if_due)
        self.nodes: list[NodeRuntime] = []
        links = (FifoLinks if setup.network.sharing == "fifo" else FairLinks)(
            core,
            setup.network,
            experiment.nodes,
            experiment.seed,
            setup.message_limit,
            self._arrive,
            None if timeline is None else timeline.sent,
        )
        executor = Executor(setup, rows, workers, profile, observer.say)
        mixing = Mixer(core, rows, workers, profile)
        watch = None if timeline is None else timeline.computed
        compute = Compute(core, self._seconds, executor.execute, mixing.settle, watch, replay)
        self._context = SimContext(
            setup, observer, profile, core, rows, links, executor, compute, mixing, self._event
        )
        self._tasks: NodeTasks
        self._recorder = SimRecorder(
            self._context, metrics, graphs, self._present, lambda: self._tasks.finish("target")
        )
        self._events = EventLog(events, core.now, self._recorder.wall, links.network_bytes, known_s)
        self._hosts: dict[int, SimHost] = {}
        self._common: Model | None = None
        self._faults: FaultRunner | None = None
        self._checkpoints: SimCheckpoints | None = None
        self._rounds = 0
        self._ends_diverged = False
        self._reported = time.perf_counter()
        self._begun = math.inf  # when the nodes' protocols began
        self._heard_uncounted = False

    # --- the run

    def run(self) -> Outcome:
        """Run to the end. Raises BadInput if the checkpoint can't be read."""
        keep_freed_memory()
        failure: RunFailed | None = None
        parameters = buffers = None
        context, core = self._context, self._core
        self._tasks = NodeTasks(core, self._setup.experiment.nodes, self.nodes, self._returned)
        ending = ending_signals(lambda: self._tasks.finish("stopped"), self._observer.say)
        with ending, unawaited_calls_fail():
            try:
                self._build()
                self._observer.start(self._setup.description())
                reason = self._end(core.run(self._main()))
                if self._replay is None or self._replay.complete:  # otherwise the models are not valid yet
                    models = [self._last_model(node, reason) for node in self.nodes]
                    parameters = torch.stack([model.parameters for model in models])
                    if self._setup.layout.buffer_size:
                        buffers = torch.stack([model.buffers for model in models])
            except RunFailed as error:
                if self._replaying:
                    raise ReplayDiffers(f"the replay failed where the run had not: {error}") from error
                failure, reason = error, "failed"
                with suppress(RunFailed):  # the first failure is reported
                    self._recorder.flush()
            finally:
                counted = self._totals()
                core.stop()
                self._tasks.close(interrupted=isinstance(sys.exception(), KeyboardInterrupt))
                context.links.close()
                if self._checkpoints is not None:
                    self._checkpoints.close()
                self._workers.close()
        return Outcome(
            reason,
            self._core.now(),
            self._recorder.wall(),
            parameters,
            buffers,
            failure,
            context.executor.trainer.name,
            counted,
            context.profile.seconds,
            context.rows.peak,
        )

    def _build(self) -> None:
        experiment, context, recorder = self._setup.experiment, self._context, self._recorder
        if self._setup.faults:
            self._faults = FaultRunner(context, self.nodes, self._tasks, recorder, self._start, self._events)
        self.nodes.extend(map(self._new_node, range(experiment.nodes)))
        saves = experiment.checkpoint.on or self._replay is not None
        if self._faults is None and self._folder is not None and saves:
            self._checkpoints = SimCheckpoints(context, recorder, self._folder, self.nodes, self._replay)
        links = context.links
        if self._faults is not None:
            links.recipients = [partial(self._faults.arrive, node.rank) for node in self.nodes]
        elif self._checkpoints is None:  # nothing acts on the way to a node
            links.recipients = [node.deliver for node in self.nodes]

    async def _main(self) -> str:
        experiment, core = self._setup.experiment, self._core
        if experiment.stop.time_s is not None:
            end_ns = to_ns(experiment.stop.time_s)
            core.at(end_ns, Order.END, 0, self._tasks.finish, "time")
        if self._faults is not None:
            self._faults.begin()
        if (replay := self._replay) is not None:
            assert self._folder is not None
            graphs = max(map(int, read_setup(self._folder.path)["graphs"]), default=-1)
            self._recorder.resume(replay, read_metrics(self._folder.path), graphs)
            core.at(replay.until_ns, Order.OBSERVE, len(self.nodes), replay.end, background=True)
        self._recorder.begin()
        for node in self._present():
            self._save(node)
            self._tasks.begin(node, partial(experiment.algorithm.run, node.node))
        self._begun = time.perf_counter()
        reason: str = await self._tasks.end
        if reason == "stopped" and self._checkpoints is not None:
            # A resumed run continues after this instant, so all of its events must happen first.
            instant_over = core.slot()
            core.at(core.now_ns, Order.END, 0, resolve, instant_over)
            await instant_over
        return reason

    @property
    def _replaying(self) -> bool:
        """Whether the run still replays events."""
        return self._replay is not None and not self._replay.over

    def _end(self, reason: str) -> str:
        """Write the last rows. Returns the reason, which divergence may change."""
        present = self._present()
        for node in present:
            shown_model(node)  # fails if the model was modified in place
            node.look_for_divergence()
        reason = "diverged" if self._ends_diverged else reason
        self._recorder.end(reason)
        no_round = reason == "time" and not any(node.round for node in present)
        if no_round and any(node.mailbox.unread() for node in present):
            self._observer.say(f"no node has completed a round: {self._waiting()}")
        if self._checkpoints is not None:
            self._checkpoints.end()
        if reason == "rounds" and ended_early(self._setup, {node.rank: node.round for node in present}):
            self._say("ended-early", EARLY)
        elif self._uncounted():
            self._observer.say(UNCOUNTED)
        if self._setup.experiment.evaluation.of == "mixed":
            outcome = [node for node in present if node.rank in self._setup.outcome_ranks]
            if (text := never_mixed(node.shown.has_mixed for node in outcome)) is not None:
                self._say("never-mixed", text)
        return reason

    def _say(self, event: str, text: str) -> None:
        """Record an event of the whole run, and show it."""
        self._events.append(None, event, text)
        self._observer.say(text)

    def _event(self, rank: int, kind: str, text: str) -> None:
        self._events.append(rank, kind, text)
        if kind == "diverged" and self._setup.experiment.stop.diverged == "end":
            if self._replaying:
                raise ReplayDiffers(f"the replay diverged where the run had not: {text}")
            self._ends_diverged = True
            self._tasks.finish("diverged")

    def _waiting(self) -> str:
        returned = {node.rank: node.round for node in self._present() if node.rank not in self._tasks.running}
        waits = describe_waits({node.rank: node.waiting() for node in self.nodes}, returned)
        slow = _too_slow(self._context.links.rates, self._setup)
        return f"{waits}; network: {slow}" if slow else waits

    def _totals(self) -> Totals:
        """What the nodes have done so far. A node that the algorithm does not use counts for no rounds."""
        links, setup = self._context.links, self._setup
        used = [node for node in self.nodes if setup.takes_part(node.rank, node.round)]
        present = {node.rank for node in self._present()}
        return add_up(
            self._core.now(),
            [links.total()],
            [node.round for node in used],
            [node.round for node in used if node.rank in present],
        )

    # --- nodes

    def _new_node(self, rank: int) -> NodeRuntime:
        initial, rows = self._common or self._setup.initial(rank), self._context.rows
        if self._common is None:
            initial = Model(*(vector.to(rows.device) for vector in initial))
            if self._setup.experiment.initial != "independent":
                self._common = initial = Model(rows.store(initial.parameters), initial.buffers)
        if self._faults is None:
            host = SimHost(self._context, rank, self._round_ended)
        else:
            host = self._faults.host(rank, self._round_ended)
        if rank in self._hosts:  # an earlier incarnation
            host.secrets = self._hosts[rank].secrets
        self._hosts[rank] = host
        return NodeRuntime(self._setup, rank, initial, host)

    def _arrive(self, rank: int, message: Message) -> None:
        """A message reaches a node, if no fault can befall it."""
        if self._checkpoints is not None:
            message = self._checkpoints.arriving(rank, message)
        self.nodes[rank].deliver(message)

    def _start(self, rank: int, saved: Checkpoint | None, ask_neighbor: bool) -> NodeRuntime:
        """Start a new incarnation of a node, from a checkpoint, its initial model or, with
        ``ask_neighbor``, a neighbour's model."""
        node = self.nodes[rank] = self._new_node(rank)
        if saved is not None:
            node.restore(saved, again=True)
        experiment = self._setup.experiment
        timeout_s = experiment.failures.detection_s if ask_neighbor else None
        self._tasks.begin(node, partial(run_newcomer, experiment.algorithm.run, node, timeout_s))
        return node

    def _present(self) -> list[NodeRuntime]:
        if self._faults is None:
            return self.nodes
        return [self.nodes[rank] for rank in sorted(self._faults.presence.up)]

    def _last_model(self, node: NodeRuntime, reason: str) -> Model:
        """The model of a node's last row; NaN if it was lost with the node."""
        faults, rank = self._faults, node.rank
        if faults is None or rank in faults.presence.up or rank in faults.left:
            model = shown_model(node, instant=reason == "diverged").model
            self._context.mixing.settle_for(model.parameters)
            return model
        return Model(*(torch.full_like(part, math.nan) for part in node.model))

    def _seconds(self, computation: Computation) -> float:
        if computation.kind is ComputationKind.APPLY:
            return 0.0
        seed, now, first = self._setup.experiment.seed, self._core.now(), computation.first_step
        return self._setup.compute.duration(seed, computation.rank, first, computation.work, now)

    def _round_ended(self, rank: int) -> None:
        node = self.nodes[rank]
        self._rounds += 1
        if self._rounds % max(len(self.nodes) // 16, 1) == 0:
            self._report_progress()
        self._recorder.round_ended(node)
        self._save(node)
        if self._faults is not None:
            self._faults.round_ended(rank)
        if self._most_bytes < math.inf:
            sent, stop = self._context.links.network_bytes(), self._setup.experiment.stop
            if sent >= self._most_bytes:
                self._tasks.finish("bytes")
            elif (failure := nothing_sent(stop, sent, self._rounds / len(self.nodes))) is not None:
                self._tasks.fail(failure)

    def _completed_rounds(self) -> int:
        """The rounds completed by all nodes, for the observer."""
        if self._faults is None or len(present := self._present()) in (0, len(self.nodes)):
            return self._rounds
        return extrapolated([node.round for node in present], len(self.nodes))

    def _save(self, node: NodeRuntime) -> None:
        if self._faults is not None:
            self._faults.save(node)
        elif self._checkpoints is not None:
            self._checkpoints.round_ended(node)

    def _returned(self, rank: int) -> None:
        if self._checkpoints is not None:
            self._checkpoints.over(rank)
        if self._faults is not None:
            self._faults.returned(rank)
        else:
            self._tasks.ended(rank)

    def _report_if_due(self) -> None:
        """Report progress if it is due. Called after each piece of work and at each instant, because a round may
        take long."""
        if time.perf_counter() - self._reported >= PROGRESS_S:
            self._report_progress()

    def _uncounted(self) -> bool:
        """Whether no node counts rounds, which the user has not heard yet."""
        counted = self._rounds > 0 or any(node.counts_rounds for node in self.nodes)
        return not (counted or self._heard_uncounted)

    def _report_progress(self) -> None:
        self._reported = time.perf_counter()
        if self._reported - self._begun > UNCOUNTED_S and self._uncounted():
            self._heard_uncounted = True
            self._observer.say(UNCOUNTED)
        self._observer.progress(self._completed_rounds(), self._core.now())
        if self._observer.stopping:
            self._tasks.finish("stopped")
