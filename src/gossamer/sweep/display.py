"""The display of a sweep: a live bar on a terminal, otherwise a line per run; then the table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from statistics import fmean
from typing import Any

from gossamer.results.comparison import Comparison
from gossamer.results.formatting import print_table
from gossamer.results.run import load_run
from gossamer.results.tidy import finite
from gossamer.runtime.recording import stopwatch
from gossamer.sweep.execute import Counts, SweepOutcome
from gossamer.sweep.sweep import Planned, Sweep
from gossamer.sweep.table import ENDED_BADLY, State, metric_columns, states, summary


@contextmanager
def watching_sweep(name: str, *, quiet: bool = False) -> Iterator[Lines | None]:
    """An observer for a sweep: a bar where standard error is a terminal, lines elsewhere, none when quiet."""
    if quiet or not sys.stderr.isatty():
        yield None if quiet else Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[figures]}"),
        TextColumn("elapsed"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield _Bar(bar, name)


class Lines:
    """One line for each run that ends, on standard error."""

    def __init__(self) -> None:
        self._clock = stopwatch()

    def update(self, counts: Counts) -> None:
        """Nothing to show."""

    def ended(self, planned: Planned, state: State, counts: Counts) -> None:
        """Print how it ended."""
        said = f"{state.status}: {state.cause}" if state.cause else state.status
        line = f"{counts.skipped + counts.ended}/{counts.total}  {planned.title}: {said}  {self.left(counts)}"
        print(line.rstrip(), file=sys.stderr, flush=True)

    def left(self, counts: Counts) -> str:
        """The estimated time left, from the mean of the runs of this call."""
        if not counts.ended or not counts.left:
            return ""
        seconds = self._clock() / counts.ended * counts.left
        return f"{seconds:.0f} s left" if seconds < 120 else f"{seconds / 60:.0f} min left"


class _Bar(Lines):
    """A live bar over all runs; those that fail or are lost are named above it."""

    def __init__(self, bar: Any, name: str) -> None:
        super().__init__()
        self._bar, self._task = bar, bar.add_task(name, total=None, figures="", left="")

    def update(self, counts: Counts) -> None:
        ended = counts.skipped + counts.ended
        figures = f"{ended}/{counts.total}, {counts.running} running"
        for status in ENDED_BADLY:
            figures += f", [red]{count} {status}[/]" if (count := getattr(counts, status)) else ""
        shown = {"completed": ended, "total": counts.total, "figures": figures, "left": self.left(counts)}
        self._bar.update(self._task, **shown)

    def ended(self, planned: Planned, state: State, counts: Counts) -> None:
        self.update(counts)
        if state.cause is not None:
            said = f"{planned.title}: {state.status}: {state.cause}"
            self._bar.console.print(said, markup=False, highlight=False)


def print_plan(sweep: Sweep, chosen: tuple[Planned, ...]) -> None:
    """The cells, how many runs there are, and how long those that are left will take, by the ones that are done."""
    names = dict.fromkeys(each.cell.name for each in chosen)
    print(*names, sep="\n")
    cells, seeds = (f"{word}{'s' * (len(of) > 1)}" for word, of in (("cell", names), ("seed", sweep.seeds)))
    listed = ", ".join(map(str, sweep.seeds))
    runs = {each.run for each in chosen}
    print(f"{len(names)} {cells}, {seeds} {listed}: {len(chosen)} experiments, {len(runs)} runs")
    at = states(sweep)
    folders = [at[run].folder for run in runs if at[run].status == "done"]
    walls = [wall for folder in folders if folder and (wall := load_run(folder).wall_s) is not None]
    if not walls:
        print("no run is done that would say how long they take; --only CELL --set seeds=[1] does one")
        return
    hours = (len(runs) - len(folders)) * fmean(walls) / 3600
    done = f"{len(folders)} of {len(runs)} runs done, in {fmean(walls):.1f} s on average"
    print(f"{done}; if the others take as long: {hours:.2g} h, one at a time")


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
    return {
        "sweep": str(sweep.folder),
        **asdict(outcome.counts),
        "stopped": outcome.stopped,
        "failures": [
            {
                "cell": planned.cell.name,
                "seed": planned.experiment.seed,
                "status": state.status,
                "cause": state.cause,
            }
            for planned, state in outcome.failed
        ],
        "results": table.to_dicts(),
        "comparison": finite(cells.rows).to_dicts(),
        "summary": {name: summary(table, name).to_dicts() for name in metric_columns(table)},
    }
