"""The engine ``simulate``: every node on one machine, in virtual time."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.checkpoint import Checkpoint
from gossamer.engines.cuts import NodeCuts, made, sent_here
from gossamer.engines.events import EventLog
from gossamer.engines.muster import Moment
from gossamer.engines.newcomer import newcomer
from gossamer.engines.outcome import Outcome, describe_failure, describe_waits
from gossamer.engines.profile import Profile
from gossamer.engines.recording import Observer, is_due, stacked
from gossamer.engines.setup import Setup, prepare
from gossamer.engines.signals import ending_signals
from gossamer.engines.simulate.clock import MAX_PASSES, NS, Clock, Order, new_loop, to_ns
from gossamer.engines.simulate.compute import Compute
from gossamer.engines.simulate.cuts import Cuts
from gossamer.engines.simulate.fair import FairLinks
from gossamer.engines.simulate.fates import Fates
from gossamer.engines.simulate.fifo import FifoLinks
from gossamer.engines.simulate.flights import Flights
from gossamer.engines.simulate.links import Links
from gossamer.engines.simulate.mixing import Mixing
from gossamer.engines.simulate.recording import Recording, model_of
from gossamer.engines.timeline import TimelineLog, timeline_log
from gossamer.errors import BadInput, GossamerError, RunFailed
from gossamer.experiment import Experiment, Simulate
from gossamer.host import Host
from gossamer.learning.batched import BatchedTrainer
from gossamer.learning.batches import BatchStream
from gossamer.learning.choice import MEASURED_NODES, choose
from gossamer.learning.computation import Computation, Kind, execute
from gossamer.learning.evaluate import Evaluator
from gossamer.learning.memory import keep_freed_memory
from gossamer.learning.mixing import Mix
from gossamer.learning.rows import Rows
from gossamer.learning.trainer import SequentialTrainer, Trainer, TrainJob
from gossamer.learning.workers import Workers
from gossamer.messages import Message, Model, Payload, Sending, Traffic
from gossamer.node import Node
from gossamer.randomness import generator
from gossamer.results.checkpoints import CheckpointFolder, Cut, highest
from gossamer.results.folder import RunFolder
from gossamer.results.recorder import read_metrics
from gossamer.results.segment import Segment

VECTORS_A_NODE = 3
"""Before and after a step, and what is mixed."""
FILLED = 0.8
"""The share of a GPU's free memory that the store may take; the rest is for what trainers compute."""


class _Host:
    """One node's side of the simulator."""

    def __init__(self, engine: Simulation, rank: int) -> None:
        self._engine, self._rank = engine, rank
        self.lost: set[int] = set()
        self.secrets = 0
        self._instant_ns, self._rounds = -1, 0

    @property
    def traffic(self) -> Traffic:
        return self._engine.links.traffic(self._rank)

    @property
    def counters(self) -> Traffic:
        return self._engine.links.counters(self._rank)

    def now(self) -> float:
        return self._engine.clock.now()

    def timer(self, seconds: float, call: Callable[[], None], *, background: bool = False) -> Any:
        return self._engine.clock.after(seconds, Order.TIMER, self._rank, call, background=background)

    def store(self, vector: Tensor) -> Tensor:
        return self._engine.rows.store(vector)

    def is_stored(self, tensor: Tensor) -> bool:
        return self._engine.rows.owns(tensor)

    def fresh(self, length: int) -> Tensor:
        return self._engine.rows.vector(length)

    def send(self, to: Sequence[int], payload: Payload, tag: tuple[str | int, ...]) -> list[Sending]:
        return self._engine.links.send(self._rank, to, payload, tag)

    def compute(self, computation: Computation) -> Awaitable[Any]:
        return self._engine.compute.submit(computation)

    def mix(self, prepare: Callable[[], Mix], commit: Callable[[Any], Any], *, read: bool) -> Awaitable[Any]:
        return self._engine.mixing.submit(self._rank, prepare, commit, read=read)

    def settle(self, vector: Tensor) -> None:
        self._engine.mixing.settle_for(vector)

    def finished(self, rounds: int) -> bool:
        last = self._engine.setup.experiment.stop.rounds
        return last is not None and rounds >= last

    async def end_round(self) -> None:
        self._engine.round_ended(self._rank)
        if self._engine.clock.now_ns != self._instant_ns:
            self._instant_ns, self._rounds = self._engine.clock.now_ns, 0
        self._rounds += 1
        if self._rounds > MAX_PASSES:
            raise GossamerError(
                f"it completed {MAX_PASSES} rounds at {self.now()} s without letting time pass (nothing in its rounds"
                " takes time?)"
            )

    def secret(self, n: int) -> bytes:
        self.secrets += 1
        return generator(self._engine.setup.experiment.seed, "secret", self._rank, self.secrets).bytes(n)


