"""Image classification: handwritten digits from scikit-learn, and MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 from the
Hugging Face hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from jaxtyping import Float, Int, UInt8
from pydantic import Field, PositiveInt
from torch import Tensor

from gossamer.config.registry import imported, register
from gossamer.errors import BadInput
from gossamer.randomness import generator
from gossamer.tasks.data import hub_dataset, hub_provenance, label_decoder
from gossamer.tasks.metrics import NewMetrics
from gossamer.tasks.pixels import image_decoder
from gossamer.tasks.provenance import Provenance
from gossamer.tasks.task import ModelField, Reference, Task, TaskSource, classification

Images = tuple[UInt8[np.ndarray, "_ _ _ _"], Int[np.ndarray, " _"]]
"""Pixels [samples, height, width, channels] and class numbers [samples], as they are stored."""

CLOTHES = "T-shirt/top, trouser, pullover, dress, coat, sandal, shirt, sneaker, bag, ankle boot"
OBJECTS = "airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck"
TEST_SAMPLES = 360  # of the digits


class ImageClassification(TaskSource):
    """Base class of tasks whose samples are small labelled images. A subclass names a data set of the hub.

    Inputs are float32 [samples, channels, height, width], normalised to ``(pixel / top - mean) / std``;
    targets are int64 class numbers [samples]. The loss is cross-entropy, the metric ``accuracy``."""

    hub_id: ClassVar[str]
    image_column: ClassVar[str] = "image"
    label_column: ClassVar[str] = "label"
    rows: ClassVar[dict[str, int | None]] = {"train": 60_000, "test": 10_000}
    shape: ClassVar[tuple[int, int, int]] = (1, 28, 28)  # channels, height, width
    classes: ClassVar[tuple[str, ...]] = tuple("0123456789")
    top: ClassVar[float] = 255.0  # the highest pixel value
    mean: ClassVar[float]
    std: ClassVar[float]
    model: ModelField = Field(default="mlp", validate_default=True)
    # A function of the images of a training batch and a generator, such as gossamer.tasks.images:crop_and_flip.
    augment: Reference | None = None
    metrics: NewMetrics  # in addition to the accuracy
    # Train on only this many samples, drawn with a key from the seed (smaller draws are subsets of larger
    # ones); None for all. The test set stays complete.
    samples: PositiveInt | None = None

    def read(self, data_root: Path | None) -> tuple[Images, Images]:
        """The stored training and test images; see :func:`gossamer.tasks.data.hub_dataset` for the errors."""
        channels, height, width = self.shape
        decoder, labels = image_decoder(height, width, channels), label_decoder(len(self.classes))
        columns = {self.image_column: decoder, self.label_column: labels}
        splits = hub_dataset(self.hub_id, columns, self.rows, data_root)
        train, test = (
            (splits[name][self.image_column], splits[name][self.label_column]) for name in ("train", "test")
        )
        return train, test

    def load(self, data_root: Path | None, seed: int) -> Task:
        (pixels, labels), test_images = self.read(data_root)
        if self.samples is not None:
            if self.samples > len(labels):
                raise BadInput(f"task.samples: {self.samples}; accepted: at most {len(labels)}, or null")
            # Sorted, so that the choice of samples depends on the seed, but not their order.
            chosen = np.sort(generator(seed, "task-samples").permutation(len(labels))[: self.samples])
            pixels, labels = pixels[chosen], labels[chosen]
        augment = None if self.augment is None else imported(self.augment, "task.augment")
        train, test = self._tensors(pixels, labels), self._tensors(*test_images)
        more = {"augment": augment, "provenance": self.provenance(data_root)}
        return classification(self.model, data_root, train, test, self.classes, self.metrics, **more)

    def provenance(self, data_root: Path | None) -> Provenance:
        """Where the images come from."""
        return hub_provenance(self.hub_id, data_root, tuple(self.rows), "the split 'test'")

    def _tensors(
        self, pixels: UInt8[np.ndarray, "samples height width channels"], labels: Int[np.ndarray, " samples"]
    ) -> tuple[Float[Tensor, "samples channels height width"], Int[Tensor, " samples"]]:
        inputs = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        inputs = inputs.to(torch.float32, memory_format=torch.contiguous_format)
        inputs.div_(self.top).sub_(self.mean).div_(self.std)
        return inputs, torch.from_numpy(labels.astype(np.int64))


def crop_and_flip(
    images: Float[Tensor, "samples channels height width"], rng: np.random.Generator, padding: int = 4
) -> Float[Tensor, "samples channels height width"]:
    """The usual augmentation of small images: each is padded on each side with its darkest value, cropped to its size at a
    random position, and mirrored with probability 1/2."""
    height, width = images.shape[2:]
    low = images.amin((1, 2, 3), keepdim=True)
    padded = F.pad(images - low, (padding,) * 4) + low
    offsets = rng.integers(0, 2 * padding + 1, (len(images), 2))
    mirrored = rng.random(len(images)) < 0.5
    crops = [image[:, y : y + height, x : x + width] for image, (y, x) in zip(padded, offsets, strict=True)]
    return torch.stack([crop.flip(2) if flip else crop for crop, flip in zip(crops, mirrored, strict=True)])


@register("task", "digits")
class Digits(ImageClassification):
    """scikit-learn's digits: 1,437 training and 360 test images of 1×8×8 pixels, 10 classes, without any file or network.

    The images are the test half of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, UCI Machine Learning
    Repository, 1998). The source has no test set; the one drawn here is the same for every seed. Pixels are divided by 16."""

    shape: ClassVar[tuple[int, int, int]] = (1, 8, 8)
    top: ClassVar[float] = 16.0
    mean: ClassVar[float] = 0.0
    std: ClassVar[float] = 1.0
    model: ModelField = Field(default={"name": "mlp", "hidden": [64]}, validate_default=True)

    def provenance(self, data_root: Path | None) -> Provenance:
        """The embedded images, without files of the user."""
        return Provenance("scikit-learn's digits", "drawn, the same for every seed")

    def read(self, data_root: Path | None) -> tuple[Images, Images]:
        """The embedded images; ``data_root`` is not used."""
        # The file behind sklearn.datasets.load_digits, because importing scikit-learn takes a second.
        package = find_spec("sklearn")
        assert package is not None
        table = np.loadtxt(Path(str(package.origin)).parent / "datasets/data/digits.csv.gz", delimiter=",")
        pixels, labels = table[:, :-1].reshape(-1, 8, 8, 1).astype(np.uint8), table[:, -1].astype(np.int64)
        order = generator(0, "digits-test-set").permutation(len(labels))
        test, train = np.sort(order[:TEST_SAMPLES]), np.sort(order[TEST_SAMPLES:])
        return (pixels[train], labels[train]), (pixels[test], labels[test])


@register("task", "mnist")
class MNIST(ImageClassification):
    """MNIST (LeCun et al., 1998): 60,000 training and 10,000 test images of 1×28×28 pixels, handwritten digits; normalised by
    the training set's mean (0.1307) and standard deviation (0.3081) of ``pixel / 255``."""

    hub_id: ClassVar[str] = "ylecun/mnist"
    mean: ClassVar[float] = 0.1307
    std: ClassVar[float] = 0.3081


