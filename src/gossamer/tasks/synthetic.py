"""Synthetic classification with owners that differ: data for any number of nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, PositiveInt

from gossamer.config.registry import register
from gossamer.randomness import generator
from gossamer.tasks.task import ModelField, Task, TaskSource, classification


@register("task", "synthetic")
class Synthetic(TaskSource):
    """Synthetic(α, β) of Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, section 5.1.

    Owner k labels its inputs by its own linear model: y = argmax(W x + b), where the entries of W and b are drawn from
    N(u, 1), and u from N(0, α). The entry j of its inputs (counted from 1) is drawn from N(v_j, j^-1.2), where v_j is drawn
    from N(B, 1), and B from N(0, β). So α says how much the owners' models differ, and β how much their inputs do. Without
    ``alpha`` all owners have one model, whose entries are drawn from N(0, 1), and without ``beta`` all v are 0; without both
    this is the paper's Synthetic-IID.

    Owner k has ``least`` samples and as many more as a log-normal draw of median ``median`` and ``sigma`` gives, rounded
    down; the defaults are those of the published code. A tenth of them, at least one, is for the test set. The partition is
    ``natural``: one owner a node."""

    owners: PositiveInt = 30
    alpha: NonNegativeFloat | None = 1.0
    beta: NonNegativeFloat | None = 1.0
    features: PositiveInt = 60  # length of an input
    classes: int = Field(default=10, ge=2)
    least: int = Field(default=50, ge=2)
    median: NonNegativeFloat = 54.6
    sigma: NonNegativeFloat = 2.0
    model: ModelField = Field(default="logistic", validate_default=True)

    def load(self, data_root: Path | None, seed: int) -> Task:
        """The task; see :meth:`TaskSource.load`."""
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
            own = v + deviations * rng.standard_normal((count, self.features))
            x[end - count : end] = own
            y[end - count : end] = (own @ weights[:, :-1].T + weights[:, -1]).argmax(
                axis=1
            )  # the last column is b
        # Draws are independent, so that the first samples of an owner are as good for testing as any.
        place = np.arange(len(y)) - np.repeat(np.cumsum(counts) - counts, counts)
        test = torch.from_numpy(place < np.repeat(np.maximum(counts // 10, 1), counts))
        owner = torch.from_numpy(np.repeat(np.arange(self.owners), counts))
        inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
        names = [str(number) for number in range(self.classes)]
        train, held = (inputs[~test], targets[~test]), (inputs[test], targets[test])
        return classification(self.model, data_root, train, held, names, groups=owner[~test])
