"""Deferred computation, and the trainer and evaluator that execute it.

A computation has a virtual duration, at the end of which its result is committed. If a due result has not
been computed yet, all running computations of the same kind are computed as one batch, from immutable
snapshots. So the values that nodes read never depend on the batching."""

from __future__ import annotations

from asyncio import CancelledError
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gossamer.config import Simulate
from gossamer.learning.computation import Computation, ComputationKind, execute, trainer_of
from gossamer.learning.evaluate import Evaluator
from gossamer.learning.evaluation_metrics import MetricValues
from gossamer.learning.rows import Rows
from gossamer.learning.thread_pool import ThreadPool
from gossamer.messages.tags import Model
from gossamer.node.waiting import Slot
from gossamer.runtime.recording import Profile
from gossamer.runtime.setup import Setup
from gossamer.runtime.simulate.core import NS, Core, Order, ScheduledCall
from gossamer.runtime.simulate.replay import Replay

_PENDING: Any = object()
Execute = Callable[[ComputationKind, Sequence[Any]], list[Any]]  # runs jobs of one kind as a batch


@dataclass(eq=False, slots=True)
class _Queued:
    computation: Computation
    slot: Slot
    due: ScheduledCall | None = None
    start_ns: int = 0
    result: Any = _PENDING


class Compute:
    """Runs the computations of all nodes, one at a time per node, in the order of the calls. ``seconds``
    returns the duration of a computation that starts now. ``settle`` writes all vectors that are not written
    yet. ``watch`` is called with the rank, kind, start and end (seconds) of each computation that has ended
    or was cancelled."""

    def __init__(
        self,
        core: Core,
        seconds: Callable[[Computation], float],
        execute: Execute,
        settle: Callable[[], None] = lambda: None,
        watch: Callable[[int, ComputationKind, float, float], None] | None = None,
        replay: Replay | None = None,
    ) -> None:
        self._core, self._seconds, self._execute, self._settle = core, seconds, execute, settle
        self._watch, self._replay = watch, replay
        self._queues: defaultdict[int, deque[_Queued]] = defaultdict(deque)
        self._busy_ns: defaultdict[int, int] = defaultdict(int)
        # The running computations that have no result yet.
        self._under_way: defaultdict[ComputationKind, dict[int, _Queued]] = defaultdict(dict)

    async def submit(self, computation: Computation) -> Any:
        """Queue a computation at its node. Returns the result of ``commit`` at the due instant."""
        entry = _Queued(computation, self._core.slot())
        queue = self._queues[computation.rank]
        queue.append(entry)
        if len(queue) == 1:
            self._start(queue)
        try:
            return await entry.slot
        except CancelledError:
            self._cancel(entry)
            raise

    def _start(self, queue: deque[_Queued]) -> None:
        while queue:
            entry = queue[0]
            rank = entry.computation.rank
            entry.start_ns = self._core.now_ns
            try:
                seconds = self._seconds(entry.computation)
                entry.due = self._core.after(seconds, Order.COMMIT, rank, self._due, entry)
            except Exception as error:  # noqa: BLE001 - a user's profile may raise anything; the node reports it
                queue.popleft()
                entry.slot.set_exception(error)
            else:
                self._under_way[entry.computation.kind][rank] = entry
                break

    def _cancel(self, entry: _Queued) -> None:
        computation = entry.computation
        queue = self._queues[computation.rank]
        if entry not in queue:
            return  # it has been committed
        running = queue[0] is entry
        queue.remove(entry)
        if running:
            assert entry.due is not None
            entry.due.cancel()
            self._under_way[computation.kind].pop(computation.rank, None)
            self._ended(entry)
            self._start(queue)

    def _ended(self, entry: _Queued) -> None:
        computation, now_ns = entry.computation, self._core.now_ns
        self._busy_ns[computation.rank] += now_ns - entry.start_ns
        if self._watch is not None:
            self._watch(computation.rank, computation.kind, entry.start_ns / NS, now_ns / NS)

    def busy_seconds(self, rank: int) -> float:
        """The total run time of a node's computations so far, seconds."""
        queue = self._queues[rank]
        running = self._core.now_ns - queue[0].start_ns if queue else 0
        return (self._busy_ns[rank] + running) / NS

    def is_idle(self, rank: int) -> bool:
        """Whether no computation of a node runs or waits."""
        return not self._queues[rank]

    def _due(self, entry: _Queued) -> None:
        if entry.result is _PENDING:
            self._flush(entry.computation.kind)
        queue = self._queues[entry.computation.rank]
        queue.popleft()
        self._ended(entry)
        self._start(queue)
        try:
            if isinstance(entry.result, Exception):
                raise entry.result
            entry.slot.set_result(entry.computation.commit(entry.result))
        except Exception as error:  # noqa: BLE001 - the author's code; raised where it is awaited
            entry.slot.set_exception(error)

    def _flush(self, kind: ComputationKind) -> None:
        """Compute all running computations of a kind, which are the first ones in the nodes' queues. They are
        taken in the order in which they began, because their vectors are in this order in the store."""
        under_way = self._under_way.pop(kind)
        self._settle()
        prepared, jobs = [], []
        for entry in under_way.values():
            try:
                jobs.append(entry.computation.prepare())
                prepared.append(entry)
            except Exception as error:  # noqa: BLE001 - a user's task may raise anything; the node reports it
                entry.result = error
        execute = self._execute
        # If any computation of a batch is needed, the whole batch is computed: its size may change the bits.
        if self._replay is not None and all(
            self._replay.is_skipped(entry.computation.rank) for entry in prepared
        ):
            execute = partial(self._replay.placeholder_results, self._execute)
        for entry, result in zip(prepared, _attempt(execute, kind, jobs), strict=True):
            entry.result = result


