"""The report: a self-contained HTML page about runs, and its exports."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from jinja2 import Environment, PackageLoader, StrictUndefined

from gossamer.numerics import summary as summary_of_numerics
from gossamer.results import tidy
from gossamer.results.comparison import Comparison
from gossamer.results.folder import write_text, writing
from gossamer.results.formatting import (
    NOTHING,
    bytes_text,
    count_text,
    differing,
    faults_text,
    flat,
    is_share,
    itemized,
    metric_title,
    seconds_text,
    value_text,
)
from gossamer.results.groups import Group, ended, group_curve, labels, shows_groups
from gossamer.results.groups import groups as group_runs
from gossamer.results.plots import PALETTE, axis_title, drawn_nodes, positions, timeline_data
from gossamer.results.run import Run

_PAGE = files("gossamer.results") / "page"
_MAX_NAMED = 12
_DESCRIBED = ("task", "partition", "topology", "algorithm", "network", "compute", "engine")
MAX_LINES = 20
"""Above this number of nodes, their spread is shown as quantiles instead of a line per node."""
MAX_NODE_POINTS = 200
MAX_EDGES_DRAWN = 3000
MAX_VALUES = 60_000
"""Maximum number of values of single nodes, and of edge ends, on a page."""


def write_report(
    runs: Sequence[Run],
    out: Path,
    *,
    groups: Sequence[Group] | None = None,
    compared: Comparison | None = None,
) -> Path:
    """Write a self-contained HTML page, which needs no network, about one or several runs. Returns its path.
    ``out`` may be a folder. By default, a group consists of runs that differ only in their seed. The page
    begins with the comparison ``compared``. BadInput for a file that can't be written."""
    path = Path(out) / "report.html" if Path(out).is_dir() else Path(out)
    text = render(runs, groups, compared)
    with writing(f"--out {out}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return path


def render(
    runs: Sequence[Run], groups: Sequence[Group] | None = None, compared: Comparison | None = None
) -> str:
    """The page as text. Arguments are as in :func:`write_report`. All text from experiments is escaped."""
    pages = Environment(
        loader=PackageLoader("gossamer.results", "page"), autoescape=True, undefined=StrictUndefined
    )
    pages.filters.update(count=count_text, seconds=seconds_text, named=_named)
    groups = group_runs(runs) if groups is None else groups
    names = labels(runs, statuses=False)
    mains = [main for main in dict.fromkeys(map(tidy.main_metric, runs)) if main is not None]
    numerics = runs[0].environment.get("resumed", [runs[0].environment])[-1].get("numerics")
    return pages.get_template("report.html").render(
        title=" · ".join(dict.fromkeys(map(_title, runs))) + (ended(runs[0]) if len(runs) == 1 else ""),
        numerics=None if numerics is None else summary_of_numerics(numerics),
        shared=_shared(runs),
        runs=[
            {"run": run, "name": name, "figures": _figures(run, mains), "events": _events(run)}
            for run, name in zip(runs, names, strict=True)
        ],
        experiment=(runs[0].path / "experiment.yaml").read_text(encoding="utf-8"),
        environment=json.dumps(runs[0].environment, indent=1, ensure_ascii=False),
        compared=compared,
        quantiles=any(run.nodes > MAX_LINES for run in runs),
        differing=_differing(groups),
        style=_PAGE.joinpath("report.css").read_text(encoding="utf-8"),
        data=embed(page_data(runs, groups)),
        script=_PAGE.joinpath("report.js").read_text(encoding="utf-8"),
    )


def _title(run: Run) -> str:
    """The name of the sweep with which a run was read, or else the run's own name."""
    return run.name if run.cell is None else run.path.resolve().parents[1].name


def embed(value: Any) -> str:
    """JSON that is safe inside ``<script type="application/json">`` with any text."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def write_comparison(compared: Comparison, page: Path) -> Path:
    """Write the rows of a comparison as a CSV file next to a page; the numbers of single units are separated
    by spaces. Returns its path."""
    path = page.with_name(f"{page.stem}-comparison.csv")
    lists = pl.col(pl.List(pl.Float64)).list.eval(pl.element().cast(pl.String)).list.join(" ")
    with writing(str(path)):
        compared.rows.with_columns(lists).write_csv(path)
    return path


def _shared(runs: Sequence[Run]) -> dict[str, str]:
    """The components that all runs share, by name."""
    settings = [flat(run.experiment) for run in runs]
    names = {key: {entry.get(f"{key}.name", entry.get(key)) for entry in settings} for key in _DESCRIBED}
    return {key: str(*values) for key, values in names.items() if len(values) == 1 and any(values)}


def _differing(groups: Sequence[Group]) -> dict[str, Any] | None:
    """The fields of experiments that differ between groups; None for a single group."""
    settings = [itemized(flat(group.runs[0].experiment)) for group in groups]
    keys = [key for key in differing(settings) if key not in ("name", "seed")]
    rows = [[key, *(str(entry.get(key, NOTHING)) for entry in settings)] for key in keys]
    return {"labels": [group.label for group in groups], "rows": rows} if rows else None


def _figures(run: Run, mains: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Title -> (value, note) of a run's key figures."""
    final, figures = tidy.final_summary(run), dict[str, tuple[str, str]]()
    for main in mains:
        value = final.metrics.get(main)
        last, best = (NOTHING, ""), (NOTHING, "")
        if value is not None:
            spread = f"std {value_text(main, value.std)}" if value.count > 1 else ""
            note = " ".join(filter(None, (spread, value.over)))
            if final.rounds is not None and value.round < final.rounds and run.status != "done":
                note += f" in round {value.round:.0f}, the last complete evaluation"
            elif value.early:
                note = ", ".join(filter(None, (note, value.at)))
            last = value_text(main, value.mean), note
        if value is not None and value.best is not None:
            sets = tidy.evaluation_sets(run.metrics.columns)
            on = next((f" on the {name} set" for name in sets if main.startswith(f"{name}_")), "")
            chosen = f"best of {value.best.of} evaluations{on}, in round {value.best.round:.0f}"
            best = value_text(main, value.best.mean), chosen
        figures |= {f"final {metric_title(main)}": last, f"best {metric_title(main)}": best}
    behind = final.least_rounds is not None and final.least_rounds != final.rounds
    slowest = f", {final.least_rounds:,} of the slowest" if behind else ""
    per_node = None if final.bytes_sent is None else final.bytes_sent / max(final.nodes, 1)
    return figures | {
        "rounds": (count_text(final.rounds), f"of the furthest node{slowest}"),
        "time": (seconds_text(final.time_s), "virtual" if run.virtual else "real"),
        "wall time": (seconds_text(final.wall_s), "real"),
        "sent": (bytes_text(final.bytes_sent), "by all nodes"),
        "sent per node": (bytes_text(per_node), "mean"),
        "messages": (count_text(final.messages.get("sent")), faults_text(final.messages)),
        "nodes": (count_text(final.nodes), ""),
        "parameters": (count_text(final.parameters), "of each model" if final.parameters else "not recorded"),
    }


def _events(run: Run) -> list[dict[str, Any]]:
    """A row for each kind of event: its name, count, nodes, first and last time, and an example."""
    kinds = run.events.group_by("event", maintain_order=True).agg(
        pl.len().alias("count"),
        pl.col("node").drop_nulls().unique().sort().alias("nodes"),
        pl.col("time_s").min().alias("first"),
        pl.col("time_s").max().alias("last"),
        pl.col("detail").drop_nulls().first().fill_null(""),
    )
    return kinds.to_dicts()


def _named(nodes: Sequence[int]) -> str:
    text = ", ".join(map(str, nodes[:_MAX_NAMED]))
    return f"{text} and {len(nodes) - _MAX_NAMED} more" if len(nodes) > _MAX_NAMED else text


# --- the data of the script: series are aligned to the evaluation points, and values that are not finite are None


def page_data(runs: Sequence[Run], groups: Sequence[Group] | None = None) -> dict[str, Any]:
    """Everything the page's script needs, ready for JSON without NaN; arguments as for the report."""
    groups = group_runs(runs) if groups is None else groups
    # Each seed of a single experiment has its own colour; with several experiments, seeds have the colour of
    # their group.
    together = shows_groups(groups)
    alike: list[Sequence[Run]] = [group.runs for group in groups] if together else [[run] for run in runs]
    colours = {run: index % len(PALETTE) for index, same in enumerate(alike) for run in same}
    names = tidy.all_metrics(runs)
    shown_groups = groups if any(group.has_interval for group in groups) else ()
    return {
        "virtual": all(run.virtual for run in runs),
        "axis": tidy.default_axis(runs),
        "axes": [{"name": name, "title": axis_title(name, runs)} for name in tidy.AXES],
        "metrics": [
            {
                "name": name,
                "title": metric_title(name),
                "share": is_share(name),
                "low": tidy.lower_is_better(name),
                "system": name in tidy.ASYNCHRONY,
            }
            for name in names
        ],
        "runs": [
            {"label": label, "colour": colours[run], **_run_data(run, MAX_VALUES // len(runs))}
            for run, label in zip(runs, labels(runs), strict=True)
        ],
        "groups": [
            {"label": group.label, "colour": index % len(PALETTE), **_group_data(group, runs)}
            for index, group in enumerate(shown_groups)
        ],
        "together": together,
    }


def _group_data(group: Group, runs: Sequence[Run]) -> dict[str, Any]:
    """Each metric's curve over the samples of a group; ``half`` is half the width of the confidence interval.
    A group without intervals has the numbers of the runs that are shown in its place."""
    if not group.has_interval:
        return {"metrics": {}, "members": [runs.index(run) for run in group.samples]}
    metrics = {}
    for name in tidy.all_metrics(group.runs):
        table = group_curve(group, name)
        series = {key: _numbers(table[key]) for key in ("mean", "half", "count")}
        metrics[name] = {"points": _axes(table), **series}
    return {"metrics": metrics, "members": []}


def _run_data(run: Run, max_values: int) -> dict[str, Any]:
    """The data of a run, with at most ``max_values`` values of single nodes."""
    points, rows, names = tidy.points(run), tidy.assigned(run), tidy.metric_names(run)
    graphs = {int(start): edges for start, edges in run.setup.get("graphs", {}).items()}
    graphs = dict(sorted(graphs.items()))
    start = min(run.poisoned, default=0)
    nodes = drawn_nodes(run.nodes, next(iter(graphs.values()), []), start)
    columns = [*names, *(name for name in tidy.AXES if name != "bytes")]
    max_points = max(max_values // (len(nodes) * (len(columns) + 1)), 2)
    indices = _spread(points.height, min(max_points, MAX_NODE_POINTS))
    shown = points[indices]
    values = {name: _per_node(rows, name, nodes, shown["point"].to_list()) for name in columns}
    recorded = {
        name: grid
        for name, grid in values.items()
        if any(value is not None for series in grid for value in series)
    }
    return {
        "points": _axes(points),
        "quantiles": run.nodes > MAX_LINES,
        "metrics": {name: _metric(run, name, points, rows) for name in names},
        "nodes": {
            "ranks": nodes,
            "start": start,
            "at": indices,
            "places": {name: recorded.get(name) for name in tidy.AXES},
            "values": {name: recorded[name] for name in names if name in recorded},
        },
        "topology": _topology(run, graphs, nodes, shown["round"].to_list(), max_values) if graphs else None,
        **{name: run.setup.get(name) for name in ("labels", "classes", "samples")},
        "poisoned": run.poisoned,
        "timeline": timeline_data(run),
    }


def _metric(run: Run, name: str, points: pl.DataFrame, rows: pl.DataFrame) -> dict[str, Any]:
    """Statistics of a metric at the complete points of a run (a mean over only the fastest nodes would mislead),
    and the values of the average model, if any."""
    # Values equal in all shown digits have no spread; otherwise rounding errors would be drawn as a spread.
    equal = pl.col("min").round_sig_figs(6) == pl.col("max").round_sig_figs(6)
    curve = tidy.complete_curve(run, name).with_columns(std=pl.when(equal).then(0.0).otherwise("std"))
    ids, node_rows = points.select("point"), rows.filter(pl.col("node") >= 0, pl.col(name).is_not_null())
    table = ids.join(curve, on="point", how="left", maintain_order="left")
    series: dict[str, Any] = {column: _numbers(table[column], 5) for column in tidy.STATISTICS}
    if node_rows.is_empty():
        return series
    if run.nodes > MAX_LINES:
        shares = {str(share): pl.col(name).quantile(share, "linear") for share in (0.05, 0.25, 0.75, 0.95)}
        spread = table.select("point").join(
            node_rows.group_by("point").agg(**shares), on="point", how="left", maintain_order="left"
        )
        series["quantiles"] = [_numbers(spread[share], 5) for share in shares]
    average = tidy.curves(run, [name], network=True)
    if not average.is_empty():
        series["average"] = _numbers(ids.join(average, on="point", how="left", maintain_order="left")["mean"])
    return series


def _per_node(
    table: pl.DataFrame, name: str, nodes: Sequence[int], at: Sequence[int]
) -> list[list[float | None]]:
    """A column's values for single nodes: [drawn nodes][points]."""
    digits = 7 if name in tidy.AXES else 4
    known = dict(zip(table.select("node", "point").rows(), _numbers(table[name], digits), strict=True))
    return [[known.get((node, point)) for point in at] for node in nodes]


def _topology(
    run: Run, graphs: dict[int, Any], nodes: Sequence[int], rounds: Sequence[float], max_values: int
) -> dict[str, Any]:
    """The drawn part of the graph at each point of the page's slider (only once for a static graph), within
    the size limit."""
    starts, edges = list(graphs), list(graphs.values())
    changing = len(edges) > 1
    shown = [edges[max(bisect_right(starts, round_) - 1, 0)] for round_ in rounds] if changing else edges
    index = {node: i for i, node in enumerate(nodes)}
    max_edges = min(MAX_EDGES_DRAWN, max(max_values // (2 * max(len(shown), 1)), 100))
    drawn = []
    for graph in shown:
        inner = [(index[i], index[j]) for i, j in graph if i in index and j in index]
        drawn.append([end for k in _spread(len(inner), max_edges) for end in inner[k]])
    layout = positions(nodes, edges[0], seed=run.experiment.get("seed", 0), changing=changing)
    return {
        "nodes": run.nodes,
        "directed": bool(run.setup.get("directed", False)),
        "positions": np.round(layout, 3).tolist(),
        "graphs": drawn,
        "edges": [len(graph) for graph in shown],
    }


def _spread(count: int, limit: int) -> list[int]:
    """At most ``limit`` of 0, ..., count - 1, evenly spaced, including the first and the last."""
    return [round(k) for k in np.linspace(0, count - 1, min(count, limit))]


def _axes(table: pl.DataFrame) -> dict[str, list[float | None] | None]:
    """The positions on each axis, or None if nothing was recorded for it."""
    return {name: _numbers(table[name]) if table[name].count() else None for name in tidy.AXES}


def _numbers(column: pl.Series, digits: int = 7) -> list[float | None]:
    """Values in a form that JSON can represent."""
    numbers = column.cast(pl.Float64).round_sig_figs(digits).to_frame("value")
    return tidy.finite(numbers)["value"].to_list()
