"""Verification that the record of a run is unchanged and complete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossamer import files
from gossamer.errors import BadInput
from gossamer.node import checkpoint
from gossamer.results import reading
from gossamer.results.checkpoints import complete_numbers, read_run_checkpoint
from gossamer.results.folder import run_id
from gossamer.results.run import Run, load_run
from gossamer.results.schema import SweepRecord

_PARTS = ("experiment", "environment", "figures", "setup", "metrics", "events", "timeline", "parameters")


def runs_in(path: Path) -> list[Path]:
    """The folders of all runs and sweeps in a folder, which may be one itself. BadInput for a folder without runs."""
    names = ("experiment.yaml", "status.json", "sweep.json")
    return sorted({file.parent for name in names for file in path.rglob(name)}) or [load_run(path).path]


def problems_of(path: Path) -> list[str]:
    """The damaged, missing or foreign parts of the folder of a run or of a sweep (its list of runs), one line each."""
    problems: list[str] = []

    def attempt(read: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return read(*arguments)
        except BadInput as error:
            problems.extend(error.problems)
            return None

    if (path / "sweep.json").exists():
        record = attempt(files.read_json, path / "sweep.json", SweepRecord, path, reading.MAX_FIGURES_BYTES)
        for folder in [entry["folder"] for entry in (record or {"runs": []})["runs"] if entry["folder"]]:
            if not (path / folder).exists():
                problems.append(f"{path / folder}: missing; accepted: the folder of each run in sweep.json")
    elif not (path / "experiment.yaml").exists():
        problems.append(f"{path / 'experiment.yaml'}: missing; accepted: the whole record of a run")
    if (path / "experiment.yaml").exists():
        for part in _PARTS:
            attempt(getattr, Run(path), part)
        attempt(reading.check_files, path, "*")
        for number in complete_numbers(path / "checkpoints"):
            saved = attempt(read_run_checkpoint, path / "checkpoints", number)
            for rank in () if saved is None else saved.rounds:
                attempt(saved.read, rank)
        for file in sorted((path / "restart").glob("*.safetensors")):
            attempt(checkpoint.read, file, {"run": run_id(path)})
    return list(dict.fromkeys(problems))
