from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from gossamer.errors import BadInput
from gossamer.tasks import RootMean, Task, accuracy


def task(**changes):
    defaults = {
        "model": lambda: nn.Linear(2, 3),
        "train": (torch.zeros(4, 2), torch.tensor([0, 1, 2, 0])),
        "test": (torch.zeros(2, 2), torch.tensor([0, 1])),
        "loss": nn.functional.cross_entropy,
    }
    return Task(**{**defaults, **changes})


def test_only_class_numbers_are_labels():
    assert task().labels().tolist() == [0, 1, 2, 0]
    assert task(train=(torch.zeros(4, 2), torch.zeros(4))).labels() is None
    assert task(train=(torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.int64))).labels() is None
    assert task().samples == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train": (torch.zeros(3, 2), torch.zeros(2))},
            "task.train: got \\[3, 2\\]; accepted: as many",
        ),
        (
            {"test": (torch.zeros(0, 2), torch.zeros(0))},
            "task.test: got \\[0, 0\\]; accepted: as many",
        ),
        (
            {"groups": torch.zeros(3, dtype=torch.int64)},
            r"task.groups: got torch.int64 of shape \(3,\); accepted: .* \(4\)",
        ),
        (
            {"groups": torch.zeros(4)},
            "task.groups: got torch.float32 of shape .*; accepted: a tensor of integers",
        ),
        ({"classes": ["a", "b"]}, "task.train: got \\[0, 2\\]; accepted: class numbers from 0 to 1"),
        (
            {"classes": ["a"], "train": (torch.zeros(4, 2), torch.zeros(4))},
            "task.train: got torch.float32 of shape .*; accepted: one class number",
        ),
    ],
)
def test_inconsistent_task_is_refused(changes, message):
    with pytest.raises(BadInput, match=message):
        task(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": nn.Linear(2, 3)},
            "task.model: got Linear.*; accepted: a function that creates an nn.Module",
        ),
        ({"train": torch.zeros(4, 2)}, "task.train: got torch.float32 of shape .*; accepted: two tensors"),
        (
            {"train": (torch.zeros(4, 2).numpy(), torch.zeros(4))},
            "task.train: got .*; accepted: two tensors",
        ),
        (
            {"test": (torch.zeros(4), torch.zeros(4), 1)},
            "task.test: got .*; accepted: two tensors",
        ),
        (
            {"test": (torch.zeros(2, 2), torch.tensor(1))},
            "task.test: got .*; accepted: two tensors of samples",
        ),
        ({"loss": "cross_entropy"}, "task.loss: got 'cross_entropy'; accepted: a function of"),
        ({"loss": nn.CrossEntropyLoss}, "task.loss: got <class .*; accepted: a function of"),
        (
            {"loss": lambda outputs: outputs.mean()},
            "task.loss: got .*; accepted: a function of",
        ),
        ({"metrics": {"accuracy": 1}}, "task.accuracy: got 1; accepted: a function of"),
        (
            {"groups": [0, 0, 1, 1, 2]},
            "task.groups: got .*; accepted: a tensor",
        ),
    ],
)
def test_wrong_types_are_refused(changes, message):
    made = task()
    for name, value in changes.items():  # bypasses the type checks, which users don't have
        field, value = ("tests", {"test": value}) if name == "test" else (name, value)
        object.__setattr__(made, field, value)
    with pytest.raises(BadInput, match=f"^{message}"):
        made._check()


def test_class_names_may_be_an_array():
    made = task()
    object.__setattr__(made, "classes", np.array(["a", "b", "c"]))  # bypasses the type checks
    made._check()


def test_test_argument_is_the_first_of_tests():
    pair, other = task().test, (torch.ones(3, 2), torch.tensor([0, 1, 2]))
    assert list(task().tests) == ["test"]
    made = task(test=None, tests={"test": pair, "ood": other})
    assert list(made.tests) == ["test", "ood"]
    assert made.test is pair
    assert list(task(tests={"ood": other}).tests) == ["test", "ood"]
    assert replace(made, test=other).tests == {"test": other, "ood": other}
    assert replace(made, tests={"test": other}).tests == {"test": other}


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ({}, r"task.tests: got \[\]; accepted: .* the first 'test'"),
        ({"ood": 0, "test": 0}, r"task.tests: got \['ood', 'test'\]; accepted"),
        ({"test": 0, "train": 0}, "task.tests: got 'train'; accepted: an identifier"),
        ({"test": 0, "bytes_x": 0}, "task.tests: got 'bytes_x'; accepted: an identifier"),
        ({"test": 0, "a-b": 0}, "task.tests: got 'a-b'; accepted: an identifier"),
        ({"test": 0, "ood": (torch.zeros(0, 2), torch.zeros(0))}, "task.ood: got .0, 0."),
    ],
)
def test_unrecordable_evaluation_sets_are_refused(tests, message):
    pair = task().test
    tests = {name: pair if value == 0 else value for name, value in tests.items()}
    with pytest.raises(BadInput, match=f"^{message}"):
        task(test=None, tests=tests)


def test_accuracy_is_the_share_of_correct_classes():
    outputs = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    assert accuracy(outputs, torch.tensor([1, 0, 0, 0])).item() == 0.75


def test_root_mean_is_the_root_of_the_metric():
    rmse = RootMean(nn.functional.mse_loss)
    assert rmse(torch.tensor([1.0, 5.0]), torch.tensor([1.0, 1.0])).item() == pytest.approx(8**0.5)
