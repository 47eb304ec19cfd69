"""Trainers: local steps of one node after the other, or of many nodes at once.

A trainer is a pure function of its jobs: it reads snapshots and writes fresh vectors. Both trainers compute
the same mathematics; their bits differ (matrix kernels round differently when they are batched).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from gossamer.errors import BadInput
from gossamer.learning.optimizer import Optimizer, State
from gossamer.learning.parameters import FlatModule, Layout
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


class Trainer(ABC):
    """Computes local steps and gradients.

    Args:
        task: the data, model and loss.
        optimizer: takes the steps.
        fresh: gives a new, writable vector float32 [P] for a result.
        device: where it computes; data is moved there once.
    """

    name = ""

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        fresh: Callable[[], Tensor],
        device: torch.device | str = "cpu",
    ) -> None:
        self.task = task
        self.optimizer = optimizer
        self.fresh = fresh
        self.inputs, self.targets = (tensor.to(device) for tensor in task.train)
        self.flat = FlatModule(task.model, device)
        self.layout = self.flat.layout

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
    """One node at a time through one module whose parameters are views of a flat vector."""

    name = "sequential"

    def train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        return [self._train(job) for job in jobs]

    def gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]:
        results = []
        self.flat.module.train()
        for job in jobs:
            self.flat.load(job.at)
            torch.manual_seed(job.seed)
            self._backward(job.batch)
            results.append(self.fresh().copy_(self.flat.gradient))
        return results

    def _train(self, job: TrainJob) -> TrainResult:
        flat, optimizer = self.flat, self.optimizer
        flat.module.train()
        flat.load(job.start)
        torch.manual_seed(job.seed)
        state = {name: value.clone() for name, value in job.state.items()}
        losses = 0.0
        for batch in job.batches:
            losses += self._backward(batch)
            optimizer.step(flat.parameters, flat.gradient, state, job.lr)
            self.keep_frozen(flat.parameters, job.start.parameters)
        model = Model(self.fresh().copy_(flat.parameters), flat.buffers())
        return TrainResult(model, state, losses / max(len(job.batches), 1))

    def _backward(self, batch: Int[Tensor, " batch"]) -> float:
        self.flat.gradient.zero_()
        with torch.enable_grad():
            loss = self.task.loss(self.flat.module(channels_last(self.inputs[batch])), self.targets[batch])
            loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())


class BatchedTrainer(Trainer):
    """Many nodes at once: ``vmap`` of the loss's gradient over stacked parameters [nodes, P].

    Jobs are grouped by their number of steps, batch size and learning rate; a group is one stack.

    Raises:
        BadInput: for models with dropout, whose draws would depend on which nodes share a batch.
    """

    name = "batched"

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        fresh: Callable[[], Tensor],
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(task, optimizer, fresh, device)
        if not can_batch(self.flat.module):
            raise BadInput(
                "engine.trainer: 'batched' can't keep dropout's draws apart by node; accepted: sequential"
            )
        module, loss = self.flat.module, task.loss

        def node_loss(
            parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor
        ) -> Tensor:
            outputs: Tensor = functional_call(module, (parameters, buffers), (inputs,))
            return loss(outputs, targets)

        self._gradient = vmap(grad_and_value(node_loss))

    def train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        results: list[TrainResult | None] = [None] * len(jobs)
        for group in _groups(
            [(len(job.batches), *map(len, job.batches), job.lr, *job.state) for job in jobs]
        ):
            for index, result in zip(group, self._train([jobs[index] for index in group]), strict=True):
                results[index] = result
        return [result for result in results if result is not None]

    def gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]:
        results: list[Tensor | None] = [None] * len(jobs)
        self.flat.module.train()
        for group in _groups([(len(job.batch),) for job in jobs]):
            parameters = torch.stack([jobs[index].at.parameters for index in group])
            buffers = torch.stack([jobs[index].at.buffers for index in group])
            gradient, _ = self._step(parameters, buffers, torch.stack([jobs[index].batch for index in group]))
            for index, row in zip(group, gradient, strict=True):
                results[index] = self.fresh().copy_(row)
        return [result for result in results if result is not None]

    def _train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        self.flat.module.train()
        parameters = torch.stack([job.start.parameters for job in jobs])
        buffers = torch.stack([job.start.buffers for job in jobs])
        state = {name: torch.stack([job.state[name] for job in jobs]) for name in jobs[0].state}
        losses = torch.zeros(len(jobs), device=parameters.device)
        steps = len(jobs[0].batches)
        for step in range(steps):
            gradient, loss = self._step(parameters, buffers, torch.stack([job.batches[step] for job in jobs]))
            self.optimizer.step(parameters, gradient, state, jobs[0].lr)
            for row, job in enumerate(jobs if self.flat.frozen else ()):
                self.keep_frozen(parameters[row], job.start.parameters)
            losses += loss
        return [
            TrainResult(
                Model(self.fresh().copy_(parameters[row]), buffers[row].clone()),
                {name: value[row].clone() for name, value in state.items()},
                loss / max(steps, 1),
            )
            for row, loss in enumerate(losses.tolist())
        ]

    def _step(
        self,
        parameters: Float[Tensor, "nodes params"],
        buffers: Float[Tensor, "nodes buffers"],
        batches: Int[Tensor, "nodes batch"],
    ) -> tuple[Float[Tensor, "nodes params"], Float[Tensor, " nodes"]]:
        named_buffers = unflatten_buffers(buffers, self.layout, self.flat.module)
        gradients, loss = self._gradient(
            {field.name: field.of(parameters) for field in self.layout.parameters},
            named_buffers,
            self.inputs[batches],
            self.targets[batches],
        )
        for field in self.layout.buffers:  # written in place by the forward pass
            field.of(buffers).copy_(named_buffers[field.name])
        flat = torch.empty_like(parameters)
        for field in self.layout.parameters:
            field.of(flat).copy_(gradients[field.name])
        for field in self.flat.frozen:
            field.of(flat).zero_()
        return flat, loss.detach()


def unflatten_buffers(
    flat: Float[Tensor, "nodes buffers"], layout: Layout, module: nn.Module
) -> dict[str, Tensor]:
    """Stacked buffers by name, each in its own dtype, as new tensors that a forward pass may write."""
    return {
        field.name: field.of(flat).to(buffer.dtype, copy=True)
        for field, buffer in zip(layout.buffers, module.buffers(), strict=True)
    }


def can_batch(module: nn.Module) -> bool:
    """Whether the batched trainer can run a module: it has no layer that draws random numbers."""
    return not any(isinstance(layer, nn.modules.dropout._DropoutNd) for layer in module.modules())


def _groups(keys: Sequence[tuple[object, ...]]) -> list[list[int]]:
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, group_key in enumerate(keys):
        groups.setdefault(group_key, []).append(index)
    return list(groups.values())
