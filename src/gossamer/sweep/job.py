"""What is handed to an executor: one run, as plain data in and plain data out."""

from __future__ import annotations

import threading
from typing import Literal, TypedDict, cast

Status = Literal["done", "failed", "stopped", "interrupted", "pending"]
"""``stopped`` by the user, in order; ``interrupted``: begun, and nothing says how it ended."""

_turn = threading.Lock()
"""Runs of one process take turns: they would share torch's generator and its number of threads."""


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
    """What came of it."""

    status: Status
    cause: str | None
    """Of a failure, in one line."""
    folder: str | None
    """The attempt's, where it came to have one."""


def carry_out(job: Job) -> Ended:
    """Do one run; whatever goes wrong in it is told, not raised."""
    # A worker process imports torch when it has something to do, not when it unpickles this function.
    from gossamer.api import Silent, run
    from gossamer.config import Experiment
    from gossamer.errors import GossamerError, RunFailed, cause

    class _Mute(Silent):
        def say(self, text: str) -> None:
            """Not one word from each of a hundred runs."""

    with _turn:
        try:
            experiment = Experiment.parse(job["experiment"])
            done = run(experiment, job["out"], name=job["run"], observer=_Mute(), command=job["command"])
        except GossamerError as error:
            folder = error.folder if isinstance(error, RunFailed) else None
            said = " ".join(str(error).split())
            return {"status": "failed", "cause": said, "folder": None if folder is None else str(folder)}
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this run's failure
            return {"status": "failed", "cause": cause(error), "folder": None}
    return {"status": cast(Status, done.status), "cause": None, "folder": str(done.path)}
