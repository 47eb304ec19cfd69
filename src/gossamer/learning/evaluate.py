"""Evaluation: loss and metrics of a model on a keyed sample of each evaluation set (or on a node's training
samples)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.func import functional_call

from gossamer.errors import GossamerError, is_own
from gossamer.learning.capture import Captured, Function
from gossamer.learning.gradients import channels_last
from gossamer.learning.parameters import Layout, bare_module, named_buffers, named_parameters
from gossamer.learning.workers import Workers
from gossamer.messages.tags import Model
from gossamer.randomness import generator
from gossamer.tasks.task import Metric, RootMean, Task

if TYPE_CHECKING:
    from gossamer.learning.batched_evaluate import BatchedEvaluator

BATCH = 100
"""Samples in a forward pass: enough to amortise calls, few enough that activations stay in the cache."""

MEAN = "the mean over the samples, one value"
"""The value of a loss or metric, in error messages."""

Found = dict[str, float]
"""Name -> value of the loss and of each metric."""


class Evaluator:
    """Evaluates models; the samples of the evaluation sets are drawn and laid out once.

    Args:
        task: has evaluation sets, loss and metrics.
        seed: the experiment's seed.
        samples: number of samples of each set to use; None is all.
        device: where it computes.
        workers: the threads that may call it at the same time, each with a separate module.

    Attributes:
        sets: evaluation set -> (inputs, targets) of its sample.
        measures: the loss and each metric, or the mean of which a metric is the root.
    """

    def __init__(
        self,
        task: Task,
        seed: int,
        samples: int | None = None,
        device: torch.device | str = "cpu",
        workers: Workers | None = None,
    ) -> None:
        self.task, self.device = task, device
        self.workers = workers or Workers(1)
        measures = {"loss": task.loss, **task.metrics}
        self._roots = {name for name, measure in measures.items() if isinstance(measure, RootMean)}
        self.measures = {
            name: measure.mean if isinstance(measure, RootMean) else measure
            for name, measure in measures.items()
        }
        self._means = Captured(lambda: self.workers.own(self._make_means))
        drawn = {name: _sample(task, name, seed, samples) for name in task.tests}
        self.sets = {name: (channels_last(x.to(device)), y.to(device)) for name, (x, y) in drawn.items()}

    def test(self, model: Model, on: str = "test") -> Found:
        """``loss`` and every metric of the task on an evaluation set: means over its sample, and roots of such means."""
        return self._evaluate(model, *self.sets[on])

    def forms(self) -> dict[str, int]:
        """How measures were computed; see :meth:`~gossamer.learning.capture.Captured.forms`."""
        return self._means.forms()

    def test_each(self, models: Sequence[Model], on: str = "test") -> list[Found | Exception]:
        """:meth:`test` of each model, shared among the workers; or the exception that the user's code raised for it."""
        return self.workers.map(lambda model: self._attempt(model, on), models)

    def columns(self, model: Model) -> Found:
        """The recorded columns ``<set>_<name>``: :meth:`test` on every evaluation set."""
        return columns({on: self.test(model, on) for on in self.sets})

    def train(self, model: Model, samples: Int[np.ndarray, " n"]) -> Found:
        """The same over some training samples, given by their indices [n]."""
        chosen = torch.from_numpy(samples)
        inputs, targets = self.task.train
        return self._evaluate(model, inputs[chosen].to(self.device), targets[chosen].to(self.device))

    def warm_up(self, *models: Model) -> None:
        """Have the passes of :meth:`test` recorded on few samples. This takes two models or more."""
        for model in models:
            for inputs, targets in self.sets.values():
                rest = len(inputs) % BATCH
                for end in (slice(BATCH), slice(len(inputs) - rest, len(inputs))):  # (empty without a rest)
                    self._evaluate(model, inputs[end], targets[end])

    def results(self, totals: Sequence[float], samples: int) -> Found:
        """The results of a model, from each measure's sum over some samples."""
        means = [total / max(samples, 1) for total in totals]
        return {
            name: math.sqrt(mean) if name in self._roots else mean
            for name, mean in zip(self.measures, means, strict=True)
        }

    def _attempt(self, model: Model, on: str) -> Found | Exception:
        try:
            return self.test(model, on)
        except Exception as error:  # noqa: BLE001 - the user's own, of any kind; the caller knows the model's node
            return error

    def _evaluate(self, model: Model, inputs: Tensor, targets: Tensor) -> Found:
        totals = [0.0] * len(self.measures)
        parameters, buffers = (
            vector.to(self.device, copy=True) for vector in model
        )  # a model may write them
        with torch.no_grad():
            for x, y in batches(inputs, targets):
                for number, mean in enumerate(self._means(parameters, buffers, x, y)):
                    totals[number] += float(mean) * len(x)
        return self.results(totals, len(inputs))

    def _make_means(self) -> Function:
        """``(parameters [P], buffers [B], inputs, targets) -> the mean of each measure``."""
        module = bare_module(self.task.model, self.device).eval()
        layout = Layout.of(module)

        def means(parameters: Tensor, buffers: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            named = named_parameters(parameters, layout.parameters)
            with naming("task.model", inputs=x):
                outputs = functional_call(
                    module, (named, named_buffers(buffers, layout, module)), (channels_last(x),)
                )
            return tuple(measured(name, measure, outputs, y) for name, measure in self.measures.items())

        return means


def columns(found: Mapping[str, Found]) -> Found:
    """The results on all evaluation sets as columns ``<set>_<name>``."""
    return {f"{on}_{name}": value for on, each in found.items() for name, value in each.items()}


def columns_each(evaluator: Evaluator | BatchedEvaluator, models: Sequence[Model]) -> list[Found | Exception]:
    """The recorded columns of each model, as :meth:`Evaluator.columns`; or the exception that the user's code raised."""
    by_set = {on: evaluator.test_each(models, on) for on in evaluator.sets}
    found: list[Found | Exception] = []
    for each in zip(*by_set.values(), strict=True):
        error = next((one for one in each if isinstance(one, Exception)), None)
        found.append(error or columns(dict(zip(by_set, each, strict=True))))
    return found


def _sample(task: Task, name: str, seed: int, samples: int | None) -> tuple[Tensor, Tensor]:
    """The keyed sample of an evaluation set, in the order of the data."""
    inputs, targets = task.tests[name]
    if samples is None or samples >= len(inputs):
        return inputs, targets
    purpose = "evaluation" if name == "test" else f"evaluation-{name}"
    chosen = torch.from_numpy(np.sort(generator(seed, purpose).choice(len(inputs), samples, replace=False)))
    return inputs[chosen], targets[chosen]


def measured(name: str, measure: Metric, outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean that a measure returns, as a tensor of one value. (A user's metric may also return a plain number.)

    Raises:
        TypeError: if it returns something else.
    """
    field = "task.loss" if name == "loss" else f"task.metrics.{name}"
    given = {"outputs": outputs, "targets": targets} if isinstance(outputs, Tensor) else {"targets": targets}
    with naming(field, **given):
        value: object = measure(outputs, targets)
    if isinstance(value, Tensor):
        found = value
    elif isinstance(value, int | float | np.generic | np.ndarray):
        found = torch.as_tensor(value)
    else:
        raise TypeError(f"{field}: gives {type(value).__name__}; accepted: {MEAN}")
    if found.numel() != 1:
        raise TypeError(f"{field}: gives a tensor of shape {tuple(found.shape)}; accepted: {MEAN}")
    return found


@contextmanager
def naming(field: str, **given: Tensor) -> Iterator[None]:
    """Add the part of the task, and the tensors that it was given, to an error that torch raises."""
    try:
        yield
    except Exception as error:
        if is_own(error) or isinstance(error, GossamerError):
            raise
        tensors = " and ".join(f"{name} {tuple(each.shape)} of {each.dtype}" for name, each in given.items())
        message = " ".join(str(error).split())
        raise RuntimeError(f"{field}, given {tensors}: {type(error).__name__}: {message}") from error


def batches(inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split samples into batches for forward passes."""
    for start in range(0, len(inputs), BATCH):
        yield inputs[start : start + BATCH], targets[start : start + BATCH]