def _attempt(execute: Execute, kind: ComputationKind, jobs: list[Any]) -> list[Any]:
    """Run jobs. If the batch fails, run each job alone, so that an error is attributed to its node."""
    if not jobs:
        return []
    try:
        return execute(kind, jobs)
    except Exception as error:  # noqa: BLE001 - a user's model or loss may raise anything; the node reports it
        if len(jobs) == 1:
            return [error]
    return [result for job in jobs for result in _attempt(execute, kind, [job])]


class Executor:
    """Trains and evaluates models with the run's trainer."""

    def __init__(
        self, setup: Setup, rows: Rows, threads: ThreadPool, profile: Profile, say: Callable[[str], None]
    ) -> None:
        experiment, self._setup, self._profile = setup.experiment, setup, profile
        options = experiment.engine
        assert isinstance(options, Simulate)
        self.trainer = trainer_of(setup.trainer)(
            setup.task,
            experiment.optimizer,
            rows,
            threads,
            rule=experiment.gradient,
            cuda_graphs=options.cuda_graphs,
        )
        for text in setup.notes():
            say(text)
        device, samples = options.device, experiment.evaluation.samples
        shared_rows = rows if self.trainer.evaluates_many else None
        self._evaluator = Evaluator(
            setup.task, experiment.seed, samples, device, threads, say, shared_rows, setup.metrics
        )

    def execute(self, kind: ComputationKind, jobs: Sequence[Any]) -> list[Any]:
        with self._profile.part("evaluate" if kind is ComputationKind.EVALUATE else "train"):
            return execute(kind, jobs, self.trainer, self._evaluator)

    def evaluate(self, models: Sequence[Model], ranks: Sequence[int] = ()) -> list[MetricValues | Exception]:
        """The recorded columns of each model, in order. Given the nodes' ranks, they include the personal
        test sets. If the user's code raises, its exception takes the place of the result."""
        personal = [self._setup.personal[rank] for rank in ranks]
        with self._profile.part("evaluate"):
            return self._evaluator.columns_each(models, personal)
