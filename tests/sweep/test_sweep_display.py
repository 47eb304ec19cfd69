"""The live table of a sweep, and what its runs print beside it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sweeps import TINY, sweep

from gossamer import Experiment, Sweep, run_sweep
from gossamer.progress import on_live_terminal
from gossamer.runtime.recording import NETWORK
from gossamer.sweep.display import Lines, _Cells
from gossamer.sweep.execute import Counts, Position, _Reporter
from gossamer.sweep.pool import LocalPool
from gossamer.sweep.table import State


def shown(table: _Cells, console: Console) -> list[str]:
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def table_of(of: Sweep, **size: int) -> tuple[_Cells, Console]:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, **{"width": 80, **size})
    return _Cells(of, console), console


def test_a_row_a_cell_has_the_means_of_its_runs_under_way_and_stays(tmp_path: Path) -> None:
    of = sweep(tmp_path, seeds=2, cells={"slow": {"optimizer.lr": 0.01}, "fast": {}, "later": {"nodes": 3}})
    one, two, third = (each.run for each in of.planned[:3])
    table, console = table_of(of)
    assert "slow" not in "".join(shown(table, console))
    at = {one: Position(1, "test_accuracy", 0.25), two: Position(2, "test_accuracy", 0.75), third: Position()}
    table.update(Counts(6, running=3), at)
    said = shown(table, console)
    assert said[0].startswith("small  0/6 runs, 3 running")
    assert [line.split() for line in said[1:]] == [
        ["cell", "runs", "round"],
        ["slow", "0/2", "2/2", "test", "accuracy", "0.5000"],
        ["fast", "0/2", "0/2"],
    ]
    table.ended(of.planned[0], State("done"), Counts(6, done=1))
    assert shown(table, console)[2].split() == ["slow", "1/2", "2/2", "test", "accuracy", "0.7500"]
    table.ended(of.planned[1], State("failed", "no space"), Counts(6, done=1, failed=1))
    said = shown(table, console)
    assert said[2].split() == ["slow", "2/2", "2/2", "test", "accuracy", "0.5000"]  # of both
    assert "1 failed" in said[0]
    assert "slow, seed 2: failed: no space" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("width", "height"), [(80, 6), (20, 6), (24, 3), (80, 1)])
def test_a_small_terminal_shows_the_cells_that_run(tmp_path: Path, width: int, height: int) -> None:
    of = sweep(tmp_path, grid={"batch_size": [1, 2, 3, 4, 5]})
    table, console = table_of(of, width=width, height=height)
    positions = {each.run: Position(1, "test_accuracy", 0.25) for each in of.planned}
    for each in of.planned[1:]:
        table.ended(each, State("done"), Counts(5, done=4))
    table.update(Counts(5, done=4, running=1), positions)
    said = shown(table, console)
    assert len(said) <= max(height, 4) + 1
    assert all(len(line) <= width for line in said)
    assert ("batch_size=1" if width == 80 else "b") in said[2]  # the one that runs


def test_lines_in_a_pipe_have_the_first_metric_and_a_closed_one_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of = sweep(tmp_path)
    lines = Lines()
    lines.update(Counts(1, running=1), {of.planned[0].run: Position(2, "test_loss", 0.5)})
    lines.ended(of.planned[0], State("done"), Counts(1, done=1))
    assert capsys.readouterr().err == f"1/1  {of.planned[0].title}: done  test loss 0.5000\n"

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    lines.ended(of.planned[0], State("done"), Counts(1, done=1))


def test_a_terminal_that_can_only_print_lines_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for kind, live in (("xterm-256color", True), ("dumb", False), ("", True)):
        monkeypatch.setenv("TERM", kind)
        assert on_live_terminal() is live


def test_a_run_says_through_a_file_how_far_it_is(tmp_path: Path) -> None:
    file = tmp_path / ".progress/a.json"
    reporter = _Reporter(Experiment.of(TINY), file)
    row: dict[str, Any] = {"round": 1, "moment": "round", "time_s": 1.0, "wall_s": 1.0, "bytes_sent": 8}
    reporter.row({"node": 0, **row, "test_loss": 0.5})
    reporter.row({"node": NETWORK, **row, "consensus_distance": 0.25})
    reporter.progress(rounds=7, time_s=1.0)
    assert json.loads(file.read_text()) == [1, "test_loss", 0.5]
    reporter.progress(rounds=8, time_s=1.0)  # within the second
    assert json.loads(file.read_text())[0] == 1
    file.unlink()
    file.parent.rmdir()
    file.parent.touch()  # where no folder can be made
    reporter.report()


def test_an_observer_sees_how_far_the_runs_of_other_processes_are(tmp_path: Path) -> None:
    seen: dict[str, Position] = {}

    class Watches:
        def update(self, counts: Counts, positions: Any) -> None:
            seen.update(positions)

        def ended(self, planned: Any, state: State, counts: Counts) -> None:
            assert seen[planned.run].value is not None

    of = sweep(tmp_path, seeds=2)
    assert run_sweep(of, jobs=2, observer=Watches()).counts.done == 2
    assert seen.keys() == {each.run for each in of.planned}
    for each in seen.values():
        assert (each.rounds, each.metric) == (2, "test_loss")
    assert not (of.folder / ".progress").exists()


def prints(text: str) -> None:
    """Print something as a library in a worker would."""
    print(text)
    print(text, file=sys.stderr)


def test_what_a_worker_prints_comes_through_the_standard_error_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A live display replaces it, so that lines come above the table."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with LocalPool(1) as pool:
        pool.submit(prints, "one warning").result()
    assert sys.stderr.getvalue() == "one warning\n" * 2  # type: ignore[attr-defined]
