"""Statistics of a recorded run: its metrics, and the curve of each one over the nodes.

An evaluation point is one recorded evaluation of the network, with at most one row per node: an instant of
the time grid (``evaluation.every_s``), or otherwise a round, which every node reaches at its own time. The
last point may be the end of a run that ended before its rounds were done. On a time grid, the rows of rounds
belong to no point.

A point of a round is at one round and covers a range of times; a point of the grid is at one instant and covers a range of
rounds. Over time and bytes, a metric is the step function of :mod:`gossamer.results.steps`. On a time grid, a node's
training loss is the last one it has recorded, so that the mean is over all nodes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import polars as pl
from jaxtyping import Real

from gossamer.errors import BadInput, listed, suggest
from gossamer.results.formatting import beyond_rounding
from gossamer.results.reading import METRICS, MOMENTS, TRAFFIC
from gossamer.results.run_data import RunData

Axis = Literal["round", "time_s", "wall_s", "bytes"]
AXES: tuple[Axis, ...] = get_args(Axis)

ASYNCHRONY = ("staleness_s", "staleness_max_s", "idle_share", "uplink_share", "downlink_share")
"""Metrics of how nodes spend their time, rather than of the quality of their models."""
STATISTICS = ("mean", "std", "min", "max", "count")
_LATE = ("train_loss", "consensus_distance")
_NOT_METRICS = {*METRICS, *TRAFFIC} - {"test_loss", *_LATE, *ASYNCHRONY}
_LOWER_IS_BETTER = ("loss", "error", "distance", "perplexity", "staleness", "idle")


# --- metrics


def metric_names(run: RunData) -> list[str]:
    """The metrics for which a run has a value: test accuracy, other test metrics, those of further evaluation sets,
    losses, the consensus distance, the accuracies of single classes and what the algorithm recorded, and
    :data:`ASYNCHRONY`. Columns of lists, such as a confusion matrix, are none."""
    present = [
        name
        for name, dtype in run.metrics.schema.items()
        if dtype.is_numeric() and name not in _NOT_METRICS and run.metrics[name].count() > 0
    ]
    sets = evaluation_sets(present)
    losses = [*(f"{name}_loss" for name in sets), *_LATE]

    def order(name: str) -> tuple[int, int, str]:
        if name in losses:
            return 1, losses.index(name), name
        if name in ASYNCHRONY:
            return 3, ASYNCHRONY.index(name), name
        owners = [index for index, prefix in enumerate(sets) if name.startswith(f"{prefix}_")]
        if name in run.class_columns:
            return 2, 0, name
        return (0, owners[0], name.replace("_accuracy", "")) if owners else (2, 0, name)

    return sorted(present, key=order)


def all_metrics(runs: Iterable[RunData]) -> list[str]:
    """The metrics of several runs, in the order of :func:`metric_names`."""
    return list(dict.fromkeys(name for run in runs for name in metric_names(run)))


def main_metric(run: RunData) -> str | None:
    """The main metric of a run: the first of :func:`metric_names`."""
    return next(iter(metric_names(run)), None)


def comparison_metrics(runs: Iterable[RunData]) -> list[str]:
    """The metrics by which runs are compared: those of all evaluation sets, without single classes, or the main metric if
    there are none."""
    runs = list(runs)
    known, classes = all_metrics(runs), class_columns(runs)
    prefixes = tuple(f"{name}_" for name in evaluation_sets(known))
    return [name for name in known if name.startswith(prefixes) and name not in classes] or known[:1]


def evaluation_sets(columns: Iterable[str]) -> list[str]:
    """The evaluation sets among recorded columns, ``test`` first: each has a loss."""
    losses = {name.removesuffix("_loss") for name in columns if name.endswith("_loss")}
    losses = {name for name in losses if not name.endswith("_accuracy")}  # of a class that is called "loss"
    return ["test", *sorted(losses - {"test", "train"})]


def class_columns(runs: Iterable[RunData]) -> dict[str, str]:
    """The columns with the accuracies of single classes in any of the runs, and the names of these classes."""
    return {column: name for run in runs for column, name in run.class_columns.items()}


def lower_is_better(metric: str, classes: Container[str] = ()) -> bool:
    """Whether smaller values are better, judged by the metric's name: losses, errors, distances, ages, idleness. A class may
    have any name; its accuracy, one of the columns ``classes``, is better if it is larger."""
    if metric in classes:
        return False
    named = any(word in metric for word in _LOWER_IS_BETTER)
    return named or not {"mae", "mse", "rmse"}.isdisjoint(metric.split("_"))


def at_level(metric: str, mean: float, level: float, classes: Container[str] = ()) -> bool:
    """Whether a mean is at a level or better; NaN never is."""
    return mean <= level if lower_is_better(metric, classes) else mean >= level


def check_recorded(option: str, metric: str, runs: Iterable[RunData]) -> None:
    """Refuse a metric that no run has recorded, or whose values are lists. ``option`` is the command-line option that
    requests it."""
    runs = list(runs)
    known = all_metrics(runs)
    if metric not in known:
        lists = any(isinstance(run.metrics.schema.get(metric), pl.List) for run in runs)
        problem = "its values are lists" if lists else f"no run has recorded it{suggest(metric, known)}"
        raise BadInput(f"{option} {metric}: {problem}; accepted: {listed(known)}")


def recorded(run: RunData, axis: str) -> bool:
    """Whether a run has recorded an axis."""
    columns = ("bytes_sent", "network_bytes") if axis == "bytes" else (axis,)
    return any(run.metrics[name].count() > 0 for name in columns if name in run.metrics.columns)


def default_axis(runs: Iterable[RunData]) -> Axis:
    """The axis of a chart of several runs: time if one of them is recorded on a time grid, otherwise rounds."""
    return "time_s" if any(run.every_s is not None for run in runs) else "round"


def rounds_on_record(run: RunData) -> tuple[int, int]:
    """The number of rounds with a row, and of completed rounds, of the node that has completed the most."""
    rows = run.metrics.filter(pl.col("node") >= 0, pl.col("round") > 0)
    by_node = rows.group_by("node").agg(on_record=pl.col("round").n_unique(), rounds=pl.col("round").max())
    furthest = by_node.sort("rounds", "node", descending=[True, False]).select("on_record", "rounds")
    return furthest.row(0) if furthest.height else (0, 0)


def belongs_to_model(run: RunData, metric: str) -> bool:
    """Whether a row's value of a metric is of its model: those of evaluation sets are. All other values are of the
    instant at which the row was made."""
    sets = run.setup.get("evaluation_sets") or evaluation_sets(run.metrics.columns)
    return metric.startswith(tuple(f"{name}_" for name in (*sets, "personal")))


# --- curves


def assigned(run: RunData) -> pl.DataFrame:
    """The recorded rows that belong to an evaluation point, with ``point`` (0, 1, ...) and ``instant`` (which identifies the
    point in every run: round, seconds of the grid, or infinity for the end)."""
    metrics, moment = run.metrics.sort("time_s", maintain_order=True), pl.col("moment")
    if run.every_s is None:  # "round K": the round of a row whose model is of another one
        of_row = moment.str.extract(r"^round (\d+)$").cast(pl.Int64).fill_null(pl.col("round"))
        instant: pl.Expr = pl.when(moment.str.starts_with("round")).then(of_row.cast(pl.Float64))
    else:  # rounded, so that different grids share their common instants
        instant = (moment.str.extract(r"^tick (\d+)$").cast(pl.Float64) * run.every_s).round(9)
        metrics = metrics.with_columns(pl.col("train_loss").forward_fill().over("node"))
    rows = (
        metrics.with_row_index("row")
        .with_columns(moment.fill_null("round").str.split(MOMENTS))
        .explode("moment")
        .with_columns(instant=pl.when(moment == "end").then(math.inf).otherwise(instant))
        .filter(pl.col("instant").is_not_null())
    )
    ends, others = (rows.filter(pl.col("instant").is_infinite() == end) for end in (True, False))
    if _end_is_an_instant(ends, others):
        rows = others
    return rows.unique(["node", "instant"], keep="last", maintain_order=True).with_columns(
        point=pl.col("instant").rank("dense").cast(pl.Int64) - 1
    )


def _end_is_an_instant(ends: pl.DataFrame, others: pl.DataFrame) -> bool:
    """Whether the end coincides with another point, and so is not a point itself: the last rows of all nodes
    belong to that point. For example, 10 rounds with a row after every 5 end with the point of round 10."""
    shared = others.join(ends, on="row", how="semi")
    return len(shared) == len(ends) and shared["instant"].n_unique() == 1


def _position(has: pl.Expr) -> dict[str, pl.Expr]:
    """The mean round, and the ranges of rounds and times, of the rows of a point that count."""
    ends = {"least": pl.Expr.min, "most": pl.Expr.max}
    ranges = {
        f"{axis}_{end}": of(pl.col(axis).filter(has))
        for axis in ("round", "time_s")
        for end, of in ends.items()
    }
    return {"round": pl.col("round").filter(has).mean(), **ranges}


def points(run: RunData) -> pl.DataFrame:
    """The evaluation points: ``point``, ``round`` (the mean over the nodes with a row), and the ranges ``round_least``,
    ``round_most``, ``time_s_least``, ``time_s_most`` of these rows. The network's own rows count only if there are
    no others."""
    is_node = pl.col("node") >= 0
    by_point = assigned(run).filter(is_node | ~is_node.any().over("point")).group_by("point")
    return by_point.agg(**_position(pl.lit(value=True))).sort("point")


def curves(run: RunData, metrics: Iterable[str] | None = None, *, network: bool = False) -> pl.DataFrame:
    """Statistics over the nodes at every point, of all metrics or of some: ``metric``, ``point``, ``instant``, ``round`` and
    the ranges of rounds and times as in :func:`points`, ``mean``, ``std`` (with the divisor n), ``min``, ``max``, ``count``,
    and ``complete``.

    The network's own rows (node -1) count only for metrics that no node has, or exclusively with ``network``.
    A point is complete if every node with the metric has reached it; nodes that are away at the end, or came
    back too late to record anything, don't count.
    """
    names = metric_names(run) if metrics is None else list(metrics)
    index = ["node", "point", "instant", "round", "time_s"]
    table = assigned(run).with_columns(pl.col(names).cast(pl.Float64))
    rows = table.select(*index, *names).unpivot(names, index=index, variable_name="metric")
    has, is_node = pl.col("value").is_not_null(), pl.col("node") >= 0
    value, is_end = pl.col("value").filter(has), pl.col("instant").is_infinite()
    # A node counts for a metric if it has recorded it and is not missing at the end.
    has_metric = has.any().over("metric", "node")
    counts = has_metric & ~pl.col("node").is_in([*run.away, *_unrecorded_since_return(run)])
    shown = ~is_node if network else is_node == (has & is_node).any().over("metric")
    table = (
        rows.filter(shown)
        .with_columns(  # if no such node is left, all that have had the metric count
            counts=pl.when(counts.any().over("metric")).then(counts).otherwise(has_metric),
            last_point=pl.col("point").filter(~is_end).max().over("metric", "node").fill_null(-1),
        )
        .with_columns(
            slowest_last_point=pl.col("last_point").filter(pl.col("counts")).min().over("metric"),
            counting_nodes=pl.col("node").filter(pl.col("counts")).n_unique().over("metric"),
        )
        .group_by("metric", "point", maintain_order=True)
        .agg(
            pl.col("instant").first(),
            **_position(has),
            mean=value.mean(),
            std=value.std(ddof=0),
            min=value.min(),
            max=value.max(),
            count=value.len().cast(pl.Int64),
            complete=pl.when(is_end.first())
            .then(pl.col("counts").sum() == pl.col("counting_nodes").first())
            .otherwise(pl.col("point").first() <= pl.col("slowest_last_point").first()),
        )
        .filter(pl.col("count") > 0)
        .sort("metric", "point")
    )
    if run.every_s is None:
        return table  # a point is at the round of the nodes with the metric, such as a server
    # An instant has one position for all metrics.
    return table.update(points(run), on="point").select(table.columns)


def _unrecorded_since_return(run: RunData) -> list[int]:
    """Ranks of the nodes that came back and have recorded nothing since."""
    back = run.events.filter(event="returned").group_by("node").agg(back_s=pl.col("time_s").max())
    last = run.metrics.group_by("node").agg(last_s=pl.col("time_s").max())
    return back.join(last, on="node").filter(pl.col("back_s") > pl.col("last_s"))["node"].to_list()


def curves_of(run: RunData) -> pl.DataFrame:
    """The :func:`curves` of all metrics, computed once for a run."""
    if "curves" not in run.derived:
        run.derived["curves"] = curves(run)
    table: pl.DataFrame = run.derived["curves"]
    return table


def complete_curve(run: RunData, metric: str) -> pl.DataFrame:
    """The complete points of a metric in :func:`curves_of` a run."""
    return curves_of(run).filter(pl.col("metric") == metric, "complete")


def finite(table: pl.DataFrame) -> pl.DataFrame:
    """A table with null instead of NaN and infinities, which JSON can't represent."""
    floats, element = pl.col(pl.Float32, pl.Float64), pl.element()
    lists = pl.col(pl.List(pl.Float64)).list.eval(pl.when(element.is_finite()).then(element))
    return table.with_columns(pl.when(floats.is_finite()).then(floats), lists)


