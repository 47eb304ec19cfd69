"""Owners by names of files and folders, as data of many people are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossamer import BadInput
from gossamer.config.registry import build
from gossamer.tasks import Task
from gossamer.tasks.summary import summary

NUMBERS = {"ann": 12, "bob": 20, "cho": 8}
"""The number of rows of each owner, by which owners are told apart."""


def table(rows: int) -> str:
    return "x,y\n" + "".join(f"{rows}.5,{row % 2}\n" for row in range(rows))


def write(root: Path, names: dict[str, str]) -> Path:
    for name, text in names.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def hub(path: Path, **settings: Any) -> Task:
    task = build("task", {"name": "hub", "path": str(path), "inputs": "x", "targets": "y", **settings})
    return task.load(None, 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("place", "each"),
    [
        ("{}.csv", "file"),
        ("train/{}.csv", "file"),
        ("{}/train.csv", "file"),
        ("{}/train.csv", "folder"),
        ("train/{}/a.csv", "folder"),
        ("{}/train/a.csv", "folder"),
        ("data/{}/2020/train.csv", "folder"),
    ],
)
def test_each_file_or_folder_is_an_owner(tmp_path: Path, place: str, each: str) -> None:
    files = {place.format(name): table(rows) for name, rows in NUMBERS.items()}
    if "train" in place:
        files |= {name.replace("train", "test"): text for name, text in files.items()}
    task = hub(write(tmp_path, files), owner={"each": each})
    assert task.groups is not None
    found = {
        owner: set(task.train[0][task.groups == owner, 0].tolist()) for owner in task.groups.unique().tolist()
    }
    assert sorted(map(tuple, found.values())) == [(8.5,), (12.5,), (20.5,)]
    assert f"3 owners, one for each {each} (" in summary(task)["line"]
    kept = 1 if "train" in place else 0.9
    counts = task.groups.unique(return_counts=True)[1]
    assert sorted(counts.tolist()) == sorted(round(kept * rows) for rows in NUMBERS.values())


def test_speakers_texts_are_not_joined(tmp_path: Path) -> None:
    """Each speaker's text has one letter, and no sample has two."""
    write(tmp_path, {f"{name}.txt": name[0] * rows * 10 for name, rows in NUMBERS.items()})
    settings = {"inputs": "text", "targets": None, "loss": "next-token", "context": 7}
    task = hub(tmp_path, **settings, owner={"each": "file"})
    assert all(len(set(row.tolist())) == 1 for row in task.train[0])
    assert task.groups is not None
    # Of n characters, (n - 1) // 7 samples, of which 9 tenths are for training.
    assert task.groups.bincount().tolist() == [
        round(0.9 * ((10 * rows - 1) // 7)) for rows in NUMBERS.values()
    ]
    (tmp_path / "bob.txt").write_bytes("né".encode("latin-1"))
    with pytest.raises(BadInput, match=r"task.encoding: line 1 of .*bob.txt is not utf-8 \(byte 0xe9"):
        hub(tmp_path, **settings)


def test_images_are_owned_by_the_folder_above_their_class(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, rows in NUMBERS.items():
        for row in range(rows):
            path = tmp_path / name / ("cat", "dog")[row % 2] / f"{row}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.new("L", (3, 2), rows).save(path)
    task = hub(tmp_path, inputs="image", targets="label", owner={"each": "folder"})
    assert task.classes == ["cat", "dog"]
    assert task.groups is not None
    shades = (255 * task.train[0][:, 0, 0, 0]).round().int()
    assert [set(shades[task.groups == owner].tolist()) for owner in range(3)] == [{12}, {20}, {8}]


@pytest.mark.parametrize(
    ("owner", "message"),
    [
        (
            "file",
            r"task.owner: got 'file'; accepted: x, y \(of ann.csv and 2 more\), \{each: file\} or \{each: fol",
        ),
        (
            {"each": "folder"},
            r"task.owner.each: folder, but ann.csv is in no folder of an owner below .*; accepted",
        ),
        ({"each": "row"}, r"task.owner.*each: got 'row'; accepted: 'file' or 'folder'"),
    ],
)
def test_owners_that_files_do_not_have_are_refused(tmp_path: Path, owner: Any, message: str) -> None:
    write(tmp_path, {f"{name}.csv": table(rows) for name, rows in NUMBERS.items()})
    with pytest.raises(BadInput, match=message):
        hub(tmp_path, owner=owner)
