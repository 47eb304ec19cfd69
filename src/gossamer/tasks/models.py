"""The models of the built-in tasks. Each draws its initial parameters from torch's global generator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

# The models that an image task accepts.
ModelName = Literal["gn-lenet", "lenet5", "mlp", "logistic", "vgg16-bn", "resnet18"]


def model_factory(
    name: ModelName, shape: tuple[int, int, int], classes: int, hidden: Sequence[int] = ()
) -> Callable[[], nn.Module]:
    """A function that creates a fresh model for images of a shape (channels, height, width). ``mlp`` has the given
    ``hidden`` widths."""
    if name == "mlp":
        return partial(MLP, shape, classes, tuple(hidden))
    models = {"gn-lenet": GNLeNet, "lenet5": LeNet5, "logistic": MLP, "vgg16-bn": VGG16, "resnet18": ResNet18}
    return partial(models[name], shape, classes)


class MLP(nn.Module):
    """A multi-layer perceptron with ReLU between its linear layers, for flattened samples of a shape; without ``hidden``
    layers (their widths, first to last) it is multinomial logistic regression (softmax is part of the loss)."""

    def __init__(self, shape: Sequence[int], classes: int = 10, hidden: Sequence[int] = ()) -> None:
        super().__init__()
        widths = (math.prod(shape), *hidden, classes)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])  # no ReLU on the scores

    def forward(self, samples: Float[Tensor, " samples *shape"]) -> Float[Tensor, "samples classes"]:
        return self.layers(samples.flatten(start_dim=1))  # type: ignore[no-any-return]


class GNLeNet(nn.Module):
    """LeNet with group normalisation: 89,834 parameters for 3×32×32 inputs and 10 classes.

    Hsieh et al., "The Non-IID Data Quagmire of Decentralized Machine Learning" (ICML 2020), with the widths, kernels and
    groups of decentralizepy's ``LeNet`` (Dhasade et al., EuroMLSys 2023). Three blocks of 5×5 convolution, GroupNorm(2),
    ReLU and 2×2 max pooling, and a linear layer, for images [channels, height, width] of at least 8×8 pixels. The ReLU comes
    after the pooling here: the same bits, for a quarter of its work."""

    def __init__(self, shape: tuple[int, int, int] = (3, 32, 32), classes: int = 10) -> None:
        super().__init__()
        channels, height, width = shape
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
        x = F.relu(F.max_pool2d(self.norm1(self.conv1(images)), 2))
        x = F.relu(F.max_pool2d(self.norm2(self.conv2(x)), 2))
        x = F.relu(F.max_pool2d(self.norm3(self.conv3(x)), 2))
        scores: Tensor = self.fc(x.flatten(start_dim=1))
        return scores


class LeNet5(nn.Module):
    """LeNet-5: 61,706 parameters for 1×28×28 inputs and 10 classes.

    LeCun et al., "Gradient-Based Learning Applied to Document Recognition" (Proc. IEEE 86(11), 1998), Fig. 2, in today's
    usual form: plain average pooling, fully connected feature maps, and a linear output layer in place of radial basis
    functions. The activation is tanh, as in the paper. Images have 28×28 or 32×32 pixels."""

    def __init__(self, shape: tuple[int, int, int] = (1, 28, 28), classes: int = 10) -> None:
        super().__init__()
        channels, height, _ = shape
        padding = (32 - height) // 2  # the paper pads 28 to 32
        self.conv1 = nn.Conv2d(channels, 6, kernel_size=5, padding=padding)
        self.conv2 = nn.Conv2d(6, 16, kernel_size=5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(
        self, images: Float[Tensor, "samples channels height width"]
    ) -> Float[Tensor, "samples classes"]:
        x = F.avg_pool2d(torch.tanh(self.conv1(images)), 2)
        x = F.avg_pool2d(torch.tanh(self.conv2(x)), 2)
        x = torch.tanh(self.fc1(x.flatten(start_dim=1)))
        scores: Tensor = self.fc3(torch.tanh(self.fc2(x)))
        return scores


class VGG16(nn.Module):
    """VGG-16 with batch normalisation and one linear layer: 14,728,266 parameters for three channels and 10 classes.

    Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition" (ICLR 2015), configuration D,
    in the usual form for small images: five halvings, a mean over what is left, and one linear layer in place of three.
    Images have at least 32×32 pixels."""

    def __init__(self, shape: tuple[int, int, int] = (3, 32, 32), classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = shape[0]
        for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(depth):
                layers += [
                    nn.Conv2d(channels, width, kernel_size=3, padding=1),
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                ]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(channels, classes)

    def forward(
        self, images: Float[Tensor, "samples channels height width"]
    ) -> Float[Tensor, "samples classes"]:
        scores: Tensor = self.fc(self.features(images).mean(dim=(2, 3)))
        return scores


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with batch normalisation, and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Float[Tensor, "samples inputs _ _"]) -> Float[Tensor, "samples outputs _ _"]:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18: 11,173,962 parameters for three channels and 10 classes.

    He et al., "Deep Residual Learning for Image Recognition" (CVPR 2016), in the usual form for small images: a 3×3
    convolution of stride 1 at the beginning, and no pooling after it."""

    def __init__(self, shape: tuple[int, int, int] = (3, 32, 32), classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 64, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(64)
        widths = (64, 64, 128, 256, 512)
        stages = [(inputs, outputs, 1 if inputs == outputs else 2) for inputs, outputs in pairwise(widths)]
        blocks = [(ResidualBlock(i, o, stride), ResidualBlock(o, o, 1)) for i, o, stride in stages]
        self.blocks = nn.Sequential(*(block for stage in blocks for block in stage))
        self.fc = nn.Linear(512, classes)

    def forward(
        self, images: Float[Tensor, "samples channels height width"]
    ) -> Float[Tensor, "samples classes"]:
        x = self.blocks(F.relu(self.norm(self.conv(images))))
        scores: Tensor = self.fc(x.mean(dim=(2, 3)))
        return scores


class CharacterLSTM(nn.Module):
    """An LSTM that predicts the next character: an embedding, stacked LSTM layers, and a linear layer over the last
    output; by default 820,185 parameters for 81 characters.

    The shape of LEAF's model for Shakespeare (Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018;
    ``stacked_lstm.py``), with torch's layers: two bias vectors where TensorFlow's have one. decentralizepy's model reads
    the outputs at all 80 characters, by a linear layer of two million parameters."""

    def __init__(self, characters: int, embedding: int = 8, hidden: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.linear = nn.Linear(hidden, characters)

    def forward(self, text: Integer[Tensor, "samples length"]) -> Float[Tensor, "samples characters"]:
        outputs, _ = self.lstm(self.embedding(text.long()))  # .long(): they are stored as bytes
        scores: Tensor = self.linear(outputs[:, -1])
        return scores


class MatrixFactorization(nn.Module):
    """Ratings as products of user and item factors, with or without biases.

    Without a mean, the rating of item i by user u is ``p_u · q_i``: the model of decentralizepy (Dhasade et al.,
    EuroMLSys 2023) and of the DivShare artifact that builds on it, with their initial values. With a mean mu it is::

        mu + b_u + c_i + p_u · q_i

    as in Koren, Bell, Volinsky, "Matrix Factorization Techniques for Recommender Systems" (IEEE Computer 42(8), 2009).
    The biases b and c start at zero; mu is a constant and no parameter."""

    def __init__(self, users: int, items: int, dimensions: int = 20, mean: float | None = None) -> None:
        super().__init__()
        self.user_factors = nn.Embedding(users, dimensions)
        self.item_factors = nn.Embedding(items, dimensions)
        for factors in (self.user_factors, self.item_factors):
            nn.init.uniform_(factors.weight, -0.05, 0.05)
        self.mean = mean
        if mean is not None:
            self.user_bias = nn.Embedding(users, 1)
            self.item_bias = nn.Embedding(items, 1)
            for bias in (self.user_bias, self.item_bias):
                nn.init.zeros_(bias.weight)

    def forward(self, pairs: Int[Tensor, "samples 2"]) -> Float[Tensor, " samples"]:
        user, item = pairs.unbind(dim=1)
        ratings: Tensor = (self.user_factors(user) * self.item_factors(item)).sum(dim=1)
        if self.mean is not None:
            ratings = ratings + self.mean + (self.user_bias(user) + self.item_bias(item)).squeeze(1)
        return ratings
