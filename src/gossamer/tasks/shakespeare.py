"""Shakespeare: the next character in a role's text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from pydantic import Field, PositiveInt

from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.tasks.data import Column, NumberColumn, hub_dataset, split_by_owner
from gossamer.tasks.images import cross_entropy
from gossamer.tasks.models import CharacterLSTM
from gossamer.tasks.task import Task, TaskSource, accuracy

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters, by number. Any other character is number 80."""

CLASSES = (*("newline" if c == "\n" else "space" if c == " " else c for c in CHARACTERS), "other")
"""Names of the characters, by number."""

LENGTH = 80
"""Characters of a text."""

ROWS = 1 << 16
"""Texts that are decoded at once."""


@dataclass(frozen=True)
class TextColumn:
    """Texts of one length, as numbers of :data:`CHARACTERS`.

    Args:
        length: characters of a text.
    """

    length: int

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """uint8."""
        return np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, ...]:
        """One number per character."""
        return (self.length,)

    def decode(self, column: Any, where: str) -> UInt8[np.ndarray, "rows length"]:
        """The character numbers of an Arrow column of strings.

        Raises:
            BadInput: for a column of something else, or a text of another length; the line names its row.
        """
        numbers = np.full(256, len(CHARACTERS), np.uint8)
        numbers[np.frombuffer(CHARACTERS.encode("ascii"), np.uint8)] = np.arange(len(CHARACTERS))
        decoded = np.empty((len(column), self.length), np.uint8)
        for start in range(0, len(column), ROWS):
            texts = _strings(column.slice(start, ROWS), where, start)
            for row, text in enumerate(texts, start):
                if len(text) != self.length:
                    raise BadInput(
                        f"{where}, row {row}: a text of {len(text)} characters; accepted: {self.length}"
                    )
            # Every character takes four bytes.
            codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
            decoded[start : start + ROWS] = numbers[np.minimum(codes, 255)].reshape(-1, self.length)
        return decoded


@dataclass(frozen=True)
class NameColumn(NumberColumn):
    """Names as numbers: the place of each in alphabetical order."""

    def decode(self, column: Any, where: str) -> Int64[np.ndarray, " rows"]:
        """The numbers of an Arrow column of strings.

        Raises:
            BadInput: for a column of something else.
        """
        names = _strings(column, where, 0)
        number_of = {name: number for number, name in enumerate(sorted(set(names)))}
        return np.fromiter((number_of[name] for name in names), np.int64, len(names))


def _strings(column: Any, where: str, first: int) -> list[str]:
    texts: list[str] = column.to_pylist()
    for row, text in enumerate(texts, first):
        if not isinstance(text, str):
            raise BadInput(f"{where}, row {row}: {text!r}; accepted: text")
    return texts


@register("task", "shakespeare")
class Shakespeare(TaskSource):
    """Shakespeare's plays by speaking role (LEAF; Caldas et al., 2018): the next character, by an LSTM.

    Inputs are uint8 character numbers [samples, 80], targets int64 character numbers [samples]; there are 81
    of them, LEAF's 80 characters and one for any other. The owner of a sample is its speaking role, the
    hub's ``character_id``. The loss is cross-entropy, the metric ``accuracy``. The data is read from
    ``flwrlabs/shakespeare`` on the Hugging Face hub, or from a data root, which may have any number of rows and roles.

    The hub has no test set. The first samples of each role, in the order of the text, are for training and the last ones
    for testing: neighbouring samples overlap, and this way no character that is predicted in a test is in a training
    text. The split does not depend on the seed. All nodes are evaluated on one sample of all roles' test samples.

    ``torch.nn.LSTM`` can't be batched over nodes, so the trainer is ``sequential``, also with ``auto``. (A loop over
    cells, which can be batched, was 3 to 9 times slower per step.)

    Args:
        hidden: width of the LSTM layers.
        layers: number of LSTM layers.
        embedding: length of a character's vector.
        train_fraction: share of each role's samples that is for training.
    """

    hub_id: ClassVar[str] = "flwrlabs/shakespeare"

    hidden: PositiveInt = 256
    layers: PositiveInt = 2
    embedding: PositiveInt = 8
    train_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8

    def load(self, data_root: Path | None, seed: int) -> Task:
        """The task; see :meth:`TaskSource.load`. It does not depend on the seed."""
        columns: dict[str, Column] = {
            "character_id": NameColumn(),
            "x": TextColumn(LENGTH),
            "y": TextColumn(1),
        }
        data = hub_dataset(self.hub_id, columns, {"train": None}, data_root)["train"]
        roles, texts, following = (torch.tensor(data[name]) for name in columns)
        train, test = map(torch.from_numpy, split_by_owner(roles.numpy(), self.train_fraction))
        following = following.squeeze(1).to(torch.int64)
        return Task(
            model=partial(CharacterLSTM, len(CLASSES), self.embedding, self.hidden, self.layers),
            train=(texts[train], following[train]),
            test=(texts[test], following[test]),
            loss=cross_entropy,
            metrics={"accuracy": accuracy},
            groups=roles[train],
            classes=CLASSES,
        )
