"""Trainers: local steps of one node after the other; :mod:`gossamer.learning.batched` takes many nodes at once.

A trainer is a pure function of its jobs: it reads snapshots and writes fresh vectors. All trainers compute the same
mathematics, but their bits differ, because matrix kernels round differently when they are batched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gossamer.learning.capture import MOST_SHAPES, Captured, Function
from gossamer.learning.gradients import gradient_function
from gossamer.learning.optimizer import Optimizer, State
from gossamer.learning.parameters import Layout, bare_module
from gossamer.learning.rows import Rows
from gossamer.learning.workers import Workers
from gossamer.messages.tags import Model
from gossamer.tasks.task import Task


@dataclass(frozen=True, eq=False, slots=True)
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


@dataclass(frozen=True, eq=False, slots=True)
class TrainResult:
    """The model and optimizer state after the last step, and the mean of the steps' losses."""

    model: Model
    state: State
    loss: float


@dataclass(frozen=True, eq=False, slots=True)
class GradientJob:
    """The mean gradient of the loss over one batch [batch] at a model."""

    at: Model
    batch: Int[Tensor, " batch"]
    seed: int


@dataclass(frozen=True, eq=False, slots=True)
class ApplyJob:
    """One optimizer step with a given gradient [P]."""

    start: Model
    gradient: Float[Tensor, " params"]
    lr: float
    state: State


J = TypeVar("J", TrainJob, GradientJob)
R = TypeVar("R")


class Trainer(ABC):
    """Computes local steps and gradients.

    Args:
        task: the data, model and loss.
        optimizer: takes the steps.
        rows: the store that results go to.
        device: where it computes; data is moved there once.
        workers: share the jobs; results do not depend on their number.
    """

    name = ""
    nodes = False
    """Whether it computes the gradients of many nodes at once."""
    compiled = False
    """Whether it computes them by torch.compile."""

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
        self._data = task.train[0].to(device), task.train[1].to(device)
        self._device = device
        self.device_type = torch.device(device).type
        self._workers = workers or Workers(1)
        self.module = self._make_module()
        self.layout = Layout.of(self.module)
        trains = [parameter.requires_grad for parameter in self.module.parameters()]
        self._trained = tuple(f for f, moves in zip(self.layout.parameters, trains, strict=True) if moves)
        self._frozen = tuple(f for f, moves in zip(self.layout.parameters, trains, strict=True) if not moves)
        # (Below compiled code there are no operations of torch's to be recorded.)
        most_shapes = 0 if self.compiled else MOST_SHAPES
        self._gradients = Captured(lambda: self._workers.own(self._make_gradients), most_shapes)

    def _make_module(self) -> nn.Module:
        return bare_module(self.task.model, self._device).train()

    def _make_gradients(self) -> Function:
        given = self.task, self._make_module(), self._data, self._trained
        return gradient_function(*given, nodes=self.nodes, compiled=self.compiled)

    def forms(self) -> dict[str, int]:
        """How gradients were computed; see :meth:`~gossamer.learning.capture.Captured.forms`."""
        return {"given to torch.compile": 1} if self.compiled else self._gradients.forms()

    @abstractmethod
    def train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        """Run every job's steps; results in the jobs' order."""

    @abstractmethod
    def gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]:
        """Every job's gradient, in the jobs' order."""

    def apply(self, job: ApplyJob) -> TrainResult:
        """Take an optimizer step; without a loss."""
        parameters = self.rows.fresh()
        state = {name: value.clone() for name, value in job.state.items()}
        self.step(parameters, job.gradient.clone(), state, job.lr, job.start.parameters)
        return TrainResult(Model(parameters, job.start.buffers), state, float("nan"))

    def step(
        self, parameters: Tensor, gradient: Tensor, state: State, lr: float, start: Tensor | None = None
    ) -> None:
        """One optimizer step of parameters [..., P], from ``start`` if it is given. Frozen parameters stay as they are, also
        under weight decay, which needs no gradient."""
        kept = [field.of(parameters if start is None else start).clone() for field in self._frozen]
        self.optimizer.step(parameters, gradient, state, lr, start)
        for field, value in zip(self._frozen, kept, strict=True):
            field.of(parameters).copy_(value)


class SequentialTrainer(Trainer):
    """One node at a time, on each worker."""

    name = "sequential"
    _draws: bool | None = None

    def train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        return self._share(self._train, jobs)

    def gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]:
        return self._share(self._gradient, jobs)

    def _share(self, run: Callable[[Function, J], R], jobs: Sequence[J]) -> list[R]:
        if self._draws is None and jobs:
            # The first job shows whether the model draws random numbers.
            torch.manual_seed(jobs[0].seed)
            before = torch.get_rng_state()
            first = run(self._gradients, jobs[0])
            self._draws = not torch.equal(before, torch.get_rng_state())
            return [first, *self._share(run, jobs[1:])]
        if not self._draws:
            return self._workers.map(lambda job: run(self._gradients, job), jobs)
        function = self._workers.own(self._make_gradients)
        results = []
        for job in jobs:  # torch has one generator for all threads
            torch.manual_seed(job.seed)
            results.append(run(function, job))
            self._workers.between()
        return results

    def _gradient(self, function: Function, job: GradientJob) -> Float[Tensor, " params"]:
        at = (vector.to(self._device, copy=True) for vector in job.at)  # a model may write them
        _, _, gradient = function(*at, job.batch)
        return self.rows.fresh().copy_(gradient)

    def _train(self, function: Function, job: TrainJob) -> TrainResult:
        def copied(value: Tensor) -> Tensor:  # a counter stays on the CPU
            return self.rows.fresh().copy_(value) if len(value) == self.rows.length else value.clone()

        result, ended = self.rows.fresh(), {name: copied(value) for name, value in job.state.items()}
        # These are copies if the store is on another device than the trainer, else the rows themselves.
        start, buffers = job.start.parameters.to(self._device), job.start.buffers.to(self._device)
        parameters = result if result.device == start.device else torch.empty_like(start)
        state = {
            name: value.to(self._device) if len(value) == self.rows.length else value
            for name, value in ended.items()
        }
        first = first_step_at(function, start, parameters, buffers, job.batches)
        losses = 0.0
        for batch in job.batches:
            loss, buffers, gradient = function(parameters if first is None else first, buffers, batch)
            losses += float(loss)  # now, since it may be a view of memory that the step writes
            self.step(parameters, gradient, state, job.lr, first)
            first = None
        if parameters is not result:
            result.copy_(parameters)
            for name, value in state.items():
                ended[name].copy_(value)
        return TrainResult(Model(result, buffers.to(result.device)), ended, losses / max(len(job.batches), 1))


class CompiledTrainer(SequentialTrainer):
    """One node at a time, with the loss through torch.compile: for models whose steps gain more than the compilation takes,
    on machines with a C++ compiler. Its bits differ from those of the other trainers."""

    name = "compiled"
    compiled = True


def first_step_at(
    function: Function, start: Tensor, parameters: Tensor, buffers: Tensor, batches: Sequence[Tensor]
) -> Tensor | None:
    """The vector from which the first step starts: ``start`` itself if the step is known only to read it. Else its values are
    copied to the parameters and the result is None, as for later steps."""
    if batches and isinstance(function, Captured) and function.only_reads(start, buffers, batches[0]):
        return start
    parameters.copy_(start)
    return None
