"""The built-in models. Each draws its initial parameters from torch's global generator.

A task offers ``shape`` (of one input) and ``classes`` (the number of outputs) to the experiment's model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from jaxtyping import Float, Int, Integer
from pydantic import PositiveInt
from torch import Tensor, nn

from gossamer.config.ranges import Layers
from gossamer.config.registry import register
from gossamer.errors import BadInput

Shape: TypeAlias = tuple[int, ...]  # shape of one input; for an image: channels, height and width


class Apply(nn.Module):
    """A function of a tensor as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def spatial_mean(x: Float[Tensor, "samples channels _ _"]) -> Float[Tensor, "samples channels"]:
    """The mean over all positions of an image."""
    return x.mean(dim=(2, 3))


def _image(shape: Shape, side: int) -> tuple[int, int, int]:
    """The shape of an image, checked to have at least this many pixels in each direction, as models that
    halve or split it require."""
    if len(shape) != 3 or min(shape[1:]) < side:
        accepted = f"images [channels, height, width] of at least {side}x{side} pixels, or another model"
        raise BadInput(f"task.model: for inputs of shape {list(shape)}; accepted: {accepted}")
    return shape[0], shape[1], shape[2]


@register("model", "linear")
def linear(shape: Sequence[int], classes: int, bias: bool = True) -> nn.Module:
    """One linear layer, for inputs of one dimension."""
    return nn.Linear(shape[0], classes, bias=bias)


@register("model", "logistic")
def logistic(shape: Sequence[int], classes: int) -> nn.Module:
    """Multinomial logistic regression: one linear layer over the flattened input (softmax is part of the loss)."""
    return MLP(shape, classes)


@register("model", "mlp")
def mlp(shape: Sequence[int], classes: int, hidden: tuple[PositiveInt, ...] = (100,)) -> nn.Module:
    """A perceptron with ReLU between its layers; ``hidden`` has the widths of the hidden layers, first to last."""
    return MLP(shape, classes, hidden)


class MLP(nn.Sequential):
    """A multi-layer perceptron with ReLU between its linear layers, for flattened samples of a shape; without ``hidden``
    layers (their widths, first to last) it is multinomial logistic regression."""

    def __init__(self, shape: Sequence[int], classes: int = 10, hidden: Sequence[int] = ()) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise((math.prod(shape), *hidden, classes)):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        super().__init__(nn.Flatten(), *layers[:-1])  # no ReLU on the scores


