"""How far knowledge has come: a metric of each node against its distance from the nodes whose data was poisoned.

Distances are hops in the first round's graph, to the nearest source; on a directed graph, along its arcs. The sources are the
nodes of the poison that has added the metric's evaluation set; for other metrics, all poisoned nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import polars as pl

from gossamer.errors import BadInput
from gossamer.results.formatting import NOTHING, Table, interval_text, is_share, metric_title
from gossamer.results.groups import Group
from gossamer.results.run import Run
from gossamer.results.tidy import check_recorded, confidence, mean_over_rounds

log = logging.getLogger(__name__)

COLUMNS: dict[str, Any] = {
    "group": pl.String,
    "hops": pl.Int64,
    "runs": pl.Int64,
    **dict.fromkeys(("nodes", "area", "area_half", "final", "half_round"), pl.Float64),
}


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
    lengths = nx.multi_source_dijkstra_path_length(graph, own or set(run.poisoned))
    return {rank: int(length) for rank, length in lengths.items()}


class Reach(NamedTuple):
    """A metric of the nodes at one distance: their number, their mean over the rounds (by trapezoids) and at the end, and the
    first round at which their mean is halfway from its first value to that with which the sources end (None if it never is,
    or if the sources end below the first value)."""

    nodes: int
    area: float
    final: float
    half_round: float | None


def by_hops(run: Run, metric: str) -> dict[int, Reach]:
    """A metric of a run by distance. Evaluations that not all nodes of a distance have are left out."""
    distances = hops(run, metric)
    if len(distances) < run.nodes:
        log.warning("%s: %d nodes are out of reach, and not in --by-hops", run.id, run.nodes - len(distances))
    rows = run.metrics.filter(pl.col(metric).is_not_null()).unique(("node", "round"), keep="last")
    curves: dict[int, dict[float, list[float]]] = {}
    for rank, r, value in rows.select("node", "round", metric).sort("round").iter_rows():
        if rank in distances:
            curves.setdefault(distances[rank], {}).setdefault(r, []).append(value)
    if not curves:
        raise BadInput(
            f"--by-hops {metric}: no node of the run {run.id} has recorded it; accepted: evaluation.nodes: all"
        )
    found: dict[int, Reach] = {}
    for distance, curve in sorted(curves.items()):
        nodes = max(map(len, curve.values()))
        rounds = np.array([r for r, values in curve.items() if len(values) == nodes])
        means = np.array([fmean(values) for values in curve.values() if len(values) == nodes])
        area = mean_over_rounds(rounds, means)
        last = found[0].final if 0 in found else means[-1]
        arrived = rounds[means >= (means[0] + last) / 2] if last > means[0] else []
        late = float(arrived[0]) if len(arrived) else None
        found[distance] = Reach(nodes, means[-1] if area is None else area, float(means[-1]), late)
    return found


def spread(groups: Sequence[Group], metric: str) -> pl.DataFrame:
    """:func:`by_hops` over the runs of each group.

    Returns:
        A row per group and distance: ``group``, ``hops``, ``runs``, and the means over these of ``nodes``, ``area`` (with
        ``area_half``, half the width of its 95 % confidence interval), ``final``, and ``half_round`` (null unless all have
        one)."""
    check_recorded("--by-hops", metric, (run for group in groups for run in group.runs))
    rows: list[dict[str, Any]] = []
    for group in groups:
        runs = [by_hops(run, metric) for run in group.samples]
        for distance in sorted({distance for run in runs for distance in run}):
            each = [run[distance] for run in runs if distance in run]
            area, rounds = confidence([reach.area for reach in each]), [reach.half_round for reach in each]
            assert area is not None
            rows.append(
                {
                    "group": group.label,
                    "hops": distance,
                    "runs": len(each),
                    "nodes": fmean(reach.nodes for reach in each),
                    "area": area.mean,
                    "area_half": area.half_width,
                    "final": fmean(reach.final for reach in each),
                    "half_round": None if None in rounds else fmean(r for r in rounds if r is not None),
                }
            )
    return pl.DataFrame(rows, schema=COLUMNS)


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
