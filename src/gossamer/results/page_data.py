"""The data of the report's script: runs as plain lists, thinned to what a page can show.

All series of a run are aligned to its evaluation points; values that are missing or not finite are None. Values of single
nodes are given for the nodes that are drawn, at the points that a slider can reach.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl

from gossamer.results.comparison import Group, group_curve, several
from gossamer.results.comparison import groups as group_runs
from gossamer.results.formatting import is_share, metric_title
from gossamer.results.plots import PALETTE, Window, axis_title, drawn_nodes, positions, timeline_data
from gossamer.results.run import Run, labels
from gossamer.results.tidy import (
    AXES,
    STATISTICS,
    all_metrics,
    assigned,
    lower_is_better,
    metric_names,
    points,
    summary,
)

MOST_NODE_POINTS = 200
MOST_EDGES_DRAWN = 3000

Numbers = list[int | float | None]
Graphs = dict[int, list[list[int]]]
"""First round -> edges, by round."""


def page_data(
    runs: Sequence[Run], groups: Sequence[Group] | None = None, within: Window | None = None
) -> dict[str, Any]:
    """Everything the page's script needs, ready for JSON without NaN; arguments as for the report."""
    groups = group_runs(runs) if groups is None else groups
    # The seeds of one experiment have a colour each, those of several experiments the colour of their group.
    together = several(groups)
    alike: list[Sequence[Run]] = [group.runs for group in groups] if together else [[run] for run in runs]
    colours = {run: PALETTE[index % len(PALETTE)] for index, same in enumerate(alike) for run in same}
    shown = groups if any(len(group.samples) > 1 for group in groups) else ()
    return {
        "virtual": all(run.virtual for run in runs),
        "axes": [{"name": name, "title": axis_title(name, runs)} for name in AXES],
        "metrics": [
            {"name": name, "title": metric_title(name), "share": is_share(name), "low": lower_is_better(name)}
            for name in all_metrics(runs)
        ],
        "runs": [
            {"label": label, "colour": colours[run], **_run_data(run, within)}
            for run, label in zip(runs, labels(runs), strict=True)
        ],
        "groups": [
            {"label": group.label, "colour": PALETTE[index % len(PALETTE)], **_group_data(group)}
            for index, group in enumerate(shown)
        ],
        "together": together,
    }


def _group_data(group: Group) -> dict[str, Any]:
    """Each metric's curve over the samples of a group; ``half`` is half of the confidence interval's width."""
    tables = {name: group_curve(group, name) for name in all_metrics(group.runs)}
    metrics = {
        name: {"points": _axes(table), **{key: _numbers(table[key]) for key in ("mean", "half", "count")}}
        for name, table in tables.items()
    }
    return {"runs": len(group.samples), "metrics": metrics}


def _run_data(run: Run, within: Window | None) -> dict[str, Any]:
    places, table, names = points(run), assigned(run), metric_names(run)
    graphs: Graphs = {int(start): edges for start, edges in run.setup.get("graphs", {}).items()}
    graphs = dict(sorted(graphs.items()))
    nodes = drawn_nodes(run.nodes, next(iter(graphs.values()), []))
    at = _spread(places.height, MOST_NODE_POINTS)
    return {
        "points": _axes(places),
        "metrics": {name: _metric(run, name, places) for name in names},
        "nodes": {
            "ranks": nodes,
            "at": at,
            "places": {name: _per_node(table, name, nodes, at) for name in AXES if name != "bytes"},
            "values": {
                name: values for name in names if (values := _per_node(table, name, nodes, at)) is not None
            },
        },
        "topology": _topology(run, graphs, nodes, places["round"].gather(at).to_list()) if graphs else None,
        "labels": run.setup.get("labels"),
        "classes": run.setup.get("classes"),
        "samples": run.setup.get("samples"),
        "timeline": timeline_data(run, within),
    }


def _metric(run: Run, name: str, places: pl.DataFrame) -> dict[str, Any]:
    """Statistics of a metric at all points of a run, and the values of the average model, if it has any."""
    curve, at = run.curves.filter(pl.col("metric") == name), places.select("point")
    # Values that are equal to all digits have no spread: the rounding of floats would be drawn as one.
    equal = pl.col("min").round_sig_figs(6) == pl.col("max").round_sig_figs(6)
    curve = curve.with_columns(std=pl.when(equal).then(0.0).otherwise("std"))
    table = at.join(curve, on="point", how="left", maintain_order="left")
    series: dict[str, Any] = {column: _numbers(table[column]) for column in STATISTICS}
    values = run.metrics.filter(pl.col(name).is_not_null())["node"]
    if (values < 0).any() and (values >= 0).any():
        average = summary(run, name, network=True)
        series["average"] = _numbers(at.join(average, on="point", how="left", maintain_order="left")["mean"])
    return series


def _per_node(
    table: pl.DataFrame, name: str, nodes: Sequence[int], at: Sequence[int]
) -> list[Numbers] | None:
    """A column of single nodes: [nodes drawn][points]; None where no drawn node has a value."""
    known = dict(zip(table.select("node", "point").rows(), _numbers(table[name]), strict=True))
    grid = [[known.get((node, point)) for point in at] for node in nodes]
    return grid if any(value is not None for line in grid for value in line) else None


def _topology(run: Run, graphs: Graphs, nodes: Sequence[int], rounds: Sequence[float]) -> dict[str, Any]:
    starts, edges = list(graphs), list(graphs.values())
    # The page needs only the graphs that hold at a point of the slider.
    held = [max(bisect_right(starts, round_) - 1, 0) for round_ in rounds or [0]]
    used = sorted(set(held))
    index = {node: i for i, node in enumerate(nodes)}
    drawn = []
    for number in used:
        inner = [(index[i], index[j]) for i, j in edges[number] if i in index and j in index]
        drawn.append([end for k in _spread(len(inner), MOST_EDGES_DRAWN) for end in inner[k]])
    changing = len(graphs) > 1
    seed = run.experiment.get("seed", 0)
    return {
        "nodes": run.nodes,
        "directed": bool(run.setup.get("directed", False)),
        "positions": positions(nodes, edges[0], seed=seed, changing=changing),
        "graphs": drawn,
        "edges": [len(edges[number]) for number in used],
        "degrees": None if changing else _degrees(edges[0], nodes),
        "held": [used.index(number) for number in held],
    }


def _degrees(edges: Iterable[Sequence[int]], nodes: Sequence[int]) -> list[int]:
    count = Counter(end for edge in {frozenset(edge) for edge in edges} if len(edge) == 2 for end in edge)
    return [count[node] for node in nodes]


def _spread(count: int, most: int) -> list[int]:
    """At most ``most`` of 0, ..., count - 1, evenly spread, with the first and the last."""
    return [round(k) for k in np.linspace(0, count - 1, min(count, most))]


def _axes(table: pl.DataFrame) -> dict[str, Numbers | None]:
    """The places on each axis, or None where nothing was recorded for it."""
    return {name: _numbers(table[name]) if table[name].count() else None for name in AXES}


def _numbers(column: pl.Series) -> Numbers:
    """Values as JSON takes them; 7 digits are more than a page can show."""
    return [None if v is None or not math.isfinite(v) else float(f"{v:.7g}") for v in column]
