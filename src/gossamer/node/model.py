"""A node's model: snapshots that nobody writes into, and the computations whose results are committed to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from gossamer.learning.batches import BatchStream
from gossamer.learning.computation import Computation, ComputationKind, EvaluateJob
from gossamer.learning.optimizer import Optimizer, State
from gossamer.learning.trainer import ApplyJob, GradientJob, TrainJob, TrainResult
from gossamer.messages.tags import Model
from gossamer.node.host import Host
from gossamer.node.setup import NodeSetup
from gossamer.randomness import torch_seed

Writes = tuple[int, int]
"""How often the parameters and the buffers were written."""


class Snapshot:
    """One vector of the model, which is replaced and never modified. Torch counts what is written in place, so that it is
    noticed if somebody does.

    Args:
        rank: the node.
        name: the vector's, as the node's users know it.
        vector: the first one.

    Attributes:
        vector: the newest one, to be told from others; :meth:`read` gives it to be used.
        writes: how often it was replaced.
    """

    __slots__ = ("_name", "_rank", "_version", "vector", "writes")

    def __init__(self, rank: int, name: str, vector: Tensor) -> None:
        self._rank, self._name = rank, name
        self.vector, self._version, self.writes = vector, vector._version, 0

    def read(self) -> Tensor:
        """The newest vector, whose values may not be written yet.

        Raises:
            RuntimeError: if it was modified in place.
        """
        if self.vector._version != self._version:
            raise RuntimeError(
                f"node {self._rank}: its {self._name} were modified in place; snapshots are immutable: compute a new"
                f" vector and assign it (node.{self._name} = v)"
            )
        return self.vector

    def write(self, vector: Tensor) -> None:
        """Replace the vector by one that nothing else will write to."""
        self.vector, self._version = vector, vector._version
        self.writes += 1


class OwnModel:
    """The model of one node, with the optimizer's state that goes with it.

    Args:
        rank: the node.
        initial: the model that it starts with.
        optimizer: makes its own state.
        host: stores parameters.

    Attributes:
        parameters: the flat parameter vector.
        buffers: the model's buffers.
        state: the optimizer's, as the last committed step left it; None is a fresh one.
        reset: whether the next step that is asked for starts with a fresh one.
    """

    def __init__(self, rank: int, initial: Model, optimizer: Optimizer, host: Host) -> None:
        self._optimizer, self._host = optimizer, host
        self.parameters = Snapshot(rank, "parameters", host.store(initial.parameters))
        self.buffers = Snapshot(rank, "buffers", initial.buffers.clone())
        self.state: State | None = None
        self.reset = False

    def snapshot(self) -> Model:
        """The model for a reader that settles it first: its values may not be written yet."""
        return Model(self.parameters.read(), self.buffers.read())

    @property
    def writes(self) -> Writes:
        """How often it was written by now, which :meth:`commit` asks for."""
        return self.parameters.writes, self.buffers.writes

    def take_reset(self) -> bool:
        """Whether the step that is asked for now starts with a fresh state; the one after it doesn't."""
        reset, self.reset = self.reset, False
        return reset

    def state_for(self, start: Model, reset: bool) -> State:
        """The optimizer's state for steps from some model on."""
        if reset or self.state is None:
            return self._optimizer.init(start.parameters)
        return self.state

    def commit(self, result: TrainResult, start: Model, before: Writes) -> None:
        """Assign a result if nothing was written since it was asked for; otherwise add it as an update.

        Args:
            result: of the steps.
            start: the model that they began with.
            before: :attr:`writes` at that time.
        """
        new, (writes, buffer_writes) = result.model, before
        self.parameters.read()  # which is refused if it was modified in place
        if self.parameters.writes == writes:
            self.parameters.write(new.parameters)
        else:
            self._host.settle(self.parameters.vector)
            moved: Tensor = self.parameters.vector + (new.parameters - start.parameters)
            self.parameters.write(self._host.store(moved))
        if self.buffers.writes == buffer_writes:
            self.buffers.write(new.buffers)
        else:
            self.buffers.write(self.buffers.read() + (new.buffers - start.buffers))
        self.state = result.state


