"""The rows of one file of a data set: a table of Parquet, Arrow, CSV or JSON Lines, or a text."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import polars as pl
from polars.exceptions import PanicException, PolarsError
from pydantic import BeforeValidator, Field, field_validator, model_validator

from gossamer.config.registry import Section
from gossamer.errors import BadInput, first_line
from gossamer.files import check_fits
from gossamer.tasks import splits

COMMENTS = ("#", "%")
"""What a comment in a CSV file usually begins with."""

_YEARS = frozenset(range(1900, 2101))  # that may be names of columns
_SEPARATORS = (";", "\t", "|", " ", ",", ":")  # that a file may have instead of its separator
_GROUPING = {",": ",", ".": r"\.", " ": r"[ \u00a0\u2009\u202f]", "'": "['\u2019]"}
"""What groups digits, and the pattern of its forms: a blank may be one at which no line breaks."""
_MISSING = {"", "?", "na", "n/a", "#n/a", "<na>", "nan", "null", "none", "-"}  # among numbers, in lower case
_MOST_SIGNS = 3  # for missing values, in one file
_TRUTH = {"true", "false"}


def _as_text(cell: Any) -> Any:
    return str(cell) if type(cell) in (int, float) else cell


CellText = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | float)]
"""The text of a cell, such as a column's name, which may be a number in an experiment."""


