"""Records that are damaged in part: what can be read of them is used, and the rest is named and kept aside."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl

from gossamer.errors import BadInput
from gossamer.results.recorder import segments
from gossamer.results.segment import read_segment

_NEEDED = {
    "metrics": ("node", "round"),
    "events": ("event",),
    "timeline": ("node", "kind", "start_s", "end_s"),
    "graphs": ("round", "edges"),
}
"""What every row has, by the kind of its table or segment."""


def damaged_files(folder: Path) -> dict[Path, str]:
    """The files of a record (of its models apart) that can't be used, and why.

    Args:
        folder: the record of one node.
    """
    found = {}
    for kind, needed in _NEEDED.items():
        for path in (folder / f"{kind}.parquet", *segments(folder, kind)):
            if path.exists() and (why := _wrong_table(path, needed)) is not None:
                found[path] = why
    for path in (folder / name for name in ("setup.json", "environment.json", "status.json")):
        if path.exists() and (why := _wrong_json(path)) is not None:
            found[path] = why
    return found


def without(folder: Path, damaged: dict[Path, str], place: Path) -> Path:
    """The same record without some files, elsewhere, as links; gives where.

    Args:
        folder: the record.
        damaged: what is left out.
        place: a folder to make it in.
    """
    sound = place / folder.name
    for path in folder.rglob("*"):
        if path.is_file() and path not in damaged:
            link = sound / path.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    return sound


def _wrong_table(path: Path, needed: tuple[str, ...]) -> str | None:
    try:
        if path.suffix == ".parquet":
            columns = set(pl.read_parquet(path).columns)
        else:
            rows = list(read_segment(path))
            columns = {name for name in needed if all(row.get(name) is not None for row in rows)}
    except (pl.exceptions.PolarsError, BadInput, OSError, ValueError) as error:
        return _line(error)
    lacking = [name for name in needed if name not in columns]
    return f"no {lacking[0]!r}; accepted: rows with {', '.join(needed)}" if lacking else None


def _wrong_json(path: Path) -> str | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return _line(error)
    return None if isinstance(value, dict) else f"holds a {type(value).__name__}; accepted: a JSON object"


def _line(error: Exception) -> str:
    return f"{' '.join(str(error).split()) or type(error).__name__:.200}"
