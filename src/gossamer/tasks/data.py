"""Columns of a Hugging Face data set as numpy arrays: from the hub, or from a data root without any network.

A data root mirrors the hub: ``<data root>/hub/<hub id>/...`` holds the Parquet files of a data set in the hub's own
folders. Either way the data is read with ``datasets.load_dataset`` and checked: number of rows, types, image sizes, label
range.

Decoded arrays are cached on disk, so that images are not decompressed in every run. An array is one ``.npy`` file,
written under another name and renamed, so that it is whole, and memory-mapped on reading, so that processes share its
pages. Nothing in it is pickled.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int64, Shaped, UInt8

from gossamer.errors import BadInput, listed
from gossamer.randomness import SHARED, generator

log = logging.getLogger("gossamer")

MAGIC = b"PAR1"
"""The first and the last four bytes of every Parquet file."""

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
"""Image formats that are decoded; a data file can't reach Pillow's rarer decoders."""

VERSION = 1
"""Counts up when decoding changes, so that arrays cached by an older version are not used."""


@runtime_checkable
class Column(Protocol):
    """Turns one column of a data set into an array."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The array's type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape without its first axis (the row)."""

    def decode(self, column: Any, where: str) -> Shaped[np.ndarray, "rows ..."]:
        """The array of an Arrow column; ``where`` names the column in errors."""


@dataclass(frozen=True)
class ImageColumn:
    """Images of one size, as uint8 pixels.

    Args:
        shape: (height, width, channels); 1 channel for grey, 3 for colour.
    """

    shape: tuple[int, int, int]

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """uint8."""
        return np.dtype(np.uint8)

    def decode(self, column: Any, where: str) -> UInt8[np.ndarray, "rows height width channels"]:
        """The pixels of an Arrow column of encoded images.

        Raises:
            BadInput: for an image that can't be decoded or has another size; the line names its row.
        """
        from PIL import Image, UnidentifiedImageError

        height, width, channels = self.shape
        mode = {1: "L", 3: "RGB"}[channels]
        pixels = np.empty((len(column), *self.shape), np.uint8)
        # Threads would be slower (measured): decoding holds the interpreter lock for images this small.
        for row, encoded in enumerate(column):
            data = encoded["bytes"].as_py() if encoded.is_valid else None
            if data is None:
                raise BadInput(f"{where}, row {row}: no image; accepted: {width}x{height} pixels")
            try:
                with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                    if image.size != (width, height):
                        raise BadInput(
                            f"{where}, row {row}: an image of {image.width}x{image.height} pixels;"
                            f" accepted: {width}x{height}"
                        )
                    pixels[row] = np.asarray(image.convert(mode)).reshape(self.shape)
            except (
                UnidentifiedImageError,
                OSError,
                SyntaxError,
                ValueError,
            ) as error:  # Pillow's, for damaged images
                raise BadInput(
                    f"{where}, row {row}: the image can't be decoded; accepted: {', '.join(FORMATS)}"
                ) from error
        return pixels


