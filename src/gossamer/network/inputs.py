"""Parameters that select nodes or give a value to each of them, and tables from CSV files, which may be gzipped."""

from __future__ import annotations

import csv
import gzip
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float
from pydantic import Field, NonNegativeInt, model_validator

from gossamer.config.registry import Component
from gossamer.errors import BadInput, listed
from gossamer.randomness import generator


class SomeNodes(Component):
    """A selection of nodes: exactly one of ``count``, ``fraction`` and ``ranks``."""

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
        """The selected ranks, sorted; a BadInput for more nodes than there are, or a rank out of range. ``field`` is this
        component's field in the experiment, for errors and the key of the draw."""
        if self.ranks is not None:
            check_ranks(self.ranks, nodes, f"{field}.ranks")
            return tuple(sorted(set(self.ranks)))
        count = self.count if self.count is not None else int((self.fraction or 0) * nodes + 0.5)
        if count > nodes:
            raise BadInput(f"{field}.count: {count} of {nodes} nodes; accepted: 0 to {nodes}")
        if self.which == "first":
            return tuple(range(count))
        drawn = generator(seed, f"{field}.stragglers").choice(nodes, count, replace=False)
        return tuple(sorted(drawn.tolist()))


def check_ranks(ranks: Iterable[int], nodes: int, field: str) -> None:
    """Raise a BadInput that names the field and the first rank out of range, if there is one."""
    for rank in ranks:
        if rank >= nodes:
            raise BadInput(f"{field}: node {rank} of {nodes} nodes; accepted: ranks 0 to {nodes - 1}")


def for_each(value: float | Sequence[float] | None, nodes: int, field: str) -> Float[np.ndarray, " nodes"]:
    """A value for each node: the same for all, or one of a list each; null is infinite. A BadInput that names the field for
    a list of another length than the number of nodes."""
    if isinstance(value, Sequence) and len(value) != nodes:
        raise BadInput(
            f"{field}: {len(value)} values for {nodes} nodes; accepted: one value, or a list of {nodes}"
        )
    return np.array(np.broadcast_to(np.inf if value is None else value, nodes), dtype=np.float64)


@contextmanager
def nested(kind: str) -> Iterator[None]:
    """Rename ``kind.x`` in errors to ``kind.base.x``: for a component inside another one."""
    try:
        yield
    except BadInput as error:
        raise BadInput(*(re.sub(rf"^{kind}\b", f"{kind}.base", line) for line in error.problems)) from None


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