class CSV(Section):
    """How the lines of CSV files are read."""

    # One character; " " is any run of blanks. None is a comma, or a tab in .tsv files.
    separator: str | None = None
    # Whether the first line has the names of the columns. None expects names, unless there are ``columns``, and refuses
    # what looks like data.
    header: bool | None = None
    columns: tuple[str, ...] | None = (
        None  # the names, in place of those of the file; None without a header is 0, 1, 2, ...
    )
    comment: Annotated[str, Field(min_length=1, max_length=5)] | None = (
        None  # what begins a line that is left out
    )
    quote: str | None = '"'  # around cells with separators in them; None if quotes are part of the text
    decimal: Literal[".", ","] = "."
    # What groups the digits of numbers by three, as in 1,437. " " is any blank, "'" any apostrophe.
    thousands: Literal[",", ".", " ", "'"] | None = None
    # Cells that stand for a missing value in every column. Among numbers, empty cells, ?, NA and the like always do.
    null_values: tuple[CellText, ...] = ()

    @field_validator("separator")
    @classmethod
    def _one_character(cls, separator: str | None) -> str | None:
        separator = "\t" if separator == r"\t" else separator
        if separator is not None and (len(separator) != 1 or not separator.isascii() or separator in '"\n\r'):
            raise ValueError("one ASCII character, such as ';', ' ' or \"\\t\"")
        return separator

    @field_validator("quote")
    @classmethod
    def _is_quote(cls, quote: str | None) -> str | None:
        if quote not in (None, '"', "'"):
            raise ValueError("'\"', \"'\" or null")
        return quote

    @field_validator("columns")
    @classmethod
    def _distinct(cls, columns: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if columns is not None and len(set(columns)) < len(columns):
            raise ValueError("different names")
        return columns

    @model_validator(mode="after")
    def _signs_differ(self) -> CSV:
        if self.thousands == self.decimal:
            raise ValueError(f"thousands other than decimal, {self.decimal!r}")
        return self

    @property
    def plain_numbers(self) -> bool:
        """Whether numbers are written as in Python."""
        return self.decimal == "." and self.thousands is None

    @property
    def has_header(self) -> bool:
        """Whether the first line is no data."""
        return self.columns is None if self.header is None else self.header


def read_table(
    path: Path, kind: str | None = None, form: CSV | None = None, encoding: str = "utf-8"
) -> pl.DataFrame:
    """The rows of one file: a table, or a text (one row, ``text``).

    Args:
        path: the file. It is unpacked if it is gzipped, whatever its name.
        kind: one of :data:`gossamer.tasks.splits.KINDS`, by default that of its suffix.
        form: how a CSV file is read.
        encoding: of a text, a CSV or a JSON Lines file. One of UTF-16 that says so in its first bytes needs none.

    Raises:
        BadInput: for a file that can't be read, with the line if there is one, and for a CSV file whose first line has data
            in place of names."""
    kind = kind or splits.kind_of(path)
    try:
        check_fits(f"task: {path}", path)
        match kind:
            case "Parquet":
                return pl.read_parquet(path, glob=False)
            case "Arrow":
                return pl.read_ipc_stream(path)
            case "CSV":
                return _read_csv(path, _utf8(path, encoding), form or CSV())
            case "JSON Lines":
                return _read_json_lines(path, _utf8(path, encoding))
            case _:
                return pl.DataFrame({"text": [_utf8(path, encoding).decode()]})
    except (PolarsError, PanicException, OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path} can't be read ({first_line(error)}); accepted: a whole file") from error


def is_numeric(column: pl.Series) -> bool:
    """Whether each value of a column is one number or truth value."""
    return column.dtype.is_numeric() or column.dtype == pl.Boolean


def not_numbers(column: pl.Series) -> pl.Series:
    """Which values of a column of words are no numbers."""
    words = column.cast(pl.String)
    return words.cast(pl.Float64, strict=False).is_null() & words.is_not_null()


def cure_for_words(column: pl.Series) -> str:
    """What may help with a column of a CSV file that should have numbers and has words, as the end of a sentence: a setting
    with which all of these would be numbers, or missing values."""
    wrong = not_numbers(column)
    words = column.filter(wrong).unique(maintain_order=True).cast(pl.String)
    word = str(words[0])
    if word.startswith(COMMENTS):
        return f", or task.csv.comment: '{word[0]}'"
    meant = words.filter(~words.str.to_lowercase().is_in(_MISSING))
    found = dict[float, str]()
    for decimal, thousands in product((".", ","), (None, *_GROUPING)):
        values = _plain(meant, decimal, thousands).cast(pl.Float64, strict=False)
        if decimal != thousands and len(meant) and not values.null_count():
            grouped = None if thousands is None else f"task.csv.thousands: {_quoted(thousands)}"
            point = None if decimal == "." else f"task.csv.decimal: {_quoted(decimal)}"
            settings = " and ".join(filter(None, (grouped, point)))
            found.setdefault(values[0], f", or {settings} if {meant[0]} is {values[0]:.12g}")
    if found:
        return "".join(found.values())
    if (
        other := next((sign for sign in ";\t|" if words.str.contains(sign, literal=True).all()), None)
    ) is not None:
        return f", or task.csv.separator: {_quoted(other)}"
    if len(words) <= _MOST_SIGNS and not wrong.all():
        return f", or task.csv.null_values: {words.to_list()} if that stands for a missing value"
    return ""


def stands_for_missing(column: pl.Series) -> bool:
    """Whether each value of a column is a word that stands for a missing value among numbers."""
    return column.dtype == pl.String and column.str.to_lowercase().is_in(_MISSING).all()


def hints(table: pl.DataFrame) -> str:
    """What may help with a CSV file that was read as this table, as the end of a sentence."""
    without_names = (
        table.width == 1 and len(table) and not any(sign in table.columns[0] for sign in _SEPARATORS)
    )
    return _hints(list(map(str, table.row(0))) if without_names else table.columns)


def _hints(names: Sequence[str]) -> str:
    """What may help with a CSV file whose first line has these cells, as the end of a sentence."""
    other = next((sign for sign in _SEPARATORS if len(names) == 1 and sign in names[0]), None)
    found = []
    if names and names[0].startswith(COMMENTS):
        found.append(f", or task.csv.comment: '{names[0][0]}'")
    if other is not None:
        found.append(f", or task.csv.separator: {_quoted(other)}")
    return "".join(found)


def _quoted(sign: str) -> str:
    """A sign as in YAML."""
    return {"\t": '"\\t"', "'": '"\'"'}.get(sign, f"'{sign}'")


def read_images(paths: Sequence[Path], names: Sequence[str]) -> pl.DataFrame:
    """Image files, with their names for the user, as rows ``image`` (encoded, as the hub stores them) and ``label``, the
    folder's name."""
    try:
        check_fits("task: the image files", *paths)
        images = [{"bytes": path.read_bytes(), "path": name} for path, name in zip(paths, names, strict=True)]
    except OSError as error:
        raise BadInput(
            f"{error.filename} can't be read ({first_line(error)}); accepted: a whole file"
        ) from error
    encoded = pl.Struct({"bytes": pl.Binary, "path": pl.String})
    labels = [path.parent.name for path in paths]
    return pl.DataFrame([pl.Series("image", images, dtype=encoded), pl.Series("label", labels)])


def numbers_as_names(table: pl.DataFrame) -> list[str]:
    """The names of the columns of numbers that are numbers themselves, in order."""
    names = map(_name, table.select(column for column in table.columns if is_numeric(table[column])).columns)
    return [name for name in names if name and _number(name) is not None]


def _content(path: Path) -> bytes:
    """The bytes of a file, unpacked."""
    content = path.read_bytes()  # a .gz file may have been unpacked without a new name
    return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content


def _utf8(path: Path, encoding: str) -> bytes:
    """The text of a file in UTF-8, without a byte order mark."""
    content = _content(path)
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = (
            f"line {line} of {path} is not {encoding} (byte 0x{content[error.start]:02x}: {error.reason})"
        )
        raise BadInput(f"task.encoding: {problem}; accepted: that of the file, such as latin-1") from None
    if "\0" in text:
        where = f"line {text.count(chr(10), 0, text.index(chr(0))) + 1} of {path} has bytes that are 0"
        if (wide := _of_two_bytes(content)) not in (None, encoding):
            raise BadInput(f"task.encoding: {where}, as text with two bytes a character; accepted: {wide}")
        raise BadInput(f"{where}, as damaged files have; accepted: a whole file")
    is_utf8 = codecs.lookup(encoding).name == "utf-8"
    return (content if is_utf8 else text.encode()).removeprefix(codecs.BOM_UTF8)


def _of_two_bytes(content: bytes) -> str | None:
    """The encoding of content in which most of every other byte are 0, as in words of ASCII."""
    even, odd = (content[start::2].count(0) / len(content) for start in (0, 1))
    if max(even, odd) < 0.3 or min(even, odd) > 0.03:
        return None
    return "utf-16-be" if even > odd else "utf-16-le"


def _read_json_lines(path: Path, content: bytes) -> pl.DataFrame:
    try:
        return pl.read_ndjson(content, infer_schema_length=None)
    except (PolarsError, PanicException):
        for number, line in enumerate(content.splitlines(), 1):
            try:
                is_object = not line.strip() or isinstance(json.loads(line), dict)
                problem = "" if is_object else "no object"
            except json.JSONDecodeError as error:
                problem = f"character {error.colno}: {error.msg}"
            except (ValueError, RecursionError) as error:  # nested too deeply
                problem = first_line(error)
            if problem:
                accepted = "an object of JSON in each line"
                raise BadInput(
                    f"line {number} of {path} can't be read ({problem}); accepted: {accepted}"
                ) from None
        raise


def _read_csv(path: Path, text: bytes, form: CSV) -> pl.DataFrame:
    """The rows of a CSV file, with blank lines as rows without values. Blanks around cells do not count."""
    separator = form.separator or ("\t" if splits.suffix_of(path) == "tsv" else ",")
    if b"\n" not in text:  # of an old Macintosh
        text = text.replace(b"\r", b"\n")
    if separator == " ":
        text = re.sub(rb"[ \t]+", b" ", re.sub(rb"(?m)^[ \t]+|[ \t]+(?=\r?$)", b"", text))
    if not text.strip():
        raise BadInput(f"{path} is empty; accepted: a file with lines")
    try:
        table = pl.read_csv(
            text,
            has_header=form.has_header,
            separator=separator,
            comment_prefix=form.comment,
            quote_char=form.quote,
            null_values=list(form.null_values),
            infer_schema=form.plain_numbers,
            infer_schema_length=None,
        )
    except PolarsError as error:
        line, problem = _bad_line(text.decode(), separator, form) or (None, first_line(error))
        where = path if line is None else f"line {line} of {path}"
        cure = "lines of as many cells" + _hints(text.decode().splitlines()[0].split(separator))
        if form.quote is not None and form.quote in text.decode():
            cure += ", or task.csv.quote: null if quotes are part of the text"
        raise BadInput(f"{where} can't be read as CSV ({problem}); accepted: {cure}") from None
    typed = pl.DataFrame({column.name: _typed(column, form) for column in table.iter_columns()})
    if form.header is None and form.columns is None:
        _check_header(typed, path)
    if form.has_header and (twice := _named_twice(table.columns)) is not None:
        accepted = "names that differ, in the file or in task.csv.columns"
        raise BadInput(f"{path}: two columns have the name {twice!r}; accepted: {accepted}")
    return _named(typed, path, form)


def _named_twice(columns: Sequence[str]) -> str | None:
    """A name that several columns of a header have, of which polars renames all but the first."""
    for column in columns:
        name, _, number = column.rpartition("_duplicated_")
        if name and number.isdigit() and name in columns:
            return name
    return None


def _bad_line(text: str, separator: str, form: CSV) -> tuple[int, str] | None:
    """The first line that has more cells than the first one, or else a quote without its pair, and what is wrong with it."""
    lines = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=separator,
        quotechar=form.quote,
        quoting=csv.QUOTE_NONE if form.quote is None else csv.QUOTE_MINIMAL,
    )
    width = first = 0
    try:
        for cells in lines:
            if form.comment is not None and cells and cells[0].startswith(form.comment):
                continue
            width, first = width or len(cells), first or lines.line_num
            if len(cells) > width:
                return lines.line_num, f"{len(cells)} cells, and line {first} has {width}"
    except csv.Error:  # a cell of more than 128 KiB
        pass
    odd = (number for number, line in enumerate(text.splitlines(), 1) if line.count(form.quote or "\n") % 2)
    return next(((number, "a quote without its pair") for number in odd), None)


