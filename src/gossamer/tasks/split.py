"""Training and test samples of each owner, for data sets that come without a test set."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from gossamer.randomness import SHARED, generator


def split_by_owner(
    owners: Int[np.ndarray, " samples"], fraction: float, purpose: str | None = None
) -> tuple[Int[np.ndarray, " train"], Int[np.ndarray, " test"]]:
    """Indices of the training and of the test samples, both ascending.

    Of an owner with n samples, ``fraction * n`` are for training, rounded, but so that whoever has two
    samples or more has both kinds; a single sample is for training.

    It does not depend on the experiment's seed: runs with different seeds are evaluated on the same samples.

    Args:
        owners: whose each sample is, numbers from 0.
        fraction: share of the training samples, above 0 and below 1.
        purpose: the training samples are drawn with this key, for each owner apart; None: they are an
            owner's first ones, in the order of the data.
    """
    grouped = np.split(np.argsort(owners, kind="stable"), np.cumsum(np.bincount(owners))[:-1])
    train, test = [], []
    for owner, members in enumerate(grouped):
        if purpose is not None:
            members = generator(0, purpose, SHARED, owner).permutation(members)
        kept = min(max(round(fraction * len(members)), 1), max(len(members) - 1, 1))
        train.append(members[:kept])
        test.append(members[kept:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))
