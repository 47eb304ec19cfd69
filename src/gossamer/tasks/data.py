"""Columns of a Hugging Face data set as numpy arrays: from the hub, or from a data root without any network.

A data root mirrors the hub: ``<data root>/hub/<hub id>/...`` holds the Parquet files of a data set in the hub's own
folders. Decoded arrays are cached on disk as safetensors, so that images are not decompressed in every run.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
from jaxtyping import Int, Int64, Shaped, UInt8
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from gossamer.errors import BadInput, listed
from gossamer.randomness import SHARED, generator

log = logging.getLogger("gossamer")

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")  # a data file can't reach Pillow's rarer decoders
VERSION = 2  # counts up when decoding changes, so that arrays cached by an older version are not used

Decoder = Callable[[pl.Series, str], Shaped[np.ndarray, "rows ..."]]
"""(column, its name in errors) -> array; raises BadInput for anything but the expected values."""
Splits = dict[str, dict[str, Shaped[np.ndarray, "rows ..."]]]  # split -> column -> array


def image_decoder(height: int, width: int, channels: int) -> Decoder:
    """Decodes a column of encoded images of one size to uint8 pixels; 1 channel is grey, 3 are colour."""

    def decode(column: pl.Series, where: str) -> UInt8[np.ndarray, "rows height width channels"]:
        try:
            from PIL import Image
        except ImportError:
            raise _no_package("pillow") from None
        if not isinstance(column.dtype, pl.Struct):
            raise BadInput(f"{where}: {column.dtype}; accepted: images")
        pixels = np.empty((len(column), height, width, channels), np.uint8)
        for row, data in enumerate(column.struct.field("bytes")):
            try:
                with Image.open(io.BytesIO(data or b""), formats=FORMATS) as image:
                    if image.size != (width, height):
                        raise ValueError(f"{image.size[0]}x{image.size[1]} pixels")
                    pixels[row].flat = np.asarray(image.convert("L" if channels == 1 else "RGB")).flat
            except (OSError, SyntaxError, ValueError) as error:  # Pillow's, for damaged images
                accepted = f"{width}x{height} pixels as {', '.join(FORMATS)}"
                raise BadInput(f"{where}, row {row}: {_first_line(error)}; accepted: {accepted}") from error
        return pixels

    return decode


def label_decoder(classes: int) -> Decoder:
    """Decodes a column of class numbers, from 0 to classes - 1, to int64."""

    def decode(column: pl.Series, where: str) -> Int64[np.ndarray, " rows"]:
        if column.null_count() or not column.dtype.is_integer():
            raise BadInput(f"{where}: {column.dtype}, {column.null_count()} nulls; accepted: class numbers")
        labels = column.cast(pl.Int64).to_numpy()
        low, high = min(labels, default=0), max(labels, default=0)
        if low < 0 or high >= classes:
            raise BadInput(f"{where}: labels from {low} to {high}; accepted: 0 to {classes - 1}")
        return labels

    return decode


def hub_dataset(
    hub_id: str, columns: Mapping[str, Decoder], rows: Mapping[str, int | None], data_root: Path | None
) -> Splits:
    """Columns of a data set of the Hugging Face hub, through their decoders, as arrays [rows, ...]. ``rows`` has
    the splits to read, and how many rows each must have (None: any number).

    With a data root the network is not used, and a changed file is noticed by path, size and time. Without one, a data
    set that was read before is taken from the cache by its id. A BadInput refuses a missing folder or data set, a damaged
    file, unexpected rows, sizes or labels, a missing network, and says when the extra ``data`` is not installed."""
    folder = None if data_root is None else hub_folder(hub_id, data_root)
    files = sorted(folder.rglob("*.parquet")) if folder is not None else []
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = repr((VERSION, hub_id, str(folder), sorted(columns), sorted(rows), stamps)).encode()
    name = f"{hub_id.replace('/', '--')}-{hashlib.blake2b(key, digest_size=12).hexdigest()}.safetensors"
    cached = cache_folder() / "datasets" / name
    arrays: dict[str, Shaped[np.ndarray, "rows ..."]] = {}
    try:
        arrays = load_file(cached) if cached.exists() else {}
    except (OSError, SafetensorError) as error:
        log.warning("cached data %s can't be read and is decoded again (%s)", cached, error)
    if not arrays:
        folder = folder or hub_folder(hub_id, None)
        log.info("decoding %s from %s", hub_id, folder)
        for split, expected in rows.items():
            for column, array in _decode(folder, split, expected, columns).items():
                arrays[f"{split}/{column}"] = array
        _store(cached, arrays)
    return {split: {column: arrays[f"{split}/{column}"] for column in columns} for split in rows}


def hub_folder(
    hub_id: str,
    data_root: Path | None,
    kind: Literal["dataset", "model"] = "dataset",
    patterns: Sequence[str] = ("*.parquet",),
) -> Path:
    """The folder of a data set or model of the Hugging Face hub: in the data root, or downloaded (the files that fit the
    patterns). A BadInput refuses a missing folder or network."""
    if data_root is not None:
        folder = data_root / "hub" / hub_id
        if not folder.is_dir():
            accepted = f"a folder with hub/{hub_id}/..., or null for the hub"
            raise BadInput(f"data_root: {folder} is no folder; accepted: {accepted}")
        return folder.resolve()
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise _no_package("huggingface_hub") from None
    try:
        return Path(snapshot_download(hub_id, repo_type=kind, allow_patterns=list(patterns)))
    except Exception as error:  # the HTTP client's errors, among others
        problem = f"{hub_id} can't be read from the Hugging Face hub ({_first_line(error)})"
        accepted = f"with a network, or with data_root set to a folder that has it under hub/{hub_id}"
        raise BadInput(f"{problem}; accepted: {accepted}") from error


def _decode(
    folder: Path, split: str, rows: int | None, columns: Mapping[str, Decoder]
) -> dict[str, Shaped[np.ndarray, "rows ..."]]:
    files = sorted(folder.rglob(f"{split}*.parquet"))
    if not files:
        raise BadInput(f"data_root: {folder} has no file {split}*.parquet; accepted: the whole data set")
    frames = []
    for path in files:
        try:
            frames.append(pl.read_parquet(path, columns=list(columns)))
        except (pl.exceptions.PolarsError, OSError) as error:
            accepted = f"a whole Parquet file with {listed(columns)}"
            raise BadInput(
                f"data_root: {path} can't be read ({_first_line(error)}); accepted: {accepted}"
            ) from error
    table = pl.concat(frames)
    where = f"data_root: {folder}, split {split!r}"
    if rows is not None and len(table) != rows:
        raise BadInput(f"{where}: {len(table)} rows; accepted: {rows}")
    return {name: decode(table[name], f"{where}, column {name!r}") for name, decode in columns.items()}


def _no_package(name: str) -> BadInput:
    return BadInput(f"no package {name!r}; accepted: after pip install 'gossamer[data]'")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def cache_folder() -> Path:
    """The folder of decoded data: ``$GOSSAMER_CACHE``, else ``$XDG_CACHE_HOME/gossamer``, else ``~/.cache/gossamer``."""
    if own := os.environ.get("GOSSAMER_CACHE"):
        return Path(own)
    users = os.environ.get("XDG_CACHE_HOME")
    return (Path(users) if users else Path.home() / ".cache") / "gossamer"


def _store(path: Path, arrays: dict[str, Shaped[np.ndarray, "..."]]) -> None:
    """Cache arrays. A failure is only logged: it makes the next run slower."""
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

    Of an owner's n samples, ``fraction * n`` are for training, rounded such that every owner of two or more has both
    kinds; a single sample is for training. ``purpose`` is the key with which each owner's training samples are drawn, the
    same for every experiment's seed; None takes the owner's first ones, in the order of the data."""
    grouped = np.split(np.argsort(owners, kind="stable"), np.cumsum(np.bincount(owners))[:-1])
    train, test = [], []
    for owner, members in enumerate(grouped):
        if purpose is not None:
            members = generator(0, purpose, SHARED, owner).permutation(members)
        kept = min(max(round(fraction * len(members)), 1), max(len(members) - 1, 1))
        train.append(members[:kept])
        test.append(members[kept:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))
