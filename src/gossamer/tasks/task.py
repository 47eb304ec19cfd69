"""A task (data, model, loss and metrics), and the components that create one."""

from __future__ import annotations

import re
import reprlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from jaxtyping import Float, Int
from torch import Tensor, nn

from gossamer.config.registry import Component, ComponentField, FunctionComponent
from gossamer.config.validation import not_called_with
from gossamer.errors import BadInput, cause
from gossamer.tasks.metrics import OverSet, Streamed, chosen_metrics
from gossamer.tasks.metrics import Reference as Reference
from gossamer.tasks.provenance import Provenance

Metric = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> scalar mean over the first axis
Augment = Callable[[Any, np.random.Generator], Any]  # (inputs, generator) -> inputs


@dataclass(frozen=True)
class FunctionOfMean:
    """Base class of metrics that are a ``function`` of a mean over all evaluated samples. Evaluation first
    averages over all batches. ``mean`` maps (outputs, targets) to a scalar mean over the first axis."""

    mean: Metric
    function: ClassVar[Callable[[Tensor], Tensor]]

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The value for these samples alone."""
        return type(self).function(self.mean(outputs, targets))


class RootMean(FunctionOfMean):
    """The square root of a mean, which must not be negative."""

    function = torch.sqrt


class ExpMean(FunctionOfMean):
    """The exponential of a mean, e.g. the perplexity if the mean is a language model's loss."""

    function = torch.exp


AnyMetric = Metric | OverSet | Streamed

INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

Inputs = Tensor | dict[str, Tensor]  # inputs of samples; a dict holds the model's arguments by name
Pair = tuple[Any, Tensor]  # (inputs, targets), whose first axis is the sample; the inputs are Inputs


def for_each(function: Callable[[Tensor], Tensor], inputs: Any) -> Any:
    """Apply a function to each tensor of the inputs."""
    if isinstance(inputs, dict):
        return {name: function(tensor) for name, tensor in inputs.items()}
    return function(inputs)


def shapes(inputs: Any) -> Any:
    """The shape of one sample's input, or of each of its inputs by name."""
    if isinstance(inputs, dict):
        return {name: tuple(tensor.shape[1:]) for name, tensor in inputs.items()}
    return tuple(inputs.shape[1:])


# First words of other recorded columns. No evaluation set may have one as its name.
_TAKEN = "train|personal|bytes|messages|staleness|idle|uplink|downlink|consensus|time|wall"


