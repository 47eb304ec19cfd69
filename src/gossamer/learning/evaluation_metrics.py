"""The loss and the metrics of a task, by how they are computed, and the columns of their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gossamer.learning.guard import naming
from gossamer.learning.parameters import is_finite, one_value
from gossamer.tasks.metrics import OverSet, Streamed
from gossamer.tasks.task import FunctionOfMean, Metric, Task

MetricValues = dict[str, Any]
"""Name -> value of the loss and of each metric: a number, a list, or None where the metric is not defined."""

MAX_NUMBERS = 10_000
"""The most numbers in a value that is a list: a confusion matrix of 100 classes."""


@dataclass(frozen=True)
class EvaluationMetrics:
    """The loss and the metrics of a task, by how they are computed.

    Attributes:
        means: means over samples, and functions of such means.
        over_set: functions of all outputs and targets of a set. The loss is one of them if it is no mean.
        streamed: metrics that take one batch after the other.
        columns: for those of ``over_set`` and ``streamed``: the columns of each, and whether these hold lists. Unknown
            before they have been tried.
        sample_bytes: the bytes of a sample's outputs; None if unknown."""

    means: Mapping[str, Metric]
    over_set: Mapping[str, Callable[[Tensor, Tensor], Any]] = field(default_factory=dict)
    streamed: Mapping[str, Streamed] = field(default_factory=dict)
    columns: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    sample_bytes: int | None = None

    @staticmethod
    def of(task: Task, *, loss_is_mean: bool = True) -> EvaluationMetrics:
        """The loss and the metrics of a task."""
        whole = {name: metric for name, metric in task.metrics.items() if isinstance(metric, OverSet)}
        streamed = {name: m for name, m in task.metrics.items() if isinstance(m, Streamed)}
        means: dict[str, Any] = {
            name: metric
            for name, metric in task.metrics.items()
            if name not in whole.keys() | streamed.keys()
        }
        loss_is_mean = loss_is_mean and not isinstance(task.loss, OverSet)
        loss = {"loss": task.loss}
        return EvaluationMetrics(
            loss | means if loss_is_mean else means, whole if loss_is_mean else loss | whole, streamed
        )

    @property
    def names(self) -> list[str]:
        """The names of the loss and the metrics. Means over samples come first."""
        return [*self.means, *self.over_set, *self.streamed]

    def undefined(self, name: str) -> MetricValues:
        """The values of a metric that is not defined: NaN, or None in place of a list."""
        columns = self.columns.get(name, {name: False})
        return {column: None if is_list else float("nan") for column, is_list in columns.items()}

    def numbers(self) -> list[str]:
        """The columns that hold numbers."""
        columns: Iterable[Mapping[str, bool]] = (self.columns.get(name, {name: False}) for name in self.names)
        return [column for known in columns for column, is_list in known.items() if not is_list]

    def means_of(self, outputs: Any, targets: Tensor) -> Float[Tensor, " means"]:
        """The values of the metrics that are means over samples."""
        values = [measured(*metric, outputs, targets) for metric in self.means.items()]
        return torch.stack(values) if values else torch.empty(0, device=targets.device)


