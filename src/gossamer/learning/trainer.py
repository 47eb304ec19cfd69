"""Trainers: local steps of one node after the other; :mod:`gossamer.learning.batched` takes many nodes at once.

A trainer is a pure function of its jobs: it reads snapshots and writes fresh vectors. Both trainers compute
the same mathematics; their bits differ (matrix kernels round differently when they are batched).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gossamer.learning.optimizer import Optimizer, State
from gossamer.learning.parameters import FlatModule
from gossamer.learning.rows import Rows
from gossamer.learning.workers import Workers
from gossamer.messages import Model
from gossamer.tasks.task import Task


@dataclass(frozen=True, eq=False)
class TrainJob:
    """Some local steps of one node.

    Args:
        start: the model before the first step; never written.
        batches: sample indices, one tensor [batch] a step.
        lr: learning rate.
        state: optimizer state before the first step; never written.
        seed: for layers that draw (dropout).
    """

    start: Model
    batches: Sequence[Int[Tensor, " batch"]]
    lr: float
    state: State
    seed: int


@dataclass(frozen=True, eq=False)
class TrainResult:
    """The model and optimizer state after the last step, and the mean of the steps' losses."""

    model: Model
    state: State
    loss: float


@dataclass(frozen=True, eq=False)
class GradientJob:
    """The mean gradient of the loss over one batch [batch] at a model."""

    at: Model
    batch: Int[Tensor, " batch"]
    seed: int


J = TypeVar("J", TrainJob, GradientJob)
R = TypeVar("R")


class Trainer(ABC):
    """Computes local steps and gradients.

    Args:
        task: the data, model and loss.
        optimizer: takes the steps.
        rows: where results are put.
        device: where it computes; data is moved there once.
        workers: share the jobs; results don't depend on how many there are.
    """

    name = ""

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        rows: Rows,
        device: torch.device | str = "cpu",
        workers: Workers | None = None,
    ) -> None:
        self.task = task
        self.optimizer = optimizer
        self.rows = rows
        self.inputs, self.targets = (tensor.to(device) for tensor in task.train)
        self._device = device
        self.flat = self._make_flat()
        self.layout = self.flat.layout
        self._workers = workers or Workers(1)

    def _make_flat(self) -> FlatModule:
        flat = FlatModule(self.task.model, self._device)
        flat.module.train()
        return flat

    @abstractmethod
    def train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        """Run every job's steps; results in the jobs' order."""

    @abstractmethod
    def gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]:
        """Every job's gradient, in the jobs' order."""

    def keep_frozen(self, parameters: Tensor, start: Tensor) -> None:
        """Undo what an optimizer does without a gradient (weight decay) to parameters that don't require one."""
        for field in self.flat.frozen:
            field.of(parameters).copy_(field.of(start))


def channels_last(inputs: Tensor) -> Tensor:
    """Images [batch, channels, height, width] in the memory layout in which small convolutions run fastest on
    a CPU."""
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs


class SequentialTrainer(Trainer):
    """One node at a time, on each worker, through a module whose parameters are views of a flat vector."""

    name = "sequential"
    _draws: bool | None = None

    def train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        return self._share(self._train, jobs)

    def gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]:
        return self._share(self._gradient, jobs)

    def _share(self, run: Callable[[FlatModule, J], R], jobs: Sequence[J]) -> list[R]:
        if self._draws is None and jobs:
            # Whether the model draws random numbers is seen on the first job.
            torch.manual_seed(jobs[0].seed)
            before = torch.get_rng_state()
            first = run(self.flat, jobs[0])
            self._draws = not torch.equal(before, torch.get_rng_state())
            return [first, *self._share(run, jobs[1:])]
        if not self._draws:
            make = self._make_flat
            return self._workers.map(lambda job: run(self._workers.own(make), job), jobs)
        results = []
        for job in jobs:  # torch has one generator for all threads
            torch.manual_seed(job.seed)
            results.append(run(self.flat, job))
        return results

    def _gradient(self, flat: FlatModule, job: GradientJob) -> Float[Tensor, " params"]:
        flat.load(job.at)
        self._backward(flat, job.batch)
        return self.rows.fresh().copy_(flat.gradient)

    def _train(self, flat: FlatModule, job: TrainJob) -> TrainResult:
        flat.load(job.start)
        state = {name: value.clone() for name, value in job.state.items()}
        losses = 0.0
        for batch in job.batches:
            losses += self._backward(flat, batch)
            self.optimizer.step(flat.parameters, flat.gradient, state, job.lr)
            self.keep_frozen(flat.parameters, job.start.parameters)
        model = Model(self.rows.fresh().copy_(flat.parameters), flat.buffers())
        return TrainResult(model, state, losses / max(len(job.batches), 1))

    def _backward(self, flat: FlatModule, batch: Int[Tensor, " batch"]) -> float:
        flat.gradient.zero_()
        with torch.enable_grad():
            loss = self.task.loss(flat.module(channels_last(self.inputs[batch])), self.targets[batch])
            loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())
