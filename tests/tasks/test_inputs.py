"""Named inputs of several tensors, and augmentation, with both trainers and both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import gossamer
from gossamer import BadInput, Experiment
from gossamer.learning.evaluate import Evaluator
from gossamer.learning.optimizer import SGD
from gossamer.learning.parameters import Layout, initial_model
from gossamer.learning.rows import Rows
from gossamer.learning.trainer import BatchedTrainer, GradientJob, SequentialTrainer, TrainJob
from gossamer.randomness import SHARED, generator
from gossamer.tasks import Task

SAMPLES = 40


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 1), nn.Linear(2, 1)

    def forward(self, *, right: Tensor, left: Tensor) -> Tensor:
        return self.left(left) + self.right(right)


class OnePart(nn.Module):
    """The parameters of :class:`TwoParts`, for the same inputs in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x[:, :3]) + self.right(x[:, 3:])


def mirrored(inputs: Tensor, rng: np.random.Generator) -> Tensor:
    signs = rng.choice([-1.0, 1.0], (len(inputs), 1)).astype(np.float32)
    return inputs * torch.from_numpy(signs)


def task(named: bool, augment: Any = None) -> Task:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((SAMPLES, 5)).astype("float32"))
    y = x.sum(1, keepdim=True)
    inputs = {"left": x[:, :3], "right": x[:, 3:]} if named else x
    pair = inputs, y
    model = TwoParts if named else OnePart
    return Task(model, pair, pair, F.mse_loss, {"mae": F.l1_loss}, augment=augment)


@pytest.mark.parametrize("kind", [SequentialTrainer, BatchedTrainer])
def test_named_inputs_are_trained_and_evaluated_like_one_tensor(kind: Any) -> None:
    results = []
    for named in (True, False):
        problem = task(named)
        rows = Rows(Layout.of(problem.model()).size)
        start = initial_model(problem.model, 3)
        batches = [torch.arange(start_row, start_row + 8) for start_row in (0, 9, 20)]
        jobs = [TrainJob(start, batches, 0.05, {}, 0), TrainJob(start, batches[::-1], 0.05, {}, 1)]
        trained = kind(problem, SGD(lr=0.05), rows).train(jobs)
        evaluator = Evaluator(problem, 1, samples=30, rows=rows if kind is BatchedTrainer else None)
        models = [result.model for result in trained]
        columns = evaluator.columns_each(models)
        train_metrics = evaluator.train(models[0], np.arange(7))
        results.append((torch.stack([result.model.parameters for result in trained]), columns, train_metrics))
    (parameters, columns, train_metrics), (expected, expected_columns, expected_metrics) = results
    torch.testing.assert_close(parameters, expected)
    assert [row == pytest.approx(e, rel=1e-5) for row, e in zip(columns, expected_columns, strict=True)] == [
        True,
        True,
    ]
    assert train_metrics == pytest.approx(expected_metrics, rel=1e-5)


@pytest.mark.parametrize("kind", [SequentialTrainer, BatchedTrainer])
def test_augmentation_is_keyed_by_job_and_step(kind: Any) -> None:
    problem = task(False, mirrored)
    inputs, targets = problem.train
    start = initial_model(problem.model, 3)
    batches = [torch.arange(8), torch.arange(12, 20)]
    trainer = kind(problem, SGD(lr=0.1), Rows(Layout.of(problem.model()).size))
    results = trainer.train([TrainJob(start, batches, 0.1, {}, seed) for seed in (5, 6)])
    for result, seed in zip(results, (5, 6), strict=True):
        module = OnePart()
        nn.utils.vector_to_parameters(start.parameters.clone(), module.parameters())
        for number, batch in enumerate(batches):
            x = mirrored(inputs[batch], generator(seed, "augment", SHARED, number))
            module.zero_grad()
            F.mse_loss(module(x), targets[batch]).backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.1 * parameter.grad
        torch.testing.assert_close(
            result.model.parameters, nn.utils.parameters_to_vector(module.parameters()).detach()
        )
    [first] = trainer.gradient([GradientJob(start, batches[0], 5)])
    [again] = trainer.gradient([GradientJob(start, batches[0], 5)])
    [other] = trainer.gradient([GradientJob(start, batches[0], 6)])
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(problem.train[0], inputs)  # the data are unchanged


def test_both_engines_end_with_the_same_bits(tmp_path: Path) -> None:
    name = Path(__file__).stem
    runs = []
    for engine in ({"name": "simulate", "trainer": "sequential"}, {"name": "processes"}):
        settings = {"nodes": 3, "task": f"{name}:augmented", "topology": "complete", "algorithm": "d-psgd"}
        experiment = Experiment.of({**settings, "stop": {"rounds": 4}, "engine": engine})
        runs.append(gossamer.run(experiment, tmp_path))
    first, second = (run.parameters for run in runs)
    assert torch.equal(torch.as_tensor(first), torch.as_tensor(second))


def augmented() -> Task:
    def named(inputs: dict[str, Tensor], rng: np.random.Generator) -> dict[str, Tensor]:
        return {**inputs, "left": mirrored(inputs["left"], rng)}

    return task(True, named)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (({}, torch.zeros(3)), "task.train: got .*; accepted: two tensors of samples"),
        (({"a": torch.zeros(3), "b": torch.zeros(2)}, torch.zeros(3)), "task.train: got .3, 2, 3.; accepted"),
        (({"a": 3}, torch.zeros(3)), "task.train: got .*; accepted: two tensors of samples"),
    ],
)
def test_inconsistent_inputs_are_refused(train: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Task(TwoParts, train, train, F.mse_loss)


def test_poisons_of_named_inputs_are_refused() -> None:
    name = Path(__file__).stem
    settings = {"nodes": 3, "task": f"{name}:augmented", "algorithm": "d-psgd", "stop": {"rounds": 1}}
    poison = [{"name": "label-flip", "at": {"rank": 0}}]
    with pytest.raises(BadInput, match="poison: the task's inputs are several tensors"):
        gossamer.run(Experiment.of({**settings, "poison": poison}))
