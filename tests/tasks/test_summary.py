"""The summary of a task's data: what the sets share, values that are not finite, classes that training lacks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gossamer import BadInput
from gossamer.config.registry import build
from gossamer.tasks import Task, load_task
from gossamer.tasks import summary as module
from gossamer.tasks.summary import Shared, shared_samples, summary


def pair(inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
    return torch.as_tensor(np.asarray(inputs)), torch.as_tensor(np.asarray(targets))


def own(train: Any, test: Any, **more: Any) -> Task:
    return Task(model=lambda: nn.Linear(1, 1), train=train, test=test, loss=F.cross_entropy, **more)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", "int16", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (3, 8, 8)])
def test_shared_samples_are_counted_as_by_sets_of_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(shape))

    def drawn(rows: int) -> tuple[Any, Any]:
        return rng.integers(0, 2 if dtype == "bool" else 6, (rows, *shape)).astype(dtype), rng.integers(
            0, 3, rows
        )

    (x, y), (u, v) = drawn(50), drawn(30)
    again = rng.integers(0, 50, 10)
    u, v = np.concatenate([u, x[again]]), np.concatenate([v, y[again]])
    v[-1] = 7  # the same inputs with another target are another sample
    known = {(row.tobytes(), int(target)) for row, target in zip(x, y, strict=True)}
    expected = sum((row.tobytes(), int(target)) in known for row, target in zip(u, v, strict=True))
    assert expected >= 9
    assert shared_samples(pair(x, y), pair(u, v)) == Shared(expected, 40, 50)
    inputs = {"x": torch.as_tensor(x), "twice": torch.as_tensor(x)}
    others = {"x": torch.as_tensor(u), "twice": torch.as_tensor(u)}
    assert shared_samples((inputs, torch.as_tensor(y)), (others, torch.as_tensor(v))) == Shared(
        expected, 40, 50
    )


def test_samples_that_differ_in_one_value_only_are_not_shared() -> None:
    """The value is none of those that are compared first."""
    x = torch.zeros(4, 1000)
    other = x.clone()
    other[:, 7] = torch.tensor([0.0, 1.0, 2.0, 3.0])
    targets = torch.zeros(4)
    assert shared_samples((x, targets), (other, targets)) == Shared(1, 4, 4)
    turned = torch.zeros(1000, 4).T  # with other strides
    assert shared_samples((turned, targets), (other, targets)) == Shared(1, 4, 4)


def test_large_sets_are_compared_in_part_and_the_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.arange(1000).reshape(-1, 1), torch.zeros(1000, dtype=torch.int64)
    for name, value in (("MOST_ROWS", 100), ("MOST_BYTES", 1600)):  # 16 bytes a sample
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            # of 0, 10, 20, 30, 40, 50, ...
            assert shared_samples((x, y), (x[:50], y[:50])) == Shared(5, 50, 100)
            text = summary(own((x, y), (x, y)))["line"]
            assert "100 of 100 compared test samples are in 100 compared training samples" in text


def test_tensors_of_other_types_are_not_compared() -> None:
    x, y = torch.zeros(5, 2), torch.zeros(5)
    assert shared_samples((x, y), (x.double(), y)) is None
    assert shared_samples((x.to_sparse(), y), (x.to_sparse(), y)) is None


def test_own_tasks_are_described_by_their_tensors() -> None:
    rng = np.random.default_rng(0)
    train = pair(rng.standard_normal((40, 3)).astype(np.float32), np.arange(40) % 2)
    test = pair(rng.standard_normal((9, 3)).astype(np.float32), np.arange(9) % 4)
    train[0][[3, 8]], test[0][5, 2] = math.nan, math.inf
    record = summary(own(train, test, tests={"test": test, "far": train}))
    assert record["line"] == (
        "data: 40 training samples, 9 test samples, 40 far samples; inputs float32 [3], 2 classes (0, 1); no test sample is"
        " in the training set; 40 far samples are in the training set; 2 of 40 samples of train have values that are not"
        " finite, the first one sample 3; 1 of 9 samples of test have values that are not finite, the first one sample 5; 2"
        " of 40 samples of far have values that are not finite, the first one sample 3; classes without a training sample:"
        " 2, 3 (4 of 9 test samples)"
    )
    assert record["classes"] == 2
    assert record["inputs"] == {"dtype": "float32", "shape": [3]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_rare_types_and_empty_inputs_are_compared(dtype: torch.dtype) -> None:
    x, y = torch.arange(12.0).reshape(4, 3).to(dtype), torch.zeros(4)
    assert shared_samples((x, y), (x[:2], y[:2])) == Shared(2, 2, 4)
    assert shared_samples(
        ({"x": x, "none": torch.zeros(4, 0)}, y), ({"x": x, "none": torch.zeros(4, 0)}, y)
    ) == Shared(4, 4, 4)
    assert shared_samples((x.clone().requires_grad_(), y), (x, y)) == Shared(4, 4, 4)


@pytest.mark.usefixtures("shapes_unchecked")
def test_provenance_has_its_type() -> None:
    data = torch.zeros(3, 1), torch.zeros(3)
    with pytest.raises(
        BadInput, match="task.provenance: got 'a file'; accepted: a gossamer.tasks.Provenance"
    ):
        own(data, data, provenance="a file")


def test_large_finite_values_are_finite() -> None:
    """Their sum is not."""
    x = torch.full((20, 2), 3e38)
    assert summary(own((x, torch.zeros(20)), (x, torch.zeros(20))))["remarks"] == []


def test_embedded_digits_have_a_short_line() -> None:
    digits = load_task(build("task", {"name": "digits"}), None, 1)
    assert summary(digits)["line"] == (
        "data: scikit-learn's digits: 1,437 training samples, 360 test samples; test set: drawn, the same for every seed;"
        " inputs float32 [1, 8, 8], 10 classes (0, 1, 2 and 7 more); no test sample is in the training set"
    )


@pytest.mark.parametrize("name", ["least-squares", "synthetic", "tiny-mem"])
def test_generated_data_says_so(name: str) -> None:
    if name == "tiny-mem":
        pytest.importorskip("transformers")
    settings = {"samples": 60, "test_samples": 9} if name != "synthetic" else {"owners": 5}
    line = summary(load_task(build("task", {"name": name, **settings}), None, 1))["line"]
    assert line.startswith("data: generated")
