"""Run an experiment, and resume a run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer import numerics
from gossamer.config import Experiment, Simulate
from gossamer.config.registry import check_not_importing
from gossamer.errors import BadInput, RunFailed, beginning_at_own_lines
from gossamer.fingerprint import (
    changed_code,
    changed_data,
    changed_versions,
    not_compared,
    sources,
    unknown,
)
from gossamer.progress import in_notebook, watching
from gossamer.results.checkpoints import RunCheckpoint, newest, remove_later, rewind
from gossamer.results.closing import close_after, close_record
from gossamer.results.folder import (
    RunFolder,
    environment,
    latest,
    locked,
    versions,
    without_secrets,
    write_json,
    write_text,
)
from gossamer.results.formatting import some
from gossamer.results.observer import Observer
from gossamer.results.reading import MEASURED_BEFORE, NETWORK
from gossamer.results.run import Run, load_run
from gossamer.results.trackers import Trackers
from gossamer.runtime.outcome import Engine, Outcome, nobody_took_part
from gossamer.runtime.warm_start import resolved

if TYPE_CHECKING:
    from gossamer.runtime.processes.fork_server import ForkServer, Listen

run_lock = threading.RLock()
"""Runs in several threads of a process take turns, since they share torch's generator and thread count."""


def run(
    experiment: Experiment,
    out: str | Path = "runs",
    *,
    name: str | None = None,
    observer: Observer | None = None,
    command: Sequence[str] | None = None,
    server: ForkServer | None = None,
    listen: Listen | None = None,
) -> Run:
    """Run an experiment and record it.

    Args:
        experiment: the experiment to run, under the engine that it names.
        out: the folder of all runs. This run is recorded in ``<out>/<name>/<id>/``.
        name: the folder's ``<name>``; None is the experiment's name.
        observer: watches the run; None is a live display in a notebook, and the log elsewhere.
        command: the command line to record; None is this process's.
        server: for the engine ``processes``: a fork server that was started earlier, which saves the seconds
            of importing torch. It serves one run. None starts one.
        listen: for the engine ``processes``: the address at which workers on other machines join (``gossamer
            worker``) to run all nodes. None runs the nodes on this machine.

    Returns:
        The recorded run.

    Raises:
        BadInput: if something in the experiment is invalid, before any work starts.
        RunFailed: if a node failed or died, or all nodes wait forever. The error's ``folder`` is the folder
            with the record up to the failure.
    """
    check_not_importing("run")
    experiment = resolved(experiment)
    with beginning_at_own_lines(), run_lock, _observing(experiment, observer) as watcher:
        trackers = Trackers(experiment.trackers, watcher)
        with _engine(experiment, server, listen) as engine:
            folder = RunFolder.create(
                Path(out),
                name or experiment.name,
                experiment=experiment.to_yaml(),
                environment=_environment(experiment, engine, _shown(command or sys.argv, listen)),
                setup=engine.description,
                sources=sources(experiment, engine.fingerprint["code"]),
            )
            with locked(folder.path):
                return _carry_out(engine, experiment, folder, trackers)


def resume(
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    observer: Observer | None = None,
    server: ForkServer | None = None,
    listen: Listen | None = None,
) -> Run:
    """Continue a run in its folder from its newest complete checkpoint, after it was killed or stopped, has
    failed, or is done and gets a later end.

    Args:
        path: the run's folder.
        overrides: assignments to ``stop`` and ``checkpoint``, like ``"stop.rounds=200"``.
        observer, server, listen: as in :func:`run`.

    Returns:
        The recorded run.

    Raises:
        BadInput: if there is no checkpoint, if the run is done or still running, or if its experiment or its data was
            edited. Own code may have been mended; the run says so and records it.
        RunFailed: as in :func:`run`.
    """
    folder = RunFolder.open(Path(path))
    overrides = list(overrides)
    for text in overrides:
        if not text.startswith(("stop.", "stop=", "checkpoint.", "checkpoint=")):
            raise BadInput(f"--set {text}: accepted: stop and checkpoint, for a run that is resumed")
    with beginning_at_own_lines(), run_lock, locked(folder.path) as is_locked:
        experiment = _recorded_experiment(folder.path, overrides)
        with _observing(experiment, observer) as watcher:
            if not is_locked:
                watcher.say(f"{folder.path}: folders can't be locked here; no other process may run it now")
            checkpoint = _resumable(folder, experiment, watcher)
            trackers = Trackers(experiment.trackers, watcher)
            with _engine(experiment, server, listen) as engine:
                changes = _changes(folder, engine)
                shown = _shown(sys.argv, listen)
                return _carry_out(engine, experiment, folder, trackers, checkpoint, changes, shown)


def _recorded_experiment(folder: Path, overrides: Iterable[str] = ()) -> Experiment:
    """The experiment of a run's record, which continues to show what its rows show."""
    raw = Experiment.read(folder / "experiment.yaml", overrides)
    raw["evaluation"] = {"of": MEASURED_BEFORE, **(raw.get("evaluation") or {})}
    return Experiment.of(raw, folder.resolve())


