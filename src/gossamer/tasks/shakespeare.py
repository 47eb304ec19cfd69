"""Shakespeare: the next character in a role's text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import polars as pl
import torch
from jaxtyping import UInt8
from pydantic import Field

from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.tasks.data import Decoder, check_text, decode_names, hub_dataset
from gossamer.tasks.leaf import LeafTask, Samples, divided
from gossamer.tasks.task import ModelField, Pair

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters, by number. Any other character is number 80."""

CLASSES = (*("newline" if c == "\n" else "space" if c == " " else c for c in CHARACTERS), "other")
"""Names of the characters, by number."""

LENGTH = 80  # characters of a text
ROWS = 1 << 16  # texts that are decoded at once


def decode_texts(column: pl.Series, where: str, length: int = LENGTH) -> UInt8[np.ndarray, "rows length"]:
    """Texts of one length as numbers of :data:`CHARACTERS`."""
    check_text(column, where)
    wrong = (column.str.len_chars() != length).arg_true()
    if len(wrong):
        found = f"{where}, row {wrong[0]}: a text of {len(column[wrong[0]])} characters"
        raise BadInput(f"{found}; accepted: {length}")
    numbers = np.full(256, len(CHARACTERS), np.uint8)
    numbers[np.frombuffer(CHARACTERS.encode("ascii"), np.uint8)] = np.arange(len(CHARACTERS))
    decoded = np.empty((len(column), length), np.uint8)
    for start in range(0, len(column), ROWS):
        texts = "".join(column[start : start + ROWS])
        codes = np.frombuffer(texts.encode("utf-32-le"), np.uint32)
        decoded[start : start + ROWS] = numbers[np.minimum(codes, 255)].reshape(-1, length)
    return decoded


@register("task", "shakespeare")
class Shakespeare(LeafTask):
    """Shakespeare's plays by speaking role (LEAF; Caldas et al., 2018): the next character, by an LSTM.

    Inputs are uint8 character numbers [samples, 80], targets int64 character numbers [samples]; there are 81
    of them, LEAF's 80 characters and one for any other. The owner of a sample is its speaking role, the
    hub's ``character_id``. The loss is cross-entropy, the metric ``accuracy``. The data is read from
    ``flwrlabs/shakespeare`` on the Hugging Face hub, or from a data root, which may have any number of rows and roles; or
    with ``path`` from LEAF's own files, which have a test set.

    The hub has no test set. The first samples of each role, in the order of the text, are for training and the last ones
    for testing: neighbouring samples overlap, and this way no character that is predicted in a test is in a training
    text. The split does not depend on the seed. All nodes are evaluated on one sample of all roles' test samples.

    ``torch.nn.LSTM`` can't be batched over nodes, so the trainer is ``sequential``, also with ``auto``. (A loop over
    cells, which can be batched, was 3 to 9 times slower per step.)"""

    hub_id: ClassVar[str] = "flwrlabs/shakespeare"
    classes: ClassVar[Sequence[str] | None] = CLASSES
    path: Path | None = None
    model: ModelField = Field(default="lstm", validate_default=True)
    # Share of each role's samples that is for training.
    train_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8

    def samples(self, x: list[Any], y: list[Any]) -> Pair:
        texts, following = (
            torch.from_numpy(decode_texts(pl.Series(each, dtype=pl.String), name, length))
            for each, name, length in ((x, "x", LENGTH), (y, "y", 1))
        )
        return texts, following.squeeze(1).to(torch.int64)

    def from_hub(self, data_root: Path | None) -> tuple[Samples, Samples]:
        columns: dict[str, Decoder] = {
            "character_id": decode_names,
            "x": decode_texts,
            "y": partial(decode_texts, length=1),
        }
        data = hub_dataset(self.hub_id, columns, {"train": None}, data_root)["train"]
        roles, texts, following = (torch.from_numpy(data[name]) for name in columns)
        return divided(texts, following.squeeze(1).to(torch.int64), roles, self.train_fraction)