@register("model", "gn-lenet")
class GNLeNet(nn.Sequential):
    """LeNet with group normalisation: 89,834 parameters for 3×32×32 inputs and 10 classes.

    Hsieh et al., "The Non-IID Data Quagmire of Decentralized Machine Learning" (ICML 2020), with the widths,
    kernels and groups of decentralizepy's ``LeNet`` (Dhasade et al., EuroMLSys 2023). Three blocks of 5×5
    convolution, GroupNorm(2), ReLU and 2×2 max pooling, and a linear layer, for images [channels, height,
    width] of at least 8×8 pixels. Here, ReLU follows the pooling, which gives the same bits for a quarter of
    the work."""

    def __init__(self, shape: Shape = (3, 32, 32), classes: int = 10) -> None:
        channels, height, width = _image(shape, 8)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise((channels, 32, 32, 64)):
            convolution = nn.Conv2d(inputs, outputs, kernel_size=5, padding=2)
            layers += [convolution, nn.GroupNorm(2, outputs), nn.MaxPool2d(2), nn.ReLU()]
        super().__init__(*layers, nn.Flatten(), nn.Linear(64 * (height // 8) * (width // 8), classes))


@register("model", "lenet5")
class LeNet5(nn.Sequential):
    """LeNet-5: 61,706 parameters for 1×28×28 inputs and 10 classes.

    LeCun et al., "Gradient-Based Learning Applied to Document Recognition" (Proc. IEEE 86(11), 1998), Fig. 2, with plain
    average pooling, fully connected feature maps and a linear output layer. Images have 28×28 or 32×32 pixels."""

    def __init__(self, shape: Shape = (1, 28, 28), classes: int = 10) -> None:
        channels, height, _ = _image(shape, 1)
        if tuple(shape[1:]) not in {(28, 28), (32, 32)}:
            problem = f"lenet5, for images of {shape[1]}x{shape[2]} pixels"
            raise BadInput(f"task.model: {problem}; accepted: 28x28 or 32x32 pixels, or another model")
        padding = (32 - height) // 2  # the paper pads 28 to 32
        layers = [nn.Conv2d(channels, 6, kernel_size=5, padding=padding), nn.Tanh(), nn.AvgPool2d(2)]
        layers += [nn.Conv2d(6, 16, kernel_size=5), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()]
        layers += [nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes)]
        super().__init__(*layers)


def _convnet(
    shape: Shape,
    classes: int,
    blocks: Sequence[tuple[int, int]],
    hidden: Sequence[int],
    dropout: Sequence[nn.Module] = (),
) -> nn.Module:
    """Blocks of two 3×3 convolutions and 2×2 max pooling, and a perceptron; ReLU throughout. Dropout follows each block and
    precedes the last layer."""
    channels, height, width = _image(shape, 2 ** len(blocks))
    layers: list[nn.Module] = []
    for widths in blocks:
        for outputs in widths:
            layers += [nn.Conv2d(channels, outputs, kernel_size=3, padding=1), nn.ReLU()]
            channels = outputs
        layers += [nn.MaxPool2d(2), *dropout]
        height, width = height // 2, width // 2
    *inner, last = MLP((channels, height, width), classes, hidden)
    return nn.Sequential(*layers, *inner, *dropout, last)


@register("model", "cnn6")
def cnn6(shape: Shape, classes: int) -> nn.Module:
    """Six convolutions and three linear layers (``CifarModule`` of Sakarvadia et al., 2025): 5,851,338 parameters for
    3×32×32 inputs and 10 classes."""
    return _convnet(shape, classes, blocks=((32, 64), (128, 128), (256, 256)), hidden=(1024, 512))


@register("model", "convnet")
def convnet(shape: Shape, classes: int) -> nn.Module:
    """Four convolutions with dropout, and three linear layers (``ConvNet`` of Sakarvadia et al., 2025): 9,074,218
    parameters for 3×32×32 inputs and 10 classes."""
    return _convnet(shape, classes, ((48, 96), (192, 256)), hidden=(512, 64), dropout=[nn.Dropout(0.25)])


@register("model", "vgg16-bn")
class VGG16(nn.Sequential):
    """VGG-16 with batch normalisation and one linear layer: 14,728,266 parameters for three channels and 10 classes.

    Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition" (ICLR 2015),
    configuration D, with average pooling after five halvings of images of at least 32×32 pixels."""

    def __init__(self, shape: Shape = (3, 32, 32), classes: int = 10) -> None:
        layers: list[nn.Module] = []
        channels = _image(shape, 32)[0]
        for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(depth):
                convolution = nn.Conv2d(channels, width, kernel_size=3, padding=1)
                layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        super().__init__(*layers, Apply(spatial_mean), nn.Linear(channels, classes))


class Residual(nn.Module):
    """The sum of the outputs of an inner module and a shortcut."""

    def __init__(self, inner: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.inner, self.shortcut = inner, shortcut

    def forward(self, x: Float[Tensor, "samples inputs _ _"]) -> Float[Tensor, "samples outputs _ _"]:
        result: Tensor = self.inner(x) + self.shortcut(x)
        return result


def _residual_block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    """Two 3×3 convolutions with batch normalisation, and a shortcut around them."""
    inner = nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
    )
    shortcut: nn.Module = nn.Identity()
    if stride != 1 or inputs != outputs:
        projection = nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False)
        shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))
    return [Residual(inner, shortcut), nn.ReLU()]


@register("model", "resnet18")
class ResNet18(nn.Sequential):
    """ResNet-18: 11,173,962 parameters for three channels and 10 classes.

    He et al., "Deep Residual Learning for Image Recognition" (CVPR 2016), in the usual form for small images:
    a 3×3 convolution of stride 1 at the beginning, without pooling after it."""

    def __init__(self, shape: Shape = (3, 32, 32), classes: int = 10) -> None:
        convolution = nn.Conv2d(_image(shape, 1)[0], 64, kernel_size=3, padding=1, bias=False)
        layers: list[nn.Module] = [convolution, nn.BatchNorm2d(64), nn.ReLU()]
        for inputs, outputs in pairwise((64, 64, 128, 256, 512)):
            layers += _residual_block(inputs, outputs, 1 if inputs == outputs else 2)
            layers += _residual_block(outputs, outputs, 1)
        super().__init__(*layers, Apply(spatial_mean), nn.Linear(512, classes))


def _inverted_residual(inputs: int, outputs: int, factor: int, stride: int) -> nn.Module:
    """A block of MobileNetV2: a 1×1 convolution to ``factor`` times the channels, a depthwise 3×3
    convolution, and a 1×1 convolution without activation, with a shortcut around them if input and output
    have the same shape."""
    inner = inputs * factor
    layers = nn.Sequential(
        *_normalised(nn.Conv2d(inputs, inner, kernel_size=1, bias=False)),
        *_normalised(nn.Conv2d(inner, inner, 3, stride, padding=1, groups=inner, bias=False)),
        *_normalised(nn.Conv2d(inner, outputs, kernel_size=1, bias=False))[:-1],
    )
    return Residual(layers, nn.Identity()) if stride == 1 and inputs == outputs else layers


