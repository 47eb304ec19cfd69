"""The progress display of a run: a live bar on a terminal and in a notebook, elsewhere one line for each evaluation."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from html import escape
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gossamer.results.formatting import bytes_text, numerals
from gossamer.runtime.recording import NETWORK, stopwatch

if TYPE_CHECKING:
    from gossamer.config import Experiment

log = logging.getLogger("gossamer")

LEAST_SHARE = 0.02
"""The remaining time is estimated from this share of the run on."""
QUIET_S = 10.0
"""After this many seconds without a line, one says how far the run is. Each such line doubles the time."""


class Silent:
    """An observer that only writes to the log."""

    def start(self, description: Mapping[str, Any]) -> None:
        """Nothing to show."""

    def progress(self, rounds: int, time_s: float) -> None:
        """Nothing to show."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Nothing to show."""

    def say(self, text: str) -> None:
        """Log it."""
        log.info(text)


@contextmanager
def watching(experiment: Experiment, *, quiet: bool = False) -> Iterator[Silent]:
    """An observer that displays a run: a bar in a notebook or if standard error is a terminal, else lines; nothing if
    quiet."""
    if quiet:
        yield Silent()
    elif in_notebook():
        with _notebook_bar(experiment) as bar:
            yield bar
    elif on_live_terminal():
        with _bar(experiment) as bar:
            yield bar
    else:
        yield Lines(experiment)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def on_live_terminal() -> bool:
    """Whether standard error is a terminal that can be drawn on again and again."""
    return sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def first_metric(values: Mapping[str, list[float]]) -> tuple[str, list[float]] | None:
    """The first metric over the nodes, with its name; a loss if there is no metric."""
    losses = ("test_loss", "train_loss")
    names = [*(name for name in values if name not in losses), *(name for name in losses if name in values)]
    return (names[0], values[names[0]]) if names else None


def spread(values: Mapping[str, list[float]]) -> str:
    """Mean and range over nodes of :func:`first_metric`."""
    if (found := first_metric(values)) is None:
        return ""
    name, numbers = found
    mean, least, most = numerals(fmean(numbers), min(numbers), max(numbers))
    text = f"{name.replace('_', ' ')} {mean}"
    return f"{text} ({least} to {most})" if len(numbers) > 1 else text


class Display(Silent):
    """An observer that collects rows into evaluations, knows how far the run is, and shows lines: the size of the run at its
    start, and evaluations.

    Attributes:
        wall_s: real seconds of the latest evaluation; a resumed run includes the time before.
        headline: the name of the first metric, and its mean over the nodes, at the latest evaluation."""

    def __init__(self, experiment: Experiment) -> None:
        self._nodes = experiment.nodes
        self._rounds, self._time_s = experiment.stop.rounds, experiment.stop.time_s
        self._clock = "virtual time" if experiment.engine.name == "simulate" else "time"
        self._most_bytes = experiment.stop.most_bytes(experiment.nodes)
        self.wall_s = 0.0
        self.headline: tuple[str, float] | None = None
        self._bytes, self._sent = dict.fromkeys(range(experiment.nodes), 0), 0
        self._values: dict[Any, dict[str, list[float]]] = {}
        self._latest, self._at = "", (-1, -1.0)

    def start(self, description: Mapping[str, Any]) -> None:
        self.say(f"{description['nodes']} nodes, {description['parameters']} parameters each")

    def row(self, row: Mapping[str, Any]) -> None:
        if (line := self.add(row)) is not None:
            self.evaluated(line)

    def evaluated(self, line: str) -> None:
        """Show a complete evaluation."""

    def add(self, row: Mapping[str, Any]) -> str | None:
        """Add a row; returns a line if it completes an evaluation."""
        # At an instant that all nodes have in common, they are in different rounds.
        evaluation = row["round"] if row["moment"] == "round" else row["moment"]
        values = self._values.setdefault(evaluation, {})
        for name, value in row.items():
            if (name.startswith("test_") or name == "train_loss") and value is not None:
                values.setdefault(name, []).append(float(value))
        if row["node"] != NETWORK:
            self._sent += row["bytes_sent"] - self._bytes[row["node"]]
            self._bytes[row["node"]] = row["bytes_sent"]
            return None
        del self._values[evaluation]
        before, self.wall_s = (self._at, self._latest), row["wall_s"]
        self._at, self._latest = (row["round"], row["time_s"]), spread(values)
        if (found := first_metric(values)) is not None:
            self.headline = found[0], fmean(found[1])
        if before == (self._at, self._latest):
            return None  # an instant of the grid at which all nodes also end a round, or the run
        return (
            f"round {row['round']}  {self._clock} {row['time_s']:.4g} s  wall time {self.wall_s:.1f} s  {self._latest}"
            f"  consensus distance {row['consensus_distance']:.4g}  {self.sent()} sent"
        )

    def sent(self) -> str:
        """The bytes that all nodes have sent, in words."""
        return bytes_text(self._sent)

    def so_far(self, rounds: int, time_s: float, seconds: float) -> str:
        """How far the run is between two evaluations: the rounds that all nodes together have completed, the engine's time,
        and real seconds since the run was started or resumed."""
        of = f" of {self._nodes * self._rounds:,}" if self._rounds else ""
        done = f"{rounds:,}{of} rounds of all nodes" if rounds else "no round completed yet"
        return f"{done}  {self._clock} {time_s:.4g} s  running for {seconds:.0f} s"

    def share(self, rounds: int, time_s: float) -> float:
        """The share of the run that is done by its stop rule, from 0 to 1."""
        by_rounds = rounds / (self._nodes * self._rounds) if self._rounds else 0.0
        by_time = time_s / self._time_s if self._time_s else 0.0
        return min(max(by_rounds, by_time, self._sent / self._most_bytes), 1.0)

    def left(self, share: float) -> str:
        """The estimated remaining seconds in words; empty while start-up is most of the time that has passed."""
        return f"{self.wall_s * (1 - share) / share:.0f} s left" if share > LEAST_SHARE else ""


