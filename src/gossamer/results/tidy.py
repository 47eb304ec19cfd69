"""One tidy table of what runs have recorded, and the summaries that are derived from it.

:func:`tidy` has a row per run, node, evaluation point and metric; :attr:`Run.curves` are its statistics over the nodes
at every point. Plots, reports, time-to-accuracy and sweep tables all start from these two.

An evaluation point is one recorded evaluation of the network, with at most one row per node: an instant of the time grid
(``evaluation.every_s``) or else a round, which every node reaches at its own time; and at last the end of a run that
ended before its rounds were done. On a time grid the rows of rounds belong to no point.

A point has a place on each axis: ``round``, ``time_s`` and ``wall_s`` are means over the nodes that have the metric;
``bytes`` is what the whole network has sent by then, with the last known value of nodes that have no row at the point.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import polars as pl

from gossamer.errors import BadInput, listed, suggest
from gossamer.results.recorder import METRICS, MOMENTS, TRAFFIC
from gossamer.results.run import Run

Axis = Literal["round", "time_s", "wall_s", "bytes"]
AXES: tuple[Axis, ...] = get_args(Axis)

ASYNCHRONY = ("staleness_s", "staleness_max_s", "idle_share", "uplink_share", "downlink_share")
"""Metrics of how nodes spend their time, rather than of what they have learned."""
STATISTICS = ("mean", "std", "min", "max", "count")
_METRICS_AMONG_FIXED = {"train_loss", "test_loss", "consensus_distance", *ASYNCHRONY}
_LAST = ("train_loss", "consensus_distance")
_NOT_METRICS = {*METRICS, *TRAFFIC} - _METRICS_AMONG_FIXED
_LOWER_IS_BETTER = ("loss", "error", "distance", "perplexity", "staleness", "idle")
LEVEL = 0.95
"""Probability that a confidence interval holds the true mean of independent normal values."""


# --- which metrics there are


def metric_names(run: Run) -> list[str]:
    """The metrics for which a run has a value: test accuracy, other test metrics, those of further evaluation sets,
    losses, the consensus distance, what the algorithm recorded, and :data:`ASYNCHRONY`."""
    present = [
        name
        for name, dtype in run.metrics.schema.items()
        if dtype.is_numeric() and name not in _NOT_METRICS and run.metrics[name].count() > 0
    ]
    sets = evaluation_sets(present)

    def order(name: str) -> tuple[int, int, bool, str]:
        if name in _LAST:
            return 2, _LAST.index(name), False, name
        if (of := name.removesuffix("_loss")) in sets and of != name:
            return 1, sets.index(of), False, name
        index = next((index for index, each in enumerate(sets) if name.startswith(f"{each}_")), None)
        return (3, 0, False, name) if index is None else (0, index, name != f"{sets[index]}_accuracy", name)

    found = sorted((name for name in present if name not in ASYNCHRONY), key=order)
    return found + [name for name in ASYNCHRONY if name in present]


def all_metrics(runs: Iterable[Run]) -> list[str]:
    """The metrics of several runs, in the order of :func:`metric_names`."""
    return list(dict.fromkeys(name for run in runs for name in metric_names(run)))


def main_metric(run: Run) -> str | None:
    """The metric by which a run is judged: the first of :func:`metric_names`."""
    return next(iter(metric_names(run)), None)


def evaluation_sets(columns: Iterable[str]) -> list[str]:
    """The evaluation sets among recorded columns, ``test`` first: each has a loss."""
    losses = {name.removesuffix("_loss") for name in columns if name.endswith("_loss")}
    return ["test", *sorted(losses - {"test", "train"})]


def lower_is_better(metric: str) -> bool:
    """Whether smaller values are better, by the words of the name: losses, errors, distances, ages, idleness."""
    named = any(word in metric for word in _LOWER_IS_BETTER)
    return named or not {"mae", "mse", "rmse"}.isdisjoint(metric.split("_"))


# --- the table


def tidy(runs: Sequence[Run], metrics: Sequence[str] | None = None) -> pl.DataFrame:
    """A row per run, node, evaluation point and metric.

    Args:
        runs: the runs.
        metrics: which metrics; None is all that have a value.

    Returns:
        Columns ``run`` (number in ``runs``), ``node`` (-1 is the network), ``away`` (whether the node was lost or had
        left at the end), ``point`` (0, 1, ...), ``instant`` (what tells the point in every run: round, seconds of the
        grid, or infinity for the end), ``round``, ``time_s``, ``wall_s`` (of the row), ``bytes`` (of the network),
        ``metric`` and ``value`` (null where the row does not have it).
    """
    index = ["run", "node", "away", "point", "instant", "round", "time_s", "wall_s", "bytes"]
    tables = []
    for number, run in enumerate(runs):
        names = metric_names(run) if metrics is None else metrics
        table = assigned(run)
        rows = table.join(_sent(table), on="point", how="left").with_columns(
            pl.col(names).cast(pl.Float64), run=pl.lit(number), away=pl.col("node").is_in(run.away)
        )
        tables.append(rows.select(*index, *names).unpivot(names, index=index, variable_name="metric"))
    return pl.concat(tables)


def summarize(table: pl.DataFrame) -> pl.DataFrame:
    """Statistics over the nodes at every point, from rows of :func:`tidy`.

    The network's own rows count only for metrics that no node has. The standard deviation has the divisor n: the nodes
    are all there are, and no sample.

    Returns:
        Columns ``run``, ``metric``, ``point``, ``instant``, the axes, ``mean``, ``std``, ``min``,
        ``max``, ``count``, and ``complete``: whether as many nodes have a row as at any point with the metric. A run
        that was killed has recorded its last rounds for its fastest nodes only. Nodes without the metric don't count,
        nor do nodes that were lost or left: a run that goes on without them has an end all the same.
    """
    per = ["run", "metric"]
    has, is_node = pl.col("value").is_not_null(), pl.col("node") >= 0
    value = pl.col("value").filter(has)
    return (
        table.filter(is_node == (has & is_node).any().over(per))
        .with_columns(having=has.any().over([*per, "node"]))
        .with_columns(member=pl.col("having") & ~pl.col("away"))
        .with_columns(member=pl.when(pl.col("member").any().over(per)).then("member").otherwise("having"))
        .group_by(*per, "point", maintain_order=True)
        .agg(
            pl.col("instant").first(),
            pl.col("round", "time_s", "wall_s").filter(has).mean(),
            pl.col("bytes").first(),
            mean=value.mean(),
            std=value.std(ddof=0),
            min=value.min(),
            max=value.max(),
            count=value.len().cast(pl.Int64),
            members=pl.col("member").sum(),
        )
        .filter(pl.col("count") > 0)
        .with_columns(complete=pl.col("members") == pl.col("members").max().over(per))
        .drop("members")
        .sort(*per, "point", maintain_order=True)
    )


def summary(run: Run, y: str, *, network: bool = False) -> pl.DataFrame:
    """A metric over the nodes at every point that has it: ``point``, the axes, and the statistics.

    Args:
        run: a run.
        y: a column of the metrics.
        network: take the network's own row (node -1), such as the test accuracy of the average model.

    Raises:
        BadInput: for a metric that the run hasn't recorded.
    """
    if y not in run.metrics.columns or not run.metrics[y].dtype.is_numeric():
        names = metric_names(run)
        raise BadInput(f"metric: got {y!r}{suggest(y, names)}; accepted: {listed(names)}")
    rows = tidy([run], [y])
    table = summarize(rows.filter(pl.col("node") < 0) if network else rows)
    return table.select("point", *AXES, *STATISTICS)


def points(run: Run) -> pl.DataFrame:
    """The evaluation points, a row each: ``point`` and its place on each axis, over all rows."""
    table = assigned(run)
    is_node = pl.col("node") >= 0
    # The network's rows place a point only where no node has a row.
    placed = table.filter(is_node | ~is_node.any().over("point")).group_by("point")
    places = placed.agg(pl.col("round", "time_s", "wall_s").mean())
    return places.join(_sent(table), on="point", how="left").sort("point").select("point", *AXES)


def assigned(run: Run) -> pl.DataFrame:
    """The rows of the metrics that belong to an evaluation point, with its ``point`` and ``instant`` as in :func:`tidy`."""
    every_s = (run.experiment.get("evaluation") or {}).get("every_s")
    moment = pl.col("moment")
    if every_s is None:
        instant = pl.when(moment == "round").then(pl.col("round").cast(pl.Float64))
    else:  # rounded, so that grids share their common instants
        instant = (moment.str.extract(r"^tick (\d+)$").cast(pl.Float64) * every_s).round(9)
    rows = (
        run.metrics.with_row_index("row")
        .with_columns(moment.fill_null("round").str.split(MOMENTS))
        .explode("moment")
        .with_columns(instant=pl.when(moment == "end").then(math.inf).otherwise(instant))
        .filter(pl.col("instant").is_not_null())
    )
    ends, others = (rows.filter(pl.col("instant").is_infinite() == end) for end in (True, False))
    same = others.join(ends, on="row", how="semi")
    # A run may end at an instant of the grid, or all nodes with a round: then that is the end.
    if len(same) == len(ends) and same["instant"].n_unique() == 1:
        rows = others
    return (
        rows.sort("time_s", maintain_order=True)
        .unique(["node", "instant"], keep="last", maintain_order=True)
        .with_columns(point=pl.col("instant").rank("dense").cast(pl.Int64) - 1)
    )


def _sent(table: pl.DataFrame) -> pl.DataFrame:
    """``point`` and ``bytes``: what all nodes have sent by then; null while no node has said."""
    sent = pl.col("bytes_sent")
    before = sent.forward_fill().fill_null(0).shift(1, fill_value=0).over("node")
    nodes = table.filter(pl.col("node") >= 0).sort("point", "time_s")
    added = (
        nodes.with_columns(new=sent - before).group_by("point").agg(pl.col("new").sum(), known=sent.count())
    )
    return (
        table.select("point")
        .unique()
        .join(added, on="point", how="left")
        .sort("point")
        .with_columns(pl.col("new", "known").fill_null(0).cum_sum())
        .select("point", bytes=pl.when(pl.col("known") > 0).then("new"))
    )


# --- the result of a run


@dataclass(frozen=True)
class Best:
    """The best mean over the nodes, and its round."""

    mean: float
    round: float


@dataclass(frozen=True)
class Final:
    """A metric over the nodes at the last complete evaluation, and the best of the complete ones; for
    :data:`ASYNCHRONY`, over the whole run and without a best."""

    mean: float
    std: float
    count: int
    round: float
    best: Best | None


@dataclass(frozen=True)
class FinalSummary:
    """The result of a run: times in seconds, traffic in bytes, counts over the whole network.

    ``rounds`` are those of the furthest node, ``least_rounds`` those of the slowest; ``messages`` are the columns
    ``messages_*`` without that prefix. None stands for what the run hasn't recorded.
    """

    status: str
    nodes: int
    parameters: int | None
    rounds: int | None
    time_s: float | None
    wall_s: float | None
    bytes_sent: int | None
    messages_lost: int | None
    metrics: dict[str, Final] = field(default_factory=dict)
    least_rounds: int | None = None
    messages: dict[str, int] = field(default_factory=dict)

    @property
    def bytes_per_node(self) -> float | None:
        """Mean over the nodes of the bytes sent."""
        return None if self.bytes_sent is None else self.bytes_sent / max(self.nodes, 1)


def final_summary(run: Run) -> FinalSummary:
    """The result of a run."""
    nodes = run.metrics.filter(pl.col("node") >= 0)
    most = nodes.group_by("node").agg(pl.col("round", *TRAFFIC).max())
    counts = {name: int(most[name].sum()) for name in TRAFFIC if nodes[name].count()}
    rounds: Any = most["round"]
    time_s: Any = run.metrics["time_s"].max()
    return FinalSummary(
        status=run.status,
        nodes=run.nodes,
        parameters=run.parameter_count,
        rounds=rounds.max(),
        time_s=time_s,
        wall_s=run.wall_s,
        bytes_sent=counts.get("bytes_sent"),
        messages_lost=counts.get("messages_lost"),
        metrics={name: value for name in metric_names(run) if (value := final(run, name)) is not None},
        least_rounds=rounds.min(),
        messages={
            name.removeprefix("messages_"): count
            for name, count in counts.items()
            if name.startswith("messages_")
        },
    )


def final(run: Run, name: str) -> Final | None:
    """A metric at the last complete evaluation, and its best; None where the run has none."""
    if name not in metric_names(run):
        return None
    if name in ASYNCHRONY:
        return _over_the_run(run, name)
    table = run.curves.filter(pl.col("metric") == name, "complete").sort("point")
    last = table.row(-1, named=True)
    good = table.filter(pl.col("mean").is_finite())
    good = good.sort("mean", descending=not lower_is_better(name), maintain_order=True)
    best = None if good.is_empty() else Best(good["mean"][0], good["round"][0])
    return Final(last["mean"], last["std"], last["count"], last["round"], best)


def _over_the_run(run: Run, name: str) -> Final | None:
    """A metric that every row has for the time since the node's row before, over all of that time: shares are weighted
    by seconds, mean ages by messages."""
    of = pl.col("messages_taken" if name.startswith("staleness") else "time_s")
    weight = (of - of.shift().over("node").fill_null(0)).clip(0)
    value = pl.col(name)
    mean = (value * pl.col("weight")).sum() / pl.col("weight").sum()
    nodes = (
        run.metrics.filter(pl.col("node") >= 0)
        .sort("time_s", maintain_order=True)
        .with_columns(weight=weight)
        .filter(value.is_not_null())
        .group_by("node", maintain_order=True)  # so that sums have one order, and repeat their bits
        .agg(value=value.max() if name == "staleness_max_s" else mean, round=pl.col("round").max())
        .filter(pl.col("value").is_finite())
    )
    if nodes.is_empty():
        return None
    value, round_ = pl.col("value"), pl.col("round")
    over = nodes.select(value.mean().alias("mean"), value.std(ddof=0).alias("std"), round_.mean())
    return Final(**over.row(0, named=True), count=len(nodes), best=None)


def finite(table: pl.DataFrame) -> pl.DataFrame:
    """A table with null for what JSON has no number for: NaN and infinities."""
    floats = pl.col(pl.Float32, pl.Float64)
    return table.with_columns(pl.when(floats.is_finite()).then(floats))


# --- the mean of a few runs


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval, ``mean - half_width`` to ``mean + half_width``; no width for a single value."""

    mean: float
    half_width: float | None
    count: int


def confidence(values: Iterable[float]) -> Interval | None:
    """The mean of independent values and its 95 % confidence interval; None without values.

    The half-width is t s / sqrt(n): s the standard deviation of the sample (divisor n - 1), t the quantile of Student's
    distribution with n - 1 degrees of freedom. A value that is not finite leaves no interval.
    """
    numbers = [float(value) for value in values]
    if not numbers:
        return None
    mean, count = statistics.mean(numbers), len(numbers)  # exact, whatever their size
    if count < 2 or not math.isfinite(mean):
        return Interval(mean, None, count)
    spread = math.hypot(*(number - mean for number in numbers)) / math.sqrt(count - 1)
    return Interval(mean, student_t(count - 1) * spread / math.sqrt(count), count)


def student_t(degrees: int, p: float = (1 + LEVEL) / 2) -> float:
    """The quantile of Student's distribution that a variable is below with probability p."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # imports in a fifth of a second

    return float(stdtrit(degrees, p))
