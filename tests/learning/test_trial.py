"""The trial of metrics before a run: means over samples pass, everything else is named, on any fresh model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from learning_tasks import images
from sklearn.metrics import f1_score
from torch import Tensor, nn

from gossamer import BadInput, Task
from gossamer.learning.evaluation_metrics import EvaluationMetrics
from gossamer.learning.optimizer import SGD
from gossamer.learning.parameters import Layout
from gossamer.learning.proof import failure_of
from gossamer.learning.trial import no_means, tried_metrics
from gossamer.tasks import Digits, ExpMean, LeastSquares, OverSet, RootMean, accuracy
from gossamer.tasks.language import IGNORED, METRICS, token_loss
from gossamer.tasks.movielens import RELEASES

DIGITS = Digits().load(None, 1)


# --- metrics that are no means, each written with torch


def macro_f1(outputs: Tensor, y: Tensor) -> float:
    """Over the classes that occur."""
    counts = np.zeros((10, 10))
    np.add.at(counts, (y.numpy(), outputs.argmax(1).numpy()), 1)
    occurs = counts.sum(0) + counts.sum(1)
    return float((2 * counts.diagonal()[occurs > 0] / occurs[occurs > 0]).mean())


def recall(outputs: Tensor, y: Tensor) -> Tensor:
    """Of class 3; 0 without samples of it."""
    return ((outputs.argmax(1) == 3) & (y == 3)).sum() / (y == 3).sum().clamp(min=1)


def auc(outputs: Tensor, y: Tensor) -> Tensor:
    """Of class 3: the share of pairs in the right order; 1/2 without pairs."""
    score, positive = outputs[:, 3], y == 3
    pairs = score[positive][:, None] - score[~positive][None]
    return ((pairs > 0).float() + 0.5 * (pairs == 0).float()).mean() if pairs.numel() else torch.tensor(0.5)


def calibration_error(outputs: Tensor, y: Tensor) -> Tensor:
    chance, predicted = outputs.softmax(1).max(1)
    excess = torch.zeros(11).index_add_(0, (10 * chance).long(), (predicted == y).float() - chance)
    return excess.abs().sum() / len(y)


def precision(outputs: Tensor, y: Tensor) -> Tensor:
    return ((outputs.argmax(1) == 3) & (y == 3)).sum() / (outputs.argmax(1) == 3).sum().clamp(min=1)


def balanced_accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    counts = torch.bincount(y, minlength=10)
    hits = torch.bincount(y, weights=(outputs.argmax(1) == y).double(), minlength=10)
    return (hits[counts > 0] / counts[counts > 0]).mean()


def loss_quantile(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none").quantile(0.9)


def worst(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none").max()


def summed(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="sum")


def r2(outputs: Tensor, y: Tensor) -> Tensor:
    return 1 - ((outputs - y) ** 2).sum() / ((y - y.mean()) ** 2).sum()


def median_error(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y).abs().median()


def correlation(outputs: Tensor, y: Tensor) -> Tensor:
    return torch.corrcoef(torch.stack([outputs.flatten(), y.flatten()]))[0, 1]


WRONG: dict[str, Any] = {
    function.__name__: function
    for function in (
        *(macro_f1, recall, auc, calibration_error, precision, balanced_accuracy, loss_quantile),
        *(worst, summed),
    )
}
WRONG["root_of_median"] = RootMean(lambda outputs, y: median_error(outputs.max(1).values, y.float()))
WRONG_REGRESSION: dict[str, Any] = {f.__name__: f for f in (r2, median_error, correlation)}


# --- means


def top_3(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.topk(3).indices == y[:, None]).any(1).float().mean()


def by_numpy(outputs: Tensor, y: Tensor) -> float:
    return float(np.mean(outputs.numpy().argmax(1) == y.numpy()))


def brier(outputs: Tensor, y: Tensor) -> Tensor:
    return ((outputs.softmax(1) - F.one_hot(y, 10)) ** 2).sum(1).mean()


RIGHT: dict[str, Any] = {
    "accuracy": accuracy,
    "top_3": top_3,
    "by_numpy": by_numpy,
    "brier": brier,
    "loss2": F.cross_entropy,
    "perplexity": ExpMean(F.cross_entropy),
    "root": RootMean(brier),
    "huge": lambda outputs, y: 1e12 * F.cross_entropy(outputs, y),
    "tiny": lambda outputs, y: 1e-12 * F.cross_entropy(outputs, y),
    "signed": lambda outputs, y: (outputs[:, 0] - outputs[:, 1]).mean(),
    "constant": lambda outputs, y: 7,
    "never": lambda outputs, y: torch.tensor(float("nan")),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "writes": lambda outputs, y: outputs.clamp_(0, 1).mean(),
}
RIGHT_REGRESSION: dict[str, Any] = {
    "mse": F.mse_loss,
    "mae": F.l1_loss,
    "rmse": RootMean(F.mse_loss),
    "huber": F.huber_loss,
    "bias": lambda outputs, y: (outputs - y).mean(),
    "within": lambda outputs, y: ((outputs - y).abs() < 0.1).float().mean(),
}


def refused(task: Task, metrics: dict[str, Any], seed: int) -> set[str]:
    """The metrics that the trial of a fresh model with this seed refuses."""
    x, y = task.test
    some = torch.linspace(0, len(y) - 1, 40).round().long()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        outputs = task.model().eval()(x[some])
        return set(
            no_means(EvaluationMetrics.of(replace(task, metrics=metrics)), outputs, y[some], [y], seed)
        )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_fresh_model_lets_a_wrong_metric_through() -> None:
    for seed in range(200):
        assert refused(DIGITS, WRONG, seed) == set(WRONG), seed


def test_no_fresh_model_refuses_a_mean() -> None:
    for seed in range(8):
        assert refused(DIGITS, RIGHT, seed) == set(), seed


def test_no_fresh_model_of_a_regression_lets_a_wrong_metric_through() -> None:
    for seed in range(60):
        task = LeastSquares(test_samples=200).load(None, seed)
        assert refused(task, WRONG_REGRESSION, seed) == set(WRONG_REGRESSION), seed
        if seed < 4:
            assert refused(task, RIGHT_REGRESSION, seed) == set(), seed


@pytest.mark.parametrize("order", ["sorted by class", "as it is"])
def test_a_wrong_metric_is_refused_with_the_cure(order: str) -> None:
    x, y = DIGITS.test
    chosen = y.argsort(stable=True) if order == "sorted by class" else torch.arange(len(y))

    def plain_f1(outputs: Tensor, targets: Tensor) -> float:
        return float(f1_score(targets, outputs.argmax(1), average="macro", zero_division=0))

    task = replace(
        DIGITS, tests={"test": (x[chosen], y[chosen])}, metrics={"f1": plain_f1, "accuracy": accuracy}
    )
    with pytest.raises(
        BadInput, match=r"task\.metrics\.f1 is no mean over samples: .*OverSet\(function\)"
    ) as error:
        tried_metrics(task, 1, None)
    assert len(error.value.problems) == 1
    assert "torchmetrics" in str(error.value)


def test_a_metric_that_fails_for_parts_is_none() -> None:
    """As scikit-learn's AUC does without samples of a class."""

    def needs_all(outputs: Tensor, targets: Tensor) -> Tensor:
        if len(targets.unique()) < 10:
            raise ValueError("too few classes")
        return outputs.mean()

    with pytest.raises(
        BadInput,
        match=r"^task.metrics.needs_all, given .*: ValueError: too few .*, or gossamer.tasks.OverSet",
    ):
        tried_metrics(replace(DIGITS, metrics={"needs_all": needs_all}), 1, None)