def _named(table: pl.DataFrame, path: Path, form: CSV) -> pl.DataFrame:
    """A table with the names that its file, the user or its order gives to the columns."""
    names = (
        [column.strip() for column in table.columns]
        if form.has_header
        else list(map(str, range(table.width)))
    )
    if form.columns is not None:
        if len(form.columns) != table.width:
            accepted = f"as many names as it has columns, {table.width}{hints(table)}"
            raise BadInput(f"task.csv.columns: {len(form.columns)} names, for {path}; accepted: {accepted}")
        if form.header is None and len(table) and table.row(0) == form.columns:
            raise BadInput(
                f"task.csv.columns: the first line of {path} has these names; accepted: with task.csv.header: true"
            )
        names = list(form.columns)
    return (
        table if len(set(names)) < len(names) else table.rename(dict(zip(table.columns, names, strict=True)))
    )


def _typed(column: pl.Series, form: CSV) -> pl.Series:
    """A column with words that stand for a missing value as such: as numbers or truth values if all others are, and otherwise
    as words without blanks around them."""
    if column.dtype != pl.String:
        return column
    words = column.str.strip_chars()
    words = _without(words, words.is_in(form.null_values))
    points = words if form.plain_numbers else _plain(words, form.decimal, form.thousands)
    is_word = not_numbers(points)
    lower = words.filter(is_word).str.to_lowercase()
    is_missing, is_truth = lower.is_in(_MISSING), lower.is_in(_TRUTH)
    if (words.is_not_null() & ~is_word).any():
        if is_missing.all():
            values = _without(points, is_word)
            whole = values.cast(pl.Int64, strict=False)
            return whole if whole.null_count() == values.null_count() else values.cast(pl.Float64)
    elif is_truth.any() and (is_missing | is_truth).all():
        lower = words.str.to_lowercase()
        return _without(lower, ~lower.is_in(_TRUTH)) == "true"
    return words