class NumberColumn:
    """Base of columns that are decoded to one int64 per row."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """int64."""
        return np.dtype(np.int64)

    @property
    def shape(self) -> tuple[int, ...]:
        """One number per row."""
        return ()


@dataclass(frozen=True)
class LabelColumn(NumberColumn):
    """Class numbers, as int64.

    Args:
        classes: how many there are; labels go from 0 to classes - 1.
    """

    classes: int

    def decode(self, column: Any, where: str) -> Int64[np.ndarray, " rows"]:
        """The class numbers of an Arrow column.

        Raises:
            BadInput: for a column that does not hold integers, or a label out of range.
        """
        labels = column.to_numpy()
        if column.null_count or labels.dtype.kind not in "iu":
            raise BadInput(f"{where}: {column.type} with {column.null_count} nulls; accepted: class numbers")
        if len(labels) and not 0 <= labels.min() <= labels.max() < self.classes:
            raise BadInput(
                f"{where}: labels from {labels.min()} to {labels.max()}; accepted: 0 to {self.classes - 1}"
            )
        return np.asarray(labels, np.int64)


Splits = dict[str, dict[str, Shaped[np.ndarray, "rows ..."]]]
"""Split -> column -> array."""


def hub_dataset(
    hub_id: str, columns: Mapping[str, Column], rows: Mapping[str, int | None], data_root: Path | None
) -> Splits:
    """Columns of a data set of the Hugging Face hub as arrays.

    With a data root the network is not used, and a changed file is noticed by path, size and time. Without one, a data
    set that was read before is taken from the cache by its id.

    Args:
        hub_id: the data set's id on the hub, such as ``"uoft-cs/cifar10"``.
        columns: the columns to read, and their decoders.
        rows: the splits to read, and how many rows each must have (None: any number).
        data_root: a folder with ``hub/<hub id>/...``, or None for the hub.

    Returns:
        split -> column -> array whose first axis is the row. Arrays from the cache are read-only.

    Raises:
        BadInput: for a missing folder or data set, a damaged file (named), unexpected rows, sizes or labels, no
            network, or when the extra ``data`` is not installed.
    """
    folder, files = None, []
    if data_root is not None:
        folder = _dataset_folder(data_root, hub_id)
        files = _parquet_files(folder)
    fingerprint = _fingerprint(hub_id, columns, files)
    names = {
        (split, column): f"datasets/{hub_id.replace('/', '--')}/{fingerprint}/{split}-{column}.npy"
        for split in rows
        for column in columns
    }
    found: Splits = {split: {} for split in rows}
    for (split, column), name in names.items():
        array = read_array(name, (rows[split], *columns[column].shape), columns[column].dtype)
        if array is None:
            break
        found[split][column] = array
    else:
        return found

    log.info("decoding %s from %s", hub_id, folder or "the Hugging Face hub")
    found = _decode(hub_id, columns, rows, folder, files)
    for (split, column), name in names.items():
        write_array(name, found[split][column])
    return found


def _dataset_folder(data_root: Path, hub_id: str) -> Path:
    accepted = f"accepted: a folder with hub/{hub_id}/..., or null to read from the Hugging Face hub"
    if not data_root.exists():
        raise BadInput(f"data_root: {data_root} does not exist; {accepted}")
    if not data_root.is_dir():
        raise BadInput(f"data_root: {data_root} is not a folder; {accepted}")
    folder = data_root / "hub" / hub_id
    if not folder.is_dir():
        raise BadInput(f"data_root: {data_root} has no folder hub/{hub_id}; {accepted}")
    return folder.resolve()


def _parquet_files(folder: Path) -> list[Path]:
    """The data files of a folder. Each must have Parquet's magic at both ends, which a truncated download lacks."""
    files = sorted(folder.rglob("*.parquet"))
    if not files:
        raise BadInput(f"data_root: {folder} has no .parquet file; accepted: the data set's Parquet files")
    for path in files:
        try:
            with path.open("rb") as file:
                head = file.read(len(MAGIC))
                file.seek(-min(len(MAGIC), path.stat().st_size), io.SEEK_END)
                tail = file.read()
        except OSError as error:
            raise BadInput(
                f"data_root: {path} can't be read ({error.strerror}); accepted: a readable file"
            ) from error
        if head != MAGIC or tail != MAGIC:
            end = "beginning" if head != MAGIC else "end"
            raise BadInput(
                f"data_root: {path} is truncated or damaged (no Parquet mark at its {end});"
                " accepted: a whole Parquet file"
            )
    return files


def _fingerprint(hub_id: str, columns: Mapping[str, Column], files: Sequence[Path]) -> str:
    """A name for decoded data, which changes with the decoder, the columns and the source files."""
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    text = repr((VERSION, hub_id, sorted((name, repr(column)) for name, column in columns.items()), stamps))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _decode(
    hub_id: str,
    columns: Mapping[str, Column],
    rows: Mapping[str, int | None],
    folder: Path | None,
    files: Sequence[Path],
) -> Splits:
    where = f"data_root: {folder}" if folder is not None else f"{hub_id} (Hugging Face hub)"
    # `datasets` turns Parquet into an Arrow file that it maps, which is not needed afterwards.
    with tempfile.TemporaryDirectory(prefix="gossamer-") as scratch:
        dataset = _from_hub(hub_id) if folder is None else _from_folder(folder, files, scratch)
        decoded: Splits = {}
        for split, expected in rows.items():
            if split not in dataset:
                raise BadInput(
                    f"{where}: no split {split!r}; accepted: {listed(list(rows))}"
                    f" (the files of {split!r} are missing, there are only those of {listed(list(dataset))})"
                )
            table = dataset[split].data.table
            if expected is not None and table.num_rows != expected:
                raise BadInput(f"{where}: {table.num_rows} rows in split {split!r}; accepted: {expected}")
            decoded[split] = {}
            for name, column in columns.items():
                at = f"{where}, split {split!r}, column {name!r}"
                if name not in table.column_names:
                    raise BadInput(f"{at}: no such column; found: {listed(table.column_names)}")
                decoded[split][name] = column.decode(table.column(name), at)
        return decoded


def _from_folder(folder: Path, files: Sequence[Path], scratch: str) -> Any:
    with _quiet(offline=True) as datasets:
        try:
            return datasets.load_dataset(str(folder), cache_dir=scratch)
        except Exception as error:  # readers for many formats are behind it, each with errors of its own
            damaged = _first_damaged(files)
            raise BadInput(
                f"data_root: {damaged or folder} can't be read ({_first_line(error)});"
                " accepted: whole Parquet files"
            ) from error


