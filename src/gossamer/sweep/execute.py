"""Execution of a sweep: the runs that are left go to an executor, and their results are collected."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from gossamer.config import Experiment, Simulate
from gossamer.cores import cores
from gossamer.errors import BadInput, cause
from gossamer.results.folder import RunFolder, write_text
from gossamer.runtime.setup import prepare
from gossamer.runtime.signals import ending_signals
from gossamer.sweep.executors import Processes, Serial, WorkerDied
from gossamer.sweep.job import Ended, Job, carry_out
from gossamer.sweep.state import State, claimed, states, write_state
from gossamer.sweep.sweep import Planned, Sweep
from gossamer.sweep.table import write_results

_LOOK_S = 0.2
"""Seconds between two looks at whether the user wants it to stop."""


@dataclass(frozen=True)
class Counts:
    """The progress of the chosen runs.

    Args:
        total: all of them; equal experiments count once.
        skipped: those that ended before this call.
        done, failed: those that ended in this call.
        running: those that run now, as far as the executor knows.
    """

    total: int
    skipped: int = 0
    done: int = 0
    failed: int = 0
    running: int = 0

    @property
    def ended(self) -> int:
        """Runs that ended in this call."""
        return self.done + self.failed

    @property
    def left(self) -> int:
        """Runs that have not ended."""
        return self.total - self.skipped - self.ended


@runtime_checkable
class SweepObserver(Protocol):
    """Watches a sweep."""

    def update(self, counts: Counts) -> None:
        """Show the progress; called several times a second."""

    def ended(self, planned: Planned, state: State, counts: Counts) -> None:
        """Show that a run has ended."""


@dataclass(frozen=True)
class SweepOutcome:
    """The result of :func:`run_sweep`.

    Args:
        counts: of the chosen runs.
        failed: those that have failed, in this call or before, with their state.
        stopped: whether the user stopped it early.
    """

    counts: Counts
    failed: tuple[tuple[Planned, State], ...]
    stopped: bool


def run_sweep(
    sweep: Sweep,
    executor: Executor | None = None,
    *,
    jobs: int | None = None,
    only: Sequence[str] = (),
    retry_failed: bool = False,
    again: bool = False,
    observer: SweepObserver | None = None,
    command: Sequence[str] | None = None,
) -> SweepOutcome:
    """Do the runs of a sweep that are not done, and collect the results of all.

    Runs that were interrupted or stopped start again. The results depend neither on the executor nor on the number of
    jobs.

    Args:
        sweep: what to run; it is recorded in its folder.
        executor: any ``concurrent.futures.Executor``, which the caller shuts down. It gets a function of this package and
            plain data, and returns plain data; its workers must see the sweep's folder under the same path. Runs in
            threads of one process take turns. None: this process for one job, worker processes for several.
        jobs: runs at a time, without an executor; None is as many as the cores carry (one for the engine ``processes``,
            whose time is real, and for a GPU).
        only: names of the cells to run; empty is all.
        retry_failed: whether failed runs start again.
        again: whether runs that are done start again; their records stay, and the newest that is done counts.
        observer: watches the progress.
        command: the command line to record; None is this process's.

    Raises:
        BadInput: before any work starts, naming the cell. With the caller's executor, data is first read where a run is
            done: missing data then fails the run.
    """
    chosen: dict[str, Planned] = {}
    for each in sweep.chosen(only):
        chosen.setdefault(each.run, each)

    def left(at: Mapping[str, State]) -> list[Planned]:
        kept = {"done": not again, "failed": not retry_failed}
        return [each for run, each in chosen.items() if not kept.get(at[run].status, False)]

    if executor is None:
        _check(left(states(sweep)))
    with claimed(sweep.folder):
        write_text(sweep.folder / "sweep.yaml", sweep.to_yaml())
        before = states(sweep)
        todo = left(before)
        counts = Counts(len(chosen), skipped=len(chosen) - len(todo))
        campaign = _Campaign(sweep, before, counts, observer, list(sys.argv if command is None else command))
        with _executor(executor, jobs, todo) as workers:
            campaign.run(todo, workers)
        write_results(sweep)
    at = campaign.states
    failed = tuple((each, at[run]) for run, each in chosen.items() if at[run].status == "failed")
    return SweepOutcome(campaign.counts, failed, campaign.stopping and campaign.counts.left > 0)


def jobs_for(experiments: Sequence[Experiment]) -> int:
    """How many of some experiments this machine's cores carry at once."""
    widths = []
    for experiment in experiments:
        engine = experiment.engine
        if not isinstance(engine, Simulate) or engine.device != "cpu":
            return 1
        widths.append((engine.workers or 1) * engine.threads)
    return max(min(cores() // max(widths, default=1), len(experiments)), 1)


def _check(todo: Sequence[Planned]) -> None:
    """Find bad input before work starts, by loading the data once for each cell."""
    first: dict[str, Planned] = {}
    for each in todo:
        first.setdefault(each.cell.name, each)
    for name, each in first.items():
        try:
            prepare(each.experiment)
        except BadInput as error:
            raise BadInput(*(f"cell {name}: {problem}" for problem in error.problems)) from None


@contextmanager
def _executor(given: Executor | None, jobs: int | None, todo: Sequence[Planned]) -> Iterator[Executor]:
    if given is not None:
        yield given
        return
    wanted = jobs_for([each.experiment for each in todo]) if jobs is None else jobs
    if min(wanted, len(todo)) <= 1:
        yield Serial()
        return
    with Processes(min(wanted, len(todo))) as processes:
        try:
            yield processes
        except BaseException:
            processes.kill()  # interrupted a second time
            raise


class _Campaign:
    """The runs of one call, from submission to record."""

    def __init__(
        self,
        sweep: Sweep,
        before: dict[str, State],
        counts: Counts,
        observer: SweepObserver | None,
        command: list[str],
    ) -> None:
        self.states, self.counts = before, counts
        self.stopping = False
        self._sweep, self._observer, self._command = sweep, observer, command
        self._pending: dict[Future[Any], Planned] = {}

    def run(self, todo: Sequence[Planned], executor: Executor) -> None:
        """Do all runs, or until the user stops the sweep."""
        serial, told = isinstance(executor, Serial), False
        for each in todo:
            self.states[each.run] = State()
        write_state(self._sweep, self.states)
        try:
            with ending_signals(self._interrupt if serial else self._stop):
                for each in todo:
                    if self.stopping:
                        break
                    self._update(running=int(serial))
                    self._submit(each, executor)
                    # Only the user stops a run in this process.
                    self.stopping |= serial and self.states[each.run].status == "stopped"
                while self._pending:
                    if self.stopping and not told:
                        told = True
                        self._pending = {
                            future: each for future, each in self._pending.items() if not future.cancel()
                        }
                        if isinstance(executor, Processes):
                            executor.stop()
                    self._collect(_LOOK_S)
                    self._update(running=sum(future.running() for future in self._pending))
        except KeyboardInterrupt:
            if not serial:
                raise
            self.stopping = True
        finally:
            self.counts = replace(self.counts, running=0)
            write_state(self._sweep, states(self._sweep))

    def _stop(self) -> None:
        self.stopping = True

    def _interrupt(self) -> None:
        """Stop between two runs in this process, or while one loads its data."""
        raise KeyboardInterrupt

    def _submit(self, planned: Planned, executor: Executor) -> None:
        experiment = planned.experiment
        if not isinstance(executor, Serial):
            experiment = _narrow(experiment)
        job: Job = {
            "experiment": experiment.to_yaml(),
            "out": str(self._sweep.folder.resolve()),
            "run": planned.run,
            "command": self._command,
        }
        try:
            future = executor.submit(carry_out, job)
        except BrokenExecutor:  # the runs that were begun say why; this one is left for another call
            return
        self._pending[future] = planned
        if future.done():
            self._collect(0)

    def _collect(self, timeout_s: float) -> None:
        for future in wait(self._pending, timeout_s, FIRST_COMPLETED).done:
            planned = self._pending.pop(future)
            try:
                self._ended(planned, self._state(planned, future.result()))
            except CancelledError:  # by its executor
                continue
            except Exception as error:  # noqa: BLE001 - of the executor or its worker: this run's failure
                self._broke(planned, error)

    def _state(self, planned: Planned, said: Ended) -> State:
        folder = said["folder"] and self._sweep.folder / planned.run / Path(said["folder"]).name
        return State(said["status"], said["cause"], folder or None)

    def _broke(self, planned: Planned, error: Exception) -> None:
        """A run that was begun is lost; or it was never begun, because a process had died before."""
        state = states(self._sweep)[planned.run]
        if self.stopping or (state.folder is None and isinstance(error, BrokenExecutor)):
            return
        said = " ".join(str(error).split()) if isinstance(error, WorkerDied) else cause(error)
        if state.status == "interrupted" and state.folder is not None:
            RunFolder.open(state.folder).write_status("failed", error=said)
        self._ended(planned, replace(state, status="failed", cause=said))

    def _ended(self, planned: Planned, state: State) -> None:
        self.states[planned.run] = state
        if state.status in ("done", "failed"):
            counts = self.counts
            self.counts = replace(counts, **{state.status: getattr(counts, state.status) + 1})
        write_state(self._sweep, self.states)
        if self._observer is not None:
            self._observer.ended(planned, state, self.counts)

    def _update(self, running: int) -> None:
        self.counts = replace(self.counts, running=running)
        if self._observer is not None:
            self._observer.update(self.counts)


def _narrow(experiment: Experiment) -> Experiment:
    """A simulation that runs at the same time as others takes one core, unless it names a number."""
    engine = experiment.engine
    if not isinstance(engine, Simulate) or engine.workers is not None:
        return experiment
    return experiment.model_copy(update={"engine": engine.model_copy(update={"workers": 1})})
