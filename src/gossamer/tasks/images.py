"""Image classification: handwritten digits from scikit-learn, and MNIST, Fashion-MNIST and CIFAR-10 from the Hugging Face
hub."""

from __future__ import annotations

from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from jaxtyping import Float, Int, UInt8
from pydantic import Field, PositiveInt, field_validator, model_validator
from torch import Tensor

from gossamer.config.registry import register
from gossamer.cores import cores
from gossamer.errors import BadInput
from gossamer.randomness import generator
from gossamer.tasks.data import Column, ImageColumn, LabelColumn, hub_dataset
from gossamer.tasks.models import SIDES, ModelName, model_factory
from gossamer.tasks.task import Task, TaskSource, accuracy

NUMERALS = tuple("0123456789")
"""The names of the ten classes of handwritten digits."""
_BLOCK = 64
"""Images that a core converts at a time; they fit its cache."""


class Images(NamedTuple):
    """Labelled images as they are stored.

    Args:
        pixels: the images, the last axis the colour.
        labels: their class numbers.
    """

    pixels: UInt8[np.ndarray, "samples height width channels"]
    labels: Int[np.ndarray, " samples"]


def cross_entropy(
    outputs: Float[Tensor, "samples classes"], targets: Int[Tensor, " samples"]
) -> Float[Tensor, ""]:
    """Mean over the samples of -log softmax(outputs)[target], in nats."""
    return F.cross_entropy(outputs, targets)


class ImageClassification(TaskSource):
    """Base of the tasks whose samples are small labelled images.

    Inputs are float32 [samples, channels, height, width], normalised to ``(pixel / top - mean) / std``;
    targets are int64 class numbers [samples]. The loss is cross-entropy, the metric ``accuracy``.

    Args:
        model: the network to train.
        hidden: widths of the hidden layers, first to last; for ``mlp`` only.
        samples: train on this many samples only, drawn with a key from the seed (fewer samples are a subset of more); None
            for all of them. The test set stays whole.
    """

    shape: ClassVar[tuple[int, int, int]]
    """(channels, height, width) of one image."""
    classes: ClassVar[tuple[str, ...]]
    """Names of the classes, in the order of the class numbers."""
    top: ClassVar[float] = 255.0
    """The highest pixel value."""
    mean: ClassVar[float]
    """Mean of ``pixel / top``, which the normalisation subtracts."""
    std: ClassVar[float]
    """Standard deviation of ``pixel / top``, by which the normalisation divides."""

    model: ModelName = "mlp"
    hidden: tuple[PositiveInt, ...] = (100,)
    samples: Annotated[int, Field(gt=0)] | None = None

    @field_validator("model")
    @classmethod
    def _fits_images(cls, model: ModelName) -> ModelName:
        _, height, width = cls.shape
        if model == "lenet5" and height not in SIDES:
            raise ValueError(
                f"gn-lenet, logistic, mlp for {height}x{width} pixels (lenet5 is for 28x28 or 32x32)"
            )
        return model

    @model_validator(mode="after")
    def _hidden_is_used(self) -> ImageClassification:
        # Compared with the default, since a saved experiment spells every parameter out.
        if self.model != "mlp" and self.hidden != type(self).model_fields["hidden"].default:
            raise ValueError("hidden with the model 'mlp' only")
        return self

    @abstractmethod
    def read(self, data_root: Path | None) -> tuple[Images, Images]:
        """The stored training and test images."""

    def load(self, data_root: Path | None, seed: int) -> Task:
        """The task; see :meth:`TaskSource.load`."""
        train, test = self.read(data_root)
        return Task(
            model=model_factory(self.model, self.shape, len(self.classes), self.hidden),
            train=self._tensors(self._subset(train, seed)),
            test=self._tensors(test),
            loss=cross_entropy,
            metrics={"accuracy": accuracy},
            classes=self.classes,
        )

    def _subset(self, images: Images, seed: int) -> Images:
        total = len(images.labels)
        if self.samples is None:
            return images
        if self.samples > total:
            raise BadInput(
                f"task.samples: {self.samples}; accepted: at most {total} (all training samples), or null"
            )
        # Sorted, so that only the choice of samples depends on the seed, not their order.
        chosen = np.sort(generator(seed, "task-samples").permutation(total)[: self.samples])
        return Images(images.pixels[chosen], images.labels[chosen])

    def _tensors(
        self, images: Images
    ) -> tuple[Float[Tensor, "samples channels height width"], Int[Tensor, " samples"]]:
        # On all cores: on one, the first touch of so much memory alone may take a second.
        pixels, labels = images
        count, height, width, channels = pixels.shape
        inputs = np.empty((count, channels, height, width), dtype=np.float32)

        def convert(start: int) -> None:
            block = inputs[start : start + _BLOCK]
            block[...] = pixels[start : start + _BLOCK].transpose(0, 3, 1, 2)
            block /= self.top
            block -= self.mean
            block /= self.std

        with ThreadPoolExecutor(cores()) as pool:
            list(pool.map(convert, range(0, count, _BLOCK)))
        return torch.from_numpy(inputs), torch.from_numpy(labels.astype(np.int64))


TEST_SAMPLES = 360
"""Of the digits."""


@register("task", "digits")
class Digits(ImageClassification):
    """scikit-learn's digits: 1,437 training and 360 test images of 1×8×8 pixels, 10 classes.

    The images are the test half of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, UCI
    Machine Learning Repository, 1998), embedded in scikit-learn: they need no file and no network. Pixels of 0 to 16 are
    divided by 16. The source has no test set; the one drawn here is the same for every seed, so that runs with different
    seeds are evaluated on the same samples.
    """

    shape: ClassVar[tuple[int, int, int]] = (1, 8, 8)
    classes: ClassVar[tuple[str, ...]] = NUMERALS
    top: ClassVar[float] = 16.0
    mean: ClassVar[float] = 0.0
    std: ClassVar[float] = 1.0

    hidden: tuple[PositiveInt, ...] = (64,)

    def read(self, data_root: Path | None) -> tuple[Images, Images]:
        """The embedded images; ``data_root`` is not used."""
        pixels, labels = _embedded()
        stored = Images(pixels.reshape(-1, 8, 8, 1).astype(np.uint8), labels.astype(np.int64))
        order = generator(0, "digits-test-set").permutation(len(labels))
        test, train = np.sort(order[:TEST_SAMPLES]), np.sort(order[TEST_SAMPLES:])
        return Images(*(array[train] for array in stored)), Images(*(array[test] for array in stored))


def _embedded() -> tuple[Float[np.ndarray, "samples 64"], Int[np.ndarray, " samples"]]:
    """scikit-learn's ``load_digits``, read from its file because importing scikit-learn takes a second."""
    package = find_spec("sklearn")  # without importing it
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.exists():
            table = np.loadtxt(path, delimiter=",")
            return table[:, :-1], table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits  # where the file is elsewhere

    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels.astype(np.int64)


class HubImages(ImageClassification):
    """Base of the image classification tasks that are read from the hub, or from a data root."""

    hub_id: ClassVar[str]
    """Id of the data set on the Hugging Face hub."""
    image_column: ClassVar[str] = "image"
    """The hub's column of images."""
    rows: ClassVar[dict[str, int]]
    """Rows of the splits ``train`` and ``test``."""

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