def tokens(loss: Callable[[Tensor, Tensor], Tensor], metrics: dict[str, Any]) -> Task:
    """Next tokens, a different number of which is padding in each text."""
    rng = torch.Generator().manual_seed(1)
    x, y = (torch.randint(11, (60, 9), generator=rng) for _ in range(2))
    y[torch.arange(9)[None] > torch.randint(1, 9, (60, 1), generator=rng)] = IGNORED
    module = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    return Task(lambda: module, (x, y), (x, y.to(torch.int16)), loss, metrics)


def test_losses_of_language_that_ship_are_means_over_texts() -> None:
    metrics, notes = tried_metrics(tokens(token_loss, METRICS), 1, None)
    assert (list(metrics.means), notes) == (["loss", "accuracy", "perplexity"], [])


def test_clipped_ratings_are_means() -> None:
    release = RELEASES["100k"]
    metrics = {"rmse": RootMean(release.clipped(F.mse_loss)), "accuracy": release.clipped(release.accuracy)}
    ratings = torch.arange(50).remainder(5) + 1.0
    task = Task(
        lambda: nn.Sequential(nn.Linear(1, 1), nn.Flatten(0)),
        *[(torch.randn(50, 1), ratings)] * 2,
        F.mse_loss,
        metrics,
    )
    metrics, notes = tried_metrics(task, 1, None)
    assert (list(metrics.means), notes) == (["loss", "rmse", "accuracy"], [])


