"""Synthetic data for any number of nodes: classification with heterogeneous owners, and linear regression."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from jaxtyping import Float
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from gossamer.config.ranges import LogDeviation, NonNegativeFloat32
from gossamer.config.registry import register
from gossamer.files import check_room
from gossamer.randomness import generator
from gossamer.tasks.metrics import NewMetrics
from gossamer.tasks.provenance import Provenance
from gossamer.tasks.task import ModelField, Task, TaskSource, classification, model_factory


@register("task", "synthetic")
class Synthetic(TaskSource):
    """Synthetic(α, β) of Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, section 5.1.

    Owner k labels its inputs by its own linear model: y = argmax(W x + b), where the entries of W and b are
    drawn from N(u, 1), and u from N(0, α). The entry j of its inputs (counted from 1) is drawn from N(v_j,
    j^-1.2), where v_j is drawn from N(B, 1), and B from N(0, β). Without ``alpha``, all owners share one
    model, whose entries are drawn from N(0, 1); without ``beta``, all v are 0. Without both, this is the
    paper's Synthetic-IID.

    Owner k has ``least`` samples plus a log-normal draw with median ``median`` and ``sigma``, rounded down;
    the defaults are those of the published code. A tenth of them, at least one, is for testing. The partition
    is ``natural``: one owner per node."""

    owners: PositiveInt = 30
    alpha: NonNegativeFloat32 | None = 1.0
    beta: NonNegativeFloat32 | None = 1.0
    features: PositiveInt = 60  # length of an input
    classes: int = Field(default=10, ge=2)
    least: int = Field(default=50, ge=2)
    median: NonNegativeFloat32 = 54.6
    sigma: LogDeviation = 2.0
    model: ModelField = Field(default="logistic", validate_default=True)
    metrics: NewMetrics  # in addition to the accuracy

    def load(self, data_root: Path | None, seed: int) -> Task:
        fewest = self.owners * self.least
        check_room(
            f"task: synthetic: the {fewest:,} samples of {self.owners:,} owners",
            fewest * (4.0 * self.features + 8),
        )
        rng = generator(seed, "synthetic")
        deviations = np.arange(1, self.features + 1) ** -0.6  # the square roots of the variances
        counts = self.least + (self.median * rng.lognormal(0, self.sigma, self.owners)).astype(np.int64)
        x = np.empty((counts.sum(), self.features), np.float32)
        y = np.empty(counts.sum(), np.int64)
        weights, v = rng.normal(0, 1, (self.classes, self.features + 1)), np.zeros(self.features)
        for count, end in zip(counts, np.cumsum(counts), strict=True):
            if self.alpha is not None:
                weights = rng.normal(rng.normal(0, self.alpha**0.5), 1, weights.shape)
            if self.beta is not None:
                v = rng.normal(rng.normal(0, self.beta**0.5), 1, v.shape)
            samples = v + deviations * rng.standard_normal((count, self.features))
            x[end - count : end] = samples
            scores = samples @ weights[:, :-1].T + weights[:, -1]  # the last column is b
            y[end - count : end] = scores.argmax(axis=1)
        # Draws are independent, so an owner's first samples can serve for testing.
        position = np.arange(len(y)) - np.repeat(np.cumsum(counts) - counts, counts)
        in_test = torch.from_numpy(position < np.repeat(np.maximum(counts // 10, 1), counts))
        owner = torch.from_numpy(np.repeat(np.arange(self.owners), counts))
        inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
        names = [str(number) for number in range(self.classes)]
        train, test = (inputs[~in_test], targets[~in_test]), (inputs[in_test], targets[in_test])
        origin = Provenance("generated from the seed", "a tenth of each owner's samples")
        more = {"groups": owner[~in_test], "provenance": origin}
        return classification(self.model, data_root, train, test, names, self.metrics, **more)


def half_mean_square(outputs: Tensor, targets: Tensor) -> Float[Tensor, ""]:
    """Half the mean squared error, over samples and targets."""
    return 0.5 * F.mse_loss(outputs, targets)


@register("task", "least-squares")
class LeastSquares(TaskSource):
    """Linear regression y = V x + noise, learned by one linear layer without bias. The loss is half the mean squared
    error, so that of the true weights is noise^2 / 2: 0.005 for noise 0.1. Every draw is keyed by the seed.

    Inputs x and true weights V have independent standard normal entries (V divided by sqrt(features), so that
    V x has unit variance); the noise is normal. With one target the loss is 1/(2S) ||X w - y||^2, whose minimum is the
    least-squares solution that numpy's ``lstsq`` gives."""

    features: PositiveInt = 10  # length of an input
    samples: PositiveInt = 1000  # number of training samples
    test_samples: PositiveInt = 1000  # number of test samples, from the same distribution
    targets: PositiveInt = 1  # length of a target
    noise: NonNegativeFloat32 = 0.1  # standard deviation of the noise on a target
    # Number of natural owners, for the partition natural; sample i belongs to owner i mod groups. None: no owners.
    groups: Annotated[int, Field(gt=0)] | None = None
    # Heterogeneity of the owners: owner g's true weights are V plus this factor times its own standard normal
    # matrix (also divided by sqrt(features)). 0: all owners have the same distribution.
    heterogeneity: NonNegativeFloat32 = 0.0
    model: ModelField = Field(default={"name": "linear", "bias": False}, validate_default=True)

    @model_validator(mode="after")
    def _check_groups(self) -> LeastSquares:
        if self.groups is not None and self.groups > self.samples:
            raise ValueError("at most as many groups as samples")
        if self.groups is None and self.heterogeneity > 0:
            raise ValueError("heterogeneity with groups only")
        return self

    def load(self, data_root: Path | None, seed: int) -> Task:
        owners = self.groups or 1
        common = generator(seed, "least-squares-weights").standard_normal((self.targets, self.features))
        extra = generator(seed, "least-squares-owners").standard_normal((owners, self.targets, self.features))
        weights = 1 / np.sqrt(self.features) * (common + self.heterogeneity * extra)

        def draw(purpose: str, samples: int) -> tuple[Tensor, Tensor]:
            rng = generator(seed, purpose)
            x = rng.standard_normal((samples, self.features))
            y = np.einsum("sf,stf->st", x, weights[np.arange(samples) % owners])
            y += self.noise * rng.standard_normal(y.shape)
            return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.float32))

        return Task(
            model=model_factory(self.model, data_root, shape=(self.features,), classes=self.targets),
            train=draw("least-squares-train", self.samples),
            test=draw("least-squares-test", self.test_samples),
            loss=half_mean_square,
            groups=None if self.groups is None else torch.arange(self.samples) % owners,
            provenance=Provenance("generated from the seed", "drawn from the same distribution"),
        )
