from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from gossamer.errors import BadInput
from gossamer.results import plots as module
from gossamer.results.closing import compact
from gossamer.results.folder import RunFolder
from gossamer.results.plots import timeline_data
from gossamer.results.run import Run
from synthetic_run import timed

INTERVALS = [
    (0, "train", 0.0, 1.0, None, None),
    (0, "send", 1.0, 1.5, 1, 500),
    (0, "send", 1.25, 2.0, 2, 750),
    (0, "evaluate", 3.0, 9.0, None, None),
    (2, "train", 2.0, 4.0, None, None),
]


def with_timeline(out: Path, nodes: Any = 3, to_s: float = 4.0, compacted: bool = True) -> Run:
    window = {"from_s": 0.5, "to_s": to_s, "nodes": nodes}
    run = timed(out, [(0.0, [0.1] * 3), (5.0, [0.2] * 3)], evaluation={"every_s": 5.0, "timeline": window})
    folder = RunFolder.open(run.path)
    with folder.segment("timeline") as first, folder.segment("timeline", 1) as second:
        for index, (node, kind, start_s, end_s, to, nbytes) in enumerate(reversed(INTERVALS)):
            row = {"node": node, "kind": kind, "start_s": start_s, "end_s": end_s}
            (first, second)[index % 2].append(row if to is None else {**row, "to": to, "bytes": nbytes})
    if compacted:
        compact(folder)
    return Run(run.path)


def test_timeline_is_read_from_segments_or_table(tmp_path: Path) -> None:
    running, done = with_timeline(tmp_path, compacted=False), with_timeline(tmp_path)
    assert running.timeline.rows() == INTERVALS
    assert done.timeline.equals(running.timeline)
    assert not list(done.path.glob("segments/timeline*"))
    assert (done.path / "timeline.parquet").is_file()
    without = timed(tmp_path, [(0.0, [0.1])])
    assert not (without.path / "timeline.parquet").exists()
    assert without.timeline.is_empty()
    assert without.timeline.columns == done.timeline.columns


def test_page_shows_intervals_within_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_timeline(tmp_path)
    data = timeline_data(run)
    assert data is not None
    assert (data["from"], data["to"], data["nodes"]) == (0.5, 4.0, [0, 1, 2])
    assert data["kinds"] == {
        "train": {"node": [0, 2], "start": [0.5, 2.0], "end": [1.0, 4.0]},
        "evaluate": {"node": [0], "start": [3.0], "end": [4.0]},
        "send": {"node": [0, 0], "start": [1.0, 1.25], "end": [1.5, 2.0], "to": [1, 2], "bytes": [500, 750]},
    }
    monkeypatch.setattr(module, "MAX_DRAWN", 3)
    cut = timeline_data(run)
    assert cut is not None
    assert cut["to"] == 2.0
    assert cut["kinds"].keys() == {"train", "send"}
    assert timeline_data(timed(tmp_path, [(0.0, [0.1])])) is None


def test_incomplete_timeline_rows_are_named(tmp_path: Path) -> None:
    run = timed(tmp_path, [(0.0, [0.1])])
    with RunFolder.open(run.path).segment("timeline") as segment:
        segment.append({"node": 0, "kind": "train", "start_s": 0.0})
    with pytest.raises(BadInput, match="timeline-0.jsonl: rows without 'end_s'"):
        _ = run.timeline
    assert isinstance(run.metrics, pl.DataFrame)
