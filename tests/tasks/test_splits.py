"""Which files the task hub reads, and as which split: small tables and images under the names that users give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from gossamer import BadInput
from gossamer.tasks import Hub, Task
from gossamer.tasks.splits import split_of

Image = pytest.importorskip("PIL.Image")


def write(path: Path, rows: int, first: float) -> None:
    """A table whose rows can be told from those of any other one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    x = first + np.arange(rows, dtype=np.float64) / 1024
    table = pl.DataFrame({"x": x, "y": np.arange(rows) % 2})
    match path.suffix.lower():
        case ".csv":
            table.write_csv(path)
        case ".tsv":
            table.write_csv(path, separator="\t")
        case ".parquet":
            table.write_parquet(path)
        case ".jsonl":
            table.write_ndjson(path)
        case _:
            path.write_text("some text\n")


def hub(path: Path, **settings: Any) -> Task:
    return Hub(path=path, **{"inputs": "x", "targets": "y", **settings}).load(None, 1)


def said(task: Task) -> str:
    assert task.provenance is not None
    return "; ".join([task.provenance.test, *task.provenance.remarks])


TRAIN, TEST = 200, 60


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train.csv", "test.csv"),
        ("Train.csv", "Test.csv"),
        ("TRAIN.CSV", "TEST.CSV"),
        ("train.csv", "Test.csv"),
        ("training.csv", "testing.csv"),
        ("X_train.csv", "X_test.csv"),
        ("my-data_train.csv", "my-data_test.csv"),
        ("trainSet.csv", "testSet.csv"),
        ("TrainData.parquet", "TestData.parquet"),
        ("train2017.jsonl", "test2017.jsonl"),
        ("Training/a.csv", "Testing/a.csv"),
        ("train-test-split/train.csv", "train-test-split/test.csv"),
        ("test-data/train.csv", "test-data/test.csv"),
        ("train_data/train.csv", "train_data/test.csv"),
        ("test-data/csv/train/a.csv", "test-data/csv/test/a.csv"),
        ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"),
    ],
)
def test_usual_names_of_splits_are_known(tmp_path: Path, train: str, test: str) -> None:
    write(tmp_path / train, TRAIN, 1000.0)
    write(tmp_path / test, TEST, 2000.0)
    task = hub(tmp_path)
    assert (len(task.train[1]), len(task.test[1])) == (TRAIN, TEST)
    assert task.train[0].max() < 2000 <= task.test[0].min()
    assert task.provenance is not None
    assert {
        name: [path.relative_to(tmp_path).as_posix() for path in paths]
        for name, paths in task.provenance.files.items()
    } == {
        "train": [train],
        "test": [test],
    }


@pytest.mark.parametrize(
    ("parts", "split"),
    [
        (("test", "train", "0001.png"), "test"),  # a class that is called train
        (("photos", "latest", "contest.png"), None),
        (("train_and_test.csv",), None),  # both
        (("data", "validation-0.parquet"), "validation"),
        (("devices.csv",), None),
        (("Dev.csv",), "validation"),
    ],
)
def test_outermost_part_with_one_split_decides(parts: tuple[str, ...], split: str | None) -> None:
    assert split_of(parts) == split


def test_a_shared_folder_does_not_decide_for_files_that_name_their_splits(tmp_path: Path) -> None:
    write(tmp_path / "test" / "train.csv", TRAIN, 1000.0)
    assert said(hub(tmp_path)) == "drawn, 0.1 of the samples, the same for every seed"
    write(tmp_path / "test" / "valid.csv", TEST, 2000.0)
    write(tmp_path / "test" / "extra.csv", TEST, 3000.0)
    (tmp_path / "LICENSE.md").write_text("free\n")
    task = hub(tmp_path)
    assert (len(task.train[1]), len(task.test[1])) == (180, 20)
    assert max(task.train[0].max(), task.test[0].max()) < 2000
    assert said(task).endswith("not read: test/extra.csv, test/valid.csv")


def test_the_reason_for_a_missing_split_names_files(tmp_path: Path) -> None:
    write(tmp_path / "test" / "a.csv", TRAIN, 1000.0)
    write(tmp_path / "test" / "b.csv", TRAIN, 2000.0)
    with pytest.raises(
        BadInput,
        match=r"no rows of the split 'train' \(test: test/a.csv, test/b.csv\); accepted: .* or patterns",
    ):
        hub(tmp_path)
    task = hub(tmp_path, train="test/a.csv", test="test/b.csv")
    assert (len(task.train[1]), len(task.test[1])) == (TRAIN, TRAIN)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ("train.parquet", "test.csv", r"several kinds \(Parquet: train.parquet; CSV: test.csv\)"),
        ("train.csv", "test.xls", r"task.test: test.xls can't be read; accepted: files in .parquet"),
        ("train.csv", "test.csv.xz", r"task.test: test.csv.xz can't be read"),
        ("train.xlsx", "other.csv", r"task.train: train.xlsx can't be read"),
        (
            "a.csv",
            "b.parquet",
            r"several kinds \(Parquet: b.parquet; CSV: a.csv\)|several kinds \(CSV: a.csv; Par",
        ),
        ("iris.names", "iris.dat", r"has no file that can be read \(iris.dat, iris.names\)"),
    ],
)
def test_mixed_files_are_refused(tmp_path: Path, train: str, test: str, message: str) -> None:
    write(tmp_path / train, TRAIN, 1000.0)
    write(tmp_path / test, TEST, 2000.0)
    with pytest.raises(BadInput, match=message):
        hub(tmp_path)


