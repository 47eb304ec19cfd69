"""The state of a sweep's runs, derived from their folders, and the results as tables (docs/sweeps.md lists the files)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import polars as pl

from gossamer.errors import BadInput, listed, suggest
from gossamer.results import comparison, schema
from gossamer.results.finals import final_summary
from gossamer.results.folder import atomic, read_status, write_json, write_table
from gossamer.results.groups import Group, default_baseline, find_baseline, shown_label
from gossamer.results.run import Run
from gossamer.results.tidy import confidence
from gossamer.sweep.cells import SweepRuns
from gossamer.sweep.run_claims import held

_STATE: dict[str, Any] = {"seed": pl.Int64, "status": pl.String, "cause": pl.String}
_FIGURES: dict[str, Any] = {
    "shown": pl.String,
    "rounds": pl.Int64,
    "time_s": pl.Float64,
    "wall_s": pl.Float64,
    "bytes_sent": pl.Int64,
    **dict.fromkeys(
        (
            f"messages_{outcome}"
            for outcome in ("sent", "received", "superseded", "cancelled", "lost", "unsent")
        ),
        pl.Int64,
    ),
}

log = logging.getLogger(__name__)

Status = schema.Status | Literal["running", "interrupted", "pending"]
"""``diverged``: ended because a model was not finite; ``stopped``: ended cleanly by the user; ``running``: claimed by a
process, which may have died on another machine; ``interrupted``: begun, but without a record of its end; ``pending``: never
begun."""
ENDED_BADLY: tuple[Status, ...] = ("failed", "diverged")
ENDED: tuple[Status, ...] = ("done", *ENDED_BADLY)


@dataclass(frozen=True)
class RunState:
    """The state of one run, the reason (in one line) why it failed, diverged or has not begun, and the
    attempt that counts, if any."""

    status: Status = "pending"
    cause: str | None = None
    folder: Path | None = None


def states(sweep: SweepRuns, known: Mapping[str, RunState] | None = None) -> dict[str, RunState]:
    """The state of every run of a sweep, by the name of its folder. ``known`` are states that need not be read."""
    runs = dict.fromkeys(planned.run for planned in sweep.planned)
    return {run: (known or {}).get(run) or _current(sweep.folder / run) for run in runs}


def _current(folder: Path) -> RunState:
    state = state_of(folder)
    running = state.status not in ENDED and held(folder)
    return RunState("running", None, state.folder) if running else state


def state_of(folder: Path) -> RunState:
    """The recorded state of a run: that of the finished attempt, or else of the last one (ids sort by time)."""
    # Listing a folder makes NFS ask its server; that a file was missing, it may remember for a minute.
    files = folder.glob("*/*")
    attempts = sorted((file.parent for file in files if file.name == "experiment.yaml"), reverse=True)
    ended = [_state_of_attempt(attempt) for attempt in attempts]
    return next((state for state in ended if state.status == "done"), ended[0] if ended else RunState())


def _state_of_attempt(attempt: Path) -> RunState:
    try:
        recorded = read_status(attempt)
    except BadInput as error:
        return RunState("interrupted", str(error), attempt)
    status = recorded.get("status", "interrupted")
    cause = " ".join(str(recorded.get("error") or "no cause was recorded").split())
    return RunState(status, cause if status in ENDED_BADLY else None, attempt)


def write_state(sweep: SweepRuns, by_run: Mapping[str, RunState]) -> None:
    """Write ``sweep.json``."""
    runs = [
        {
            "cell": planned.cell.name,
            "labels": dict(planned.cell.labels),
            "seed": planned.experiment.seed,
            "run": planned.run,
            "folder": _within(sweep, by_run[planned.run]),
            "status": by_run[planned.run].status,
            "cause": by_run[planned.run].cause,
        }
        for planned in sweep.planned
    ]
    write_json(sweep.folder / "sweep.json", {"name": sweep.name, "runs": runs})


def _within(sweep: SweepRuns, state: RunState) -> str | None:
    return None if state.folder is None else str(state.folder.relative_to(sweep.folder))


def results(sweep: SweepRuns) -> pl.DataFrame:
    """A row per experiment of a sweep, whether or not it has been run.

    Returns:
        The cell's labels; ``seed``, ``status``, ``cause``; each metric as the mean over the nodes of their newest
        rows (for ages and shares of time, over the whole run), and ``best_<metric>`` as the best mean of
        ``evaluations_<metric>`` complete evaluations, on the set on which it is measured;
        ``shown``, which models these are of (:attr:`~gossamer.results.run.Run.shown`); ``rounds``, ``time_s`` (the
        engine's), ``wall_s`` (real), ``bytes_sent`` and ``messages_...`` of all nodes; ``run``, the run's folder
        within the sweep's. Values that are not recorded are null.
    """
    by_run = states(sweep)
    finals = {run: _final(state) for run, state in by_run.items()}
    metrics = dict.fromkeys(name for final in finals.values() for name in final if name not in _FIGURES)
    columns: dict[str, pl.Series] = {}
    for key in sweep.planned[0].cell.labels:
        labels = [planned.cell.labels[key] for planned in sweep.planned]
        numbers = {type(label) for label in labels} <= {int, float}  # else all are text
        columns[key] = pl.Series(labels if numbers else [str(label) for label in labels], strict=False)
    ends = [(by_run[planned.run].status, by_run[planned.run].cause) for planned in sweep.planned]
    rows = [(planned.experiment.seed, *end) for planned, end in zip(sweep.planned, ends, strict=True)]
    table = pl.DataFrame(columns).hstack(pl.DataFrame(rows, schema=_STATE, orient="row"))
    counts = {name for final in finals.values() for name, value in final.items() if isinstance(value, int)}
    kinds = {name: pl.Int64 if name in counts else pl.Float64 for name in metrics}
    for name, kind in {**kinds, **_FIGURES}.items():
        values = [finals[planned.run].get(name) for planned in sweep.planned]
        table = table.with_columns(pl.Series(name, values, dtype=kind))
    folders = [_within(sweep, by_run[planned.run]) for planned in sweep.planned]
    return table.with_columns(pl.Series("run", folders, dtype=pl.String))


def _final(state: RunState) -> dict[str, Any]:
    """The final figures of a run, by column name; empty for a run that was not begun or can't be read."""
    try:
        if state.folder is None:
            return {}
        run = Run(state.folder)
        final, shown = final_summary(run), run.shown
    except BadInput as error:  # the results of the other runs are kept
        log.error("%s", error)
        return {}
    figures: dict[str, Any] = {"shown": shown} | {name: value.mean for name, value in final.metrics.items()}
    for name, value in final.metrics.items():
        if value.best:
            figures |= {f"best_{name}": value.best.mean, f"evaluations_{name}": value.best.of}
    counts = {f"messages_{outcome}": count for outcome, count in final.messages.items()}
    return figures | {name: value for name, value in (vars(final) | counts).items() if name in _FIGURES}


def summary(table: pl.DataFrame, metric: str) -> pl.DataFrame:
    """Statistics of a numeric column of :func:`results` over the seeds of each cell, for finished runs.
    BadInput for any other column.

    Returns:
        A row per cell, in the table's order: its labels, ``runs`` (the number that have the metric),
        ``mean`` (null if a run of the cell diverged, or if some show other models than the others), and ``low``
        and ``high``, the ends of the 95 % confidence interval by Student's t (null for fewer than three runs).
    """
    labels = table.columns[: table.columns.index("seed")]
    accepted = [name for name in table.columns if name not in {*labels, *_STATE, "shown", "run"}]
    if metric not in accepted:
        raise BadInput(f"metric: got {metric!r}{suggest(metric, accepted)}; accepted: {listed(accepted)}")
    values = pl.col(metric).cast(pl.Float64).filter(status="done").drop_nulls()
    shown = pl.col("shown").filter(status="done").n_unique() if "shown" in table.columns else pl.lit(1)
    without = ((pl.col("status") == "diverged").any() | (shown > 1)).alias("without")
    cells = table.group_by(labels, maintain_order=True).agg(values, without)
    intervals = [
        None if no_mean else confidence(numbers)
        for numbers, no_mean in zip(cells[metric].to_list(), cells["without"], strict=True)
    ]
    ends = [
        (None, None)
        if interval is None or interval.half_width is None
        else (interval.mean - interval.half_width, interval.mean + interval.half_width)
        for interval in intervals
    ]
    figures = {
        "runs": cells[metric].list.len().cast(pl.Int64),
        "mean": [interval and interval.mean for interval in intervals],
        "low": [low for low, _ in ends],
        "high": [high for _, high in ends],
    }
    kinds = {"runs": pl.Int64, **dict.fromkeys(("mean", "low", "high"), pl.Float64)}
    return cells.drop(metric, "without").hstack(pl.DataFrame(figures, schema=kinds))


def groups_of(sweep: SweepRuns) -> list[Group]:
    """The cells as groups of their runs. Unreadable runs do not count. A cell is several groups if the rows of its
    runs show different models, since an older version made some of them."""
    by_run, runs = states(sweep), dict[str, list[Run]]()
    for planned in sweep.planned:
        state, members = by_run[planned.run], runs.setdefault(planned.cell.name, [])
        if state.folder is not None:
            run = Run(state.folder, planned.cell.name, planned.cell.labels)
            try:
                run.curves  # noqa: B018  # reads the curves
                members.append(run)
            except BadInput as error:
                log.error("%s", error)
    cells = {planned.cell.name: planned for planned in sweep.planned}
    found = []
    for name, planned in cells.items():
        shown = dict.fromkeys(run.shown for run in runs[name]) or {"round": None}
        for of in shown:
            label = planned.short if len(shown) == 1 else shown_label(planned.short, of)
            alike = tuple(run for run in runs[name] if run.shown == of)
            found.append(Group(label, alike, planned.cell.labels, len(sweep.seeds)))
    return found


def compared(sweep: SweepRuns, baseline: str | None = None, unit: str = "seed") -> comparison.Comparison:
    """Compare the cells by their final metrics, time and traffic, in pairs with a baseline: the name of a
    cell, or a part of the name that several cells share. None is the first entry of ``cells``, or the first
    value of an axis. ``unit`` is as in :func:`~gossamer.results.comparison.compare`."""
    groups = groups_of(sweep)
    against = default_baseline(groups) if baseline is None else find_baseline(baseline, groups)
    runs = [run for group in groups for run in group.samples]
    return comparison.compare(groups, comparison.quantities(runs), against, unit=unit)


def metric_columns(table: pl.DataFrame) -> list[str]:
    """The columns of final metrics."""
    others = {*table.columns[: table.columns.index("seed")], *_STATE, *_FIGURES, "run"}
    names = [name for name in table.columns if name not in others]
    derived = {f"{prefix}_{name}" for prefix in ("best", "evaluations") for name in names}
    return [name for name in names if name not in derived]


def write_results(sweep: SweepRuns, unrecorded: Mapping[str, RunState]) -> None:
    """Write ``sweep.json`` and ``results``, a row per run, as Parquet and CSV, into the sweep's folder. They are written
    again if a run of another process has ended meanwhile, so whichever process writes last has seen all ends.
    ``unrecorded`` are states of runs that may have no folder."""
    recorded: dict[str, RunState] = {}
    while (current := states(sweep)) != recorded:
        recorded = current
        nothing = {run: state for run, state in unrecorded.items() if recorded[run] == RunState()}
        write_state(sweep, recorded | nothing)
        table = results(sweep)
        write_table(sweep.folder / "results.parquet", table)
        with atomic(sweep.folder / "results.csv") as temporary:
            table.write_csv(temporary)
