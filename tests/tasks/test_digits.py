from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.tasks import Digits


def rows(images: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def test_arrays_have_documented_shapes_types_and_range():
    task = Digits().load(None, 1)
    (x, y), (x_test, y_test) = task.train, task.test
    assert x.shape == (1437, 1, 8, 8)
    assert x_test.shape == (360, 1, 8, 8)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert (x.min(), x.max()) == (0, 1)
    assert len(y) == 1437
    assert len(y_test) == 360
    assert list(task.classes) == [str(i) for i in range(10)]
    assert task.model()(x[:3]).shape == (3, 10)


def test_splits_are_the_source_without_overlap():
    task = Digits().load(None, 1)
    source, labels = load_digits(return_X_y=True)
    ours = np.concatenate([task.train[0], task.test[0]]).reshape(-1, 64) * 16
    targets = np.concatenate([task.train[1], task.test[1]])
    # The same images with the same labels, each once, in another order.
    key = lambda x, y: sorted(zip(map(tuple, x.astype(int)), y, strict=True))  # noqa: E731
    assert key(ours, targets.tolist()) == key(source, labels.tolist())


def test_the_test_set_is_the_same_for_every_seed():
    assert torch.equal(Digits().load(None, 1).test[0], Digits().load(None, 2).test[0])


def test_samples_selects_a_keyed_nested_subset():
    whole = Digits().load(None, 1)
    few, more = (Digits(samples=n).load(None, 1) for n in (50, 200))
    assert few.train[0].shape == (50, 1, 8, 8)
    assert rows(few.train[0]) <= rows(more.train[0]) <= rows(whole.train[0])
    assert rows(few.train[0]) != rows(Digits(samples=50).load(None, 2).train[0])
    assert torch.equal(few.train[0], Digits(samples=50).load(None, 1).train[0])
    assert len(few.test[0]) == 360


def test_too_many_samples_are_refused():
    with pytest.raises(BadInput, match=r"task.samples: 1438; accepted: at most 1437"):
        Digits(samples=1438).load(None, 1)


@pytest.mark.parametrize("model", ["mlp", "logistic", "gn-lenet"])
def test_initial_loss_is_near_that_of_guessing(model):
    task = Digits(model=model, samples=10).load(None, 1)
    loss = task.loss(task.model()(task.train[0]), task.train[1])
    assert loss.shape == ()
    assert 1 < loss.item() < 5  # near log(10) before training


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"model": {"name": "logistic", "hidden": (3,)}}, "task.model.hidden: unknown field"),
        ({"samples": 0}, "greater than 0"),
        ({"model": {"name": "mlp", "hidden": [0]}}, r"task.model.hidden.0: got 0; accepted: greater than 0"),
        ({"model": "resnet"}, "task.model: unknown name 'resnet' .*accepted: .*gn-lenet"),
        (
            {"model": "torch:nan"},
            "task.model 'torch:nan' is float; accepted: a Component class or a function",
        ),
    ],
)
def test_bad_parameters_are_refused(parameters, message):
    with pytest.raises(BadInput, match=message):
        build("task", {"name": "digits", **parameters})


def test_saved_parameters_are_accepted():
    saved = Digits(model="logistic").spec()
    assert build("task", saved) == Digits(model="logistic")


def test_logistic_regression_learns_the_digits():
    task = Digits(model="logistic").load(None, 1)
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(100):
        optimizer.zero_grad()
        task.loss(model(task.train[0]), task.train[1]).backward()
        optimizer.step()
    assert task.metrics["accuracy"](model(task.test[0]), task.test[1]).item() > 0.9