def _observing(experiment: Experiment, observer: Observer | None) -> AbstractContextManager[Observer]:
    return watching(experiment, quiet=not in_notebook()) if observer is None else nullcontext(observer)


def _resumable(folder: RunFolder, experiment: Experiment, observer: Observer) -> RunCheckpoint:
    """The checkpoint from which a run continues: the newest undamaged one. The record has to be undamaged
    too."""
    path, stop, run = folder.path, experiment.stop, load_run(folder.path)
    if experiment.has_faults:
        raise BadInput(
            f"{path}: a run with faults or engine.restart, whose nodes are saved separately; accepted: one without"
        )
    for part in ("environment", "setup", "metrics", "events", "timeline"):
        getattr(run, part)  # reads the part before anything changes
    if (checkpoint := newest(folder.checkpoints, observer.say, verified=True)) is None:
        raise BadInput(
            f"{path}: it has no checkpoint; accepted: a run with checkpoint.every_rounds or checkpoint.every_s"
        )
    if run.status == "done" and stop == _recorded_experiment(path).stop:
        raise BadInput(
            f"{path}: the run is done; accepted: another end, e.g. --set stop.rounds={2 * (stop.rounds or 100)}"
        )
    checkpoint.check(experiment)
    ended = checkpoint.experiment["stop"]["rounds"]
    simultaneous = experiment.algorithm.gathers and not checkpoint.ends_apart(ended)
    if stop.rounds != ended and ended in checkpoint.rounds.values() and not simultaneous:
        # A node behaves differently after its last round.
        earlier = newest(
            folder.checkpoints, verified=True, fits=lambda checkpoint: ended not in checkpoint.rounds.values()
        )
        checkpoint = earlier or checkpoint
    saved = {"rounds": max(checkpoint.rounds.values()), "time_s": checkpoint.time_s}
    for field, value in saved.items():
        end = getattr(stop, field)
        if end is not None and value is not None and end < value:
            raise BadInput(f"stop.{field}: got {end:g}; accepted: at least {value:g}, that of the checkpoint")
    if _simulated(experiment) and len(checkpoint.rounds) < experiment.nodes:
        lost = sorted(set(range(experiment.nodes)) - checkpoint.rounds.keys())
        raise BadInput(
            f"{path}: nodes {lost} were lost; accepted under simulate: a run that has all of its nodes"
        )
    return checkpoint


def _changes(folder: RunFolder, engine: Engine) -> list[str]:
    """What has changed since the run was computed last, as sentences. BadInput for other data."""
    before, now = latest(load_run(folder.path).environment), engine.fingerprint
    texts = []
    if (recorded := before.get("fingerprint")) is None:
        texts.append(
            "the record has no fingerprint, so it is not known whether own code or data has changed since"
        )
    else:
        if changed := changed_data(recorded["data"], now["data"]):
            raise BadInput(
                f"{folder.path}: its data has changed: {some(changed)}; accepted: the data with which it began"
            )
        if alone := not_compared(recorded["data"], now["data"]):
            texts.append(f"read only before or only now, so not compared: {some(alone)}")
        if changed := changed_code(recorded["code"], now["code"]):
            changed_modules = some([f"module {name}" for name in changed])
            texts.append(f"continues with other code than before: {changed_modules}")
    current = environment(sys.argv, computes_here=False, fingerprint=now)
    if changed := changed_versions(versions(before), versions(current)):
        texts.append(f"continues with other versions than before: {some(changed)}")
    return texts


def _shown(command: Sequence[str], listen: Listen | None) -> list[str]:
    return without_secrets(command, None if listen is None else listen.token)


def _environment(experiment: Experiment, engine: Engine, command: Sequence[str]) -> dict[str, Any]:
    computes_here = _simulated(experiment)
    return environment(command, computes_here=computes_here, fingerprint=engine.fingerprint)


def unfinished(experiment: Experiment, out: str | Path = "runs") -> Path | None:
    """The newest run of an experiment in the folder ``out`` that is not done and has a checkpoint, for :func:`resume`; None
    if no such run exists. The recorded experiment must be equal to this one."""
    wanted = resolved(experiment).model_dump(mode="json")
    for file in sorted((Path(out) / experiment.name).glob("*/experiment.yaml"), reverse=True):
        record = load_run(file.parent)
        recorded = record.experiment
        if experiment.engine.trainer == "auto":  # a record names the chosen trainer
            recorded = {**recorded, "engine": {**recorded.get("engine", {}), "trainer": "auto"}}
        if record.status != "done" and recorded == wanted and newest(file.parent / "checkpoints"):
            return file.parent
    return None


