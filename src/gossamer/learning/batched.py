"""The trainer that takes a step of many nodes at once: ``vmap`` of the loss over stacked parameters.

The nodes are split into chunks that fit into a core's cache. One worker computes a chunk, so that results do not depend on
the number of workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gossamer.errors import BadInput
from gossamer.learning.optimizer import State
from gossamer.learning.trainer import GradientJob, Trainer, TrainJob, TrainResult, first_step_at
from gossamer.learning.workers import chunks, power_below
from gossamer.messages.tags import Model

LIMITS = {"cpu": (8 << 20, 256), "gpu": (1 << 30, 8192)}
"""The most bytes of parameters in a chunk (but at least one node), and the most nodes. On a CPU a chunk fits into the cache;
on a GPU each kernel is launched once for a chunk."""


class BatchedTrainer(Trainer):
    """Many nodes at once.

    Jobs are grouped by number of steps, batch size and learning rate; a group is split into chunks.

    Raises:
        BadInput: for models with dropout, whose draws would depend on the nodes that share a batch, and for torch's
            recurrent layers, which can't be computed for many nodes at once.
    """

    name = "batched"
    nodes = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if problem := _hindrance(self.module):
            raise BadInput(f"engine.trainer: 'batched' can't {problem}; accepted: sequential, auto")
        largest_bytes, most = LIMITS["cpu" if self.device_type == "cpu" else "gpu"]
        self._chunk = power_below(min(max(largest_bytes // (4 * self.layout.size), 1), most))

    def train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        keys = [(len(job.batches), *map(len, job.batches), job.lr, *job.state) for job in jobs]
        return self._share(self._train, jobs, keys)

    def gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]:
        return self._share(self._gradient, jobs, [(len(job.batch),) for job in jobs])

    def _share(
        self, run: Callable[[Sequence[Any]], list[Any]], jobs: Sequence[Any], keys: Sequence[Hashable]
    ) -> list[Any]:
        groups: defaultdict[Hashable, list[int]] = defaultdict(list)
        for index, key in enumerate(keys):
            groups[key].append(index)
        split = list(chunks(groups.values(), self._chunk))
        done = self._workers.map(lambda chunk: run([jobs[index] for index in chunk]), split)
        found = dict(
            zip((i for chunk in split for i in chunk), (r for some in done for r in some), strict=True)
        )
        return [found[index] for index in range(len(jobs))]

    def _gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]:
        results, flat = self._block(len(jobs))
        parameters, buffers = self._stacked([job.at for job in jobs])
        batches = torch.stack([job.batch for job in jobs])
        if not self._gradients.only_reads(parameters, buffers, batches):
            parameters = parameters.clone()
        _, _, *gradients = self._gradients(parameters, buffers, batches)
        return self.rows.filled(results, self._flatten(gradients, flat))

    def _train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        results, parameters = self._block(len(jobs))
        start, buffers = self._stacked([job.start for job in jobs])
        states = {name: self._writable([job.state[name] for job in jobs]) for name in jobs[0].state}
        state = {name: matrix for name, (_, matrix) in states.items()}
        losses = torch.zeros(len(jobs), device=parameters.device)
        batches = [torch.stack(step) for step in zip(*(job.batches for job in jobs), strict=True)]
        first = first_step_at(self._gradients, start, parameters, buffers, batches)
        for batch in batches:
            at = parameters if first is None else first
            loss, buffers, *gradients = self._gradients(at, buffers, batch)
            losses += loss
            self._optimize(parameters, gradients, state, jobs[0].lr, first)
            first = None
        ended = {name: self.rows.filled(rows, matrix) for name, (rows, matrix) in states.items()}
        rows = self.rows.filled(results, parameters)
        # (Without buffers, all nodes share the empty vector.)
        kept = [
            each.to(rows[0].device, copy=True) if len(each) else jobs[0].start.buffers for each in buffers
        ]
        return [
            TrainResult(
                Model(row, kept[number]),
                {name: of[number] for name, of in ended.items()},
                loss / max(len(batches), 1),
            )
            for number, (row, loss) in enumerate(zip(rows, losses.tolist(), strict=True))
        ]

    def _optimize(
        self, parameters: Tensor, gradients: Sequence[Tensor], state: State, lr: float, start: Tensor | None
    ) -> None:
        """:meth:`step` with the gradients of the trained fields."""
        if not self.optimizer.by_coordinate:
            gradient = self._flatten(gradients, torch.empty_like(parameters))
            self.step(parameters, gradient, state, lr, start)
            return
        # Field by field, which saves copying the gradients into one vector.
        for field, gradient in zip(self._trained, gradients, strict=True):
            states = {name: field.of(value) for name, value in state.items()}
            at = None if start is None else field.of(start)
            self.optimizer.step(field.of(parameters), gradient, states, lr, at)
        if start is not None:
            for field in self._frozen:
                field.of(parameters).copy_(field.of(start))

    def _flatten(self, gradients: Sequence[Tensor], out: Tensor) -> Tensor:
        for field, gradient in zip(self._trained, gradients, strict=True):
            field.of(out).copy_(gradient)
        for field in self._frozen:
            field.of(out).zero_()
        return out

    def _block(self, count: int) -> tuple[list[Tensor], Float[Tensor, "nodes params"]]:
        """New rows, and a matrix of their values on this trainer's device."""
        rows, matrix = self.rows.block(count)
        if matrix.device.type != self.device_type:
            matrix = torch.empty_like(matrix, device=self._device)
        return rows, matrix

    def _stacked(self, models: Sequence[Model]) -> tuple[Tensor, Tensor]:
        """Parameters [nodes, P] and buffers [nodes, B] on this trainer's device, to be read only."""
        parameters = self.rows.stack([model.parameters for model in models])
        buffers = torch.stack([model.buffers for model in models])
        return parameters.to(self._device), buffers.to(self._device)

    def _writable(self, vectors: Sequence[Tensor]) -> tuple[list[Tensor], Float[Tensor, "nodes values"]]:
        """Optimizer state: new rows (or new counters) and a matrix of their values, which steps write."""
        if len(vectors[0]) != self.rows.length:
            return [torch.empty_like(vector) for vector in vectors], torch.stack(list(vectors))
        rows, matrix = self._block(len(vectors))
        return rows, matrix.copy_(self.rows.stack(vectors))


def can_batch(module: nn.Module) -> bool:
    """Whether the batched trainer can run a module, judging by its layers."""
    return _hindrance(module) is None


def _hindrance(module: nn.Module) -> str | None:
    """The reason why the batched trainer can't run a module, or None."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            return "keep dropout's draws apart by node"
        if isinstance(layer, nn.RNNBase):  # its kernels take the weights of one model
            return f"take a step of {type(layer).__name__} layers for many nodes at once"
    return None
