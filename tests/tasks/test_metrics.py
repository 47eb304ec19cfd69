"""What metrics over a set are given, and the metrics of classification by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor

from gossamer import BadInput, Experiment
from gossamer.tasks import ClassAccuracy, Confusion, Digits, Hub, MacroF1, OverSet, Synthetic
from gossamer.tasks.metrics import IGNORED, class_tags

RNG = torch.Generator().manual_seed(1)
SCORES, LABELS = torch.randn(50, 4, generator=RNG), torch.arange(50) % 4
TWO, BINARY = SCORES[:, :2], torch.arange(50) % 2
POWERS = np.exp(SCORES.double().numpy())
CHANCES = POWERS / POWERS.sum(1, keepdims=True)
FIRST = 1 / (1 + np.exp((TWO[:, 0].double() - TWO[:, 1].double()).numpy()))


@pytest.mark.parametrize(
    ("function", "outputs", "targets", "expected"),
    [
        (partial(sk.f1_score, average="macro"), SCORES, LABELS, (SCORES.argmax(1),)),
        (sk.accuracy_score, SCORES, LABELS, (SCORES.argmax(1),)),
        (partial(sk.roc_auc_score, multi_class="ovo"), SCORES, LABELS, (CHANCES,)),
        (sk.log_loss, SCORES, LABELS, (CHANCES,)),
        (partial(sk.top_k_accuracy_score, k=2), SCORES, LABELS, (CHANCES,)),
        (sk.roc_auc_score, TWO, BINARY, (FIRST,)),
        (sk.brier_score_loss, TWO, BINARY, (FIRST,)),
        (sk.average_precision_score, TWO, BINARY, (FIRST,)),
        (sk.hinge_loss, SCORES, LABELS, (SCORES,)),
        (sk.adjusted_rand_score, SCORES, LABELS, (SCORES.argmax(1),)),
        (sk.r2_score, SCORES, SCORES.roll(1, 0), (SCORES,)),
        (sk.median_absolute_error, SCORES[:, 0], SCORES[:, 1], (SCORES[:, 0],)),
    ],
)
def test_functions_of_scikit_learn_get_what_they_take(
    function: Any, outputs: Tensor, targets: Tensor, expected: Any
) -> None:
    direct = function(targets.numpy(), *(np.asarray(value) for value in expected))
    assert OverSet(function)(outputs, targets) == pytest.approx(direct, rel=1e-12)


def test_tokens_are_samples_and_ignored_ones_are_left_out() -> None:
    scores, targets = SCORES[:48].reshape(6, 8, 4), LABELS[:48].reshape(6, 8).clone()
    targets[:, 5:] = IGNORED
    counted = (targets != IGNORED).flatten()
    f1 = partial(sk.f1_score, average="macro")
    expected = f1(targets.flatten()[counted], scores.reshape(48, 4).argmax(1)[counted])
    assert OverSet(f1)(scores, targets) == pytest.approx(expected, rel=1e-12)
    assert OverSet(f1)(scores.movedim(-1, 1), targets) == pytest.approx(expected, rel=1e-12)  # torch's order


def test_a_function_of_tensors_gets_tensors() -> None:
    given: list[Any] = []
    OverSet(lambda outputs, targets: given.extend((outputs, targets)))(SCORES, LABELS)
    assert given[0] is SCORES
    assert given[1] is LABELS


def test_what_a_function_is_given_is_said() -> None:
    text = OverSet(partial(sk.roc_auc_score, multi_class="ovr")).note()
    assert text == "roc_auc_score gets the softmax of the scores, if the targets are class numbers"
    assert OverSet(lambda outputs, targets: 0).note() is None


@pytest.mark.parametrize("function", [lambda outputs: 0, OverSet])
def test_what_is_no_function_of_two_arguments_is_refused(function: Any) -> None:
    with pytest.raises(BadInput, match=r"^OverSet: got .*; accepted: a function of \(outputs, targets\)"):
        OverSet(function)


def test_metrics_of_classes_equal_those_of_scikit_learn() -> None:
    """One class has no samples, and another one is never predicted."""
    scores, y = torch.randn(90, 5, generator=RNG), torch.arange(90) % 4
    scores[:, 2] = -9
    for metric in (confusion := Confusion(5), f1 := MacroF1(5), each := ClassAccuracy(5)):
        metric.reset()
        for part in (slice(0, 7), slice(7, 60), slice(60, 90)):
            metric.update(scores[part], y[part])
    predicted = scores.argmax(1)
    assert confusion.compute() == sk.confusion_matrix(y, predicted, labels=range(5)).tolist()
    expected = sk.f1_score(y, predicted, average="macro", zero_division=0)
    assert f1.compute() == pytest.approx(expected, rel=1e-12)
    recalls = sk.recall_score(y, predicted, labels=range(4), average=None)
    assert each.compute() == pytest.approx(
        {f"accuracy_{c}": r for c, r in enumerate(recalls)} | {"accuracy_4": None}
    )


def test_outputs_for_other_classes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"outputs of shape \(50, 4\); accepted: \[samples, 5 classes\]"):
        MacroF1(5).update(SCORES, LABELS)


@pytest.mark.parametrize(
    ("classes", "tags"),
    [
        (["2", "seven"], ["2", "seven"]),
        (["T-shirt/top", "ankle boot"], ["T_shirt_top", "ankle_boot"]),
        (["a b", "a-b"], ["0", "1"]),
        (["猫", "dog"], ["0", "1"]),
        (["", "dog"], ["0", "1"]),
        (["<b>", "'; --"], ["0", "1"]),
    ],
)
def test_columns_of_classes_are_identifiers(classes: list[str], tags: list[str]) -> None:
    assert class_tags(classes) == tags
    assert all(f"test_accuracy_{tag}".isidentifier() for tag in tags)


def test_a_confusion_matrix_has_at_most_100_classes() -> None:
    assert len(Confusion(100).compute()) == 100
    with pytest.raises(BadInput, match=r"a confusion matrix of 101 classes; accepted: at most 100"):
        Confusion(101)
    with pytest.raises(BadInput, match=r"^task.metrics.confusion: a confusion matrix of 120 classes"):
        Synthetic(owners=2, classes=120, metrics=["confusion"]).load(None, 1)  # type: ignore[arg-type]


def test_metrics_are_chosen_by_name(tmp_path: Path) -> None:
    digits: Any = Digits
    named = digits(metrics=["macro_f1", "accuracy_per_class"]).load(None, 1)
    assert list(named.metrics) == ["accuracy", "macro_f1", "accuracy_per_class"]
    assert isinstance(named.metrics["macro_f1"], MacroF1)
    mapped = digits(metrics={"f1": "macro_f1", "mine": f"{__name__}:by_reference"}).load(None, 1)
    assert isinstance(mapped.metrics["f1"], MacroF1)
    assert mapped.metrics["mine"] is by_reference
    path = tmp_path / "train.csv"
    pl.DataFrame({"x": [0.5, 1.5, 2.5, 3.5], "y": ["a", "b", "a", "b"]}).write_csv(path)
    fields: dict[str, Any] = {"path": tmp_path, "inputs": ["x"], "targets": "y", "train_fraction": 0.5}
    hub: Any = Hub
    both = hub(**fields, metrics={"mine": f"{__name__}:by_reference", "confusion": "confusion"}).load(None, 1)
    assert list(both.metrics) == ["accuracy", "mine", "confusion"]
    assert both.metrics["confusion"].classes == ["a", "b"]
    with pytest.raises(BadInput, match=r"task.metrics.confusion: confusion, for a task without classes"):
        hub(**{**fields, "targets": "x"}, loss="regression", metrics=["confusion"]).load(None, 1)


def by_reference(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def test_an_experiment_without_own_metrics_is_recorded_as_before() -> None:
    """So that the finished runs of earlier sweeps count."""

    def task(**fields: Any) -> dict[str, Any]:
        given = {
            "task": {"name": "digits", **fields},
            "nodes": 2,
            "algorithm": "local",
            "stop": {"rounds": 1},
        }
        described: dict[str, Any] = Experiment.of(given).model_dump(mode="json")["task"]
        return described

    assert "metrics" not in task()
    assert task(metrics=["confusion"])["metrics"] == {"confusion": "confusion"}
    with pytest.raises(
        BadInput, match=r"task.metrics.*: got 'f1'; accepted: 'accuracy_per_class', 'macro_f1'"
    ):
        task(metrics=["f1"])
