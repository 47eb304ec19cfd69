"""The mean of models, and their distance from it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def average(vectors: Sequence[Float[Tensor, " params"]]) -> Float[Tensor, " params"]:
    """The mean of vectors, accumulated in float64 one after the other, since they may fill half of the memory."""
    total = torch.zeros(vectors[0].shape, dtype=torch.float64, device=vectors[0].device)
    for vector in vectors:
        total += vector
    return total / len(vectors)


def consensus_distance(
    parameters: Sequence[Float[Tensor, " params"]], mean: Float[Tensor, " params"] | None = None
) -> float:
    """The distance of n models from consensus: ``sqrt(1/n sum_i ||x_i - mean(x)||^2)`` (Kong et al., ICML 2021, section 3),
    summed in float64; ``mean`` is their :func:`average` if it is known already."""
    mean = average(parameters) if mean is None else mean
    total = math.fsum(float((vector - mean).square().sum()) for vector in parameters)
    return math.sqrt(total / len(parameters))