def _resume_run(
    folder: RunFolder,
    experiment: Experiment,
    checkpoint: RunCheckpoint,
    engine: Engine,
    observer: Observer,
    changes: Sequence[str],
    command: Sequence[str],
) -> None:
    """Rewind a record to a checkpoint. Record and report the point and the environment in which the run
    continues, and what has changed."""
    remove_later(folder.checkpoints, checkpoint.number)
    rewind(folder, checkpoint, engine.description["outcome_ranks"])
    write_text(folder.path / "experiment.yaml", experiment.to_yaml())
    first, last = min(checkpoint.rounds.values()), max(checkpoint.rounds.values())
    rounds = f"round {first}" if first == last else f"rounds {first} to {last}"
    origin = f"from checkpoint {checkpoint.number}, {rounds}"
    time_s = min(checkpoint.times_s.values()) if checkpoint.time_s is None else checkpoint.time_s
    with folder.segment("events") as events:
        row = {"time_s": time_s, "wall_s": checkpoint.wall_s, "node": NETWORK}
        events.append({**row, "event": "resumed", "detail": "; ".join([origin, *changes])})
    observer.say(f"continues {origin}, time {time_s:.4g} s, after {checkpoint.wall_s:.1f} s of wall time")
    recorded = load_run(folder.path).environment
    for text in changes:
        observer.say(text)
    current = _environment(experiment, engine, command)
    times = [*recorded.get("resumed", []), current]
    write_json(folder.path / "environment.json", {**recorded, "resumed": times})
    known = (latest(recorded).get("fingerprint") or unknown())["code"]
    code = engine.fingerprint["code"]
    new = {name: code[name] for name in changed_code(known, code) if name in code}
    folder.write_sources(sources(experiment, new), resumed=len(times))
    before = latest(recorded).get("numerics")
    if before is not None and before != current["numerics"] and "workers" not in latest(recorded):
        now, then = numerics.summary(current["numerics"]), numerics.summary(before)
        observer.say(f"bits may differ from those of an uninterrupted run: now {now}, before {then}")


def _simulated(experiment: Experiment) -> bool:
    """Whether nodes compute in this process, rather than in processes that it starts."""
    return isinstance(experiment.engine, Simulate)


def _carry_out(
    engine: Engine,
    experiment: Experiment,
    folder: RunFolder,
    trackers: Trackers,
    checkpoint: RunCheckpoint | None = None,
    changes: Sequence[str] = (),
    command: Sequence[str] = (),
) -> Run:
    trackers.tell("begin", experiment, folder.path)
    try:
        if checkpoint is not None:
            _resume_run(folder, experiment, checkpoint, engine, trackers, changes, command)
        if _simulated(experiment) and (warning := numerics.warning()) is not None:
            trackers.say(warning)
        # The engine ends before its record is compacted, so nothing writes to it any longer.
        with engine:
            outcome = engine.run(folder, trackers, checkpoint)

        def steps() -> int:
            return max(load_run(folder.path).metrics["step"].drop_nulls().to_list(), default=0)

        if (absent := nobody_took_part(experiment, outcome, steps)) is not None:
            outcome = replace(outcome, reason="failed", failure=absent)
    except BaseException as error:
        close_after(error, folder)
        if isinstance(error, RunFailed):
            error.folder = folder.path
        trackers.tell("failure", error)
        raise
    if (failure := _finish(folder, experiment, outcome)) is not None:
        failure.folder = folder.path
        trackers.tell("failure", failure)
        raise failure
    done = load_run(folder.path)
    trackers.tell("end", done)
    return done


def _engine(experiment: Experiment, server: ForkServer | None, listen: Listen | None) -> Engine:
    # Engines are imported on use, since each has many imports of its own.
    if _simulated(experiment):
        if listen is not None:
            raise BadInput(
                "--listen or --workers: with the engine simulate; accepted: with --engine processes"
            )
        from gossamer.runtime.simulate.simulation import SimulateEngine

        return SimulateEngine(experiment)
    from gossamer.runtime.processes.launcher import ProcessesEngine

    return ProcessesEngine(experiment, server, listen)


def _finish(folder: RunFolder, experiment: Experiment, outcome: Outcome) -> RunFailed | None:
    """Write models, tables and the status; return how the run failed, if it did."""

    def write_outcome() -> None:
        if outcome.parameters is not None:
            folder.write_models(outcome.parameters, outcome.buffers)
        if experiment.engine.trainer == "auto":
            # The record states what ran, even if a later version would choose differently.
            engine = experiment.engine.model_copy(update={"trainer": outcome.trainer})
            ran = experiment.model_copy(update={"engine": engine})
            write_text(folder.path / "experiment.yaml", ran.to_yaml())

    unwritten = close_record(
        folder,
        outcome.reason,
        None if outcome.failure is None else str(outcome.failure),
        write_outcome,
        wall_s=outcome.wall_s,
        totals=outcome.totals,
        profile=outcome.profile,
        peak_vectors=outcome.peak_vectors,
        private_bytes=outcome.private_bytes,
    )
    return outcome.failure or (None if unwritten is None else RunFailed(unwritten))