def test_probabilities_as_outputs_are_means() -> None:
    """Normal draws are no probabilities, so such a loss refuses them."""
    x, y = torch.randn(30, 4), torch.arange(30).remainder(2).float()[:, None]
    task = Task(lambda: nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), (x, y), (x, y), F.binary_cross_entropy)
    assert list(tried_metrics(task, 1, None)[0].means) == ["loss"]
    wrong = replace(task, metrics={"spread": lambda outputs, y: outputs.std()})
    with pytest.raises(BadInput, match=r"task\.metrics\.spread is no mean"):
        tried_metrics(wrong, 1, None)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.linspace(0.1, 2, 10)),
        nn.CrossEntropyLoss(ignore_index=3),
        lambda outputs, y: F.cross_entropy(outputs, y, reduction="sum"),
    ],
)
def test_a_loss_that_is_no_mean_is_taken_over_the_set(loss: Any) -> None:
    metrics, [note] = tried_metrics(replace(DIGITS, loss=loss), 1, None)
    assert (list(metrics.means), list(metrics.over_set)) == (["accuracy"], ["loss"])
    assert note.startswith("task.loss is no mean over samples (")
    assert note.endswith("recorded losses of an evaluation set are of all its samples at once")


def test_generators_are_set_for_each_call_and_restored() -> None:
    seen: list[tuple[float, float, float]] = []

    def drawing(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append((random.random(), np.random.random(), float(torch.rand(()))))
        return outputs.mean() + seen[-1][0] + seen[-1][1] + seen[-1][2]

    def states() -> list[Any]:  # not Python's, from which the checks of types draw in tests
        return [np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]

    before = states()
    tried_metrics(replace(DIGITS, metrics={"drawing": drawing}), 1, None)
    assert states() == before
    assert len(seen) > 5
    assert len(set(seen)) == 1


def test_a_single_sample_and_equal_targets_are_no_obstacle() -> None:
    x, _ = DIGITS.test
    for count in (1, 2, 3, 5):
        task = replace(DIGITS, tests={"test": (x[:count], torch.zeros(count, dtype=torch.int64))})
        assert list(tried_metrics(task, 1, None)[0].means) == ["loss", "accuracy"]


def test_outputs_without_an_axis_of_samples_are_named() -> None:
    """Tokens of all texts in one axis."""

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y.long().flatten(), ignore_index=IGNORED)

    module = nn.Sequential(nn.Embedding(11, 8), nn.Flatten(0, 1), nn.Linear(8, 11))
    task = replace(tokens(loss, {}), model=lambda: module)
    metrics, [note] = tried_metrics(task, 1, None)
    assert list(metrics.means) == ["loss"]
    assert note.startswith("task.model: returns (216, 11) for 24 samples, so that loss")
    with pytest.raises(
        BadInput, match=r"returns \(216, 11\) for 24 samples; accepted with metrics over a set"
    ):
        tried_metrics(replace(task, metrics={"all": OverSet(loss)}), 1, None)


