"""Verification that the record of a run is unchanged and complete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossamer import files
from gossamer.errors import BadInput
from gossamer.node import checkpoint
from gossamer.results import recorder
from gossamer.results.checkpoints import complete_numbers, read_run_checkpoint
from gossamer.results.folder import run_id
from gossamer.results.run import Run, load_run
from gossamer.results.schema import SweepRecord

_PARTS = ("experiment", "environment", "figures", "setup", "metrics", "events", "timeline", "parameters")


def runs_in(path: Path) -> list[Path]:
    """The folders of all runs in a folder, which may be that of a run, of a sweep, or of runs and sweeps.
    BadInput for a folder without runs."""
    return sorted(file.parent for file in path.rglob("experiment.yaml")) or [load_run(path).path]


def problems_of(path: Path) -> list[str]:
    """The damaged, missing or foreign parts of the folder of a run or of a sweep (its list of runs), one line each."""
    found: list[str] = []

    def attempt(look: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return look(*arguments)
        except BadInput as error:
            found.extend(error.problems)
            return None

    if (path / "sweep.json").exists():
        attempt(files.read_json, path / "sweep.json", SweepRecord, path, recorder.MOST_FIGURES_BYTES)
    if (path / "experiment.yaml").exists():
        for part in _PARTS:
            attempt(getattr, Run(path), part)
        attempt(recorder.check_files, path, "*")
        for number in complete_numbers(path / "checkpoints"):
            whole = attempt(read_run_checkpoint, path / "checkpoints", number)
            for rank in () if whole is None else whole.rounds:
                attempt(whole.read, rank)
        for file in sorted((path / "restart").glob("*.safetensors")):
            attempt(checkpoint.read, file, {"run": run_id(path)})
    return list(dict.fromkeys(found))
