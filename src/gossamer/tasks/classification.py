"""What the image classification tasks share: models, a subset of the samples, loss and metric."""

from __future__ import annotations

from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from jaxtyping import Float, Int, UInt8
from pydantic import Field, PositiveInt, field_validator, model_validator
from torch import Tensor

from gossamer.cores import cores
from gossamer.errors import BadInput
from gossamer.randomness import generator
from gossamer.tasks.models import ModelName, lenet5, model_factory
from gossamer.tasks.source import TaskSource
from gossamer.tasks.task import Task, accuracy

NUMERALS = tuple("0123456789")
"""The names of the ten classes of handwritten digits."""
_BLOCK = 64
"""Images that a core converts at a time: they fit its cache."""


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
        samples: train on this many samples only, drawn with a key from the seed (a smaller number draws a
            subset of what a larger one draws); None for all of them. The test set stays whole.
    """

    shape: ClassVar[tuple[int, int, int]]
    """(channels, height, width) of one image."""
    classes: ClassVar[tuple[str, ...]]
    """Names of the classes, in the order of the class numbers."""
    top: ClassVar[float] = 255.0
    """The highest pixel value."""
    mean: ClassVar[float]
    """Mean of ``pixel / top`` that the normalisation takes off."""
    std: ClassVar[float]
    """Standard deviation of ``pixel / top`` that the normalisation divides by."""

    model: ModelName = "mlp"
    hidden: tuple[PositiveInt, ...] = (100,)
    samples: Annotated[int, Field(gt=0)] | None = None

    @field_validator("model")
    @classmethod
    def _fits_images(cls, model: ModelName) -> ModelName:
        _, height, width = cls.shape
        if model == "lenet5" and height not in lenet5.SIDES:
            raise ValueError(
                f"gn-lenet, logistic, mlp for {height}x{width} pixels (lenet5 is for 28x28 or 32x32)"
            )
        return model

    @model_validator(mode="after")
    def _hidden_is_used(self) -> ImageClassification:
        # Compared with the default, not "was it given": a saved experiment spells every parameter out.
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
        # Sorted, so that the order stays the source's: only which samples are used depends on the seed.
        chosen = np.sort(generator(seed, "task-samples").permutation(total)[: self.samples])
        return Images(images.pixels[chosen], images.labels[chosen])

    def _tensors(
        self, images: Images
    ) -> tuple[Float[Tensor, "samples channels height width"], Int[Tensor, " samples"]]:
        # On all cores: the first touch of so much memory alone may take a second on one.
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
