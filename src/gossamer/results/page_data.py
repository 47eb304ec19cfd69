"""The data of the report's script: runs as plain lists, thinned to what a page can show.

All series of a run are aligned to its evaluation points; values that are missing or not finite are None. Values of
single nodes are given for the nodes that are drawn, at the points that a slider can reach.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import polars as pl

from gossamer.results.formatting import is_share, metric_title
from gossamer.results.groups import Group, group_curve, several
from gossamer.results.groups import groups as group_runs
from gossamer.results.plots import PALETTE, axis_title, drawn_nodes, positions
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
from gossamer.results.timeline import Window, timeline_data

MOST_NODE_POINTS = 200
MOST_EDGES_DRAWN = 3000
_VALUE_DIGITS = 6
_PLACE_DIGITS = 10

Number = int | float | None
Graphs = list[tuple[int, list[list[int]]]]
"""(First round, edges), by round."""


def page_data(
    runs: Sequence[Run], groups: Sequence[Group] | None = None, within: Window | None = None
) -> dict[str, Any]:
    """Everything the page's script needs, ready for JSON without NaN; arguments as for the report."""
    groups = group_runs(runs) if groups is None else groups
    # The seeds of one experiment have a colour each, those of several experiments the colour of their group.
    together = several(groups)
    alike: list[Sequence[Run]] = [group.runs for group in groups] if together else [[run] for run in runs]
    colours = {run: PALETTE[index % len(PALETTE)] for index, same in enumerate(alike) for run in same}
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
            for index, group in enumerate(groups)
        ]
        if any(len(group.samples) > 1 for group in groups)
        else [],
        "together": together,
    }


def _group_data(group: Group) -> dict[str, Any]:
    """Each metric's curve over the samples of a group; ``half`` is half of the confidence interval's width."""
    metrics = {}
    for name in all_metrics(group.runs):
        table = group_curve(group, name)
        metrics[name] = {
            "points": {axis: _places(table[axis]) for axis in AXES},
            "mean": _numbers(table["mean"], _VALUE_DIGITS),
            "half": _numbers(table["half"], _VALUE_DIGITS),
            "count": table["count"].to_list(),
        }
    return {"runs": len(group.samples), "metrics": metrics}


def _run_data(run: Run, within: Window | None) -> dict[str, Any]:
    places = points(run)
    table = assigned(run)
    graphs: Graphs = sorted((int(start), edges) for start, edges in (run.setup.get("graphs") or {}).items())
    nodes = drawn_nodes(run.nodes, graphs[0][1] if graphs else [])
    at = _spread(places.height, MOST_NODE_POINTS)
    names = metric_names(run)
    return {
        "points": {name: _places(places[name]) for name in AXES},
        "metrics": {name: _metric(run, name, places) for name in names},
        "nodes": {
            "ranks": nodes,
            "at": at,
            "places": {name: _node_places(table, places, name, nodes, at) for name in AXES},
            "values": {
                name: values
                for name in names
                if (values := _per_node(table, name, nodes, at, _VALUE_DIGITS)) is not None
            },
        },
        "topology": _topology(run, graphs, nodes, [places["round"][index] for index in at]),
        "labels": run.setup.get("labels"),
        "classes": run.setup.get("classes"),
        "samples": run.setup.get("samples"),
        "timeline": timeline_data(run, within),
    }


def _metric(run: Run, name: str, places: pl.DataFrame) -> dict[str, Any]:
    curve = run.curves.filter(pl.col("metric") == name)
    table = places.select("point").join(curve, on="point", how="left").sort("point")
    series: dict[str, Any] = {column: _numbers(table[column], _VALUE_DIGITS) for column in STATISTICS}
    # Values that are equal to all digits have no spread: the rounding of floats would be drawn as one.
    ends = zip(series["std"], series["min"], series["max"], strict=True)
    series["std"] = [std if std is None or least != most else 0 for std, least, most in ends]
    values = run.metrics.filter(pl.col(name).is_not_null())["node"]
    if (values < 0).any() and (values >= 0).any():
        average = places.select("point").join(summary(run, name, network=True), on="point", how="left")
        series["average"] = _numbers(average.sort("point")["mean"], _VALUE_DIGITS)
    return series


def _per_node(
    table: pl.DataFrame, name: str, nodes: Sequence[int], at: Sequence[int], digits: int
) -> list[list[Number]] | None:
    """A column of single nodes: [nodes drawn][points]; None where no drawn node has a value."""
    rows = table.select("node", "point", pl.col(name).cast(pl.Float64)).rows()
    known = {(node, point): value for node, point, value in rows if value is not None}
    grid = [[_number(known.get((node, point)), digits) for point in at] for node in nodes]
    return grid if any((node, point) in known for node in nodes for point in at) else None


def _node_places(
    table: pl.DataFrame, places: pl.DataFrame, name: str, nodes: Sequence[int], at: Sequence[int]
) -> list[list[Number]] | None:
    """The places of single nodes on an axis; None where all are at the places of their points."""
    if name == "bytes" or (grid := _per_node(table, name, nodes, at, _PLACE_DIGITS)) is None:
        return None
    shared = [_number(places[name][index], _PLACE_DIGITS) for index in at]
    return (
        grid if any(v not in (None, w) for line in grid for v, w in zip(line, shared, strict=True)) else None
    )


def _topology(
    run: Run, graphs: Graphs, nodes: Sequence[int], rounds: Sequence[Number]
) -> dict[str, Any] | None:
    if not graphs:
        return None
    # The page needs only the graphs that hold at a point of the slider.
    held = [
        max((i for i, (start, _) in enumerate(graphs) if start <= (round_ or 0)), default=0)
        for round_ in rounds or [0]
    ]
    used = sorted(set(held))
    index = {node: i for i, node in enumerate(nodes)}
    drawn = []
    for number in used:
        inner = [(index[i], index[j]) for i, j in graphs[number][1] if i in index and j in index]
        drawn.append([end for k in _spread(len(inner), MOST_EDGES_DRAWN) for end in inner[k]])
    seed = run.experiment.get("seed")
    changing = len(graphs) > 1
    return {
        "nodes": run.nodes,
        "directed": bool(run.setup.get("directed", False)),
        "positions": positions(
            nodes, graphs[0][1], seed=seed if isinstance(seed, int) else 0, changing=changing
        ),
        "graphs": drawn,
        "edges": [len(graphs[number][1]) for number in used],
        "degrees": None if changing else _degrees(graphs[0][1], nodes),
        "held": [used.index(number) for number in held],
    }


def _degrees(edges: Iterable[Sequence[int]], nodes: Sequence[int]) -> list[int]:
    pairs = {(i, j) for a, b in edges for i, j in ((a, b), (b, a)) if i != j}
    count = Counter(i for i, _ in pairs)
    return [count[node] for node in nodes]


def _spread(count: int, most: int) -> list[int]:
    """At most ``most`` of 0, ..., count - 1, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(k * (count - 1) / (most - 1)) for k in range(most)})


def _places(column: pl.Series) -> list[Number] | None:
    """An axis, or None where nothing was recorded for it."""
    return _numbers(column, _PLACE_DIGITS) if column.count() else None


def _numbers(column: pl.Series, digits: int) -> list[Number]:
    return [_number(value, digits) for value in column]


def _number(value: Number, digits: int) -> Number:
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded
