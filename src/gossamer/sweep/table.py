"""The results of a sweep as tables: a row per run, and a row per cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from gossamer.errors import BadInput, listed, suggest
from gossamer.results.folder import atomic
from gossamer.results.run import Run
from gossamer.results.tidy import FinalSummary, confidence, final_summary
from gossamer.sweep.state import State, states
from gossamer.sweep.sweep import Planned, Sweep

_STATE: dict[str, Any] = {"seed": pl.Int64, "status": pl.String, "cause": pl.String}
_FIGURES: dict[str, Any] = {
    "rounds": pl.Int64,
    "time_s": pl.Float64,
    "wall_s": pl.Float64,
    "bytes_sent": pl.Int64,
    "messages_received": pl.Int64,
    "messages_superseded": pl.Int64,
    "messages_cancelled": pl.Int64,
    "messages_lost": pl.Int64,
}
_RUN: dict[str, Any] = {"run": pl.String}


def results(sweep: Sweep) -> pl.DataFrame:
    """A row per experiment of a sweep, whether or not it has been run.

    Returns:
        For each cell and seed: the cell's labels; ``seed``, ``status``, ``cause``; the metrics, as the mean over
        the nodes at the last complete evaluation (of ages and shares of time, over the whole run), and as
        ``best_<metric>`` the best of such means; ``rounds``, ``time_s`` (the engine's), ``wall_s`` (real),
        ``bytes_sent`` and ``messages_...`` of all nodes; ``run``, the run's folder within the sweep's. What is not
        recorded is null.
    """
    at = states(sweep)
    finals = {run: _final(state) for run, state in at.items()}
    rows = [_row(each, at[each.run], finals[each.run], sweep) for each in sweep.planned]
    labels = list(dict.fromkeys(key for each in sweep.planned for key in each.cell.labels))
    known = {*labels, *_STATE, *_FIGURES, *_RUN}
    metrics = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in known]
    schema = {**_STATE, **dict.fromkeys(metrics, pl.Float64), **_FIGURES, **_RUN}
    columns = [_labels(name, [row[name] for row in rows]) for name in labels]
    columns += [
        pl.Series(name, [row.get(name) for row in rows], dtype=dtype) for name, dtype in schema.items()
    ]
    return pl.DataFrame(columns)


def summary(table: pl.DataFrame, metric: str) -> pl.DataFrame:
    """A column of numbers of :func:`results` over the seeds of each cell, of runs that are done.

    Returns:
        A row per cell, in the table's order: its labels, ``runs`` (that have the metric), ``mean``, ``low`` and
        ``high``, the ends of the 95 % confidence interval by Student's t (null for less than two runs).

    Raises:
        BadInput: for a column that does not exist or holds no numbers.
    """
    accepted = _numbers(table)
    if metric not in accepted:
        raise BadInput(f"metric: got {metric!r}{suggest(metric, accepted)}; accepted: {listed(accepted)}")
    mean, half = pl.col(f"{metric}_mean"), pl.col(f"{metric}_half")
    ends = {"runs": pl.col(f"{metric}_n"), "mean": mean, "low": mean - half, "high": mean + half}
    return by_cell(table, [metric]).select(*label_columns(table), **ends)


def by_cell(table: pl.DataFrame, metrics: Sequence[str] | None = None) -> pl.DataFrame:
    """Columns of numbers of :func:`results` (None: all) over the seeds of each cell, of runs that are done.

    Returns:
        A row per cell, in the table's order: its labels; ``runs`` that are done; and of each metric ``<metric>_n``, the
        runs that have it, ``<metric>_mean``, and ``<metric>_half``, half the width of the 95 % confidence interval by
        Student's t (null for less than two runs).
    """
    names = _numbers(table) if metrics is None else list(metrics)
    done = pl.col("status") == "done"
    values = [pl.col(name).cast(pl.Float64).filter(done).drop_nulls() for name in names]
    runs = done.sum().cast(pl.Int64).alias("runs")
    cells = table.group_by(label_columns(table), maintain_order=True).agg(runs, *values)
    columns = []
    for name in names:
        found = [confidence(each) for each in cells[name].to_list()]
        columns += [
            pl.Series(f"{name}_n", [0 if each is None else each.count for each in found], pl.Int64),
            pl.Series(f"{name}_mean", [each and each.mean for each in found], pl.Float64),
            pl.Series(f"{name}_half", [each and each.half_width for each in found], pl.Float64),
        ]
    return cells.drop(names).with_columns(columns)


def _numbers(table: pl.DataFrame) -> list[str]:
    return [name for name in table.columns if name not in {*label_columns(table), *_STATE, *_RUN}]


def label_columns(table: pl.DataFrame) -> list[str]:
    """The columns of the cells' labels: those before the seed."""
    return table.columns[: table.columns.index("seed")]


def metric_columns(table: pl.DataFrame) -> list[str]:
    """The columns of final metrics."""
    before = set(label_columns(table)) | _STATE.keys() | _FIGURES.keys() | _RUN.keys()
    names = [name for name in table.columns if name not in before]
    return [name for name in names if not (name.startswith("best_") and name.removeprefix("best_") in names)]


def write_results(sweep: Sweep) -> None:
    """Write ``results`` (a row per run) and ``summary`` (a row per cell) into the sweep's folder, as Parquet and CSV."""
    table = results(sweep)
    for name, rows in (("results", table), ("summary", by_cell(table))):
        with atomic(sweep.folder / f"{name}.parquet") as temporary:
            rows.write_parquet(temporary)
        with atomic(sweep.folder / f"{name}.csv") as temporary:
            rows.write_csv(temporary)


def _final(state: State) -> FinalSummary | None:
    try:
        return None if state.folder is None else final_summary(Run(state.folder))
    except (BadInput, pl.exceptions.PolarsError):  # the record was damaged by a crash
        return None


def _row(planned: Planned, state: State, final: FinalSummary | None, sweep: Sweep) -> dict[str, Any]:
    row: dict[str, Any] = {}
    if final is not None:
        row = {name: value.mean for name, value in final.metrics.items()}
        row |= {f"best_{name}": value.best.mean for name, value in final.metrics.items() if value.best}
        counts = {f"messages_{outcome}": count for outcome, count in final.messages.items()}
        row |= {name: value for name, value in (vars(final) | counts).items() if name in _FIGURES}
    folder = state.folder and str(state.folder.relative_to(sweep.folder))
    said = {"seed": planned.experiment.seed, "status": state.status, "cause": state.cause, "run": folder}
    return row | said | dict(planned.cell.labels)


def _labels(name: str, values: Sequence[Any]) -> pl.Series:
    """Numbers stay numbers, where all are."""
    kinds = {type(value) for value in values}
    if kinds <= {int, float}:
        return pl.Series(name, values, dtype=pl.Int64 if kinds == {int} else pl.Float64, strict=False)
    return pl.Series(name, [str(value) for value in values], dtype=pl.String)
