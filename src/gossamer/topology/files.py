"""Text files of graphs and matrices: words separated by spaces or commas; ``#`` starts a comment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Float

from gossamer.errors import BadInput


def read_words(path: Path, field: str) -> Iterator[tuple[int, list[str]]]:
    """The number and the words of every line that has any.

    Args:
        path: the file, UTF-8.
        field: the experiment's field that names it, for errors.

    Raises:
        BadInput: for a file that can't be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadInput(f"{field}: {path}: {error.strerror}; accepted: a text file") from None
    except UnicodeDecodeError:
        raise BadInput(f"{field}: {path}: not UTF-8; accepted: a text file") from None
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].replace(",", " ").split()
        if words:
            yield number, words


def read_matrix(path: Path, field: str) -> Float[np.ndarray, "nodes nodes"]:
    """A square matrix of finite numbers, one row per line.

    Raises:
        BadInput: for a file that can't be read, a word that is not a finite number, or a matrix that is not square.
    """
    rows: list[list[float]] = []
    for number, words in read_words(path, field):
        where = f"{field}: {path}, line {number}"
        row = [_finite(word, where) for word in words]
        if rows and len(row) != len(rows[0]):
            raise BadInput(f"{where}: {len(row)} numbers; accepted: {len(rows[0])}, as before")
        rows.append(row)
    if not rows or len(rows) != len(rows[0]):
        columns = len(rows[0]) if rows else 0
        raise BadInput(f"{field}: {path}: {len(rows)} rows of {columns} numbers; accepted: a square matrix")
    return np.array(rows, dtype=np.float64)


def _finite(word: str, where: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadInput(f"{where}: {word!r}; accepted: finite numbers")
    return value