def _plain(words: pl.Series, decimal: str, thousands: str | None) -> pl.Series:
    """Words of which those that are numbers in some way of writing are numbers in Python's, and those with a point that
    does not begin decimals are not."""
    text, point = pl.col(words.name), re.escape(decimal)
    if thousands is not None:
        mark = _GROUPING[thousands]
        grouped = text.str.contains(rf"^[-+]?\d{{1,3}}({mark}\d{{3}})+({point}\d*)?$")
        text = pl.when(grouped).then(text.str.replace_all(mark, "")).otherwise(text)
    if decimal == ",":
        text = text.str.replace_all(".", "..", literal=True).str.replace(",", ".", literal=True)
    return words.to_frame().select(text.alias(words.name)).to_series()


def _without(column: pl.Series, missing: pl.Series) -> pl.Series:
    """A column with some values missing."""
    return column.to_frame().select(pl.when(~missing).then(column).alias(column.name)).to_series()


def _check_header(table: pl.DataFrame, path: Path) -> None:
    """Refuse a table with data, like those of the lines below it, in the first line of its file.

    A word above numbers is a name, and so the line has names. Otherwise the classes decide (columns of words, each of which
    is there twice on average): the line has data if most of them have their name below it too. Without classes, it has data
    if there are columns of numbers, unless their names are 0, 1, 2 ... (as pandas writes them) or years."""
    numeric = [column for column in table.columns if is_numeric(table[column]) and _name(column)]
    numbers = [_number(_name(column)) for column in numeric]
    classes = [column for column in table.columns if _name(column) and _has_classes(table[column])]
    if None in numbers:
        is_data = False
    elif classes:
        is_data = 2 * sum(_name(column) in table[column] for column in classes) > len(classes)
    else:
        counted = numbers == list(range(len(numbers)))
        if len(numbers) == 1:
            counted = counted and 0 not in table[numeric[0]].unique().to_list()
        is_data = bool(numeric) and not counted and not _are_years(numbers, table.select(numeric))
    if is_data:
        problem = f"{path}: the first line looks like data ({splits.some(map(_name, table.columns), 6)})"
        cure = "task.csv.columns with the names of the columns, or task.csv.header: true if these are names"
        raise BadInput(f"task: {problem}; accepted: {cure}{hints(table)}")


def _name(column: str) -> str:
    """A column's name in its file, without what polars adds to a name that is there twice."""
    return re.sub(r"_duplicated_\d+$", "", column)


def _has_classes(column: pl.Series) -> bool:
    """Whether a column has words, each of them twice on average or more often."""
    words = column.drop_nulls()
    return column.dtype == pl.String and len(words) >= 2 * words.n_unique() > 0


def _are_years(names: Sequence[float | None], table: pl.DataFrame) -> bool:
    """Whether ascending years are the names of columns, none of which has only years as values."""
    years = [name for name in names if name is not None and name in _YEARS]
    ascending = len(years) == len(names) > 1 and years == sorted(set(years))
    return ascending and not any(set(column.drop_nulls()) <= _YEARS for column in table)


def _number(text: str) -> float | None:
    """The value of a text that is a number or a truth value."""
    text = text.strip().lower()
    try:
        return float(text == "true") if text in ("true", "false") else float(text)
    except ValueError:
        return None
