"""The figures of a run at its end: each metric with its best value, and the totals of time and traffic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from gossamer.messages.tags import COUNTERS
from gossamer.results.formatting import nodes_text, rounds_text
from gossamer.results.run_data import RunData
from gossamer.results.steps import steps_of
from gossamer.results.tidy import (
    ASYNCHRONY,
    belongs_to_model,
    complete_curve,
    curves_of,
    lower_is_better,
    metric_names,
)


@dataclass(frozen=True)
class Best:
    """The best mean over the nodes, the range of their rounds then, and the number of evaluations ``of`` which it is the
    best. It is chosen on the set on which it is measured, and so exceeds what the same model would have on others."""

    mean: float
    round_least: int
    round_most: int
    of: int


@dataclass(frozen=True)
class FinalValue:
    """A metric at the end of a run: the mean over the nodes of their newest rows, which is the last step of
    :meth:`gossamer.Run.steps`, and the range of rounds of these rows. A run by rounds ends with all nodes in its last round.
    A metric without a place on the time axis has the value of its last complete round. Metrics in :data:`ASYNCHRONY` cover
    the whole run. The mean is over ``count`` of the experiment's ``nodes`` (None for a metric of the network); those that
    are away at the end do not count.

    ``best`` is the best mean at a complete evaluation point, for metrics of model quality (those of evaluation sets, and the
    training loss). ``early``: other metrics have a later complete evaluation, or nodes have later models."""

    mean: float
    std: float
    count: int
    round_least: int
    round_most: int
    best: Best | None = None
    nodes: int | None = None
    early: bool = False

    @property
    def over(self) -> str:
        """The nodes with a value, such as "over 14 of 16 nodes"; empty for the network and for a single node."""
        if self.nodes is None or self.count == self.nodes == 1:
            return ""
        return f"over {nodes_text(self.count, self.nodes)}"

    def before(self, last: int | None) -> str:
        """The rounds of the value, such as "rounds 3 to 5", unless it is the last one and all of its nodes were in round
        ``last``."""
        if self.round_least == self.round_most and self.round_most >= (last or 0) and not self.early:
            return ""
        return rounds_text(self.round_least, self.round_most)


@dataclass(frozen=True)
class FinalSummary:
    """The result of a run: times in seconds, traffic in bytes, counts over the whole network.

    ``rounds`` is that of the fastest node, ``least_rounds`` that of the slowest one that is present at the end.
    ``messages`` has the counts ``messages_*`` of the :func:`totals` without that prefix. Unless these are ``exact``, there
    may have been more rounds, bytes and messages. None stands for values that the run has not recorded.
    """

    status: str
    nodes: int
    parameters: int | None
    rounds: int | None
    least_rounds: int | None
    time_s: float | None
    wall_s: float | None
    bytes_sent: int | None
    metrics: dict[str, FinalValue]
    messages: dict[str, int]
    exact: bool


def totals(run: RunData) -> dict[str, Any]:
    """The totals of a run (:class:`~gossamer.results.schema.Totals`). If the engine has written none, since the run was
    killed or has not ended, or its version did not count them, they are sums over the nodes' last rows, which need
    not add up and are not ``exact``; totals that no row has are missing."""
    if (counted := run.figures.get("totals")) is not None:
        return dict(counted)
    columns = "round", "time_s", *COUNTERS
    latest = run.metrics.filter(pl.col("node") >= 0).group_by("node").agg(pl.col(columns).max())
    present = latest.filter(~pl.col("node").is_in(run.away))
    return {
        **{name: int(latest[name].sum()) for name in COUNTERS if latest[name].count()},
        "rounds_most": latest["round"].max(),
        "rounds_least": present["round"].min(),
        "time_s": run.metrics["time_s"].max(),
        "exact": False,
    }


def total(run: RunData, axis: str) -> float | None:
    """The end of a run on the axis ``time_s`` or ``bytes``: its time in seconds, or the bytes that all nodes have sent."""
    return totals(run).get("bytes_sent" if axis == "bytes" else axis)


def final_summary(run: RunData) -> FinalSummary:
    """The result of a run."""
    counted = totals(run)
    finals = {name: final(run, name) for name in metric_names(run)}
    fates = {name: count for name, count in counted.items() if name.startswith("messages_")}
    return FinalSummary(
        status=run.status,
        nodes=run.nodes,
        parameters=run.setup.get("parameters"),
        rounds=counted["rounds_most"],
        least_rounds=counted["rounds_least"],
        time_s=counted["time_s"],
        wall_s=run.wall_s,
        bytes_sent=counted.get("bytes_sent"),
        metrics={name: value for name, value in finals.items() if value is not None},
        messages={name.removeprefix("messages_"): count for name, count in fates.items()},
        exact=counted["exact"],
    )


def final(run: RunData, name: str) -> FinalValue | None:
    """A metric at the end of a run, and its best; None if the run has none."""
    if name in ASYNCHRONY:
        return _over_the_run(run, name)
    table = complete_curve(run, name)
    steps = steps_of(run, name)
    last = None if steps is None else steps.last()
    if last is None:
        if table.is_empty():
            return None
        last = table.select("mean", "std", "count", "round_least", "round_most").row(-1, named=True)
    best = None
    if name == "train_loss" or belongs_to_model(run, name):
        good = table.filter(pl.col("mean").is_finite()).select("mean", "round_least", "round_most")
        good = good.sort("mean", descending=not lower_is_better(name, run.class_columns), maintain_order=True)
        best = None if good.is_empty() else Best(**good.row(0, named=True), of=len(good))
    latest = curves_of(run).filter("complete")["point"].max()
    early, nodes = bool(table.height) and table["point"][-1] != latest, _nodes_of(run, name)
    return FinalValue(**last, best=best, nodes=nodes, early=early or (nodes is None and _ends_apart(run)))


def _ends_apart(run: RunData) -> bool:
    """Whether some nodes have rows of the end, but not all, so that the network has none."""
    ends = run.metrics.filter(pl.col("moment").str.contains("end"))["node"]
    return bool(len(ends)) and not (ends < 0).any()


def _nodes_of(run: RunData, name: str) -> int | None:
    """The number of nodes of a run; None for a metric that only the network has."""
    return run.nodes if run.metrics.filter(pl.col("node") >= 0)[name].count() else None


def _over_the_run(run: RunData, name: str) -> FinalValue | None:
    """A metric whose rows cover the time since the node's previous row, over the whole run: shares are weighted by the
    seconds for which the node was present, mean ages by messages."""
    value, weight = pl.col(name), pl.col("weight")
    mean = (value * weight).sum() / weight.sum()
    present_s = pl.col("time_s") - pl.col("away_s").fill_null(0)
    cumulative = pl.col("messages_taken") if name.startswith("staleness") else present_s
    nodes = (
        run.metrics.filter(pl.col("node") >= 0)
        .sort("time_s", maintain_order=True)
        .join_asof(_absences(run), on="time_s", by="node", check_sortedness=False)
        .with_columns(weight=cumulative)
        .with_columns(weight=(weight - weight.shift().over("node").fill_null(0)).clip(0))
        .filter(value.is_not_null())
        .group_by("node", maintain_order=True)  # so that sums have a fixed order and reproducible bits
        .agg(value=value.max() if name == "staleness_max_s" else mean, round=pl.col("round").max())
        .filter(pl.col("value").is_finite())
    )
    if nodes.is_empty():
        return None
    summary = nodes.select(
        mean=pl.col("value").mean(),
        std=pl.col("value").std(ddof=0),
        count=pl.len(),
        round_least=pl.col("round").min(),
        round_most=pl.col("round").max(),
    )
    return FinalValue(**summary.row(0, named=True), nodes=run.nodes)


def _absences(run: RunData) -> pl.DataFrame:
    """``node``, ``time_s`` and ``away_s``: for each return of a node, its time and the seconds for which the node has been
    away until then. (A frozen process does not know that it was, so only a simulated node that is frozen is away.)"""
    leaves, comes_back = {"absent", "lost", "left"}, {"joined", "returned"}
    if run.virtual:
        leaves, comes_back = leaves | {"frozen"}, comes_back | {"thawed"}
    since: dict[int, float] = {}
    away: dict[int, float] = {}
    rows = []
    for node, event, time_s in run.events.drop_nulls("node").select("node", "event", "time_s").iter_rows():
        if event in leaves:
            since.setdefault(node, time_s)
        elif event in comes_back and node in since:
            away[node] = away.get(node, 0.0) + time_s - since.pop(node)
            rows.append((node, time_s, away[node]))
    schema = {"node": pl.Int32, "time_s": pl.Float64, "away_s": pl.Float64}
    return pl.DataFrame(rows, schema, orient="row").sort("time_s")
