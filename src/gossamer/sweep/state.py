"""The state of a sweep: derived from the folders of its runs, and repeated in ``sweep.json`` for readers.

::

    <out>/<sweep>/
      sweep.yaml            the sweep, every cell written out
      sweep.json            every run: cell, labels, seed, folder, status, cause
      <run>/<id>/           one attempt at a run: a folder like every run's
      results.parquet       one row per cell and seed (gossamer.sweep.table), also as results.csv
      summary.parquet       one row per cell, also as summary.csv
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gossamer.results.folder import write_json
from gossamer.sweep.sweep import Sweep

Status = Literal["done", "failed", "stopped", "interrupted", "pending"]
"""``stopped``: by the user, in order; ``interrupted``: begun, with no record of its end; ``pending``: never begun."""


@dataclass(frozen=True)
class State:
    """The state of one run.

    Args:
        status: see :data:`Status`.
        cause: why it failed, or has not begun, in one line.
        folder: the attempt that counts, if there is one.
    """

    status: Status = "pending"
    cause: str | None = None
    folder: Path | None = None


def states(sweep: Sweep) -> dict[str, State]:
    """The state of every run of a sweep, by the name of its folder."""
    return {run: state_of(sweep.folder / run) for run in dict.fromkeys(each.run for each in sweep.planned)}


def state_of(folder: Path) -> State:
    """The state of a run: of the attempt that is done, or else of the last one (ids sort by time)."""
    attempts = sorted((file.parent for file in folder.glob("*/experiment.yaml")), reverse=True)
    found = [_ended(attempt) for attempt in attempts]
    return next((state for state in found if state.status == "done"), found[0] if found else State())


def _ended(attempt: Path) -> State:
    try:
        said = json.loads((attempt / "status.json").read_text(encoding="utf-8"))
        status = said["status"]
    except (OSError, ValueError, TypeError, KeyError):  # missing, or truncated by a crash
        return State("interrupted", None, attempt)
    cause = " ".join(str(said.get("error") or "no cause was recorded").split())
    return State(status, cause if status == "failed" else None, attempt)


def write_state(sweep: Sweep, at: Mapping[str, State]) -> None:
    """Write ``sweep.json``."""
    runs = [
        {
            "cell": each.cell.name,
            "labels": dict(each.cell.labels),
            "seed": each.experiment.seed,
            "run": each.run,
            "folder": folder and str(folder.relative_to(sweep.folder)),
            "status": at[each.run].status,
            "cause": at[each.run].cause,
        }
        for each in sweep.planned
        for folder in [at[each.run].folder]
    ]
    write_json(sweep.folder / "sweep.json", {"name": sweep.name, "runs": runs})