def test_columns_are_known_before_the_run() -> None:
    metrics: dict[str, Any] = {
        "accuracy": accuracy,
        "several": OverSet(lambda outputs, y: {"first": 1, "second": [1.0, 2.0]}),
        "top": OverSet(lambda outputs, y: outputs.max()),
    }
    metrics, _ = tried_metrics(replace(DIGITS, metrics=metrics), 1, None)
    assert metrics.columns == {"several": {"first": False, "second": True}, "top": {"top": False}}
    assert metrics.numbers() == ["loss", "accuracy", "first", "top"]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("text", "returns a str; accepted: a number"),
        ({"a b": 1}, "returns 'a b'; accepted: identifiers"),
        (torch.zeros(101, 100), "returns 10,100 numbers; accepted: at most 10,000"),
        ({"accuracy": 1.0}, "the column test_accuracy is also of test accuracy; accepted: other names"),
        (["x"], "returns a list with a str"),
    ],
)
def test_values_that_cannot_be_recorded_are_refused(value: Any, problem: str) -> None:
    metrics = {"accuracy": accuracy, "odd": OverSet(lambda outputs, y: value)}
    with pytest.raises(BadInput, match=f"task.metrics.odd: .*{problem}") as error:
        tried_metrics(replace(DIGITS, metrics=metrics), 1, None)
    assert len(error.value.problems) == 1


def test_an_error_over_a_set_names_the_set() -> None:
    def failing(outputs: Tensor, y: Tensor) -> float:
        if len(y) == 7:
            raise ValueError("seven")
        return 0.0

    x, y = DIGITS.test
    task = replace(DIGITS, tests={"test": (x, y), "ood": (x[:7], y[:7])}, metrics={"bad": OverSet(failing)})
    with pytest.raises(
        BadInput, match=r"task\.metrics\.bad: ValueError: seven .*, on the evaluation set 'ood'"
    ):
        tried_metrics(task, 1, None)
    assert tried_metrics(task, 1, 6)[0].columns == {"bad": {"bad": False}}


def test_a_node_whose_own_samples_have_no_value_is_named() -> None:
    def classes(outputs: Tensor, y: Tensor) -> float:
        if len(y.unique()) < 2:
            raise ValueError("one class")
        return 1.0

    labels = DIGITS.train[1].numpy()
    personal = [np.empty(0, np.int64), np.arange(20), np.flatnonzero(labels == 4)[:9]]
    task = replace(DIGITS, metrics={"classes": OverSet(classes)})
    with pytest.raises(
        BadInput, match=r"ValueError: one class .*, on the evaluation set 'personal' of node 2"
    ):
        tried_metrics(task, 1, None, personal=personal)
    assert tried_metrics(task, 1, None, personal=personal[:2])[1] == []


def recall_of(label: int) -> Callable[[Tensor, Tensor], Tensor]:
    def share(outputs: Tensor, y: Tensor) -> Tensor:
        chosen = y == label
        return ((outputs.argmax(-1) == label) & chosen).sum() / chosen.sum().clamp(min=1)

    return share


def test_a_class_that_only_another_set_or_the_nodes_own_samples_have_is_tried() -> None:
    """``test`` lacks class 2, whose recall is 0 there, and on each part of it."""
    x, y = DIGITS.test
    without = (x[y != 2], y[y != 2])
    task = replace(DIGITS, tests={"test": without}, metrics={"recall": recall_of(2)})
    assert list(tried_metrics(task, 1, None)[0].means) == ["loss", "recall"]
    with pytest.raises(BadInput, match=r"task\.metrics\.recall is no mean"):
        tried_metrics(replace(task, tests={"test": without, "odd": (x, y)}), 1, None)
    with pytest.raises(BadInput, match=r"task\.metrics\.recall is no mean"):
        tried_metrics(task, 1, None, personal=[np.empty(0, np.int64), np.arange(100)])


