"""Summaries of a run over its nodes: what plots and reports show.

An evaluation point is one recorded evaluation of the network, with at most one row of a node: an instant of the grid
where the experiment evaluates on a grid of time (``evaluation.every_s``), otherwise a round, which every node reaches at
its own time; and last the end of a run that ended before its rounds were done, with all nodes as they were then. On a grid
rows of rounds are no points. (Records without a column ``moment``, of older versions: on a grid rows belong together that lie
within half a step of it; otherwise rows of one round do, also those of the end.)

A point has one place on each x axis: ``round``, ``time_s`` and ``wall_s`` are means over the nodes; ``bytes``
is what the whole network has sent until then, the sum over the nodes of ``bytes_sent``, where a node without
a row at the point counts with its row before (what a lost node sent stays sent).

Spread is the standard deviation over the nodes that are there (divisor n, since they are all the nodes and no
sample).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

import polars as pl

from gossamer.errors import BadInput, listed, suggest
from gossamer.results.recorder import METRICS, MOMENTS, TRAFFIC
from gossamer.results.run import Run

Axis = Literal["round", "time_s", "wall_s", "bytes"]
AXES: tuple[Axis, ...] = get_args(Axis)

ASYNCHRONY = ("staleness_s", "staleness_max_s", "idle_share", "uplink_share", "downlink_share")
"""Metrics that say how nodes spend their time, rather than what they have learned."""
_NOT_METRICS = frozenset(
    name
    for name in (*METRICS, *TRAFFIC)
    if name not in ("train_loss", "test_loss", "consensus_distance", *ASYNCHRONY)
)
_LOWER_IS_BETTER = ("loss", "error", "distance", "perplexity", "staleness", "idle")
_STATISTICS = ("mean", "std", "min", "max", "count")


@dataclass(frozen=True)
class Best:
    """The best mean over the nodes, and the round it was reached in."""

    mean: float
    round: float


@dataclass(frozen=True)
class Final:
    """A metric over the nodes, at the last evaluation that is complete; ``best`` is over those that are complete.

    One of :data:`ASYNCHRONY` is over the whole run instead, and has no best."""

    mean: float
    std: float
    count: int
    round: float
    best: Best | None


@dataclass(frozen=True)
class FinalSummary:
    """What a run came to: times in seconds, traffic in bytes, counts over the whole network.

    ``rounds`` are those of the furthest node, ``least_rounds`` those of the slowest; ``messages`` are the counters
    ``messages_*`` without that prefix.
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


def metric_names(run: Run) -> list[str]:
    """Metrics of the run that have a value.

    Test accuracy comes first, then other test metrics, those of further evaluation sets, losses, the consensus distance,
    what the algorithm recorded, and :data:`ASYNCHRONY`.
    """
    numeric = [
        name for name, dtype in run.metrics.schema.items() if dtype.is_numeric() and name not in _NOT_METRICS
    ]
    present = [name for name in numeric if run.metrics[name].count() > 0]
    sets = evaluation_sets(present)
    losses = [f"{each}_loss" for each in sets]
    first = [
        name
        for each in sets
        for name in (f"{each}_accuracy", *sorted(name for name in present if name.startswith(f"{each}_")))
        if name not in losses
    ]
    order = [*dict.fromkeys(first), *losses, "train_loss", "consensus_distance"]
    rest = [name for name in present if name not in (*order, *ASYNCHRONY)]
    return [name for name in (*order, *sorted(rest), *ASYNCHRONY) if name in present]


def evaluation_sets(columns: Iterable[str]) -> list[str]:
    """The evaluation sets among recorded columns, ``test`` first: each has a loss."""
    losses = {name.removesuffix("_loss") for name in columns if name.endswith("_loss")}
    return ["test", *sorted(losses - {"test", "train"})]


def main_metric(run: Run) -> str | None:
    """The metric that a run is evaluated by: the first of :func:`metric_names`; None where it has none."""
    return next(iter(metric_names(run)), None)


def lower_is_better(metric: str) -> bool:
    """Whether a smaller value is the better one: losses, errors, distances, ages and idleness, by the words of the
    name."""
    named = any(word in metric for word in _LOWER_IS_BETTER)
    return named or not {"mae", "mse", "rmse"}.isdisjoint(metric.split("_"))


def points(run: Run) -> pl.DataFrame:
    """The evaluation points, a row each: ``point`` (0, 1, ...), and its place on each of :data:`AXES`."""
    return _points(assigned(run))


def assigned(run: Run) -> pl.DataFrame:
    """The rows of the metrics that belong to an evaluation point, with a column ``point``, the number of the point, and
    ``instant``, which says the same across runs: the round, the instant of the grid in seconds, or infinity for the end.
    """
    every_s = (run.experiment.get("evaluation") or {}).get("every_s")
    if run.metrics["moment"].null_count() == 0:
        table = _by_moment(run.metrics, every_s)
    elif every_s is None:
        table = run.metrics.with_columns(instant=pl.col("round").cast(pl.Float64))
    else:
        table = _by_time(run.metrics, every_s)
    return (
        table.sort("time_s", maintain_order=True)
        .unique(["node", "instant"], keep="last", maintain_order=True)
        .with_columns(point=pl.col("instant").rank("dense").cast(pl.Int64) - 1)
    )


