from __future__ import annotations

import re
from pathlib import Path

import pytest

from gossamer.errors import BadInput
from gossamer.results.folder import RunFolder
from gossamer.results.plots import Window, choose, timeline_data, timeline_figure, window
from gossamer.results.run import Run
from synthetic_run import timed


def recorded_run(out: Path, nodes: object = 20, rows: int = 10) -> Run:
    """A run that recorded from 0.5 s to its end at 5 s; node 3 trains in the first half of every second."""
    asked = {"from_s": 0.5, "to_s": 99.0, "nodes": nodes}
    run = timed(out, [(0.0, [0.1] * 20), (5.0, [0.2] * 20)], evaluation={"every_s": 5.0, "timeline": asked})
    with RunFolder.open(run.path).segment("timeline") as segment:
        for second in range(rows):
            segment.append({"node": 3, "kind": "train", "start_s": float(second), "end_s": second + 0.5})
    return Run(run.path)


@pytest.mark.parametrize(
    ("span", "nodes", "chosen"),
    [
        ("1:2", None, Window(1.0, 2.0, tuple(range(20)))),
        ("0:2.25", "3", Window(0.5, 2.25, (3,))),
        ("-1:1e3", "8-10, 3,0,9", Window(0.5, 5.0, (0, 3, 8, 9, 10))),
        (None, "7-7", Window(0.5, 5.0, (7,))),
    ],
)
def test_a_part_of_a_timeline_is_chosen(
    tmp_path: Path, span: str | None, nodes: str | None, chosen: Window
) -> None:
    assert choose([recorded_run(tmp_path)], span, nodes) == chosen


def test_nothing_asked_is_nothing_chosen(tmp_path: Path) -> None:
    run = timed(tmp_path, [(0.0, [0.1])])
    assert choose([run, run], None, None) is None
    assert window(run) is None


@pytest.mark.parametrize("text", ["3", "3:", ":", "a:b", "2:1", "1:1", "1:2:3", "nan:2", "0:0.5", "5:6", ""])
def test_a_span_that_is_none_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        BadInput,
        match=rf"^--window {re.escape(text)}: accepted: FROM:TO in seconds, FROM before TO; the timeline is recorded"
        r" from 0\.5 to 5$",
    ):
        choose([recorded_run(tmp_path)], text, None)


@pytest.mark.parametrize(
    "text",
    ["20", "0,20", "18-21", "3-1", "a", "0,,1", "-1", "1-", "0-999999999", "0-99999999999999", "", "٣"],
)
def test_nodes_that_were_not_recorded_are_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInput, match=rf"^--nodes {re.escape(text)}: accepted: ranks .* recorded$"):
        choose([recorded_run(tmp_path)], None, text)


def test_it_is_of_one_run_that_recorded_one(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    with pytest.raises(BadInput, match="--nodes: got 2 runs; accepted: one"):
        choose([run, run], None, "1")
    with pytest.raises(BadInput, match="--window: got 2 runs; accepted: one"):
        choose([run, run], "1:2", None)
    with pytest.raises(BadInput, match="no timeline was recorded"):
        choose([recorded_run(tmp_path, rows=0)], "1:2", None)


def test_the_page_and_the_picture_show_the_part(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = recorded_run(tmp_path)
    part = choose([run], "1.25:3", "0,3")
    data = timeline_data(run, part)
    assert data is not None
    assert (data["from"], data["to"], data["cut"], data["nodes"]) == (1.25, 3.0, False, [0, 3])
    assert data["kinds"] == {"train": {"node": [3, 3], "start": [1.25, 2.0], "end": [1.5, 2.5]}}
    [axes] = timeline_figure(run, part).axes
    assert axes.get_xlim() == (1.25, 3.0)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "3"]


def test_a_part_in_which_all_wait_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = recorded_run(tmp_path)
    part = choose([run], "1.6:1.9", None)
    data = timeline_data(run, part)
    assert data is not None
    assert data["kinds"] == {}
    [axes] = timeline_figure(run, part).axes
    assert not [path for collection in axes.collections for path in collection.get_paths()]