class SimulateEngine:
    """The engine of an experiment; making it finds bad input, :meth:`run` does the work."""

    def __init__(self, experiment: Experiment) -> None:
        device = experiment.engine.device if isinstance(experiment.engine, Simulate) else "cpu"
        if device != "cpu" and not torch.cuda.is_available():
            raise BadInput(f"engine.device: {device!r}, but torch finds no GPU; accepted: cpu")
        self._setup = prepare(experiment)
        self.description = self._setup.description()

    def run(self, folder: RunFolder, observer: Observer, cut: Cut | None = None) -> Outcome:
        """Run to the end. Failures of nodes are in the outcome, with what was recorded until then kept."""
        timeline = timeline_log(self._setup.experiment, folder)
        with (
            folder.segment("metrics") as metrics,
            folder.segment("graphs") as graphs,
            folder.segment("events") if self._setup.faults else nullcontext() as events,
            nullcontext() if timeline is None else closing(timeline),
        ):
            return Simulation(self._setup, metrics, graphs, observer, timeline, folder, cut, events).run()

    def __enter__(self) -> SimulateEngine:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left to end."""


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
        events: where it's written down what happens to nodes, if there are faults.

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
        experiment, self.setup, self._observer = setup.experiment, setup, observer
        options = experiment.engine
        assert isinstance(options, Simulate)
        self._options = options
        self.device = options.device
        self._profile = Profile()
        self.clock = Clock()
        self.clock.waiting = self._waiting
        self._store = store_device(self.device, setup)
        self.rows = Rows(setup.layout.size, self._store)
        self._inboxes: list[Callable[[Message], None]] = []
        network, nodes, seed = setup.network, experiment.nodes, experiment.seed
        links = FifoLinks if network.sharing == "fifo" else FairLinks
        self.links: Links = links(
            self.clock,
            network,
            nodes,
            seed,
            setup.message_limit,
            self._inboxes,
            None if timeline is None else partial(_sent, timeline),
        )
        self._workers = Workers(options.workers, options.threads)
        self.mixing = Mixing(self.clock, self.rows, self._workers, self._profile)
        self.compute = Compute(
            self.clock,
            self._seconds,
            self._execute,
            self.mixing.settle,
            None if timeline is None else partial(_computed, timeline),
        )
        self._evaluator = Evaluator(
            setup.task, experiment.seed, experiment.evaluation.samples, self.device, self._workers
        )
        self._trainer = self._make_trainer(
            BatchedTrainer if options.trainer == "batched" else SequentialTrainer
        )
        self._recording = Recording(
            setup,
            metrics,
            graphs,
            observer,
            self._evaluator,
            self._workers,
            self._profile,
            self.clock,
            reached=lambda: self._finish("target"),
        )
        self._to_choose = options.trainer == "auto"
        self._end: asyncio.Future[str]
        self._running = set(range(nodes))
        self._lives: dict[int, asyncio.Future[None]] = {}
        self._endings: set[asyncio.Future[None]] = set()
        self._common: Model | None = None
        self._next_tick = 0
        self.rounds = 0
        self._progress_every = max(experiment.nodes // 16, 1)
        self.nodes: list[Node] = []
        self.hosts: dict[int, _Host] = {}
        self._starts_ns = [0] * experiment.nodes
        self._cut = cut
        self._cuts: Cuts | None = None
        if folder is not None and not setup.faults and (experiment.checkpoint.on or cut is not None):
            self._folder = folder
            self.links.flights = Flights(experiment.nodes)
        self._events: EventLog | None = None
        self._fates: Fates | None = None
        if setup.faults:
            assert events is not None
            self._events = EventLog(events, self.clock.now, self._recording.wall)
            self._fates = Fates(setup, self, self.clock, self.links, self._events)

    # --- the run

    def run(self) -> Outcome:
        """Run to the end."""
        keep_freed_memory()
        failure: RunFailed | None = None
        reason = "failed"
        parameters = buffers = None
        loop = new_loop(self.clock)
        self._end = loop.create_future()
        with (
            _torch_settings(self._options.threads),
            _calm_collector(),
            ending_signals(lambda: self._finish("stopped")),
        ):
            try:
                self._build()
                self._observer.start(self.setup.description())
                if self._store != self.device:
                    self._observer.say(
                        f"store: host memory, since the vectors of {len(self.nodes)} nodes do not fit {self.device}"
                    )
                reason = loop.run_until_complete(self._main())
                self._recording.flush()
                if reason in ("rounds", "time", "target"):
                    self._last_rows()
                if self._cuts is not None and self.setup.experiment.checkpoint.on:
                    self._cuts.end()
                if self._events is not None and (said := self._events.summary()) is not None:
                    self._observer.say(said)
                parameters, buffers = stacked([self._last_model(node) for node in self.nodes])
            except RunFailed as error:
                failure, reason = error, "failed"
                self._keep_what_was_recorded()
            finally:
                # A task that waits on in spite of its cancellation is left behind with the loop.
                self.clock.start_counting()
                with suppress(RunFailed):
                    loop.run_until_complete(self._end_nodes())
                self.links.close()
                loop.close()
                if self._cuts is not None:
                    self._cuts.close()
                self._workers.close()
        return Outcome(
            reason,
            self.clock.now(),
            self._recording.wall(),
            parameters,
            buffers,
            failure,
            self._trainer.name,
            self._profile.seconds,
            self.rows.peak,
        )

    def _keep_what_was_recorded(self) -> None:
        with suppress(RunFailed):  # the run has failed already, and says why
            self._recording.flush()

    def _build(self) -> None:
        nodes = range(self.setup.experiment.nodes)
        self.nodes.extend(self._make(rank) for rank in nodes)
        if self._fates is not None:
            self._inboxes.extend(map(self._fates.inbox, nodes))
        elif self.links.flights is None:
            self._inboxes.extend(node.deliver for node in self.nodes)
        else:
            self._make_cuts(self.links.flights)

    def _make(self, rank: int) -> Node:
        """A node as it begins."""
        initial = self._common or self.setup.initial(rank)
        if self._common is None:
            if self._store != "cpu":
                initial = Model(*(vector.to(self._store) for vector in initial))
            if self.setup.experiment.initial == "common":
                initial = Model(self.rows.store(initial.parameters), initial.buffers)
                self._common = initial
        inner = _Host(self, rank)
        host: Host = inner if self._fates is None else self._fates.host(rank, inner)
        if rank in self.hosts:  # an earlier life of it
            inner.secrets = self.hosts[rank].secrets
        self.hosts[rank] = inner
        return Node(self.setup.node(rank, initial), host)

    # --- checkpoints

    def _make_cuts(self, flights: Flights) -> None:
        experiment, cut = self.setup.experiment, self._cut
        repeats = experiment.algorithm.gathers
        nodes = [
            NodeCuts(node.deliver, self.clock.now, repeats, partial(self.links.take_back, node.rank))
            for node in self.nodes
        ]
        for rank, node in enumerate(nodes):
            self._inboxes.append(partial(_into, node, flights, rank))
        saved: list[Checkpoint] = []
        if cut is not None:
            saved = [cut.read(node.rank, self._place) for node in self.nodes]
            self._resume(cut, saved, nodes, flights)
        self._cuts = Cuts(
            experiment.checkpoint,
            nodes,
            flights,
            CheckpointFolder(self._folder.checkpoints, experiment),
            self.mixing.settle,
            self._recording.wall,
            lambda: None if self._to_choose else self._trainer.name,
            self._observer.say,
            0 if cut is None else made(experiment.checkpoint, cut),
            highest(self._folder.checkpoints) + 1,
        )
        for each in saved:
            self._cuts.round_ended(each)

    def _resume(
        self, cut: Cut, saved: Sequence[Checkpoint], nodes: Sequence[NodeCuts], flights: Flights
    ) -> None:
        """Have every node go on where it was cut, at its own instant."""
        self._starts_ns = [to_ns(each.time_s) for each in saved]
        self.clock.now_ns = min(self._starts_ns)
        for rank, each in enumerate(saved):
            self.nodes[rank].restore(each)
            nodes[rank].restore(each)
            self.links.restore(rank, each.engine)
            self.compute.restore(rank, each.engine["computing_s"])
            self._recording.usage(rank).restore(each.engine["usage"])
            self.hosts[rank].secrets = each.engine["secrets"]
            for source, count in sent_here(each).items():
                flights.sent[source][rank] = count
            for arrival in each.arriving:
                self.links.arrives(arrival.message, rank, max(to_ns(arrival.due_s), self._starts_ns[rank]))
        self.rounds = sum(each.round for each in saved)
        self._recording.resume(cut, read_metrics(self._folder.path))

    def _place(self, tensor: Tensor) -> Tensor:
        """Where a simulation keeps what was read from a file."""
        if tensor.dtype is torch.float32 and tensor.shape == (self.setup.layout.size,):
            return self.rows.store(tensor)
        return tensor.to(self._store)

    def _checkpoint(self, node: Node) -> None:
        if self._fates is not None:
            self._fates.keep(node)
        elif self._cuts is not None:
            rank = node.rank
            engine = {
                **self.links.saved(rank),
                "computing_s": self.compute.busy_seconds(rank),
                "usage": self._recording.usage(rank).saved(),
                "secrets": self.hosts[rank].secrets,
            }
            self._cuts.round_ended(node.checkpoint(**engine))

    async def _main(self) -> str:
        stop, every_s = self.setup.experiment.stop, self.setup.experiment.evaluation.every_s
        if stop.time_s is not None:
            self.clock.at(to_ns(stop.time_s), Order.END, 0, lambda: self._finish("time"))
        if self._fates is not None:
            self._fates.begin()
        if every_s is not None:
            first = math.ceil(self.clock.now() / every_s)
            if self._cut is None:
                self._tick(first, every_s)
            else:
                self._tick_at(first, every_s)
        if self.setup.experiment.evaluation.every_rounds is not None and self._cut is None:
            for node in self._present():
                self._record(node, moment=0)
        run = self.setup.experiment.algorithm.run
        for node in self._present():
            protocol = partial(run, node)
            if self._cut is None:
                self._checkpoint(node)
                self._live(node, protocol)
            else:
                start_ns = self._starts_ns[node.rank]
                self.clock.at(start_ns, Order.TIMER, node.rank, partial(self._live, node, protocol))
        return await self._end

    def _live(self, node: Node, protocol: Callable[[], Coroutine[Any, Any, None]]) -> None:
        life = self._lives[node.rank] = asyncio.ensure_future(self._life(node, protocol))
        life.add_done_callback(self._ended)

    async def _life(self, node: Node, protocol: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A node's protocol; afterwards its spawned tasks go on answering, and may still fail."""
        try:
            await node.live(protocol())
            if self._cuts is not None:
                self._cuts.over(node.rank)
            if self._fates is not None and self._fates.leaves(node.rank):
                self._running.discard(node.rank)
                self._fates.departed(node.rank)
            else:
                self.ended(node.rank)
            raise await node.failure()
        except Exception as error:
            raise describe_failure(error, node.rank, node.round) from error

    def _end_if_done(self) -> None:
        """The run is over when all nodes that are there have completed their rounds."""
        if not self._running and self._present():
            self._finish("rounds")

    def _ended(self, life: asyncio.Future[None]) -> None:
        if not life.cancelled() and (error := life.exception()) is not None and not self._end.done():
            self._end.set_exception(error)

    async def _end_nodes(self) -> None:
        lives = asyncio.all_tasks() - {asyncio.current_task()}
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        for node in self.nodes:
            await node.end()

    def _finish(self, reason: str) -> None:
        if not self._end.done():
            self._end.set_result(reason)

    def _waiting(self) -> str:
        return describe_waits({node.rank: node.waiting() for node in self.nodes})

    # --- nodes that are away

    def _present(self) -> list[Node]:
        """The nodes that are there."""
        return self.nodes if self._fates is None else [self.nodes[rank] for rank in sorted(self._fates.up)]

    def _last_model(self, node: Node) -> Model:
        """What a node ended with; not a number where that is gone with it."""
        if self._fates is None or node.rank in self._fates.up | self._fates.left:
            return model_of(node)
        return Model(*(torch.full_like(part, math.nan) for part in (node.parameters, node.buffers)))

    def running(self, rank: int) -> bool:
        """Whether a node's protocol has not returned."""
        return rank in self._running

    def start(self, rank: int, saved: Checkpoint | None, *, asks: bool) -> Node:
        """Make a node anew, which begins to live when this instant's events are done: as it was saved, or at the start; and
        asking a neighbour for its model, or not."""
        node = self.nodes[rank] = self._make(rank)
        if saved is not None:
            node.restore(saved)
        algorithm, failures = self.setup.experiment.algorithm, self.setup.experiment.failures
        asked = failures.detection_s if asks else None
        self._live(node, partial(newcomer, algorithm.run, node, asked))
        self._running.add(rank)
        return node

    def cancel(self, rank: int) -> None:
        """End all tasks of a node."""
        if rank in self._lives:
            self._lives.pop(rank).cancel()
            self._endings.add(ending := asyncio.ensure_future(self.nodes[rank].end()))
            ending.add_done_callback(self._endings.discard)

    def ended(self, rank: int) -> None:
        """The run does not wait for a node any more."""
        self._running.discard(rank)
        self._end_if_done()

    def without(self, rank: int, *, keep: bool) -> None:
        """A node is recorded no more; what it gave for moments that are not complete counts if it is to be kept."""
        self._recording.without(rank, keep=keep)

    def again(self, rank: int, first: int) -> None:
        """A node that takes part from a round on is recorded again."""
        self._recording.back(rank, first + 1, self._next_tick)

    def record_last(self, node: Node) -> None:
        """Record a node as it ends, unless it was recorded in the same round."""
        if not is_due(self.setup, node.round):
            self._record(node, moment="end")

    def fail(self, error: RunFailed) -> None:
        """End the run."""
        if not self._end.done():
            self._end.set_exception(error)

    # --- what nodes ask for

    def _seconds(self, computation: Computation) -> float:
        """How long a computation takes that starts now."""
        if computation.kind is Kind.APPLY:
            return 0.0
        return float(
            self.setup.compute.seconds(
                self.setup.experiment.seed,
                computation.rank,
                computation.first_step,
                computation.work,
                self.clock.now(),
            )
        )

    def _execute(self, kind: Kind, jobs: Sequence[Any]) -> list[Any]:
        with self._profile.part("evaluate" if kind is Kind.EVALUATE else "train"):
            if self._to_choose and kind in (Kind.TRAIN, Kind.GRADIENT):
                self._to_choose = False
                self._choose_trainer()
            return execute(kind, jobs, self._trainer, self._evaluator)

    # --- trainers

    def _make_trainer(self, kind: type[Trainer]) -> Trainer:
        return kind(self.setup.task, self.setup.experiment.optimizer, self.rows, self.device, self._workers)

    def _choose_trainer(self) -> None:
        """Measure both trainers on the first batches of some nodes, before anything is trained."""
        experiment = self.setup.experiment
        jobs = []
        for rank in [rank for rank, part in enumerate(self.setup.parts) if part.size][:MEASURED_NODES]:
            batches = BatchStream(experiment.seed, rank, self.setup.parts[rank], experiment.batch_size)
            start = self.nodes[rank].model
            state = experiment.optimizer.init(start.parameters)
            jobs.append(TrainJob(start, [batches.batch(0)], experiment.optimizer.lr, state, 0))
        self._trainer, said = choose(self._make_trainer, jobs)
        if said:
            self._observer.say(said)

    # --- recording

    def round_ended(self, rank: int) -> None:
        """A node has completed a round."""
        node = self.nodes[rank]
        self.rounds += 1
        if self.rounds % self._progress_every == 0:
            self._observer.progress(self.rounds, self.clock.now())
        if is_due(self.setup, node.round):
            self._record(node, moment=node.round)
        self._checkpoint(node)

    def _tick(self, number: int, every_s: float) -> None:
        self._record_all(("tick", number))
        self._next_tick = number + 1
        self._tick_at(number + 1, every_s)

    def _tick_at(self, number: int, every_s: float) -> None:
        # After all else of the instant, so that a snapshot is what the instant ends with.
        self.clock.at(
            to_ns(number * every_s),
            Order.TIMER,
            0,
            lambda: self.clock.when_quiet(len(self.nodes), lambda: self._tick(number, every_s)),
            background=True,
        )

    def _record_all(self, moment: Moment) -> None:
        for node in self._present():
            if self._starts_ns[node.rank] <= self.clock.now_ns:  # before, it's on record already
                self._record(node, moment)

    def _record(self, node: Node, moment: Moment) -> None:
        rank = node.rank
        computing_s, sending_s = self.compute.busy_seconds(rank), self.links.busy_seconds(rank)
        self._recording.take(node, self.links.traffic(rank), computing_s, sending_s, moment)

    def _last_rows(self) -> None:
        """A run that ended by time or target is recorded once more, as it ended."""
        if self.setup.experiment.stop.rounds is None or any(
            node.round < self.setup.experiment.stop.rounds
            for node in self._present()
            if node.rank in self.setup.judged
        ):
            self._record_all("end")
            self._recording.flush()