class SetValues:
    """The values of one model's ``over_set`` and ``streamed`` metrics on ``samples`` samples, which are added in batches.

    If outputs are not finite, an error of a metric is taken for its answer to them, and its value is undefined."""

    def __init__(self, metrics: EvaluationMetrics, streamed: Mapping[str, Streamed], samples: int) -> None:
        self._metrics, self._streamed, self._samples = metrics, dict(streamed), samples
        self._outputs: Tensor | None = None
        self._filled, self._finite = 0, True
        self._undefined: MetricValues = {}
        for metric in self._streamed.values():
            metric.reset()

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add the samples of a batch."""
        if not isinstance(outputs, Tensor):
            kind = type(outputs).__name__
            raise TypeError(f"task.model: returns a {kind}; accepted with metrics over a set: one tensor")
        self._finite = self._finite and is_finite(outputs)
        for name, metric in list(self._streamed.items()):
            with self._answering(name), naming(field_of(name), outputs=outputs, targets=targets):
                metric.update(outputs.clone(), targets.clone())
        if self._metrics.over_set:
            if self._outputs is None:
                self._outputs = outputs.new_empty((self._samples, *outputs.shape[1:]))
            self._outputs[self._filled : self._filled + len(outputs)] = outputs
            self._filled += len(outputs)

    def values(self, targets: Tensor) -> MetricValues:
        """The values, when all samples have been added."""
        values: MetricValues = {}
        for name, function in self._metrics.over_set.items():
            with self._answering(name):
                assert self._outputs is not None
                with naming(field_of(name), outputs=self._outputs, targets=targets):
                    value = function(self._outputs.clone(), targets.clone())
                values |= columns_of(name, value)
        for name, metric in list(self._streamed.items()):
            with self._answering(name):
                with naming(field_of(name)):
                    value = metric.compute()
                values |= columns_of(name, value)
        return values | self._undefined

    @contextmanager
    def _answering(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            if self._finite:
                raise
            self._streamed.pop(name, None)
            self._undefined |= self._metrics.undefined(name)


def fresh_streams(metrics: EvaluationMetrics, device: torch.device | str) -> dict[str, Streamed]:
    """Copies of the ``streamed`` metrics on a device."""
    copies = {name: deepcopy(metric) for name, metric in metrics.streamed.items()}
    for metric in copies.values():
        if isinstance(metric, torch.nn.Module):
            metric.to(device)
    return copies


def measured(name: str, metric: Metric, outputs: Any, targets: Tensor) -> Tensor:
    """The mean returned by a metric. A user's metric may also return a plain number."""
    if isinstance(metric, FunctionOfMean):
        metric = metric.mean
    field = field_of(name)
    with naming(field, outputs=outputs, targets=targets):
        value: object = metric(outputs, targets)
    if isinstance(value, int | float | np.generic | np.ndarray):
        value = torch.as_tensor(value, device=targets.device)
    return one_value(field, value, "one value")


def columns_of(name: str, value: Any) -> MetricValues:
    """The columns of a value: one with the metric's name, or those that a mapping names. TypeError for what can't be
    recorded."""
    values = value if isinstance(value, Mapping) else {name: value}
    for column in values:
        if not (isinstance(column, str) and column.isascii() and column.isidentifier()):
            raise TypeError(f"{field_of(name)}: returns {column!r}; accepted: identifiers as names")
    return {column: _plain(field_of(name), entry) for column, entry in values.items()}


def _plain(field: str, value: Any) -> Any:
    """A number, a list of numbers, or None."""
    if value is None:
        return None
    if isinstance(value, Tensor | np.ndarray | np.generic):
        if value.size == 1 if not isinstance(value, Tensor) else value.numel() == 1:
            return float(value.item())
        value = value.tolist()
    elif isinstance(value, list | tuple):
        value = [_listed(field, entry) for entry in value]
    elif isinstance(value, int | float):
        return float(value)
    else:
        kind = type(value).__name__
        raise TypeError(f"{field}: returns a {kind}; accepted: a number, a list, a mapping of these, or None")
    if (count := _count(value)) > MAX_NUMBERS:
        raise TypeError(f"{field}: returns {count:,} numbers; accepted: at most {MAX_NUMBERS:,}")
    return value


def _listed(field: str, value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_listed(field, entry) for entry in value]
    if value is None or isinstance(value, int | float):
        return value
    raise TypeError(f"{field}: returns a list with a {type(value).__name__}; accepted: numbers")


def _count(value: Any) -> int:
    return sum(map(_count, value)) if isinstance(value, list) else 1


def field_of(metric: str) -> str:
    """The field of the task that a metric is."""
    return "task.loss" if metric == "loss" else f"task.metrics.{metric}"
