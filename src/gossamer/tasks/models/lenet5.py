"""LeNet-5 (LeCun, Bottou, Bengio, Haffner, 1998)."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from jaxtyping import Float
from torch import Tensor, nn

from gossamer.errors import BadInput

SIDES = {28: 2, 32: 0}
"""Side of the images -> padding of the first convolution. The paper pads MNIST's 28 pixels to 32."""


class LeNet5(nn.Module):
    """LeNet-5: 61,706 parameters for 1×28×28 inputs and 10 classes.

    LeCun et al., "Gradient-Based Learning Applied to Document Recognition" (Proc. IEEE 86(11), 1998), Fig. 2
    and Section II-B, in the form that is usual today: plain average pooling, every feature map of the second
    convolution connected to all of the first, and a linear output layer in place of radial basis functions.
    The activation is tanh, as in the paper::

        conv 5×5 (6), tanh, pool 2×2 - conv 5×5 (16), tanh, pool 2×2 - 400-120-84-classes

    Args:
        shape: (channels, height, width) of one image; 28×28 or 32×32 pixels.
        classes: number of outputs.

    Raises:
        BadInput: for images of another size.
    """

    def __init__(self, shape: tuple[int, int, int] = (1, 28, 28), classes: int = 10) -> None:
        super().__init__()
        channels, height, width = shape
        if height != width or height not in SIDES:
            raise BadInput(f"lenet5: images of {height}x{width} pixels; accepted: 28x28, 32x32")
        self.conv1 = nn.Conv2d(channels, 6, kernel_size=5, padding=SIDES[height])
        self.conv2 = nn.Conv2d(6, 16, kernel_size=5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(
        self, images: Float[Tensor, "samples channels height width"]
    ) -> Float[Tensor, "samples classes"]:
        """The class scores (before softmax) of a batch of images."""
        x = F.avg_pool2d(torch.tanh(self.conv1(images)), 2)
        x = F.avg_pool2d(torch.tanh(self.conv2(x)), 2)
        x = torch.tanh(self.fc1(x.flatten(start_dim=1)))
        scores: Tensor = self.fc3(torch.tanh(self.fc2(x)))
        return scores
