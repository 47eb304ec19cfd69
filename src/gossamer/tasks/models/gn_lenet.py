"""GN-LeNet: the small convolutional network of the decentralized-learning literature."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 - torch's own name
from jaxtyping import Float
from torch import Tensor, nn

from gossamer.errors import BadInput

SMALLEST = 8
"""Least height and width: three poolings by two must leave one pixel."""


class GNLeNet(nn.Module):
    """LeNet with group normalisation: 89,834 parameters for 3×32×32 inputs and 10 classes.

    Hsieh et al., "The Non-IID Data Quagmire of Decentralized Machine Learning" (ICML 2020) name the network
    and show why batch normalisation fails on skewed data where group normalisation does not. The widths (32,
    32, 64), the kernels (5, same padding) and the two groups are those of decentralizepy's ``LeNet`` (Dhasade
    et al., EuroMLSys 2023), so that accuracies can be compared with papers that used it. Each of its three
    blocks computes::

        pool(relu(norm(conv(x))))           5×5 convolution, GroupNorm(2), ReLU, 2×2 max pooling

    followed by one linear layer. The code applies the ReLU after the pooling instead: the maximum and a
    monotone function commute, so outputs and gradients have the same bits, for a quarter of the ReLU's work.

    Args:
        shape: (channels, height, width) of one image; height and width of at least 8.
        classes: number of outputs.

    Raises:
        BadInput: for images smaller than 8×8.
    """

    def __init__(self, shape: tuple[int, int, int] = (3, 32, 32), classes: int = 10) -> None:
        super().__init__()
        channels, height, width = shape
        if min(height, width) < SMALLEST:
            raise BadInput(
                f"gn-lenet: images of {height}x{width} pixels; accepted: at least {SMALLEST}x{SMALLEST}"
            )
        self.conv1 = nn.Conv2d(channels, 32, kernel_size=5, padding=2)
        self.norm1 = nn.GroupNorm(2, 32)
        self.conv2 = nn.Conv2d(32, 32, kernel_size=5, padding=2)
        self.norm2 = nn.GroupNorm(2, 32)
        self.conv3 = nn.Conv2d(32, 64, kernel_size=5, padding=2)
        self.norm3 = nn.GroupNorm(2, 64)
        self.fc = nn.Linear(64 * (height // 8) * (width // 8), classes)

    def forward(
        self, images: Float[Tensor, "samples channels height width"]
    ) -> Float[Tensor, "samples classes"]:
        """The class scores (before softmax) of a batch of images."""
        x = F.relu(F.max_pool2d(self.norm1(self.conv1(images)), 2))
        x = F.relu(F.max_pool2d(self.norm2(self.conv2(x)), 2))
        x = F.relu(F.max_pool2d(self.norm3(self.conv3(x)), 2))
        scores: Tensor = self.fc(x.flatten(start_dim=1))
        return scores