def _by_moment(table: pl.DataFrame, every_s: float | None) -> pl.DataFrame:
    moment = pl.col("moment")
    instant: pl.Expr
    if every_s is None:
        instant = pl.when(moment == "round").then(pl.col("round").cast(pl.Float64))
    else:
        tick = moment.str.extract(r"^tick (\d+)$").cast(pl.Float64)
        instant = (tick * every_s).round(9)  # so that equal instants of several grids are equal
    rows = (
        table.with_row_index("row")
        .with_columns(moment.str.split(MOMENTS))
        .explode("moment")
        .with_columns(instant=pl.when(moment == "end").then(math.inf).otherwise(instant))
        .filter(pl.col("instant").is_not_null())
    )
    ends, others = (rows.filter(pl.col("instant").is_infinite() == end) for end in (True, False))
    same = others.join(ends, on="row", how="semi")
    # A run may end at an instant of the grid, or all nodes with a round: then that is the end.
    if len(same) == len(ends) and same["instant"].n_unique() == 1:
        rows = others
    return rows.drop("row")


def _by_time(table: pl.DataFrame, every_s: float) -> pl.DataFrame:
    table = table.sort("time_s", "node", maintain_order=True)
    numbers, start = [], -math.inf
    seen: set[int] = set()
    number = -1
    for node, time_s in table.select("node", pl.col("time_s").fill_null(0.0)).iter_rows():
        if node in seen or time_s - start > every_s / 2:
            number, start, seen = number + 1, time_s, set()
        seen.add(node)
        numbers.append(number)
    return table.with_columns(instant=(pl.Series(numbers, dtype=pl.Float64) * every_s).round(9))


def summary(run: Run, y: str, *, network: bool = False) -> pl.DataFrame:
    """A metric over the nodes at every point that has it.

    Args:
        run: a run.
        y: a column of the metrics. One that only the network has (``consensus_distance``) is taken from
            there.
        network: take the network's own row (node -1), e.g. the test accuracy of the average model.

    Returns:
        Columns ``point``, ``round``, ``time_s``, ``wall_s``, ``bytes``, ``mean``, ``std``, ``min``, ``max``,
        ``count``.

    Raises:
        BadInput: for a metric that the run hasn't recorded.
    """
    if y not in run.metrics.columns or not run.metrics[y].dtype.is_numeric():
        names = metric_names(run)
        raise BadInput(f"metric: got {y!r}{suggest(y, names)}; accepted: {listed(names)}")
    table = assigned(run)
    values = table.filter(pl.col(y).is_not_null())
    if network or not (values["node"] >= 0).any():
        values = values.filter(pl.col("node") < 0)
    else:
        values = values.filter(pl.col("node") >= 0)
    value = pl.col(y).cast(pl.Float64)
    statistics = values.group_by("point").agg(
        mean=value.mean(),
        std=value.std(ddof=0),
        min=value.min(),
        max=value.max(),
        count=pl.len().cast(pl.Int64),
    )
    return (
        _points(table, values)
        .join(statistics, on="point", how="inner")
        .sort("point")
        .select("point", *AXES, *_STATISTICS)
    )


def curve(run: Run, y: str, x: str = "round") -> pl.DataFrame:
    """A metric over the nodes against rounds, time or traffic: columns ``x``, ``mean``, ``std``, ``min``,
    ``max``, ``count``.

    Args:
        run: a run.
        y: a column of the metrics, see :func:`summary`.
        x: ``round``, ``time_s`` (virtual under ``simulate``), ``wall_s`` (real), or ``bytes`` (sent by the
            whole network).

    Raises:
        BadInput: for another x, or a metric that the run hasn't recorded.
    """
    if x not in AXES:
        raise BadInput(f"x: got {x!r}{suggest(x, AXES)}; accepted: {listed(AXES)}")
    return (
        summary(run, y)
        .select(pl.col(x).cast(pl.Float64).alias("x"), *_STATISTICS)
        .sort("x", maintain_order=True)
    )


def final_summary(run: Run) -> FinalSummary:
    """What the run came to; None stands for what it hasn't recorded."""
    nodes = run.metrics.filter(pl.col("node") >= 0)
    return FinalSummary(
        status=run.status,
        nodes=run.nodes,
        parameters=run.parameter_count,
        rounds=None if (rounds := _last(nodes["round"])) is None else int(rounds),
        time_s=_last(run.metrics["time_s"]),
        wall_s=run.wall_s,
        bytes_sent=_total(nodes, "bytes_sent"),
        messages_lost=_total(nodes, "messages_lost"),
        metrics={name: value for name in metric_names(run) if (value := final(run, name)) is not None},
        least_rounds=None if (least := _least(nodes)) is None else int(least),
        messages={
            name.removeprefix("messages_"): count
            for name in TRAFFIC
            if name.startswith("messages_") and (count := _total(nodes, name)) is not None
        },
    )


