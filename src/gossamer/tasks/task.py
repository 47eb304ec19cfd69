"""A task (data, model, loss and metrics), and the components that give one."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gossamer.config.registry import Component, FunctionComponent
from gossamer.config.validation import not_called_with
from gossamer.errors import BadInput, cause, shown

Metric = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> scalar mean over the first axis."""


@dataclass(frozen=True)
class RootMean:
    """A metric that is the square root of a mean over all evaluated samples.

    The mean of the roots of batches would be a smaller number, so evaluation takes the mean over all samples first and
    the root at the end.

    Args:
        mean: (outputs, targets) -> scalar mean over the first axis, not negative.
    """

    mean: Metric

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The root of the mean over these samples alone."""
        return self.mean(outputs, targets).sqrt()


INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


Pair = tuple[Tensor, Tensor]
"""(inputs, targets), whose first axis is the sample."""

_TAKEN = frozenset(
    ("train", "bytes", "messages", "staleness", "idle", "uplink", "downlink", "consensus", "time", "wall")
)
"""First words of other recorded columns, which no evaluation set may be called."""


@dataclass(frozen=True, init=False)
class Task:
    """What is learned, and how it is evaluated.

    Args:
        model: creates a fresh ``nn.Module`` (drawing its initial parameters from torch's global generator,
            which the engine seeds).
        train: (inputs, targets), tensors whose first axis is the sample.
        test: the same for the evaluation set ``test``.
        loss: (outputs, targets) -> scalar mean.
        metrics: name -> (outputs, targets) -> scalar mean, or a :class:`RootMean`; recorded as
            ``<set>_<name>``.
        groups: natural owner of each training sample, shape [samples] of integers (for the partition
            ``natural``).
        classes: names of the classes where the targets are class numbers; label counts are recorded for
            these.
        tests: every evaluation set by name, of which the first is ``test``: in place of ``test``, or for further
            sets beside it. The loss and the metrics on each are recorded as ``<set>_loss`` and ``<set>_<name>``.

    Raises:
        BadInput: for anything of the wrong type or shape.
    """

    model: Callable[[], nn.Module]
    train: Pair
    loss: Metric
    tests: Mapping[str, Pair]
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    groups: Tensor | None = None
    classes: Sequence[str] | None = None

    def __init__(
        self,
        model: Callable[[], nn.Module],
        train: Pair,
        test: Pair | None = None,
        loss: Metric | None = None,
        metrics: Mapping[str, Metric] | None = None,
        groups: Tensor | None = None,
        classes: Sequence[str] | None = None,
        *,
        tests: Mapping[str, Pair] | None = None,
    ) -> None:
        sets = {} if tests is None else tests
        if test is not None and isinstance(sets, Mapping):
            sets = {"test": test, **{name: pair for name, pair in sets.items() if name != "test"}}
        values = {"model": model, "train": train, "loss": loss, "tests": sets, "groups": groups}
        for name, value in {
            **values,
            "metrics": {} if metrics is None else metrics,
            "classes": classes,
        }.items():
            object.__setattr__(self, name, value)
        self._check()

    @property
    def test(self) -> Pair:
        """The evaluation set ``test``."""
        return self.tests["test"]

    def _sets(self) -> dict[str, Any]:
        """Training and evaluation data, by the field that messages name."""
        called = {name: "test" if name == "test" else f"tests.{name}" for name in self.tests}
        return {"train": self.train, **{called[name]: pair for name, pair in self.tests.items()}}

    def _check(self) -> None:
        self._check_names()
        self._check_types()
        for name, (inputs, targets) in self._sets().items():
            if len(inputs) != len(targets):
                raise BadInput(
                    f"task.{name}: {len(inputs)} inputs but {len(targets)} targets;"
                    " accepted: one target an input"
                )
            if len(inputs) == 0:
                raise BadInput(f"task.{name}: no samples; accepted: at least one")
        if self.groups is not None and self.groups.shape != (len(self.train[0]),):
            raise BadInput(
                f"task.groups: shape {tuple(self.groups.shape)}; accepted: one owner a training sample,"
                f" ({len(self.train[0])},)"
            )
        if self.groups is not None and self.groups.dtype not in INTEGERS:
            raise BadInput(f"task.groups: {self.groups.dtype}; accepted: owners as integers")
        if self.classes is not None:
            self._check_labels(len(self.classes))

    def _check_names(self) -> None:
        if not isinstance(self.tests, Mapping):
            raise _wrong("tests", self.tests, "a dict, name -> (inputs, targets)")
        if next(iter(self.tests), None) != "test":
            raise BadInput(
                f"task.tests: got {list(self.tests)}; accepted: evaluation sets by name, the first 'test'"
            )
        for name in self.tests:
            if not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", str(name)) or str(name).split("_")[0] in _TAKEN:
                raise BadInput(
                    f"task.tests: a set named {name!r}; accepted: letters, digits and underscores, and no first word of"
                    f" another column ({', '.join(sorted(_TAKEN))})"
                )

    def _check_types(self) -> None:
        # No type checker helps the user who wrote the task.
        if not callable(self.model) or isinstance(self.model, nn.Module):
            raise _wrong(
                "model",
                self.model,
                "a function that makes a fresh nn.Module, such as lambda: nn.Linear(2, 1)",
            )
        for name, pair in self._sets().items():
            if not isinstance(pair, tuple | list) or [isinstance(each, Tensor) for each in pair] != [
                True,
                True,
            ]:
                raise _wrong(name, pair, "two tensors, (inputs, targets)")
            if not all(each.dim() for each in pair):
                raise BadInput(
                    f"task.{name}: a tensor of no axis; accepted: tensors whose first axis is the sample"
                )
        _check_measure("loss", self.loss)
        if not isinstance(self.metrics, Mapping):
            raise _wrong("metrics", self.metrics, "a dict, name -> function of (outputs, targets)")
        for name, metric in self.metrics.items():
            _check_measure(f"metrics.{name}", metric)
        columns = [f"{name}_{metric}" for name in self.tests for metric in ("loss", *self.metrics)]
        if double := next((column for column in columns if columns.count(column) > 1), None):
            raise BadInput(f"task.tests: two columns {double!r}; accepted: sets and metrics with other names")
        if self.groups is not None and not isinstance(self.groups, Tensor):
            raise _wrong("groups", self.groups, "a tensor, an owner a training sample")
        classes: object = () if self.classes is None else self.classes  # (an array has no truth value)
        if isinstance(classes, str) or not hasattr(classes, "__len__"):
            raise _wrong("classes", self.classes, "the names of the classes")

    def _check_labels(self, classes: int) -> None:
        for name, (_, targets) in self._sets().items():
            if targets.dim() != 1 or targets.dtype not in INTEGERS:
                raise BadInput(
                    f"task.{name}: targets {targets.dtype} of shape {tuple(targets.shape)} in a task with"
                    " classes; accepted: one class number (an integer) a sample"
                )
            low, high = int(targets.min()), int(targets.max())
            if low < 0 or high >= classes:
                raise BadInput(
                    f"task.{name}: class numbers from {low} to {high}; accepted: 0 to {classes - 1},"
                    f" as the task names {classes} classes"
                )

    @property
    def samples(self) -> int:
        """Number of training samples."""
        return len(self.train[0])

    def labels(self) -> Tensor | None:
        """The training targets as class numbers [samples], or None where the targets are not classes."""
        targets = self.train[1]
        return targets if targets.dim() == 1 and targets.dtype in INTEGERS else None


def _check_measure(field: str, given: object) -> None:
    # A class such as nn.CrossEntropyLoss can be called with outputs and targets, but creates a module.
    accepted = "a function of (outputs, targets)"
    if not callable(given) or isinstance(given, type):
        raise _wrong(field, given, accepted)
    if (refused := not_called_with(given, "outputs", "targets")) is not None:
        raise BadInput(
            f"task.{field}: can't be called with outputs and targets ({refused}); accepted: {accepted}"
        )


def _wrong(field: str, given: object, accepted: str) -> BadInput:
    # Data is too large to be shown: the message names its types.
    if isinstance(given, tuple | list):
        said = (
            f"a {type(given).__name__} of {', '.join(type(each).__name__ for each in given[:4]) or 'nothing'}"
        )
        said += ", ..." if len(given) > 4 else ""
    elif isinstance(given, str | int | float) or given is None:
        said = shown(given)
    else:
        said = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
    return BadInput(f"task.{field}: got {said}; accepted: {accepted}")


def accuracy(
    outputs: Float[Tensor, "*samples classes"], targets: Int[Tensor, "*samples"]
) -> Float[Tensor, ""]:
    """Share of the samples whose highest output is the target class."""
    return (outputs.argmax(dim=-1) == targets).to(torch.float32).mean()


class TaskSource(Component):
    """Base of the components of kind ``task``; a new one defines :meth:`load`."""

    @abstractmethod
    def load(self, data_root: Path | None, seed: int) -> Task:
        """The task.

        Args:
            data_root: a folder with ``hub/<hub id>/...`` to read instead of the Hugging Face hub, or None.
            seed: the experiment's seed, the key of whatever is drawn.

        Raises:
            BadInput: for data that is missing, damaged, or does not fit the parameters.
        """


def load_task(component: Component, data_root: Path | None, seed: int) -> Task:
    """The task behind a component of kind ``task``: a :class:`TaskSource`, or a user's ``"module:function"``.

    Raises:
        BadInput: for a component that is no source of tasks, a function that returns anything but a :class:`Task`, or data
            that can't be used.
    """
    if not isinstance(component, TaskSource | FunctionComponent):
        raise BadInput(
            f"task: {component.name_of()!r} is no source of tasks; accepted: a TaskSource, or a function that"
            " returns a Task"
        )
    try:
        task = component.load(data_root, seed) if isinstance(component, TaskSource) else component.call()
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"task: {component.name_of()!r} raised {cause(error)}") from error
    if not isinstance(task, Task):
        raise BadInput(
            f"task: {component.name_of()!r} returned {type(task).__name__}; accepted: gossamer.Task"
        )
    return task
