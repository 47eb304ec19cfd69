"""Any data set, from the Hugging Face hub or local files, with any model and loss."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import polars as pl
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from jaxtyping import Int64
from pydantic import Field, PositiveInt, field_validator
from torch import Tensor

from gossamer.config.registry import Section, imported, register
from gossamer.config.validation import not_called_with
from gossamer.errors import BadInput, shown
from gossamer.tasks import data, language, pixels, splits, tables, task
from gossamer.tasks.metrics import Metrics, chosen_metrics
from gossamer.tasks.provenance import Provenance
from gossamer.tasks.rows import FileRows, InTest, MissingValues, read_rows
from gossamer.tasks.tables import CSV, CellText
from gossamer.tasks.task import Metric, ModelField, Pair, Reference, RootMean, Task, TaskSource, for_each

LOSSES: dict[str, tuple[Metric, dict[str, Metric]]] = {
    "classification": (F.cross_entropy, {"accuracy": task.accuracy}),
    "regression": (F.mse_loss, {"rmse": RootMean(F.mse_loss), "mae": F.l1_loss}),
    "next-token": (language.token_loss, language.METRICS),
}
"""The named losses, and the metrics for each."""

Owners = Int64[np.ndarray, " _"]


class EachOwner(Section):
    """Owners by names of files or folders: each file, or all files of each folder, have an owner of their own."""

    each: Literal["file", "folder"]


@register("task", "hub")
class Hub(data.Source, TaskSource):
    """A data set from the Hugging Face hub (``hub_id``) or local files (``path``: a file, or a folder of
    Parquet, CSV, JSON Lines, text or Arrow files, as written by ``save_to_disk`` of the package ``datasets``,
    or of images by class). Text in CSV, JSON Lines and text files may be compressed (``.gz``).

    Images become float32 [samples, channels, height, width] from 0 to 1, numbers become float32 [samples,
    columns], and lists of whole numbers become int64. The ``tokenizer`` turns texts into the arguments of a
    model of transformers (``input_ids``, ...). A model gets the ``shape`` of an input and the number of
    ``classes``: the number of class names, target columns or tokens.

    With the loss ``next-token``, each owner's texts are joined by newlines and divided into non-overlapping
    samples of ``context`` tokens: int32 tokens [samples, context], with the next tokens as targets. Tokens
    are characters (those of both splits), or come from the ``tokenizer`` or the model ``causal-lm``."""

    subset: str | None = None  # a folder of the data set (a configuration, in the hub's terms)
    # A column, several numeric columns, or a column for each argument of the model; * in a name stands for any characters.
    inputs: CellText | tuple[CellText, ...] | dict[str, CellText] = "text"
    targets: CellText | tuple[CellText, ...] | None = None  # None with next-token only
    # The owners, for the partition natural: a column, or {each: file} or {each: folder}.
    owner: CellText | EachOwner | None = None
    # The splits, by words in the names of files and folders, or patterns of their paths (gossamer.tasks.splits).
    train: str = "train"
    test: str = "test"
    # Without a test split: fraction of each owner's samples that is for training, drawn at random, or the first
    # ones with next-token.
    train_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.9
    csv: CSV | None = None  # how CSV files are read; texts are CSV files too, if there are no others
    encoding: str = "utf-8"  # of texts, CSV and JSON Lines files
    missing: MissingValues = "refuse"  # rows that miss a value, in a column that is used
    image_size: tuple[PositiveInt, PositiveInt] | None = None  # images are resized to this height and width
    # Pillow's mode of all images: L (grey), RGB or RGBA; None is L if all images are grey, and otherwise RGB.
    image_mode: pixels.Mode | None = None
    tokenizer: language.Tokenizer | None = None
    context: PositiveInt = 64  # tokens per sample; longer texts are truncated, unless the loss is next-token
    # A function of (inputs, training inputs) that returns the inputs to use. It is called for the training and for the test
    # set, and computes statistics, such as a mean, from the training inputs.
    transform: Reference | None = None
    augment: Reference | None = None  # a function of a training batch's inputs and a NumPy generator
    loss: Literal["classification", "regression", "next-token"] | Reference = "classification"
    metrics: Metrics = Field(default_factory=dict)  # in addition to the loss's metrics
    model: ModelField = Field(default="mlp", validate_default=True)

    @field_validator("encoding")
    @classmethod
    def _is_known(cls, encoding: str) -> str:
        try:
            "a".encode(encoding)
        except (LookupError, ValueError):
            raise ValueError("an encoding that Python knows, such as utf-8, latin-1 or cp1252") from None
        return encoding

    def load(self, data_root: Path | None, seed: int) -> Task:
        if (self.targets is None) != (self.loss == "next-token"):
            problem = f"{self.targets}, with loss {self.loss}"
            raise BadInput(f"task.targets: {problem}; accepted: columns, or next-token")
        rows = self._read(data_root)
        owners = self._owners(rows)
        in_test = rows.in_test
        names: list[str] | None = None
        split_purpose: str | None = "hub-split"
        if self.loss == "next-token":
            (inputs, targets), owners, in_test, outputs = self._sequences(rows, owners, data_root)
            split_purpose = None  # the first samples are for training
        else:
            inputs, (targets, names) = self._inputs(rows, data_root), self._targets(rows)
            outputs = len(names) if names else targets.shape[1]
        train, test = np.flatnonzero(~in_test), np.flatnonzero(in_test)
        if not (len(test) or rows.files.test):
            train, test = data.split_by_owner(owners, self.train_fraction, split_purpose)
            if not len(test):
                count = f"{len(owners):,} sample{'' if len(owners) == 1 else 's'}"
                whose = "" if self.owner is None else f" of {len(np.unique(owners)):,} owners"
                problem = f"{self.train_fraction}, which leaves no test sample of {count}{whose} in {rows.files.root}"
                accepted = "two samples of an owner or more, or files of a test split"
                raise BadInput(f"task.train_fraction: {problem}; accepted: {accepted}")
        pairs = self._transformed(_rows(inputs, targets, train), _rows(inputs, targets, test))
        loss, metrics = LOSSES.get(self.loss) or (imported(self.loss, "task.loss"), {})
        return Task(
            model=task.model_factory(self.model, data_root, shape=task.shapes(pairs[0][0]), classes=outputs),
            train=pairs[0],
            test=pairs[1],
            loss=loss,
            metrics={**metrics, **chosen_metrics(self.metrics, names)},
            groups=None if self.owner is None else torch.from_numpy(owners[train]),
            classes=names,
            augment=None if self.augment is None else imported(self.augment, "task.augment"),
            provenance=self._provenance(rows),
        )

    def _owners(self, rows: FileRows) -> Owners:
        """The number of each row's owner."""
        if self.owner is None:
            return np.zeros(len(rows.table), np.int64)
        if isinstance(self.owner, str):
            return _numbers(rows.table[self.owner])[0]
        owners, names = _numbers(rows.owners(self.owner.each))
        trained = [names[owner] for owner in np.unique(owners[~rows.in_test])]
        count = f"{len(trained):,} owner{'' if len(trained) == 1 else 's'}"
        rows.remarks.append(f"{count}, one for each {self.owner.each} ({splits.some(trained)})")
        return owners

    def _provenance(self, rows: FileRows) -> Provenance:
        files, named = rows.files, rows.files.name
        if files.test:
            test, by_split = f"the files of {self.test!r}", {"train": files.train, "test": files.test}
        else:
            how = "the last" if self.loss == "next-token" else "drawn,"
            whose = "the" if self.owner is None else "each owner's"
            test = f"{how} {1 - self.train_fraction:.3g} of {whose} samples, the same for every seed"
            by_split = {"all": files.train}
        aside = [f"not read: {splits.some(map(named, files.aside))}"] if files.aside else []
        source = self.hub_id or str(files.root)
        return Provenance(source, test, by_split, [*rows.remarks, *aside])

    def _transformed(self, train: Pair, test: Pair) -> tuple[Pair, Pair]:
        """The training and test samples, with transformed inputs."""
        if self.transform is None:
            return train, test
        transform = imported(self.transform, "task.transform")
        if problem := not_called_with(transform, "inputs", "training inputs"):
            raise BadInput(
                f"task.transform: {self.transform}: {problem}; accepted: a function of (inputs, training inputs)"
            )
        # The test inputs first, since the function may write into the inputs that it returns.
        tested = transform(test[0], train[0])
        return (transform(train[0], train[0]), train[1]), (tested, test[1])

    def _read(self, data_root: Path | None) -> FileRows:
        """The rows of both splits."""
        root = self.locate(data_root, "dataset", splits.PATTERNS) / (self.subset or "")
        if not root.exists():
            raise BadInput(f"task.path: {root} does not exist; accepted: a file, or a folder of files")
        files = splits.find(root, self.train, self.test, tables=self.csv is not None)
        fields = {name: _listed(getattr(self, name)) for name in ("inputs", "targets", "owner")}
        return read_rows(files, fields, self.csv, self.encoding, self.missing)

    def _inputs(self, rows: FileRows, data_root: Path | None) -> Any:
        if isinstance(self.inputs, dict):
            return {argument: self._argument(rows, name) for argument, name in self.inputs.items()}
        columns = rows.found(_listed(self.inputs))
        first = rows.table[columns[0]]
        if len(columns) > 1 or tables.is_numeric(first):
            return _features(rows, columns, "inputs")
        if first.dtype != pl.String:
            return self._tensor(rows, columns[0])
        if self.tokenizer is None:
            accepted = "a column of numbers, or task.tokenizer for one of texts"
            _refuse_words(rows, columns[0], "inputs", accepted)
        return self._encoded(first, self.tokenizer, data_root)

    def _argument(self, rows: FileRows, name: str) -> Tensor:
        """A column, or the numbers of several ones, as a tensor."""
        columns = rows.found([name])
        return self._tensor(rows, columns[0]) if len(columns) == 1 else _features(rows, columns, "inputs")

    def _tensor(self, rows: FileRows, name: str) -> Tensor:
        """A column of images, numbers or lists of numbers as a tensor."""
        column, where = rows.table[name], f"task: column {name!r}"
        if pixels.is_image(column):
            return self._images(rows, column, where)
        try:
            values = torch.tensor(column.to_list())
        except (TypeError, ValueError, RuntimeError):
            row = _odd_one(column)
            problem = f"{column.dtype}, with {reprlib.repr(column.to_list()[row])} in {rows.place(row)}"
            raise BadInput(f"{where}: {problem}; accepted: numbers, or lists of one length") from None
        if not values.is_floating_point():
            return values.to(torch.int64)
        numbers = values.to(torch.float32)
        rows.check_finite(numbers.numpy(), name, where)
        return numbers

    def _images(self, rows: FileRows, column: pl.Series, where: str) -> Tensor:
        """Images, float32 [samples, channels, height, width] from 0 to 1."""
        shapes = pixels.shapes(column)
        if self.image_size is None and len(shapes.sizes) > 1:
            (common, count), *others = shapes.sizes.most_common()
            found = splits.some([f"{n:,} of {w}x{h}" for (h, w), n in others])
            problem = f"{count:,} images of {common[1]}x{common[0]} pixels, {found}"
            accepted = f"one size, or a height and a width as task.image_size, such as {list(common)}"
            raise BadInput(f"{where}: {problem}; accepted: {accepted}")
        images = f"of {len(column):,} images"
        if self.image_mode is None:
            if shapes.grey and shapes.colour:
                rows.remarks.append(f"{shapes.grey:,} {images} are grey, and became colour images")
            if shapes.transparent:
                rows.remarks.append(f"{shapes.transparent:,} {images} lose their transparency")
        if shapes.deep:
            rows.remarks.append(f"{shapes.deep:,} {images} have 16 bits: 65,535 became 1")
        decoded = pixels.decoded(
            column,
            where,
            rows.place,
            size=self.image_size or next(iter(shapes.sizes), (32, 32)),
            mode=self.image_mode or ("RGB" if shapes.colour else "L"),
            resize=self.image_size is not None,
            deep=shapes.deep > 0,
        )
        stored = torch.from_numpy(decoded).permute(0, 3, 1, 2)
        return stored.to(torch.float32).div(pixels.MOST if shapes.deep else 255).contiguous()

    def _encoded(
        self, texts: pl.Series, source: language.Tokenizer, data_root: Path | None
    ) -> dict[str, Tensor]:
        """Texts as the arguments of a model of transformers, each [samples, context]."""
        tokenizer = language.pretrained("AutoTokenizer", source, data_root, "task.tokenizer")
        options = {"padding": "max_length", "truncation": True, "max_length": self.context}
        return dict(tokenizer(texts.to_list(), return_tensors="pt", **options))

    def _targets(self, rows: FileRows) -> tuple[Tensor, list[str] | None]:
        """The targets, and the names of the classes if the targets are classes."""
        columns = rows.found(_listed(self.targets))
        column, classes = rows.table[columns[0]], self.loss == "classification"
        if len(columns) > 1 or self.loss == "regression" or (tables.is_numeric(column) and not classes):
            return _features(rows, columns, "targets"), None
        if column.dtype != pl.String and not classes:
            return self._tensor(rows, columns[0]), None
        if column.dtype.is_nested():
            raise BadInput(
                f"task.targets: {columns[0]!r} is {column.dtype}; accepted: class names or numbers"
            )
        if column.dtype.is_float():
            column = _whole(rows, columns[0])
        _check_classes(column, rows.in_test)
        numbers, names = _numbers(column)
        return torch.from_numpy(numbers), names

    def _sequences(
        self, rows: FileRows, owners: Owners, data_root: Path | None
    ) -> tuple[Pair, Owners, InTest, int]:
        """The samples, their owners, whether each belongs to the test split, and the size of the vocabulary."""
        texts, in_test = rows.table[rows.found(_listed(self.inputs))[0]], rows.in_test
        data.check_text(texts, f"task.inputs: {texts.name!r}", rows.place)
        owned = pl.DataFrame({"owner": owners, "test": in_test, "text": texts})
        streams = owned.group_by("owner", "test").agg(pl.col("text").str.join("\n")).sort("owner", "test")
        tokens_of, vocabulary = self._tokens_of(streams["text"], data_root)
        inputs, targets = [], []
        for text in streams["text"]:
            tokens = torch.tensor(tokens_of(text), dtype=torch.int32)
            count = max(len(tokens) - 1, 0) // self.context
            end = count * self.context
            inputs.append(tokens[:end].view(count, self.context))
            targets.append(tokens[1 : end + 1].view(count, self.context))
        counts, split = [len(samples) for samples in inputs], in_test.any()
        owners, in_test = (streams[column].to_numpy().repeat(counts) for column in ("owner", "test"))
        if sum(counts) < 2 or (split and len(set(in_test.tolist())) < 2):
            found = (
                f"{(~in_test).sum()} training and {in_test.sum()} test samples"
                if split
                else f"{sum(counts)} samples"
            )
            raise BadInput(f"task.context: {self.context}, for {found}; accepted: a smaller one")
        return (torch.cat(inputs), torch.cat(targets)), owners, in_test, vocabulary

    def _tokens_of(self, texts: pl.Series, data_root: Path | None) -> tuple[Callable[[str], list[int]], int]:
        """A function from text to tokens, and the size of the vocabulary."""
        source = self.model if isinstance(self.model, language.CausalLM) else self.tokenizer
        if source is None:
            numbers = {character: token for token, character in enumerate(sorted(set().union(*texts)))}
            return lambda text: [numbers[character] for character in text], len(numbers)
        tokenizer = language.pretrained("AutoTokenizer", source, data_root, "task.tokenizer")
        encode = partial(tokenizer, add_special_tokens=False, verbose=False)
        return lambda text: encode(text)["input_ids"], len(tokenizer)


