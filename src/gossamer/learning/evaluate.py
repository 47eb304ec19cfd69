"""Evaluation: loss and metrics of a model on a keyed sample of the test set (or of a node's training
samples)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.func import functional_call

from gossamer.learning.capture import Captured, Function
from gossamer.learning.gradients import channels_last
from gossamer.learning.parameters import Layout, bare_module, named_buffers, named_parameters
from gossamer.learning.workers import Workers
from gossamer.messages import Model
from gossamer.randomness import generator
from gossamer.tasks.task import RootMean, Task

BATCH = 100
"""Samples a forward pass: large enough to amortise calls, small enough that activations stay in the cache."""


class Evaluator:
    """Judges models; the test sample is drawn and laid out once.

    Args:
        task: gives test data, loss and metrics.
        seed: the experiment's seed.
        samples: how many test samples to use; None is all.
        device: where it computes.
        workers: the threads that may call it at the same time, each with a module of its own.
    """

    def __init__(
        self,
        task: Task,
        seed: int,
        samples: int | None = None,
        device: torch.device | str = "cpu",
        workers: Workers | None = None,
    ) -> None:
        self._task = task
        self._device = device
        self._workers = workers or Workers(1)
        inputs, targets = task.test
        if samples is not None and samples < len(inputs):
            chosen = np.sort(generator(seed, "evaluation").choice(len(inputs), samples, replace=False))
            inputs, targets = inputs[torch.from_numpy(chosen)], targets[torch.from_numpy(chosen)]
        measures = {"loss": task.loss, **task.metrics}
        self._roots = {name for name, measure in measures.items() if isinstance(measure, RootMean)}
        self._measures = {
            name: measure.mean if isinstance(measure, RootMean) else measure
            for name, measure in measures.items()
        }
        self._means = Captured(lambda: self._workers.own(self._make_means))
        self._inputs, self._targets = channels_last(inputs.to(device)), targets.to(device)

    @property
    def samples(self) -> int:
        """Number of test samples in use."""
        return len(self._inputs)

    def test(self, model: Model) -> dict[str, float]:
        """``loss`` and every metric of the task: means over the test sample, and roots of such means."""
        return self._evaluate(model, self._inputs, self._targets)

    def train(self, model: Model, samples: Int[np.ndarray, " n"]) -> dict[str, float]:
        """The same over some training samples, given by their indices [n]."""
        chosen = torch.from_numpy(samples)
        inputs, targets = self._task.train
        device = self._inputs.device
        return self._evaluate(model, inputs[chosen].to(device), targets[chosen].to(device))

    def rehearse(self, *models: Model) -> None:
        """Have the passes of :meth:`test` recorded, if two models or more are given, on as few samples as that takes."""
        rest = self.samples % BATCH
        for model in models:
            for end in (slice(BATCH), slice(self.samples - rest, self.samples)):
                self._evaluate(
                    model, self._inputs[end], self._targets[end]
                )  # (nothing, where there is no rest)

    def _evaluate(self, model: Model, inputs: Tensor, targets: Tensor) -> dict[str, float]:
        totals = [0.0] * len(self._measures)
        parameters, buffers = (
            vector.to(self._device, copy=True) for vector in model
        )  # a model may write them
        with torch.no_grad():
            for x, y in _batches(inputs, targets):
                for number, mean in enumerate(self._means(parameters, buffers, x, y)):
                    totals[number] += float(mean) * len(x)
        means = [total / max(len(inputs), 1) for total in totals]
        return {
            name: math.sqrt(mean) if name in self._roots else mean
            for name, mean in zip(self._measures, means, strict=True)
        }

    def _make_means(self) -> Function:
        """``(parameters [P], buffers [B], inputs, targets) -> the mean of each measure``."""
        module = bare_module(self._task.model, self._device).eval()
        layout = Layout.of(module)

        def means(parameters: Tensor, buffers: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            named = named_parameters(parameters, layout.parameters)
            outputs = functional_call(
                module, (named, named_buffers(buffers, layout, module)), (channels_last(x),)
            )
            # (A user's metric may also give a plain number.)
            return tuple(torch.as_tensor(measure(outputs, y)) for measure in self._measures.values())

        return means


def _batches(inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(inputs), BATCH):
        yield inputs[start : start + BATCH], targets[start : start + BATCH]
