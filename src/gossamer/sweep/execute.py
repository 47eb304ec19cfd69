"""Execution of a sweep: the runs that are left go to an executor, and their results are collected."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from gossamer.api import run as run_experiment
from gossamer.config import Experiment, Simulate
from gossamer.cores import cores
from gossamer.errors import BadInput, GossamerError, RunFailed, cause
from gossamer.progress import Display
from gossamer.results.folder import RunFolder, locked, write_text, writing
from gossamer.runtime.outcome import ending_signals
from gossamer.runtime.processes.executors import executor_of
from gossamer.runtime.recording import stopwatch
from gossamer.runtime.setup import prepare
from gossamer.sweep.pool import LocalPool
from gossamer.sweep.sweep import Planned, Sweep
from gossamer.sweep.table import ENDED_BADLY, State, state_of, states, write_results, write_state

_LOOK_S = 0.2
"""Seconds between two looks at whether the user wants it to stop."""
_SHOW_S = 1.0
"""Seconds between two looks at how far runs are, and between two of a run's reports."""
_turn = threading.Lock()
"""Runs in one process take turns, since they share torch's generator and number of threads."""


@dataclass(frozen=True)
class Counts:
    """The progress of the chosen runs: how many there are (equal experiments count once), ended before this call, were done
    or failed in this call, and run now, as far as the executor knows."""

    total: int
    skipped: int = 0
    done: int = 0
    failed: int = 0
    diverged: int = 0
    running: int = 0

    @property
    def ended(self) -> int:
        """Runs that ended in this call."""
        return self.done + self.failed + self.diverged

    @property
    def left(self) -> int:
        """Runs that have not ended."""
        return self.total - self.skipped - self.ended


@dataclass(frozen=True)
class Position:
    """How far a run is: the rounds that its nodes have completed, on average; and the mean over the nodes of its first metric
    at the latest evaluation, with its name."""

    rounds: int = 0
    metric: str | None = None
    value: float | None = None


class SweepObserver(Protocol):
    """Watches a sweep."""

    def update(self, counts: Counts, positions: Mapping[str, Position]) -> None:
        """Show the progress; called several times a second. ``positions`` has every run that has begun in this call, by the
        name of its folder."""

    def ended(self, planned: Planned, state: State, counts: Counts) -> None:
        """Show that a run has ended, or that the executor lost it."""


@dataclass(frozen=True)
class SweepOutcome:
    """The result of :func:`run_sweep`: counts of the chosen runs; those that have failed or diverged, in this call or
    before, with their state; and whether the user stopped it early."""

    counts: Counts
    failed: tuple[tuple[Planned, State], ...]
    stopped: bool


def run_sweep(
    sweep: Sweep,
    executor: Executor | str | None = None,
    *,
    jobs: int | None = None,
    only: Sequence[str] = (),
    retry_failed: bool = False,
    again: bool = False,
    observer: SweepObserver | None = None,
    command: Sequence[str] | None = None,
) -> SweepOutcome:
    """Do the runs of a sweep that are not done, and collect the results of all.

    Runs that were interrupted or stopped, or that an executor lost before they began, start again. The results depend
    neither on the executor nor on the number of jobs.

    Args:
        sweep: what to run; it is recorded in its folder.
        executor: any ``concurrent.futures.Executor``, which the caller shuts down; or the name of one, as for
            ``gossamer sweep --workers``. It gets a function of this package and plain data, and returns plain data; its
            workers must see the sweep's folder under the same path. None: processes of this machine.
        jobs: the number of those processes; None is as many as the cores carry (one for the engine ``processes``,
            whose time is real, and for a GPU).
        only: names of the cells to run; empty is all.
        retry_failed: whether runs that failed or diverged start again.
        again: whether runs that are done start again; their records stay, and the newest that is done counts.
        observer: watches the progress.
        command: the command line to record; None is this process's.

    Raises:
        BadInput: before any work starts, naming the cell. With an executor, data is first read where a run is done:
            missing data then fails the run.
    """
    if executor is not None and jobs is not None:
        raise BadInput("--jobs: accepted without --workers, whose executor knows how many runs it takes")
    chosen: dict[str, Planned] = {}
    for each in sweep.chosen(only):
        chosen.setdefault(each.run, each)
    kept = {"done": not again, **dict.fromkeys(ENDED_BADLY, not retry_failed)}

    def left(at: Mapping[str, State]) -> list[Planned]:
        return [each for run, each in chosen.items() if not kept.get(at[run].status, False)]

    if executor is None:
        _check(left(states(sweep)))
    with writing(f"--out {sweep.folder}"):
        sweep.folder.mkdir(parents=True, exist_ok=True)
    with locked(sweep.folder, "another process is running this sweep; accepted: one at a time"):
        with writing(f"--out {sweep.folder}"):
            write_text(sweep.folder / "sweep.yaml", sweep.to_yaml())
        before = states(sweep)
        todo = left(before)
        if executor is None and jobs is None:
            jobs = jobs_for([each.experiment for each in todo])
        counts = Counts(len(chosen), skipped=len(chosen) - len(todo))
        campaign = _Campaign(sweep, before, counts, observer)
        if todo:
            command = list(sys.argv if command is None else command)
            with _executor(executor, min(jobs or 1, len(todo))) as workers:
                campaign.run(todo, workers, command, alone=jobs == 1)
        write_results(sweep)
    at = campaign.states
    failed = tuple((each, at[run]) for run, each in chosen.items() if at[run].status in ENDED_BADLY)
    return SweepOutcome(campaign.counts, failed, campaign.stopping and campaign.counts.left > 0)


