"""Run an experiment."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.engines.engine import Engine
from gossamer.engines.outcome import Outcome
from gossamer.engines.recording import Observer
from gossamer.errors import cause
from gossamer.experiment import Experiment, Simulate
from gossamer.results.folder import RunFolder, Status, environment, write_text
from gossamer.results.recorder import compact
from gossamer.results.run import Run, load_run

log = logging.getLogger("gossamer")


class Silent:
    """An observer that only writes to the log."""

    def start(self, description: Mapping[str, Any]) -> None:
        """Nothing to show."""

    def progress(self, rounds: int, time_s: float) -> None:
        """Nothing to show."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Nothing to show."""

    def say(self, text: str) -> None:
        """Log it."""
        log.info(text)


def run(
    experiment: Experiment,
    out: str | Path = "runs",
    *,
    name: str | None = None,
    observer: Observer | None = None,
    command: Sequence[str] | None = None,
) -> Run:
    """Carry out an experiment and record it.

    Args:
        experiment: what to run, under the engine that it names.
        out: the folder of all runs; this one goes to ``<out>/<name>/<id>/``.
        name: of the folder between; None is the experiment's.
        observer: told of progress.
        command: the command line to put on record; None is this process's.

    Returns:
        The recorded run.

    Raises:
        BadInput: if something in the experiment can't be used; before any work starts.
        RunFailed: if a node failed or died, or all wait for ever; what was recorded until then is kept, in
            the folder that the error's ``folder`` names.
    """
    observer = observer or Silent()
    with _engine(experiment) as engine:
        folder = RunFolder.create(
            Path(out),
            experiment.name if name is None else name,
            experiment=experiment.to_yaml(),
            environment=environment(sys.argv if command is None else command),
        )
        folder.write_setup(engine.description)
        try:
            outcome = engine.run(folder, observer)
        except BaseException as error:
            status: Status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            folder.write_status(status, error=cause(error))
            compact(folder)
            raise
    _finish(folder, experiment, outcome)
    if outcome.failure is not None:
        outcome.failure.folder = folder.path
        raise outcome.failure
    return load_run(folder.path)


def _engine(experiment: Experiment) -> Engine:
    # Imported when used: an engine brings what only it needs.
    if isinstance(experiment.engine, Simulate):
        from gossamer.engines.simulate.engine import SimulateEngine

        return SimulateEngine(experiment)
    from gossamer.engines.processes.launcher import ProcessesEngine

    return ProcessesEngine(experiment)


def _finish(folder: RunFolder, experiment: Experiment, outcome: Outcome) -> None:
    """Models, tables and the status: a status is there when all else is."""
    if outcome.parameters is not None:
        folder.write_models(outcome.parameters, outcome.buffers)
    if experiment.engine.trainer == "auto":
        # What "auto" chose depends on the machine's mood; the record says what ran.
        chosen = experiment.override(engine={**experiment.engine.model_dump(), "trainer": outcome.trainer})
        write_text(folder.path / "experiment.yaml", chosen.to_yaml())
    compact(folder)
    status: Status = {"failed": "failed", "stopped": "stopped"}.get(outcome.reason, "done")  # type: ignore[assignment]
    error = None if outcome.failure is None else str(outcome.failure)
    folder.write_status(
        status,
        error=error,
        wall_s=outcome.wall_s,
        profile=outcome.profile,
        peak_vectors=outcome.peak_vectors,
        private_bytes=outcome.private_bytes,
    )
