from __future__ import annotations

import logging
import math
import os
import resource
import signal
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import BadInput, RecordError
from gossamer.results.segment import Segment, read_segment

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=8)


@given(rows=st.lists(st.dictionaries(st.text(max_size=8), scalars, max_size=4), max_size=6))
def test_appended_rows_are_read_back(
    rows: list[dict[str, object]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("segment") / "metrics-0.jsonl"
    with Segment(path) as segment:
        for row in rows:
            segment.append(row)
    assert repr(list(read_segment(path))) == repr(rows)  # repr, because nan differs from itself


def test_numpy_and_torch_numbers_become_plain(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with Segment(path) as segment:
        segment.append(
            {"a": np.float32(0.5), "b": torch.tensor(3), "c": np.arange(3), "d": torch.tensor(math.inf)}
        )
    assert list(read_segment(path)) == [{"a": 0.5, "b": 3, "c": [0, 1, 2], "d": math.inf}]


def test_unrecordable_value_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with Segment(path) as segment, pytest.raises(BadInput, match="can't record a set"):
        segment.append({"node": 0, "x": {1, 2}})
    assert path.read_bytes() == b""


@given(cut=st.integers(1, 200), text=st.text(max_size=5))
def test_only_a_torn_last_line_is_lost(cut: int, text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("torn") / "s.jsonl"
    rows = [{"node": i, "text": text} for i in range(5)]
    with Segment(path) as segment:
        for row in rows:
            segment.append(row)
    content = path.read_bytes()
    remaining = content[: max(0, len(content) - cut)]
    path.write_bytes(remaining)
    lines = content.splitlines(keepends=True)
    kept = sum(len(remaining) >= end for end in accumulate(map(len, lines)))
    assert list(read_segment(path)) == rows[:kept]
    with Segment(path) as segment:  # a row appended after the crash starts a new line
        segment.append({"again": 1})
    assert list(read_segment(path)) == [*rows[:kept], {"again": 1}]


def test_a_torn_line_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text('{"a": 1}\n{"a": ')
    with caplog.at_level(logging.WARNING):
        assert list(read_segment(path)) == [{"a": 1}]
    assert "line 2 is torn" in caplog.text


def test_failed_append_leaves_no_partial_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics-0.jsonl"
    with Segment(path, "run") as segment:
        segment.append({"a": 1})
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
        try:
            with pytest.raises(RecordError, match=r"metrics-0.jsonl can't be written: File too large$"):
                segment.append({"a": 2, "text": "longer than the limit"})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        segment.append({"a": 3})  # as at the end of a run, with free space again
    assert list(read_segment(path, "run")) == [{"a": 1}, {"a": 3}]


@pytest.mark.parametrize("line", ['{"a": ', "[1]", "\x00\x00"])
def test_broken_inner_line_names_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n{{"a": 2}}\n')
    with pytest.raises(BadInput, match=r"s\.jsonl, line 2"):
        list(read_segment(path))


def test_killed_process_keeps_all_appended_rows(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    code = (
        "import sys; from pathlib import Path; from gossamer.results.segment import Segment\n"
        "segment = Segment(Path(sys.argv[1]))\n"
        "for i in range(100): segment.append({'i': i})\n"
        "print('written', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert [row["i"] for row in read_segment(path)] == list(range(100))
