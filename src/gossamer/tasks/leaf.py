"""The data sets of LEAF (Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018): each user is an owner.

LEAF's scripts write folders ``train`` and ``test`` of JSON files, each with the samples ``x`` and ``y`` of
some users. Nothing is unpickled: LEAF's vocabulary for reddit is a pickle, so the words are counted here."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import polars as pl
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from jaxtyping import Float, Int, UInt8
from pydantic import Field, PositiveInt, PrivateAttr
from torch import Tensor

from gossamer.config.registry import register
from gossamer.errors import BadInput, cause
from gossamer.files import check_fits
from gossamer.reads import note
from gossamer.tasks.data import (
    ColumnDecoder,
    RowPlace,
    check_text,
    decode_names,
    hub_dataset,
    hub_provenance,
    label_decoder,
    split_by_owner,
)
from gossamer.tasks.language import IGNORED, METRICS, token_accuracy, token_loss
from gossamer.tasks.metrics import NewMetrics, chosen_metrics
from gossamer.tasks.pixels import image_decoder, opened
from gossamer.tasks.provenance import Provenance
from gossamer.tasks.task import Metric, ModelField, Pair, Task, TaskSource, accuracy, model_factory

Users = dict[str, tuple[Path, dict[str, Any]]]
"""User -> the user's samples, and the file that has them."""

Samples = tuple[Tensor, Tensor, Tensor]  # inputs, targets and the owner of each

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""FEMNIST's classes, by number."""


def json_files(folder: Path) -> list[Path]:
    """The JSON files of a folder, in order."""
    return sorted(path for path in folder.glob("*") if path.suffix.lower() == ".json")


