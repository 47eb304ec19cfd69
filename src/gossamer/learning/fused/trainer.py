"""The fused trainer: the steps of a node in one call of compiled code, straight on the store's rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from gossamer.errors import BadInput
from gossamer.learning.fused import kernels
from gossamer.learning.fused.plan import Unknown, plan_of
from gossamer.learning.optimizer import SGD, Adam, AdamW, Optimizer
from gossamer.learning.rows import ALIGNMENT, Rows
from gossamer.learning.trainer import GradientJob, Trainer, TrainJob, TrainResult
from gossamer.learning.workers import Workers
from gossamer.messages.tags import Model
from gossamer.tasks.task import Task

AT_ONCE = 8
"""Jobs in one call, at most: the call costs as much as a step of logistic regression."""


class FusedTrainer(Trainer):
    """One node at a time on each worker, for models that the kernels know; other optimizers than SGD, Adam and AdamW step in
    torch. Its bits are the same with any number of workers or nodes, and on every machine.

    Raises:
        BadInput: if the kernels do not know the model, the loss or the data."""

    name = "fused"

    def __init__(self, task: Task, optimizer: Optimizer, rows: Rows, workers: Workers | None = None) -> None:
        super().__init__(task, optimizer, rows, workers)
        if rows.device.type != "cpu":
            raise BadInput(f"engine.device: {rows.device}, with the trainer 'fused'; accepted: cpu")
        try:
            self._plan = plan_of(task, self.module)
        except Unknown as reason:
            raise BadInput(
                f"engine.trainer: 'fused' does not know {reason}; accepted: auto, sequential"
            ) from None
        self._rule = rule_of(optimizer)
        stride = rows.matrix.stride(0)
        self._stride, whole = stride, stride * len(rows.matrix)
        self._memory = rows.matrix.as_strided((whole,), (1,)).numpy()
        inputs, targets = task.train
        classes = self._plan.loss == kernels.CROSS_ENTROPY
        self._labels = targets.contiguous().numpy() if classes else np.zeros(1, dtype=np.int64)
        self._values = np.zeros(1, dtype=np.float32) if classes else targets.contiguous().view(-1).numpy()
        self._inputs = inputs.contiguous().view(-1).numpy()

    def forms(self) -> dict[str, int]:
        """How gradients were computed."""
        return {"fused": 1}

    def train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        if self._rule is None:
            return self._workers.map(self._step_in_torch, jobs)
        return self._share(self._train, jobs)

    def gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]:
        return self._share(self._some_gradients, jobs)

    def _share(self, run: Any, jobs: Sequence[Any]) -> list[Any]:
        size = max(1, min(AT_ONCE, len(jobs) // (2 * self._workers.count)))
        parts = [jobs[start : start + size] for start in range(0, len(jobs), size)]
        return list(chain(*self._workers.map(run, parts)))

    def _some_gradients(self, jobs: Sequence[GradientJob]) -> list[Tensor]:
        results = [self.rows.fresh() for _ in jobs]
        steps = [
            ([job.at.parameters, result], [job.batch], 0.0, 0)
            for job, result in zip(jobs, results, strict=True)
        ]
        self._run(steps, [kernels.GRADIENT])
        return results

    def _train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        assert self._rule is not None
        vectors, rule = self._rule
        steps, results = [], []
        for job in jobs:
            result, state = (
                self.rows.fresh(),
                {name: value.clone() for name, value in job.state.items() if name == "steps"},
            )
            moved = [job.start.parameters, result]
            for name in vectors:
                state[name] = self.rows.fresh()
                moved += [job.state[name], state[name]]
            taken = int(job.state["steps"]) if "steps" in state else 0
            steps.append((moved, job.batches, job.lr, taken))
            if "steps" in state:
                state["steps"] += len(job.batches)
            results.append((Model(result, job.start.buffers), {name: state[name] for name in job.state}))
        losses = self._run(steps, rule)
        return [TrainResult(*result, loss) for result, loss in zip(results, losses, strict=True)]

    def _step_in_torch(self, job: TrainJob) -> TrainResult:
        """The steps of a node whose optimizer the kernels do not have."""
        state = {name: value.clone() for name, value in job.state.items()}
        parameters, gradient, losses = self.rows.fresh(), self.rows.fresh(), 0.0
        start = job.start.parameters
        for batch in job.batches:
            [loss] = self._run([([start, gradient], [batch], 0.0, 0)], [kernels.GRADIENT])
            self.optimizer.step(parameters, gradient, state, job.lr, start)
            start, losses = parameters, losses + loss
        return TrainResult(Model(parameters, job.start.buffers), state, losses / max(len(job.batches), 1))

    def _run(
        self, steps: Sequence[tuple[list[Tensor], Sequence[Tensor], float, int]], rule: Sequence[float]
    ) -> list[float]:
        """Steps of some nodes, each with vectors before and after, batches, learning rate and the number of steps before;
        gives the mean losses."""
        jobs = np.zeros((len(steps), 8), dtype=np.int64)
        kept = []  # copies of vectors that are no rows
        for job, (vectors, batches, _, taken) in zip(jobs, steps, strict=True):
            stored = [self.rows.store(vector) for vector in vectors]
            kept.append(stored)
            numbers = self.rows.numbers(stored)
            assert numbers is not None
            job[: len(stored)] = numbers
            job[kernels.STEPS], job[kernels.TAKEN] = len(batches), taken
        jobs[:, : kernels.STEPS] *= self._stride
        drawn = [batch.numpy() for _, batches, _, _ in steps for batch in batches]
        samples = np.concatenate(drawn)
        if samples.min() < 0 or samples.max() >= self.task.samples:
            raise IndexError(
                f"sample {samples.min()} or {samples.max()} is out of bounds: there are {self.task.samples}"
            )
        sizes = np.array([len(batch) for batch in drawn])
        options = np.zeros(10)
        options[kernels.CLIP] = self.optimizer.clip_value or np.inf
        options[: len(rule)] = rule
        losses, plan = np.zeros(len(steps)), self._plan
        space = self._workers.own(_Space).of(plan.memory(int(sizes.max())))
        kernels.train(
            self._memory,
            jobs,
            np.array([lr for _, _, lr, _ in steps]),
            sizes,
            samples,
            self._inputs,
            self._labels,
            self._values,
            plan.loss,
            plan.factor,
            options,
            plan.layers,
            plan.epsilons,
            plan.taps,
            plan.spaces,
            space,
            losses,
        )
        return list(losses.tolist())


class _Space:
    """A thread's memory for activations."""

    def __init__(self) -> None:
        self._values = np.empty(0, dtype=np.float32)

    def of(self, size: int) -> Float[np.ndarray, " size"]:
        if len(self._values) < size:
            wider = np.empty(size + ALIGNMENT // 4, dtype=np.float32)
            start = -wider.ctypes.data % ALIGNMENT // 4
            self._values = wider[start : start + size]
        return self._values


def rule_of(optimizer: Optimizer) -> tuple[list[str], list[float]] | None:
    """The names of an optimizer's vectors and its options in the kernels' order, or None if the kernels do not have it."""
    if optimizer.clip_norm is not None:
        return None
    clip = optimizer.clip_value or np.inf
    if type(optimizer) is SGD:
        momentum = [optimizer.momentum, optimizer.dampening, float(optimizer.nesterov)]
        names = ["velocity"] if optimizer.momentum else []
        return names, [kernels.SGD, *momentum, optimizer.weight_decay, clip]
    if type(optimizer) in (Adam, AdamW) and isinstance(optimizer, Adam) and not optimizer.amsgrad:
        moments = [optimizer.beta1, optimizer.beta2, optimizer.eps, float(isinstance(optimizer, AdamW))]
        return ["first", "second"], [kernels.ADAM, 0, 0, 0, optimizer.weight_decay, clip, *moments]
    return None
