"""The spread of knowledge: a metric of each node against its distance from the nodes with poisoned data.

Distances are hops in the first round's graph, to the nearest source; on a directed graph, along its arcs. The
sources are the nodes of the poison that added the metric's evaluation set; for other metrics, they are all
poisoned nodes.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import networkx as nx
import polars as pl

from gossamer.errors import BadInput
from gossamer.results.formatting import NOTHING, Table, interval_text, is_share, metric_title, values_text
from gossamer.results.groups import Group
from gossamer.results.run_data import RunData
from gossamer.results.tidy import assigned, check_recorded, confidence, mean_over_rounds


def hops(run: RunData, metric: str) -> dict[int, int]:
    """The distance of every node reachable from the sources of a metric, which have distance 0 themselves.
    BadInput for a run without poisoned data, or whose algorithm does not use the topology."""
    if not run.poisoned:
        raise BadInput(f"--by-hops: the run {run.id} has no poisoned nodes; accepted: runs with poison")
    if not run.uses_topology:
        problem = f"the run {run.id}, whose nodes have no distances ({run.mixing_text})"
        raise BadInput(f"--by-hops: {problem}; accepted: runs whose algorithm uses the topology")
    of_set = metric.removeprefix("trained_").startswith
    poisons = zip(run.experiment["poison"], run.setup["poisoned"], strict=True)
    sources = {rank for poison, ranks in poisons for rank in ranks if of_set(f"{poison['set_name']}_")}
    graph: nx.Graph[int] = nx.DiGraph() if run.setup["directed"] else nx.Graph()
    graph.add_nodes_from(range(run.nodes))
    graph.add_edges_from(run.setup["graphs"]["0"])
    return dict(nx.multi_source_dijkstra_path_length(graph, sources or set(run.poisoned)))


def by_hops(run: RunData, metric: str) -> pl.DataFrame:
    """A metric of a run by distance, from the evaluations that all nodes at the distance have. A row per
    distance: ``hops``; ``nodes``, the number of nodes; ``area``, the area under the curve of the nodes' mean (by
    trapezoids), divided by its rounds; ``final``, their mean at the end; ``half_round``, the first round in which their
    mean is halfway from its first value to the sources' last value (null if it never is, if the sources end below
    the first value, or if they are not evaluated). Where evaluations are timed, a round is the mean of the
    nodes' rounds."""
    distances = hops(run, metric)
    schema = {"node": pl.Int32, "hops": pl.Int64}
    at = pl.DataFrame({"node": distances.keys(), "hops": distances.values()}, schema=schema)
    rows = assigned(run).filter(pl.col(metric).is_not_null()).join(at, "node")
    if rows.is_empty():
        raise BadInput(
            f"--by-hops {metric}: no node of the run {run.id} has recorded it; accepted: evaluation.nodes: all"
        )
    means = (
        rows.group_by("hops", "point")
        .agg(nodes=pl.len(), mean=pl.col(metric).mean(), round=pl.col("round").mean())
        .sort("hops", "point")
    )
    means = means.filter(pl.col("nodes") == pl.col("nodes").max().over("hops"))
    summaries: list[dict[str, Any]] = []
    goal: float | None = None  # of the sources, which come first
    for (distance,), curve in means.group_by("hops", maintain_order=True):
        first, last = curve["mean"][0], curve["mean"][-1]
        area = mean_over_rounds(curve["round"].to_numpy(), curve["mean"].to_numpy())
        row = {"hops": distance, "nodes": curve["nodes"][0], "area": last if area is None else area}
        if distance == 0:
            goal = last
        half_round = None
        if goal is not None and goal > first:
            half_round = curve.filter(pl.col("mean") >= (first + goal) / 2)["round"].first()
        summaries.append({**row, "final": last, "half_round": half_round})
    return pl.DataFrame(summaries, schema_overrides={"half_round": pl.Float64})


def spread(groups: Sequence[Group], metric: str) -> pl.DataFrame:
    """:func:`by_hops` over the runs of each group: ``group``, ``hops``, ``runs``, and the means over these of ``nodes``,
    ``area`` (with ``area_half``, half the width of its 95 % confidence interval, and ``area_values``), ``final`` and
    ``half_round`` (null unless all have one). Groups without finished runs, or with one that diverged, have no
    rows; BadInput if that leaves none."""
    check_recorded("--by-hops", metric, (run for group in groups for run in group.runs))
    summaries = []
    for group in groups:
        if group.diverged or not group.samples:
            continue
        rows = pl.concat(by_hops(run, metric) for run in group.samples).sort("hops")
        for (distance,), same in rows.group_by("hops", maintain_order=True):
            if (area := confidence(same["area"].to_list())) is not None:
                key = {"group": group.label, "hops": distance, "runs": len(same)}
                means = {name: same[name].mean() for name in ("nodes", "area", "final")}
                half_round = None if same["half_round"].has_nulls() else same["half_round"].mean()
                areas = {"area_half": area.half_width, "area_values": same["area"].to_list()}
                summaries.append({**key, **means, **areas, "half_round": half_round})
    if not summaries:
        raise BadInput(f"--by-hops {metric}: no group has only finished runs; accepted: runs that are done")
    floats = dict.fromkeys(("area_half", "half_round"), pl.Float64)
    return pl.DataFrame(summaries, schema_overrides=floats, infer_schema_length=None)


def table(rows: pl.DataFrame, metric: str, classes: Container[str] = ()) -> Table:
    """Rows of :func:`spread` as text: a line per group, a column per distance."""
    distances = sorted(rows["hops"].unique())
    unit, scale = ("%", 0.01) if is_share(metric, classes) else ("", 1.0)
    lines: dict[str, dict[int, str]] = {}
    for row in rows.to_dicts():
        late = "" if row["half_round"] is None else f", {row['half_round']:.4g} rounds"
        text = interval_text(row["area"], row["area_half"], unit, scale)
        if row["area_half"] is None and len(row["area_values"]) > 1:
            text = values_text(row["area_values"], unit, scale)
        text += late
        lines.setdefault(row["group"], {})[row["hops"]] = text
    head = ["", *(f"{distance} hops" if distance != 1 else "1 hop" for distance in distances)]
    title = (
        f"area under {metric_title(metric)} / rounds, by distance on the first graph, and rounds until halfway to the"
        " sources' last value"
    )
    return title, head, [[group, *(row.get(d, NOTHING) for d in distances)] for group, row in lines.items()]
