"""The progress display of a run: a live bar on a terminal or in a notebook, otherwise one line for each
evaluation."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gossamer.results.evaluations import Evaluations
from gossamer.results.formatting import bytes_text, numerals
from gossamer.results.observer import Observer
from gossamer.results.reading import NETWORK
from gossamer.runtime.recording import stopwatch

if TYPE_CHECKING:
    from gossamer.config import Experiment

_BAR = 20
"""The width of the bar in characters."""
MIN_SHARE = 0.02
"""The remaining time is estimated once this share of the run is done."""


@contextmanager
def watching(experiment: Experiment, *, quiet: bool = False) -> Iterator[Observer]:
    """An observer that displays a run: a bar in a notebook or if standard error is a terminal, otherwise
    lines; nothing if quiet."""
    if quiet:
        yield Observer()
    elif in_notebook() or on_live_terminal():
        bar = Bar(experiment)
        try:
            yield bar
        finally:
            bar.end()
    else:
        yield Lines(experiment)


def in_notebook() -> bool:
    """Whether this process is a notebook kernel."""
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def on_live_terminal() -> bool:
    """Whether standard error is a terminal on which lines can be redrawn."""
    return sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


class Display(Observer):
    """An observer that collects rows into evaluations and tracks the progress of the run.

    Attributes:
        wall_s: real seconds at the latest evaluation, including the time before a resume.
        headline: the name of the first metric, and its mean over the nodes, at the latest evaluation."""

    def __init__(self, experiment: Experiment) -> None:
        self._name, self._nodes = experiment.name, experiment.nodes
        self._outcome: Collection[int] = range(experiment.nodes)  # the nodes whose models are the outcome
        self._rounds, self._time_s = experiment.stop.rounds, experiment.stop.time_s
        self._clock = "virtual time" if experiment.engine.name == "simulate" else "time"
        self._most_bytes = experiment.stop.most_bytes(experiment.nodes)
        self.wall_s = 0.0
        self.headline: tuple[str, float] | None = None
        self._sent, self._latest, self._times, self._at = 0.0, "", "", ""  # bytes sent by all nodes
        self._round, self._most = "", 0  # the most nodes in an evaluation so far
        self._evaluations = Evaluations()

    def start(self, description: Mapping[str, Any]) -> None:
        self._outcome = set(description["outcome_ranks"])
        self.show(f"{description['nodes']} nodes, {description['parameters']} parameters each")

    def row(self, row: Mapping[str, Any]) -> None:
        self._sent = max(self._sent, row.get("network_bytes") or 0)
        # Clients reach a round at their own times, which say nothing about the server's model.
        client = row["node"] != NETWORK and row["node"] not in self._outcome
        if (values := self._evaluations.add({**row, "time_s": None} if client else row)) is None:
            return
        self.wall_s = row["wall_s"]
        # Nodes reach a round at their own times; the values are then of no single instant.
        at_round, first_s = row["moment"].startswith("round"), min(values["time_s"])
        last_s = f"{row['time_s']:.4g} s"
        self._at = f"round {row['round']}" if at_round else last_s
        apart = at_round and first_s < row["time_s"]
        self._times = f"{first_s:.4g} to {last_s}" if apart else last_s
        self._round = f"round {row['round']}{' of each node' if apart else ''}"
        metrics = [name for name in values if name.startswith("test_") and name != "test_loss"]
        name = next((name for name in (*metrics, "test_loss", "train_loss") if name in values), None)
        if name is not None:
            self.headline = name, fmean(values[name])
            mean, low, high = numerals(self.headline[1], min(values[name]), max(values[name]))
            count = len(values[name])
            self._most = max(self._most, count)
            over = f", {count} of {self._most} nodes" if count < self._most else ""
            spread = f" ({low} to {high}{over})" if count > 1 else ""
            self._latest = f"{name.replace('_', ' ')} {mean}{spread}"
        self.evaluated(row)

    def show(self, text: str) -> None:
        """Show the state of the run."""

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Show a complete evaluation, given the network's row."""

    def share(self, rounds: int, time_s: float) -> float:
        """The share of the run that is done by its stop rule, from 0 to 1."""
        by_rounds = rounds / (self._nodes * self._rounds) if self._rounds else 0.0
        by_time = time_s / self._time_s if self._time_s else 0.0
        return min(max(by_rounds, by_time, self._sent / self._most_bytes), 1.0)

    def left(self, share: float) -> str:
        """The estimated remaining seconds as text; empty while start-up dominates the elapsed time."""
        return f"{self.wall_s * (1 - share) / share:.0f} s left" if share > MIN_SHARE else ""


class Lines(Display):
    """Prints one line for each evaluation on standard error."""

    _share = 0.0

    def progress(self, rounds: int, time_s: float) -> None:
        self._share = self.share(rounds, time_s)

    def evaluated(self, row: Mapping[str, Any]) -> None:
        # The last progress may have been reported before the end of this round.
        share = max(self._share, self.share(row["round"] * self._nodes, row["time_s"]))
        distance = row.get("consensus_distance")  # not of a single model
        consensus = "" if distance is None else f"  consensus distance {distance:.4g}"
        self.show(
            f"{self._round}  {self._clock} {self._times}  wall time {self.wall_s:.1f} s  {self._latest}"
            f"{consensus}  {bytes_text(self._sent)} sent"
            f"  {self.left(share)}".rstrip()
        )

    def say(self, text: str) -> None:
        self.show(text)

    def show(self, text: str) -> None:
        with suppress(OSError):  # a full disk or a closed terminal ends the display, not the run
            print(text, file=sys.stderr, flush=True)


class Bar(Display):
    """A line on standard error that is redrawn in place."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self._wall, self._shown, self._line = stopwatch(), -1.0, ""

    def progress(self, rounds: int, time_s: float) -> None:
        # At most ten times a second: a simulation reports every round of every node.
        share, wall = self.share(rounds, time_s), self._wall()
        if wall - self._shown >= 0.1 or share == 1.0:
            self._shown, done = wall, round(_BAR * share)
            bar, of = "█" * done + "░" * (_BAR - done), f"/{self._rounds}" if self._rounds else ""
            position = f"round {rounds // self._nodes}{of}  {self._clock} {time_s:.4g} s"
            # Without the range of the nodes, for which a terminal has no room.
            latest = f"{self._latest.partition(' (')[0]} at {self._at}" if self._latest else ""
            parts = (bar, position, self.left(share), latest)
            self.show("  ".join(filter(None, parts)))

    def say(self, text: str) -> None:
        self._write(f"{text}\n")
        self.show(self._line)

    def end(self) -> None:
        """Remove the line."""
        self._write("")

    def show(self, text: str) -> None:
        self._line = text
        self._write(text[: shutil.get_terminal_size().columns - 1])

    def _write(self, text: str) -> None:
        with suppress(OSError):
            blank = " " * (shutil.get_terminal_size().columns - 1)
            print(f"\r{blank}\r{text}", end="", file=sys.stderr, flush=True)
