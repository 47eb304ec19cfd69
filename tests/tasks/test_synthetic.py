from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import torch

import gossamer
from gossamer.tasks import Synthetic


def owners(task: gossamer.Task) -> list[np.ndarray]:
    """The training inputs of each owner."""
    assert task.groups is not None
    return [task.train[0][task.groups == owner].numpy() for owner in range(int(task.groups.max()) + 1)]


def test_every_owner_has_its_own_linear_model():
    """A perceptron (Rosenblatt's rule) separates the classes of one owner, but not of all owners together."""

    def mistakes(inputs: torch.Tensor, targets: torch.Tensor, epochs: int = 100) -> int:
        x = torch.cat([inputs.double(), torch.ones(len(inputs), 1, dtype=torch.float64)], dim=1)
        weights = torch.zeros(int(targets.max()) + 1, x.shape[1], dtype=torch.float64)
        for _ in range(epochs):
            for sample, target in zip(x, targets, strict=True):
                predicted = int((weights @ sample).argmax())
                if predicted != target:
                    weights[target] += sample
                    weights[predicted] -= sample
        return int(((x @ weights.T).argmax(dim=1) != targets).sum())

    task = Synthetic(owners=3, features=6, classes=3, least=40, median=0).load(None, 5)
    assert task.groups is not None
    inputs, targets = task.train
    assert [mistakes(inputs[task.groups == k], targets[task.groups == k]) for k in range(3)] == [0, 0, 0]
    assert mistakes(inputs, targets) > 5
    assert (
        mistakes(
            *Synthetic(owners=3, features=6, classes=3, alpha=None, least=40, median=0).load(None, 5).train
        )
        == 0
    )


def test_input_variances_and_centers_are_as_published():
    inputs = owners(Synthetic(owners=400, features=8, beta=4.0, least=300, median=0).load(None, 1))
    within = np.mean([samples.var(axis=0, ddof=1) for samples in inputs], axis=0)
    np.testing.assert_allclose(within, np.arange(1, 9) ** -1.2, rtol=0.02)
    centers = np.stack([samples.mean(axis=0) for samples in inputs])  # v = B + N(0, 1), one B for all entries
    assert np.mean(centers.mean(axis=1) ** 2) == pytest.approx(4 + 1 / 8, rel=0.2)  # 3 standard errors
    assert centers.var(axis=1, ddof=1).mean() == pytest.approx(1, rel=0.1)


def test_owners_have_minimum_samples_and_a_test_tenth():
    task = Synthetic(owners=200, least=20, median=30, sigma=1).load(None, 2)
    assert task.groups is not None
    train = np.bincount(task.groups.numpy())
    assert len(train) == 200
    assert train.min() >= 18
    assert np.median(train / 0.9 - 20) == pytest.approx(30, rel=0.25)
    assert len(task.test[1]) / len(task.train[1]) == pytest.approx(1 / 9, rel=0.1)
    fixed = Synthetic(owners=5, least=20, median=0).load(None, 2)
    assert (len(fixed.train[1]), len(fixed.test[1])) == (90, 10)


def test_data_are_keyed_by_seed_and_learnable(tmp_path):
    one, again, other = (Synthetic().load(None, seed) for seed in (1, 1, 2))
    assert torch.equal(one.train[0], again.train[0])
    assert not torch.equal(one.train[1][:50], other.train[1][:50])
    settings = {
        "nodes": 20,
        "task": {"name": "synthetic", "owners": 20, "alpha": None, "beta": None},
        "partition": "natural",
        "topology": {"name": "random-regular", "degree": 4},
        "algorithm": "d-psgd",
        "optimizer": {"name": "sgd", "lr": 0.05},
        "batch_size": 10,
        "stop": {"rounds": 30},
    }
    metrics = gossamer.run(gossamer.Experiment.of(settings), tmp_path).metrics
    losses = metrics.group_by("round", maintain_order=True).agg(pl.col("test_loss").mean())["test_loss"]
    assert losses[-1] < 0.9 * losses[0]  # the owners share one model
