"""Image data sets: real ones from the data root GOSSAMER_DATA_ROOT, and defaults."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import ClassVar

import numpy as np
import polars as pl
import pytest
import torch

from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.randomness import generator
from gossamer.tasks import CIFAR10, CIFAR100, MNIST, Dirichlet, FashionMNIST, Shards, label_counts

ROOT = os.environ.get("GOSSAMER_DATA_ROOT")
real = pytest.mark.skipif(ROOT is None, reason="GOSSAMER_DATA_ROOT is not set: no real data sets")


@pytest.mark.data
@real
@pytest.mark.parametrize(
    ("cls", "samples", "shape", "per_class", "parameters"),
    [
        (MNIST, 60_000, (1, 28, 28), None, 79_510),
        (FashionMNIST, 60_000, (1, 28, 28), 6000, 79_510),
        (CIFAR10, 50_000, (3, 32, 32), 5000, 89_834),
    ],
)
def test_real_data_has_published_sizes_and_statistics(cls, samples, shape, per_class, parameters):
    task = cls().load(Path(ROOT), 1)
    (x, y), (x_test, y_test) = task.train, task.test
    assert x.shape == (samples, *shape)
    assert x_test.shape == (10_000, *shape)
    assert x.is_contiguous()
    assert x.dtype == torch.float32
    assert len(y_test) == 10_000
    if per_class is not None:
        assert y.bincount().tolist() == [per_class] * 10
        assert y_test.bincount().tolist() == [1000] * 10
    assert sum(p.numel() for p in task.model().parameters()) == parameters
    assert task.model()(x_test[:2]).shape == (2, 10)
    if cls is CIFAR10:
        # The published statistics of the training set, by channel.
        means, deviations = x.mean(dim=(0, 2, 3)) / 2 + 0.5, x.std(dim=(0, 2, 3)) / 2
        torch.testing.assert_close(means, torch.tensor([0.4914, 0.4822, 0.4465]), atol=2e-4, rtol=0)
        torch.testing.assert_close(deviations, torch.tensor([0.2470, 0.2435, 0.2616]), atol=2e-4, rtol=0)
    else:
        assert abs(x.mean().item()) < 1e-3
        assert abs(x.std().item() - 1) < 1e-3


@pytest.mark.data
@real
def test_mnist_begins_with_its_known_labels():
    assert MNIST().load(Path(ROOT), 1).train[1][:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]


@pytest.mark.data
@real
def test_subset_of_real_data_is_partitioned():
    task = CIFAR10(samples=2000).load(Path(ROOT), 1)
    assert task.samples == 2000
    parts = Shards(per_node=2).assign(task, 16, generator(1, "partition"))
    assert (label_counts(task, parts) > 0).sum(axis=1).max() <= 4
    assert len(Dirichlet(alpha=0.1).assign(task, 256, generator(1, "partition"))) == 256


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100"])
def test_missing_data_root_is_refused(name, tmp_path):
    with pytest.raises(BadInput, match=r"data_root: .* is not a folder"):
        build("task", name).load(tmp_path / "nowhere", 1)


@pytest.mark.parametrize(
    ("name", "default"),
    [("mnist", "mlp"), ("fashion-mnist", "mlp"), ("cifar10", "gn-lenet"), ("cifar100", "gn-lenet")],
)
def test_default_model_depends_on_data_set(name, default):
    assert build("task", name).model.name_of() == default
    assert build("task", {"name": name, "model": "lenet5"}).model.name_of() == "lenet5"


def test_cifar100_uses_fine_labels(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setenv("GOSSAMER_CACHE", str(tmp_path / "cache"))
    pixels = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    folder = tmp_path / "hub" / "uoft-cs/cifar100"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        rows = []
        for image_pixels in pixels:
            file = io.BytesIO()
            image.fromarray(image_pixels).save(file, format="PNG")
            rows.append({"bytes": file.getvalue(), "path": None})
        labels = {"fine_label": [99, 0, 3, 50, 7, 11], "coarse_label": [0] * 6}
        pl.DataFrame({"img": rows, **labels}).write_parquet(folder / f"{split}-00000-of-00001.parquet")

    class Few(CIFAR100):
        rows: ClassVar = {"train": 6, "test": 6}

    task = Few().load(tmp_path, 1)
    assert len(CIFAR100.classes) == len(set(CIFAR100.classes)) == 100
    assert task.train[1].tolist() == [99, 0, 3, 50, 7, 11]
    expected = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 * 2 - 1
    torch.testing.assert_close(task.train[0], expected.float())
