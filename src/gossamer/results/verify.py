"""Whether the record of a run is as the run left it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gossamer import files
from gossamer.errors import BadInput
from gossamer.node import checkpoint
from gossamer.results import recorder
from gossamer.results.checkpoints import complete, read_cut
from gossamer.results.folder import read_status, run_id
from gossamer.results.run import Run, load_run
from gossamer.results.schema import SweepFile

_PARTS = ("experiment", "environment", "status", "setup", "metrics", "events", "timeline", "parameters")


def runs_in(path: Path) -> list[Path]:
    """The folders of all runs in a folder: a run's, a sweep's, or one of runs and sweeps. A folder without any is bad
    input."""
    patterns = ("experiment.yaml", "*/experiment.yaml", "*/*/experiment.yaml", "*/*/*/experiment.yaml")
    found = sorted(file.parent for pattern in patterns for file in path.glob(pattern))
    return found or [load_run(path).path]


def problems_of(path: Path) -> list[str]:
    """What is damaged, missing or of another run in the folder of a run or of a sweep (its list of runs), one line each."""
    found: list[str] = []

    def attempt(look: Callable[[], object]) -> None:
        try:
            look()
        except BadInput as error:
            found.extend(error.problems)

    if (path / "sweep.json").exists():
        attempt(lambda: files.read_json(path / "sweep.json", SweepFile, path, recorder.MOST_FIGURES_BYTES))
    if not (path / "experiment.yaml").exists():
        return found
    run = Run(path)
    for part in _PARTS:
        attempt(partial(getattr, run, part))
    for kind in ("metrics", "events", "graphs", "timeline"):
        found += recorder.missing(path, kind)
    status: dict[str, Any] = {}
    attempt(lambda: status.update(read_status(path)))
    found += _results_missing(path, status)
    for name in status.get("files", ()):
        if not any(problem.startswith(str(path / name)) for problem in found):
            attempt(partial(recorder.prove, path, name))
    for number in complete(path / "checkpoints"):
        try:
            cut = read_cut(path / "checkpoints", number)
        except BadInput as error:
            found.extend(error.problems)
            continue
        for rank in cut.rounds:
            attempt(partial(cut.read, rank))
    for file in sorted((path / "restart").glob("*.safetensors")):
        attempt(partial(checkpoint.read, file, {"run": run_id(path)}))
    return list(dict.fromkeys(found))


def _results_missing(path: Path, status: Mapping[str, Any]) -> list[str]:
    """Says what a run that has begun must have and lacks, as far as no checksum shows it."""
    if (path / "status.json").exists():
        # A run that failed on a full disk has no space for checksums.
        needed = ("run", "status") if status.get("status") == "failed" else ("run", "status", "files")
        lacking = [name for name in needed if not status.get(name)]
        return (
            [f"{path / 'status.json'}: no {', no '.join(lacking)}; accepted: as the run left it"]
            if lacking
            else []
        )
    found = (
        any(recorder.segments(path, kind) for kind in ("metrics", "events"))
        or (path / "metrics.parquet").exists()
    )
    if not found and (path / "setup.json").exists():
        return [f"{path}: its results are missing; accepted: status.json and what it lists, or segments"]
    return []
