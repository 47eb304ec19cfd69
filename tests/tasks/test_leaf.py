"""Tasks from files in the format of LEAF, written here, and the models of LEAF."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import gossamer
from gossamer import BadInput, Experiment
from gossamer.config.registry import build
from gossamer.tasks import Task, TaskSource
from gossamer.tasks.leaf import CHARACTERS, known_accuracy

WORDS = ["good", "bad", "day", "night", "the"]
ROOT = os.environ.get("GOSSAMER_DATA_ROOT")


def sample(name: str, rng: np.random.Generator, number: int) -> tuple[Any, Any]:
    """One sample in the format of LEAF."""
    label = number % 2
    match name:
        case "femnist":
            return (rng.random(784) * 0.1 + 0.9 * label).tolist(), 61 * label
        case "leaf-synthetic":
            return rng.normal(size=4).tolist(), number % 5
        case "celeba":
            return f"{number % 3:06d}.jpg", label
        case "sent140":
            text = f"The {WORDS[label]} day, don't!"
            return [str(number), "date", "NO_QUERY", "user", text, "training"], label
        case "shakespeare":
            return "To be, or not" + "x" * 66 + "é", "abc"[number % 3]
        case "reddit":
            words = ["<BOS>", WORDS[number % 5], "rare" if number == 7 else "the", "<EOS>", *["<PAD>"] * 6]
            following = [*words[1:4], *["<PAD>"] * 7]
            return [words], {
                "subreddit": "x",
                "target_tokens": [following],
                "count_tokens": [[1] * 3 + [0] * 7],
            }
    raise AssertionError(name)


def written(folder: Path, name: str, users: int = 3, samples: int = 6) -> Path:
    """A folder of LEAF: two files of users in ``train``, one in ``test``, and pictures for celeba."""
    rng = np.random.default_rng(1)
    for split, parts in (("train", [range(1), range(1, users)]), ("test", [range(users)])):
        (folder / split).mkdir(parents=True)
        for part, members in enumerate(parts):
            data = {}
            for user in members:
                drawn = [sample(name, rng, number) for number in range(samples + user)]
                data[f"user{user}"] = {"x": [x for x, _ in drawn], "y": [y for _, y in drawn]}
            counts = [len(user_data["y"]) for user_data in data.values()]
            content = {"users": list(data), "num_samples": counts, "user_data": data}
            (folder / split / f"all_data_{part}.json").write_text(json.dumps(content))
    (folder / "raw" / "img_align_celeba").mkdir(parents=True)
    for number in range(3):
        picture = Image.new("RGB", (178, 218), (50 * number, 0, 255))
        picture.save(folder / "raw" / "img_align_celeba" / f"{number:06d}.jpg")
    return folder


def loaded(folder: Path, name: str, **parameters: Any) -> Task:
    """The task of these files."""
    source = build("task", {"name": name, "path": str(folder), **parameters})
    assert isinstance(source, TaskSource)
    return source.load(None, 1)


NAMES = ["femnist", "leaf-synthetic", "celeba", "sent140", "shakespeare", "reddit"]
SHAPES = {"femnist": (1, 28, 28), "leaf-synthetic": (4,), "celeba": (3, 84, 84), "sent140": (25,)}
SHAPES |= {"shakespeare": (80,), "reddit": (10,)}


@pytest.mark.parametrize("name", NAMES)
def test_users_are_owners_and_files_define_the_split(tmp_path: Path, name: str) -> None:
    task = loaded(written(tmp_path, name), name)
    assert task.groups is not None
    assert Counter(task.groups.tolist()) == {0: 6, 1: 7, 2: 8}
    assert task.train[0].shape[1:] == SHAPES[name]
    assert len(task.test[1]) == 21
    model = task.model()
    with torch.no_grad():
        outputs = model(task.train[0])
    assert torch.isfinite(task.loss(outputs, task.train[1]))
    assert all(
        float(metric(outputs, task.train[1])) >= 0 for metric in task.metrics.values() if callable(metric)
    )


@pytest.mark.parametrize("name", ["femnist", "reddit"])
def test_nodes_learn_from_leaf_files(tmp_path: Path, name: str) -> None:
    model = {"name": "leaf-cnn", "width": 16} if name == "femnist" else {"name": "next-word-lstm", "width": 8}
    run = gossamer.run(
        Experiment.of(
            {
                "nodes": 3,
                "task": {"name": name, "path": str(written(tmp_path / "data", name)), "model": model}
                | ({"words": 20} if name == "reddit" else {}),
                "partition": "natural",
                "topology": "ring",
                "algorithm": {"name": "d-psgd", "local_steps": 4},
                "optimizer": {"name": "sgd", "lr": 0.1},
                "batch_size": 4,
                "evaluation": {"every_rounds": 4},
                "stop": {"rounds": 8},
            }
        ),
        tmp_path,
    )
    losses = run.metrics.filter(run.metrics["node"] == 0)["test_loss"].to_list()
    assert losses[-1] < losses[0]


def test_values_match_the_files(tmp_path: Path) -> None:
    femnist = loaded(written(tmp_path / "f", "femnist"), "femnist")
    first = json.loads((tmp_path / "f" / "train" / "all_data_0.json").read_text())["user_data"]["user0"]
    np.testing.assert_allclose(femnist.train[0][:6].flatten(1).numpy(), first["x"], rtol=1e-6)
    assert femnist.train[1][:6].tolist() == first["y"]
    pictures = loaded(written(tmp_path / "c", "celeba"), "celeba").train[0]
    assert pictures.dtype == torch.uint8
    assert abs(pictures[1].float().mean(dim=(1, 2)) - torch.tensor([50.0, 0, 255])).max() < 4  # a JPEG
    texts = loaded(written(tmp_path / "s", "shakespeare"), "shakespeare").train[0]
    assert texts[0, -1] == 80  # not a character of LEAF


def test_words_are_numbered_by_frequency_and_rare_ones_unknown(tmp_path: Path) -> None:
    """Tweets are split and cut as by language_utils.py of LEAF: "don't", "," and "!" are words."""
    task = loaded(written(tmp_path / "s", "sent140"), "sent140", words=7)
    numbers = task.train[0][0].tolist()
    # 21 tweets: The , ! day don't (ties are sorted: "!" "," "The" "day" "don't"), then good (11) and bad (10).
    assert numbers[:6] == [3, 6, 4, 2, 5, 1]
    assert numbers[6:] == [0] * 19
    assert task.train[0][1, 1] == 0  # "bad" is the eighth word
    reddit = loaded(written(tmp_path / "r", "reddit"), "reddit", words=6)
    assert set(reddit.train[0].unique().tolist()) == {0, 1, 2, 3, 4, 5}
    assert (reddit.train[1] == -100).sum(1).tolist() == [7] * 21  # padding is not counted


def test_predicting_an_unknown_word_counts_as_wrong() -> None:
    targets = torch.tensor([[1, 3, -100]])
    outputs = torch.nn.functional.one_hot(torch.tensor([[1, 3, 2]]), 5).float()
    assert float(known_accuracy(outputs, targets)) == 0.5


@pytest.mark.parametrize(
    ("name", "parameters", "count"),
    [
        ("femnist", {}, 6_603_710),
        ("femnist", {"model": {"name": "leaf-cnn", "width": 512}}, 1_690_046),  # of decentralizepy
        ("celeba", {}, 31_202),
        ("reddit", {}, 6_182_672),
        ("sent140", {"model": {"name": "sent140-lstm", "words": 10_000}}, 1_174_786),
        ("shakespeare", {}, 820_185),
    ],
)
def test_models_have_published_parameter_counts(
    tmp_path: Path, name: str, parameters: dict[str, Any], count: int
) -> None:
    model = loaded(written(tmp_path, name), name, **parameters).model()
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "can't be read"),
        ('{"users": []}', "can't be read"),
        ('{"user_data": {"ann": {"x": []}}}', "can't be read"),
        ('{"user_data": {"ann": {"x": [[1, 2]], "y": [0]}}}', "user ann"),
        (json.dumps({"user_data": {"ann": {"x": [[0] * 784], "y": [62]}}}), "user ann.*0 to 61"),
        (json.dumps({"user_data": {"ann": {"x": ["a"], "y": [1]}}}), "user ann"),
    ],
)
def test_damaged_file_is_named_with_its_problem(tmp_path: Path, content: str, message: str) -> None:
    folder = written(tmp_path, "femnist")
    (folder / "train" / "other.json").write_text(content)
    with pytest.raises(BadInput, match=f"task.path: .*other.json.*{message}"):
        loaded(folder, "femnist")


def test_folder_without_users_or_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no users in JSON files"):
        loaded(tmp_path, "sent140")
    folder = written(tmp_path / "c", "celeba")
    (folder / "raw" / "img_align_celeba" / "000001.jpg").unlink()
    with pytest.raises(BadInput, match="user user0.*000001.jpg"):
        loaded(folder, "celeba")


@pytest.mark.skipif(ROOT is None, reason="no data root in GOSSAMER_DATA_ROOT")
def test_femnist_is_read_from_data_root() -> None:
    task = build("task", {"name": "femnist"}).load(Path(str(ROOT)), 1)  # type: ignore[attr-defined]
    assert task.groups is not None
    assert len(task.groups.unique()) == 105
    assert (len(task.train[1]) + len(task.test[1]), len(CHARACTERS)) == (16_393, 62)
    assert float(task.train[0].max()) == 1
    assert float(task.train[0].mean()) > 0.7  # paper is 1


def test_a_user_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, "femnist")
    (folder / "train" / "other.json").write_text((folder / "train" / "all_data_0.json").read_text())
    with pytest.raises(BadInput, match="other.json: user user0 is in another file too"):
        loaded(folder, "femnist")


def test_users_without_samples_are_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "all.json").write_text(json.dumps({"user_data": {"ann": {"x": [], "y": []}}}))
    with pytest.raises(BadInput, match="no user has samples"):
        loaded(tmp_path, "femnist")


@pytest.mark.parametrize(
    ("name", "user", "message"),
    [
        (
            "leaf-synthetic",
            {"x": [[1, 2, 3, float("nan")]], "y": [0]},
            "user user9: ValueError: inputs that are not finite",
        ),
        (
            "leaf-synthetic",
            {"x": [[1, 2, 3, 4]], "y": [0.7]},
            "user user9: ValueError: the class 0.7, which is no whole n",
        ),
        (
            "leaf-synthetic",
            {"x": [[1, 2, 3, 4]], "y": [0, 1]},
            "user user9: ValueError: 1 inputs and 2 targets",
        ),
        # Two halves of an image would become one.
        ("femnist", {"x": [[0.5] * 392] * 2, "y": [0, 1]}, "user user9: ValueError: 1 inputs and 2 targets"),
    ],
)
def test_samples_that_would_be_changed_are_refused(
    tmp_path: Path, name: str, user: Any, message: str
) -> None:
    folder = written(tmp_path, name)
    (folder / "train" / "more.JSON").write_text(json.dumps({"user_data": {"user9": user}}))
    with pytest.raises(BadInput, match=f"more.JSON, {message}"):
        loaded(folder, name)


def test_leaf_files_are_in_the_record(tmp_path: Path) -> None:
    task = loaded(written(tmp_path, "femnist"), "femnist")
    assert task.provenance is not None
    files = {split: [path.name for path in paths] for split, paths in task.provenance.files.items()}
    assert files == {"train": ["all_data_0.json", "all_data_1.json"], "test": ["all_data_0.json"]}
    assert task.provenance.test == "the folder test, all users together"