def _normalised(convolution: nn.Conv2d) -> list[nn.Module]:
    return [convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU6()]


@register("model", "mobilenet")
class MobileNetV2(nn.Sequential):
    """MobileNetV2: 2,237,770 parameters for three channels and 10 classes.

    Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks" (CVPR 2018), Table 2, in the form
    for small images from the code of Sakarvadia et al. (2025): only the stages of 64 and 160 channels halve
    the image, and the first block also has a 1×1 convolution."""

    def __init__(self, shape: Shape = (3, 32, 32), classes: int = 10) -> None:
        layers = _normalised(nn.Conv2d(_image(shape, 1)[0], 32, kernel_size=3, padding=1, bias=False))
        channels = 32
        stages = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 1), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2))
        for factor, width, depth, stride in (*stages, (6, 320, 1, 1)):
            for block in range(depth):
                layers.append(_inverted_residual(channels, width, factor, 1 if block else stride))
                channels = width
        layers += _normalised(nn.Conv2d(channels, 1280, kernel_size=1, bias=False))
        super().__init__(*layers, Apply(spatial_mean), nn.Linear(1280, classes))


class TransformerBlock(nn.Module):
    """A layer of a transformer's encoder: attention of ``heads`` heads and a perceptron with one hidden layer as wide as its
    input, each after layer normalisation and with a shortcut around it.

    ``nn.TransformerEncoderLayer`` is the same, but its attention has no batching rule for ``vmap``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.inputs = nn.Linear(width, 3 * width)  # queries, keys and values
        self.outputs = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Float[Tensor, "samples tokens width"]) -> Float[Tensor, "samples tokens width"]:
        split = self.inputs(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = split.unbind(dim=2)  # [samples heads tokens width/heads]
        attention = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(dim=-1)
        x = x + self.outputs((attention @ value).transpose(1, 2).flatten(start_dim=2))
        result: Tensor = x + self.perceptron(self.norm2(x))
        return result


@register("model", "vit")
class ViT(nn.Module):
    """A small vision transformer: 9,532,938 parameters for 3×32×32 inputs and 10 classes.

    Dosovitskiy et al., "An Image is Worth 16x16 Words" (ICLR 2021), in a usual form for small images: patches
    of 4×4 pixels, 6 layers of 8 heads, all of width 512, a class token, and no dropout. The code of
    Sakarvadia et al. (2025) uses patches of 2×2 pixels and the changes of Lee et al., "Vision Transformer for
    Small-Size Datasets" (2021), which are not included here."""

    def __init__(self, shape: Shape = (3, 32, 32), classes: int = 10) -> None:
        super().__init__()
        channels, height, width = _image(shape, 4)
        self.patches = nn.Conv2d(channels, 512, kernel_size=4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 512))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (height // 4) * (width // 4) + 1, 512))
        self.blocks = nn.Sequential(*(TransformerBlock(512, heads=8) for _ in range(6)))
        self.head = nn.Sequential(nn.LayerNorm(512), nn.Linear(512, classes))

    def forward(self, images: Float[Tensor, "samples _ _ _"]) -> Float[Tensor, "samples classes"]:
        patches = self.patches(images).flatten(start_dim=2).mT
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1)
        scores: Tensor = self.head(self.blocks(tokens + self.positions)[:, 0])
        return scores


