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
_NAMED = 12  # the most columns that an error names


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of the training files and then of the test files, in order, with the columns that a task uses.

    ``columns`` has the names of the columns for each field of the task.
    ``file`` has the number of each row's file, and ``number`` its number in that file, from 1; the line of names in a CSV
    file does not count. ``remarks`` collects what the user should know."""

    files: splits.Files
    columns: Mapping[str, Sequence[str]]
    table: pl.DataFrame
    file: Int64[np.ndarray, " _"]
    number: Int64[np.ndarray, " _"]
    below_names: bool = False  # whether the files have a line of names
    remarks: list[str] = field(default_factory=list)

    @property
    def in_test(self) -> InTest:
        """Whether each row belongs to the test set."""
        return self.file >= len(self.files.train)

    def place(self, row: int) -> str:
        """A row for the user, by its file and its number in it."""
        name = self.files.name(self.files.all[self.file[row]])
        if self.files.kind in ("image", "text"):
            return name
        return f"row {self.number[row]}{' below the names' if self.below_names else ''} of {name}"

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

    def complete(self, missing: Literal["refuse", "drop"]) -> Rows:
        """The rows without missing values. With ``drop``, those that miss a value (NaN too) are left out, and a remark says
        how many; with ``refuse``, they are bad input."""
        lacking = {name: self._lacks(name, nan=missing == "drop") for name in self.table.columns}
        wrong = np.logical_or.reduce(list(lacking.values()))
        if not wrong.any():
            return self
        name = next(name for name in lacking if lacking[name].any())
        first = self.place(int(lacking[name].argmax()))
        if missing == "refuse":
            problem = f"{lacking[name].sum():,} values of {name!r} are missing (the first in {first})"
            field_ = next(field_ for field_, names in self.columns.items() if name in names)
            accepted = "none, or task.missing: drop, which leaves such rows out"
            raise BadInput(f"task.{field_}: {problem}; accepted: {accepted}")
        kept = replace(
            self, table=self.table.filter(~wrong), file=self.file[~wrong], number=self.number[~wrong]
        )
        for split, files in (("train", self.files.train), ("test", self.files.test)):
            if files and not (kept.in_test == (split == "test")).any():
                problem = f"each row of {splits.some(map(self.files.name, files))} misses a value, the first of {name!r}"
                raise BadInput(f"task.{split}: {problem}; accepted: rows without missing values")
        where = self.place(int(wrong.argmax()))
        count = f"{wrong.sum():,} of {len(wrong):,} rows"
        self.remarks.append(f"left out for a missing value: {count} (the first is {where})")
        return kept

    def _lacks(self, name: str, *, nan: bool) -> Bool[np.ndarray, " rows"]:
        column = self.table[name]
        lacks = column.is_null()
        if nan and column.dtype.is_float():
            lacks |= column.is_nan().fill_null(True)
        return lacks.to_numpy()


def read_rows(
    files: splits.Files,
    fields: Mapping[str, Sequence[str]],
    form: tables.CSV | None = None,
    encoding: str = "utf-8",
    missing: Literal["refuse", "drop"] = "refuse",
) -> Rows:
    """Read the columns that fields of the task name in all files.

    Inputs and targets that no column has are patterns, as of the shell, for all columns that no field names. Whole numbers in
    some files and floats in others become floats; words of several types, such as two Enums, become text, as do owners that
    are words in one file and numbers in another one.

    BadInput for a column that a file lacks, that has words in one file and numbers in another one, or that has a missing
    value, unless such rows are dropped."""
    read, numbers = list[pl.DataFrame](), list[Int64[np.ndarray, " _"]]()
    if files.kind == "image":
        read = [tables.read_images(files.all, files.name)]
        numbers = [np.ones(1, np.int64) for _ in files.all]
    else:
        for path in files.all:
            table = tables.read_table(path, files.kind, form, encoding)
            if files.kind == "CSV":  # blank lines are no rows, but count
                blank = table.select(pl.all_horizontal(pl.all().is_null())).to_series()
                numbers.append(np.flatnonzero(~blank.to_numpy()) + 1)
                read.append(table.filter(~blank))
            else:
                numbers.append(np.arange(1, len(table) + 1))
                read.append(table)
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
    for field_, names in columns.items():
        if list(names) != list(fields[field_]):
            remarks.append(f"{field_}: {len(names):,} columns ({splits.some(names)})")
    has_names = files.kind == "CSV" and (form is None or form.has_header)
    if has_names and (form is None or form.columns is None):
        for first, *rest in dict.fromkeys(
            tuple(names) for t in read if (names := tables.numbers_as_names(t))
        ):
            remarks.append(
                f"numbers taken as names of columns: {f'{first} to {rest[-1]}' if rest else first}"
            )
    rows = Rows(
        files,
        columns,
        pl.DataFrame(),
        np.repeat(np.arange(len(counts)), counts),
        np.concatenate(numbers),
        has_names,
        remarks,
    )
    return replace(rows, table=_joined(rows, read)).complete(missing)


def _found(
    files: splits.Files, read: Sequence[pl.DataFrame], fields: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """The columns of each field, in place of patterns. BadInput for a column that a file lacks."""
    known = list(dict.fromkeys(column for table in read for column in table.columns))
    named = {name for names in fields.values() for name in names}
    found = dict[str, list[str]]()
    for field_, names in fields.items():
        found[field_] = []
        for name in names:
            matching = [name] if name in known else []
            if not matching and field_ != "owner":
                matching = [column for column in known if fnmatchcase(column, name) and column not in named]
            if not matching:
                more = ", {each: file} or {each: folder}" if field_ == "owner" else ""
                if files.kind == "text":
                    more = ", or task.csv: {} if the files are tables"
                elif files.kind == "CSV":
                    more += tables.other_separator(known)
                accepted = f"{_near(name, known)} (of {splits.some(map(files.name, files.all), 1)}){more}"
                raise BadInput(f"task.{field_}: got {name!r}; accepted: {accepted}")
            found[field_] += matching
        for path, table in zip(files.all, read, strict=False):
            if lacks := [column for column in found[field_] if column not in table.columns]:
                problem = (
                    f"{files.name(path)} has no column {lacks[0]!r} (it has {_near(lacks[0], table.columns)})"
                )
                cure = "it in every file, or a pattern of files as task.train and task.test"
                raise BadInput(f"task.{field_}: {problem}; accepted: {cure}")
    return found


def _near(wanted: str, names: Iterable[str]) -> str:
    """The names of columns for the user, those nearest to the wanted one first if there are many."""
    names = list(names)
    near = difflib.get_close_matches(wanted.lower(), [name.lower() for name in names], n=3)
    if len(names) > _NAMED:
        names.sort(key=lambda name: name.lower() not in near)
    return splits.some(
        [name if name.isprintable() and name.strip() == name != "" else repr(name) for name in names], _NAMED
    )


def _joined(rows: Rows, read: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """The rows of all files, with one type for each column."""
    field_of = {name: field_ for field_, names in reversed(rows.columns.items()) for name in names}
    if len(read) == 1:
        return read[0].select(list(field_of))
    filled = [(path, table) for path, table in zip(rows.files.all, read, strict=True) if len(table)]
    joined = []
    for column, field_ in field_of.items():
        parts = [(path, table[column]) for path, table in filled]
        kinds: dict[str, tuple[Path, pl.Series]] = {}
        for path, part in parts:
            if part.null_count() < len(part):
                kinds.setdefault(_kind(part), (path, part))
        mixed = field_ == "owner" and kinds.keys() == {"words", "numbers"}
        if len(kinds) > 1 and not mixed:
            found = " and ".join(_described(rows, path, part) for path, part in kinds.values())
            raise BadInput(f"task.{field_}: {column!r} is {found}; accepted: one type")
        if kinds:  # a part without values has any type
            dtype = next(iter(kinds.values()))[1].dtype
            parts = [
                (path, part if part.null_count() < len(part) else part.clear(len(part)).cast(dtype))
                for path, part in parts
            ]
        types = {part.dtype for _, part in parts}
        if "words" in kinds and len(types) > 1:
            parts = [(path, part.cast(pl.String)) for path, part in parts]
        try:
            joined.append(pl.concat([part.to_frame() for _, part in parts], how="vertical_relaxed"))
        except PolarsError:  # of nested types
            (path, part), (other, odd) = parts[0], next(p for p in parts if p[1].dtype != parts[0][1].dtype)
            found = f"{part.dtype} in {rows.files.name(path)} and {odd.dtype} in {rows.files.name(other)}"
            raise BadInput(f"task.{field_}: {column!r} is {found}; accepted: one type") from None
    return pl.concat(joined, how="horizontal")


def _kind(column: pl.Series) -> str:
    """What the values of a column are in every file: numbers or words of any type, or values of one type."""
    if column.dtype.is_numeric():
        return "numbers"
    return "words" if column.dtype in (pl.String, pl.Categorical, pl.Enum) else str(column.dtype.base_type())


def _described(rows: Rows, path: Path, column: pl.Series) -> str:
    """The type of a column in a file, for the user, with the first value that is no number."""
    where = rows.files.name(path)
    if _kind(column) == "words":
        odd = int(tables.not_numbers(column).arg_max() or 0)
        start = int(np.flatnonzero(rows.file == rows.files.all.index(path))[0])
        where = f"{where} ({column[odd]!r} in {rows.place(start + odd)})"
    return f"{column.dtype} in {where}"
