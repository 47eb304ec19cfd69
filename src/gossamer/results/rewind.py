"""Rewinding a run's record to a checkpoint: what was recorded after it is dropped, so that nothing is there twice."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl

from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder, atomic
from gossamer.results.recorder import segments
from gossamer.results.segment import read_segment

NETWORK = -1
"""The node number of rows about the network as a whole."""


def rewind(folder: RunFolder, cut: Cut, evaluated: Iterable[int]) -> None:
    """Leave of a record what is older than a checkpoint, and take back how the run ended. A kill at any point leaves a record
    that can be rewound again.

    Rows of metrics stay whose round (or, for an instant of the grid of time, whose time) is no later than that of their node;
    of the network's rows, those that all evaluated nodes had a part in by then. Rows of an end are dropped: there will be
    another.
    """
    for name in ("status.json", "models.safetensors", "report.html"):
        (folder.path / name).unlink(missing_ok=True)
    keep = _Keep(cut, evaluated)
    for kind in ("metrics", "events", "timeline", "graphs"):
        _rewind(folder, kind, getattr(keep, kind))


def drop_rounds(folder: RunFolder, last: int) -> None:
    """Leave of a node's own record, where it goes on, what is older than the rounds that it will run again.

    Args:
        folder: the record of one node.
        last: rounds that it has completed where it goes on.
    """

    def kept(row: dict[str, Any]) -> bool:
        moments = (row.get("moment") or "round").split(", ")
        return bool(row["round"] <= last) if "round" in moments else moments != ["end"]

    _rewind(folder, "metrics", kept)


class _Keep:
    """Which rows stay."""

    def __init__(self, cut: Cut, evaluated: Iterable[int]) -> None:
        those = [rank for rank in evaluated if rank in cut.rounds]
        self._latest, self._last_s = max(cut.rounds.values()), max(cut.times_s.values())
        # (Of evaluated nodes that are all lost, the network's rows have been complete before.)
        common = min((cut.rounds[rank] for rank in those), default=self._latest)
        common_s = min((cut.times_s[rank] for rank in those), default=self._last_s)
        self._rounds = {**cut.rounds, NETWORK: common}
        self._times_s = {**cut.times_s, NETWORK: common_s}

    def metrics(self, row: dict[str, Any]) -> bool:
        node, moments = row["node"], (row.get("moment") or "round").split(", ")
        if "round" in moments:
            return bool(row["round"] <= self._rounds.get(node, self._latest))
        return moments != ["end"] and bool(row["time_s"] < self._times_s.get(node, self._last_s))

    def events(self, row: dict[str, Any]) -> bool:
        if row["event"] == "lost" and row.get("node") in self._rounds:
            return False  # it was alive then, and will be again
        return (row.get("time_s") or 0.0) <= self._times_s.get(row.get("node", NETWORK), self._last_s)

    def timeline(self, row: dict[str, Any]) -> bool:
        return bool(row["end_s"] <= self._times_s.get(row["node"], self._last_s))

    def graphs(self, row: dict[str, Any]) -> bool:
        return bool(row["round"] <= self._latest)


def _rewind(folder: RunFolder, kind: str, kept: Any) -> None:
    table = folder.path / f"{kind}.parquet"
    if table.exists():
        _rewind_table(table, kept)
    for path in segments(folder.path, kind):
        _rewind_segment(path, kept)


def _rewind_table(path: Path, kept: Any) -> None:
    table = pl.read_parquet(path)
    mask = pl.Series([kept(row) for row in table.iter_rows(named=True)], dtype=pl.Boolean)
    if not mask.all():
        with atomic(path) as temporary:
            table.filter(mask).write_parquet(temporary)


def _rewind_segment(path: Path, kept: Any) -> None:
    # Lines stay as they are written: the rows that stay are those at these places.
    stay = [kept(row) for row in read_segment(path)]
    # (As bytes: a line may be torn within a character.)
    lines = path.read_bytes().split(b"\n")
    if not all(stay) or len(lines) > len(stay) + 1:
        kept_lines = [line + b"\n" for line, keep in zip(lines, stay, strict=False) if keep]
        with atomic(path) as temporary:
            temporary.write_bytes(b"".join(kept_lines))
