"""Metrics of a whole evaluation set in runs: recorded values against values by hand, under both engines."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassF1Score, MulticlassRecall

from gossamer import Algorithm, BadInput, Experiment, Node, Run, RunFailed, Task, resume, run
from gossamer.learning.evaluate import Evaluator
from gossamer.learning.rows import Rows
from gossamer.learning.thread_pool import ThreadPool
from gossamer.learning.trial import tried_metrics
from gossamer.messages.tags import Model
from gossamer.results import comparison
from gossamer.results.animation import write_animation
from gossamer.results.finals import final
from gossamer.results.folder import RunFolder
from gossamer.results.groups import groups
from gossamer.results.reading import read_metrics
from gossamer.results.report import page_data, render
from gossamer.results.spread import spread
from gossamer.results.tidy import comparison_metrics, finite, lower_is_better, metric_names
from gossamer.runtime import memory
from gossamer.runtime.setup import prepare
from gossamer.tasks import ClassAccuracy, Confusion, MacroF1, OverSet, accuracy

CLASSES = ("cat", "T-shirt/top", "loss")
WEIGHTS = torch.tensor([0.2, 1.0, 3.0])


def clouds(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three classes of unequal size, sorted."""
    rng = np.random.default_rng(seed)
    y = np.sort(rng.choice(3, samples, p=[0.6, 0.3, 0.1]))
    x = np.eye(3)[y] + 0.8 * rng.standard_normal((samples, 3))
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


METRICS: dict[str, Any] = {
    "accuracy": accuracy,
    "f1": MulticlassF1Score(3, average="macro"),
    "auc": OverSet(partial(roc_auc_score, multi_class="ovr")),
    "per_class": ClassAccuracy(CLASSES),
    "macro_f1": MacroF1(CLASSES),
    "confusion": Confusion(CLASSES),
    "spread": OverSet(lambda outputs, targets: outputs.std()),
    "several": MetricCollection(
        {"recall_of": MulticlassRecall(3, average="none"), "cm": MulticlassConfusionMatrix(3)}
    ),
}


def task() -> Task:
    train, test = clouds(240, 1), clouds(230, 2)
    return Task(lambda: nn.Linear(3, 3), train, test, F.cross_entropy, METRICS, classes=CLASSES)


def weighted() -> Task:
    return replace(task(), loss=nn.CrossEntropyLoss(weight=WEIGHTS), metrics={"accuracy": accuracy})


def experiment(**changes: Any) -> Experiment:
    fields: dict[str, Any] = {
        "task": f"{__name__}:task",
        "nodes": 3,
        "topology": "ring",
        "algorithm": "d-psgd",
        "optimizer": {"name": "sgd", "lr": 0.2},
        "stop": {"rounds": 2},
    }
    return Experiment.of({**fields, **changes})


