"""Any data set, of the Hugging Face hub or in local files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import polars as pl
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from jaxtyping import Bool, Int64
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from gossamer.config.registry import FilePath, imported, register
from gossamer.errors import BadInput, listed
from gossamer.tasks import data, task
from gossamer.tasks.task import Metric, ModelField, Pair, Reference, RootMean, Task, TaskSource, for_each

LOSSES: dict[str, tuple[Metric, dict[str, Metric]]] = {
    "classification": (F.cross_entropy, {"accuracy": task.accuracy}),
    "regression": (F.mse_loss, {"rmse": RootMean(F.mse_loss), "mae": F.l1_loss}),
}
"""The named losses, and the metrics that go with each."""

Owners = Int64[np.ndarray, " _"]
Held = Bool[np.ndarray, " _"]  # whether a row is of the test set


@register("task", "hub")
class Hub(TaskSource):
    """A data set of the Hugging Face hub (``hub_id``) or of local files (``path``: a file, or a folder of Parquet, CSV, JSON
    lines or Arrow files, as ``save_to_disk`` of the package ``datasets`` writes them, or of images by class).

    Images become float32 [samples, channels, height, width] from 0 to 1, numbers float32 [samples, columns], and lists of
    whole numbers int64. A model is offered the ``shape`` of an input and the number of ``classes``: of class names, or of
    target columns."""

    path: FilePath | None = None
    hub_id: str | None = None  # read from data_root/hub/<hub id>, if there is a data root
    subset: str | None = None  # a folder of the data set, which the hub calls a configuration
    inputs: str | tuple[str, ...]  # a column, or several columns of numbers
    targets: str | tuple[str, ...]  # a column, or with regression several
    owner: str | None = None  # the column of owners, for the partition natural
    train: str = "train"  # the split that is for training
    test: str = "test"  # the split that is for testing; if there is none,
    # this share of each owner's samples is drawn for training.
    train_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.9
    image_size: tuple[PositiveInt, PositiveInt] | None = None  # height and width, to which images are resized
    augment: Reference | None = None  # a function of a training batch's inputs and a NumPy generator
    loss: Literal["classification", "regression"] = "classification"
    model: ModelField = Field(default="mlp", validate_default=True)

    @model_validator(mode="after")
    def _one_source(self) -> Hub:
        if (self.path is None) == (self.hub_id is None):
            raise ValueError("one of path and hub_id")
        return self

    def load(self, data_root: Path | None, seed: int) -> Task:
        """The task; see :meth:`TaskSource.load`. It does not depend on the seed."""
        table, held = self._table(data_root)
        owners = np.zeros(len(table), np.int64) if self.owner is None else _numbers(table[self.owner])[0]
        inputs, (targets, names) = self._inputs(table), self._targets(table)
        outputs = len(names) if names else targets.shape[1]
        train, test = np.flatnonzero(~held), np.flatnonzero(held)
        if not len(test):
            train, test = data.split_by_owner(owners, self.train_fraction, "hub-split")
        loss, metrics = LOSSES[self.loss]
        return Task(
            model=task.model_factory(self.model, data_root, shape=task.shapes(inputs), classes=outputs),
            train=_rows(inputs, targets, train),
            test=_rows(inputs, targets, test),
            loss=loss,
            metrics=metrics,
            groups=None if self.owner is None else torch.from_numpy(owners[train]),
            classes=names,
            augment=None if self.augment is None else imported(self.augment, "task.augment"),
        )

    def _table(self, data_root: Path | None) -> tuple[pl.DataFrame, Held]:
        """The rows of both splits, and which are of the test split."""
        place = self.path or data.hub_folder(str(self.hub_id), data_root, (*data.DATA, *data.IMAGES))
        place = place / (self.subset or "")
        if not place.exists():
            raise BadInput(f"task.path: {place} does not exist; accepted: a file, or a folder of files")
        train, test = data.read_split(place, self.train), data.read_split(place, self.test)
        for field, split, rows in (("train", self.train, train), ("test", self.test, test)):
            if rows.is_empty() and split != "test":
                raise BadInput(f"task.{field}: {place} has no rows of the split {split!r}; accepted: some")
        table = pl.concat([rows for rows in (train, test) if len(rows)], how="vertical_relaxed")
        for field in ("inputs", "targets", "owner"):
            for column in _listed(getattr(self, field)):
                if column not in table.columns:
                    raise BadInput(f"task.{field}: got {column!r}; accepted: {listed(table.columns)}")
                if count := table[column].null_count():
                    raise BadInput(f"task.{field}: {count} values of {column!r} are missing; accepted: none")
        return table, np.arange(len(table)) >= len(train)

    def _inputs(self, table: pl.DataFrame) -> Tensor:
        columns = _listed(self.inputs)
        first = table[columns[0]]
        if len(columns) > 1 or data.is_numeric(first):
            return _features(table, columns, "inputs")
        where = f"task.inputs: column {first.name!r}"
        if data.is_image(first):
            height, width, channels = data.image_shape(first)
            size = self.image_size or (height, width)
            pixels = data.image_decoder(*size, channels, resize=self.image_size is not None)(first, where)
            images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
            return images.to(torch.float32).div(255).contiguous()
        try:
            values = torch.tensor(first.to_list())
        except (TypeError, ValueError) as error:
            found = f"{first.dtype} ({error})"
            raise BadInput(f"{where}: {found}; accepted: numbers, or lists of one length") from None
        return values.to(torch.float32 if values.is_floating_point() else torch.int64)

    def _targets(self, table: pl.DataFrame) -> tuple[Tensor, list[str] | None]:
        """The targets, and the names of the classes if they are classes."""
        columns = _listed(self.targets)
        if len(columns) > 1 or self.loss == "regression":
            return _features(table, columns, "targets"), None
        column = table[columns[0]]
        if column.dtype.is_float() or column.dtype.is_nested():
            raise BadInput(f"task.targets: {column.dtype}; accepted: class names or numbers, or another loss")
        numbers, names = _numbers(column)
        return torch.from_numpy(numbers), names


def _listed(columns: str | Sequence[str] | None) -> list[str]:
    return [columns] if isinstance(columns, str) else list(columns or ())


def _rows(inputs: Any, targets: Tensor, which: Int64[np.ndarray, " n"]) -> Pair:
    chosen = torch.from_numpy(which)
    return for_each(lambda tensor: tensor[chosen], inputs), targets[chosen]


def _numbers(column: pl.Series) -> tuple[Owners, list[str]]:
    """Values as their places in order, and the values."""
    values = column.unique().sort()
    return column.rank("dense").cast(pl.Int64).to_numpy() - 1, [str(value) for value in values]


def _features(table: pl.DataFrame, columns: Sequence[str], field: str) -> Tensor:
    """Columns of numbers side by side, float32 [samples, columns]."""
    for column in columns:
        if not data.is_numeric(table[column]):
            found = f"{column!r} is {table[column].dtype}"
            raise BadInput(f"task.{field}: {found}; accepted: a column of numbers")
    return torch.from_numpy(table.select(pl.col(columns).cast(pl.Float32)).to_numpy(writable=True))
