"""Whether the record of a run is as the run left it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

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
    listed: list[str] = []
    attempt(lambda: listed.extend(read_status(path).get("files", {})))
    for name in listed:
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
