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
    """Some models in a store, and who evaluates them."""

    def __init__(self, task: Task, count: int, workers: int = 1, gap: bool = False) -> None:
        self.workers = ThreadPool(workers)
        self.single = Evaluator(task, 1, workers=self.workers)
        models = [start(task, seed) for seed in range(count)]
        self.rows = Rows(len(models[0].parameters))
        self.models, between = [], []
        for model in models:
            self.models.append(Model(self.rows.store(model.parameters), model.buffers))
            if gap:
                between.append(self.rows.fresh())  # so that they don't lie together
        self.said: list[str] = []
        self.many = Evaluator(task, 1, workers=self.workers, say=self.said.append, rows=self.rows)

    def found(self) -> list[MetricValues]:
        """What is said of the models at once."""
        found = self.many.test_each(self.models)
        self.workers.close()
        assert not any(isinstance(each, Exception) for each in found)
        return found  # type: ignore[return-value]


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


def close(some: Sequence[MetricValues], others: Sequence[MetricValues]) -> bool:
    return all(one == pytest.approx(other, rel=1e-5) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("gap", [False, True])
def test_it_is_the_mean_over_the_whole_set(gap: bool) -> None:
    """With a last batch that is smaller than the others, and a last chunk."""
    task = images("logistic")
    assert len(task.test[0]) % BATCH != 0
    scene = Scene(task, 7, gap=gap)
    assert close(scene.found(), [by_numpy(model, *task.test) for model in scene.models])


@pytest.mark.parametrize("model", MODELS)
def test_models_of_every_kind(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "cpu", (1 << 30, 4))
    scene = Scene(images(model), 5)
    before = [[part.clone() for part in each] for each in scene.models]
    alone = [scene.single.test(each) for each in scene.models]
    assert close(scene.found(), alone)
    assert scene.said == []
    for each, kept in zip(scene.models, before, strict=True):
        assert all(torch.equal(part, other) for part, other in zip(each, kept, strict=True))


def test_matrix_factorization() -> None:
    rng = torch.Generator().manual_seed(1)
    pairs = torch.stack(
        [torch.randint(20, (230,), generator=rng), torch.randint(30, (230,), generator=rng)], 1
    )
    data = pairs, torch.randn(230, generator=rng)

    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets) ** 2).mean()

    task = Task(lambda: MatrixFactorization(20, 30, 0.5, 3), data, data, squared, {"rmse": RootMean(squared)})
    scene = Scene(task, 5)
    for model, found in zip(scene.models, scene.found(), strict=True):
        user, item = np.split(model.parameters[:150].double().numpy().reshape(50, 3), [20])
        left, right = pairs.numpy().T
        ratings = 0.5 + (user[left] * item[right]).sum(1)  # (biases start at zero)
        error = ((ratings - data[1].numpy()) ** 2).mean()
        assert found == pytest.approx({"loss": error, "rmse": error**0.5}, rel=1e-5)


@pytest.mark.parametrize("model", ["mlp", "logistic"])
def test_the_bits_are_the_same_again_and_for_any_number_of_workers(model: str) -> None:
    task = images(model, test_samples=130)
    first, again, two = (Scene(task, 6, workers).found() for workers in (1, 1, 2))
    assert first == again == two


@pytest.mark.parametrize(("count", "most"), [(1, 8), (7, 4), (8, 8)])
def test_who_is_judged_together_does_not_matter(
    count: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, "cpu", (1 << 30, most))
    scene = Scene(images("mlp", test_samples=30), count)
    together = scene.found()
    assert close(together, [scene.single.test(model) for model in scene.models])
    monkeypatch.setitem(LIMITS, "cpu", (1 << 30, 8))
    assert together == Scene(images("mlp", test_samples=30), count).found()  # to the bit


def test_convolutions_are_judged_one_at_a_time() -> None:
    def convolutions() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 200, 3, padding=1), nn.Flatten(), nn.Linear(12800, 4))

    scene = Scene(replace(images("logistic", test_samples=100), model=convolutions), 4)
    assert scene.found() == [scene.single.test(model) for model in scene.models]
    assert scene.said == []


def test_a_metric_that_only_knows_one_model_is_asked_one_by_one() -> None:
    def spread(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.tensor(float(outputs.max()) - float(outputs.min()))

    scene = Scene(replace(images("mlp"), metrics={"spread": spread}), 5)
    assert scene.found() == [scene.single.test(model) for model in scene.models]
    [said] = scene.said
    assert said.startswith("evaluation: one model at a time")
    assert "spread" in said or ".item()" in said or "vmap" in said


def test_what_a_metric_raises_is_the_models_own() -> None:
    def picky(outputs: Tensor, targets: Tensor) -> Tensor:
        if not bool(outputs.isfinite().all()):
            raise ArithmeticError("not finite")
        return outputs.mean()

    scene = Scene(replace(images("mlp"), metrics={"picky": picky}), 5)
    bad = scene.models[3] = Model(scene.models[3].parameters * float("nan"), scene.models[3].buffers)
    found = scene.many.test_each(scene.models)
    assert [isinstance(each, ArithmeticError) for each in found] == [False, False, False, True, False]
    assert found[0] == scene.single.test(scene.models[0])
    with pytest.raises(ArithmeticError):
        scene.single.test(bad)


def test_a_metric_may_give_a_plain_number() -> None:
    metrics: Any = {"seven": lambda outputs, targets: 7}
    scene = Scene(replace(images("mlp"), metrics=metrics), 5)
    assert [each["seven"] for each in scene.found()] == [7.0] * 5
    assert scene.said == []


@given(st.lists(st.lists(st.integers(-2, 2), min_size=3, max_size=3), min_size=1, max_size=5), st.booleans())
def test_the_forms_for_many_models_give_what_torch_gives(rows: list[list[int]], keepdim: bool) -> None:
    """The first of equal scores wins."""
    scores = torch.tensor(rows, dtype=torch.float32)
    with ManyModels(), torch.no_grad():
        got = (
            scores.argmax(-1, keepdim),
            torch.argmax(input=scores, dim=0),
            scores.argmax(),
            scores.argmax(axis=1),  # type: ignore[call-overload]  # as NumPy's users say it
        )
    expected = scores.argmax(-1, keepdim), torch.argmax(scores, dim=0), scores.argmax(), scores.argmax(1)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