def _listed(columns: str | Sequence[str] | dict[str, str] | EachOwner | None) -> list[str]:
    if isinstance(columns, EachOwner):
        return []
    if isinstance(columns, dict):
        return list(columns.values())
    return [columns] if isinstance(columns, str) else list(columns or ())


def _rows(inputs: Any, targets: Tensor, indices: Int64[np.ndarray, " n"]) -> Pair:
    rows = torch.from_numpy(indices)
    return for_each(lambda tensor: tensor[rows], inputs), targets[rows]


def _numbers(column: pl.Series) -> tuple[Owners, list[str]]:
    """The positions of values in the sorted distinct values, and these values."""
    values = column.unique().sort()
    return column.rank("dense").cast(pl.Int64).to_numpy() - 1, [str(value) for value in values]


def _odd_one(column: pl.Series) -> int:
    """The first row that is no number or list of numbers, or whose list has another shape than that of the first row."""
    first: torch.Size | None = None
    for row, value in enumerate(column.to_list()):
        try:
            shape = torch.tensor(value).shape
        except (TypeError, ValueError, RuntimeError):
            return row
        if shape != (first := first or shape):
            return row
    return 0


def _whole(rows: FileRows, name: str) -> pl.Series:
    """A column of class numbers that are written as decimals, such as 1.0."""
    column = rows.table[name]
    rows.check_finite(column.cast(pl.Float32).to_numpy(), name, "task.targets")
    if len(odd := ((column != column.floor()) | (column.abs() >= 2**53)).arg_true()):
        problem = f"{name!r} has no class numbers ({column[odd[0]]} in {rows.place(int(odd[0]))})"
        accepted = "class names or whole numbers, or loss: regression"
        raise BadInput(f"task.targets: {problem}; accepted: {accepted}")
    return column.cast(pl.Int64)


