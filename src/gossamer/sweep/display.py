"""The display of a sweep: a live table of its cells on a terminal, otherwise a line per run; then the results."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from statistics import fmean
from typing import Any

from gossamer.progress import on_live_terminal
from gossamer.results.comparison import Comparison
from gossamer.results.formatting import metric_title, numerals, print_table
from gossamer.results.tidy import finite
from gossamer.runtime.recording import stopwatch
from gossamer.sweep.execute import Counts, Position, SweepOutcome
from gossamer.sweep.sweep import Planned, Sweep
from gossamer.sweep.table import ENDED_BADLY, State, metric_columns, summary


@contextmanager
def watching_sweep(sweep: Sweep, *, quiet: bool = False) -> Iterator[Lines | None]:
    """An observer for a sweep: a table where standard error is a terminal, lines elsewhere, none when quiet."""
    if quiet or not on_live_terminal():
        yield None if quiet else Lines()
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    table = _Cells(sweep, console)
    with Live(table, console=console, refresh_per_second=5):
        yield table


class Lines:
    """One line for each run that ends, on standard error."""

    def __init__(self) -> None:
        self._clock = stopwatch()
        self._positions: Mapping[str, Position] = {}

    def update(self, counts: Counts, positions: Mapping[str, Position]) -> None:
        """Keep how far the runs are."""
        self._positions = positions

    def ended(self, planned: Planned, state: State, counts: Counts) -> None:
        """Print how it ended."""
        said = f"{state.status}: {state.cause}" if state.cause else state.status
        value = "" if state.cause else value_text([self._positions.get(planned.run, Position())])
        done = f"{counts.skipped + counts.ended}/{counts.total}  {planned.title}: {said}"
        with suppress(OSError):  # a full disk or a closed terminal ends the display, not the sweep
            print(*filter(None, (done, value, self.left(counts))), sep="  ", file=sys.stderr, flush=True)

    def left(self, counts: Counts) -> str:
        """The estimated time left, from the mean of the runs of this call."""
        if not counts.ended or not counts.left:
            return ""
        seconds = self._clock() / counts.ended * counts.left
        return f"{seconds:.0f} s left" if seconds < 120 else f"{seconds / 60:.0f} min left"


def value_text(positions: Sequence[Position]) -> str:
    """The first metric of some runs, as the mean over those that have recorded it."""
    known = [each for each in positions if each.metric is not None and each.value is not None]
    if not known or known[0].metric is None:
        return ""
    mean = fmean(each.value for each in known if each.value is not None)
    return f"{metric_title(known[0].metric)} {numerals(mean)[0]}"


class _Cells(Lines):
    """A live table: a line for the sweep, and one for each cell with a run that has begun in this call, with rounds and first
    metric as means over its runs under way, or at the end over all. Runs that fail or are lost are named above it."""

    def __init__(self, sweep: Sweep, console: Any) -> None:
        super().__init__()
        self._name, self._console, self._counts = sweep.name, console, Counts(0)
        self._cells: dict[str, dict[str, Planned]] = {}
        for each in sweep.planned:
            self._cells.setdefault(each.short, {})[each.run] = each
        self._ended: dict[str, State] = {}

    def update(self, counts: Counts, positions: Mapping[str, Position]) -> None:
        self._counts, self._positions = counts, positions

    def ended(self, planned: Planned, state: State, counts: Counts) -> None:
        self._counts, self._ended[planned.run] = counts, state
        if state.cause is not None:
            said = f"{planned.title}: {state.status}: {state.cause}"
            self._console.print(said, markup=False, highlight=False)

    def __rich__(self) -> Any:
        """What is shown now; cells with runs under way have the room before others."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        counts = self._counts
        figures = [f"{counts.skipped + counts.ended}/{counts.total} runs", f"{counts.running} running"]
        figures += [f"{count} {status}" for status in ENDED_BADLY if (count := getattr(counts, status))]
        figures += filter(None, (f"{self._clock():.0f} s", self.left(counts)))
        shown = Table(box=None, pad_edge=False)
        for heading in ("cell", "runs", "round"):
            shown.add_column(heading, no_wrap=True, overflow="ellipsis")
        shown.add_column("", no_wrap=True, min_width=12)
        begun = {
            short: runs
            for short, runs in self._cells.items()
            if not runs.keys().isdisjoint({*self._positions, *self._ended})
        }
        newest = list(begun)[::-1]
        first = sorted(newest, key=lambda short: not self._going(begun[short]))
        room = {*first[: max(self._console.height - 4, 1)]}
        for short, runs in begun.items():
            if short in room:
                shown.add_row(Text(short), *self._row(runs))
        hidden = [f"and {len(begun) - len(room)} more cells"] if len(begun) > len(room) else []
        line = Text(f"{self._name}  {', '.join(figures)}", no_wrap=True, overflow="ellipsis", style="bold")
        return Group(line, shown, *hidden)

    def _going(self, runs: Mapping[str, Planned]) -> list[str]:
        return [run for run in runs if run in self._positions and run not in self._ended]

    def _row(self, runs: Mapping[str, Planned]) -> tuple[str, str, str]:
        going, ended = self._going(runs), [run for run in runs if run in self._ended]
        positions = [self._positions[run] for run in going or ended if run in self._positions]
        rounds = f"{fmean(each.rounds for each in positions):.0f}" if positions else ""
        last = next(iter(runs.values())).experiment.stop.rounds
        return (
            f"{len(ended)}/{len(runs)}",
            f"{rounds}/{last}" if last and rounds else rounds,
            value_text(positions),
        )


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
