"""The display of a sweep: a line for each run that ends, with a bar below on a terminal; then the results."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from gossamer.progress import on_live_terminal
from gossamer.results.comparison import Comparison
from gossamer.results.formatting import print_table, seconds_text
from gossamer.results.tidy import finite
from gossamer.runtime.recording import stopwatch
from gossamer.sweep.execute import Counts, SweepObserver, SweepOutcome
from gossamer.sweep.sweep import Planned, Sweep
from gossamer.sweep.table import State, metric_columns, summary


@contextmanager
def watching_sweep(sweep: Sweep, *, quiet: bool = False) -> Iterator[SweepObserver | None]:
    """An observer for a sweep: lines with a bar where standard error is a terminal, lines elsewhere, none when quiet."""
    if quiet or not on_live_terminal():
        yield None if quiet else Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("[bold]{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield _Bar(sweep, bar)


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
        self.show("  ".join(filter(None, (done, value, left))))

    def show(self, text: str) -> None:
        """Print a line."""
        with suppress(OSError):  # a full disk or a closed terminal ends the display, not the sweep
            print(text, file=sys.stderr, flush=True)


class _Bar(Lines):
    """The lines, above a live bar of the runs that have ended."""

    def __init__(self, sweep: Sweep, bar: Any) -> None:
        super().__init__()
        self._name, self._bar, self._task = sweep.name, bar, bar.add_task(sweep.name)

    def update(self, counts: Counts) -> None:
        ended = counts.skipped + counts.ended
        said = f"{self._name}  {ended}/{counts.total} runs, {counts.running} running"
        self._bar.update(self._task, description=said, total=counts.total, completed=ended)

    def show(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


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