def _into(node: NodeCuts, flights: Flights, rank: int, message: Message) -> None:
    """A message arrives at a node; then its way is over."""
    node.deliver(message)
    flights.land(message, rank)


def _computed(timeline: TimelineLog, computation: Computation, start_ns: int, end_ns: int) -> None:
    timeline.computed(computation.rank, computation.kind, start_ns / NS, end_ns / NS)


def _sent(timeline: TimelineLog, source: int, to: int, start_ns: int, end_ns: int, nbytes: int) -> None:
    timeline.sent(source, to, start_ns / NS, end_ns / NS, nbytes)


def store_device(device: str, setup: Setup) -> str:
    """Where vectors are kept: with the trainer if all of them fit there, else in host memory."""
    if device == "cpu":
        return device
    vector = torch.zeros(setup.layout.size)
    state = sum(value.numel() for value in setup.experiment.optimizer.init(vector).values())
    needed = 4 * setup.experiment.nodes * (VECTORS_A_NODE * setup.layout.size + 2 * state)
    free, _ = torch.cuda.mem_get_info(device)
    return device if needed <= FILLED * free else "cpu"


@contextmanager
def _torch_settings(threads: int) -> Iterator[None]:
    """torch's threads and generator for the run, and the caller's again after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _calm_collector() -> Iterator[None]:
    """Python's cyclic collector looks at what is new, and less often: the nodes live as long as the run, and walking
    them again and again can take longer than all the events.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