@dataclass(frozen=True, init=False)
class Task:
    """Data, model, loss and metrics of an experiment.

    Args:
        model: creates a fresh ``nn.Module``, with initial parameters from torch's global generator.
        train: (inputs, targets), tensors whose first axis is the sample. Inputs may be a dict of tensors, which the
            model gets as arguments by name.
        test: the same for the evaluation set ``test``.
        loss: (outputs, targets) -> scalar mean.
        metrics: name -> (outputs, targets) -> scalar mean, a :class:`RootMean` or an :class:`ExpMean`; or, for what is no
            mean over samples, an :class:`OverSet` or a ``Metric`` of torchmetrics. A name is an identifier: letters, digits
            and ``_``.
        groups: natural owner of each training sample, integers [samples], for the partition ``natural``.
        classes: names of the classes, if the targets are class numbers.
        tests: all evaluation sets by name, starting with ``test``, if there are more than that one. The loss
            and the metrics on each are recorded as ``<set>_loss`` and ``<set>_<name>``.
        augment: (inputs of a batch, NumPy generator) -> augmented inputs. The generator is keyed by seed,
            node and step, so that every engine makes the same draws.
        provenance: where the data come from, for the run's record.

    Raises:
        BadInput: for an argument of the wrong type or shape."""

    model: Callable[[], nn.Module]
    train: Pair
    loss: Metric
    tests: Mapping[str, Pair]
    metrics: Mapping[str, AnyMetric] = field(default_factory=dict)
    groups: Tensor | None = None
    classes: Sequence[str] | None = None
    augment: Augment | None = None
    provenance: Provenance | None = None

    def __init__(
        self,
        model: Callable[[], nn.Module],
        train: Pair,
        test: Pair | None = None,
        loss: Metric | None = None,
        metrics: Mapping[str, AnyMetric] | None = None,
        groups: Tensor | None = None,
        classes: Sequence[str] | None = None,
        *,
        tests: Mapping[str, Pair] | None = None,
        augment: Augment | None = None,
        provenance: Provenance | None = None,
    ) -> None:
        sets = tests or {}
        if test is not None:
            sets = {"test": test, **{name: pair for name, pair in sets.items() if name != "test"}}
        values = {"model": model, "train": train, "loss": loss, "tests": sets, "metrics": metrics or {}}
        self.__dict__.update(values, groups=groups, classes=classes, augment=augment, provenance=provenance)
        self._check()

    @property
    def test(self) -> Pair:
        """The evaluation set ``test``."""
        return self.tests["test"]

    @property
    def samples(self) -> int:
        """Number of training samples."""
        return len(self.train[1])

    def labels(self) -> Tensor | None:
        """The training targets as class numbers [samples], or None if the targets are not classes."""
        targets = self.train[1]
        return targets if targets.dim() == 1 and targets.dtype in INTEGERS else None

    def _check(self) -> None:
        # Check the types here, since users' tasks are seldom type-checked.
        creates = callable(self.model) and not isinstance(self.model, nn.Module)
        _require(creates, "model", self.model, "a function that creates an nn.Module")
        functions: dict[str, Any] = {"loss": self.loss, **self.metrics}
        for name, function in functions.items():
            # A class such as nn.CrossEntropyLoss can be called with outputs and targets, but creates a module.
            is_function = callable(function) and not isinstance(function, type)
            fits = is_function and not_called_with(function, "outputs", "targets") is None
            if name != "loss" and not isinstance(function, type):
                fits = fits or isinstance(function, Streamed)
            _require(fits, name, function, "a function of (outputs, targets)")
        _require(
            "loss" not in self.metrics, "metrics", "loss", "another name, since the loss is recorded too"
        )
        for name in self.metrics:
            allowed = re.fullmatch("[A-Za-z][A-Za-z0-9_]*", str(name)) is not None
            _require(allowed, "metrics", name, "an identifier: letters, digits and _, the first a letter")
        measures = ("loss", *self.metrics)
        columns = Counter(f"{name}_{measure}" for name in self.tests for measure in measures)
        repeated = [column for column, count in columns.items() if count > 1]
        _require(not repeated, "metrics", repeated, "names of sets and metrics that make different columns")
        _require([*self.tests][:1] == ["test"], "tests", [*self.tests], "sets by name, the first 'test'")
        for name in self.tests:
            allowed = re.fullmatch(f"(?!({_TAKEN})(_|$))[A-Za-z][A-Za-z0-9_]*", str(name)) is not None
            taken = _TAKEN.replace("|", ", ")
            _require(allowed, "tests", name, f"an identifier that does not begin like a column ({taken})")
        for name, pair in {"train": self.train, **self.tests}.items():
            self._check_pair(name, pair)
        if self.groups is not None:
            fits = isinstance(self.groups, Tensor) and self.groups.shape == (self.samples,)
            owners = f"a tensor of integers, one owner per training sample ({self.samples})"
            _require(fits and self.groups.dtype in INTEGERS, "groups", self.groups, owners)
        named = self.provenance is None or isinstance(self.provenance, Provenance)
        _require(named, "provenance", self.provenance, "a gossamer.tasks.Provenance")

    def _check_pair(self, name: str, pair: Any) -> None:
        fits = isinstance(pair, tuple | list) and len(pair) == 2
        tensors = [*pair[0].values(), pair[1]] if fits and isinstance(pair[0], dict) else pair
        fits = fits and len(tensors) > 1 and all(isinstance(part, Tensor) and part.dim() for part in tensors)
        _require(fits, name, pair, "two tensors of samples, (inputs, targets), or a dict of tensors and one")
        lengths, targets = [len(tensor) for tensor in tensors], tensors[-1]
        equal = len(set(lengths)) == 1 and lengths[0] > 0
        _require(equal, name, lengths, "as many inputs as targets, at least one")
        if self.classes is not None:
            numbers, last = targets.dim() == 1 and targets.dtype in INTEGERS, len(self.classes) - 1
            _require(
                numbers, name, targets, "one class number (an integer) per sample, as the task has classes"
            )
            limits = [int(targets.min()), int(targets.max())]
            _require(limits[0] >= 0 and limits[1] <= last, name, limits, f"class numbers from 0 to {last}")


