"""Synthetic linear regression. Its optimum has a closed form, which helps to check algorithms and engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from jaxtyping import Float
from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator
from torch import Tensor

from gossamer.config.registry import register
from gossamer.randomness import generator
from gossamer.tasks.task import ModelField, Task, TaskSource, model_factory


def half_mean_square(outputs: Tensor, targets: Tensor) -> Float[Tensor, ""]:
    """Half the mean squared residual, over samples and targets."""
    return 0.5 * F.mse_loss(outputs, targets)


@register("task", "least-squares")
class LeastSquares(TaskSource):
    """Linear regression y = V x + noise, learned by one linear layer without bias; every draw is keyed by the seed.

    Inputs x and true weights V have independent standard normal entries (V divided by sqrt(features), so that
    V x has unit variance); the noise is normal. With one target the loss is 1/(2S) ||X w - y||^2, whose minimum is the
    least-squares solution that numpy's ``lstsq`` gives."""

    features: PositiveInt = 10  # length of an input
    samples: PositiveInt = 1000  # number of training samples
    test_samples: PositiveInt = 1000  # number of test samples, from the same distribution
    targets: PositiveInt = 1  # length of a target
    noise: NonNegativeFloat = 0.1  # standard deviation of the noise on a target
    # Number of natural owners, for the partition natural; sample i belongs to owner i mod groups. None: no owners.
    groups: Annotated[int, Field(gt=0)] | None = None
    # How much the owners differ: owner g's true weights are V plus this times its own standard normal matrix (divided
    # by sqrt(features) too). 0: all owners have the same distribution.
    heterogeneity: NonNegativeFloat = 0.0
    model: ModelField = Field(default={"name": "linear", "bias": False}, validate_default=True)

    @model_validator(mode="after")
    def _check_groups(self) -> LeastSquares:
        if self.groups is not None and self.groups > self.samples:
            raise ValueError("at most as many groups as samples")
        if self.groups is None and self.heterogeneity > 0:
            raise ValueError("heterogeneity with groups only")
        return self

    def load(self, data_root: Path | None, seed: int) -> Task:
        """The task; see :meth:`TaskSource.load`."""
        owners = self.groups or 1
        common = generator(seed, "least-squares-weights").standard_normal((self.targets, self.features))
        own = generator(seed, "least-squares-owners").standard_normal((owners, self.targets, self.features))
        weights = 1 / np.sqrt(self.features) * (common + self.heterogeneity * own)

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
        )
