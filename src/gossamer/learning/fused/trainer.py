"""The fused trainer: the steps of a node in one call of compiled code, directly on the store's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from gossamer.learning.fused import kernels
from gossamer.learning.fused.plan import plan_of
from gossamer.learning.optimizer import SGD, Adam, AdamW, Optimizer
from gossamer.learning.parameters import is_finite
from gossamer.learning.rows import ALIGNMENT
from gossamer.learning.trainer import GradientJob, Trainer, TrainJob, TrainResult
from gossamer.messages.tags import Model

AT_ONCE = 32
"""Maximum number of jobs in one call of the kernels. A call costs about as much time as one step of logistic regression."""


class FusedTrainer(Trainer):
    """Trains one node at a time on each thread, for models that the kernels support. Unsupported optimizers take
    their steps in torch. The bits do not depend on the number of threads or nodes.

    Raises:
        Unknown: if the kernels do not support the model, the loss or the data."""

    name = "fused"
    evaluates_many = True

    def _prepare(self) -> None:
        self._plan, self._rule = plan_of(self.task, self.module), _rule_of(self.optimizer)
        self._memory = self.rows.memory.reshape(-1)
        inputs, targets = (part.contiguous().view(-1).numpy() for part in self.task.train)
        classes, unused = self._plan.loss == kernels.CROSS_ENTROPY, np.zeros(1)
        labels = targets if classes else unused.astype(np.int64)
        self._samples = inputs, labels, unused.astype(np.float32) if classes else targets
        cache = kernels.train.stats.cache_path
        self.compiles_first = not (cache and any(Path(cache).glob("kernels.train-*.nbi")))

    def train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        if self._rule is None:
            return self._seeded(self._step_in_torch, jobs)
        stepped = iter(self._share(self._train, [job for job in jobs if job.batches]))
        return [next(stepped) if job.batches else self._step_in_torch(job) for job in jobs]

    def gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]:
        return self._share(
            lambda part: [self._gradient(job.at.parameters, job.batch)[0] for job in part], jobs
        )

    def _share(self, run: Callable[[Any], list[Any]], jobs: Sequence[Any]) -> list[Any]:
        size = max(1, min(AT_ONCE, len(jobs) // (2 * self._threads.count)))
        parts = [jobs[start : start + size] for start in range(0, len(jobs), size)]
        return list(chain(*self._threads.map(run, parts)))

    def _train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        assert self._rule is not None
        names, rule = self._rule
        vectors, results, taken = [], [], []
        for job in jobs:
            result, state = self.rows.fresh(), dict(job.state)
            pairs = [self.rows.store(job.start.parameters), result]
            for name in names:
                state[name] = self.rows.fresh()
                pairs += [self.rows.store(job.state[name]), state[name]]
            if "steps" in state:
                state["steps"] = job.state["steps"] + len(job.batches)
            taken.append(int(job.state["steps"]) if "steps" in state else 0)
            vectors.append(pairs)
            results.append((Model(result, job.start.buffers), state))
        rates, batches = [job.lr for job in jobs], [job.batches for job in jobs]
        losses = self._run(rule, vectors, batches, rates, taken)
        for model, _ in results:  # checked now, while the vector is in this thread's cache
            is_finite(model.parameters)
        return [TrainResult(*result, loss) for result, loss in zip(results, losses, strict=True)]

    def _gradient(self, at: Tensor, batch: Tensor) -> tuple[Tensor, float]:
        gradient = self.rows.fresh()
        vectors = [[self.rows.store(at), gradient]]
        [loss] = self._run([kernels.GRADIENT], vectors, [[batch]], [0.0], [0])
        return gradient, loss

    def _step_in_torch(self, job: TrainJob) -> TrainResult:
        """The steps of a node with an optimizer that the kernels do not support."""
        state = {name: value.clone() for name, value in job.state.items()}
        parameters, losses = self.rows.fresh().copy_(job.start.parameters), 0.0
        for number, batch in enumerate(job.batches):
            gradient, loss = self._gradient(parameters, batch)
            self._optimize(parameters, gradient, state, job.lr, job.seed, number)
            losses += loss
        return TrainResult(Model(parameters, job.start.buffers), state, losses / max(len(job.batches), 1))

    def _run(
        self,
        rule: Sequence[float],
        vectors: Sequence[Sequence[Tensor]],
        batches: Sequence[Sequence[Tensor]],
        rates: Sequence[float],
        taken: Sequence[int],
    ) -> list[float]:
        """Take the steps of some nodes, each given by its rows before and after, batches, learning rate and
        number of previous steps. Returns the mean losses."""
        base, jobs = self._memory.ctypes.data, np.zeros((len(vectors), 8), dtype=np.int64)
        for job, rows in zip(jobs, vectors, strict=True):
            job[: len(rows)] = [(row.data_ptr() - base) // 4 for row in rows]
        jobs[:, kernels.STEPS], jobs[:, kernels.TAKEN] = [len(steps) for steps in batches], taken
        arrays = [batch.numpy() for steps in batches for batch in steps]
        samples, sizes = np.concatenate(arrays), np.array([len(batch) for batch in arrays])
        if len(samples) and (samples.min() < 0 or samples.max() >= self.task.samples):
            actual = f"{samples.min()} to {samples.max()}"
            raise IndexError(f"samples {actual}: out of bounds, there are {self.task.samples}")
        options, plan, losses = np.zeros(10), self._plan, np.zeros(len(vectors))
        options[kernels.CLIP] = np.inf if self.optimizer.clip_value is None else self.optimizer.clip_value
        options[: len(rule)] = rule
        work = jobs, np.array(rates, dtype=np.float64), sizes, samples
        model, loss = (plan.layers, plan.epsilons, plan.taps, plan.spaces), (plan.loss, plan.factor)
        space = self._threads.own(_ActivationMemory).of(plan.memory(int(sizes.max())))
        kernels.train(self._memory, work, self._samples, loss, options, model, space, losses)
        return list(losses.tolist())


class _ActivationMemory:
    """A thread's memory for activations."""

    def __init__(self) -> None:
        self._values = np.empty(0, dtype=np.float32)

    def of(self, size: int) -> Float[np.ndarray, " size"]:
        if len(self._values) < size:
            padded = np.empty(size + ALIGNMENT // 4, dtype=np.float32)
            start = -padded.ctypes.data % ALIGNMENT // 4
            self._values = padded[start : start + size]
        return self._values


def _rule_of(optimizer: Optimizer) -> tuple[list[str], list[float]] | None:
    """The names of an optimizer's vectors and its options, in the kernels' order; None if they do not support
    it."""
    if optimizer.clip_norm is not None:
        return None
    if type(optimizer) is SGD:
        options = [optimizer.momentum, optimizer.dampening, float(optimizer.nesterov), optimizer.weight_decay]
        return ["velocity"] if optimizer.momentum else [], [kernels.SGD, *options]
    if type(optimizer) in (Adam, AdamW) and isinstance(optimizer, Adam) and not optimizer.amsgrad:
        moments = [optimizer.beta1, optimizer.beta2, optimizer.eps, float(isinstance(optimizer, AdamW))]
        return ["first", "second"], [kernels.ADAM, 0, 0, 0, optimizer.weight_decay, *moments]
    return None