def by_hand(module: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    """All values by NumPy, from all outputs."""
    with torch.no_grad():
        scores, y = module(x).double().numpy(), y.numpy()
    predicted = scores.argmax(1)
    confusion = np.array([[int(((y == i) & (predicted == j)).sum()) for j in range(3)] for i in range(3)])
    hits, true, given = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    chances = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    areas = []
    for c in range(3):  # the share of pairs in the right order
        pairs = np.subtract.outer(chances[y == c, c], chances[y != c, c])
        areas.append((pairs > 0).mean() + 0.5 * (pairs == 0).mean())
    return {
        "accuracy": hits.sum() / len(y),
        "f1": np.mean(2 * hits / (true + given)),
        "macro_f1": np.mean(2 * hits / (true + given)),
        "auc": np.mean(areas),
        "spread": scores.std(ddof=1),
        **{f"accuracy_{tag}": hits[c] / true[c] for c, tag in enumerate(("cat", "T_shirt_top", "loss"))},
        "confusion": confusion.tolist(),
        "recall_of": (hits / true).tolist(),
        "cm": confusion.tolist(),
    }


def check(row: dict[str, Any], expected: dict[str, Any], on: str = "test") -> None:
    for name, value in expected.items():
        assert np.array(row[f"{on}_{name}"]) == pytest.approx(np.array(value), abs=1e-6), name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    return {engine: run(experiment(engine=engine), folder / engine) for engine in ("simulate", "processes")}


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_recorded_values_are_those_by_hand(runs: dict[str, Run], engine: str) -> None:
    done = runs[engine]
    for rank in range(3):
        [row] = done.metrics.filter(node=rank, round=2).to_dicts()
        check(row, by_hand(done.module(rank), *task().test))
    assert done.metrics["test_confusion"].dtype == pl.List(pl.List(pl.Int64))
    assert done.metrics["test_recall_of"].dtype == pl.List(pl.Float64)


def test_the_average_model_is_measured_too(tmp_path: Path) -> None:
    done = run(experiment(evaluation={"nodes": "average"}), tmp_path)
    [row] = done.metrics.filter(node=-1, round=2).to_dicts()
    check(row, by_hand(done.module(), *task().test))


def test_a_server_is_measured_alone(tmp_path: Path) -> None:
    done = run(experiment(algorithm="fedavg"), tmp_path)
    measured = done.metrics.filter(pl.col("test_auc").is_not_null())
    assert measured["node"].n_unique() == 1
    [row] = measured.filter(pl.col("round") == measured["round"].max()).to_dicts()
    check(row, by_hand(done.module(row["node"]), *task().test))


def test_a_resumed_run_has_the_same_record(tmp_path: Path) -> None:
    rows: dict[str, Any] = {"evaluation": {"every_rounds": 1}}
    whole = run(experiment(stop={"rounds": 4}, **rows), tmp_path)
    part = run(experiment(checkpoint={"every_rounds": 2}, **rows), tmp_path)
    again = resume(part.path, ["stop.rounds=4"])
    columns = [name for name in whole.metrics.columns if name.startswith("test_")]
    assert whole.metrics.select("node", "round", *columns).equals(
        again.metrics.select("node", "round", *columns)
    )


def test_reports_cope_with_lists_and_show_one_class(runs: dict[str, Run], tmp_path: Path) -> None:
    done = runs["simulate"]
    assert done.class_columns == {
        "test_accuracy_cat": "cat",
        "test_accuracy_T_shirt_top": "T-shirt/top",
        "test_accuracy_loss": "loss",
    }
    names = metric_names(done)
    assert names[0] == "test_accuracy"
    assert not {"test_confusion", "test_recall_of", "test_cm"} & set(names)
    assert {*done.class_columns} <= set(names)
    assert not {*done.class_columns} & set(comparison_metrics([done]))
    assert "test accuracy cat" not in done.summary
    assert not lower_is_better("test_accuracy_loss", done.class_columns)
    [of_loss] = [metric for metric in page_data([done])["metrics"] if metric["name"] == "test_accuracy_loss"]
    assert (of_loss["low"], of_loss["share"]) == (False, True)
    of_class = final(done, "test_accuracy_loss")
    assert of_class is not None
    rows = done.metrics.filter(pl.col("node") >= 0, round=2)
    assert of_class.mean == pytest.approx(rows["test_accuracy_loss"].mean())
    data = page_data([done])
    titles = {metric["name"]: metric["title"] for metric in data["metrics"] if metric["of_class"]}
    assert titles["test_accuracy_T_shirt_top"] == "accuracy of T-shirt/top, test set"
    assert "T-shirt/top" in render([done])
    write_animation([done], "test_accuracy_cat", tmp_path / "cat.gif")
    assert (tmp_path / "cat.gif").stat().st_size > 0


def test_one_class_by_distance_from_a_poisoned_node(tmp_path: Path) -> None:
    """The anchor is the only node without the class "2"."""
    poison = [{"name": "label-flip", "share": 1.0, "at": {"rank": 0}}]
    given = experiment(
        task={"name": "digits", "metrics": ["accuracy_per_class"]}, nodes=4, poison=poison, stop={"rounds": 2}
    )
    done = run(given, tmp_path)
    table = spread(groups([done]), "test_accuracy_2").sort("hops")
    rows = done.metrics.filter(pl.col("node") >= 0, round=2).sort("node")["test_accuracy_2"].to_list()
    assert table["final"].to_list() == pytest.approx([rows[0], (rows[1] + rows[3]) / 2, rows[2]])


def test_a_loss_with_class_weights_is_that_of_the_whole_set(tmp_path: Path) -> None:
    given = experiment(task=f"{__name__}:weighted")
    assert any(note.startswith("task.loss is no mean over samples") for note in prepare(given).notes())
    done = run(given, tmp_path)
    x, y = task().test
    for rank in range(3):
        with torch.no_grad():
            chances = done.module(rank)(x).double().softmax(1).numpy()
        weight = WEIGHTS.double().numpy()[y]
        expected = -(weight * np.log(chances[np.arange(len(y)), y])).sum() / weight.sum()
        [row] = done.metrics.filter(node=rank, round=2).to_dicts()
        assert row["test_loss"] == pytest.approx(expected, rel=1e-6)


def test_many_models_are_measured_as_each_alone() -> None:
    given, workers = task(), ThreadPool(2)
    rows = Rows(12)
    vectors = [torch.randn(12, generator=torch.Generator().manual_seed(seed)) for seed in range(9)]
    models = [Model(rows.store(vector), torch.empty(0)) for vector in vectors]
    messages: list[str] = []
    together = Evaluator(given, 1, threads=workers, say=messages.append, rows=rows).test_each(models)
    workers.close()
    for model, values in zip(models, together, strict=True):
        module = given.model()
        nn.utils.vector_to_parameters(model.parameters, module.parameters())
        assert isinstance(values, dict)
        check({f"test_{name}": value for name, value in values.items()}, by_hand(module, *given.test))
    assert messages == []


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_models_and_outputs_that_are_not_finite_have_no_values(value: float) -> None:
    """scikit-learn and torchmetrics refuse NaN, which must not end a run. Finite parameters may have infinite outputs."""
    given = task()
    metrics, _ = tried_metrics(given, 1, None)
    model = Model(torch.full((12,), value), torch.empty(0))
    [values] = Evaluator(given, 1, metrics=metrics).columns_each([model])
    assert isinstance(values, dict)
    assert set(values) == {
        f"test_{column}" for column in (*metrics.numbers(), "confusion", "recall_of", "cm")
    }
    assert math.isnan(values["test_auc"])
    if value != 3e38:
        assert all(math.isnan(values[f"test_{name}"]) for name in metrics.numbers())
        assert values["test_confusion"] is None


def streamed() -> Task:
    return replace(task(), metrics={"f1": MulticlassF1Score(3)})


def test_outputs_that_do_not_fit_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """230 samples with 3 outputs of 4 bytes each, and a copy, for one worker."""
    given = experiment(engine={"name": "simulate", "workers": 1})
    monkeypatch.setattr(memory, "available_bytes", lambda: 2 * 230 * 3 * 4 - 1)
    with pytest.raises(
        BadInput, match=r"^task.metrics: the outputs for the 230 samples of 'test'.*torchmetrics"
    ):
        prepare(given)
    assert prepare(given.model_copy(update={"task": experiment(task=f"{__name__}:streamed").task}))
    monkeypatch.setattr(memory, "available_bytes", lambda: 2 * 230 * 3 * 4)
    assert prepare(given)


@pytest.mark.parametrize(
    ("changes", "at_once"),
    [
        ({}, 3),
        ({"evaluation": {"nodes": 2}}, 2),
        ({"evaluation": {"nodes": "average"}}, 1),
        ({"algorithm": "fedavg"}, 1),
        ({"engine": {"name": "simulate", "workers": 2}}, 2),
        ({"engine": "processes"}, 3),
        ({"engine": {"name": "processes", "train_at_once": 1}}, 1),
    ],
)
def test_outputs_are_needed_for_the_models_that_are_evaluated_at_once(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], at_once: int
) -> None:
    """On a machine with many cores, 3 nodes at the most. Each node of ``processes`` evaluates its own model."""
    monkeypatch.setattr(memory, "cores", lambda: 64)
    monkeypatch.setattr(memory, "available_bytes", lambda: at_once * 2 * 230 * 3 * 4)
    prepare(experiment(**changes))
    monkeypatch.setattr(memory, "available_bytes", lambda: at_once * 2 * 230 * 3 * 4 - 1)
    plural = "s" * (at_once > 1)
    with pytest.raises(BadInput, match=rf"need .* for {at_once} model{plural} at a time, .*engine\."):
        prepare(experiment(**changes))


