"""The plan of a sweep: every run with its overrides, and an estimate of time and memory from records or a short trial."""

from __future__ import annotations

from collections.abc import Sequence
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


def plan(sweep: Sweep, chosen: Sequence[Planned]) -> list[dict[str, Any]]:
    """Every experiment of a plan: cell, seed, run, status, overrides, and its cell's :func:`estimate`."""
    by_run = states(sweep)
    cells: dict[str, list[Planned]] = {}
    for planned in chosen:
        cells.setdefault(planned.cell.name, []).append(planned)
    estimates = {}
    for name, members in cells.items():
        cell_states = [by_run[planned.run] for planned in members]
        done = [Run(state.folder) for state in cell_states if state.status == "done" and state.folder]
        estimates[name] = estimate(done, members[0].experiment)
    return [
        {
            "cell": planned.cell.name,
            "seed": planned.experiment.seed,
            "run": planned.run,
            "status": by_run[planned.run].status,
            "overrides": dict(planned.cell.overrides),
            **estimates[planned.cell.name],
        }
        for planned in chosen
    ]


def print_plan(sweep: Sweep, chosen: Sequence[Planned]) -> None:
    """Print the plan, and the time that the remaining runs take one after another."""
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
    left = {row["run"]: row["wall_s"] for row in rows if row["status"] != "done"}
    walls = [wall_s for wall_s in left.values() if wall_s is not None]
    unknown = f", and {len(left) - len(walls)} of unknown time" if len(walls) < len(left) else ""
    print(
        f"left: {len(left)} of {len({row['run'] for row in rows})} runs, {seconds_text(sum(walls))}{unknown}"
    )