def _check_classes(column: pl.Series, in_test: InTest) -> None:
    """Refuse classes that only the test set has: no model can learn them, and -1, "?" or "" stand for a hidden label."""
    known = set(column.filter(pl.Series(~in_test)).unique())
    unknown = [str(value) for value in column.filter(pl.Series(in_test)) if value not in known]
    if unknown:
        names = splits.some([f"{name!r} ({count:,})" for name, count in Counter(unknown).most_common()])
        problem = f"{len(unknown):,} of {in_test.sum():,} test samples are of classes that no training sample has, {names}"
        accepted = "classes of the training split, or another split as task.test"
        raise BadInput(f"task.targets: column {column.name!r}: {problem}; accepted: {accepted}")


def _refuse_words(rows: FileRows, name: str, field: str, accepted: str = "a column of numbers") -> NoReturn:
    """Refuse a column that has something else than numbers."""
    column = rows.table[name]
    if column.dtype not in (pl.String, pl.Categorical, pl.Enum):
        raise BadInput(f"task.{field}: {name!r} is {column.dtype}; accepted: {accepted}")
    wrong = tables.not_numbers(column)
    first, count = int(wrong.arg_max() or 0), wrong.sum()
    if rows.files.kind == "CSV":
        accepted += tables.cure_for_words(column)
    of = f", one of {count:,}" if count > 1 else ""
    problem = f"{name!r} is no column of numbers ({shown(str(column[first]))} in {rows.place(first)}{of})"
    raise BadInput(f"task.{field}: {problem}; accepted: {accepted}")


def _features(rows: FileRows, columns: Sequence[str], field: str) -> Tensor:
    """Numeric columns side by side, float32 [samples, columns]."""
    for name in columns:
        column = rows.table[name]
        if not tables.is_numeric(column):
            _refuse_words(rows, name, field)
        values = column.cast(pl.Float32)
        rows.check_finite(values.to_numpy(), name, f"task.{field}")
        if column.dtype.is_integer() and (
            rounded := values.cast(column.dtype, strict=False).ne_missing(column).sum()
        ):
            rows.remarks.append(f"{rounded:,} whole numbers of {name!r} are rounded to 24 bits (float32)")
    return torch.from_numpy(rows.table.select(pl.col(columns).cast(pl.Float32)).to_numpy(writable=True))
