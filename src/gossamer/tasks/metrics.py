"""Metrics of a whole evaluation set, which are not means over its samples, and those of classification by name."""

from __future__ import annotations

import inspect
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from pydantic import BeforeValidator, Field
from torch import Tensor

from gossamer.config.registry import imported
from gossamer.config.validation import not_called_with
from gossamer.errors import BadInput

IGNORED = -100  # the target that torch's losses ignore
MAX_CLASSES = 100
"""The most classes of a confusion matrix."""


@runtime_checkable
class Streamed(Protocol):
    """A metric that sees the samples batch by batch and keeps what it needs of them, such as any ``Metric`` or
    ``MetricCollection`` of torchmetrics. It is copied for each worker, and reset for each model."""

    def reset(self) -> Any:
        """Forget all samples."""

    def update(self, outputs: Tensor, targets: Tensor, /) -> Any:
        """Take the samples of a batch into account."""

    def compute(self) -> Any:
        """The value for all samples since the last reset."""


_TARGETS = ("y_true", "labels_true")
_PREDICTED: dict[str, str] = {
    **dict.fromkeys(("y_pred", "labels_pred"), "classes"),
    **dict.fromkeys(("y_score", "y_proba", "y_prob"), "probabilities"),
    "pred_decision": "outputs",
}
"""What scikit-learn's functions take, by the name of their second parameter."""


@dataclass(frozen=True)
class OverSet:
    """A metric that is no mean over samples: ``function`` is called once, with all samples of an evaluation set.

    A function of (outputs, targets) gets copies of these tensors, on the engine's device, whose first axis is the sample.

    A function of (y_true, ...), as those of scikit-learn are, gets NumPy arrays, the targets first. If the targets are class
    numbers and the outputs have an axis of scores more, its second parameter decides what it gets: ``y_pred`` or
    ``labels_pred`` the class with the highest score, ``y_score``, ``y_proba`` or ``y_prob`` the softmax of the scores in
    float64 (with two classes, that of class 1 alone), and ``pred_decision`` the scores. Tokens of texts count as samples, and
    those with the target -100, which torch's losses ignore, are left out. Other outputs are given as they are. Arguments of
    such a function are set with ``functools.partial``.

    The function returns a number, a list (or array, or tensor) for a column of lists, or a mapping from names to these, each
    for a column of its own; None or NaN where the metric is not defined.

    Raises:
        BadInput: for what can't be called with two arguments."""

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        fits = callable(self.function) and not isinstance(self.function, type)
        if not fits or not_called_with(self.function, "outputs", "targets") is not None:
            accepted = "a function of (outputs, targets), or one of scikit-learn's, of (y_true, ...)"
            raise BadInput(f"OverSet: got {name_of(self.function)}; accepted: {accepted}")

    @property
    def takes(self) -> str | None:
        """What a function of scikit-learn's form takes beside the targets: classes, probabilities or outputs. None for a
        function of tensors."""
        try:
            first, second, *_ = inspect.signature(self.function).parameters
        except ValueError:  # written in C, without a signature, or with one parameter
            return None
        return _PREDICTED.get(second, "outputs") if first in _TARGETS else None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        """The value for these samples."""
        if self.takes is None:
            return self.function(outputs, targets)
        return self.function(*_arrays(outputs, targets, self.takes))

    def note(self) -> str | None:
        """What a function of scikit-learn's form is given, in words."""
        given = {
            "classes": "the classes with the highest scores",
            "probabilities": "the softmax of the scores",
        }
        kind = given.get(self.takes or "")
        return (
            None
            if kind is None
            else f"{name_of(self.function)} gets {kind}, if the targets are class numbers"
        )


def _arrays(
    outputs: Tensor, targets: Tensor, takes: str
) -> tuple[Shaped[np.ndarray, "..."], Shaped[np.ndarray, "..."]]:
    """Targets and predictions in scikit-learn's form."""
    outputs, targets = outputs.detach().cpu(), targets.detach().cpu()
    numbers = not targets.is_floating_point() and outputs.dim() == targets.dim() + 1
    if numbers and outputs.shape[:-1] != targets.shape and outputs.shape[2:] == targets.shape[1:]:
        outputs = outputs.movedim(1, -1)  # the classes of torch's cross-entropy are the second axis
    if numbers and outputs.shape[:-1] == targets.shape:
        counted = targets != IGNORED
        outputs, targets = outputs[counted], targets[counted]
        if takes == "classes":
            outputs = outputs.argmax(-1)
        elif takes == "probabilities":
            outputs = outputs.double().softmax(-1)
            outputs = outputs[:, 1] if outputs.shape[1] == 2 else outputs
    first, second = (
        values.float() if values.dtype is torch.bfloat16 else values for values in (targets, outputs)
    )
    return first.numpy(), second.numpy()


def name_of(function: Any) -> str:
    """The name of a function, or of the one in a ``functools.partial``."""
    return str(getattr(getattr(function, "func", function), "__name__", type(function).__name__))


# --- classification, by name


