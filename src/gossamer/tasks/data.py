"""Data sets as tables and arrays: from the Hugging Face hub, from a data root that mirrors it, or from local
files.

A data root mirrors the hub: ``<data root>/hub/<hub id>/...`` holds the files of a data set in the hub's own folders. Decoded
arrays are cached on disk, so that images are not decompressed in every run.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import logging
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from jaxtyping import Int, Int64, Shaped, UInt8
from pydantic import BaseModel, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from gossamer.config.registry import FilePath
from gossamer.digests import digests
from gossamer.errors import BadInput, first_line
from gossamer.files import cache_folder, check_fits, check_room
from gossamer.randomness import SHARED, generator
from gossamer.reads import note
from gossamer.tasks import splits
from gossamer.tasks.provenance import Provenance

log = logging.getLogger("gossamer")

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")  # a data file can't invoke Pillow's rarer decoders
VERSION = 2  # increased when decoding changes, so that arrays cached by an older version are not used

DATA = tuple(f"*.{end}" for kind, ends in splits.KINDS.items() if kind != "image" for end in ends)
"""Names of files of tables."""
IMAGES = tuple(f"*.{case}" for end in splits.KINDS["image"] for case in (end, end.upper()))
"""Names of images. (A download from the hub is by exact names.)"""

_YEARS = frozenset(range(1900, 2101))  # that may be names of columns

_GREY = ("1", "L", "LA", "La")  # Pillow's modes of grey images of at most 8 bits
_DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # of more bits, which Pillow would clip to 255


class Source(BaseModel):
    """Files given by a path or by an id of the Hugging Face hub."""

    path: FilePath | None = None
    hub_id: str | None = None  # read from data_root/hub/<hub id>, if there is a data root

    @model_validator(mode="after")
    def _one_source(self) -> Source:
        if (self.path is None) == (self.hub_id is None):
            raise ValueError("one of path and hub_id")
        return self

    def locate(
        self, data_root: Path | None, kind: Literal["dataset", "model"], patterns: Sequence[str]
    ) -> Path:
        """The path, or the folder with the hub's files that match the patterns; see :func:`hub_folder`."""
        if self.path is None:
            return hub_folder(str(self.hub_id), data_root, kind, patterns)
        note(self.path, patterns)
        return self.path


def package(module: str, install: str, name: str = "") -> Any:
    """A module of an optional package. If it is missing, a BadInput names the package to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise BadInput(f"no package {name or module!r}; accepted: after pip install {install}") from None


Decoder = Callable[[pl.Series, str], Shaped[np.ndarray, "rows ..."]]
"""(column, its name in errors) -> array; raises BadInput for anything but the expected values."""
Arrays = dict[str, Shaped[np.ndarray, "rows ..."]]


def image_decoder(height: int, width: int, channels: int, resize: bool = False) -> Decoder:
    """A decoder of a column of encoded images to uint8 pixels; 1 channel is grey, 3 are colour. Images of
    other sizes are resized or refused; those of another mode are converted, and lose transparency."""

    def decode(column: pl.Series, where: str) -> UInt8[np.ndarray, "rows height width channels"]:
        package("PIL", "'gossamer[data]'", "pillow")
        if not is_image(column):
            raise BadInput(f"{where}: {column.dtype}; accepted: images")
        check_room(f"{where}: the pixels", len(column) * height * width * channels)
        pixels = np.empty((len(column), height, width, channels), np.uint8)
        for row, (data, name) in enumerate(_encoded(column)):
            try:
                with opened(data) as image:
                    if image.size != (width, height) and not resize:
                        raise ValueError(f"{image.size[0]}x{image.size[1]} pixels")
                    if image.mode in _DEEP:
                        raise ValueError(f"more than 8 bits per pixel and channel (mode {image.mode})")
                    if image.format != "MPO" and (frames := getattr(image, "n_frames", 1)) > 1:
                        raise ValueError(f"{frames} frames")
                    colours = image.convert("L" if channels == 1 else "RGB")
                    fitted = colours if image.size == (width, height) else colours.resize((width, height))
                    pixels[row].flat = np.asarray(fitted).flat
            except (OSError, SyntaxError, ValueError) as error:  # Pillow's, for damaged images
                named = "" if name is None else f" ({name})"
                size = "" if resize else f"{width}x{height} pixels as "
                accepted = f"{size}one frame of {', '.join(FORMATS)}"
                problem = f"{where}, row {row}{named}: {_without_object(error)}"
                raise BadInput(f"{problem}; accepted: {accepted}") from error
        return pixels

    return decode


def opened(data: bytes | Path | None) -> Any:
    """An encoded image, opened by Pillow but not decoded yet. ValueError for one with too many pixels."""
    from PIL import Image

    try:
        return Image.open(data if isinstance(data, Path) else io.BytesIO(data or b""), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ValueError(first_line(error)) from None


def _encoded(column: pl.Series) -> Iterator[tuple[bytes | None, str | None]]:
    """The bytes and the file's name, if any, of each image of a column."""
    names = column.struct.field("path") if "path" in column.struct.fields else [None] * len(column)
    return zip(column.struct.field("bytes"), names, strict=True)


