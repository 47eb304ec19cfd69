"""The task hub: data sets of every format, written here and compared with their values."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import gossamer
from gossamer import BadInput, Experiment
from gossamer.config.registry import build
from gossamer.runtime.setup import prepare
from gossamer.tasks import Hub, Task
from gossamer.tasks.data import hub_folder
from gossamer.tasks.images import crop_and_flip

ROWS = 40


def drawn(rows: int = ROWS, seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 3)).astype(np.float32)
    kind = np.array(["ant", "bee", "cat"])[rng.integers(0, 3, rows)]
    named = {"a": x[:, 0], "b": x[:, 1], "kind": kind, "height": x.sum(1), "who": rng.integers(5, 9, rows)}
    return pl.DataFrame({**named, "list": x.tolist(), "ids": rng.integers(0, 6, (rows, 2)).tolist()})


@pytest.fixture
def table(tmp_path: Path) -> Path:
    drawn().write_parquet(tmp_path / "data.parquet")
    return tmp_path / "data.parquet"


def hub(path: Path, **settings: Any) -> Task:
    return Hub(path=path, **{"inputs": ["a", "b"], "targets": "kind", **settings}).load(None, 1)


def everything(task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples, ordered by their first input."""
    inputs, targets = (torch.cat([task.train[half], task.test[half]]) for half in (0, 1))
    order = inputs[:, 0].argsort()
    return inputs[order], targets[order]


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl", "datasets", "splits"])
def test_every_format_gives_the_same_samples(kind: str, tmp_path: Path) -> None:
    frame, test, path = drawn(), drawn(7, 1), tmp_path / f"data.{kind}"
    if kind == "csv":
        frame.drop("list", "ids").write_csv(path)
    elif kind == "jsonl":
        frame.write_ndjson(path)
    elif kind == "parquet":
        frame.write_parquet(path)
    else:
        datasets = pytest.importorskip("datasets")
        dataset = datasets.Dataset.from_dict(frame.to_dict(as_series=False))
        if kind == "splits":
            other = datasets.Dataset.from_dict(test.to_dict(as_series=False))
            dataset = datasets.DatasetDict({"train": dataset, "test": other})
        dataset.save_to_disk(path, **({"num_shards": 3} if kind == "datasets" else {}))
    task = hub(path)
    samples = pl.concat([frame, test]) if kind == "splits" else frame
    if kind == "splits":
        assert (len(task.train[1]), len(task.test[1])) == (ROWS, 7)
        assert np.array_equal(task.test[0].numpy(), test.select("a", "b").to_numpy())
    else:
        assert (len(task.train[1]), len(task.test[1])) == (36, 4)
    inputs, targets = everything(task)
    ordered = samples.sort("a")
    np.testing.assert_allclose(inputs.numpy(), ordered.select("a", "b").to_numpy(), rtol=1e-6)
    assert [task.classes[target] for target in targets] == ordered["kind"].to_list()
    assert task.model()(inputs).shape == (len(samples), 3)


def test_split_is_by_owner_and_independent_of_seed(table: Path) -> None:
    one, other = (
        Hub(path=table, inputs="a", targets="kind", owner="who").load(None, seed) for seed in (1, 2)
    )
    assert torch.equal(one.train[0], other.train[0])
    assert one.groups is not None
    assert set(one.groups.tolist()) == {0, 1, 2, 3}
    counts = drawn()["who"].value_counts().sort("who")["count"].to_list()
    assert one.groups.bincount().tolist() == [min(max(round(0.9 * n), 1), n - 1) for n in counts]


