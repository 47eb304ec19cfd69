"""A node's own model: immutable snapshots, and the computations whose results are committed to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from gossamer.learning.batches import BatchStream
from gossamer.learning.computation import Computation, ComputationKind, EvaluateJob
from gossamer.learning.optimizer import State
from gossamer.learning.trainer import ApplyJob, GradientJob, TrainJob, TrainResult
from gossamer.messages.tags import Model
from gossamer.node.host import Host
from gossamer.node.setup import Setup
from gossamer.node.waiting import NodeTask, all_ended
from gossamer.randomness import torch_seed


def modified_in_place(rank: int, name: str) -> RuntimeError:
    """The error for a snapshot of a node's "parameters" or "buffers" that user code has written to."""
    return RuntimeError(
        f"node {rank}: its {name} were modified in place, by this node or by a receiver of them;"
        f" snapshots are immutable: compute a new vector and assign it (node.{name} = v)"
    )


class VersionedVector:
    """One vector of the model, which is replaced but never modified, and the number of replacements. Torch
    counts in-place writes, except those through ``.data`` and ``.numpy()``; such a write raises RuntimeError
    when the vector is next read or replaced. ``vector`` is for comparisons; :meth:`read` returns it for
    use."""

    __slots__ = ("_name", "_rank", "vector", "version", "writes")

    def __init__(self, rank: int, name: str, vector: Tensor) -> None:
        self._rank, self._name = rank, name
        self.vector, self.version, self.writes = vector, vector._version, 0

    def read(self) -> Tensor:
        """The newest vector; its values may not have been written yet."""
        if self.vector._version != self.version:
            raise modified_in_place(self._rank, self._name)
        return self.vector

    def write(self, vector: Tensor) -> None:
        """Replace the vector."""
        self.read()
        self.vector, self.version = vector, vector._version
        self.writes += 1


