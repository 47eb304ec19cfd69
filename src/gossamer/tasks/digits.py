"""Handwritten digits of 8×8 pixels, embedded in scikit-learn: no file and no network needed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int
from pydantic import PositiveInt

from gossamer.config.registry import register
from gossamer.randomness import generator
from gossamer.tasks.classification import NUMERALS, ImageClassification, Images

TEST_SAMPLES = 360


@register("task", "digits")
class Digits(ImageClassification):
    """scikit-learn's digits: 1,437 training and 360 test images of 1×8×8 pixels, 10 classes.

    The images are the test half of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, UCI
    Machine Learning Repository, 1998). Pixels of 0 to 16 are divided by 16. The source has no test set of its
    own; the one taken here is drawn once and for all, the same for every seed, so that runs with different
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
    """scikit-learn's ``load_digits``, from its file: importing scikit-learn takes a second."""
    package = find_spec("sklearn")  # which does not import it
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.exists():
            table = np.loadtxt(path, delimiter=",")
            return table[:, :-1], table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits  # where it is packed another way

    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels.astype(np.int64)
