"""The plan of a sweep: every run with its overrides, and an estimate of time and memory from records or a short trial."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from gossamer.api import run
from gossamer.config import Experiment
from gossamer.errors import GossamerError
from gossamer.progress import Display
from gossamer.results.formatting import bytes_text, print_table, seconds_text
from gossamer.results.run import Run
from gossamer.runtime.recording import stopwatch
from gossamer.sweep.sweep import Planned, Sweep
from gossamer.sweep.table import states

_TRIAL_S = 2.0
"""Seconds of a trial, once a round has ended."""
_PATIENCE_S = 10.0
"""Seconds after which a trial in which no round has ended is given up."""
_ALL_TRIALS_S = 60.0
"""Seconds after which no other trial begins."""


@dataclass(frozen=True)
class Estimate:
    """What a run of a cell takes: real seconds of a run alone; and bytes of memory, in a simulation those of the vectors
    (models, messages, optimizer states), with real processes what the nodes share with nobody. ``by`` is what it was measured
    on, or why there is none."""

    by: str
    wall_s: float | None = None
    memory_bytes: float | None = None


class _Trial(Display):
    """Ends a run in order, as Ctrl-C does, when it has gone on for long enough to tell how long it would take."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self._seconds, self._over = stopwatch(), False
        self._first: tuple[float, float] | None = None
        self.wall: float | None = None

    def start(self, description: Any) -> None:
        self._seconds = stopwatch()

    def progress(self, rounds: int, time_s: float) -> None:
        share, now = self.share(rounds, time_s), self._seconds()
        if self._first is None and share > 0 and rounds >= self._nodes:
            self._first = share, now
        if self._first is not None and share > self._first[0]:
            self.wall = self._first[1] + (1 - self._first[0]) * (now - self._first[1]) / (
                share - self._first[0]
            )
        if not self._over and now >= (_PATIENCE_S if self.wall is None else _TRIAL_S):
            self._over = True
            os.kill(os.getpid(), signal.SIGINT)

    def say(self, text: str) -> None:
        """A trial says nothing."""


def try_out(experiment: Experiment) -> Estimate:
    """Begin a run in a temporary folder, without trackers, and estimate from its first seconds."""
    trial = _Trial(experiment)
    try:
        with TemporaryDirectory() as folder:
            done = run(experiment.model_copy(update={"trackers": []}), folder, observer=trial)
            if done.status != "stopped":
                return Estimate("a whole run", done.wall_s, memory_bytes(done))
            if trial.wall is None:
                return Estimate(f"no two rounds ended within {_PATIENCE_S:.0f} s")
            return Estimate("a trial", trial.wall, memory_bytes(done))
    except GossamerError as error:
        return Estimate(f"failed: {' '.join(str(error).split())}")


def memory_bytes(run: Run) -> float | None:
    """Bytes of memory that a run has recorded (:class:`Estimate`); None if it has not."""
    if (private := run.figures.get("private_bytes")) is not None:
        return float(private["mean"] * run.nodes)
    vectors, length = run.figures.get("peak_vectors"), run.setup.get("parameters")
    return None if vectors is None or length is None else 4.0 * vectors * length


def estimates(sweep: Sweep, chosen: Sequence[Planned]) -> dict[str, Estimate]:
    """What a run of each chosen cell takes, by the cell's name: the mean of its runs that are done, or else by a trial."""
    at, found, clock = states(sweep), dict[str, Estimate](), stopwatch()
    cells: dict[str, list[Planned]] = {}
    for each in chosen:
        cells.setdefault(each.cell.name, []).append(each)
    for name, planned in cells.items():
        folders: list[Path] = [
            state.folder
            for state in (at[each.run] for each in planned)
            if state.status == "done" and state.folder
        ]
        runs = [Run(folder) for folder in folders]
        walls, sizes = (
            [each.wall_s for each in runs if each.wall_s is not None],
            [memory_bytes(each) for each in runs],
        )
        if walls:
            known = [size for size in sizes if size is not None]
            found[name] = Estimate(f"{len(walls)} done", fmean(walls), max(known) if known else None)
        elif clock() < _ALL_TRIALS_S:
            found[name] = try_out(planned[0].experiment)
        else:
            found[name] = Estimate("not tried: --only CELL does")
    return found


def plan(sweep: Sweep, chosen: Sequence[Planned]) -> list[dict[str, Any]]:
    """Every experiment of a plan: cell, seed, run, status, overrides, and its cell's estimate."""
    at, known = states(sweep), estimates(sweep, chosen)
    return [
        {
            "cell": each.cell.name,
            "seed": each.experiment.seed,
            "run": each.run,
            "status": at[each.run].status,
            "overrides": dict(each.cell.overrides),
            **asdict(known[each.cell.name]),
        }
        for each in chosen
    ]


def print_plan(sweep: Sweep, chosen: Sequence[Planned]) -> None:
    """Print the plan, and how long the runs that are left take one at a time."""
    rows = plan(sweep, chosen)
    head = ["cell", "overrides", "seed", "status", "time", "memory", "measured on"]
    shown = [
        [
            row["cell"],
            ", ".join(f"{path}={value}" for path, value in row["overrides"].items()) or "none",
            *(str(row["seed"]), row["status"], seconds_text(row["wall_s"]), bytes_text(row["memory_bytes"])),
            row["by"],
        ]
        for row in rows
    ]
    print_table(head, shown, labels=2)
    cells, seeds = (
        f"{word}{'s' * (count > 1)}"
        for word, count in (("cell", len({row["cell"] for row in rows})), ("seed", len(sweep.seeds)))
    )
    runs = {row["run"]: row for row in rows}
    listed = ", ".join(map(str, sweep.seeds))
    print(
        f"{len({row['cell'] for row in rows})} {cells}, {seeds} {listed}: {len(rows)} experiments, {len(runs)} runs"
    )
    left = [row for row in runs.values() if row["status"] != "done"]
    walls = [row["wall_s"] for row in left if row["wall_s"] is not None]
    unknown = f", and {len(left) - len(walls)} of unknown time" if len(walls) < len(left) else ""
    print(f"left: {len(left)} runs, {seconds_text(sum(walls))} one at a time{unknown}")