class OwnModel:
    """One node's model and optimizer state, and the node's computations with them, which the engine runs.

    Attributes:
        parameters: the flat parameter vector.
        buffers: the model's buffers.
        state: the optimizer's state after the last committed step; None is a fresh state.
        reset: whether the next requested step starts with a fresh state.
        losses: mean losses of the steps committed since the last row.
        steps_per_epoch: number of steps in one pass over the node's samples.
        encoding: the last task that spends time on encoding. Later computations wait for it."""

    __slots__ = (
        *("_applied", "_batches", "_host", "_rank", "_samples", "_setup", "buffers"),
        *("encoding", "losses", "parameters", "reset", "state", "steps_per_epoch"),
    )

    def __init__(self, setup: Setup, rank: int, initial: Model, host: Host) -> None:
        self._setup, self._rank, self._host = setup, rank, host
        self._samples = setup.parts[rank]
        self.parameters = VersionedVector(rank, "parameters", host.store(initial.parameters))
        self.buffers = VersionedVector(rank, "buffers", initial.buffers.clone())
        self.state: State | None = None
        self.reset = False
        self.losses: list[float] = []
        self.encoding: NodeTask[None] | None = None
        self._applied = 0, -1  # the round of the last call of apply, and its number in this round
        experiment = setup.experiment
        self._batches = BatchStream(experiment.seed, rank, self._samples, experiment.batch_size)
        self.steps_per_epoch = -(-len(self._samples) // max(self._batches.batch_size, 1))

    def snapshot(self) -> Model:
        """The model. Its values may not have been written yet, so a reader calls :meth:`Host.settle` first."""
        return Model(self.parameters.read(), self.buffers.read())

    def check(self) -> None:
        """RuntimeError if user code has modified the model in place. Every call of the node that waits begins
        with this check, because other code that shares these vectors runs during the wait."""
        parameters, buffers = self.parameters, self.buffers
        # (Here and not only by read(), since it is called so often.)
        if parameters.vector._version != parameters.version or buffers.vector._version != buffers.version:
            self.snapshot()

    def train(self, first: int, steps: int, lr: float) -> Awaitable[float]:
        """Take local steps from the current model, numbered from ``first``. Returns their mean loss."""
        start = self.snapshot()
        job = self.train_job(start, first, steps, lr)
        return self._step(ComputationKind.TRAIN, start, lambda s: job._replace(state=s), first, steps)

    def train_job(
        self, start: Model, first: int, steps: int, lr: float, state: State | None = None
    ) -> TrainJob:
        """Local steps of this node, numbered from ``first``."""
        batches = [self._batches.batch(first + k) for k in range(steps)]
        return TrainJob(start, batches, lr, state or {}, self._seed(first))

    def apply(self, step: int, round: int, start: Model, gradient: Tensor, lr: float) -> Awaitable[float]:
        """Take one step from the current model with a gradient [P]. Random numbers of the optimizer are keyed by the round
        and the number of the call in it."""
        self._applied = round, self._applied[1] + 1 if self._applied[0] == round else 0
        seed = torch_seed(self._setup.experiment.seed, "apply", self._rank, *self._applied)
        return self._step(
            ComputationKind.APPLY, start, lambda s: ApplyJob(start, gradient, lr, s, seed), step, 0
        )

    async def _step(
        self, kind: ComputationKind, start: Model, job: Callable[[State], Any], first: int, work: float
    ) -> float:
        """Take steps from the current model with a job made from the optimizer's state. Returns their
        loss."""
        before = self.parameters.writes, self.buffers.writes
        reset, self.reset = self.reset, False

        def prepare() -> Any:  # until it is called, earlier steps may still change the state
            fresh = reset or self.state is None
            return job(self._setup.experiment.optimizer.init(start.parameters) if fresh else self.state)  # type: ignore[arg-type]

        def commit(result: TrainResult) -> float:
            self._commit(result, start, before)
            if result.loss == result.loss:
                self.losses.append(result.loss)
            return result.loss

        try:
            return float(await self._compute(kind, prepare, first, work, commit))
        except asyncio.CancelledError:
            self.reset |= reset  # the next requested step takes the fresh state instead
            raise

    def _commit(self, result: TrainResult, start: Model, before: tuple[int, int]) -> None:
        """Assign a result if nothing was written since it was requested; otherwise add it as an update."""
        new, (writes, buffer_writes) = result.model, before
        own = self.parameters.read()
        if self.parameters.writes != writes:
            self._host.settle(own)
            self.parameters.write(self._host.store(own + (new.parameters - start.parameters)))
        else:
            self.parameters.write(new.parameters)
        if self.buffers.writes != buffer_writes:
            self.buffers.write(self.buffers.read() + (new.buffers - start.buffers))
        else:
            self.buffers.write(new.buffers)
        self.state = result.state

    def indices(self, batch: int | Sequence[int] | Literal["full"]) -> Int[Tensor, " batch"]:
        """The samples of a batch of the stream, all of the node's samples, or some of them by position."""
        if isinstance(batch, int):
            return self._batches.batch(batch)
        own = torch.from_numpy(self._samples)
        return own if batch == "full" else own[torch.tensor(list(batch), dtype=torch.int64)]

    async def gradient(self, step: int, model: Model, indices: Int[Tensor, " batch"]) -> Tensor:
        """The mean gradient [P] over some samples."""
        job = GradientJob(model, indices, self._seed(step))
        gradient: Tensor = await self._compute(ComputationKind.GRADIENT, lambda: job, step, 1)
        return gradient

    async def evaluate(self, step: int, model: Model, on: str) -> dict[str, Any]:
        """Evaluate a model on an evaluation set, or on the node's training samples (``train``)."""
        limit = self._setup.experiment.evaluation.samples
        known = {name: len(targets[:limit]) for name, (_, targets) in self._setup.task.tests.items()}
        known["train"] = len(self._samples)
        if on not in known:
            raise ValueError(f"evaluate(on={on!r}): accepted: {', '.join(known)}")
        return await self._evaluate(step, EvaluateJob(model, on, self._samples), known[on])

    async def loss(self, step: int, model: Model, batch: int | Sequence[int] | Literal["full"]) -> float:
        """The mean loss of a model on some of the node's training samples; see :meth:`indices`."""
        samples = self.indices(batch).numpy()
        metrics = await self._evaluate(step, EvaluateJob(model, "train", samples), len(samples))
        return float(metrics["loss"])

    async def _evaluate(self, step: int, job: EvaluateJob, samples: int) -> dict[str, Any]:
        # A forward pass takes about a third of the work of a step.
        work = samples / max(self._batches.batch_size, 1) / 3
        metrics: dict[str, Any] = await self._compute(ComputationKind.EVALUATE, lambda: job, step, work)
        return metrics

    async def encoded(self) -> None:
        """Wait until all encoding so far has taken its time."""
        if self.encoding is not None:
            await all_ended(self._host.slot, (self.encoding,))

    async def encode(self, step: int, steps: float) -> None:
        """Spend the time of some local steps on encoding that a codec has done."""
        await self._host.compute(
            Computation(ComputationKind.ENCODE, self._rank, step, steps, lambda: None, lambda _: None)
        )

    def _seed(self, step: int) -> int:
        return torch_seed(self._setup.experiment.seed, "train", self._rank, step)

    async def _compute(
        self,
        kind: ComputationKind,
        prepare: Callable[[], Any],
        first: int,
        work: float,
        commit: Callable[[Any], Any] = lambda result: result,
    ) -> Any:
        if self.encoding is not None:
            await self.encoded()
        return await self._host.compute(Computation(kind, self._rank, first, work, prepare, commit))
