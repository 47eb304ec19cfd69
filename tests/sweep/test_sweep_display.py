"""The lines and the live table of a sweep."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from sweeps import make_sweep

from gossamer import run_sweep
from gossamer.progress import on_live_terminal
from gossamer.results.folder import RunFolder
from gossamer.results.segment import Segment
from gossamer.runtime.recording import NETWORK
from gossamer.sweep.cells import Planned
from gossamer.sweep.display import SweepLines, _LiveTable, _Row, watching_sweep
from gossamer.sweep.execute import Counts
from gossamer.sweep.pool import LocalPool
from gossamer.sweep.table import RunState


def test_piped_lines_have_first_metric_and_survive_closed_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = make_sweep(tmp_path)
    lines = SweepLines()
    lines.ended(sweep.planned[0], RunState("done"), Counts(1, done=1), "test loss 0.5000")
    assert capsys.readouterr().err == f"1/1  {sweep.planned[0].title}: done  test loss 0.5000\n"

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    lines.ended(sweep.planned[0], RunState("done"), Counts(1, done=1), "")


def test_remaining_time_counts_runs_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [planned] = make_sweep(tmp_path).planned
    monkeypatch.setattr("gossamer.sweep.display.stopwatch", lambda: lambda: 60.0)
    lines = SweepLines()
    # One at a time, 60 s each: 3 are left. Four at a time, 30 s each: after 60 s, 8 of 16 are done and, on average, 3 others
    # half done; 6.5 are left at 9.5 a minute.
    for counts, left in ((Counts(4, done=1, running=1), "3.0 min"), (Counts(16, done=8, running=4), "41 s")):
        lines.ended(planned, RunState("done"), counts, "")
        assert capsys.readouterr().err.endswith(f"  about {left} left\n")


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


def test_live_table_shows_newest_evaluation_of_running_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = make_sweep(tmp_path, seeds=2)
    first, second = sweep.planned

    def begun(planned: Planned) -> Segment:
        yaml = planned.experiment.to_yaml()
        folder = RunFolder.create(sweep.folder, planned.run, experiment=yaml, environment={})
        return folder.segment("metrics")

    with begun(second):  # an earlier attempt, which was killed
        pass
    with terminal(monkeypatch) as shown, watching_sweep(sweep) as table, begun(first) as metrics:
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
            file.write('{"crc32": "0')  # a partial row
        assert "round 1/2  test loss 1.5000" in rows()[1]
        with begun(first):  # a second attempt, after the executor lost the first
            assert "round 1/2" in rows()[1]
        table.ended(first, RunState("failed", "no space"), Counts(2, failed=1), "")
        assert f"1/2  {first.title}: failed: no space" in shown.getvalue()
        assert len(rows()) == 1


@pytest.mark.parametrize("jobs", [2, None], ids=["processes", "an executor"])
def test_a_running_sweep_shows_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int | None
) -> None:
    seen = tmp_path / "seen"
    algorithm = {"name": "sweeps:WaitsToBeSeen", "seen": str(seen)}
    sweep = make_sweep(tmp_path, seeds=jobs or 1, base={"algorithm": algorithm, "engine": {"workers": 1}})
    with terminal(monkeypatch) as shown, watching_sweep(sweep) as table, ThreadPoolExecutor(1) as thread:
        assert isinstance(table, _LiveTable)
        look = _Row.look

        def looks(row: _Row) -> None:
            look(row)
            if len(
                [task for task in table._progress.tasks if "round 0/2  test loss" in task.fields["text"]]
            ) == (jobs or 1):
                seen.touch()

        monkeypatch.setattr(_Row, "look", looks)
        run_sweep(sweep, None if jobs else thread, jobs=jobs, observer=table)
        assert len(table._progress.tasks) == 1
    assert seen.exists()
    for planned in sweep.planned:
        assert f"{planned.title}: done  test loss" in shown.getvalue()


def prints(text: str) -> None:
    """Print something as a library in a worker would."""
    print(text)
    print(text, file=sys.stderr)


def test_worker_output_goes_to_parents_standard_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A live table replaces standard error, so that lines appear above the table."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with LocalPool(1) as pool:
        pool.submit(prints, "one warning").result()
    assert sys.stderr.getvalue() == "one warning\n" * 2  # type: ignore[attr-defined]


def test_dumb_terminal_is_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for kind, live in (("xterm-256color", True), ("dumb", False), ("", True)):
        monkeypatch.setenv("TERM", kind)
        assert on_live_terminal() is live