class Learner:
    """One node's computations; the engine carries them out.

    Args:
        setup: the node.
        host: the engine.
        own: the model that steps are taken with.
        learned: told of the mean loss of steps that are committed, if they have one.
    """

    def __init__(self, setup: NodeSetup, host: Host, own: OwnModel, learned: Callable[[float], None]) -> None:
        self._setup, self._host, self._own, self._learned = setup, host, own, learned
        self._batches = BatchStream(setup.seed, setup.rank, setup.samples, setup.batch_size)

    async def train(self, first: int, steps: int, lr: float) -> float:
        """Take local steps from the current model, numbered from ``first``; gives their mean loss."""
        start = self._own.snapshot()
        batches = [self._batches.batch(first + k) for k in range(steps)]
        seed = self._seed(first)
        loss = await self._step(
            ComputationKind.TRAIN,
            start,
            lambda state: TrainJob(start, batches, lr, state, seed),
            first,
            steps,
        )
        return float(loss)

    async def apply(self, step: int, start: Model, gradient: Tensor, lr: float) -> None:
        """Take one step from the current model with a gradient [P]."""
        await self._step(
            ComputationKind.APPLY, start, lambda state: ApplyJob(start, gradient, lr, state), step, 0
        )

    async def _step(
        self, kind: ComputationKind, start: Model, job: Callable[[Any], Any], first: int, work: float
    ) -> float:
        """Have steps taken; gives their loss.

        Args:
            kind: of computation.
            start: the current model.
            job: makes the job, given the optimizer's state, which earlier steps may still change.
            first: the number of the first step.
            work: equivalent number of steps.
        """
        own, before, reset = self._own, self._own.writes, self._own.take_reset()

        def commit(result: TrainResult) -> float:
            own.commit(result, start, before)
            if result.loss == result.loss:
                self._learned(result.loss)
            return result.loss

        try:
            loss: float = await self._compute(
                kind, lambda: job(own.state_for(start, reset)), commit, first, work
            )
        except asyncio.CancelledError:
            own.reset |= reset  # the next step that is asked for starts with a fresh state instead
            raise
        return loss

    def indices(self, batch: int | Sequence[int] | Literal["full"]) -> Int[Tensor, " batch"]:
        """The samples of a batch of the stream, all of the node's samples, or some of them by position."""
        if isinstance(batch, int):
            return self._batches.batch(batch)
        own = torch.from_numpy(self._setup.samples)
        return own if batch == "full" else own[torch.tensor(list(batch), dtype=torch.int64)]

    async def gradient(self, step: int, model: Model, indices: Int[Tensor, " batch"]) -> Tensor:
        """The mean gradient [P] over some samples."""
        seed = self._seed(step)
        gradient: Tensor = await self._compute(
            ComputationKind.GRADIENT, lambda: GradientJob(model, indices, seed), lambda found: found, step, 1
        )
        return gradient

    async def evaluate(self, step: int, model: Model, on: str) -> dict[str, float]:
        """Evaluate a model on an evaluation set, or on the node's training samples (``train``)."""
        job = EvaluateJob(model, on, self._setup.samples)
        known = {**self._setup.test_samples, "train": len(self._setup.samples)}
        if on not in known:
            raise ValueError(f"evaluate(on={on!r}): accepted: {', '.join(known)}")
        samples = known[on]
        # A forward pass is about a third of a step's work.
        work = samples / max(self._batches.batch_size, 1) / 3
        result: dict[str, float] = await self._compute(
            ComputationKind.EVALUATE, lambda: job, lambda found: found, step, work
        )
        return result

    def _seed(self, step: int) -> int:
        return torch_seed(self._setup.seed, "train", self._setup.rank, step)

    async def _compute(
        self,
        kind: ComputationKind,
        prepare: Callable[[], Any],
        commit: Callable[[Any], Any],
        first: int,
        work: float,
    ) -> Any:
        return await self._host.compute(Computation(kind, self._setup.rank, first, work, prepare, commit))
