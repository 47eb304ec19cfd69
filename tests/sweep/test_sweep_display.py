"""The lines and the bar of a sweep."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress
from sweeps import sweep

from gossamer.progress import on_live_terminal
from gossamer.sweep.display import Lines, _Bar
from gossamer.sweep.execute import Counts
from gossamer.sweep.table import State


def test_lines_in_a_pipe_have_the_first_metric_and_a_closed_one_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of = sweep(tmp_path)
    lines = Lines()
    lines.ended(of.planned[0], State("done"), Counts(1, done=1), "test loss 0.5000")
    assert capsys.readouterr().err == f"1/1  {of.planned[0].title}: done  test loss 0.5000\n"

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    lines.ended(of.planned[0], State("done"), Counts(1, done=1), "")


def test_a_terminal_has_a_bar_below_the_lines(tmp_path: Path) -> None:
    of, shown = sweep(tmp_path, seeds=2), io.StringIO()
    with Progress(console=Console(file=shown, width=100)) as progress:
        bar = _Bar(of, progress)
        bar.ended(of.planned[0], State("failed", "no space"), Counts(2, failed=1), "")
        bar.update(Counts(2, failed=1, running=1))
    assert f"1/2  {of.planned[0].title}: failed: no space" in shown.getvalue()
    assert "small  1/2 runs, 1 running" in shown.getvalue()


def test_a_terminal_that_can_only_print_lines_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for kind, live in (("xterm-256color", True), ("dumb", False), ("", True)):
        monkeypatch.setenv("TERM", kind)
        assert on_live_terminal() is live
