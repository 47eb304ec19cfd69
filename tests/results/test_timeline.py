from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from gossamer.errors import BadInput
from gossamer.results import plots as module
from gossamer.results.folder import RunFolder
from gossamer.results.plots import Window, timeline_data, timeline_figure, window, write_timeline
from gossamer.results.recorder import compact
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
    asked = {"from_s": 0.5, "to_s": to_s, "nodes": nodes}
    run = timed(out, [(0.0, [0.1] * 3), (5.0, [0.2] * 3)], evaluation={"every_s": 5.0, "timeline": asked})
    folder = RunFolder.open(run.path)
    with folder.segment("timeline") as first, folder.segment("timeline", 1) as second:
        for index, (node, kind, start_s, end_s, to, nbytes) in enumerate(reversed(INTERVALS)):
            row = {"node": node, "kind": kind, "start_s": start_s, "end_s": end_s}
            (first, second)[index % 2].append(row if to is None else {**row, "to": to, "bytes": nbytes})
    if compacted:
        compact(folder)
    return Run(run.path)


def test_a_timeline_is_read_from_segments_and_from_its_table(tmp_path: Path) -> None:
    running, done = with_timeline(tmp_path, compacted=False), with_timeline(tmp_path)
    assert running.timeline.rows() == INTERVALS
    assert done.timeline.equals(running.timeline)
    assert not list(done.path.glob("segments/timeline*"))
    assert (done.path / "timeline.parquet").is_file()
    without = timed(tmp_path, [(0.0, [0.1])])
    assert not (without.path / "timeline.parquet").exists()
    assert without.timeline.is_empty()
    assert without.timeline.columns == done.timeline.columns


def test_a_window_ends_with_its_run(tmp_path: Path) -> None:
    assert window(with_timeline(tmp_path, nodes=[2, 1], to_s=99.0)) == Window(0.5, 5.0, (1, 2))
    assert window(timed(tmp_path, [(0.0, [0.1])])) is None


def test_the_page_has_what_lies_in_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_timeline(tmp_path)
    data = timeline_data(run)
    assert data is not None
    assert (data["from"], data["to"], data["cut"], data["nodes"]) == (0.5, 4.0, False, [0, 1, 2])
    assert data["kinds"] == {
        "train": {"node": [0, 2], "start": [0.5, 2.0], "end": [1.0, 4.0]},
        "evaluate": {"node": [0], "start": [3.0], "end": [4.0]},
        "send": {"node": [0, 0], "start": [1.0, 1.25], "end": [1.5, 2.0], "to": [1, 2], "bytes": [500, 750]},
    }
    monkeypatch.setattr(module, "MOST_DRAWN", 3)
    cut = timeline_data(run)
    assert cut is not None
    assert (cut["to"], cut["cut"]) == (2.0, True)
    assert cut["kinds"].keys() == {"train", "send"}
    assert timeline_data(timed(tmp_path, [(0.0, [0.1])])) is None


def test_the_picture_has_a_lane_for_each_node(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = with_timeline(tmp_path)
    [axes] = timeline_figure(run, window(run)).axes
    assert axes.get_xlim() == (0.5, 4.0)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2"]
    spans = [
        (path.vertices[:, 0].min(), path.vertices[:, 0].max(), round(path.vertices[:, 1].mean(), 1))
        for collection in axes.collections
        for path in collection.get_paths()
    ]
    drawn = [(start, end) for start, end, _ in spans]
    assert sorted(drawn) == sorted((start, end) for _, _, start, end, _, _ in INTERVALS)
    write_timeline([run], tmp_path / "pictures" / "t.svg")
    assert re.search(r"<svg\b", (tmp_path / "pictures" / "t.svg").read_text())
    write_timeline([run], tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_bad_calls_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_timeline(tmp_path)
    with pytest.raises(BadInput, match="got 2 runs; accepted: one"):
        write_timeline([run, run], tmp_path / "t.svg")
    with pytest.raises(BadInput, match=r"accepted: a file \*.svg, \*.png, \*.pdf"):
        write_timeline([run], tmp_path / "t.jpg")
    with pytest.raises(BadInput, match="no timeline was recorded; accepted: .*evaluation.timeline"):
        write_timeline([timed(tmp_path, [(0.0, [0.1])])], tmp_path / "t.svg")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"--timeline .*file"):
        write_timeline([run], tmp_path / "file" / "t.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BadInput, match=r"pip install 'gossamer\[report\]'"):
        write_timeline([run], tmp_path / "t.svg")


def test_rows_without_what_they_need_are_named(tmp_path: Path) -> None:
    run = timed(tmp_path, [(0.0, [0.1])])
    with RunFolder.open(run.path).segment("timeline") as segment:
        segment.append({"node": 0, "kind": "train", "start_s": 0.0})
    with pytest.raises(BadInput, match="timeline-0.jsonl: rows without 'end_s'"):
        _ = run.timeline
    assert isinstance(run.metrics, pl.DataFrame)


def test_edges_do_not_look_like_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    run = with_timeline(tmp_path)

    def edges() -> set[float]:
        [axes] = timeline_figure(run, window(run)).axes
        return {float(width) for collection in axes.collections for width in collection.get_linewidths()}

    assert edges() == {0.4}
    monkeypatch.setattr(
        module, "MOST_EDGED", 0.5
    )  # a lane: there are three; one interval is of evaluation, two of each other kind
    assert edges() == {0.0, 0.4}
