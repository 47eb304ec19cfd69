"""Parameters that select nodes or assign a value to each node, and tables from CSV files, which may be gzipped."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from jaxtyping import Float
from polars import selectors
from pydantic import Field, NonNegativeInt, model_validator

from gossamer.config.registry import Component
from gossamer.errors import BadInput, first_line, listed, suggest
from gossamer.files import check_fits
from gossamer.selector import Selector, chosen

_WORDS = {pl.Int64: "whole numbers", pl.UInt32: "whole numbers from 0"}
"""What a column of a type accepts, in words."""
LARGEST = 1e12
"""The largest number in a file: of seconds, milliseconds or Mbit/s, whose products are finite."""


class SomeNodes(Component):
    """A selection of nodes in a component's own fields: exactly one of ``count``, ``fraction`` and ``ranks``. It stands for
    a :class:`~gossamer.selector.Selector` with this field, and may also select no node."""

    count: NonNegativeInt | None = None  # number of nodes
    # Fraction of the nodes, rounded to the nearest number.
    fraction: float | None = Field(default=None, ge=0, le=1)
    ranks: tuple[NonNegativeInt, ...] | None = None
    # With count or fraction: "drawn" by the experiment's seed, or the "first" ranks; refused with ranks.
    which: Literal["drawn", "first"] = "drawn"

    @model_validator(mode="after")
    def _one_of_three(self) -> SomeNodes:
        if [self.count, self.fraction, self.ranks].count(None) != 2:
            raise ValueError("exactly one of count, fraction and ranks")
        # A saved experiment has the default next to ranks, so only "first" is refused.
        if self.ranks is not None and self.which == "first":
            raise ValueError('which "first" with count or fraction, not with ranks')
        return self

    def chosen(self, nodes: int, seed: int, field: str) -> tuple[int, ...]:
        """The selected ranks, sorted. BadInput for more nodes than exist, or a rank out of range. ``field``
        is this component's field in the experiment, used in errors and in the key of the draw."""
        selector = Selector(count=self.count, fraction=self.fraction, ranks=self.ranks, which=self.which)
        place, key = f"{field}.{selector.kind}", f"{field}.stragglers"
        return chosen(selector, nodes=nodes, seed=seed, field=place, key=key, least=0)


def for_each(value: float | Sequence[float] | None, nodes: int, field: str) -> Float[np.ndarray, " nodes"]:
    """A value for each node: the same for all, or one list entry each; null is infinite. BadInput for a list
    whose length is not the number of nodes."""
    if isinstance(value, Sequence) and len(value) != nodes:
        raise BadInput(
            f"{field}: {len(value)} values for {nodes} nodes; accepted: one value, or a list of {nodes}"
        )
    return np.array(np.broadcast_to(np.inf if value is None else value, nodes), dtype=np.float64)


@contextmanager
def nested(kind: str) -> Iterator[None]:
    """Rename ``kind.x`` in errors to ``kind.base.x``, for a component inside another one."""
    try:
        yield
    except BadInput as error:
        raise BadInput(*(re.sub(rf"^{kind}\b", f"{kind}.base", line) for line in error.problems)) from None


def read_csv(
    path: Path, field: str, columns: Mapping[str, Any], optional: Collection[str] = ()
) -> pl.DataFrame:
    """Read ``columns`` (name -> polars type) of a CSV file (.csv or .csv.gz) with a header. Lines that begin
    with ``#`` are comments. Blank cells and missing optional columns are null. BadInput, with the
    experiment's ``field``, for a file that can't be read, that lacks a column, or that has a number below 0 or above
    :data:`LARGEST`."""
    cells = read_cells(path, field, header=True)
    missing = columns.keys() - set(cells.columns)
    if lacking := missing - set(optional):
        accepted = f"a header of {listed(columns)}"
        raise BadInput(f"{field}: {path}: no column {listed(lacking)}; accepted: {accepted}")
    for column in set(cells.columns) - columns.keys():
        if near := suggest(column, missing):
            raise BadInput(f"{field}: {path}: column {column!r}{near}; accepted: {listed(columns)}")
    cells = cells.with_columns(pl.lit(None, pl.String).alias(name) for name in missing)
    if cells.is_empty():
        raise BadInput(f"{field}: {path}: no line after the header; accepted: one or more")
    cells = cells.select(pl.col(name).str.strip_chars().replace("", None) for name in columns)
    table = cells.select(pl.col(name).cast(kind, strict=False) for name, kind in columns.items())
    for name in columns:
        if len(wrong := (cells[name].is_not_null() & table[name].is_null()).arg_true()):
            row, word = int(wrong[0]), cells[name][int(wrong[0])]
            place = f"row {row + 1} of the values, column {name!r}"
            raise BadInput(
                f"{field}: {path}: {place}: {word!r}; accepted: {_WORDS.get(columns[name], 'numbers')}"
            )
    numbers = pl.all_horizontal(selectors.numeric().is_between(0, LARGEST))
    check_rows(table, numbers.fill_null(True), f"{field}: {path}", f"numbers from 0 to {LARGEST:g}")
    return table


def read_cells(path: Path, field: str, *, header: bool) -> pl.DataFrame:
    """The cells of a CSV file, as text."""
    try:
        check_fits(f"{field}: {path}", path, times=2)
        return pl.read_csv(path, has_header=header, infer_schema=False, comment_prefix="#")
    except OSError as error:
        accepted = "a CSV file (.csv or .csv.gz)"
        raise BadInput(
            f"{field}: {path}: {error.strerror or first_line(error)}; accepted: {accepted}"
        ) from None
    except pl.exceptions.PolarsError as error:
        accepted = "a CSV file (.csv or .csv.gz)"
        problem = _uneven(path) or f": not read by polars, {first_line(error)}"
        raise BadInput(f"{field}: {path}{problem}; accepted: {accepted}") from None


def _uneven(path: Path) -> str:
    """Where the lines of a file do not have as many cells as the first one, or why it is no CSV file; else empty."""
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig", newline="")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8-sig", newline="") as file
        ):
            reader, first = csv.reader(file), (0, 0)
            for row in reader:
                if not row or row[0].startswith("#"):
                    continue
                first = first if first[0] else (reader.line_num, len(row))
                if len(row) != first[1]:
                    return f", line {reader.line_num}: {len(row)} cells, and {first[1]} in line {first[0]}"
    except UnicodeDecodeError:
        return ": not UTF-8"
    except (OSError, EOFError, csv.Error) as error:
        return f": {first_line(error)}"
    return "" if first[0] else ": empty"


def check_rows(table: pl.DataFrame, fits: pl.Expr, where: str, accepted: str) -> None:
    """Raise a BadInput that shows the first invalid row, if any."""
    wrong = (~table.select(fits.fill_null(False)).to_series()).arg_true()
    if len(wrong):
        row = table.row(int(wrong[0]), named=True)
        raise BadInput(f"{where}: row {wrong[0] + 1} of the values, {row}; accepted: {accepted}")
