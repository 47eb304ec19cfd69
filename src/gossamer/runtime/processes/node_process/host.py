"""The engine's side of a node: its context, its clock, and its
:class:`~gossamer.node.host.Host`, which computes for it.

A node computes one thing at a time, in a thread, when its process holds a CPU slot. All nodes compute with
one :class:`ComputeResources`, which is created before they are forked. It warms up with a step and an evaluation
on one node's data and discards the results, so that everything they load is loaded only once."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, TypeVar

import torch
from torch import Tensor

from gossamer.config import Processes
from gossamer.learning.batches import BatchStream
from gossamer.learning.computation import Computation, ComputationKind, execute, trainer_of
from gossamer.learning.evaluate import BATCH, Evaluator
from gossamer.learning.malloc import trim
from gossamer.learning.mixing import InboxJob
from gossamer.learning.rows import Rows
from gossamer.learning.trainer import TrainJob
from gossamer.messages import encode
from gossamer.messages.tags import Model, Payload, Sending, Traffic
from gossamer.node.expectations import Form
from gossamer.node.host import Presence
from gossamer.process_memory import available_bytes, private_bytes
from gossamer.results.checkpoints import RunCheckpoint
from gossamer.results.folder import RunFolder
from gossamer.runtime.events import TimelineLog
from gossamer.runtime.processes.protocol import Fork, Job
from gossamer.runtime.processes.security import Security
from gossamer.runtime.processes.system import CpuSlots
from gossamer.runtime.processes.transport.transport import Transport
from gossamer.runtime.setup import Setup

log = logging.getLogger("gossamer")

T = TypeVar("T")

SHORTEST_S = 0.001
"""The shortest sleep of a node, in seconds, since its clock may be paused."""


@dataclass(frozen=True, eq=False)
class NodeContext:
    """The objects that a node's process inherits from the worker that forks it."""

    job: Job
    fork: Fork
    listener: socket.socket
    channel: socket.socket  # to the worker
    slots: int  # descriptor of the file of the CPU slots
    wakeup: tuple[int, int]  # descriptors that signal a free CPU slot
    folder: RunFolder
    security: Security | None  # None on loopback
    checkpoint: RunCheckpoint | None  # from which the run resumes, if any


class NodeClock:
    """Seconds since the run's start, except those of the node's evaluations, which pause the clock. In a
    resumed run it continues at ``time_s``, after ``wall_s`` real seconds."""

    def __init__(self, time_s: float = 0.0, wall_s: float = 0.0) -> None:
        self._before_s, self._wall_before_s = time_s, wall_s
        self._paused_s = 0.0
        self._pauses, self._since = 0, 0.0  # running evaluations, and since when
        self.begin(monotonic())

    def begin(self, start: float) -> None:
        """The run starts, or resumes, at this instant of the monotonic clock."""
        self.start = start - self._before_s
        self._wall_start = start - self._wall_before_s

    def now(self) -> float:
        now = self._since if self._pauses else monotonic()
        return max(now - self.start - self._paused_s, 0.0)  # another machine's start may still lie ahead

    def wall(self) -> float:
        return max(monotonic() - self._wall_start, 0.0)

    @contextmanager
    def pause(self) -> Iterator[None]:
        if not self._pauses:
            self._since = monotonic()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._paused_s += monotonic() - self._since

    async def until(self, time_s: float) -> None:
        while (left := time_s - self.now()) > 0:
            await asyncio.sleep(max(left, SHORTEST_S))


class ComputeResources:
    """The trainer, evaluator and vector store (``rows``) of all nodes. Each forked node has its own copy."""

    def __init__(self, setup: Setup) -> None:
        experiment = setup.experiment
        self._setup = setup
        self.rows = Rows(setup.layout.size)
        self.trainer = trainer_of(setup.trainer)(
            setup.task, experiment.optimizer, self.rows, rule=experiment.gradient
        )
        samples = experiment.evaluation.samples
        self.evaluator = Evaluator(setup.task, experiment.seed, samples, metrics=setup.metrics)
        self._freed_bytes: int | None = None  # memory that a step allocated and freed
        self._common: Model | None = None
        if experiment.initial != "independent":
            parameters, buffers = setup.initial(0)
            self._common = Model(self.rows.store(parameters), buffers)

    def initial(self, rank: int) -> Model:
        return self._common or self._setup.initial(rank)

    def returns_memory(self) -> bool:
        """Whether nodes return freed memory to the system, because that of all nodes together may not fit."""
        available, freed = available_bytes(), self._freed_bytes
        if available is None or freed is None:
            return True
        return self._setup.experiment.nodes * freed > available / 2

    def warm_up(self) -> None:
        """Take a step and evaluate the result. (A failure will recur in a node, which reports it.)"""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # autograd threads would not survive a fork
            return
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nodes compute on the CPU, but autograd looks for devices
        try:
            self._warm_up()
        except Exception as error:  # noqa: BLE001 - the user's model or loss may raise anything
            log.debug("the warmup failed: %s", error)
        trim()

    def _warm_up(self) -> None:
        setup, experiment = self._setup, self._setup.experiment
        rank = max(range(experiment.nodes), key=lambda rank: len(setup.parts[rank]))
        if not len(setup.parts[rank]):
            return
        batches = BatchStream(experiment.seed, rank, setup.parts[rank], experiment.batch_size)
        model = self.initial(rank)
        trim()
        before = private_bytes()
        state = experiment.optimizer.init(model.parameters)
        job = TrainJob(model, [batches.batch(0)], experiment.optimizer.lr, state, seed=0)
        [result] = self.trainer.train([job])
        after = private_bytes()
        if before is not None and after is not None:
            self._freed_bytes = max(after - before, 0)
        if setup.evaluated:
            self.evaluator.train(result.model, setup.parts[rank][:BATCH])