@pytest.mark.parametrize(
    "other", ["dev.csv", "valid.csv", "Validation.csv", "extra.csv", "more.tsv", "more.xml", "README.txt"]
)
def test_files_left_aside_are_named(tmp_path: Path, other: str) -> None:
    write(tmp_path / "train.csv", TRAIN, 1000.0)
    write(tmp_path / other, TEST, 2000.0)
    task = hub(tmp_path)
    assert (len(task.train[1]), len(task.test[1])) == (180, 20)
    assert max(task.train[0].max(), task.test[0].max()) < 2000
    assert said(task) == f"drawn, 0.1 of the samples, the same for every seed; not read: {other}"


def test_validation_split_is_not_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", TRAIN, 1000.0)
    write(tmp_path / "valid.csv", TEST, 2000.0)
    assert said(hub(tmp_path)).endswith("not read: valid.csv")
    for name in ("validation", "valid", "dev"):
        task = hub(tmp_path, test=name)
        assert (len(task.train[1]), len(task.test[1])) == (TRAIN, TEST)


def test_patterns_choose_files(tmp_path: Path) -> None:
    write(tmp_path / "one" / "a.csv", 30, 1000.0)
    write(tmp_path / "two" / "a.csv", 20, 2000.0)
    task = hub(tmp_path, train="one/*", test="two/*")
    assert (len(task.train[1]), len(task.test[1])) == (30, 20)
    with pytest.raises(BadInput, match=r"task.test: two/a.csv is in both splits"):
        hub(tmp_path, train="*", test="two/*")
    with pytest.raises(BadInput, match=r"task.train: .* has no rows of the split 'three/\*'"):
        hub(tmp_path, train="three/*")


def test_the_name_of_the_only_file_is_of_no_split(tmp_path: Path) -> None:
    write(tmp_path / "test" / "test.csv", TRAIN, 1000.0)
    assert len(hub(tmp_path / "test" / "test.csv").train[1]) == 180


