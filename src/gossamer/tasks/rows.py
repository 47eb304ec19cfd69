"""The rows of the files of a data set, each of which knows its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import polars as pl
from jaxtyping import Bool, Float32

from gossamer.errors import BadInput, listed
from gossamer.tasks import data, splits

InTest = Bool[np.ndarray, " _"]  # whether a row belongs to the test set


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of the training files and then of the test files, in order, with the columns that a task uses.

    ``ends`` has the number of rows up to the end of each file. ``remarks`` collects what the user should know."""

    files: splits.Files
    table: pl.DataFrame
    ends: list[int]
    in_test: InTest
    remarks: list[str] = field(default_factory=list)

    def place(self, row: int) -> str:
        """A row for the user, by its file and its number in it, from 1."""
        file = int(np.searchsorted(self.ends, row, side="right"))
        path = (*self.files.train, *self.files.test)[file]
        return f"row {row - (self.ends[file - 1] if file else 0) + 1} of {self.files.name(path)}"

    def check_finite(self, values: Float32[np.ndarray, "rows ..."], column: str, where: str) -> None:
        """Refuse values, one or several for each row, that are not finite."""
        wrong = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))
        if len(wrong):
            problem = f"{len(wrong):,} values of {column!r} are not finite (the first in {self.place(int(wrong[0]))})"
            raise BadInput(f"{where}: {problem}; accepted: finite numbers of float32")


def read_rows(files: splits.Files, columns: Mapping[str, str]) -> Rows:
    """Read columns (name -> the field of the task that names it) of all files. Whole numbers in some files and floats in
    others become floats; words of several types, such as two Enums, become text. BadInput for a column that a file lacks,
    that has words in one file and numbers in another one, or that has a missing value."""
    paths = (*files.train, *files.test)
    if splits.kind_of(paths[0]) == "image":
        tables = [data.read_images(paths, files.name)]
        counts = [1] * len(paths)
    else:
        tables = [data.read_table(path) for path in paths]
        counts = [len(table) for table in tables]
    known = sorted({column for table in tables for column in table.columns})
    for column, field_ in columns.items():
        if column not in known:
            raise BadInput(f"task.{field_}: got {column!r}; accepted: {listed(known)}")
        for path, table in zip(paths, tables, strict=False):
            if column not in table.columns:
                problem = f"{files.name(path)} has no column {column!r}"
                raise BadInput(
                    f"task.{field_}: {problem}; accepted: it in every file, or a pattern of files as task.train and task.test"
                )
    filled = [
        (path, table.select(list(columns))) for path, table in zip(paths, tables, strict=False) if len(table)
    ]
    trained = sum(counts[: len(files.train)])
    for split, named, count in (
        ("train", files.train, trained),
        ("test", files.test, sum(counts) - trained),
    ):
        if named and not count:
            raise BadInput(f"task.{split}: no rows in {splits.some(map(files.name, named))}; accepted: rows")
    empty = [files.name(path) for path, count in zip(paths, counts, strict=True) if not count]
    remarks = [f"no rows in {splits.some(empty)}"] if empty else []
    if splits.kind_of(paths[0]) == "CSV":
        for first, *rest in dict.fromkeys(
            tuple(names) for t in tables if (names := data.numbers_as_names(t))
        ):
            remarks.append(
                f"numbers taken as names of columns: {f'{first} to {rest[-1]}' if rest else first}"
            )
    for column, field_ in columns.items():
        kinds = {
            _kind(table[column]): (table[column].dtype, files.name(path)) for path, table in reversed(filled)
        }
        if len(kinds) > 1:
            problem = " and ".join(f"{dtype} in {name}" for dtype, name in kinds.values())
            raise BadInput(f"task.{field_}: {column!r} is {problem}; accepted: one type")
        types = {table.schema[column] for _, table in filled}
        if "words" in kinds and len(types) > 1:
            filled = [(path, table.cast({column: pl.String})) for path, table in filled]
    table = pl.concat([part for _, part in filled], how="vertical_relaxed")
    rows = Rows(files, table, np.cumsum(counts).tolist(), np.arange(len(table)) >= trained, remarks)
    for column, field_ in columns.items():
        if count := table[column].null_count():
            first = rows.place(int(table[column].is_null().arg_max() or 0))
            problem = f"{count:,} values of {column!r} are missing (the first in {first})"
            raise BadInput(f"task.{field_}: {problem}; accepted: none")
    return rows


def _kind(column: pl.Series) -> str:
    """What the values of a column are in every file: numbers or words of any type, or values of one type."""
    if column.dtype.is_numeric():
        return "numbers"
    return "words" if column.dtype in (pl.String, pl.Categorical, pl.Enum) else str(column.dtype.base_type())