class Recording(Algorithm):
    column: str

    async def run(self, node: Node) -> None:
        async for _ in node.rounds():
            node.record(**{self.column: 1.0})


@pytest.mark.parametrize("column", ["test_accuracy", "test_confusion", "test_else", "personal_loss"])
def test_columns_of_evaluation_sets_cannot_be_recorded(tmp_path: Path, column: str) -> None:
    """They were dropped without a word."""
    algorithm = {"name": f"{__name__}:Recording", "column": column}
    held_out = {"name": "iid", "personal_fraction": 0.2}
    with pytest.raises(
        RunFailed, match=f"node.record: {column}: metrics of an evaluation set have such names"
    ):
        run(experiment(task=f"{__name__}:weighted", algorithm=algorithm, partition=held_out), tmp_path)


def test_personal_is_a_name_like_others_without_personal_samples(tmp_path: Path) -> None:
    algorithm = {"name": f"{__name__}:Recording", "column": "personal_weight"}
    done = run(experiment(algorithm=algorithm), tmp_path)
    assert done.metrics.filter(pl.col("node") >= 0, round=2)["personal_weight"].to_list() == [1.0] * 3


def test_a_target_is_a_column_of_numbers(tmp_path: Path) -> None:
    goal: dict[str, Any] = {"rounds": 2, "target": {"metric": "test_confusion", "value": 1}}
    with pytest.raises(
        BadInput, match=r"stop.target.metric: got 'test_confusion'; accepted: .*test_accuracy_cat"
    ):
        run(experiment(stop=goal), tmp_path)
    goal["target"] = {"metric": "test_accuracy_cat", "value": 0.0}
    assert run(experiment(stop=goal), tmp_path).metrics["round"].max() <= 1


