"""A node's computations: one at a time, in a thread, when it's the turn of the node's process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import Any

from gossamer.config import Processes
from gossamer.learning.computation import Computation, ComputationKind, execute
from gossamer.learning.malloc import trim
from gossamer.messages.tags import Model
from gossamer.runtime.processes.node_process.clock import Clock
from gossamer.runtime.processes.node_process.context import NodeContext
from gossamer.runtime.processes.node_process.warmup import Stage
from gossamer.runtime.processes.system.cpu_slots import CpuSlots
from gossamer.runtime.setup import Setup
from gossamer.runtime.timeline import TimelineLog


class Busy:
    """How long something was under way; entered in one thread, and read from any.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._state: tuple[float, float | None] = 0.0, None  # seconds so far, and since when it computes

    def __enter__(self) -> None:
        self._state = self._state[0], self._clock()

    def __exit__(self, *_: object) -> None:
        self._state = self.seconds(), None

    def restore(self, seconds: float) -> None:
        """It was so long under way already."""
        self._state = seconds, None

    def seconds(self) -> float:
        """So far."""
        total, since = self._state
        return total if since is None else total + self._clock() - since


class Computing:
    """What one node computes.

    Args:
        rank: the node.
        setup: what is run.
        context: says which CPU slots it shares with other processes.
        stage: what it computes with.
        clock: the node's.
        timeline: told of each computation; None is nobody.

    Attributes:
        cpu_slots: shared by all nodes of its machine.
        under_way: computations that were asked for, and are not over.
        slow: those that took longer than the compute profile says, of all that keep its pace.
    """

    def __init__(
        self,
        rank: int,
        setup: Setup,
        context: NodeContext,
        stage: Stage,
        clock: Clock,
        timeline: TimelineLog | None,
    ) -> None:
        assert isinstance(setup.experiment.engine, Processes)
        self._pace = setup.experiment.engine.pace
        self._rank, self._setup, self._trims = rank, setup, context.trims
        self._trainer, self._evaluator = stage.trainer, stage.evaluator
        self._clock, self._timeline = clock, timeline
        self.cpu_slots = CpuSlots(context.memory, context.at_once, context.wakeup)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._turn = asyncio.Lock()  # first come first served
        self._busy = Busy(monotonic)  # the thread
        self._paced = Busy(clock.now)  # computations that take the compute profile's time
        self.under_way = 0
        self._computations = self._slow = 0

    @property
    def slowness(self) -> str | None:
        """How often the compute profile's pace could not be kept, in words; None where it always was."""
        if not self._slow:
            return None
        return f"{self._slow} of {self._computations} computations took longer than the compute profile says"

    def seconds(self) -> float:
        """For how long the node has computed."""
        return (self._paced if self._pace else self._busy).seconds()

    def restore(self, seconds: float) -> None:
        """It has computed for so long already."""
        self._busy.restore(seconds)
        self._paced.restore(seconds)

    def forms(self) -> dict[str, dict[str, int]]:
        """How steps and evaluations were computed: recorded, or eagerly and why."""
        return {"train": self._trainer.forms(), "evaluate": self._evaluator.forms()}

    async def evaluate(self, model: Model) -> dict[str, float]:
        """The columns of all evaluation sets for a model; off the node's clock."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._evaluate, model)

    def _evaluate(self, model: Model) -> dict[str, float]:
        with self.cpu_slots.one():
            values = self._evaluator.columns(model)
        trim()  # it takes more memory than a step, and seldom
        return values

    async def compute(self, computation: Computation) -> Any:
        """Carry a computation out; see :class:`~gossamer.node.host.Host`."""
        self.under_way += 1
        try:
            return await self._compute(computation)
        finally:
            self.under_way -= 1

    async def _compute(self, computation: Computation) -> Any:
        async with self._turn:
            if not self._pace:
                return await self._carry_out(computation)
            began = self._clock.now()
            try:
                with self._paced:
                    return await self._carry_out(computation)
            finally:
                if self._timeline is not None:
                    self._timeline.computed(self._rank, computation.kind, began, self._clock.now())

    async def _carry_out(self, computation: Computation) -> Any:
        began = self._clock.now()
        job = computation.prepare()
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._execute, computation, job)
        if self._timeline is not None and not self._pace:
            running.add_done_callback(partial(self._note_computed, computation.kind))
        try:
            result, seconds = await asyncio.shield(running)
        except asyncio.CancelledError:
            # The thread can't be stopped; what it finds is not committed, and the next one waits behind
            # it.
            running.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        if self._pace and computation.kind is not ComputationKind.APPLY:
            await self._keep_pace(computation, began)
        elif (factor := self._setup.faults.factor(self._rank, began)) > 1:
            await asyncio.sleep((factor - 1) * seconds)
        return computation.commit(result)

    async def _keep_pace(self, computation: Computation, began: float) -> None:
        """Wait until a computation that began then is due by the compute profile."""
        profile, seed = self._setup.compute, self._setup.experiment.seed
        seconds = profile.seconds(seed, self._rank, computation.first_step, computation.work, began)
        due = began + float(seconds)
        self._computations += 1
        self._slow += self._clock.now() > due
        await self._clock.until(due)

    def _note_computed(self, kind: ComputationKind, done: asyncio.Future[tuple[Any, float]]) -> None:
        if self._timeline is not None and not done.cancelled() and done.exception() is None:
            now, (_, seconds) = self._clock.now(), done.result()
            self._timeline.computed(self._rank, kind, now - seconds, now)

    def _execute(self, computation: Computation, job: Any) -> tuple[Any, float]:
        """In the node's thread; gives the result and the seconds that it took."""
        before_s = self._busy.seconds()
        with self.cpu_slots.one(), self._busy:
            [result] = execute(computation.kind, [job], self._trainer, self._evaluator)
        if self._trims:
            trim()
        return result, self._busy.seconds() - before_s