def finite(table: pl.DataFrame) -> pl.DataFrame:
    """A table with null for what JSON has no number for: NaN and infinities."""
    floats = pl.col(pl.Float32, pl.Float64)
    return table.with_columns(pl.when(floats.is_finite()).then(floats))


def _points(table: pl.DataFrame, witnesses: pl.DataFrame | None = None) -> pl.DataFrame:
    """The points of a table; ``witnesses`` are the rows whose mean place is a point's (None: all rows).

    Nodes that had no part in a round (clients that a server passed over) are far ahead of those that had.
    """
    witnesses = table if witnesses is None else witnesses
    nodes = table.filter(pl.col("node") >= 0)
    places = [pl.col(name).mean() for name in ("round", "time_s", "wall_s")]
    # The network's rows place a point only where no node has a row.
    seen = witnesses.filter(pl.col("node") >= 0)
    alone = witnesses.join(seen, on="point", how="anti")
    placed = pl.concat([seen, alone]).group_by("point").agg(places).sort("point")
    sent = (
        nodes.sort("point", "time_s")
        .group_by("node", "point", maintain_order=True)
        .agg(pl.col("bytes_sent").max())
        .with_columns(
            new=pl.col("bytes_sent")
            - pl.col("bytes_sent").forward_fill().fill_null(0).shift(1, fill_value=0).over("node")
        )
    )
    # A total of what each node added needs no row of every node at every point.
    added = sent.group_by("point").agg(pl.col("new").sum(), known=pl.col("bytes_sent").count())
    return (
        placed.join(added, on="point", how="left")
        .sort("point")
        .with_columns(bytes=pl.col("new").fill_null(0).cum_sum())
        .with_columns(bytes=pl.when(pl.col("known").fill_null(0).cum_sum() > 0).then("bytes"))
        .select("point", *AXES)
    )


def final(run: Run, name: str) -> Final | None:
    """A metric at the last complete evaluation, and its best; None where the run has none."""
    if name not in metric_names(run):
        return None
    if name in ASYNCHRONY:
        return _over_the_run(run, name)
    table = summary(run, name)
    if table.is_empty():
        return None
    table = table.filter(pl.col("point").is_in(complete(run, name)))
    last = table.row(-1, named=True)
    finite = table.filter(pl.col("mean").is_finite())
    best = None
    if not finite.is_empty():
        row = finite.sort("mean", descending=not lower_is_better(name), maintain_order=True).row(
            0, named=True
        )
        best = Best(row["mean"], row["round"])
    return Final(last["mean"], last["std"], last["count"], last["round"], best)


def _over_the_run(run: Run, name: str) -> Final | None:
    """A metric that each row has for the time since the node's row before, over all of that time: shares count by the
    seconds that they are of, mean ages by the messages that they are of."""
    # (Records of older versions don't have the number of those messages: rows count alike.)
    of = pl.col("messages_taken" if name.startswith("staleness") else "time_s")
    weight = (of - of.shift().over("node").fill_null(0)).fill_null(1)
    value = pl.col(name)
    mean = (value * pl.col("weight")).sum() / pl.col("weight").sum()
    nodes = (
        run.metrics.filter(pl.col("node") >= 0)
        .sort("time_s", maintain_order=True)
        .with_columns(weight=weight.clip(0))
        .filter(value.is_not_null())
        .group_by("node")
        .agg(value=value.max() if name == "staleness_max_s" else mean, round=pl.col("round").max())
        .filter(pl.col("value").is_finite())
    )
    if nodes.is_empty():
        return None
    mean, std, rounds = nodes.select(
        pl.col("value").mean(), std=pl.col("value").std(ddof=0), round=pl.col("round").mean()
    ).row(0)
    return Final(mean, std, len(nodes), rounds, best=None)


def complete(run: Run, name: str) -> list[int]:
    """The points with a metric at which as many nodes have a row as at any such point, ascending.

    A run that was killed or stopped is recorded in its last rounds for its fastest nodes only. Nodes without the
    metric don't count, nor do nodes that were lost or left: a run that went on without them has its end all the same.
    """
    table = assigned(run)
    having = table.filter(pl.col(name).is_not_null())
    if (having["node"] >= 0).any():
        having = having.filter(pl.col("node") >= 0)
    ranks = set(having["node"]) - set(run.away) or set(having["node"])
    rows = table.filter(pl.col("node").is_in(list(ranks))).join(having, on="point", how="semi")
    counts = rows.group_by("point").agg(count=pl.col("node").n_unique())
    return sorted(counts.filter(pl.col("count") == pl.col("count").max())["point"])


def _last(column: pl.Series) -> float | None:
    value = column.max()
    return float(value) if isinstance(value, (int, float)) else None


def _least(nodes: pl.DataFrame) -> float | None:
    """The rounds of the node that got least far."""
    value = nodes.group_by("node").agg(pl.col("round").max())["round"].min()
    return float(value) if isinstance(value, (int, float)) else None


def _total(nodes: pl.DataFrame, name: str) -> int | None:
    """Sum over the nodes of a counter's last value."""
    known = nodes.filter(pl.col(name).is_not_null())
    return None if known.is_empty() else int(known.group_by("node").agg(pl.col(name).max())[name].sum())
