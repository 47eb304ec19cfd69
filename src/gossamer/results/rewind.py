"""Rewinding a run's record to a checkpoint: later rows are dropped, so that nothing is recorded twice."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl

from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder, atomic
from gossamer.results.recorder import NETWORK, segments
from gossamer.results.segment import read_segment


def rewind(folder: RunFolder, cut: Cut, evaluated: Iterable[int]) -> None:
    """Keep the part of a record that is older than a checkpoint, and remove the run's status. A kill at any time leaves a
    record that can be rewound again.

    Rows of metrics stay if their round (on the time grid, their time) is no later than their node's in the checkpoint;
    the network's rows stay if all evaluated nodes had contributed by then. Rows of the end are dropped: there will be
    another end.
    """
    for name in ("status.json", "models.safetensors", "report.html"):
        (folder.path / name).unlink(missing_ok=True)
    keep = _Keep(cut, evaluated)
    for kind in ("metrics", "events", "timeline", "graphs"):
        _rewind(folder, kind, getattr(keep, kind))


class _Keep:
    """Decides which rows stay."""

    def __init__(self, cut: Cut, evaluated: Iterable[int]) -> None:
        those = [rank for rank in evaluated if rank in cut.rounds]
        self._latest, self._last_s = max(cut.rounds.values()), max(cut.times_s.values())
        # If all evaluated nodes are lost, the network's rows are complete.
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
    # Lines that stay are copied unchanged.
    stay = [kept(row) for row in read_segment(path)]
    # As bytes, since an incomplete line may end within a character.
    lines = path.read_bytes().split(b"\n")
    if not all(stay) or len(lines) > len(stay) + 1:
        kept_lines = [line + b"\n" for line, keep in zip(lines, stay, strict=False) if keep]
        with atomic(path) as temporary:
            temporary.write_bytes(b"".join(kept_lines))