class OfClasses:
    """Base class of metrics of the confusion matrix. ``classes`` are the names of the classes, or their number."""

    def __init__(self, classes: Sequence[str] | int) -> None:
        self.classes = (
            [str(number) for number in range(classes)] if isinstance(classes, int) else list(classes)
        )
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        self._counts = np.zeros(len(self.classes) ** 2, np.int64)

    def update(self, outputs: Float[Tensor, "samples classes"], targets: Int[Tensor, " samples"]) -> None:
        """Count the samples of a batch. The predicted class is the first one with the highest score."""
        count = len(self.classes)
        if outputs.dim() != 2 or outputs.shape[1] != count:
            raise ValueError(f"outputs of shape {tuple(outputs.shape)}; accepted: [samples, {count} classes]")
        pairs = targets.long() * count + outputs.argmax(-1)
        self._counts += torch.bincount(pairs, minlength=count**2).cpu().numpy()

    def compute(self) -> Any:
        """The value for all samples since the last reset."""
        return self.of(self._counts.reshape(len(self.classes), -1))

    @abstractmethod
    def of(self, confusion: Int[np.ndarray, "classes classes"]) -> Any:
        """The value for a confusion matrix: row i has the samples of class i, by predicted class."""


class ClassAccuracy(OfClasses):
    """The accuracy of each class, the fraction of its samples that are predicted as it (its recall): columns
    ``accuracy_<class>``, see :func:`class_tags`. A class without samples has no value."""

    def of(self, confusion: Int[np.ndarray, "classes classes"]) -> dict[str, float | None]:
        right, samples = confusion.diagonal(), confusion.sum(1)
        return {
            f"accuracy_{tag}": float(right[number] / samples[number]) if samples[number] else None
            for number, tag in enumerate(class_tags(self.classes))
        }


class MacroF1(OfClasses):
    """The mean F1 score of all classes that occur among the targets or the predictions, as scikit-learn's
    ``f1_score(average="macro")``. The F1 score of a class is 2 TP / (2 TP + FP + FN)."""

    def of(self, confusion: Int[np.ndarray, "classes classes"]) -> float:
        occurs = confusion.sum(0) + confusion.sum(1)  # 2 TP + FP + FN
        return float((2 * confusion.diagonal()[occurs > 0] / occurs[occurs > 0]).mean())


class Confusion(OfClasses):
    """The confusion matrix, as a column of lists: row i has the numbers of the samples of class i, by predicted class.
    BadInput for more than 100 classes."""

    def __init__(self, classes: Sequence[str] | int) -> None:
        super().__init__(classes)
        if len(self.classes) > MAX_CLASSES:
            problem = f"a confusion matrix of {len(self.classes)} classes"
            raise BadInput(f"{problem}; accepted: at most {MAX_CLASSES}, or macro_f1, accuracy_per_class")

    def of(self, confusion: Int[np.ndarray, "classes classes"]) -> list[list[int]]:
        return confusion.tolist()  # type: ignore[no-any-return]


def class_tags(classes: Sequence[str]) -> list[str]:
    """The ends of the columns of classes, which are identifiers: each name with ``_`` in place of all characters other than
    ASCII letters, digits and ``_`` ("T-shirt/top" is ``T_shirt_top``). The class numbers take the place of all names if two
    would be equal, or one consists of such characters only."""
    tags = [re.sub(r"[^A-Za-z0-9_]+", "_", name) for name in classes]
    usable = len(set(tags)) == len(tags) and all(tag.strip("_") for tag in tags)
    return tags if usable else [str(number) for number in range(len(classes))]


ClassMetric = Literal["accuracy_per_class", "macro_f1", "confusion"]
_OF_CLASSES: dict[str, type[OfClasses]] = {
    "accuracy_per_class": ClassAccuracy,
    "macro_f1": MacroF1,
    "confusion": Confusion,
}


def _by_name(value: Any) -> Any:
    """A list of names as a mapping."""
    return {name: name for name in value} if isinstance(value, list | tuple) else value


Reference = Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]  # a function, as "package.module:function"
Metrics = Annotated[
    dict[str, ClassMetric | Reference],
    BeforeValidator(_by_name, json_schema_input_type=list[ClassMetric] | dict[str, ClassMetric | Reference]),
]
"""The type of a task's field ``metrics``: names of :data:`ClassMetric`, or a mapping from columns to such names or to
functions, as "package.module:function"."""

NewMetrics = Annotated[Metrics, Field(default_factory=dict, exclude_if=lambda chosen: not chosen)]
"""The same for tasks that had no such field before: without metrics, an experiment is recorded as it was then."""


def chosen_metrics(chosen: Mapping[str, str], classes: Sequence[str] | None) -> dict[str, Any]:
    """The metrics that a field of type :data:`Metrics` names, for a task with these classes. BadInput for one that does not
    exist, or needs classes that there are not."""
    metrics: dict[str, Any] = {}
    for name, choice in chosen.items():
        if choice not in get_args(ClassMetric):
            metrics[name] = imported(choice, f"task.metrics.{name}")
            continue
        if classes is None:
            problem = f"{choice}, for a task without classes"
            raise BadInput(f"task.metrics.{name}: {problem}; accepted: a task of classification")
        try:
            metrics[name] = _OF_CLASSES[choice](classes)
        except BadInput as error:
            raise BadInput(f"task.metrics.{name}: {error}") from None
    return metrics