# --- statistics


def mean_over_rounds(
    rounds: Real[np.ndarray, " points"], values: Real[np.ndarray, " points"]
) -> float | None:
    """The area under a curve over rounds, by trapezoids, divided by the number of rounds; None for less than
    two rounds."""
    return (
        float(np.trapezoid(values, rounds) / np.ptp(rounds)) if len(rounds) > 1 and np.ptp(rounds) else None
    )


FEWEST = 3
"""Fewer values have no interval: that of two is 12.7 times as wide as the distance between them, and says less
than the values themselves."""


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval, ``mean - half_width`` to ``mean + half_width``; None for less
    than :data:`FEWEST` values."""

    mean: float
    half_width: float | None
    count: int


def confidence(values: Sequence[float]) -> Interval | None:
    """The mean of independent values and its 95 % confidence interval; None without values.

    The half-width is t s / sqrt(n): s the standard deviation of the sample (divisor n - 1), t the quantile of
    Student's distribution with n - 1 degrees of freedom. It is 0 if it is rounding error. There is no interval
    for less than :data:`FEWEST` values, or if a value is not finite.
    """
    if not len(values):
        return None
    mean, count = statistics.mean(map(float, values)), len(values)  # exact, whatever their size
    if count < FEWEST or not math.isfinite(mean):
        return Interval(mean, None, count)
    half = student_t(count - 1) * statistics.stdev(map(float, values)) / math.sqrt(count)
    return Interval(mean, beyond_rounding(half, mean), count)


def student_t(degrees: int, p: float = 0.975) -> float:
    """The quantile of Student's t distribution for probability p."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # imports in a fifth of a second

    return float(stdtrit(degrees, p))
