"""The image classification data sets of the Hugging Face hub: MNIST, Fashion-MNIST and CIFAR-10."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from gossamer.config.registry import register
from gossamer.tasks.classification import NUMERALS, ImageClassification, Images
from gossamer.tasks.data import Column, ImageColumn, LabelColumn, hub_dataset
from gossamer.tasks.models import ModelName


class HubImages(ImageClassification):
    """Base of the image classification tasks that are read from the hub, or from a data root in its place."""

    hub_id: ClassVar[str]
    """Id of the data set on the Hugging Face hub."""
    image_column: ClassVar[str] = "image"
    """Name of the hub's column with the images."""
    rows: ClassVar[dict[str, int]]
    """Split -> number of its rows; the splits ``train`` and ``test``."""

    def read(self, data_root: Path | None) -> tuple[Images, Images]:
        """The stored training and test images; see :func:`gossamer.tasks.data.hub_dataset` for the errors."""
        channels, height, width = self.shape
        columns: dict[str, Column] = {
            self.image_column: ImageColumn((height, width, channels)),
            "label": LabelColumn(len(self.classes)),
        }
        splits = hub_dataset(self.hub_id, columns, self.rows, data_root)
        train, test = (
            Images(splits[name][self.image_column], splits[name]["label"]) for name in ("train", "test")
        )
        return train, test


@register("task", "mnist")
class MNIST(HubImages):
    """MNIST (LeCun et al., 1998): 60,000 training and 10,000 test images of 1×28×28 pixels, handwritten
    digits.

    Normalised by the training set's mean (0.1307) and standard deviation (0.3081) of ``pixel / 255``. The
    default model is the perceptron 784-100-10.
    """

    hub_id: ClassVar[str] = "ylecun/mnist"
    shape: ClassVar[tuple[int, int, int]] = (1, 28, 28)
    classes: ClassVar[tuple[str, ...]] = NUMERALS
    rows: ClassVar[dict[str, int]] = {"train": 60_000, "test": 10_000}
    mean: ClassVar[float] = 0.1307
    std: ClassVar[float] = 0.3081


@register("task", "fashion-mnist")
class FashionMNIST(HubImages):
    """Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017): 60,000 training and 10,000 test images of 1×28×28 pixels,
    clothes.

    Normalised by the training set's mean (0.2860) and standard deviation (0.3530) of ``pixel / 255``. The
    default model is the perceptron 784-100-10.
    """

    hub_id: ClassVar[str] = "zalando-datasets/fashion_mnist"
    shape: ClassVar[tuple[int, int, int]] = (1, 28, 28)
    classes: ClassVar[tuple[str, ...]] = (
        "T-shirt/top",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    )
    rows: ClassVar[dict[str, int]] = {"train": 60_000, "test": 10_000}
    mean: ClassVar[float] = 0.2860
    std: ClassVar[float] = 0.3530


@register("task", "cifar10")
class CIFAR10(HubImages):
    """CIFAR-10 (Krizhevsky, 2009): 50,000 training and 10,000 test images of 3×32×32 pixels, 10 classes of
    objects.

    Normalised to ``(pixel / 255 - 0.5) / 0.5``, so to [-1, 1] in each channel, as in decentralizepy. No
    augmentation. The default model is GN-LeNet.
    """

    hub_id: ClassVar[str] = "uoft-cs/cifar10"
    image_column: ClassVar[str] = "img"
    shape: ClassVar[tuple[int, int, int]] = (3, 32, 32)
    classes: ClassVar[tuple[str, ...]] = (
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    )
    rows: ClassVar[dict[str, int]] = {"train": 50_000, "test": 10_000}
    mean: ClassVar[float] = 0.5
    std: ClassVar[float] = 0.5

    model: ModelName = "gn-lenet"
