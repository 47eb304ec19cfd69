"""Multi-layer perceptrons, and logistic regression as the one without a hidden layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor, nn


class MLP(nn.Module):
    """A multi-layer perceptron with ReLU between its linear layers.

    Without hidden layers it is multinomial logistic regression: one linear layer, whose softmax the
    cross-entropy loss applies.

    Args:
        shape: shape of one sample; flattened.
        classes: number of outputs.
        hidden: widths of the hidden layers, first to last.
    """

    def __init__(self, shape: Sequence[int], classes: int = 10, hidden: Sequence[int] = ()) -> None:
        super().__init__()
        widths = (math.prod(shape), *hidden, classes)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])  # no ReLU on the scores

    def forward(self, samples: Float[Tensor, " samples *shape"]) -> Float[Tensor, "samples classes"]:
        """The class scores (before softmax) of a batch of samples."""
        scores: Tensor = self.layers(samples.flatten(start_dim=1))
        return scores
