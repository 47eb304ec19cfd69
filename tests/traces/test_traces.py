"""Everything that algorithms can notice happens in the order on record."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import traces


def test_order_of_what_authors_observe_is_that_on_record(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-W", "error", traces.__file__, tmp_path], check=True, capture_output=True
    )
    texts = {file.stem: file.read_text() for file in tmp_path.glob("*.txt")}
    assert texts.keys() == {file.name.removesuffix(".txt.gz") for file in traces.RECORDED.iterdir()}
    differences = {name: traces.first_difference(traces.recorded(name), text) for name, text in texts.items()}
    assert not [f"{name}, {where}" for name, where in differences.items() if where]


@pytest.mark.parametrize(
    ("now", "where"),
    [
        ("a\nb\nc\n", ""),
        ("a\nB\nc\n", "line 2 of 3:\n  a\n- b\n- c\n+ B\n+ c"),
        ("a\nb\n", "line 3 of 3:\n  a\n  b\n- c"),
        ("a\nb\nc\nd\n", "line 4 of 3:\n  a\n  b\n  c\n+ d"),
    ],
)
def test_first_difference_is_shown_with_its_place(now: str, where: str) -> None:
    assert traces.first_difference("a\nb\nc\n", now) == where