def _without_object(error: Exception) -> str:
    """The first line of an error without an address in memory."""
    return re.sub(r" <_io\.BytesIO[^>]*>", "", first_line(error))


def is_image(column: pl.Series) -> bool:
    """Whether a column has encoded images, as the hub stores them."""
    return isinstance(column.dtype, pl.Struct) and any(field.name == "bytes" for field in column.dtype.fields)


def is_numeric(column: pl.Series) -> bool:
    """Whether each value of a column is one number or truth value."""
    return column.dtype.is_numeric() or column.dtype == pl.Boolean


@dataclass(frozen=True)
class ImageShapes:
    """The sizes (height, width) and the modes of a column of images: grey or colour, with the number of each."""

    sizes: Counter[tuple[int, int]]
    grey: int
    colour: int


def image_shapes(column: pl.Series) -> ImageShapes:
    """The shapes of all images of a column. Those that can't be opened are left out; decoding will name them."""
    package("PIL", "'gossamer[data]'", "pillow")
    sizes, colours = Counter[tuple[int, int]](), Counter[bool]()
    for data, _ in _encoded(column):
        with suppress(OSError, SyntaxError, ValueError), opened(data) as image:
            sizes[image.height, image.width] += 1
            colours[image.mode not in (*_GREY, *_DEEP)] += 1
    return ImageShapes(sizes, colours[False], colours[True])


def label_decoder(classes: int) -> Decoder:
    """A decoder of a column of class numbers, from 0 to classes - 1, to int64."""

    def decode(column: pl.Series, where: str) -> Int64[np.ndarray, " rows"]:
        if not (column.dtype.is_integer() and column.is_between(0, classes - 1).fill_null(False).all()):
            values = f"{column.dtype} from {column.min()!r} to {column.max()!r}, {column.null_count()} nulls"
            raise BadInput(f"{where}: {values}; accepted: class numbers from 0 to {classes - 1}")
        return column.cast(pl.Int64).to_numpy(writable=True)

    return decode


def decode_names(column: pl.Series, where: str) -> Int64[np.ndarray, " rows"]:
    """Names as numbers: the position of each name in alphabetical order."""
    check_text(column, where)
    return column.rank("dense").cast(pl.Int64).to_numpy() - 1


def check_text(column: pl.Series, where: str) -> None:
    """Refuse a column that is not text."""
    if column.dtype != pl.String or column.null_count():
        raise BadInput(f"{where}: {column.dtype} with {column.null_count()} nulls; accepted: text")


