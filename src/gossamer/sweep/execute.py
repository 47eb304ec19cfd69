"""Execution of a sweep: the remaining runs are submitted to an executor, and their results are collected."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gossamer.api import run as run_experiment
from gossamer.api import run_lock
from gossamer.config import Experiment, Simulate
from gossamer.cores import cores
from gossamer.errors import BadInput, GossamerError, RunFailed, cause
from gossamer.progress import Display
from gossamer.results.folder import RunFolder, write_text, writing
from gossamer.results.formatting import metric_title, numerals, some
from gossamer.runtime.outcome import ending_signals
from gossamer.runtime.processes.executors import executor_of
from gossamer.runtime.recording import stopwatch
from gossamer.runtime.setup import prepare
from gossamer.sweep.cells import Planned
from gossamer.sweep.pool import LocalPool
from gossamer.sweep.run_claims import LOOK_S, RunClaim, Watch, held_for, process, remove
from gossamer.sweep.stale import Findings, look
from gossamer.sweep.sweep import Sweep
from gossamer.sweep.table import ENDED, ENDED_BADLY, RunState, state_of, states, write_results, write_state

_CHECK_S = 0.2
"""Seconds between two checks whether the user has stopped the sweep."""
_WRITE_S = 1.0
"""Seconds between two writes of ``sweep.json``, at least."""
_CLAIMED = "claimed"
"""The answer of a worker that another process has the run."""


@dataclass(frozen=True)
class Counts:
    """The progress of the chosen runs: the numbers of all runs (equal experiments count once), of those that
    ended before this call, succeeded or failed during this call, are running according to the executor, and are claimed by
    other processes."""

    total: int
    skipped: int = 0
    done: int = 0
    failed: int = 0
    diverged: int = 0
    running: int = 0
    elsewhere: int = 0

    @property
    def ended(self) -> int:
        """Runs that ended during this call."""
        return self.done + self.failed + self.diverged

    @property
    def left(self) -> int:
        """Runs that have not ended."""
        return self.total - self.skipped - self.ended


class SweepObserver:
    """Base class of observers of a sweep. It shows nothing."""

    def say(self, text: str) -> None:
        """Show a sentence about the sweep: on the runs that were finished before, or those of other processes."""

    def update(self, counts: Counts) -> None:
        """Show the progress; called several times a second."""

    def ended(self, planned: Planned, state: RunState, counts: Counts, value: str) -> None:
        """Show that a run has ended, with its first metric as text, or that the executor lost it."""


@dataclass(frozen=True)
class SweepOutcome:
    """The result of :func:`run_sweep`: counts of the chosen runs, the runs that failed or diverged in this
    call or earlier with their states, whether the user stopped the sweep, and sentences on what has changed since
    the runs that were finished before."""

    counts: Counts
    failed: tuple[tuple[Planned, RunState], ...]
    stopped: bool
    notes: tuple[str, ...] = ()


def run_sweep(
    sweep: Sweep,
    executor: Executor | str | None = None,
    *,
    jobs: int | None = None,
    only: Sequence[str] = (),
    array: tuple[int, int] | None = None,
    retry_failed: bool = False,
    again: bool = False,
    keep: bool = False,
    observer: SweepObserver | None = None,
) -> SweepOutcome:
    """Do the unfinished runs of a sweep, and collect the results of all runs.

    Runs that were interrupted or stopped, or lost by an executor before they began, start again. The results
    depend neither on the executor nor on the number of jobs.

    Several processes, on one or many machines that see the sweep's folder, may call this at the same time. Each run is done
    by one of them (:mod:`gossamer.sweep.run_claims`); each call waits for the runs of the others, and starts a run again if
    its process has died.

    Args:
        sweep: the sweep to run. It is recorded in its folder.
        executor: any ``concurrent.futures.Executor``, which the caller shuts down, or the name of one, as for
            ``gossamer sweep --workers``. It gets a function of this package and plain data, and returns plain
            data. Its workers must see the sweep's folder under the same path. None: processes on this
            machine.
        jobs: the number of these processes. None is chosen by the number of cores (one for the engine
            ``processes``, whose time is real, and for a GPU).
        only: names of the cells to run; empty is all.
        array: (k, n) is the k-th of n shares of these runs, with k from 0 to n - 1 or from 1 to n. None is all.
        retry_failed: whether runs that failed or diverged start again.
        again: whether finished runs start again. Their records are kept, and the newest finished one counts.
        keep: whether finished runs count although their own code or data has changed since, or an older version
            measured them at instants. Otherwise such runs stop the sweep, unless ``again``.
        observer: watches the progress, such as :class:`gossamer.sweep.display.SweepLines`.

    Raises:
        BadInput: before any work starts, with the name of the cell; also for stale runs (``keep``).
            With an executor, data is only read by
            the runs, so missing data fails a run.
    """
    if executor is not None and jobs is not None:
        raise BadInput("--jobs: accepted without --workers, whose executor decides how many runs it takes")
    chosen = by_run(sweep.chosen(only, array))
    found = findings(sweep, chosen, states(sweep), again=again, keep=keep)
    if not keep:
        found.refuse(sweep.folder, chosen)
    if executor is None:
        _check(remaining(chosen, states(sweep), retry_failed=retry_failed, again=again))
    with writing(f"--out {sweep.folder}"):
        sweep.folder.mkdir(parents=True, exist_ok=True)
        write_text(sweep.folder / "sweep.yaml", sweep.to_yaml())
    before = states(sweep)
    todo = remaining(chosen, before, retry_failed=retry_failed, again=again)
    if executor is None and jobs is None:
        jobs = jobs_for([planned.experiment for planned in todo])
    counts = Counts(len(chosen), skipped=len(chosen) - len(todo))
    observer = observer or SweepObserver()
    notes = found.notes()
    if array is not None:
        runs = len({planned.run for planned in sweep.chosen(only)})
        observer.say(f"--array {array[0]}/{array[1]}: {len(chosen)} of {runs} runs")
    for text in notes:
        observer.say(text)
    sweep_run = _SweepRun(sweep, before, counts, observer)
    if todo:
        with _executor(executor, min(jobs or 1, len(todo))) as workers:
            sweep_run.run(todo, workers, alone=jobs == 1)
    write_results(sweep, sweep_run.states)
    ended = [(planned, sweep_run.states[run]) for run, planned in chosen.items()]
    failed = tuple((planned, state) for planned, state in ended if state.status in ENDED_BADLY)
    stopped = sweep_run.stopping and sweep_run.counts.left > 0
    return SweepOutcome(sweep_run.counts, failed, stopped, tuple(notes))


def by_run(chosen: Sequence[Planned]) -> dict[str, Planned]:
    """The chosen runs by their folder; equal experiments of several cells are one run."""
    first: dict[str, Planned] = {}
    for planned in chosen:
        first.setdefault(planned.run, planned)
    return first


def findings(
    sweep: Sweep,
    chosen: Mapping[str, Planned],
    before: Mapping[str, RunState],
    *,
    again: bool = False,
    keep: bool = False,
) -> Findings:
    """The changes since the finished runs that do not start again. Runs that are not chosen are included, since the results
    compare all of them. The arguments are those of :func:`run_sweep`."""
    if again and keep:
        raise BadInput("--keep: with --again, which starts finished runs again; accepted: one of them")
    runs = by_run([*chosen.values(), *sweep.planned])
    finished = {run: (planned, before[run]) for run, planned in runs.items() if before[run].status == "done"}
    return look({run: found for run, found in finished.items() if not (again and run in chosen)})


def remaining(
    chosen: Mapping[str, Planned],
    before: Mapping[str, RunState],
    *,
    retry_failed: bool = False,
    again: bool = False,
) -> list[Planned]:
    """The chosen runs that a call does, in their order; arguments as for :func:`run_sweep`."""
    skipped = {"done": not again, **dict.fromkeys(ENDED_BADLY, not retry_failed)}
    return [planned for run, planned in chosen.items() if not skipped.get(before[run].status, False)]


def jobs_for(experiments: Sequence[Experiment]) -> int:
    """The number of experiments that this machine's cores can run at the same time."""
    widths = [1]
    for experiment in experiments:
        engine = experiment.engine
        if not isinstance(engine, Simulate) or engine.device != "cpu":
            return 1
        widths.append((engine.workers or 1) * engine.threads)
    return max(min(cores() // max(widths), len(experiments)), 1)


def carry_out(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do one run on an executor's worker. Errors are returned, not raised.

    Args:
        job: ``experiment`` (resolved, as YAML), ``out`` (the sweep's folder, absolute), ``run`` (the run's
            folder in it), ``seen`` (the status and the attempt that the sweep's process has seen), ``owner`` (that process)
            and ``after`` (for the claim), ``command`` (to record), ``stop`` (a file that exists once the user has stopped the
            sweep) and ``path`` (for importing modules).

    Returns:
        ``status`` ("claimed" if another process has the run), ``cause`` (of a failure or a divergence, in one line),
        ``folder`` (of the attempt, if it was created) and ``value`` (the first metric as text, or who has done the run).
    """
    sys.path += [path for path in job["path"] if path not in sys.path]
    with run_lock:
        if (stop := Path(job["stop"])).exists():
            return _answer("pending")
        try:
            folder = Path(job["out"], job["run"])
            if (claim := RunClaim.take(folder, job["owner"], job["after"])) is None:
                return _answer(_CLAIMED)
            with claim:
                now = state_of(folder)
                if now.status in ENDED and _seen(now) != job["seen"]:  # who had it has done it
                    return _answer(now.status, now.cause, now.folder, "by another process")
                experiment = Experiment.parse(job["experiment"])
                watcher = _OneOfMany(experiment, stop, claim)
                done = run_experiment(
                    experiment, job["out"], name=job["run"], observer=watcher, command=job["command"]
                )
                if done.status == "stopped" and claim.lost:
                    return _answer(_CLAIMED)
        except Exception as error:  # noqa: BLE001 - any error is this run's failure
            reason = " ".join(str(error).split()) if isinstance(error, GossamerError) else cause(error)
            return _answer("failed", reason, error.folder if isinstance(error, RunFailed) else None)
    return _answer(done.status, done.error, done.path, watcher.value)


def _answer(
    status: str, cause: str | None = None, folder: Path | None = None, value: str = ""
) -> dict[str, Any]:
    return {"status": status, "cause": cause, "folder": folder and str(folder), "value": value}


def _seen(state: RunState) -> list[str | None]:
    """A state of a run, in short, as it is sent to workers."""
    return [state.status, None if state.folder is None else state.folder.name]


class SilentDisplay(Display):
    """Prints nothing, since there may be hundreds of runs.

    Attributes:
        round: the round of the latest evaluation."""

    round: int | None = None

    def say(self, text: str) -> None:
        """Print and log nothing."""

    def evaluated(self, row: Mapping[str, Any]) -> None:
        self.round = row["round"]

    @property
    def value(self) -> str:
        """The first metric at the latest evaluation, as text."""
        return f"{metric_title(self.headline[0])} {numerals(self.headline[1])[0]}" if self.headline else ""


class _OneOfMany(SilentDisplay):
    """Ends its run once the file ``stop`` exists, or another process has the run."""

    def __init__(self, experiment: Experiment, stop: Path, claim: RunClaim) -> None:
        super().__init__(experiment)
        self._stop, self._claim = stop, claim
        self._seconds, self._checked_s = stopwatch(), 0.0

    def progress(self, rounds: int, time_s: float) -> None:
        if (now_s := self._seconds()) - self._checked_s >= _CHECK_S:
            self._checked_s, self.stopping = now_s, self._claim.lost or self._stop.exists()


def _check(todo: Sequence[Planned]) -> None:
    """Find bad input before work starts, by loading the data of each cell once."""
    for name, experiment in {planned.cell.name: planned.experiment for planned in reversed(todo)}.items():
        try:
            for tracker in experiment.trackers:
                tracker.check()
            with run_lock:
                prepare(experiment)
        except BadInput as error:
            raise error.within(f"cell {name}") from None


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


class _SweepRun:
    """The runs of one call, from submission to record."""

    def __init__(
        self, sweep: Sweep, before: dict[str, RunState], counts: Counts, observer: SweepObserver
    ) -> None:
        self.states, self.counts, self.stopping = dict(before), counts, False
        self._sweep, self._before, self._observer = sweep, before, observer
        self._pending: dict[Future[Any], Planned] = {}
        self._elsewhere: dict[str, Planned] = {}  # runs that other processes have claimed
        self._watch, self._seconds = Watch(), stopwatch()
        self._look_s = self._write_s = 0.0  # when to look and to write next
        self._waits = False

    def run(self, todo: Sequence[Planned], executor: Executor, *, alone: bool) -> None:
        """Do all runs, unless the user stops the sweep first. ``alone``: no two runs execute at the same time."""
        out = self._sweep.folder.resolve()
        stop = out / f".stopped-{secrets.token_hex(4)}"  # other processes that share the sweep go on
        path = [*filter(None, sys.path)]
        job = {"out": str(out), "command": sys.argv, "stop": str(stop), "path": path, "owner": process()}
        self.states |= {planned.run: RunState() for planned in todo}
        self._write()

        def submit(planned: Planned, after: int) -> bool:
            experiment = planned.experiment if alone else narrow(planned.experiment)
            seen = _seen(self._before[planned.run])
            details = {"run": planned.run, "experiment": experiment.to_yaml(), "seen": seen, "after": after}
            return self._submit(planned, executor, job | details)

        try:
            what = "the sweep ends, and the runs that have begun keep their records"
            with ending_signals(self._stop, self._observer.say, what):
                for planned in todo:
                    if self.stopping or not submit(planned, 0):
                        break
                while self._pending or (self._elsewhere and not self.stopping):
                    if self.stopping and not stop.exists():
                        self._cancel_pending()
                        stop.touch()
                    self._collect_ended()
                    if not self.stopping:
                        for planned, after in self._freed():
                            submit(planned, after)
                    running = sum(future.running() for future in self._pending)
                    self.counts = replace(self.counts, running=running, elsewhere=len(self._elsewhere))
                    self._observer.update(self.counts)
        finally:
            self.counts = replace(self.counts, running=0)
            self._write()
            if not self._pending:
                stop.unlink(missing_ok=True)

    def _write(self) -> None:
        known = {run: state for run, state in self.states.items() if state.status in ENDED}
        write_state(self._sweep, states(self._sweep, known))

    def _stop(self) -> None:
        self.stopping = True

    def _submit(self, planned: Planned, executor: Executor, job: dict[str, Any]) -> bool:
        try:
            self._pending[executor.submit(carry_out, job)] = planned
        except Exception as error:  # noqa: BLE001 - after any error, the executor takes no more runs
            self._ended(planned, RunState("pending", f"the executor failed: {cause(error)}"))
            return False
        return True

    def _cancel_pending(self) -> None:
        """Cancel the runs that have not begun, if the executor can; the others find the file ``stop``."""
        for future in list(self._pending):
            with suppress(NotImplementedError):  # Parsl's
                if future.cancel():
                    del self._pending[future]

    def _freed(self) -> Iterator[tuple[Planned, int]]:
        """The runs that other processes no longer have, because they have ended them, or died; and the numbers of their
        claims. A worker looks what the record says."""
        if self._elsewhere and not self._pending and not self._waits:
            self._waits = True
            titles = [planned.title for planned in self._elsewhere.values()]
            self._observer.say(f"waits for runs of other processes: {some(titles, 4)}")
        if self._seconds() < self._look_s:
            return
        self._look_s = self._seconds() + LOOK_S
        for run, planned in list(self._elsewhere.items()):
            if (after := self._watch.dead(self._sweep.folder / run)) is not None:
                del self._elsewhere[run]
                yield planned, after

    def _collect_ended(self) -> None:
        if not self._pending:
            time.sleep(_CHECK_S)
        for future in wait(self._pending, _CHECK_S, FIRST_COMPLETED).done:
            self._collect(future, self._pending.pop(future))

    def _collect(self, future: Future[Any], planned: Planned) -> None:
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or (error and self.stopping):
            return
        if error is not None:
            self._ended(planned, self._lost(planned, cause(error)))
            return
        result = future.result()
        if result["status"] == _CLAIMED:
            self._elsewhere[planned.run] = planned
            self._look_s = 0.0
            return
        folder = result["folder"] and self._sweep.folder / planned.run / Path(result["folder"]).name
        self._ended(planned, RunState(result["status"], result["cause"], folder), result["value"])

    def _lost(self, planned: Planned, why: str) -> RunState:
        """The state of a run that an executor lost."""
        folder = self._sweep.folder / planned.run
        state, began = state_of(folder), held_for(folder, process())
        if began and state.folder is not None and state != self._before[planned.run]:
            RunFolder.open(state.folder).write_status("failed", error=why)
            state = RunState("failed", why, state.folder)
        else:
            state = RunState("pending", f"the executor lost it before it began: {why}")
        if began:
            remove(folder)
        return state

    def _ended(self, planned: Planned, state: RunState, value: str = "") -> None:
        self.states[planned.run] = state
        if state.status in ENDED:
            counts = self.counts
            self.counts = replace(counts, **{state.status: getattr(counts, state.status) + 1})
        if self._seconds() >= self._write_s:
            with suppress(OSError):  # it is written again at the end
                self._write()
            self._write_s = self._seconds() + _WRITE_S
        if state.status != "pending" or state.cause is not None:
            self._observer.ended(planned, state, self.counts, value)


def narrow(experiment: Experiment) -> Experiment:
    """A simulation that runs at the same time as others takes one core, unless it names a number."""
    engine = experiment.engine
    if not isinstance(engine, Simulate) or engine.workers is not None:
        return experiment
    return experiment.model_copy(update={"engine": engine.model_copy(update={"workers": 1})})
