"""Tables from CSV files, which may be gzipped."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gossamer.errors import BadInput, listed


@dataclass(frozen=True)
class Record:
    """A line of a file under its header: its location, for errors, and its cells by column."""

    where: str
    cells: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        """The cell of a column; empty if the file does not have it."""
        return self.cells.get(column, "")

    def number(self, column: str, *, above: float | None = None, least: float = 0.0) -> float:
        """The finite number in a cell, above one bound or at least the other; a BadInput for anything else."""
        value = as_number(self[column])
        if value is None or not math.isfinite(value) or (value < least if above is None else value <= above):
            bound = f"above {above:g}" if above is not None else f"from {least:g}"
            raise BadInput(f"{self.where}, {column}: {self[column]!r}; accepted: a number {bound}")
        return value


def read_records(
    path: Path, field: str, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[Record]:
    """The records of a file (.csv or .csv.gz, UTF-8) whose first line names its columns, in any order.

    A BadInput, which names the experiment's ``field``, refuses a file that can't be read, other columns than these, a file
    without records, or a record of another length."""
    (first, header), *rows = read_rows(path, field)
    if not set(columns) <= set(header) <= {*columns, *optional} or len(set(header)) < len(header):
        accepted = f"a header of {listed(columns)}" + (f", and maybe {listed(optional)}" if optional else "")
        raise BadInput(f"{field}: {path}, line {first}: {','.join(header)!r}; accepted: {accepted}")
    if not rows:
        raise BadInput(f"{field}: {path}: no line after the header; accepted: one or more")
    for line, row in rows:
        where = f"{field}: {path}, line {line}"
        if len(row) != len(header):
            raise BadInput(f"{where}: {len(row)} cells; accepted: {len(header)}, as in the header")
        yield Record(where, dict(zip(header, row, strict=True)))


def as_number(cell: str) -> float | None:
    """The number in a cell: NaN if it is blank, None for a word."""
    try:
        return float(cell or math.nan)
    except ValueError:
        return None


def read_rows(path: Path, field: str) -> list[tuple[int, list[str]]]:
    """The number and the cells of each line that is neither empty nor a comment (``#``)."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(
            path, "rt", encoding="utf-8-sig", newline=""
        ) as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise BadInput(f"{field}: {path}: {error}; accepted: a CSV file (.csv or .csv.gz)") from None
    rows = [(line, row) for line, row in rows if not row[0].startswith("#")]
    if not rows:
        raise BadInput(f"{field}: {path}: empty; accepted: a CSV file (.csv or .csv.gz)")
    return rows