class NodeHost:
    """The host of one node: its store, its computations, and its transport, which the node's process sets.
    ``end_round`` and ``event`` are as for :class:`~gossamer.node.host.Host`."""

    transport: Transport

    def __init__(
        self,
        rank: int,
        setup: Setup,
        context: NodeContext,
        resources: ComputeResources,
        clock: NodeClock,
        timeline: TimelineLog | None,
        end_round: Callable[[], Awaitable[None]],
        event: Callable[[str, str], None],
    ) -> None:
        assert isinstance(setup.experiment.engine, Processes)
        self._rank, self._setup, self._trims = rank, setup, resources.returns_memory()
        self._trainer, self._evaluator = resources.trainer, resources.evaluator
        self._clock, self._timeline, self._security = clock, timeline, context.security
        self.now, self.end_round, self.event = clock.now, end_round, event
        rows = resources.rows
        self.store, self.is_stored, self.fresh = rows.store, rows.owns, rows.vector
        self.paced = setup.experiment.engine.pace
        self.lost: set[int] = set()
        self.presence: Presence | None = None
        self.leaving = False  # whether it was told to leave
        self.leaves = False  # whether it has noticed, so that its rounds are over
        self._cpu_slots = CpuSlots(context.slots, context.wakeup)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._turn = asyncio.Lock()  # first come, first served
        self.computing_s = 0.0  # according to the compute profile if paced, otherwise as measured
        self.computations = self.slow = 0  # paced ones, and those that took longer

    # --- computations

    async def evaluate(self, model: Model) -> dict[str, float]:
        """The columns of all evaluation sets for a model, computed off the node's clock."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._evaluate, model)

    def _evaluate(self, model: Model) -> dict[str, float]:
        with self._cpu_slots.one():
            values = self._evaluator.columns(model, self._setup.personal[self._rank])
        trim()  # an evaluation takes more memory than a step, and is rare
        return values

    async def compute(self, computation: Computation) -> Any:
        """Execute a computation; see :class:`~gossamer.node.host.Host`."""
        async with self._turn:
            return await self._compute(computation)

    async def _compute(self, computation: Computation) -> Any:
        began, job = self._clock.now(), computation.prepare()
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._execute, computation, job)
        try:
            result, seconds = await asyncio.shield(running)
        except asyncio.CancelledError:
            # The thread can't be stopped. Its result is discarded, and the next computation waits for it.
            running.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        ended = self._clock.now()
        if self.paced and computation.kind is not ComputationKind.APPLY:
            await self._keep_pace(computation, began)
        elif (factor := self._setup.faults.factor(self._rank, began)) > 1:
            await asyncio.sleep((factor - 1) * seconds)
        span = (began, self._clock.now()) if self.paced else (ended - seconds, ended)
        self.computing_s += span[1] - span[0]
        if self._timeline is not None:
            self._timeline.computed(self._rank, computation.kind, *span)
        return computation.commit(result)

    async def _keep_pace(self, computation: Computation, began: float) -> None:
        """Wait until a computation that began at ``began`` is due according to the compute profile."""
        profile, seed = self._setup.compute, self._setup.experiment.seed
        due = began + profile.duration(seed, self._rank, computation.first_step, computation.work, began)
        self.computations += 1
        self.slow += self._clock.now() > due
        await self._clock.until(due)

    def _execute(self, computation: Computation, job: Any) -> tuple[Any, float]:
        with self._cpu_slots.one():
            began = monotonic()
            [result] = execute(computation.kind, [job], self._trainer, self._evaluator)
            seconds = monotonic() - began
        if self._trims:
            trim()
        return result, seconds

    # --- messages, mixing and secrets

    @property
    def traffic(self) -> Traffic:
        return replace(self.counters)

    @property
    def counters(self) -> Traffic:
        return self.transport.traffic

    def network_bytes(self) -> int | None:
        return None

    def slot(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return asyncio.get_running_loop().create_task(coroutine)

    def timer(
        self, seconds: float, call: Callable[[], None], *, background: bool = False
    ) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, call)

    def send(
        self, to: Sequence[int], payload: Payload, tag: tuple[str | int, ...], form: Form | None = None
    ) -> list[Sending]:
        encoded = encode(payload)
        return [self.transport.send(rank, encoded, tag) for rank in to]

    async def mix(self, step: InboxJob, *, read: bool) -> Any:
        # Tasks that were spawned earlier run first, as in the simulator, where mixing comes last at an instant.
        await asyncio.sleep(0)
        step.prepare()
        return step.commit(step.run(self.fresh))

    def settle(self, vector: Tensor) -> None:
        """Do nothing: this engine defers no mixing."""

    def finished(self, rounds: int) -> bool:
        last = self._setup.experiment.stop.rounds
        self.leaves = self.leaves or self.leaving
        return self.leaves or (last is not None and rounds >= last)

    def secret(self, n: int) -> bytes:
        return os.urandom(n)

    def sign(self, data: bytes) -> bytes:
        return b"" if self._security is None else self._security.sign(data)

    def verify(self, rank: int, data: bytes, signature: bytes) -> bool:
        return not signature if self._security is None else self._security.verify(rank, data, signature)