class Lines(Display):
    """Prints one line for each evaluation on standard error, and lines in between if evaluations are far apart."""

    def __init__(self, experiment: Experiment, seconds: Callable[[], float] | None = None) -> None:
        super().__init__(experiment)
        self._seconds = seconds or stopwatch()
        self._began = self._said = self._seconds()
        self._share, self._patience = 0.0, QUIET_S

    def start(self, description: Mapping[str, Any]) -> None:
        self._began = self._seconds()
        super().start(description)

    def progress(self, rounds: int, time_s: float) -> None:
        self._share, now = self.share(rounds, time_s), self._seconds()
        if now - self._said >= self._patience:
            self._patience *= 2
            self.say(self.so_far(rounds, time_s, now - self._began))

    def evaluated(self, line: str) -> None:
        self.say(f"{line}  {self.left(self._share)}".rstrip())

    def say(self, text: str) -> None:
        self._said = self._seconds()
        with suppress(OSError):  # a full disk or a closed terminal ends the display, not the run
            print(text, file=sys.stderr, flush=True)


@contextmanager
def _bar(experiment: Experiment) -> Iterator[Silent]:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.text import Text

    console = Console(stderr=True)
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[rounds]}"),
        TextColumn("elapsed"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    # Two lines fit into 80 columns.
    bar, figures = Progress(*columns, console=console), Text(no_wrap=True, overflow="ellipsis")
    with Live(Group(bar, figures), console=console, refresh_per_second=5):
        yield _Bar(experiment, bar, figures)


class _Live(Display):
    """A display that is drawn again and again: rounds, engine time, accuracy and its spread, bytes."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self._wall, self._shown = stopwatch(), -1.0
        self._evaluation = ""

    def progress(self, rounds: int, time_s: float) -> None:
        # At most ten times a second: a simulation reports every round of every node.
        share, wall = self.share(rounds, time_s), self._wall()
        if wall - self._shown < 0.1 and share < 1.0:
            return
        self._shown = wall
        of = f"/{self._rounds}" if self._rounds else ""
        text = f"round {rounds // self._nodes}{of}"
        self.draw(share, text, f"{self._clock} {time_s:.1f} s{self._evaluation}")

    def evaluated(self, line: str) -> None:
        self._evaluation = f" · {self._latest} · {self.sent()} sent"

    def draw(self, share: float, rounds: str, figures: str) -> None:
        """Show the share of the run that is done, the round, and the figures of the latest evaluation."""


class _Bar(_Live):
    """A live bar on a terminal, with elapsed and remaining time."""

    def __init__(self, experiment: Experiment, bar: Any, figures: Any) -> None:
        super().__init__(experiment)
        self._bar, self._figures = bar, figures
        self._task = bar.add_task(experiment.name, total=1.0, start=False, rounds="")

    def start(self, description: Mapping[str, Any]) -> None:
        self._bar.start_task(self._task)
        super().start(description)

    def draw(self, share: float, rounds: str, figures: str) -> None:
        self._bar.update(self._task, completed=share, rounds=rounds)
        self._figures.plain = figures

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


@contextmanager
def _notebook_bar(experiment: Experiment) -> Iterator[Silent]:
    """A bar that disappears when the run has ended: the notebook then shows the :class:`Run`."""
    ipython: Any = importlib.import_module("IPython.display")
    output = ipython.display(ipython.HTML(""), display_id=True)
    bar = _NotebookBar(experiment, lambda html: output.update(ipython.HTML(html)))
    yield bar
    bar.end()


class _NotebookBar(_Live):
    """A live bar below a notebook's cell, as HTML that ``show`` replaces. (rich's own display needs ipywidgets.)"""

    def __init__(self, experiment: Experiment, show: Callable[[str], None]) -> None:
        super().__init__(experiment)
        self._name, self._show = experiment.name, show
        self._bar, self._said = "", list[str]()

    def start(self, description: Mapping[str, Any]) -> None:
        self.draw(0.0, "", f"{description['nodes']} nodes, {description['parameters']} parameters each")

    def draw(self, share: float, rounds: str, figures: str) -> None:
        text = escape(" · ".join(filter(None, (rounds, figures, self.left(share)))))
        self._bar = f'{escape(self._name)} <progress value="{share:.3f}"></progress> {text}'
        self._show(self._html())

    def say(self, text: str) -> None:
        self._said.append(text)
        self._show(self._html())

    def end(self) -> None:
        """Leave only what was said."""
        self._bar = ""
        self._show(self._html())

    def _html(self) -> str:
        return "<br>".join([*map(escape, self._said), *filter(None, [self._bar])])
