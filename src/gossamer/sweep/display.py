"""The display of a sweep: a line for each finished run, above a live table on a terminal, then the
results."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.errors import BadInput
from gossamer.progress import on_live_terminal
from gossamer.results.comparison import Comparison
from gossamer.results.formatting import print_table, seconds_text
from gossamer.results.segment import read_appended
from gossamer.results.tidy import finite
from gossamer.runtime.recording import stopwatch
from gossamer.sweep.cells import Planned
from gossamer.sweep.execute import Counts, SilentDisplay, SweepObserver, SweepOutcome
from gossamer.sweep.sweep import Sweep
from gossamer.sweep.table import RunState, metric_columns, states, summary

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_CHECK_S = 0.5
"""Seconds between two checks of the runs' folders."""


@contextmanager
def watching_sweep(sweep: Sweep, *, quiet: bool = False) -> Iterator[SweepObserver]:
    """An observer for a sweep: lines above a live table if standard error is a terminal, only lines
    otherwise, nothing if quiet."""
    if quiet or not on_live_terminal():
        yield SweepObserver() if quiet else SweepLines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as progress:
        yield _LiveTable(sweep, progress)


class SweepLines(SweepObserver):
    """Prints one line for each finished run on standard error."""

    def __init__(self) -> None:
        self._seconds, self._begun = stopwatch(), False

    def update(self, counts: Counts) -> None:
        if not (self._begun or counts.ended):  # the first run takes a while
            self.say(f"{counts.left} of {counts.total} runs to do; a line follows for each that ends")
        self._begun = True

    def say(self, text: str) -> None:
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)

    def ended(self, planned: Planned, state: RunState, counts: Counts, value: str) -> None:
        text = f"{state.status}: {state.cause}" if state.cause else state.status
        done = f"{counts.skipped + counts.ended}/{counts.total}  {planned.title}: {text}"
        left = ""
        if counts.ended and counts.left:
            left = f"about {seconds_text(round(self._left_s(counts)))} left"
        with suppress(OSError):  # a full disk or a closed terminal ends the display, not the sweep
            print(*filter(None, (done, value, left)), sep="  ", file=sys.stderr, flush=True)

    def _left_s(self, counts: Counts) -> float:
        """Seconds until the end at the pace of this call, in which the runs under way count as half done."""
        under_way = max(counts.running - 1, 0) / 2  # without the one that has just ended
        return self._seconds() / (counts.ended + under_way) * (counts.left - under_way)


class _LiveTable(SweepLines):
    """The lines, above a live table with a row for the sweep and one for each running run."""

    def __init__(self, sweep: Sweep, progress: Progress) -> None:
        super().__init__()
        self._sweep, self._progress, self._looked_s = sweep, progress, 0.0
        self._total = progress.add_task(sweep.name, text="")
        self._running = {planned.run: planned for planned in sweep.planned}
        self._before = {path for run in self._running for path in self._segments(run)}
        self._rows: dict[str, _Row] = {}

    def update(self, counts: Counts) -> None:
        done = counts.skipped + counts.ended
        elsewhere = f", {counts.elsewhere} in other processes" if counts.elsewhere else ""
        text = f"{done}/{counts.total} runs, {counts.running} running{elsewhere}"
        self._progress.update(self._total, total=counts.total, completed=done, text=text)
        if self._seconds() - self._looked_s < _CHECK_S:
            return
        self._looked_s = self._seconds()
        for run, planned in self._running.items():
            # The executor may have started a run twice; the last one counts.
            if segment := max(self._segments(run) - self._before, default=None):
                row = self._rows.get(run)
                if row is None or row.segment != segment:
                    task = None if row is None else row.task
                    row = self._rows[run] = _Row(planned, segment, self._progress, task)
                row.look()

    def ended(self, planned: Planned, state: RunState, counts: Counts, value: str) -> None:
        super().ended(planned, state, counts, value)
        self._running.pop(planned.run, None)
        if row := self._rows.pop(planned.run, None):
            self._progress.remove_task(row.task)

    def _segments(self, run: str) -> set[Path]:
        return set((self._sweep.folder / run).glob("*/segments/metrics-0.jsonl"))


class _Row(SilentDisplay):
    """The row of a run, with the round and first metric that another process records in its folder."""

    def __init__(self, planned: Planned, segment: Path, progress: Progress, task: TaskID | None) -> None:
        super().__init__(planned.experiment)
        self.segment, self._position, self._progress = segment, 0, progress
        self._last = planned.experiment.stop.rounds
        self.task = progress.add_task(planned.title, total=self._last, text="") if task is None else task

    def look(self) -> None:
        """Read and show new values."""
        # The run may have just ended, or a network file system may not show all of it yet.
        with suppress(BadInput, OSError):
            rows, self._position = read_appended(self.segment, self._position)
            for row in rows:
                self.row(row)
        if self.round is not None:
            text = f"round {self.round}" + (f"/{self._last}" if self._last else "") + f"  {self.value}"
            self._progress.update(self.task, completed=self.round, text=text)


def print_summary(sweep: Sweep, cells: Comparison, outcome: SweepOutcome) -> None:
    """Print each cell's means and differences with their confidence intervals, the failures with their causes, and the
    folder."""
    for title, head, rows in cells.tables():
        print_table(head, rows, title=title)
    print(*cells.notes, sep="\n")
    for planned, state in outcome.failed:
        print(f"{state.status.upper()}  {planned.title}: {state.cause}")
    if outcome.failed:
        print("--retry-failed starts these runs again")
    if outcome.counts.left:
        print(f"STOPPED  {outcome.counts.left} runs are left; the same command continues with them")
    print(f"results  {sweep.folder / 'results.csv'}")
    if any(state.status == "done" for state in states(sweep).values()):
        print(f"page     gossamer report {shlex.quote(str(sweep.folder))}")


def as_data(sweep: Sweep, cells: Comparison, outcome: SweepOutcome) -> dict[str, Any]:
    """The results of a sweep for scripts. Non-finite numbers are null."""
    table = finite(sweep.results())
    failures = [
        {
            "cell": planned.cell.name,
            "seed": planned.experiment.seed,
            "status": state.status,
            "cause": state.cause,
        }
        for planned, state in outcome.failed
    ]
    return {
        "sweep": str(sweep.folder),
        **asdict(outcome.counts),
        "stopped": outcome.stopped,
        "failures": failures,
        "results": table.to_dicts(),
        "comparison": finite(cells.rows).to_dicts(),
        "notes": [*outcome.notes, *cells.notes],
        "summary": {name: summary(table, name).to_dicts() for name in metric_columns(table)},
    }
