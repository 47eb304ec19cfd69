"""How far knowledge has come: a metric of each node against its distance from the nodes whose data was poisoned.

Distances are hops in the first round's graph, to the nearest source; on a directed graph, along its arcs. The sources are the
nodes of the poison that has added the metric's evaluation set; for other metrics, all poisoned nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx
import polars as pl

from gossamer.errors import BadInput
from gossamer.results.formatting import NOTHING, Table, interval_text, is_share, metric_title
from gossamer.results.groups import Group
from gossamer.results.run import Run
from gossamer.results.tidy import check_recorded, confidence, mean_over_rounds


def hops(run: Run, metric: str) -> dict[int, int]:
    """The distance of every node that the sources of a metric reach; they themselves have distance 0. A BadInput for a run
    without poisoned data."""
    if not run.poisoned:
        raise BadInput(f"--by-hops: the run {run.id} has no poisoned nodes; accepted: runs with poison")
    of_set = metric.removeprefix("trained_").startswith
    poisons = zip(run.experiment["poison"], run.setup["poisoned"], strict=True)
    own = {rank for poison, ranks in poisons for rank in ranks if of_set(f"{poison['set_name']}_")}
    graph: nx.Graph[int] = nx.DiGraph() if run.setup["directed"] else nx.Graph()
    graph.add_nodes_from(range(run.nodes))
    graph.add_edges_from(run.setup["graphs"]["0"])
    return dict(nx.multi_source_dijkstra_path_length(graph, own or set(run.poisoned)))


def by_hops(run: Run, metric: str) -> pl.DataFrame:
    """A metric of a run by distance. Evaluations that not all nodes of a distance have are left out.

    Returns:
        A row per distance: ``hops``; ``nodes``, their number; ``area``, their mean over the rounds (by trapezoids);
        ``final``, that at the end; and ``half_round``, the first round at which their mean is halfway from its first value to
        that with which the sources end (null if it never is, or if the sources end below the first value).
    """
    distances = hops(run, metric)
    at = pl.DataFrame(
        {"node": distances.keys(), "hops": distances.values()}, schema={"node": pl.Int32, "hops": pl.Int64}
    )
    rows = (
        run.metrics.filter(pl.col(metric).is_not_null())
        .unique(("node", "round"), keep="last")
        .join(at, "node")
    )
    if rows.is_empty():
        raise BadInput(
            f"--by-hops {metric}: no node of the run {run.id} has recorded it; accepted: evaluation.nodes: all"
        )
    means = (
        rows.group_by("hops", "round").agg(nodes=pl.len(), mean=pl.col(metric).mean()).sort("hops", "round")
    )
    means = means.filter(pl.col("nodes") == pl.col("nodes").max().over("hops"))
    found, of_sources = [], means.filter(hops=0)["mean"]
    for (distance,), curve in means.group_by("hops", maintain_order=True):
        first, last = curve["mean"][0], curve["mean"][-1]
        goal = of_sources[-1] if len(of_sources) else last
        arrived = curve.filter(pl.lit(goal > first), pl.col("mean") >= (first + goal) / 2)["round"]
        area = mean_over_rounds(curve["round"].to_numpy(), curve["mean"].to_numpy())
        row = {"hops": distance, "nodes": curve["nodes"][0], "area": last if area is None else area}
        found.append({**row, "final": last, "half_round": arrived[0] if len(arrived) else None})
    return pl.DataFrame(found).with_columns(pl.col("half_round").cast(pl.Float64))


def spread(groups: Sequence[Group], metric: str) -> pl.DataFrame:
    """:func:`by_hops` over the runs of each group.

    Returns:
        A row per group and distance: ``group``, ``hops``, ``runs``, and the means over these of ``nodes``, ``area`` (with
        ``area_half``, half the width of its 95 % confidence interval), ``final``, and ``half_round`` (null unless all have
        one)."""
    check_recorded("--by-hops", metric, (run for group in groups for run in group.runs))
    tables = [
        by_hops(run, metric).select(pl.lit(group.label).alias("group"), pl.all())
        for group in groups
        for run in group.samples
    ]
    rows = pl.concat(tables).group_by("group", "hops", maintain_order=True)
    late = pl.col("half_round")
    table = rows.agg(
        pl.len().alias("runs"),
        pl.col("nodes", "area", "final").mean(),
        half_round=pl.when(late.null_count() == 0).then(late.mean()),
        areas=pl.col("area"),
    )
    order = {group.label: index for index, group in enumerate(groups)}
    intervals = [confidence(areas) for areas in table["areas"].to_list()]
    halves = pl.Series("area_half", [each and each.half_width for each in intervals], pl.Float64)
    table = table.with_columns(halves).sort(pl.col("group").replace_strict(order), "hops")
    return table.select("group", "hops", "runs", "nodes", "area", "area_half", "final", "half_round")


def table(rows: pl.DataFrame, metric: str) -> Table:
    """Rows of :func:`spread` as text: a line per group, a column per distance."""
    distances = sorted(rows["hops"].unique())
    unit, scale = ("%", 0.01) if is_share(metric) else ("", 1.0)
    lines: dict[str, dict[int, str]] = {}
    for row in rows.to_dicts():
        late = "" if row["half_round"] is None else f", round {row['half_round']:g}"
        text = interval_text(row["area"], row["area_half"], unit, scale) + late
        lines.setdefault(row["group"], {})[row["hops"]] = text
    head = ["", *(f"{distance} hops" if distance != 1 else "1 hop" for distance in distances)]
    title = f"mean {metric_title(metric)} over the rounds by distance, and the round halfway to the sources' last value"
    return title, head, [[group, *(each.get(d, NOTHING) for d in distances)] for group, each in lines.items()]
