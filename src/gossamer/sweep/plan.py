"""The plan of a sweep: every run with its overrides, and an estimate of time and memory from records or a short trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
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
from gossamer.sweep.cells import Planned
from gossamer.sweep.execute import by_run, findings, jobs_for, narrow, remaining
from gossamer.sweep.sweep import Sweep
from gossamer.sweep.table import states

_TRIAL_S = 2.0
"""Seconds after which a trial ends, at the earliest after one round."""


class _Trial(Display):
    """Ends a run once it has run long enough to estimate its total time."""

    total_wall_s: float | None = None

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self._seconds = stopwatch()
        self._first: tuple[float, float] | None = None

    def start(self, description: Any) -> None:
        self._seconds = stopwatch()

    def progress(self, rounds: int, time_s: float) -> None:
        share, now = self.share(rounds, time_s), self._seconds()
        if self._first is None and share > 0 and rounds >= self._nodes:
            self._first = share, now  # after the one-time costs of the first round
        elif self._first is not None and share > self._first[0]:
            first, began = self._first
            self.total_wall_s = began + (1 - first) * (now - began) / (share - first)
            self.stopping = now >= _TRIAL_S

    def say(self, text: str) -> None:
        """Print and log nothing."""


def estimate(runs: Sequence[Run], experiment: Experiment) -> dict[str, Any]:
    """The cost of a run of a cell: ``wall_s``, real seconds of a run by itself; ``memory_bytes``, the memory
    of the vectors (models, messages, optimizer states) in a simulation, or the private memory of the nodes
    with real processes; and ``by``, the basis of the measurement: the finished ``runs`` of the cell, or else
    a trial."""
    walls = [record.wall_s for record in runs if record.wall_s is not None]
    if walls:
        sizes = [size for size in map(_memory_bytes, runs) if size is not None]
        return {
            "by": f"{len(walls)} done",
            "wall_s": fmean(walls),
            "memory_bytes": max(sizes, default=None),
        }
    trial = _Trial(experiment)
    try:
        with TemporaryDirectory() as folder:
            done = run(experiment.model_copy(update={"trackers": []}), folder, observer=trial)
            complete = done.status != "stopped"
            return {
                "by": "a whole run" if complete else "a trial",
                "wall_s": done.wall_s if complete else trial.total_wall_s,
                "memory_bytes": _memory_bytes(done),
            }
    except GossamerError as error:
        problem = f"failed: {' '.join(str(error).split())}"
        return {"by": problem, "wall_s": None, "memory_bytes": None}


def _memory_bytes(run: Run) -> float | None:
    if (private := run.figures.get("private_bytes")) is not None:
        return float(private["mean"] * run.nodes)
    vectors, length = run.figures.get("peak_vectors"), run.setup.get("parameters")
    return None if vectors is None or length is None else 4.0 * vectors * length


@dataclass(frozen=True)
class SweepPlan:
    """The plan of a sweep.

    Attributes:
        rows: every experiment: cell, seed, run, status, what has ``changed`` since it was done, overrides, and its cell's
            :func:`estimate`.
        left: what a call does: the number of ``runs``, ``unknown`` of them of unknown time; ``wall_s``, real seconds until
            the last of the others ends, with ``jobs`` at a time; and ``total_s``, the sum of their times. ``wall_s`` and
            ``jobs`` are None for runs on an executor, which decides how many it takes.
        runs: the number of the chosen runs.
        notes: sentences on what has changed since the runs that are finished."""

    rows: list[dict[str, Any]]
    left: dict[str, Any]
    runs: int
    notes: tuple[str, ...] = ()


def plan(
    sweep: Sweep,
    chosen: Sequence[Planned],
    *,
    jobs: int | None = None,
    workers: str | None = None,
    retry_failed: bool = False,
    again: bool = False,
    keep: bool = False,
) -> SweepPlan:
    """The plan of a call with these arguments, as for :func:`gossamer.sweep.execute.run_sweep`."""
    before, runs = states(sweep), by_run(chosen)
    todo = remaining(runs, before, retry_failed=retry_failed, again=again)
    found = findings(sweep, runs, before, again=again, keep=keep)
    at_once = jobs or jobs_for([planned.experiment for planned in todo])
    jobs = None if workers is not None else min(at_once, max(len(todo), 1))
    cells: dict[str, list[Planned]] = {}
    for planned in chosen:
        cells.setdefault(planned.cell.name, []).append(planned)
    estimates = {}
    for name, members in cells.items():
        cell_states = [before[planned.run] for planned in members]
        done = [Run(state.folder) for state in cell_states if state.status == "done" and state.folder]
        experiment = members[0].experiment
        estimates[name] = estimate(done, experiment if jobs == 1 else narrow(experiment))
    rows = [
        {
            "cell": planned.cell.name,
            "seed": planned.experiment.seed,
            "run": planned.run,
            "status": before[planned.run].status,
            "changed": found.of(runs[planned.run]),
            "overrides": dict(planned.cell.overrides),
            **estimates[planned.cell.name],
        }
        for planned in chosen
    ]
    times = [estimates[planned.cell.name]["wall_s"] for planned in todo]
    walls = [wall_s for wall_s in times if wall_s is not None]
    left = {"runs": len(todo), "unknown": len(times) - len(walls), "jobs": jobs, "total_s": sum(walls)}
    left |= {"wall_s": None if jobs is None else elapsed(walls, jobs)}
    return SweepPlan(rows, left, len(runs), tuple(found.notes()))


def elapsed(walls: Sequence[float], jobs: int) -> float:
    """Seconds until the last of some runs ends, if each of ``jobs`` workers takes the next run, in their order, as soon as
    its last one has ended."""
    free = [0.0] * jobs
    for wall_s in walls:
        heapreplace(free, free[0] + wall_s)
    return max(free)


def print_plan(made: SweepPlan) -> None:
    """Print the plan, how long the remaining runs take, and how long one after another."""
    head = ["cell", "overrides", "seed", "status", "time", "memory", "measured on"]
    shown = [
        [
            row["cell"],
            ", ".join(f"{path}={value}" for path, value in row["overrides"].items()) or "none",
            *(
                str(row["seed"]),
                f"{row['status']}, stale" if row["changed"] else row["status"],
                seconds_text(row["wall_s"]),
                bytes_text(row["memory_bytes"]),
            ),
            row["by"],
        ]
        for row in made.rows
    ]
    print_table(head, shown, labels=2)
    left = made.left
    total = seconds_text(left["total_s"])
    time = f"{total} one after another"
    if left["jobs"] is not None and left["jobs"] > 1:
        time = f"{seconds_text(left['wall_s'])} with {left['jobs']} at a time ({time})"
    unknown = f", and {left['unknown']} of unknown time" if left["unknown"] else ""
    print(f"left: {left['runs']} of {made.runs} runs, {time}{unknown}", *made.notes, sep="\n")
