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

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.errors import BadInput
from gossamer.results.folder import write_json
from gossamer.sweep.job import Status
from gossamer.sweep.sweep import Planned, Sweep

_ENDS = ("done", "failed", "stopped")


@dataclass(frozen=True)
class State:
    """The state of one run.

    Args:
        status: see :data:`gossamer.sweep.job.Status`.
        cause: why it failed, in one line.
        folder: the attempt that counts, if there is one.
    """

    status: Status = "pending"
    cause: str | None = None
    folder: Path | None = None


def states(sweep: Sweep) -> dict[str, State]:
    """The state of every run of a sweep, by the name of its folder."""
    runs = dict.fromkeys(each.run for each in sweep.planned)
    return {run: _attempted(sweep.folder / run) for run in runs} | {
        # Only here is it recorded that a run failed before it had a folder (its data could not be read).
        run: State("failed", cause)
        for run, cause in _failures(sweep.folder).items()
        if run in runs and not any((sweep.folder / run).glob("*/experiment.yaml"))
    }


def _attempted(folder: Path) -> State:
    """The attempt that is done, or else the last one (ids sort by time)."""
    attempts = sorted((file.parent for file in folder.glob("*/experiment.yaml")), reverse=True)
    found = [_ended(attempt) for attempt in attempts]
    return next((state for state in found if state.status == "done"), found[0] if found else State())


def _ended(attempt: Path) -> State:
    said = _read(attempt / "status.json")
    if said.get("status") not in _ENDS:
        return State("interrupted", None, attempt)
    failed = said["status"] == "failed"
    return State(said["status"], _line(said.get("error")) if failed else None, attempt)


def _line(text: Any) -> str:
    return " ".join(str(text or "no cause was recorded").split())


def _failures(folder: Path) -> dict[str, str]:
    runs = _read(folder / "sweep.json").get("runs")
    entries = [entry for entry in runs if isinstance(entry, Mapping)] if isinstance(runs, list) else []
    return {
        str(entry["run"]): _line(entry.get("cause"))
        for entry in entries
        if entry.get("status") == "failed" and "run" in entry
    }


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty for a file that is missing or was truncated by a crash."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_state(sweep: Sweep, at: Mapping[str, State]) -> None:
    """Write ``sweep.json``."""
    runs = [_entry(each, at[each.run], sweep.folder) for each in sweep.planned]
    write_json(sweep.folder / "sweep.json", {"name": sweep.name, "runs": runs})


def _entry(planned: Planned, state: State, folder: Path) -> dict[str, Any]:
    return {
        "cell": planned.cell.name,
        "labels": dict(planned.cell.labels),
        "seed": planned.experiment.seed,
        "run": planned.run,
        "folder": None if state.folder is None else str(state.folder.relative_to(folder)),
        "status": state.status,
        "cause": state.cause,
    }


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Lock a sweep's folder: two sweeps in one folder would do each run twice.

    Raises:
        BadInput: if another process has locked it, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise BadInput(
            f"--out: {reason} ({error.filename}); accepted: a folder that can be written to"
        ) from None
    with lock:  # the system releases it when the process ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(
                f"{folder}: another process is running this sweep; accepted: one at a time"
            ) from None
        yield