class LSTM(nn.Module):
    """An embedding of tokens, LSTM layers, and linear layers over the last output."""

    def __init__(self, tokens: int, embedding: int, hidden: int, layers: int, *widths: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Sequential(*(nn.Linear(*sizes) for sizes in pairwise((hidden, *widths))))

    def forward(self, tokens: Integer[Tensor, "samples length"]) -> Float[Tensor, "samples ... classes"]:
        outputs, _ = self.lstm(self.embedding(tokens.long()))  # tokens are stored in fewer bytes
        scores: Tensor = self.head(self.read(outputs))
        return scores

    def read(self, outputs: Float[Tensor, "samples length hidden"]) -> Float[Tensor, "samples ... hidden"]:
        """The outputs that the linear layers use."""
        return outputs[:, -1]


@register("model", "lstm")
class CharacterLSTM(LSTM):
    """An LSTM that predicts the next character, with one linear layer over the last output; by default 820,185 parameters
    for 81 characters.

    The architecture of LEAF's model for Shakespeare (Caldas et al., 2018; ``stacked_lstm.py``).
    decentralizepy's model uses the outputs at all 80 characters, with a linear layer of two million parameters."""

    def __init__(
        self,
        classes: int,
        embedding: PositiveInt = 8,
        hidden: PositiveInt = 256,
        layers: Layers = 2,
    ) -> None:
        super().__init__(classes, embedding, hidden, layers, classes)


@register("model", "matrix-factorization")
class MatrixFactorization(nn.Module):
    """Ratings as products of user and item factors of ``dimensions`` values, with or without biases.

    Without biases, the rating of item i by user u is ``p_u · q_i``, as in decentralizepy (Dhasade et al.,
    EuroMLSys 2023) and the DivShare artifact based on it, with their initial values. With biases it is::

        mu + b_u + c_i + p_u · q_i

    as in Koren, Bell, Volinsky, "Matrix Factorization Techniques for Recommender Systems" (IEEE Computer
    42(8), 2009). The biases b and c start at zero; mu is the mean training rating over all nodes, a constant."""

    def __init__(
        self, users: int, items: int, mean_rating: float, dimensions: PositiveInt = 20, biased: bool = True
    ) -> None:
        super().__init__()
        self.user_factors = nn.Embedding(users, dimensions)
        self.item_factors = nn.Embedding(items, dimensions)
        for factors in (self.user_factors, self.item_factors):
            nn.init.uniform_(factors.weight, -0.05, 0.05)
        self.mean, self.biased = mean_rating, biased
        if biased:
            self.user_bias = nn.Embedding(users, 1)
            self.item_bias = nn.Embedding(items, 1)
            for bias in (self.user_bias, self.item_bias):
                nn.init.zeros_(bias.weight)

    def forward(self, pairs: Int[Tensor, "samples 2"]) -> Float[Tensor, " samples"]:
        user, item = pairs.unbind(dim=1)
        ratings: Tensor = (self.user_factors(user) * self.item_factors(item)).sum(dim=1)
        if self.biased:
            ratings = ratings + self.mean + (self.user_bias(user) + self.item_bias(item)).squeeze(1)
        return ratings


# LEAF's models (Caldas et al., 2018, github.com/TalwalkarLab/leaf, folder models), with torch's layers: an LSTM has two
# bias vectors where TensorFlow's has one.


@register("model", "leaf-cnn")
class LeafCNN(nn.Sequential):
    """LEAF's model of FEMNIST: two blocks of 5×5 convolution (32, 64), ReLU and 2×2 max pooling, and linear layers of
    ``width`` and the classes: 6,603,710 parameters for 1×28×28 pixels and 62 classes; decentralizepy's has a width of
    512."""

    def __init__(self, shape: Shape = (1, 28, 28), classes: int = 62, width: PositiveInt = 2048) -> None:
        channels, height, columns = shape
        layers: list[nn.Module] = []
        for inputs, outputs in ((channels, 32), (32, 64)):
            layers += [nn.Conv2d(inputs, outputs, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        hidden = nn.Linear(64 * (height // 4) * (columns // 4), width)
        super().__init__(*layers, nn.Flatten(), hidden, nn.ReLU(), nn.Linear(width, classes))


@register("model", "celeba-cnn")
class CelebACNN(nn.Sequential):
    """LEAF's model of CelebA: four blocks of 3×3 convolution (32), batch normalisation, 2×2 max pooling and
    ReLU, and a linear layer: 31,202 parameters for 3×84×84 pixels and two classes. As in LEAF, batch
    statistics are also used in evaluation, so that there are no buffers, and pixels are 0 to 255."""

    def __init__(self, shape: Shape = (3, 84, 84), classes: int = 2) -> None:
        channels, height, width = shape
        layers: list[nn.Module] = [Apply(Tensor.float)]
        for _ in range(4):
            convolution = nn.Conv2d(channels, 32, kernel_size=3, padding=1)
            norm = nn.BatchNorm2d(32, track_running_stats=False)
            layers += [convolution, norm, nn.MaxPool2d(2, ceil_mode=True), nn.ReLU()]
            channels, height, width = 32, -(-height // 2), -(-width // 2)
        super().__init__(*layers, nn.Flatten(), nn.Linear(32 * height * width, classes))


@register("model", "sent140-lstm")
class Sent140LSTM(LSTM):
    """LEAF's model of Sentiment140, with learned embeddings: two LSTM layers, and linear layers of 128 and
    the number of classes over the last output; 1,174,786 parameters for 10,000 words."""

    def __init__(self, words: int = 10_000, classes: int = 2, width: PositiveInt = 100) -> None:
        super().__init__(words, width, width, 2, 128, classes)


@register("model", "next-word-lstm")
class NextWordLSTM(LSTM):
    """LEAF's model of Reddit: two LSTM layers, and a linear layer over each output; 6,182,672 parameters for 10,000
    words."""

    def __init__(self, classes: int = 10_000, width: PositiveInt = 256) -> None:
        super().__init__(classes, width, width, 2, classes)

    def read(self, outputs: Float[Tensor, "samples length hidden"]) -> Float[Tensor, "samples length hidden"]:
        return outputs