def hub_dataset(
    hub_id: str, columns: Mapping[str, Decoder], rows: Mapping[str, int | None], data_root: Path | None
) -> dict[str, Arrays]:
    """Decoded columns of a data set on the Hugging Face hub: split -> column -> array [rows, ...]. ``rows``
    has the splits to read and the number of rows that each must have (None: any number).

    With a data root, the network is not used, and decoded data is taken from the cache if the hashes of its files are the
    same. Without one, a data set that was read before is taken from the cache by its id. BadInput for a missing
    folder or data set, a damaged file, unexpected rows, sizes or labels, a missing network, or if the extra
    ``data`` is not installed."""
    folder = None if data_root is None else hub_folder(hub_id, data_root)
    hashes = _hashes(folder)
    key = repr((VERSION, hub_id, str(folder), sorted(columns), sorted(rows), hashes)).encode()
    name = f"{hub_id.replace('/', '--')}-{hashlib.blake2b(key, digest_size=12).hexdigest()}.safetensors"
    cached = cache_folder() / "datasets" / name
    arrays: Arrays = {}
    try:
        arrays = load_file(cached) if cached.exists() else {}
    except (OSError, SafetensorError) as error:
        log.warning("cached data %s can't be read and is decoded again (%s)", cached, error)
    if not arrays:
        folder = folder or hub_folder(hub_id, None)
        log.info("decoding %s from %s", hub_id, folder)
        for split, expected in rows.items():
            table, where = read_split(folder, split), f"data_root: {folder}, split {split!r}"
            if table.is_empty() or (expected is not None and len(table) != expected):
                accepted = "the whole data set" if expected is None else f"{expected}"
                raise BadInput(f"{where}: {len(table)} rows; accepted: {accepted}")
            for column, decode in columns.items():
                if column not in table.columns:
                    raise BadInput(f"{where}: no column {column!r}; accepted: the whole data set")
                arrays[f"{split}/{column}"] = decode(table[column], f"{where}, column {column!r}")
        if _hashes(folder if data_root is not None else None) == hashes:  # no file was written meanwhile
            _store(cached, arrays)
    return {split: {column: arrays[f"{split}/{column}"] for column in columns} for split in rows}


def _hashes(folder: Path | None) -> list[tuple[str, str]]:
    """The names and hashes of the files of a data set; none without a folder."""
    found = [] if folder is None else sorted(folder.rglob("*.parquet"))
    try:
        return list(zip(map(str, found), digests(found), strict=True))
    except OSError as error:
        raise BadInput(
            f"data_root: {error.filename}: {error.strerror}; accepted: a file that can be read"
        ) from None


def hub_provenance(
    hub_id: str, data_root: Path | None, names: Sequence[str], test: str, remarks: Sequence[str] = ()
) -> Provenance:
    """The provenance of :func:`hub_dataset`. Without a data root, the files may be in the cache only, and are not named."""
    folder = None if data_root is None else hub_folder(hub_id, data_root)
    files = {} if folder is None else {name: split_files(folder, name) for name in names}
    source = f"{hub_id} of the Hugging Face hub" if folder is None else str(folder)
    return Provenance(source, test, {"all": files["train"]} if len(files) == 1 else files, remarks)


def hub_folder(
    hub_id: str,
    data_root: Path | None,
    kind: Literal["dataset", "model"] = "dataset",
    patterns: Sequence[str] = ("*.parquet",),
) -> Path:
    """The folder of a data set or model of the Hugging Face hub: in the data root, or downloaded (the files
    that match the patterns). BadInput if the folder or the network is missing."""
    if data_root is not None:
        folder = data_root / "hub" / hub_id
        if not folder.is_dir():
            accepted = f"a folder with hub/{hub_id}/..., or null for the hub"
            raise BadInput(f"data_root: {folder} is not a folder; accepted: {accepted}")
        note(folder, patterns)
        return folder.resolve()
    snapshot_download = package("huggingface_hub", "'gossamer[data]'").snapshot_download
    try:
        folder = Path(snapshot_download(hub_id, repo_type=kind, allow_patterns=list(patterns)))
        if kind == "dataset" and not any(next(folder.rglob(pattern), None) for pattern in patterns):
            converted = "refs/convert/parquet"  # the hub's own copy of data sets in other formats
            folder = Path(snapshot_download(hub_id, repo_type=kind, revision=converted))
        note(folder, patterns)
        return folder
    except Exception as error:  # including errors of the HTTP client
        problem = f"{hub_id} can't be read from the Hugging Face hub ({first_line(error)})"
        accepted = f"with a network, or with data_root set to a folder that has it under hub/{hub_id}"
        raise BadInput(f"{problem}; accepted: {accepted}") from error


