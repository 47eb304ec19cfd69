"""Mixing many nodes at once: weighted sums of whole rows of the store, in column blocks that fit a core's cache.

The sums are those of :func:`gossamer.learning.mixing.combine` to the bit: own value first, then in rank order,
each a fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import embedding_bag

from gossamer.learning.rows import Rows, select
from gossamer.learning.workers import Workers

CACHE_BYTES = 1 << 20
"""A block of all rows that are read takes about this much, so that each is read from memory once."""
_COLUMNS = 64
"""Blocks are multiples of this many columns."""


@dataclass(frozen=True, eq=False)
class Sum:
    """``weights[0] * vectors[0] + weights[1] * vectors[1] + ...`` of whole rows [P]."""

    vectors: Sequence[Tensor]
    weights: Sequence[float]


def mix_rows(rows: Rows, sums: Sequence[Sum], workers: Workers) -> list[Float[Tensor, " params"]] | None:
    """The sums, as new rows; None if any vector is not a whole row. Each row that is read is read once."""
    numbers = rows.numbers([vector for each in sums for vector in each.vectors])
    if numbers is None:
        return None
    results = [rows.fresh() for _ in sums]
    read, terms = np.unique(numbers, return_inverse=True)
    written = rows.numbers(results)
    assert written is not None
    source, target = select(read), select(written)
    indices = torch.from_numpy(terms)
    weights = torch.tensor([weight for each in sums for weight in each.weights], dtype=torch.float32)
    counts = torch.tensor([len(each.vectors) for each in sums])
    offsets = counts.cumsum(0) - counts
    width = max(1, CACHE_BYTES // (4 * len(read) * _COLUMNS)) * _COLUMNS

    def block(start: int) -> None:
        columns = rows.matrix[:, start : start + width]
        columns[target] = embedding_bag(
            indices, columns[source].contiguous(), offsets, mode="sum", per_sample_weights=weights
        )

    workers.map(block, range(0, rows.length, width))
    return results