def _from_hub(hub_id: str) -> Any:
    with _quiet(offline=False) as datasets:
        try:
            return datasets.load_dataset(hub_id)
        except Exception as error:  # whatever the HTTP client beneath it raises
            raise BadInput(
                f"{hub_id} can't be read from the Hugging Face hub ({_first_line(error)}); accepted: with a"
                f" network, or with data_root set to a folder that has it under hub/{hub_id}"
            ) from error


def _first_damaged(files: Sequence[Path]) -> Path | None:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    for path in files:
        try:
            pyarrow.parquet.read_table(path)
        except (pyarrow.ArrowException, OSError):
            return path
    return None


def _first_line(error: Exception) -> str:
    # The cause says more: `datasets` wraps it in "An error occurred while generating the dataset".
    text = str(error.__cause__ or error).strip()
    return text.splitlines()[0] if text else type(error).__name__


_patching = threading.Lock()


@contextmanager
def _quiet(offline: bool) -> Iterator[Any]:
    """The package ``datasets`` without progress bars, log messages and, if ``offline``, network: global settings, which
    are restored at the end."""
    try:
        import datasets
        import huggingface_hub.constants as hub
        from PIL import Image  # noqa: F401 - asked for here, so that one message covers the whole extra
    except ImportError as error:
        raise BadInput(
            f"this task needs the package {error.name!r}; accepted: after pip install 'gossamer[data]'"
        ) from error

    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    with _patching:
        levels = [logger.level for logger in loggers]
        bars = datasets.is_progress_bar_enabled()
        was_offline = datasets.config.HF_HUB_OFFLINE, hub.HF_HUB_OFFLINE
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        datasets.disable_progress_bars()
        if offline:
            datasets.config.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE = True
        try:
            yield datasets
        finally:
            datasets.config.HF_HUB_OFFLINE, hub.HF_HUB_OFFLINE = was_offline
            if bars:
                datasets.enable_progress_bars()
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


# --- the cache


def cache_folder() -> Path:
    """The folder of decoded data: ``$GOSSAMER_CACHE``, else ``$XDG_CACHE_HOME/gossamer``, else ``~/.cache/gossamer``.

    Raises:
        OSError: when neither variable is set and the user has no home folder.
    """
    if own := os.environ.get("GOSSAMER_CACHE"):
        return Path(own)
    if users := os.environ.get("XDG_CACHE_HOME"):
        return Path(users) / "gossamer"
    try:
        return Path.home() / ".cache" / "gossamer"
    except RuntimeError as error:
        raise OSError(f"no home folder ({error})") from error


def read_array(
    name: str, shape: Sequence[int | None], dtype: np.dtype[np.generic]
) -> Shaped[np.ndarray, "..."] | None:
    """A cached array, memory-mapped and read-only; None unless there is one of this shape (None: any length) and type."""
    try:
        path = cache_folder() / name
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:  # what np.load raises for damaged files
        log.warning("cached data %s can't be read and is decoded again (%s)", name, error)
        return None
    if not isinstance(array, np.ndarray) or not _fits(array.shape, shape) or array.dtype != dtype:
        log.warning("cached data %s is not what it should be and is decoded again", path)
        return None
    return array


def _fits(found: tuple[int, ...], wanted: Sequence[int | None]) -> bool:
    return len(found) == len(wanted) and all(n in (None, m) for m, n in zip(found, wanted, strict=True))


def write_array(name: str, array: Shaped[np.ndarray, "..."]) -> None:
    """Cache an array. A failure is only logged: it makes the next run slower."""
    try:
        path = cache_folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            part = Path(file.name)
            try:
                np.save(file, array, allow_pickle=False)
                file.close()
                part.replace(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
    except OSError as error:
        log.warning(
            "decoded data can't be cached (%s); set GOSSAMER_CACHE to a folder that can be written", error
        )


# --- test sets


def split_by_owner(
    owners: Int[np.ndarray, " samples"], fraction: float, purpose: str | None = None
) -> tuple[Int[np.ndarray, " train"], Int[np.ndarray, " test"]]:
    """Indices of training and test samples, both ascending, for a data set that has no test set.

    Of an owner's n samples, ``fraction * n`` are for training, rounded such that every owner of two or more has both
    kinds; a single sample is for training. The split does not depend on the experiment's seed: runs with different
    seeds are evaluated on the same samples.

    Args:
        owners: the owner of each sample, numbers from 0.
        fraction: share of the training samples, above 0 and below 1.
        purpose: key with which each owner's training samples are drawn; None takes the owner's first ones, in the
            order of the data.
    """
    grouped = np.split(np.argsort(owners, kind="stable"), np.cumsum(np.bincount(owners))[:-1])
    train, test = [], []
    for owner, members in enumerate(grouped):
        if purpose is not None:
            members = generator(0, purpose, SHARED, owner).permutation(members)
        kept = min(max(round(fraction * len(members)), 1), max(len(members) - 1, 1))
        train.append(members[:kept])
        test.append(members[kept:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))