def test_hidden_files_are_not_looked_at(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", TRAIN, 1000.0)
    write(tmp_path / ".ipynb_checkpoints" / "test.csv", TEST, 2000.0)
    write(tmp_path / "._test.csv", TEST, 2000.0)
    assert len(hub(tmp_path).train[1]) == 180


# Images: each has a colour of its own.


def paint(path: Path, value: int, mode: str = "RGB", size: tuple[int, int] = (3, 2)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = value if mode == "L" else (value, 255 - value, 7)
    Image.new(mode, size, colour).save(path)


def pictures(path: Path, **settings: Any) -> Task:
    return hub(path, inputs="image", targets="label", **settings)


SUFFIXES = ["png", "PNG", "bmp", "BMP", "tif", "tiff", "TIFF", "gif"]


def test_images_are_read_with_any_suffix(tmp_path: Path) -> None:
    for number, suffix in enumerate(SUFFIXES):
        paint(tmp_path / "train" / "ant" / f"{number}.{suffix}", 10 * number)
        paint(tmp_path / "test" / "ant" / f"{number}.{suffix}", 10 * number + 1)
    task = pictures(tmp_path)
    assert len(task.train[1]) == len(task.test[1]) == len(SUFFIXES)
    # In the order of the names, "0.png" first.
    red = [10 * number / 255 for number in range(len(SUFFIXES))]
    np.testing.assert_allclose(task.train[0][:, 0, 0, 0].numpy(), red, atol=1e-6)


@pytest.mark.parametrize("grey", [0, 3, 5])
def test_one_grey_image_does_not_decide_for_all(tmp_path: Path, grey: int) -> None:
    for number in range(6):
        paint(tmp_path / "ant" / f"{number}.png", 10 * number, "L" if number == grey else "RGB")
    task = pictures(tmp_path, train_fraction=0.99)
    inputs = np.concatenate([task.train[0].numpy(), task.test[0].numpy()])
    assert inputs.shape[1:] == (3, 2, 3)
    found = {tuple(np.rint(255 * image[:, 0, 0]).astype(int).tolist()) for image in inputs}
    assert found == {(10 * n,) * 3 if n == grey else (10 * n, 255 - 10 * n, 7) for n in range(6)}
    assert "1 of 6 images are grey, and became colour images" in said(task)


def test_grey_images_alone_have_one_channel(tmp_path: Path) -> None:
    for number in range(4):
        paint(tmp_path / "ant" / f"{number}.png", 10 * number, "L")
    task = pictures(tmp_path)
    assert task.train[0].shape[1:] == (1, 2, 3)
    assert "grey" not in said(task)


def test_sizes_of_all_images_are_compared(tmp_path: Path) -> None:
    for number in range(6):
        paint(tmp_path / "ant" / f"{number}.png", 10 * number, size=(5, 4) if number == 0 else (3, 2))
    with pytest.raises(
        BadInput, match=r"5 images of 3x2 pixels, 1 of 5x4; accepted: one size, or .* task.image_size"
    ):
        pictures(tmp_path)
    assert pictures(tmp_path, image_size=[4, 4]).train[0].shape[1:] == (3, 4, 4)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_images_of_more_than_16_bits_are_refused(tmp_path: Path, dtype: Any) -> None:
    (tmp_path / "ant").mkdir()
    for number in range(3):  # Pillow would clip these to 255
        Image.fromarray(np.full((2, 3), 300 + number, dtype)).save(tmp_path / "ant" / f"{number}.tiff")
    with pytest.raises(BadInput, match=r"column 'image', ant/0.tiff: 32 bits per pixel"):
        pictures(tmp_path)


def test_films_and_damaged_images_are_refused_by_name(tmp_path: Path) -> None:
    for number in range(3):
        paint(tmp_path / "ant" / f"{number}.gif", 10 * number)
    frames = [Image.new("RGB", (3, 2), (0, 0, shade)) for shade in (10, 90)]
    frames[0].save(tmp_path / "ant" / "1.gif", save_all=True, append_images=frames[1:])
    with pytest.raises(BadInput, match=r"column 'image', ant/1.gif: 2 frames"):
        pictures(tmp_path)
    (tmp_path / "ant" / "1.gif").write_bytes(b"GIF8")
    with pytest.raises(BadInput, match=r"column 'image', ant/1.gif: cannot identify image file; accepted"):
        pictures(tmp_path)


def test_classes_with_names_of_splits_are_not_taken_for_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for label in ("car", "train"):
            for number in range(3):
                paint(tmp_path / "both" / split / label / f"{number}.png", number)
                paint(tmp_path / "none" / label / f"{number}.png", number)
    task = pictures(tmp_path / "both")
    assert (len(task.train[1]), len(task.test[1]), task.classes) == (6, 6, ["car", "train"])
    for label in ("car", "test"):
        for number in range(3):
            paint(tmp_path / "shared" / "train" / label / f"{number}.png", number)
    task = pictures(tmp_path / "shared")  # the folder that all files share is the split of all
    assert (len(task.train[1]) + len(task.test[1]), task.classes) == (6, ["car", "test"])
    with pytest.raises(
        BadInput, match=r"images of no split \(car/0.png, .*\) next to images of splits; accepted: all of"
    ):
        pictures(tmp_path / "none")
    task = pictures(tmp_path / "none", train="*")
    assert (len(task.train[1]) + len(task.test[1]), task.classes) == (6, ["car", "train"])


@pytest.mark.parametrize("other", ["b.pgm", "c.heic", "d.avif", "e.jp2", "f.jfif", "g.ppm", "h.PNM", "i.dcm"])
def test_images_that_cannot_be_read_are_named(tmp_path: Path, other: str) -> None:
    for number in range(4):
        paint(tmp_path / "ant" / f"{number}.png", number)
    (tmp_path / "ant" / other).write_bytes(b"P5")
    assert said(pictures(tmp_path)).endswith(f"not read: ant/{other}")


def test_patterns_choose_images(tmp_path: Path) -> None:
    for folder in ("one", "two", "three"):
        for number in range(3):
            paint(tmp_path / folder / "ant" / f"{number}.png", number)
    task = pictures(tmp_path, train="one/*", test="two/*")
    assert (len(task.train[1]), len(task.test[1])) == (3, 3)
    assert "not read: three/ant/0.png, three/ant/1.png, three/ant/2.png" in said(task)


def test_tables_next_to_images_are_refused_and_texts_are_named(tmp_path: Path) -> None:
    for number in range(4):
        paint(tmp_path / "ant" / f"{number}.png", number)
    (tmp_path / "notes.txt").write_text("taken in May\n")
    task = pictures(tmp_path)
    assert task.train[0].shape[1:] == (3, 2, 3)
    assert said(task).endswith("not read: notes.txt")
    write(tmp_path / "labels.csv", 4, 0.0)
    with pytest.raises(
        BadInput, match=r"several kinds \(image: .*; CSV: labels.csv\); accepted: one kind, or patterns"
    ):
        pictures(tmp_path)
    assert said(pictures(tmp_path, train="*.png")).endswith("not read: labels.csv, notes.txt")