@pytest.mark.parametrize("scores", [1, 2])
@pytest.mark.parametrize("positive", [1, 2, 3])
def test_rare_classes_let_no_wrong_metric_through(scores: int, positive: int) -> None:
    """Two classes, by two scores or by the sign of one. By chance, all of the rare class were right, or none."""

    def hits(outputs: Tensor) -> Tensor:
        return outputs[:, 1] > outputs[:, 0] if scores == 2 else outputs > 0

    def recall(outputs: Tensor, y: Tensor) -> Tensor:
        return (hits(outputs) & (y == 1)).sum() / (y == 1).sum().clamp(min=1)

    def f1(outputs: Tensor, y: Tensor) -> Tensor:
        return 2 * (hits(outputs) & (y == 1)).sum() / (hits(outputs).sum() + (y == 1).sum()).clamp(min=1)

    def right(outputs: Tensor, y: Tensor) -> Tensor:
        return (hits(outputs) == (y == 1)).float().mean()

    def recall_or_one(outputs: Tensor, y: Tensor) -> Tensor:
        return recall(outputs, y) if bool((y == 1).any()) else torch.tensor(1.0)

    metrics: dict[str, Any] = {"recall": recall, "f1": f1, "right": right}
    wrong = {"recall", "f1"}
    if positive > 1:  # the only sample is right, as it would be where there is none
        metrics["recall_or_one"] = recall_or_one
        wrong.add("recall_or_one")
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed)
        y = torch.zeros(600, dtype=torch.int64 if scores == 2 else torch.float32)
        y[torch.randperm(600, generator=rng)[:positive]] = 1
        outputs = torch.randn((24, 2) if scores == 2 else (24,), generator=rng)
        task = replace(DIGITS, loss=lambda outputs, y: outputs.mean(), metrics=metrics)
        some = y[torch.linspace(0, 599, 24).round().long()]
        assert set(no_means(EvaluationMetrics.of(task), outputs, some, [y], seed)) == wrong, seed


def test_the_only_sample_of_a_class_in_a_large_set_is_tried() -> None:
    y = torch.zeros(30_001, dtype=torch.int64)
    y[7] = 2
    task = replace(DIGITS, metrics={"recall": recall_of(2)})
    outputs = torch.randn(24, 10, generator=torch.Generator().manual_seed(1))
    assert set(no_means(EvaluationMetrics.of(task), outputs, y[-24:], [y], 1)) == {"recall"}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 4)

    def forward(self, inputs: Tensor) -> tuple[Tensor, None]:
        return self.out(inputs.flatten(1)), None


def test_broken_tasks_are_refused_in_the_name_of_the_part() -> None:
    def fails(outputs: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("no such table")

    def mixes(inputs: Tensor, generator: np.random.Generator) -> Tensor:
        raise ZeroDivisionError("mixes nothing")

    def tried(given: Task) -> None:
        layout = Layout.of(given.model())
        assert failure_of("sequential", given, SGD(lr=0.1), layout, "cpu", 6, seed=1) is None
        tried_metrics(given, 1, None)

    task = images("mlp")
    x, y = task.test
    few: Any = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, int(y.max())))  # noqa: E731 - one class is missing
    wrong: list[tuple[Task, str]] = [
        (replace(task, model=few), r"^task.loss, given outputs \(2, 3\) .*: IndexError: "),
        (
            replace(task, model=lambda: nn.Linear(3, 4)),
            r"^task.model, given inputs \(2, 1, 8, 8\) of torch.float32: RuntimeError: ",
        ),
        (replace(task, model=Pair), "^task.loss, given outputs tuple of 2 and targets "),
        (replace(task, metrics={"fails": fails}), "^task.metrics.fails, given .*: KeyError: .*no such table"),
        (replace(task, augment=mixes), "^task.augment, given .*: ZeroDivisionError: mixes nothing"),
        (replace(task, augment=lambda x, rng: x[..., :3]), "^task.model, given inputs "),
        (
            replace(task, tests={"test": (x, y), "far": (x, y + 9)}),
            "^task.loss, given outputs .* those in the evaluation set 'far' are 9 to 12$",
        ),
        (replace(task, loss=F.mse_loss), "^task.loss, given outputs "),
        (
            replace(task, metrics={"root": RootMean(lambda outputs, targets: -outputs.square().mean())}),
            "^task.metrics.root: a mean of -.*, which has no root; accepted: a metric that is not negative",
        ),
    ]
    tried(task)
    for other, problem in wrong:
        with pytest.raises(BadInput, match=problem):
            tried(other)


def test_outputs_of_none_are_passed_on() -> None:
    task = replace(images("mlp"), model=Pair, loss=lambda o, y: F.cross_entropy(o[0], y), metrics={})
    assert tried_metrics(task, 1, None)[1] == []