def _require(fits: bool, field: str, value: object, accepted: str) -> None:
    if not fits:
        text = " ".join(reprlib.repr(value).split())
        if isinstance(value, Tensor):
            text = f"{value.dtype} of shape {tuple(value.shape)}"
        raise BadInput(f"task.{field}: got {text}; accepted: {accepted}")


def accuracy(
    outputs: Float[Tensor, "*samples classes"], targets: Int[Tensor, "*samples"]
) -> Float[Tensor, ""]:
    """Fraction of the samples whose highest output is the target class."""
    return (outputs.argmax(dim=-1) == targets).to(torch.float32).mean()


def class_count(task: Task) -> int:
    """The number of ``task.classes``, or one more than the highest class number. BadInput if the targets are
    not class numbers."""
    labels = task.labels()
    if labels is None:
        raise BadInput("the task's targets are not class numbers; accepted: a task with classes")
    return len(task.classes) if task.classes is not None else int(labels.max()) + 1


class TaskSource(Component):
    """Base class of components of kind ``task``. A subclass implements :meth:`load`. A function that returns
    a :class:`Task` works too: its parameters ``data_root`` and ``seed`` get the same values as those of
    :meth:`load`, unless the file sets them."""

    @abstractmethod
    def load(self, data_root: Path | None, seed: int) -> Task:
        """Load the task. ``data_root`` is a folder with ``hub/<hub id>/...`` that replaces the Hugging Face
        hub, or None. The experiment's seed is the key of all draws. BadInput for missing, damaged or
        unsuitable data."""


class ModelSource(Component):
    """Base class of components of kind ``model`` that read files or need a package. Other models are modules
    and functions."""

    @abstractmethod
    def factory(self, data_root: Path | None, **facts: Any) -> Callable[[], nn.Module]:
        """A function that creates a fresh module for a task with these facts (``shape`` of an input,
        ``classes``, ...). BadInput for files that can't be read or do not fit."""


ModelField = Annotated[Component, ComponentField("model", "task.model")]  # the type of a task's field "model"


def model_factory(
    component: Component, data_root: Path | None = None, **facts: Any
) -> Callable[[], nn.Module]:
    """A function that creates fresh modules of a component of kind ``model``, for a task with these facts."""
    if isinstance(component, ModelSource):
        return component.factory(data_root, **facts)
    if not isinstance(component, FunctionComponent):
        accepted = "a ModelSource, an nn.Module class, or a function that creates a module"
        raise BadInput(f"task.model: {component.name_of()!r} is not a model; accepted: {accepted}")
    return partial(component.call, **facts)


def classification(
    model: Component,
    data_root: Path | None,
    train: Pair,
    test: Pair,
    classes: Sequence[str],
    metrics: Mapping[str, str],
    **more: Any,
) -> Task:
    """A task with cross-entropy loss, the metric ``accuracy`` and the ``metrics`` of a field of type
    :data:`~gossamer.tasks.metrics.Metrics`. ``more`` are further arguments of :class:`Task`."""
    return Task(
        model=model_factory(model, data_root, shape=shapes(train[0]), classes=len(classes)),
        train=train,
        test=test,
        loss=F.cross_entropy,
        metrics={"accuracy": accuracy, **chosen_metrics(metrics, classes)},
        classes=classes,
        **more,
    )


def load_task(component: Component, data_root: Path | None, seed: int) -> Task:
    """The task of a component of kind ``task``: a :class:`TaskSource`, or a user's ``"module:function"``."""
    name = component.name_of()
    if not isinstance(component, TaskSource | FunctionComponent):
        raise BadInput(f"task: {name!r} is not a task; accepted: a TaskSource or a function")
    try:
        if isinstance(component, TaskSource):
            task = component.load(data_root, seed)
        else:
            task = component.call(data_root=data_root, seed=seed)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"task: {name!r} raised {cause(error)}") from error
    if not isinstance(task, Task):
        raise BadInput(f"task: {name!r} returned {type(task).__name__}; accepted: gossamer.Task")
    return task