def test_comparisons_of_one_class(runs: dict[str, Run]) -> None:
    alike = groups(list(runs.values()))
    chosen = comparison.quantities(list(runs.values()), ["test_accuracy_loss"])
    rows = finite(comparison.compare(alike, chosen).rows).to_dicts()
    means = [
        run.metrics.filter(pl.col("node") >= 0, round=2)["test_accuracy_loss"].mean() for run in runs.values()
    ]
    assert [row["mean"] for row in rows] == pytest.approx(means)
    assert [measure.unit for measure in chosen] == ["share"]
    [_, by_time] = comparison.quantities(list(runs.values()), ["test_loss"], ["test_accuracy_loss=0.25"])[-2:]
    assert "≥ 25 %" in by_time.table
    assert json.loads(json.dumps(rows)) == rows


def test_a_column_of_lists_is_no_metric_to_compare(runs: dict[str, Run]) -> None:
    with pytest.raises(
        BadInput, match="^--metrics test_confusion: its values are lists; accepted: .*test_accuracy"
    ):
        comparison.quantities([runs["simulate"]], ["test_confusion"])


def test_lists_that_are_not_alike_become_text(tmp_path: Path) -> None:
    """A node's lists are a column of lists only if all nodes record lists of one form."""
    folder = RunFolder.create(tmp_path, "lists", experiment="name: lists\n", environment={})
    rows: dict[str, list[Any]] = {
        "ints": [[1, 2], [3]],
        "floats": [[1, 2.5], []],
        "deep": [[[1.0]], None],
        "ragged": [[1, [2]], [3]],
        "mixed": [[1], 2],
        "words": [["a"], ["b"]],
    }
    for number in range(2):  # a segment for each process
        with folder.segment("metrics", number) as segment:
            segment.append(
                {"node": number, "round": 0, **{name: values[number] for name, values in rows.items()}}
            )
    table = read_metrics(folder.path)
    assert {name: table[name].dtype for name in rows} == {
        "ints": pl.List(pl.Int64),
        "floats": pl.List(pl.Float64),
        "deep": pl.List(pl.List(pl.Float64)),
        **dict.fromkeys(("ragged", "mixed", "words"), pl.String),
    }
    assert table["floats"].to_list() == [[1.0, 2.5], []]
    assert [json.loads(text) for text in table["mixed"]] == [[1], 2]