def read_users(folder: Path) -> Users:
    """The users of all JSON files of a folder, by name."""
    users: Users = {}
    for file in json_files(folder):
        try:
            check_fits(f"task.path: {file}", file, times=3)
            user_data = json.loads(file.read_bytes())["user_data"]
            new: Users = {user: (file, {"x": data["x"], "y": data["y"]}) for user, data in user_data.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            accepted = "LEAF's, with user_data: user -> x, y"
            raise BadInput(
                f"task.path: {file} can't be read ({cause(error)}); accepted: {accepted}"
            ) from None
        if duplicates := new.keys() & users.keys():
            raise BadInput(
                f"task.path: {file}: user {min(duplicates)} is in another file too; accepted: each user once"
            )
        users |= new
    if not users:
        raise BadInput(
            f"task.path: {folder} has no users in JSON files; accepted: LEAF's folder with train and test"
        )
    return dict(sorted(users.items()))


def divided(inputs: Tensor, targets: Tensor, owners: Tensor, fraction: float) -> tuple[Samples, Samples]:
    """The first samples of each owner, for training, and the others, for testing."""
    train, test = map(torch.from_numpy, split_by_owner(owners.numpy(), fraction))
    return (inputs[train], targets[train], owners[train]), (inputs[test], targets[test], owners[test])


class LeafTask(TaskSource):
    """Base class of tasks that read LEAF's files. A subclass defines the samples.

    The loss is cross-entropy, the metric ``accuracy``. The owner of a training sample is its user; the test
    set combines all users. ``path`` is the folder with ``train`` and ``test``. Without it, a task that is on
    the hub is read from there."""

    path: Path | None
    model: ModelField
    metrics: NewMetrics  # in addition to those of the task
    classes: ClassVar[Sequence[str] | None] = ("0", "1")
    loss: ClassVar[Metric] = staticmethod(F.cross_entropy)
    means: ClassVar[Mapping[str, Metric]] = {"accuracy": accuracy}

    @abstractmethod
    def samples(self, x: list[Any], y: list[Any]) -> Pair:
        """Inputs and targets of one user."""

    def learn(self, users: Iterable[list[Any]]) -> None:
        """Called first, with the training inputs of all users."""

    def facts(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """The arguments offered to the model."""
        return {"shape": tuple(inputs.shape[1:]), "classes": len(self.classes or ())}

    def provenance(self, data_root: Path | None) -> Provenance:
        """Where the samples come from."""
        assert self.path is not None
        files = {name: json_files(self.path / name) for name in ("train", "test")}
        return Provenance(str(self.path), "the folder test, all users together", files)

    def from_hub(self, data_root: Path | None) -> tuple[Samples, Samples]:
        """The training and test samples from the hub; see :func:`divided`."""
        raise BadInput(f"task.path: null, for {self.name_of()}; accepted: LEAF's folder with train and test")

    def load(self, data_root: Path | None, seed: int) -> Task:
        if self.path is None:
            train, test = self.from_hub(data_root)
        else:
            note(self.path / "train", ["*.json"])
            note(self.path / "test", ["*.json"])
            users = read_users(self.path / "train")
            self.learn(data["x"] for _, data in users.values())
            train, test = self._joined(users), self._joined(read_users(self.path / "test"))
        return Task(
            model=model_factory(self.model, data_root, **self.facts(*train[:2])),
            train=train[:2],
            test=test[:2],
            loss=type(self).loss,
            metrics={**self.means, **chosen_metrics(self.metrics, self.classes)},
            groups=train[2],
            classes=self.classes,
            provenance=self.provenance(data_root),
        )

    def _joined(self, users: Users) -> Samples:
        pairs = []
        for user, (file, data) in users.items():
            try:
                pairs.append(pair := self.samples(data["x"], data["y"]))
                if len(pair[0]) != len(pair[1]):
                    raise ValueError(f"{len(pair[0])} inputs and {len(pair[1])} targets")
                if not pair[0].isfinite().all():
                    raise ValueError("inputs that are not finite")
            except BadInput as error:
                raise error.within(f"task.path: {file}, user {user}") from None
            except (ValueError, TypeError, KeyError, IndexError, RuntimeError) as error:
                accepted = f"samples of {self.name_of()} as LEAF writes them"
                raise BadInput(
                    f"task.path: {file}, user {user}: {cause(error)}; accepted: {accepted}"
                ) from None
        counts = torch.tensor([len(targets) for _, targets in pairs])
        if not counts.any():
            raise BadInput("task.path: no user has samples; accepted: LEAF's folder with train and test")
        inputs, targets = (torch.cat([pair[k] for pair in pairs if len(pair[1])]) for k in (0, 1))
        return inputs, targets, torch.arange(len(pairs)).repeat_interleave(counts)


def _classes(y: list[Any], count: int) -> Tensor:
    if fractions := [label for label in y if isinstance(label, float) and not label.is_integer()]:
        raise ValueError(f"the class {fractions[0]}, which is no whole number")
    numbers = torch.tensor([int(label) for label in y], dtype=torch.int64)
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise ValueError(f"classes from {numbers.min()} to {numbers.max()}, not 0 to {count - 1}")
    return numbers


@register("task", "femnist")
class Femnist(LeafTask):
    """FEMNIST: handwritten characters by writer, 62 classes of 1×28×28 pixels from 0 (ink) to 1 (paper).

    Without ``path``, it is read from ``flwrlabs/femnist`` on the Hugging Face hub, or from a data root, and
    the first ``train_fraction`` of each writer's images is for training. decentralizepy's model is
    ``leaf-cnn`` with ``width: 512``."""

    path: Path | None = None
    train_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.9
    model: ModelField = Field(default="leaf-cnn", validate_default=True)
    classes: ClassVar[Sequence[str] | None] = tuple(CHARACTERS)
    hub_id: ClassVar[str] = "flwrlabs/femnist"

    def samples(self, x: list[Any], y: list[Any]) -> Pair:
        return torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 28, 28), _classes(y, len(CHARACTERS))

    def provenance(self, data_root: Path | None) -> Provenance:
        if self.path is not None:
            return super().provenance(data_root)
        whose = f"the last {1 - self.train_fraction:.3g} of each writer's images"
        return hub_provenance(self.hub_id, data_root, ("train",), whose)

    def from_hub(self, data_root: Path | None) -> tuple[Samples, Samples]:
        images, labels = image_decoder(28, 28, 1), label_decoder(len(CHARACTERS))
        columns = {"image": images, "character": labels, "writer_id": decode_names}
        data = hub_dataset(self.hub_id, columns, {"train": None}, data_root)["train"]
        pixels, characters, writers = (torch.from_numpy(data[name]) for name in columns)
        inputs = pixels.permute(0, 3, 1, 2).to(torch.float32).div_(255)
        return divided(inputs, characters, writers, self.train_fraction)


@register("task", "celeba")
class CelebA(LeafTask):
    """CelebA: whether a celebrity smiles, by celebrity; uint8 images 3×84×84.

    ``images`` is the folder of the pictures, by default LEAF's ``raw/img_align_celeba`` next to ``path``. The default model
    is LEAF's, ``celeba-cnn`` with 31,202 parameters."""

    images: Path | None = None
    model: ModelField = Field(default="celeba-cnn", validate_default=True)

    def samples(self, x: list[Any], y: list[Any]) -> Pair:
        folder = self.images or (self.path or Path()) / "raw" / "img_align_celeba"
        note(folder, ["*"])
        pixels = np.empty((len(x), 3, 84, 84), np.uint8)
        for row, name in enumerate(x):
            try:
                with opened(folder / name) as image:
                    pixels[row] = np.asarray(image.resize((84, 84)).convert("RGB")).transpose(2, 0, 1)
            except (OSError, SyntaxError, ValueError) as error:  # Pillow's, for damaged images
                raise ValueError(f"{folder / name}: {cause(error)}") from None
        return torch.from_numpy(pixels), _classes(y, 2)


@register("task", "leaf-synthetic")
class LeafSynthetic(LeafTask):
    """LEAF's synthetic data set: vectors, with classes from a linear model of each user. (The task
    ``synthetic`` generates its own data.)"""

    count: int = Field(default=5, ge=2)  # the number of classes in the files
    model: ModelField = Field(default="logistic", validate_default=True)
    classes: ClassVar[Sequence[str] | None] = None

    def samples(self, x: list[Any], y: list[Any]) -> Pair:
        return torch.tensor(x, dtype=torch.float32), _classes(y, self.count)

    def facts(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        return {"shape": tuple(inputs.shape[1:]), "classes": self.count}


_PADDING, _UNKNOWN = 0, 1  # numbers of words in reddit


class _Words(LeafTask):
    """Base class of tasks whose samples are word numbers."""

    words: PositiveInt = 10_000  # size of the vocabulary: the most frequent words
    _numbers: dict[str, int] = PrivateAttr(default_factory=dict)

    def _build_vocabulary(self, words: Iterable[str], first: Sequence[str]) -> None:
        """Number the most frequent words, after some that are always known."""
        counted = sorted(Counter(words).items(), key=lambda pair: (-pair[1], pair[0]))
        known = [word for word, _ in counted if word not in first][: self.words - len(first)]
        self._numbers.update({word: number for number, word in enumerate((*first, *known))})


@register("task", "sent140")
class Sent140(_Words):
    """Sentiment140: whether a tweet is positive, by its author; 25 word numbers [samples, 25].

    Texts are split into words, truncated and padded as in LEAF (its ``language_utils.py``), with the number 0
    for unknown words. LEAF uses the words of GloVe; here, the most frequent ``words`` of the training set are used."""

    model: ModelField = Field(default="sent140-lstm", validate_default=True)
    length: ClassVar[int] = 25

    def learn(self, users: Iterable[list[Any]]) -> None:
        self._build_vocabulary((word for x in users for tweet in x for word in _split(tweet[4])), ("",))

    def samples(self, x: list[Any], y: list[Any]) -> Pair:
        numbers = torch.zeros(len(x), self.length, dtype=torch.int32)
        for row, tweet in enumerate(x):
            tokens = [self._numbers.get(word, 0) for word in _split(tweet[4])[: self.length]]
            numbers[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        return numbers, _classes(y, 2)

    def facts(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        return {"shape": (self.length,), "classes": 2, "words": len(self._numbers)}


def _split(text: str) -> list[str]:
    return re.findall(r"[\w']+|[.,!?;]", text)


def known_accuracy(
    outputs: Float[Tensor, "samples length words"], targets: Int[Tensor, "samples length"]
) -> Float[Tensor, ""]:
    """Fraction of the target words that have the highest score and are known."""
    unknown = torch.where(targets == _UNKNOWN, -1, targets)  # an index that is never predicted
    return token_accuracy(outputs, unknown)


@register("task", "reddit")
class Reddit(_Words):
    """Reddit: the next word, by author; sequences of 10 word numbers [samples, 10], targets the same, one word later.

    A comment consists of several samples. Word 0 is padding, which is ignored; word 1 is any unknown word,
    whose prediction counts as wrong, as in LEAF. The loss and the metrics are means over a sample's words,
    then over the samples."""

    model: ModelField = Field(default={"name": "next-word-lstm"}, validate_default=True)
    classes: ClassVar[Sequence[str] | None] = None
    loss: ClassVar[Metric] = staticmethod(token_loss)
    means: ClassVar[Mapping[str, Metric]] = {**METRICS, "accuracy": known_accuracy}

    def learn(self, users: Iterable[list[Any]]) -> None:
        words = (word for x in users for comment in x for sequence in comment for word in sequence)
        self._build_vocabulary(words, ("<PAD>", "<UNK>"))

    def samples(self, x: list[Any], y: list[Any]) -> Pair:
        inputs = self._sequences(x)
        targets = self._sequences([comment["target_tokens"] for comment in y])
        if inputs.shape != targets.shape:
            raise ValueError(f"inputs of shape {tuple(inputs.shape)}, targets of {tuple(targets.shape)}")
        targets = torch.where(targets == _PADDING, IGNORED, targets)
        counted = (targets != IGNORED).any(1)
        return inputs[counted], targets[counted]

    def _sequences(self, comments: list[Any]) -> Tensor:
        sequences = chain.from_iterable(comments)
        rows = [[self._numbers.get(word, _UNKNOWN) for word in sequence] for sequence in sequences]
        return torch.tensor(rows, dtype=torch.int32)

    def facts(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        return {"shape": tuple(inputs.shape[1:]), "classes": self.words}


TEXT_CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
# LEAF's 80 characters, by number; any other character is number 80.
CLASSES = (*("newline" if c == "\n" else "space" if c == " " else c for c in TEXT_CHARACTERS), "other")
LENGTH = 80  # characters of a text
ROWS = 1 << 16  # number of texts decoded together


def _sample(number: int) -> str:
    """A sample of a user, for the user of gossamer."""
    return f"sample {number + 1}"


def decode_texts(
    column: pl.Series, where: str, place: RowPlace, length: int = LENGTH
) -> UInt8[np.ndarray, "rows length"]:
    """Texts of one length as numbers of :data:`TEXT_CHARACTERS`."""
    check_text(column, where, place)
    wrong = (column.str.len_chars() != length).arg_true()
    if len(wrong):
        problem = f"{where}, {place(int(wrong[0]))}: a text of {len(column[wrong[0]])} characters"
        raise BadInput(f"{problem}; accepted: {length}")
    numbers = np.full(256, len(TEXT_CHARACTERS), np.uint8)
    numbers[np.frombuffer(TEXT_CHARACTERS.encode("ascii"), np.uint8)] = np.arange(len(TEXT_CHARACTERS))
    decoded = np.empty((len(column), length), np.uint8)
    for start in range(0, len(column), ROWS):
        texts = "".join(column[start : start + ROWS])
        codes = np.frombuffer(texts.encode("utf-32-le"), np.uint32)
        decoded[start : start + ROWS] = numbers[np.minimum(codes, 255)].reshape(-1, length)
    return decoded


@register("task", "shakespeare")
class Shakespeare(LeafTask):
    """Shakespeare's plays by speaking role: the next character, by an LSTM.

    Inputs are uint8 character numbers [samples, 80], targets int64 character numbers [samples]; there are 81
    of them, LEAF's 80 characters and one for any other. Without ``path``, the data is read from
    ``flwrlabs/shakespeare`` on the Hugging Face hub, or from a data root, which may have any number of rows
    and roles. The hub has no test set: the first samples of each role, in the order of the text, are for
    training, since neighbouring samples overlap.

    ``torch.nn.LSTM`` can't be batched over nodes, so the trainer is ``sequential``, also with ``auto``."""

    hub_id: ClassVar[str] = "flwrlabs/shakespeare"
    classes: ClassVar[Sequence[str] | None] = CLASSES
    path: Path | None = None
    model: ModelField = Field(default="lstm", validate_default=True)
    # Fraction of each role's samples that is for training.
    train_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8

    def samples(self, x: list[Any], y: list[Any]) -> Pair:
        texts, following = (
            torch.from_numpy(decode_texts(pl.Series(column, dtype=pl.String), name, _sample, length))
            for column, name, length in ((x, "x", LENGTH), (y, "y", 1))
        )
        return texts, following.squeeze(1).to(torch.int64)

    def provenance(self, data_root: Path | None) -> Provenance:
        if self.path is not None:
            return super().provenance(data_root)
        whose = f"the last {1 - self.train_fraction:.3g} of each role's samples"
        return hub_provenance(self.hub_id, data_root, ("train",), whose)

    def from_hub(self, data_root: Path | None) -> tuple[Samples, Samples]:
        columns: dict[str, ColumnDecoder] = {
            "character_id": decode_names,
            "x": decode_texts,
            "y": partial(decode_texts, length=1),
        }
        data = hub_dataset(self.hub_id, columns, {"train": None}, data_root)["train"]
        roles, texts, following = (torch.from_numpy(data[name]) for name in columns)
        return divided(texts, following.squeeze(1).to(torch.int64), roles, self.train_fraction)