def test_loss_may_be_a_name_or_a_reference(table: Path, tmp_path: Path, monkeypatch: Any) -> None:
    task = hub(table, targets=["height", "b"], loss="regression")
    assert task.train[1].shape == (36, 2)
    assert list(task.metrics) == ["rmse", "mae"]
    assert hub(table, targets="height", loss="regression").train[1].shape == (36, 1)
    (tmp_path / "users_loss.py").write_text(
        "def loss(outputs, targets): return (outputs - targets).abs().mean()\n"
        "def scaled(inputs, training): return 10 * inputs\n"
        "def noisy(inputs, rng): return inputs + float(rng.normal())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    paths = {"loss": "users_loss:loss", "metrics": {"own": "users_loss:loss"}, "augment": "users_loss:noisy"}
    task = hub(table, targets="height", transform="users_loss:scaled", **paths)
    assert list(task.metrics) == ["own"]
    inputs, targets = everything(task)
    ordered = drawn().sort("a")
    np.testing.assert_allclose(inputs.numpy(), 10 * ordered.select("a", "b").to_numpy(), rtol=1e-6)
    np.testing.assert_allclose(targets.numpy(), ordered.select("height").to_numpy(), rtol=1e-6)
    assert targets.shape == task.model()(inputs).shape  # (the loss would broadcast other shapes)
    assert task.augment is sys.modules.pop("users_loss").noisy


@pytest.mark.parametrize("in_place", [False, True])
def test_standardization_uses_the_training_set_only(in_place: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """The test set has another mean and another spread."""
    train, test = drawn(30, 1), drawn(20, 2).with_columns(pl.col("a", "b") * 3 + 5)
    train.write_parquet(tmp_path / "train.parquet")
    test.write_parquet(tmp_path / "test.parquet")
    (tmp_path / "users_transform.py").write_text(
        "def standardized(inputs, training):\n"
        "    mean, std = training.mean(0), training.std(0)\n"
        + ("    return inputs.sub_(mean).div_(std)\n" if in_place else "    return (inputs - mean) / std\n")
        + "def alone(inputs): return inputs\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = hub(tmp_path, transform="users_transform:standardized")
    known, unseen = (frame.select("a", "b").to_numpy() for frame in (train, test))
    for inputs, values in ((task.train[0], known), (task.test[0], unseen)):
        expected = (values - known.mean(0)) / known.std(0, ddof=1)
        np.testing.assert_allclose(inputs.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert abs(task.test[0].mean(0) - 5).max() < 3  # far from 0, which is the training set's
    with pytest.raises(
        BadInput, match=r"task.transform: users_transform:alone: .*; accepted: a function of \(inputs, tr"
    ):
        hub(tmp_path, transform="users_transform:alone")
    sys.modules.pop("users_transform")


def test_inputs_may_be_lists_or_named_columns(table: Path) -> None:
    task = hub(table, inputs="list")
    assert task.train[0].shape == (36, 3)
    assert hub(table, inputs="ids").train[0].dtype == torch.int64
    named = hub(table, inputs={"x": "list", "where": "who"}).train[0]
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()} == {
        "x": (torch.float32, (36, 3)),
        "where": (torch.int64, (36,)),
    }


def test_image_folders_and_image_columns_agree(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
    for split in ("train", "test"):
        for number, pixel_array in enumerate(pixels):
            path = tmp_path / "folder" / split / ("cat", "dog")[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.fromarray(pixel_array).save(path)
    task = hub(tmp_path / "folder", inputs="image", targets="label")
    expected = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    torch.testing.assert_close(task.test[0], expected[[0, 2, 4, 1, 3, 5]])
    assert (task.classes, task.test[1].tolist()) == (["cat", "dog"], [0, 0, 0, 1, 1, 1])
    assert hub(tmp_path / "folder", inputs="image", targets="label", image_size=[8, 6]).train[0].shape == (
        *(6, 3, 8, 6),
    )
    datasets = pytest.importorskip("datasets")
    dataset = datasets.load_dataset(
        "imagefolder", data_dir=str(tmp_path / "folder"), cache_dir=str(tmp_path / "cache")
    )
    dataset.save_to_disk(tmp_path / "saved")
    saved = hub(tmp_path / "saved", inputs="image", targets="label")
    assert torch.equal(saved.train[0], task.train[0])
    assert torch.equal(saved.train[1], task.train[1])


def test_data_root_mirrors_the_hub_with_subsets_as_folders(tmp_path: Path) -> None:
    for subset in ("one", "two"):
        folder = tmp_path / "hub" / "someone" / "things" / subset
        folder.mkdir(parents=True)
        drawn(20, seed=len(subset) + (subset == "two")).write_parquet(folder / "train-00000-of-00001.parquet")
    settings = {"name": "hub", "hub_id": "someone/things", "inputs": "a", "targets": "kind"}
    complete = build("task", settings).load(tmp_path, 1)  # type: ignore[attr-defined]
    subset_task = build("task", {**settings, "subset": "one"}).load(tmp_path, 1)  # type: ignore[attr-defined]
    assert (complete.samples, subset_task.samples) == (36, 18)


def test_other_formats_use_the_hubs_parquet_copy(tmp_path: Path, monkeypatch: Any) -> None:
    package, revisions = pytest.importorskip("huggingface_hub"), []

    def download(hub_id: str, **options: Any) -> str:
        revisions.append(options.get("revision"))
        return str(tmp_path)

    monkeypatch.setattr(package, "snapshot_download", download)
    assert hub_folder("a/b", None) == tmp_path
    assert revisions == [None, "refs/convert/parquet"]


def test_both_engines_use_owners_and_relative_paths(table: Path, tmp_path: Path) -> None:
    text = """
nodes: 4
task: {name: hub, path: data.parquet, inputs: [a, b], targets: kind, owner: who, model: logistic}
partition: natural
topology: complete
algorithm: d-psgd
stop: {rounds: 5}
"""
    (tmp_path / "experiment.yaml").write_text(text)
    finals = []
    for engine in ("simulate", "processes"):
        experiment = Experiment.load(tmp_path / "experiment.yaml", ["batch_size=full"], engine)
        assert Experiment.parse(experiment.to_yaml()) == experiment
        run = gossamer.run(experiment, tmp_path / "runs")
        finals.append(run.metrics.filter(pl.col("node") >= 0)["test_loss"].to_numpy())
    np.testing.assert_allclose(finals[0], finals[1], rtol=1e-5)
    setup = prepare(Experiment.load(tmp_path / "experiment.yaml"))
    owners = drawn()["who"]
    assert [len(part) for part in setup.parts] == [
        min(max(round(0.9 * n), 1), n - 1) for n in owners.value_counts().sort("who")["count"]
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"path": None}, "one of path and hub_id"),
        ({"hub_id": "a/b"}, "one of path and hub_id"),
        ({"inputs": "no"}, r"task.inputs: got 'no'; accepted: a, b, kind, .* \(of data.parquet\)"),
        ({"owner": "no"}, "task.owner: got 'no'"),
        (
            {"inputs": ["a", "kind"]},
            r"task.inputs: 'kind' is no column of numbers \('\w+' in row 1 of data.parquet, one of 40\)",
        ),
        (
            {"targets": "height"},
            r"task.targets: 'height' has no class numbers \(.* in row 1 of data.parquet\); accepted: class names or whole n",
        ),
        ({"targets": None}, "task.targets: None, with loss classification"),
        ({"loss": "next-token"}, "task.targets: kind, with loss next-token"),
        ({"loss": "mse"}, "task.loss: got 'mse'; accepted: 'classification', 'regression' or 'next-token'"),
        ({"loss": "torch:no_such"}, "task.loss: 'torch' has no 'no_such'"),
        ({"train": "half"}, "task.train: .* has no rows of the split 'half'"),
        ({"test": "val"}, "task.test: .* has no rows of the split 'val'"),
        ({"path": "nowhere"}, "task.path: .*nowhere does not exist"),
        ({"image_size": [0, 3]}, "task.image_size.0: got 0"),
    ],
)
def test_bad_parameters_are_refused(table: Path, given: dict[str, Any], message: str) -> None:
    settings = {"name": "hub", "path": str(table), "inputs": ["a", "b"], "targets": "kind", **given}
    with pytest.raises(BadInput, match=message):
        build("task", settings).load(None, 1)  # type: ignore[attr-defined]


def test_missing_values_and_ragged_lists_are_refused(tmp_path: Path) -> None:
    pl.DataFrame({"a": [1.0, None], "k": [0, 1]}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(BadInput, match="task.inputs: 1 values of 'a' are missing"):
        hub(tmp_path / "a.parquet", inputs="a", targets="k")
    pl.DataFrame({"a": [[1.0], [1.0, 2.0]], "k": [0, 1]}).write_parquet(tmp_path / "b.parquet")
    with pytest.raises(
        BadInput,
        match=r"column 'a': List\(Float64\), with \[1.0, 2.0\] in row 2 of b.parquet; accepted: numbers, or lists of on",
    ):
        hub(tmp_path / "b.parquet", inputs="a", targets="k")


def test_crop_and_flip_moves_and_mirrors_images() -> None:
    images = torch.arange(2 * 3 * 6 * 5, dtype=torch.float32).view(2, 3, 6, 5) + 1
    augmented = crop_and_flip(images, np.random.default_rng(3), padding=2)
    assert augmented.shape == images.shape
    for image, low, changed in zip(images, images.amin((1, 2, 3)), augmented, strict=True):
        padded = F.pad(image - low, (2, 2, 2, 2)) + low
        crops = [padded[:, y : y + 6, x : x + 5] for y in range(5) for x in range(5)]
        assert any(torch.equal(changed, crop) or torch.equal(changed, crop.flip(2)) for crop in crops)
    assert torch.equal(augmented, crop_and_flip(images, np.random.default_rng(3), padding=2))
    assert not torch.equal(augmented, crop_and_flip(images, np.random.default_rng(4), padding=2))


def test_renamed_test_split_is_not_trained_on(tmp_path: Path) -> None:
    drawn(10).drop("list", "ids").write_csv(tmp_path / "houses.csv")
    drawn(5, 1).drop("list", "ids").write_csv(tmp_path / "holdout.csv")
    task = hub(tmp_path, test="holdout")
    assert (len(task.train[1]), len(task.test[1])) == (10, 5)
