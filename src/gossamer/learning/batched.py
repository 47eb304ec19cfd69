"""The trainer that takes a step of many nodes at once: ``vmap`` of the loss over stacked parameters.

The nodes are cut into chunks that stay in a core's cache; a chunk is computed by one worker, so that results
don't depend on the number of workers. For small models ``vmap`` itself takes longer than the tensor operations that
it comes down to. So in a run that is long enough they are traced, once for each shape, and run alone from then
on; they are the same operations with the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, vmap

from gossamer.errors import BadInput
from gossamer.learning.optimizer import Optimizer
from gossamer.learning.parameters import Layout
from gossamer.learning.rows import Rows
from gossamer.learning.trainer import GradientJob, Trainer, TrainJob, TrainResult
from gossamer.learning.workers import Workers
from gossamer.messages import Model
from gossamer.tasks.task import Task

CHUNK_BYTES = 8 << 20
"""Parameters of the nodes of a chunk, at most (one node at least)."""
MAX_CHUNK = 256
"""Nodes in a chunk, at most."""
TRACE_AFTER_S = 3.0
"""Seconds of steps after which tracing (which loads torch's compiler first) is taken to be worth it."""

Gradients = Callable[..., tuple[dict[str, Tensor], Tensor]]


class BatchedTrainer(Trainer):
    """Many nodes at once.

    Jobs are grouped by their number of steps, batch size and learning rate; a group is cut into chunks.

    Raises:
        BadInput: for models with dropout, whose draws would depend on which nodes share a batch.
    """

    name = "batched"

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        rows: Rows,
        device: torch.device | str = "cpu",
        workers: Workers | None = None,
    ) -> None:
        super().__init__(task, optimizer, rows, device, workers)
        if not can_batch(self.flat.module):
            raise BadInput(
                "engine.trainer: 'batched' can't keep dropout's draws apart by node; accepted: sequential"
            )
        self._frozen = self.flat.frozen
        self._trained = [field for field in self.layout.parameters if field not in self._frozen]
        self._chunk = _power_below(min(max(CHUNK_BYTES // (4 * self.layout.size), 1), MAX_CHUNK))
        self._seconds = 0.0
        self._traces: dict[Hashable, Gradients] = {}
        # What a forward pass writes into buffers is not traced.
        self._traceable = not self.layout.buffers

    def _make_loss(self) -> Callable[..., Tensor]:
        """One node's loss as a function of its parameters; the module is one thread's own."""
        module, loss = self._make_flat().module, self.task.loss

        def node_loss(
            trained: dict[str, Tensor],
            frozen: dict[str, Tensor],
            buffers: dict[str, Tensor],
            inputs: Tensor,
            targets: Tensor,
        ) -> Tensor:
            outputs: Tensor = functional_call(module, (trained, frozen, buffers), (inputs,))
            return loss(outputs, targets)

        return node_loss

    def _make_gradients(self) -> Gradients:
        """The stacked gradients, and losses, as a function of stacked parameters."""
        losses_of = vmap(self._make_loss())

        def gradients(trained: dict[str, Tensor], *rest: Any) -> tuple[dict[str, Tensor], Tensor]:
            leaves = {name: value.detach().requires_grad_() for name, value in trained.items()}
            with torch.enable_grad():
                losses = losses_of(leaves, *rest)
                # No node's loss depends on another's parameters: the gradient of the sum is all of theirs.
                # One that the loss does not use has a gradient of zeros.
                stacked = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
            return dict(zip(leaves, stacked, strict=True)), losses

        return gradients

    def train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        keys = [(len(job.batches), *map(len, job.batches), job.lr, *job.state) for job in jobs]
        return self._share(self._train, jobs, keys)

    def gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]:
        return self._share(self._gradient, jobs, [(len(job.batch),) for job in jobs])

    def _share(
        self, run: Callable[[Sequence[Any]], list[Any]], jobs: Sequence[Any], keys: Sequence[Hashable]
    ) -> list[Any]:
        chunks = list(_chunks(_groups(keys), self._chunk))
        work = [[jobs[index] for index in chunk] for chunk in chunks]
        start = time.perf_counter()
        done: dict[int, list[Any]] = {}
        if self._traceable and self._seconds > TRACE_AFTER_S:
            # Tracing is not for several threads: the first chunk of each shape is run here.
            shapes = {
                (len(chunk), keys[chunk[0]]): number for number, chunk in reversed([*enumerate(chunks)])
            }
            done = {number: run(work[number]) for number in shapes.values()}
        left = [number for number in range(len(chunks)) if number not in done]
        done |= zip(left, self._workers.map(lambda number: run(work[number]), left), strict=True)
        self._seconds += time.perf_counter() - start
        results: list[Any] = [None] * len(jobs)
        for number, chunk in enumerate(chunks):
            for index, result in zip(chunk, done[number], strict=True):
                results[index] = result
        return results

    def _gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]:
        results, flat = self.rows.block(len(jobs))
        parameters = self.rows.stack([job.at.parameters for job in jobs])
        buffers = torch.stack([job.at.buffers for job in jobs])
        gradients, _ = self._step(parameters, buffers, torch.stack([job.batch for job in jobs]))
        self._flatten(gradients, flat)
        return self.rows.filled(results, flat)

    def _train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        results, parameters = self.rows.block(len(jobs))
        self.rows.stack([job.start.parameters for job in jobs], out=parameters)
        buffers = torch.stack([job.start.buffers for job in jobs])
        state = {name: torch.stack([job.state[name] for job in jobs]) for name in jobs[0].state}
        losses = torch.zeros(len(jobs), device=parameters.device)
        steps = len(jobs[0].batches)
        for step in range(steps):
            batches = torch.stack([job.batches[step] for job in jobs])
            gradients, loss = self._step(parameters, buffers, batches)
            self._optimize(parameters, gradients, state, jobs)
            losses += loss
        empty = buffers[0] if buffers.shape[1] == 0 else None
        return [
            TrainResult(
                Model(row, buffers[number].clone() if empty is None else empty),
                {name: value[number].clone() for name, value in state.items()},
                loss / max(steps, 1),
            )
            for number, (row, loss) in enumerate(
                zip(self.rows.filled(results, parameters), losses.tolist(), strict=True)
            )
        ]

    def _optimize(
        self,
        parameters: Float[Tensor, "nodes params"],
        gradients: dict[str, Tensor],
        state: dict[str, Tensor],
        jobs: Sequence[TrainJob],
    ) -> None:
        if self.optimizer.by_coordinate:
            # Field by field: the gradient need not be copied into one vector.
            for field in self._trained:
                states = {name: field.of(value) for name, value in state.items()}
                self.optimizer.step(field.of(parameters), gradients[field.name], states, jobs[0].lr)
            return
        flat = torch.empty(parameters.shape, device=parameters.device)
        self._flatten(gradients, flat)
        self.optimizer.step(parameters, flat, state, jobs[0].lr)
        for number, job in enumerate(jobs if self._frozen else ()):
            self.keep_frozen(parameters[number], job.start.parameters)

    def _flatten(self, gradients: dict[str, Tensor], out: Float[Tensor, "nodes params"]) -> None:
        for field in self._trained:
            field.of(out).copy_(gradients[field.name])
        for field in self._frozen:
            field.of(out).zero_()

    def _step(
        self,
        parameters: Float[Tensor, "nodes params"],
        buffers: Float[Tensor, "nodes buffers"],
        batches: Int[Tensor, "nodes batch"],
    ) -> tuple[dict[str, Tensor], Float[Tensor, " nodes"]]:
        trained = {field.name: field.of(parameters) for field in self._trained}
        frozen = {field.name: field.of(parameters) for field in self._frozen}
        named_buffers = unflatten_buffers(buffers, self.layout, self.flat.module)
        arguments = (trained, frozen, named_buffers, self.inputs[batches], self.targets[batches])
        gradients, loss = self._gradients(arguments)(*arguments)
        for field in self.layout.buffers:  # written in place by the forward pass
            field.of(buffers).copy_(named_buffers[field.name])
        return gradients, loss.detach()

    def _gradients(self, arguments: tuple[Any, ...]) -> Gradients:
        if not self._traceable or self._seconds <= TRACE_AFTER_S:
            return self._workers.own(self._make_gradients)
        tensors = [*arguments[0].values(), *arguments[1].values(), *arguments[3:]]
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        if key not in self._traces:
            from torch.fx.experimental.proxy_tensor import make_fx

            self._traces[key] = make_fx(self._make_gradients())(*arguments)
        return self._traces[key]


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


def _groups(keys: Sequence[Hashable]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _chunks(groups: list[list[int]], largest: int) -> Iterator[list[int]]:
    """Cut groups into chunks whose sizes are powers of two, so that few shapes are ever traced."""
    for group in groups:
        start = 0
        while start < len(group):
            size = min(largest, _power_below(len(group) - start))
            yield group[start : start + size]
            start += size


def _power_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)
