from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from learning_tasks import images, start
from torch import nn

from gossamer.learning.evaluate import BATCH, Evaluator
from gossamer.learning.rows import Rows
from gossamer.learning.thread_pool import ThreadPool
from gossamer.messages.tags import Model
from gossamer.randomness import generator
from gossamer.tasks.task import ExpMean, RootMean, Task


def direct(task: Task, seed: int, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """One forward pass over everything, in double precision."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = task.model().double().eval()
    with torch.no_grad():
        outputs = module(inputs.double())
    picked = outputs.log_softmax(1)[torch.arange(len(targets)), targets]
    return {
        "loss": float(-picked.mean()),
        "accuracy": float((outputs.argmax(1) == targets).double().mean()),
    }


@pytest.mark.parametrize("model", ["mlp", "gn-lenet", "batch norm", "dropout"])
def test_metrics_are_means_over_the_whole_set(model: str) -> None:
    """The last batch is smaller than the others."""
    task = images(model)
    assert len(task.test[0]) % BATCH != 0
    evaluator = Evaluator(task, seed=1)
    assert len(evaluator.sets["test"][0]) == 230
    got = evaluator.test(start(task, 4))
    assert got == pytest.approx(direct(task, 4, *task.test), rel=1e-5)


def test_test_sample_is_keyed_and_without_repetition() -> None:
    task = images("logistic")
    model = start(task, 4)
    some, again, other = (Evaluator(task, seed, 130) for seed in (1, 1, 2))
    assert len(some.sets["test"][0]) == 130
    assert some.test(model) == again.test(model) != other.test(model)
    accuracies = some.test(model)["accuracy"] * 130
    assert accuracies == pytest.approx(round(accuracies))
    assert Evaluator(task, 1, 10_000).test(model) == Evaluator(task, 1).test(model)


def test_each_evaluation_set_is_sampled_separately() -> None:
    task = images("logistic")
    model = start(task, 4)
    inputs, targets = task.train
    several = replace(task, tests={"test": task.test, "ood": (inputs, targets)})
    evaluator = Evaluator(several, 1, 50)
    columns = evaluator.columns(model)
    chosen = np.sort(generator(1, "evaluation-ood").choice(len(inputs), 50, replace=False))
    expected = direct(task, 4, inputs[chosen], targets[chosen])
    assert {name: columns[f"ood_{name}"] for name in expected} == pytest.approx(expected, rel=1e-5)
    alone = Evaluator(task, 1, 50).test(model)
    assert {name: columns[f"test_{name}"] for name in alone} == alone  # bit for bit
    assert evaluator.columns_each([model, model]) == [columns, columns]


def test_training_samples_of_a_node_are_evaluated() -> None:
    task = images("mlp")
    chosen = np.array([5, 3, 59, 0])
    got = Evaluator(task, 1).train(start(task, 4), chosen)
    inputs, targets = task.train
    assert got == pytest.approx(direct(task, 4, inputs[chosen], targets[chosen]), rel=1e-5)


def test_evaluation_reads_the_buffers_without_changing_them() -> None:
    task = images("batch norm")
    model = start(task, 4)
    moved = Model(model.parameters, model.buffers + 1)
    evaluator = Evaluator(task, 1)
    before = model.buffers.clone()
    first = evaluator.test(model)
    assert evaluator.test(moved)["loss"] != pytest.approx(first["loss"])
    assert evaluator.test(model) == first
    assert torch.equal(model.buffers, before)


class Sampling(nn.Module):
    """A model that draws a latent variable in evaluation too, as variational models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layer(inputs.flatten(1))
        return scores + torch.randn_like(scores)


def test_stochastic_model_is_evaluated_with_reproducible_draws() -> None:
    task = replace(images("mlp"), model=Sampling)
    models = [start(task, seed) for seed in range(12)]
    alone = Evaluator(task, 1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    once = [alone.test(model) for model in models]
    assert torch.equal(torch.get_rng_state(), before)  # evaluation leaves the generator of training alone
    workers = ThreadPool(4)
    shared = Evaluator(task, 1, threads=workers, rows=Rows(len(models[0].parameters)))
    assert shared.test_each(models) == once
    assert [shared.test(model) for model in reversed(models)] == once[::-1]
    assert Evaluator(task, 2).test(models[0]) != once[0]
    workers.close()


class SlowlyMade(Sampling):
    def __init__(self) -> None:
        super().__init__()
        time.sleep(0.05)


def test_making_modules_on_several_threads_keeps_the_draws() -> None:
    task = replace(images("mlp"), model=SlowlyMade)
    models = [start(task, seed) for seed in range(4)]
    alone = [Evaluator(task, 1).test(model) for model in models]
    workers = ThreadPool(4)
    shared = Evaluator(task, 1, threads=workers)
    before = torch.get_rng_state()
    assert shared.test_each(models) == alone
    assert torch.equal(torch.get_rng_state(), before)
    workers.close()


def test_function_of_a_mean_covers_all_batches_together() -> None:
    def hits(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(1) == targets).float().mean()

    task = replace(images("mlp"), metrics={"hits": hits, "root": RootMean(hits), "exp": ExpMean(hits)})
    inputs, targets = task.test
    # The hits are sorted into the first batches, so the mean of the batches' roots is another number.
    scores = task.model()
    model = start(task, 4)
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(model.parameters, scores.parameters())
        right = scores(inputs).argmax(1) == targets
    order = torch.argsort(right.int(), descending=True, stable=True)
    task = replace(task, test=(inputs[order], targets[order]))
    values = Evaluator(task, 1).test(model)
    share = right.double().mean().item()
    assert 0 < share < 1
    assert values["hits"] == pytest.approx(share)
    assert values["root"] == pytest.approx(share**0.5)
    assert values["exp"] == pytest.approx(math.exp(share))


@pytest.mark.parametrize(
    ("given", "returned"), [(torch.zeros(100), r"a tensor of shape \(100,\)"), (None, "NoneType")]
)
@pytest.mark.parametrize("field", ["loss", "metrics.accuracy"])
def test_metric_that_is_not_a_single_value_is_named(field: str, given: object, returned: str) -> None:
    task = images("mlp")
    wrong: Any = lambda outputs, targets: given  # noqa: E731
    task = replace(task, loss=wrong) if field == "loss" else replace(task, metrics={"accuracy": wrong})
    message = rf"^task.{field}: returns {returned}; accepted: the mean over the samples, one value$"
    with pytest.raises(TypeError, match=message):
        Evaluator(task, seed=1).test(start(task, 4))


def test_metric_may_return_a_plain_number() -> None:
    task = images("mlp")
    numbers: Any = {"two": lambda outputs, targets: 2, "half": lambda outputs, targets: np.float32(0.5)}
    values = Evaluator(replace(task, metrics=numbers), seed=1).test(start(task, 4))
    assert (values["two"], values["half"]) == (2.0, 0.5)


def test_error_of_torch_names_the_function_and_its_inputs() -> None:
    task = images("mlp")
    inputs, targets = task.test
    problem = (
        r"^task.model, given inputs \(100, 1, 8, 7\) of torch.float32: RuntimeError: (addmm: )?mat1 and mat2"
    )
    narrow = replace(task, test=(inputs[..., :7], targets))
    with pytest.raises(RuntimeError, match=problem):
        Evaluator(narrow, seed=1).test(start(task, 4))
    problem = r"^task.loss, given outputs \(100, 4\) of torch.float32 and targets \(100,\) of torch.int64: IndexError: "
    with pytest.raises(RuntimeError, match=problem):
        Evaluator(replace(task, test=(inputs, targets + 9)), seed=1).test(start(task, 4))


def test_exception_of_a_metric_is_passed_on_unchanged() -> None:
    def fails(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such table")

    task = replace(images("mlp"), metrics={"fails": fails})
    with pytest.raises(KeyError, match="no such table"):
        Evaluator(task, seed=1).test(start(task, 4))


def test_no_value_of_a_model_that_is_not_finite_is_finite() -> None:
    """Class 0 would be right for some samples: argmax takes the first NaN."""
    task = images("mlp")
    model = start(task, 4)
    parameters = model.parameters.clone()
    parameters[-1] = math.nan
    values = Evaluator(task, 1, 100).columns(Model(parameters, model.buffers))
    assert {"test_loss", "test_accuracy"} <= values.keys()
    assert all(math.isnan(value) for value in values.values())
