"""The lines and the live table of a sweep."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from sweeps import sweep

from gossamer import run_sweep
from gossamer.progress import on_live_terminal
from gossamer.results.folder import RunFolder
from gossamer.results.segment import Segment
from gossamer.runtime.recording import NETWORK
from gossamer.sweep.display import SweepLines, _LiveTable, _Row, watching_sweep
from gossamer.sweep.execute import Counts
from gossamer.sweep.pool import LocalPool
from gossamer.sweep.sweep import Planned
from gossamer.sweep.table import State


def test_lines_in_a_pipe_have_the_first_metric_and_a_closed_one_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of = sweep(tmp_path)
    lines = SweepLines()
    lines.ended(of.planned[0], State("done"), Counts(1, done=1), "test loss 0.5000")
    assert capsys.readouterr().err == f"1/1  {of.planned[0].title}: done  test loss 0.5000\n"

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    lines.ended(of.planned[0], State("done"), Counts(1, done=1), "")


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Standard error as a terminal of 120 columns."""
    shown = io.StringIO()
    shown.isatty = lambda: True  # type: ignore[method-assign]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", shown)
        for name, value in (("TERM", "xterm"), ("COLUMNS", "120"), ("LINES", "40")):
            patch.setenv(name, value)
        yield shown


def test_a_terminal_has_a_row_for_each_run_under_way_with_its_newest_whole_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = sweep(tmp_path, seeds=2)
    first, second = of.planned

    def begun(planned: Planned) -> Segment:
        yaml = planned.experiment.to_yaml()
        folder = RunFolder.create(of.folder, planned.run, experiment=yaml, environment={})
        return folder.segment("metrics")

    with begun(second):  # by an earlier call, which was killed
        pass
    with terminal(monkeypatch) as shown, watching_sweep(of) as table, begun(first) as metrics:
        assert isinstance(table, _LiveTable)

        def rows() -> list[str]:
            table._looked_s = -1.0
            table.update(Counts(2, running=1))
            shown.truncate(0)
            table._progress.refresh()
            return [line for line in shown.getvalue().splitlines() if "small" in line or "seed" in line]

        assert ["seed 1" in row for row in rows()] == [False, True]
        assert "0/2 runs, 1 running" in rows()[0]
        row = {"moment": "round", "time_s": 1.0, "wall_s": 1.0}
        for round, values in enumerate(([0.25, 0.75], [1.0, 2.0])):
            for rank, value in enumerate(values):
                metrics.append({"node": rank, "round": round, "test_loss": value, **row})
            metrics.append({"node": NETWORK, "round": round, "consensus_distance": 0.1, **row})
            assert f"round {round}/2  test loss {sum(values) / 2:.4f}" in rows()[1]
        metrics.append({"node": 0, "round": 2, "test_loss": 3.0, **row})
        with metrics.path.open("a") as file:
            file.write('{"crc32": "0')  # a row that is being written
        assert "round 1/2  test loss 1.5000" in rows()[1]
        with begun(first):  # by the executor, which lost the first attempt
            assert "round 1/2" in rows()[1]
        table.ended(first, State("failed", "no space"), Counts(2, failed=1), "")
        assert f"1/2  {first.title}: failed: no space" in shown.getvalue()
        assert len(rows()) == 1


@pytest.mark.parametrize("jobs", [2, None], ids=["processes", "an executor"])
def test_a_running_sweep_shows_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int | None
) -> None:
    seen = tmp_path / "seen"
    algorithm = {"name": "sweeps:WaitsToBeSeen", "seen": str(seen)}
    of = sweep(tmp_path, seeds=jobs or 1, base={"algorithm": algorithm, "engine": {"workers": 1}})
    with terminal(monkeypatch) as shown, watching_sweep(of) as table, ThreadPoolExecutor(1) as thread:
        assert isinstance(table, _LiveTable)
        look = _Row.look

        def looks(row: _Row) -> None:
            look(row)
            if len(
                [each for each in table._progress.tasks if "round 0/2  test loss" in each.fields["text"]]
            ) == (jobs or 1):
                seen.touch()

        monkeypatch.setattr(_Row, "look", looks)
        run_sweep(of, None if jobs else thread, jobs=jobs, observer=table)
        assert len(table._progress.tasks) == 1
    assert seen.exists()
    for each in of.planned:
        assert f"{each.title}: done  test loss" in shown.getvalue()


def prints(text: str) -> None:
    """Print something as a library in a worker would."""
    print(text)
    print(text, file=sys.stderr)


def test_what_a_worker_prints_comes_through_the_standard_error_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A live table replaces it, so that lines come above the table."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with LocalPool(1) as pool:
        pool.submit(prints, "one warning").result()
    assert sys.stderr.getvalue() == "one warning\n" * 2  # type: ignore[attr-defined]


def test_a_terminal_that_can_only_print_lines_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for kind, live in (("xterm-256color", True), ("dumb", False), ("", True)):
        monkeypatch.setenv("TERM", kind)
        assert on_live_terminal() is live
