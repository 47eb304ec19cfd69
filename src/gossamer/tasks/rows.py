"""The rows of the files of a data set, each of which knows its file."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
from jaxtyping import Bool, Float32, Int64
from polars.exceptions import PolarsError

from gossamer.errors import BadInput
from gossamer.tasks import splits, tables

InTest = Bool[np.ndarray, " _"]  # whether a row belongs to the test set
Numbers = Int64[np.ndarray, " _"]
MissingValues = Literal["refuse", "drop"]
"""The treatment of rows that miss a value."""

_NAMED = 12  # the most columns that an error names


@dataclass(frozen=True, eq=False)
class FileRows:
    """The rows of the training files and then of the test files, in order, with the columns that a task uses.

    ``columns`` has the columns for which each name of the task stands. ``file`` has the number of each row's file, and
    ``number`` its number in that file, from 1, without the line of names of a CSV file (``below_names``). ``remarks``
    collects what the user should know."""

    files: splits.Files
    columns: Mapping[str, Sequence[str]]
    table: pl.DataFrame
    file: Numbers
    number: Numbers
    below_names: bool = False
    remarks: list[str] = field(default_factory=list)

    @property
    def in_test(self) -> InTest:
        """Whether each row belongs to the test set."""
        return self.file >= len(self.files.train)

    def found(self, names: Sequence[str]) -> list[str]:
        """The columns for which some names stand, in order."""
        return [column for name in names for column in self.columns[name]]

    def place(self, row: int) -> str:
        """A row for the user, by its file and its number in it."""
        path, number = self.files.all[self.file[row]], int(self.number[row])
        return _place(self.files, path, number, self.below_names)

    def owners(self, each: Literal["file", "folder"]) -> pl.Series:
        """The owner of each row by the name of its file or folder; see :meth:`gossamer.tasks.splits.Files.owner`."""
        names = [self.files.owner(path, each) for path in self.files.all]
        return pl.Series(np.array(names, object)[self.file].tolist(), dtype=pl.String)

    def check_finite(self, values: Float32[np.ndarray, "rows ..."], column: str, where: str) -> None:
        """Refuse values, one or several for each row, that are not finite."""
        wrong = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))
        if len(wrong):
            problem = f"{len(wrong):,} values of {column!r} are not finite (the first in {self.place(int(wrong[0]))})"
            accepted = "finite numbers of float32, or task.missing: drop for NaN"
            raise BadInput(f"{where}: {problem}; accepted: {accepted}")

    def complete(self, fields: Mapping[str, Sequence[str]], missing: MissingValues) -> FileRows:
        """The rows without missing values. With ``drop``, those that miss a value (NaN too) are left out, and a remark says
        how many; with ``refuse``, they are bad input. ``fields`` are those of :func:`read_rows`."""
        lacking = {name: _lacks(self.table[name], nan=missing == "drop") for name in self.table.columns}
        wrong = np.logical_or.reduce(list(lacking.values()))
        if not wrong.any():
            return self
        name = next(name for name in lacking if lacking[name].any())
        if missing == "refuse":
            place = self.place(int(lacking[name].argmax()))
            problem = f"{lacking[name].sum():,} values of {name!r} are missing (the first in {place})"
            accepted = "none, or task.missing: drop, which leaves such rows out"
            raise BadInput(f"task.{_field_of(self.columns, fields)[name]}: {problem}; accepted: {accepted}")
        kept = replace(
            self, table=self.table.filter(~wrong), file=self.file[~wrong], number=self.number[~wrong]
        )
        for split, files in (("train", self.files.train), ("test", self.files.test)):
            if files and not (kept.in_test == (split == "test")).any():
                problem = f"each row of {splits.some(map(self.files.name, files))} misses a value, the first of {name!r}"
                raise BadInput(f"task.{split}: {problem}; accepted: rows without missing values")
        count, place = f"{wrong.sum():,} of {len(wrong):,} rows", self.place(int(wrong.argmax()))
        self.remarks.append(f"left out for a missing value: {count} (the first is {place})")
        return kept


def read_rows(
    files: splits.Files,
    fields: Mapping[str, Sequence[str]],
    form: tables.CSV | None = None,
    encoding: str = "utf-8",
    missing: MissingValues = "refuse",
) -> FileRows:
    """Read the columns that fields of the task name in all files.

    Inputs and targets that no column has are patterns, as of the shell, for all columns that no field names. Whole numbers in
    some files and floats in others become floats; words of several types, such as two Enums, become text, as do owners that
    are words in one file and numbers in another one.

    BadInput for a column that a file lacks, that has words in one file and numbers in another one, or that has a missing
    value, unless such rows are dropped."""
    read, numbers = _read(files, form, encoding)
    columns = _found(files, read, fields)
    counts = list(map(len, numbers))
    trained = sum(counts[: len(files.train)])
    for split, named, count in (
        ("train", files.train, trained),
        ("test", files.test, sum(counts) - trained),
    ):
        if named and not count:
            raise BadInput(f"task.{split}: no rows in {splits.some(map(files.name, named))}; accepted: rows")
    empty = [files.name(path) for path, count in zip(files.all, counts, strict=True) if not count]
    remarks = [f"no rows in {splits.some(empty)}"] if empty else []
    for name, found in columns.items():
        if found != [name]:
            remarks.append(f"{name!r} stands for {len(found):,} columns ({splits.some(found)})")
    below_names = files.kind == "CSV" and (form is None or form.has_header)
    if below_names and (form is None or form.columns is None):
        ranges = dict.fromkeys(tuple(names) for table in read if (names := tables.numbers_as_names(table)))
        for first, *rest in ranges:
            remarks.append(
                f"numbers taken as names of columns: {f'{first} to {rest[-1]}' if rest else first}"
            )
    field_of = _field_of(columns, fields)
    if files.kind == "image":
        table = read[0].select(list(field_of))
    else:
        parts = [part for part in zip(files.all, read, numbers, strict=True) if len(part[1])]
        joined = [_joined(files, parts, name, field_of[name], below_names) for name in field_of]
        table = pl.concat(joined, how="horizontal")
    file = np.repeat(np.arange(len(counts)), counts)
    rows = FileRows(files, columns, table, file, np.concatenate(numbers), below_names, remarks)
    return rows.complete(fields, missing)


def _read(
    files: splits.Files, form: tables.CSV | None, encoding: str
) -> tuple[list[pl.DataFrame], list[Numbers]]:
    """The tables of all files, or one of all images, and the numbers of the rows in each file."""
    if files.kind == "image":
        return [tables.read_images(files.all, [*map(files.name, files.all)])], [
            np.ones(1, np.int64) for _ in files.all
        ]
    read, numbers = list[pl.DataFrame](), list[Numbers]()
    for path in files.all:
        table = tables.read_table(path, files.kind, form, encoding)
        number = np.arange(1, len(table) + 1)
        if files.kind == "CSV":  # blank lines are no rows, but count
            filled = table.select(pl.any_horizontal(pl.all().is_not_null())).to_series()
            table, number = table.filter(filled), number[filled.to_numpy()]
        read.append(table)
        numbers.append(number)
    return read, numbers


def _found(
    files: splits.Files, read: Sequence[pl.DataFrame], fields: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """The columns for which each name stands. BadInput for a column that a file lacks."""
    known = list(dict.fromkeys(column for table in read for column in table.columns))
    named = {name for names in fields.values() for name in names}
    found = dict[str, list[str]]()
    for field_, name in ((field_, name) for field_, names in fields.items() for name in names):
        found[name] = [name] if name in known else []
        if not found[name] and field_ != "owner":
            found[name] = [column for column in known if fnmatchcase(column, name) and column not in named]
        if not found[name]:
            more = ", {each: file} or {each: folder}" if field_ == "owner" else ""
            if files.kind == "text":
                more = ", or task.csv: {} if the files are tables"
            elif files.kind == "CSV":
                more += tables.hints(read[0])
            accepted = f"{_near(name, known)} (of {splits.some(map(files.name, files.all), 1)}){more}"
            raise BadInput(f"task.{field_}: got {name!r}; accepted: {accepted}")
        for path, table in zip(files.all, read, strict=False):
            if lacks := [column for column in found[name] if column not in table.columns]:
                has = _near(lacks[0], table.columns)
                problem = f"{files.name(path)} has no column {lacks[0]!r} (it has {has})"
                accepted = "it in every file, or a pattern of files as task.train and task.test"
                raise BadInput(f"task.{field_}: {problem}; accepted: {accepted}")
    return found


def _field_of(columns: Mapping[str, Sequence[str]], fields: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The field that names each column, the first one if there are several."""
    field_of = dict[str, str]()
    for field_, names in fields.items():
        for column in (column for name in names for column in columns[name]):
            field_of.setdefault(column, field_)
    return field_of