def read_split(root: Path, split: str) -> pl.DataFrame:
    """The rows of a split of a data set of the hub; empty if there are none. If no file is named ``train``, those of no
    split are for training. BadInput for a file that can't be read."""
    tables = [read_table(path) for path in split_files(root, split)]
    return pl.concat(tables) if tables else pl.DataFrame()


def split_files(root: Path, split: str) -> list[Path]:
    """The Parquet files of a split of a data set of the hub, in order."""
    paths = sorted(root.rglob("*.parquet"))
    of = {path: splits.split_of(path.relative_to(root).parts, (split,)) for path in paths}
    found = [path for path in paths if of[path] == split]
    return found or [path for path in paths if split == "train" and of[path] is None]


def read_table(path: Path) -> pl.DataFrame:
    """The rows of one file: a table, or a text (one row, ``text``). BadInput for a file that can't be read, or whose first
    line has data in place of names."""
    try:
        check_fits(f"task: {path}", path)
        match path.name.lower().rpartition(".")[2]:
            case "parquet":
                return pl.read_parquet(path)
            case "arrow":
                return pl.read_ipc_stream(path)
            case "csv":
                return _with_header(pl.read_csv(path, infer_schema_length=None), path)
            case "jsonl":
                return pl.read_ndjson(path, infer_schema_length=None)
            case "gz":
                return pl.DataFrame({"text": [gzip.decompress(path.read_bytes()).decode()]})
            case _:
                return pl.DataFrame({"text": [path.read_bytes().decode()]})
    except (pl.exceptions.PolarsError, OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise BadInput(f"{path} can't be read ({first_line(error)}); accepted: a whole file") from error


def read_images(paths: Sequence[Path], name: Callable[[Path], str]) -> pl.DataFrame:
    """Image files as rows ``image`` (encoded, as the hub stores them) and ``label``, the folder's name."""
    try:
        check_fits("task: the image files", *paths)
        images = [{"bytes": path.read_bytes(), "path": name(path)} for path in paths]
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


def _with_header(table: pl.DataFrame, path: Path) -> pl.DataFrame:
    """A table whose columns have names. BadInput if the first line of the file has data, like the lines below it.

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
        raise BadInput(f"task: {problem}; accepted: a first line with the names of the columns")
    return table


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


def _store(path: Path, arrays: Arrays) -> None:
    """Cache arrays. A failure is only logged, since it merely makes the next run slower."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, part)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        log.warning("decoded data can't be cached (%s); set GOSSAMER_CACHE to a writable folder", error)


def split_by_owner(
    owners: Int[np.ndarray, " samples"], fraction: float, purpose: str | None = None
) -> tuple[Int[np.ndarray, " train"], Int[np.ndarray, " test"]]:
    """Indices of training and test samples, both ascending, for a data set that has no test set.

    Of an owner's n samples, ``fraction * n`` are for training, rounded so that every owner of two or more
    samples has both kinds; a single sample is for training. ``purpose`` is the key for drawing each owner's
    training samples, independent of the experiment's seed; None takes each owner's first samples, in the
    order of the data."""
    grouped = np.split(np.argsort(owners, kind="stable"), np.cumsum(np.bincount(owners))[:-1])
    train, test = [], []
    for owner, members in enumerate(grouped):
        if purpose is not None:
            members = generator(0, purpose, SHARED, owner).permutation(members)
        kept = min(max(round(fraction * len(members)), 1), max(len(members) - 1, 1))
        train.append(members[:kept])
        test.append(members[kept:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))
