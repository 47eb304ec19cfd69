"""Many models evaluated at once, against NumPy and against one model at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learning_tasks import MODELS, images, start
from torch import Tensor, nn

from gossamer.learning.evaluate import BATCH, Evaluator, MetricValues
from gossamer.learning.many import ManyModels
from gossamer.learning.rows import Rows
from gossamer.learning.thread_pool import LIMITS, ThreadPool
from gossamer.messages.tags import Model
from gossamer.tasks.models import MatrixFactorization
from gossamer.tasks.task import RootMean, Task


class Scene:
    """Models in a store, with a single and a batched evaluator."""

    def __init__(self, task: Task, count: int, workers: int = 1, gap: bool = False) -> None:
        self.threads = ThreadPool(workers)
        self.single = Evaluator(task, 1, threads=self.threads)
        models = [start(task, seed) for seed in range(count)]
        self.rows = Rows(len(models[0].parameters))
        self.models, between = [], []
        for model in models:
            self.models.append(Model(self.rows.store(model.parameters), model.buffers))
            if gap:
                between.append(self.rows.fresh())  # so that the rows are not contiguous
        self.messages: list[str] = []
        self.many = Evaluator(task, 1, threads=self.threads, say=self.messages.append, rows=self.rows)

    def results(self) -> list[MetricValues]:
        """Metrics of all models, evaluated together."""
        results = self.many.test_each(self.models)
        self.threads.close()
        assert not any(isinstance(result, Exception) for result in results)
        return results  # type: ignore[return-value]


def by_numpy(model: Model, inputs: Tensor, targets: Tensor) -> MetricValues:
    """Logistic regression in double precision."""
    x, y = inputs.flatten(1).double().numpy(), targets.numpy()
    weight, bias = np.split(model.parameters.double().numpy(), [4 * x.shape[1]])
    scores = x @ weight.reshape(4, -1).T + bias
    chances = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    return {
        "loss": float(-np.log(chances[np.arange(len(y)), y]).mean()),
        "accuracy": float((scores.argmax(1) == y).mean()),
    }


def close(first: Sequence[MetricValues], second: Sequence[MetricValues]) -> bool:
    return all(one == pytest.approx(other, rel=1e-5) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("gap", [False, True])
def test_metrics_are_means_over_the_whole_set(gap: bool) -> None:
    """The last batch and the last chunk are smaller than the others."""
    task = images("logistic")
    assert len(task.test[0]) % BATCH != 0
    scene = Scene(task, 7, gap=gap)
    assert close(scene.results(), [by_numpy(model, *task.test) for model in scene.models])


@pytest.mark.parametrize("model", MODELS)
def test_models_of_every_kind_match_single_evaluation(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "cpu", (1 << 30, 4))
    scene = Scene(images(model), 5)
    before = [[part.clone() for part in model] for model in scene.models]
    alone = [scene.single.test(model) for model in scene.models]
    assert close(scene.results(), alone)
    assert scene.messages == []
    for after, kept in zip(scene.models, before, strict=True):
        assert all(torch.equal(part, other) for part, other in zip(after, kept, strict=True))


def test_matrix_factorization_matches_numpy() -> None:
    rng = torch.Generator().manual_seed(1)
    pairs = torch.stack(
        [torch.randint(20, (230,), generator=rng), torch.randint(30, (230,), generator=rng)], 1
    )
    data = pairs, torch.randn(230, generator=rng)

    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets) ** 2).mean()

    task = Task(lambda: MatrixFactorization(20, 30, 0.5, 3), data, data, squared, {"rmse": RootMean(squared)})
    scene = Scene(task, 5)
    for model, metrics in zip(scene.models, scene.results(), strict=True):
        user, item = np.split(model.parameters[:150].double().numpy().reshape(50, 3), [20])
        left, right = pairs.numpy().T
        ratings = 0.5 + (user[left] * item[right]).sum(1)  # biases start at zero
        error = ((ratings - data[1].numpy()) ** 2).mean()
        assert metrics == pytest.approx({"loss": error, "rmse": error**0.5}, rel=1e-5)


@pytest.mark.parametrize("model", ["mlp", "logistic"])
def test_bits_do_not_depend_on_the_number_of_workers(model: str) -> None:
    task = images(model, test_samples=130)
    first, again, two = (Scene(task, 6, workers).results() for workers in (1, 1, 2))
    assert first == again == two


@pytest.mark.parametrize(("count", "limit"), [(1, 8), (7, 4), (8, 8)])
def test_grouping_of_models_does_not_change_the_bits(
    count: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, "cpu", (1 << 30, limit))
    scene = Scene(images("mlp", test_samples=30), count)
    together = scene.results()
    assert close(together, [scene.single.test(model) for model in scene.models])
    monkeypatch.setitem(LIMITS, "cpu", (1 << 30, 8))
    assert together == Scene(images("mlp", test_samples=30), count).results()  # to the bit


def test_large_convolutions_are_evaluated_one_at_a_time() -> None:
    def convolutions() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 200, 3, padding=1), nn.Flatten(), nn.Linear(12800, 4))

    scene = Scene(replace(images("logistic", test_samples=100), model=convolutions), 4)
    assert scene.results() == [scene.single.test(model) for model in scene.models]
    assert scene.messages == []


def test_unbatchable_metric_is_evaluated_one_model_at_a_time() -> None:
    def spread(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.tensor(float(outputs.max()) - float(outputs.min()))

    scene = Scene(replace(images("mlp"), metrics={"spread": spread}), 5)
    alone = [scene.single.test(model) for model in scene.models]
    assert close(scene.results(), alone)
    [message] = scene.messages
    assert message.startswith("evaluation: metrics of one model at a time")
    assert "spread" in message or ".item()" in message or "vmap" in message
    assert close(scene.results(), alone)
    assert len(scene.messages) == 1


def test_unbatchable_model_is_evaluated_one_model_at_a_time() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            scale = float(self.layer.weight.abs().max())  # vmap can't run this
            scores: Tensor = self.layer(x.flatten(1)) / scale
            return scores

    scene = Scene(replace(images("mlp"), model=Reading), 5)
    assert scene.results() == [scene.single.test(model) for model in scene.models]
    [message] = scene.messages
    assert message.startswith("evaluation: one model at a time")


def test_metric_error_belongs_to_its_model_only() -> None:
    def picky(outputs: Tensor, targets: Tensor) -> Tensor:
        if not bool(outputs.isfinite().all()):
            raise ArithmeticError("not finite")
        return outputs.mean()

    scene = Scene(replace(images("mlp"), metrics={"picky": picky}), 5)
    bad = scene.models[3] = Model(scene.models[3].parameters * float("nan"), scene.models[3].buffers)
    results = scene.many.test_each(scene.models)
    assert [isinstance(result, ArithmeticError) for result in results] == [False, False, False, True, False]
    assert results[0] == scene.single.test(scene.models[0])
    with pytest.raises(ArithmeticError):
        scene.single.test(bad)


def test_metric_may_return_a_plain_number() -> None:
    metrics: Any = {"seven": lambda outputs, targets: 7}
    scene = Scene(replace(images("mlp"), metrics=metrics), 5)
    assert [result["seven"] for result in scene.results()] == [7.0] * 5
    assert scene.messages == []


@given(st.lists(st.lists(st.integers(-2, 2), min_size=3, max_size=3), min_size=1, max_size=5), st.booleans())
def test_argmax_for_many_models_matches_torch(rows: list[list[int]], keepdim: bool) -> None:
    """The first of equal scores wins."""
    scores = torch.tensor(rows, dtype=torch.float32)
    with ManyModels(), torch.no_grad():
        got = (
            scores.argmax(-1, keepdim),
            torch.argmax(input=scores, dim=0),
            scores.argmax(),
            scores.argmax(axis=1),  # type: ignore[call-overload]  # NumPy's name for dim
        )
    expected = scores.argmax(-1, keepdim), torch.argmax(scores, dim=0), scores.argmax(), scores.argmax(1)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