def jobs_for(experiments: Sequence[Experiment]) -> int:
    """The number of experiments that this machine's cores carry at once."""
    widths = []
    for experiment in experiments:
        engine = experiment.engine
        if not isinstance(engine, Simulate) or engine.device != "cpu":
            return 1
        widths.append((engine.workers or 1) * engine.threads)
    return max(min(cores() // max(widths, default=1), len(experiments)), 1)


def carry_out(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do one run, on an executor's worker; errors are returned, not raised.

    Args:
        job: ``experiment`` (resolved, as YAML), ``out`` (the sweep's folder, absolute), ``run`` (the run's folder in it),
            ``command`` (to record), ``stop`` (a file that exists if the sweep was stopped), ``progress`` (a file that says
            how far the run is) and ``path`` (for modules).

    Returns:
        ``status``, ``cause`` (of a failure or a divergence, in one line) and ``folder`` (the attempt's, if it was created).
    """
    sys.path += [path for path in job["path"] if path not in sys.path]
    with _turn:
        if Path(job["stop"]).exists():
            return asdict(State())
        try:
            experiment = Experiment.parse(job["experiment"])
            watcher = _Reporter(experiment, Path(job["progress"]))
            done = run_experiment(
                experiment, job["out"], name=job["run"], observer=watcher, command=job["command"]
            )
            watcher.report()
        except Exception as error:  # noqa: BLE001 - of any kind: it is this run's failure
            said = " ".join(str(error).split()) if isinstance(error, GossamerError) else cause(error)
            folder = error.folder if isinstance(error, RunFailed) else None
            return {"status": "failed", "cause": said, "folder": folder and str(folder)}
    return {"status": done.status, "cause": done.error, "folder": str(done.path)}


class _Reporter(Display):
    """Tells the sweep how far a run is, through a file: an executor's workers share nothing else with it."""

    def __init__(self, experiment: Experiment, file: Path) -> None:
        super().__init__(experiment)
        self._file, self._seconds = file, stopwatch()
        self._rounds_done, self._reported = 0, -_SHOW_S

    def progress(self, rounds: int, time_s: float) -> None:
        self._rounds_done = rounds // self._nodes
        if self._seconds() - self._reported >= _SHOW_S:
            self.report()

    def report(self) -> None:
        """Write how far the run is."""
        self._reported = self._seconds()
        metric, value = self.headline or (None, None)
        temporary = self._file.with_suffix(".new")
        with suppress(OSError):  # a full disk ends the display, not the run
            self._file.parent.mkdir(exist_ok=True)
            temporary.write_text(json.dumps([self._rounds_done, metric, value]))
            temporary.replace(self._file)

    def say(self, text: str) -> None:
        """Print and log nothing: there may be hundreds of runs."""


def _check(todo: Sequence[Planned]) -> None:
    """Find bad input before work starts, by loading the data once for each cell."""
    for name, each in {each.cell.name: each for each in reversed(todo)}.items():
        try:
            prepare(each.experiment)
        except BadInput as error:
            raise BadInput(*(f"cell {name}: {problem}" for problem in error.problems)) from None


@contextmanager
def _executor(given: Executor | str | None, jobs: int) -> Iterator[Executor]:
    if isinstance(given, Executor):
        yield given
        return
    executor = LocalPool(jobs) if given is None else executor_of(given)
    try:
        yield executor
    except BaseException:  # interrupted a second time
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()


class _Campaign:
    """The runs of one call, from submission to record."""

    def __init__(
        self, sweep: Sweep, before: dict[str, State], counts: Counts, observer: SweepObserver | None
    ) -> None:
        self.states, self.counts, self.stopping = before, counts, False
        self._sweep, self._observer = sweep, observer
        self._pending: dict[Future[Any], Planned] = {}
        self._progress, self._positions = sweep.folder.resolve() / ".progress", dict[str, Position]()
        self._clock, self._looked = stopwatch(), -_SHOW_S

    def run(self, todo: Sequence[Planned], executor: Executor, command: list[str], *, alone: bool) -> None:
        """Do all runs, or until the user stops the sweep; ``alone`` says that no two run at the same time."""
        out = self._sweep.folder.resolve()
        stop_file = out / ".stopped"
        stop_file.unlink(missing_ok=True)
        shutil.rmtree(self._progress, ignore_errors=True)  # of a sweep that was killed
        job = {"out": str(out), "command": command, "stop": str(stop_file), "path": [*filter(None, sys.path)]}
        self.states |= {each.run: State() for each in todo}
        write_state(self._sweep, self.states)
        try:
            with ending_signals(self._stop):
                for each in todo:
                    experiment = each.experiment if alone else _narrow(each.experiment)
                    own = {**job, "run": each.run, "experiment": experiment.to_yaml()}
                    own["progress"] = str(self._progress / f"{each.run}.json")
                    if self.stopping or not self._submit(each, executor, own):
                        break
                while self._pending:
                    if self.stopping and not stop_file.exists():
                        stop_file.touch()
                        self._take_back()
                    for future in wait(self._pending, _LOOK_S, FIRST_COMPLETED).done:
                        self._collect(future, self._pending.pop(future))
                    self.counts = replace(self.counts, running=sum(f.running() for f in self._pending))
                    if self._clock() - self._looked >= _SHOW_S:
                        self._looked = self._clock()
                        for file in self._progress.glob("*.json"):
                            self._look(file)
                    if self._observer is not None:
                        self._observer.update(self.counts, self._positions)
        finally:
            self.counts = replace(self.counts, running=0)
            shutil.rmtree(self._progress, ignore_errors=True)
            recorded = states(self._sweep)
            unrecorded = {run: state for run, state in self.states.items() if recorded[run].folder is None}
            write_state(self._sweep, recorded | unrecorded)

    def _stop(self) -> None:
        self.stopping = True

    def _look(self, file: Path) -> None:
        """Read how far a run is."""
        with suppress(OSError, ValueError, TypeError):  # it is shown, nothing else
            self._positions[file.stem] = Position(*json.loads(file.read_text()))

    def _submit(self, planned: Planned, executor: Executor, job: dict[str, Any]) -> bool:
        try:
            self._pending[executor.submit(carry_out, job)] = planned
        except Exception as error:  # noqa: BLE001 - the executor's, of any kind: it takes no more runs
            self._ended(planned, State("pending", f"the executor takes no more runs: {cause(error)}"))
            return False
        return True

    def _take_back(self) -> None:
        """Take back what has not begun, and ask for the end of the rest, as far as the executor can."""
        for future in list(self._pending):
            with suppress(NotImplementedError):  # Parsl's; what it has not begun will find the file
                if future.cancel():
                    del self._pending[future]

    def _collect(self, future: Future[Any], planned: Planned) -> None:
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or (error and self.stopping):
            return
        if error is None:
            said = future.result()
            folder = said["folder"] and self._sweep.folder / planned.run / Path(said["folder"]).name
            self._ended(planned, State(said["status"], said["cause"], folder))
            return
        state = state_of(self._sweep.folder / planned.run)
        if state.status == "interrupted" and state.folder is not None:
            RunFolder.open(state.folder).write_status("failed", error=cause(error))
            state = State("failed", cause(error), state.folder)
        else:
            state = State("pending", f"the executor lost it before it began: {cause(error)}")
        self._ended(planned, state)

    def _ended(self, planned: Planned, state: State) -> None:
        self.states[planned.run] = state
        if state.status in ("done", *ENDED_BADLY):
            counts = self.counts
            self.counts = replace(counts, **{state.status: getattr(counts, state.status) + 1})
        with suppress(OSError):  # it is written once more at the end
            write_state(self._sweep, self.states)
        if self._observer is not None and (state.status != "pending" or state.cause is not None):
            file = self._progress / f"{planned.run}.json"
            self._look(file)
            file.unlink(missing_ok=True)
            self._observer.update(self.counts, self._positions)
            self._observer.ended(planned, state, self.counts)


def _narrow(experiment: Experiment) -> Experiment:
    """A simulation that runs at the same time as others takes one core, unless it names a number."""
    engine = experiment.engine
    if not isinstance(engine, Simulate) or engine.workers is not None:
        return experiment
    return experiment.model_copy(update={"engine": engine.model_copy(update={"workers": 1})})
