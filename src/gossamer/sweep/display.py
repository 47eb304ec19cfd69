"""The display of a sweep: a line for each run that ends, above a live table on a terminal; then the results."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.config import Experiment
from gossamer.errors import BadInput
from gossamer.progress import on_live_terminal
from gossamer.results.comparison import Comparison
from gossamer.results.formatting import print_table, seconds_text
from gossamer.results.segment import read_appended
from gossamer.results.tidy import finite
from gossamer.runtime.recording import stopwatch
from gossamer.sweep.execute import Counts, Quiet, SweepObserver, SweepOutcome
from gossamer.sweep.sweep import Planned, Sweep
from gossamer.sweep.table import State, metric_columns, states, summary

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LOOK_S = 0.5
"""Seconds between two looks at the folders of the runs."""


@contextmanager
def watching_sweep(sweep: Sweep, *, quiet: bool = False) -> Iterator[SweepObserver | None]:
    """An observer for a sweep: lines above a table where standard error is a terminal, lines elsewhere, none when quiet."""
    if quiet or not on_live_terminal():
        yield None if quiet else Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[said]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as progress:
        yield _LiveTable(sweep, progress)


class Lines:
    """One line for each run that ends, on standard error."""

    def __init__(self) -> None:
        self._seconds = stopwatch()

    def update(self, counts: Counts) -> None:
        """Nothing to show."""

    def ended(self, planned: Planned, state: State, counts: Counts, value: str) -> None:
        """Print how it ended."""
        said = f"{state.status}: {state.cause}" if state.cause else state.status
        done = f"{counts.skipped + counts.ended}/{counts.total}  {planned.title}: {said}"
        left = ""
        if counts.ended and counts.left:  # from the mean of the runs of this call
            left = f"{seconds_text(round(self._seconds() / counts.ended * counts.left))} left"
        with suppress(OSError):  # a full disk or a closed terminal ends the display, not the sweep
            print(*filter(None, (done, value, left)), sep="  ", file=sys.stderr, flush=True)


class _LiveTable(Lines):
    """The lines, above a live table: a row for the sweep, and one for each run under way, with round and first metric as its
    folder has them."""

    def __init__(self, sweep: Sweep, progress: Progress) -> None:
        super().__init__()
        self._sweep, self._progress, self._looked_s = sweep, progress, 0.0
        self._whole = progress.add_task(sweep.name, said="")
        self._before = {path for each in sweep.planned for path in self._segments(each)}
        self._readers: dict[Path, _Reader] = {}
        self._rows: dict[str, TaskID] = {}
        self._ended = set[str]()

    def update(self, counts: Counts) -> None:
        done = counts.skipped + counts.ended
        said = f"{done}/{counts.total} runs, {counts.running} running"
        self._progress.update(self._whole, total=counts.total, completed=done, said=said)
        if self._seconds() - self._looked_s < _LOOK_S:
            return
        self._looked_s = self._seconds()
        for each in self._sweep.planned:
            if each.run not in self._ended and (segments := self._segments(each) - self._before):
                self._show(each, max(segments))  # the executor may have begun it a second time

    def _segments(self, planned: Planned) -> set[Path]:
        return set((self._sweep.folder / planned.run).glob("*/segments/metrics-0.jsonl"))

    def _show(self, planned: Planned, segment: Path) -> None:
        last = planned.experiment.stop.rounds
        if planned.run not in self._rows:
            self._rows[planned.run] = self._progress.add_task(planned.title, total=last, said="")
        if segment not in self._readers:
            self._readers[segment] = _Reader(planned.experiment, segment)
        reader = self._readers[segment]
        reader.read()
        if reader.round is not None:
            said = f"round {reader.round}" + (f"/{last}" if last else "") + f"  {reader.value}"
            self._progress.update(self._rows[planned.run], completed=reader.round, said=said)

    def ended(self, planned: Planned, state: State, counts: Counts, value: str) -> None:
        super().ended(planned, state, counts, value)
        self._ended.add(planned.run)
        if planned.run in self._rows:
            self._progress.remove_task(self._rows.pop(planned.run))


class _Reader(Quiet):
    """Reads the evaluations of a run while another process records them."""

    def __init__(self, experiment: Experiment, segment: Path) -> None:
        super().__init__(experiment)
        self._segment, self._position = segment, 0

    def read(self) -> None:
        """Read what is new."""
        # The run may have just ended, or a network disk may not show all of it yet.
        with suppress(BadInput, OSError):
            rows, self._position = read_appended(self._segment, self._position)
            for row in rows:
                self.row(row)


def print_summary(sweep: Sweep, cells: Comparison, outcome: SweepOutcome) -> None:
    """Print each cell's means and differences with their confidence intervals, the failures with their causes, and the
    folder."""
    for title, head, rows in cells.tables():
        print_table(head, rows, title=title)
    if len(sweep.seeds) > 1:
        print(cells.note)
    for planned, state in outcome.failed:
        print(f"{state.status.upper()}  {planned.title}: {state.cause}")
    if outcome.failed:
        print("these runs are begun again with --retry-failed")
    if outcome.counts.left:
        print(f"STOPPED  {outcome.counts.left} runs are left; the same command goes on with them")
    print(f"results  {sweep.folder / 'results.csv'}")
    if any(state.status == "done" for state in states(sweep).values()):
        print(f"page     gossamer report {shlex.quote(str(sweep.folder))}")


def as_data(sweep: Sweep, cells: Comparison, outcome: SweepOutcome) -> dict[str, Any]:
    """The results of a sweep for scripts; numbers that are not finite are null."""
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
        "summary": {name: summary(table, name).to_dicts() for name in metric_columns(table)},
    }
