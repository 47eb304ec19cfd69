"""Tables from CSV files, which may be gzipped: records under a header, and square matrices."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path

import numpy as np
from jaxtyping import Float

from gossamer.errors import BadInput, listed


def read_records(
    path: Path, field: str, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, str]]]:
    """The records of a file whose first line names its columns.

    Args:
        path: the file, UTF-8; .csv or .csv.gz.
        field: the experiment's field that names it, for errors.
        columns: the required columns, in any order.
        optional: further columns that are accepted.

    Yields:
        the location of a record, for errors, and its cells by column.

    Raises:
        BadInput: for a file that can't be read, other columns, no record, or a record of another length.
    """
    rows = _read_rows(path, field)
    header = rows[0][1]
    accepted = f"a header of {listed(columns)}" + (f", and maybe {listed(optional)}" if optional else "")
    if not set(columns) <= set(header) <= {*columns, *optional} or len(set(header)) < len(header):
        raise BadInput(f"{field}: {path}, line {rows[0][0]}: {','.join(header)!r}; accepted: {accepted}")
    if len(rows) == 1:
        raise BadInput(f"{field}: {path}: no line after the header; accepted: one or more")
    for line, row in rows[1:]:
        where = f"{field}: {path}, line {line}"
        if len(row) != len(header):
            raise BadInput(f"{where}: {len(row)} cells; accepted: {len(header)}, as in the header")
        yield where, dict(zip(header, row, strict=True))


def read_number(cell: str, where: str, *, above: float | None = None, least: float = 0.0) -> float:
    """The finite number in a cell; it must be above one bound, or at least the other.

    Raises:
        BadInput: for anything else; ``where`` is its location.
    """
    value = _as_number(cell)
    if value is None or not math.isfinite(value) or (value < least if above is None else value <= above):
        bound = f"above {above:g}" if above is not None else f"from {least:g}"
        raise BadInput(f"{where}: {cell!r}; accepted: a number {bound}")
    return value


def read_square(path: Path, field: str) -> tuple[list[str] | None, Float[np.ndarray, "sites sites"]]:
    """A square matrix, with or without names in its first row, its first column or both.

    Cells that are blank or "nan" are NaN.

    Returns:
        the names of the sites (None if the file has none), and the matrix.

    Raises:
        BadInput: for a file that can't be read, a cell that is not a number, a matrix that is not square, or different
            names in the first column and the first row.
    """
    rows = _read_rows(path, field)
    column_names: list[str] = []
    row_names: list[str] = []
    if any(_as_number(cell) is None for cell in rows[0][1][1:]):
        column_names = rows.pop(0)[1]
    if any(_as_number(row[0]) is None for _, row in rows):
        row_names = [row[0] for _, row in rows]
        rows = [(line, row[1:]) for line, row in rows]
        column_names = column_names[len(column_names) > len(rows) :]  # without the corner cell
    for line, row in rows or [(1, [])]:
        if len(row) != len(rows) or not rows:
            raise BadInput(
                f"{field}: {path}, line {line}: {len(row)} numbers, in {len(rows)} rows; accepted: a square matrix"
            )
    if column_names and row_names and column_names != row_names:
        raise BadInput(
            f"{field}: {path}: rows and columns have different names; accepted: the same, in the same order"
        )
    matrix = np.empty((len(rows), len(rows)))
    for i, (line, row) in enumerate(rows):
        for j, cell in enumerate(row):
            value = _as_number(cell)
            if value is None or math.isinf(value):
                raise BadInput(
                    f"{field}: {path}, line {line}, number {j + 1}: {cell!r}; accepted: a finite number, or none"
                )
            matrix[i, j] = value
    return column_names or row_names or None, matrix


def _as_number(cell: str) -> float | None:
    """NaN for a blank cell, None for a word."""
    try:
        return float(cell) if cell else math.nan
    except ValueError:
        return None


def _read_rows(path: Path, field: str) -> list[tuple[int, list[str]]]:
    """The number and the cells of each line that is neither empty nor a comment (``#``)."""
    try:
        with _open(path) as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadInput(f"{field}: {path}: {reason}; accepted: a CSV file (.csv or .csv.gz)") from None
    rows = [(line, row) for line, row in rows if not row[0].startswith("#")]
    if not rows:
        raise BadInput(f"{field}: {path}: empty; accepted: a CSV file (.csv or .csv.gz)")
    return rows


def _open(path: Path) -> TextIOWrapper:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")
