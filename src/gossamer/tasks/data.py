"""Data sets as tables and arrays: from the Hugging Face hub, from a data root that mirrors it, or from local
files.

A data root mirrors the hub: ``<data root>/hub/<hub id>/...`` holds the files of a data set in the hub's own folders. Decoded
arrays are cached on disk, so that images are not decompressed in every run.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import secrets
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from jaxtyping import Int, Int64, Shaped
from pydantic import BaseModel, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from gossamer.config.registry import FilePath
from gossamer.digests import digests
from gossamer.errors import BadInput, first_line
from gossamer.files import cache_folder
from gossamer.randomness import SHARED, generator
from gossamer.reads import note
from gossamer.tasks import splits
from gossamer.tasks.provenance import Provenance
from gossamer.tasks.tables import read_table

log = logging.getLogger("gossamer")

VERSION = 2  # increased when decoding changes, so that arrays cached by an older version are not used


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


RowPlace = Callable[[int], str]
"""Row of a column, from 0 -> its place for the user, such as "row 1 of train.parquet"."""
ColumnDecoder = Callable[[pl.Series, str, RowPlace], Shaped[np.ndarray, "rows ..."]]
"""(column, its name in errors, the places of its rows) -> array; raises BadInput for anything but the expected values."""
Arrays = dict[str, Shaped[np.ndarray, "rows ..."]]


def label_decoder(classes: int) -> ColumnDecoder:
    """A decoder of a column of class numbers, from 0 to classes - 1, to int64."""

    def decode(column: pl.Series, where: str, place: RowPlace) -> Int64[np.ndarray, " rows"]:
        accepted = f"class numbers from 0 to {classes - 1}"
        if not column.dtype.is_integer():
            raise BadInput(f"{where}: {column.dtype}; accepted: {accepted}")
        wrong = ~column.is_between(0, classes - 1).fill_null(False)
        if count := wrong.sum():
            first = int(wrong.arg_max() or 0)
            problem = f"{count:,} other values (the first, {column[first]}, in {place(first)})"
            raise BadInput(f"{where}: {problem}; accepted: {accepted}")
        return column.cast(pl.Int64).to_numpy(writable=True)

    return decode


def decode_names(column: pl.Series, where: str, place: RowPlace) -> Int64[np.ndarray, " rows"]:
    """Names as numbers: the position of each name in alphabetical order."""
    check_text(column, where, place)
    return column.rank("dense").cast(pl.Int64).to_numpy() - 1


def check_text(column: pl.Series, where: str, place: RowPlace) -> None:
    """Refuse a column that is not text."""
    if column.dtype != pl.String:
        raise BadInput(f"{where}: {column.dtype}; accepted: text")
    if count := column.null_count():
        first = place(int(column.is_null().arg_max() or 0))
        raise BadInput(f"{where}: {count:,} values are missing (the first in {first}); accepted: text")


def hub_dataset(
    hub_id: str, columns: Mapping[str, ColumnDecoder], rows: Mapping[str, int | None], data_root: Path | None
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
            table, place = read_split(folder, split)
            where = f"data_root: {folder}, split {split!r}"
            if table.is_empty() or (expected is not None and len(table) != expected):
                accepted = "the whole data set" if expected is None else f"{expected}"
                raise BadInput(f"{where}: {len(table)} rows; accepted: {accepted}")
            for column, decode in columns.items():
                if column not in table.columns:
                    raise BadInput(f"{where}: no column {column!r}; accepted: the whole data set")
                arrays[f"{split}/{column}"] = decode(table[column], f"{where}, column {column!r}", place)
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


def read_split(root: Path, split: str) -> tuple[pl.DataFrame, RowPlace]:
    """The rows of a split of a data set of the hub, which may be none, and their places. If no file is named ``train``, those
    of no split are for training. BadInput for a file that can't be read."""
    paths = split_files(root, split)
    tables = [read_table(path) for path in paths]
    ends = list(accumulate(map(len, tables)))

    def place(row: int) -> str:
        file = bisect_right(ends, row)
        return f"row {row - (ends[file - 1] if file else 0) + 1} of {paths[file].relative_to(root)}"

    return pl.concat(tables) if tables else pl.DataFrame(), place


def split_files(root: Path, split: str) -> list[Path]:
    """The Parquet files of a split of a data set of the hub, in order."""
    paths = sorted(root.rglob("*.parquet"))
    of = {path: splits.split_of(path.relative_to(root).parts, (split,)) for path in paths}
    found = [path for path in paths if of[path] == split]
    return found or [path for path in paths if split == "train" and of[path] is None]


def _store(path: Path, arrays: Arrays) -> None:
    """Cache arrays. A failure is only logged, since it merely makes the next run slower."""
    part = path.with_suffix(f".{secrets.token_hex(8)}.part")
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
