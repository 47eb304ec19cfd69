"""Schedules under the engine simulate."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import gossamer
from chaos.invariants import Record, differences, violations
from chaos.schedule import Schedule
from gossamer import RunFailed, load_runs
from gossamer.results.observer import Observer
from gossamer.runtime.setup import prepare
from gossamer.runtime.simulate.simulation import Simulation

BOUND_S = 5.0
"""CPU seconds within which a run must end."""


class Stopper(Observer):
    """Stops a run with SIGTERM at a number of rows."""

    def __init__(self, rows: int) -> None:
        self._left = rows

    def row(self, row: Mapping[str, Any]) -> None:
        self._left -= 1
        if self._left == 0:
            signal.raise_signal(signal.SIGTERM)


class Overdue(BaseException):
    """A run has not ended within :data:`BOUND_S`."""


def check(schedule: Schedule, out: Path) -> list[str]:
    """Run a schedule in a folder, remove the folder, and give the violations, one line each."""
    try:
        with _bounded():
            return list(_check(schedule, out))
    except Overdue:
        return [f"no end within {BOUND_S:g} s"]
    except Exception as error:  # noqa: BLE001 - any exception is a violation
        return [f"{type(error).__name__}: {error}"]
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _check(schedule: Schedule, out: Path) -> Iterator[str]:
    if schedule.stopped_at is None:
        record = simulate(schedule)
        if schedule.repeated:
            yield from differences(simulate(schedule), record, "metrics", "happened")
            written = play(schedule, out)
            yield from violations(schedule, written)
            yield from differences(written, record)
    else:
        record, stopped = play(schedule, out), play(schedule, out, Stopper(schedule.stopped_at))
        if stopped.status == "stopped":
            assert stopped.folder is not None
            stopped = Record.of(gossamer.resume(stopped.folder))
        yield from violations(schedule, stopped)
        yield from differences(stopped, record, "metrics")
    yield from violations(schedule, record)


class Rows(list[Any]):
    """A segment in memory."""

    def close(self) -> None:
        """Do nothing."""


def simulate(schedule: Schedule) -> Record:
    """Run a schedule without files, which would take longer than its few events."""
    metrics, graphs, events = Rows(), Rows(), Rows()
    setup = prepare(schedule.experiment("simulate"))
    with torch.random.fork_rng(devices=[]):
        outcome = Simulation(setup, metrics, graphs, events, Observer()).run()  # type: ignore[arg-type]
    status = outcome.reason if outcome.reason in ("failed", "stopped", "diverged") else "done"
    error = None if outcome.failure is None else str(outcome.failure)
    return Record(status, error, outcome.parameters, metrics, events)


def play(schedule: Schedule, out: Path, observer: Observer | None = None) -> Record:
    """Run a schedule as a user would, with a record in a folder."""
    experiment = schedule.experiment("simulate")
    with suppress(RunFailed):  # it is recorded
        gossamer.run(experiment, out, observer=observer, command=["chaos"])
    return Record.of(load_runs(out)[-1])


@contextmanager
def _bounded() -> Iterator[None]:

    def overdue(*_: object) -> None:
        raise Overdue

    before = signal.signal(signal.SIGVTALRM, overdue)
    signal.setitimer(signal.ITIMER_VIRTUAL, BOUND_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