@register("task", "fashion-mnist")
class FashionMNIST(ImageClassification):
    """Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017): 60,000 training and 10,000 test images of 1×28×28 pixels, clothes;
    normalised by the training set's mean (0.2860) and standard deviation (0.3530) of ``pixel / 255``."""

    hub_id: ClassVar[str] = "zalando-datasets/fashion_mnist"
    classes: ClassVar[tuple[str, ...]] = tuple(CLOTHES.split(", "))
    mean: ClassVar[float] = 0.2860
    std: ClassVar[float] = 0.3530


@register("task", "cifar10")
class CIFAR10(ImageClassification):
    """CIFAR-10 (Krizhevsky, 2009): 50,000 training and 10,000 test images of 3×32×32 pixels, 10 classes of objects;
    normalised to ``(pixel / 255 - 0.5) / 0.5``, as in decentralizepy."""

    hub_id: ClassVar[str] = "uoft-cs/cifar10"
    image_column: ClassVar[str] = "img"
    rows: ClassVar[dict[str, int | None]] = {"train": 50_000, "test": 10_000}
    shape: ClassVar[tuple[int, int, int]] = (3, 32, 32)
    classes: ClassVar[tuple[str, ...]] = tuple(OBJECTS.split(", "))
    mean: ClassVar[float] = 0.5
    std: ClassVar[float] = 0.5
    model: ModelField = Field(default="gn-lenet", validate_default=True)


@register("task", "cifar100")
class CIFAR100(CIFAR10):
    """CIFAR-100 (Krizhevsky, 2009): as CIFAR-10, with 100 classes, numbered as on the hub."""

    hub_id: ClassVar[str] = "uoft-cs/cifar100"
    label_column: ClassVar[str] = "fine_label"
    classes: ClassVar[tuple[str, ...]] = tuple(map(str, range(100)))