def _near(wanted: str, names: Iterable[str]) -> str:
    """The names of columns for the user, those nearest to the wanted one first if there are many."""
    shown = {
        name: name if name.isprintable() and name.strip() == name != "" else repr(name) for name in names
    }
    near = difflib.get_close_matches(wanted.lower(), [name.lower() for name in shown], n=3)
    if len(shown) > _NAMED:
        first = [name for word in near for name in shown if name.lower() == word]
        return splits.some([shown[name] for name in dict.fromkeys([*first, *shown])], _NAMED)
    return ", ".join(shown.values())


def _joined(
    files: splits.Files,
    parts: Sequence[tuple[Path, pl.DataFrame, Numbers]],
    column: str,
    field_: str,
    below_names: bool,
) -> pl.DataFrame:
    """A column of all files, with one type."""
    each = [table[column] for _, table, _ in parts]
    if any(values.dtype.is_numeric() for values in each):  # as among the numbers of one file
        each = [values.clear(len(values)) if tables.stands_for_missing(values) else values for values in each]
    kinds: dict[str, tuple[Path, pl.Series, Numbers]] = {}
    for (path, _, numbers), values in zip(parts, each, strict=True):
        if values.null_count() < len(values):
            kinds.setdefault(_kind(values), (path, values, numbers))
    if len(kinds) > 1 and not (field_ == "owner" and kinds.keys() == {"words", "numbers"}):
        found = []
        for path, values, numbers in kinds.values():
            found.append(f"{values.dtype} in {files.name(path)}")
            if _kind(values) == "words":
                odd = int(tables.not_numbers(values).arg_max() or 0)
                place = _place(files, path, int(numbers[odd]), below_names)
                found[-1] += f" ({values[odd]!r} in {place})"
        raise BadInput(f"task.{field_}: {column!r} is {' and '.join(found)}; accepted: one type")
    first = next((values for _, values, _ in kinds.values()), pl.Series(dtype=pl.Null))
    each = [  # one without values has any type
        values if values.null_count() < len(values) else first.clear(len(values)).alias(column)
        for values in each
    ]
    if "words" in kinds and len({values.dtype for values in each}) > 1:
        each = [values.cast(pl.String) for values in each]
    try:
        return pl.concat([values.to_frame() for values in each], how="vertical_relaxed")
    except PolarsError:  # of nested types
        odd = next(number for number, values in enumerate(each) if values.dtype != each[0].dtype)
        found = [f"{each[number].dtype} in {files.name(parts[number][0])}" for number in (0, odd)]
        raise BadInput(f"task.{field_}: {column!r} is {' and '.join(found)}; accepted: one type") from None


def _kind(column: pl.Series) -> str:
    """The kind of values that a column has in every file: numbers or words of any type, or values of one type."""
    if column.dtype.is_numeric():
        return "numbers"
    return "words" if column.dtype in (pl.String, pl.Categorical, pl.Enum) else str(column.dtype.base_type())


def _lacks(column: pl.Series, *, nan: bool) -> Bool[np.ndarray, " rows"]:
    """Which values of a column are missing."""
    lacks = column.is_null()
    if nan and column.dtype.is_float():
        lacks |= column.is_nan().fill_null(True)
    return lacks.to_numpy()


def _place(files: splits.Files, path: Path, number: int, below_names: bool) -> str:
    """A row of a file for the user."""
    name = files.name(path)
    if files.kind in ("image", "text"):
        return name
    return f"row {number}{' below the names' if below_names else ''} of {name}"
