"""One run of a sweep as an executor does it: plain data in, plain data out."""

from __future__ import annotations

import threading
from typing import Literal, TypedDict, cast

Status = Literal["done", "failed", "stopped", "interrupted", "pending"]
"""``stopped``: by the user, in order; ``interrupted``: begun, with no record of its end."""

_turn = threading.Lock()
"""Runs in one process take turns, since they share torch's generator and number of threads."""


class Job(TypedDict):
    """One run."""

    experiment: str
    """Resolved, as YAML."""
    out: str
    """The sweep's folder: an absolute path."""
    run: str
    """The name of the run's folder in it."""
    command: list[str]
    """The command line to put on record."""


class Ended(TypedDict):
    """How a run ended."""

    status: Status
    cause: str | None
    """The cause of a failure, in one line."""
    folder: str | None
    """The attempt's folder, if it was created."""


def carry_out(job: Job) -> Ended:
    """Do one run; errors are returned, not raised."""
    # Imported here, so that a worker process imports torch only when it has something to do.
    from gossamer.api import Silent, run
    from gossamer.config import Experiment
    from gossamer.errors import GossamerError, RunFailed, cause

    class _Mute(Silent):
        def say(self, text: str) -> None:
            """Print and log nothing: there may be hundreds of runs."""

    with _turn:
        try:
            experiment = Experiment.parse(job["experiment"])
            done = run(experiment, job["out"], name=job["run"], observer=_Mute(), command=job["command"])
        except GossamerError as error:
            folder = error.folder if isinstance(error, RunFailed) else None
            said = " ".join(str(error).split())
            return {"status": "failed", "cause": said, "folder": None if folder is None else str(folder)}
        except Exception as error:  # noqa: BLE001 - of any kind: it is this run's failure
            return {"status": "failed", "cause": cause(error), "folder": None}
    return {"status": cast(Status, done.status), "cause": None, "folder": str(done.path)}
