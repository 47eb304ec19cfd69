"""The report: a self-contained HTML page about runs, and its exports."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from jinja2 import Environment, PackageLoader, StrictUndefined

from gossamer.numerics import summary as summary_of_numerics
from gossamer.results import tidy
from gossamer.results.comparison import Comparison
from gossamer.results.finals import Best, final_summary
from gossamer.results.folder import latest, write_text, writing
from gossamer.results.formatting import (
    NOTHING,
    at_least,
    bytes_text,
    count_text,
    differing,
    fates_text,
    flat,
    is_share,
    itemized,
    metric_title,
    point_text,
    rounds_text,
    seconds_text,
    value_text,
)
from gossamer.results.groups import Group, ended, group_curve, labels, shows_groups
from gossamer.results.groups import groups as group_runs
from gossamer.results.plots import PALETTE, axis_title, drawn_nodes, positions, timeline_data
from gossamer.results.run_data import RunData
from gossamer.results.steps import MAX_DRAWN, bytes_by, steps_of

_PAGE = files("gossamer.results") / "page"
_MAX_NAMED = 12
_DESCRIBED = ("task", "partition", "topology", "algorithm", "network", "compute", "engine")
MAX_LINES = 20
"""Above this number of nodes, their spread is shown as quantiles instead of a line per node."""
MAX_NODE_POINTS = 200
MAX_EDGES_DRAWN = 3000
MAX_VALUES = 60_000
"""Maximum number of values of single nodes, and of edge ends, on a page."""
MIN_STEPS = 50
"""A page about many runs draws at least this many instants of each curve over time."""
_COLUMNS_DRAWN = 10  # of a curve over time
_PLACES = ("round", "wall_s", "time_s", "bytes", "instant_s", "instant_bytes")
_SHARES = (0.05, 0.25, 0.75, 0.95)


def write_report(
    runs: Sequence[RunData],
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
    runs: Sequence[RunData], groups: Sequence[Group] | None = None, compared: Comparison | None = None
) -> str:
    """The page as text. Arguments are as in :func:`write_report`. All text from experiments is escaped."""
    pages = Environment(
        loader=PackageLoader("gossamer.results", "page"), autoescape=True, undefined=StrictUndefined
    )
    pages.filters.update(count=count_text, seconds=seconds_text, named=_named)
    groups = group_runs(runs) if groups is None else groups
    names = labels(runs, statuses=False)
    mains = [main for main in dict.fromkeys(map(tidy.main_metric, runs)) if main is not None]
    numerics = latest(runs[0].environment).get("numerics")
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
        read=list(dict.fromkeys(line for run in runs if (line := run.setup.get("data", {}).get("line")))),
        quantiles=any(run.nodes > MAX_LINES for run in runs),
        differing=_differing(groups),
        style=_PAGE.joinpath("report.css").read_text(encoding="utf-8"),
        data=embed(page_data(runs, groups)),
        script=_PAGE.joinpath("report.js").read_text(encoding="utf-8"),
    )


def _title(run: RunData) -> str:
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


def _shared(runs: Sequence[RunData]) -> dict[str, str]:
    """The components that all runs share, by name. One that no run uses is marked."""
    settings = [flat(run.experiment) for run in runs]
    names = {key: {entry.get(f"{key}.name", entry.get(key)) for entry in settings} for key in _DESCRIBED}
    shared = {key: str(*values) for key, values in names.items() if len(values) == 1 and any(values)}
    unused = set.intersection(*map(_unused, runs))
    return {key: f"{name} (not used)" if key in unused else name for key, name in shared.items()}


def _unused(run: RunData) -> set[str]:
    """The components that a run's algorithm or engine does not use."""
    paced = run.virtual or flat(run.experiment).get("engine.pace", False)
    return {key for key, used in {"topology": run.uses_topology, "compute": paced}.items() if not used}


def _differing(groups: Sequence[Group]) -> dict[str, Any] | None:
    """The fields of experiments that differ between groups; None for a single group."""
    settings = [itemized(flat(group.runs[0].experiment)) for group in groups]
    keys = [key for key in differing(settings) if key not in ("name", "seed")]
    rows = [[key, *(str(entry.get(key, NOTHING)) for entry in settings)] for key in keys]
    return {"labels": [group.label for group in groups], "rows": rows} if rows else None


def _figures(run: RunData, mains: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Title -> (value, note) of a run's key figures."""
    final, figures, classes = final_summary(run), dict[str, tuple[str, str]](), run.class_columns
    for main in mains:
        value = final.metrics.get(main)
        last, best = (NOTHING, ""), (NOTHING, "")
        if value is not None:
            spread = f"std {value_text(main, value.std, classes)}" if value.count > 1 else ""
            texts = [" ".join(filter(None, (spread, value.over))), value.before(final.rounds)]
            last = value_text(main, value.mean, classes), ", ".join(filter(None, texts))
        if value is not None and value.best is not None:
            best = value_text(main, value.best.mean, classes), _best_text(main, value.best)
        figures |= {f"final {metric_title(main)}": last, f"best {metric_title(main)}": best}
    behind = final.least_rounds is not None and final.least_rounds != final.rounds
    shown, rounds = tidy.rounds_on_record(run)
    on_record = f"; {shown:,} of {rounds:,} on record" if run.every_s is not None and shown < rounds else ""
    slowest = f", {final.least_rounds:,} of the slowest" if behind else ""
    per_node = None if final.bytes_sent is None else final.bytes_sent / max(final.nodes, 1)
    sent = final.messages.get("sent")
    return figures | {
        "rounds": (count_text(final.rounds), f"of the furthest node{slowest}{on_record}"),
        "time": (seconds_text(final.time_s), "virtual" if run.virtual else "real"),
        "wall time": (seconds_text(final.wall_s), "real"),
        "sent": (at_least(bytes_text(final.bytes_sent), exact=final.exact), "by all nodes"),
        "sent per node": (at_least(bytes_text(per_node), exact=final.exact), "mean"),
        "messages": (
            at_least(count_text(sent), exact=final.exact),
            fates_text(final.messages, exact=final.exact),
        ),
        "nodes": (count_text(final.nodes), ""),
        "parameters": (count_text(final.parameters), "of each model" if final.parameters else "not recorded"),
    }


def _best_text(metric: str, best: Best) -> str:
    """How a best value was chosen: as the best of many, it is better than what a new evaluation set would show."""
    data = "" if metric == "train_loss" else f" on the {metric.partition('_')[0]} set"
    return f"mean in {rounds_text(best.round_least, best.round_most)}, best of {best.of:,} evaluations{data}"


def _events(run: RunData) -> list[dict[str, Any]]:
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


def page_data(runs: Sequence[RunData], groups: Sequence[Group] | None = None) -> dict[str, Any]:
    """Everything the page's script needs, ready for JSON without NaN; arguments as for the report."""
    groups = group_runs(runs) if groups is None else groups
    # Each seed of a single experiment has its own colour; with several experiments, seeds have the colour of
    # their group.
    together = shows_groups(groups)
    alike: list[Sequence[RunData]] = [group.runs for group in groups] if together else [[run] for run in runs]
    colours = {run: index % len(PALETTE) for index, same in enumerate(alike) for run in same}
    names = tidy.all_metrics(runs)
    shown_groups = groups if any(group.has_interval for group in groups) else ()
    classes = tidy.class_columns(runs)
    return {
        "virtual": all(run.virtual for run in runs),
        "axis": tidy.default_axis(runs),
        "axes": [
            {"name": name, "title": axis_title(name, runs)}
            for name in tidy.AXES
            if any(tidy.recorded(run, name) for run in runs)
        ],
        "metrics": [
            {
                "name": name,
                "title": f"accuracy of {classes[name]}, {name.partition('_accuracy_')[0]} set"
                if name in classes
                else metric_title(name),
                "share": is_share(name, classes),
                "low": tidy.lower_is_better(name, classes),
                "system": name in tidy.ASYNCHRONY,
                "of_class": name in classes,
                "of_model": tidy.belongs_to_model(runs[0], name),
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


def _group_data(group: Group, runs: Sequence[RunData]) -> dict[str, Any]:
    """Each metric's curve over the samples of a group, by axis; ``half`` is half the width of the confidence interval.
    A group without intervals has the numbers of the runs that are shown in its place."""
    if not group.has_interval:
        return {"metrics": {}, "members": [runs.index(run) for run in group.samples]}
    metrics: dict[str, Any] = {}
    for name in tidy.all_metrics(group.runs):
        metrics[name] = {}
        for axis in tidy.AXES:
            table = group_curve(group, name, axis)
            if table.height:
                series = {key: _numbers(table[key]) for key in ("mean", "half", "count")}
                metrics[name][axis] = {"x": _numbers(table[axis]), **series}
    return {"metrics": metrics, "members": []}


def _run_data(run: RunData, max_values: int) -> dict[str, Any]:
    """The data of a run, with at most ``max_values`` values of single nodes."""
    points, names = tidy.points(run), tidy.metric_names(run)
    rows = _placed(run, tidy.assigned(run))
    graphs = {int(start): edges for start, edges in run.setup.get("graphs", {}).items()}
    graphs = dict(sorted(graphs.items())) if run.uses_topology else {0: []}
    start = min(run.poisoned, default=0)
    nodes = drawn_nodes(run.nodes, next(iter(graphs.values()), []), start)
    columns = [*names, *_PLACES]
    max_points = max(max_values // (len(nodes) * (len(columns) + 1)), 2)
    indices = _spread(points.height, min(max_points, MAX_NODE_POINTS))
    shown = points[indices]
    values = {name: _per_node(rows, name, nodes, shown["point"].to_list()) for name in columns}
    recorded = {
        name: grid
        for name, grid in values.items()
        if any(value is not None for series in grid for value in series)
    }
    limit = min(max(max_values // (_COLUMNS_DRAWN * max(len(names), 1)), MIN_STEPS), MAX_DRAWN)
    return {
        "points": {
            "round": _numbers(points["round"]),
            "text": [point_text(row) for row in points.to_dicts()],
        },
        "quantiles": run.nodes > MAX_LINES,
        "metrics": {
            name: {"points": _by_points(run, name, points, rows), "steps": _by_steps(run, name, limit)}
            for name in names
        },
        "nodes": {
            "ranks": nodes,
            "start": start,
            "at": indices,
            "places": {name: recorded.get(name) for name in _PLACES},
            "values": {name: recorded[name] for name in names if name in recorded},
        },
        "topology": _topology(run, graphs, nodes, shown["round"].to_list(), max_values) if graphs else None,
        **{name: run.setup.get(name) for name in ("labels", "classes", "samples")},
        "rings": _rings(run, nodes),
        "timeline": timeline_data(run),
    }


def _rings(run: RunData, drawn: Iterable[int]) -> list[dict[str, Any]]:
    """The drawn nodes that each selector has chosen, with what it chose them for. A selector that chose all nodes tells none
    apart."""
    rings = list[dict[str, Any]]()
    for field, ranks in run.chosen.items():
        section, number, _ = field.split(".")
        if len(ranks) < run.nodes and (ringed := sorted({*ranks}.intersection(drawn))):
            name = run.experiment[section][int(number)]["name"]
            colour = (1 + len(rings)) % len(PALETTE)
            rings.append({"label": f"{name} ({section}.{number})", "ranks": ringed, "colour": colour})
    return rings


def _placed(run: RunData, rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of evaluation points, with the positions on the axes from which their values count: ``time_s`` and ``bytes`` of
    their models, and ``instant_s`` and ``instant_bytes`` of their instants, where these are later."""
    age = pl.col("model_age_s").fill_null(0.0) if "model_age_s" in rows.columns else pl.lit(0.0)
    rows = rows.with_columns(instant_s="time_s", time_s=pl.col("time_s") - age)
    by_time = [("time_s", "bytes"), ("instant_s", "instant_bytes")]
    if (rows["time_s"] == rows["instant_s"]).all():
        rows = rows.with_columns(instant_s=None, instant_bytes=None)
        by_time.pop()
    for seconds, total in by_time:
        known = bytes_by(run, rows[seconds].fill_null(float("nan")).to_numpy())
        rows = rows.with_columns(pl.Series(total, known).fill_nan(None))
    return rows


def _by_points(run: RunData, name: str, points: pl.DataFrame, rows: pl.DataFrame) -> dict[str, Any]:
    """Statistics of a metric at the complete points of a run (a mean over only the fastest nodes would mislead),
    and the values of the average model, if any."""
    curve = tidy.complete_curve(run, name)
    ids, node_rows = points.select("point"), rows.filter(pl.col("node") >= 0, pl.col(name).is_not_null())
    table = ids.join(curve, on="point", how="left", maintain_order="left")
    series = _statistics(table)
    if node_rows.is_empty():
        return series
    if run.nodes > MAX_LINES:
        shares = {str(share): pl.col(name).quantile(share, "linear") for share in _SHARES}
        spread = table.select("point").join(
            node_rows.group_by("point").agg(**shares), on="point", how="left", maintain_order="left"
        )
        series["quantiles"] = [_numbers(spread[share], 5) for share in shares]
    average = tidy.curves(run, [name], network=True)
    if not average.is_empty():
        series["average"] = _numbers(ids.join(average, on="point", how="left", maintain_order="left")["mean"])
    return series


def _by_steps(run: RunData, name: str, limit: int) -> dict[str, Any] | None:
    """Statistics of a metric over time and bytes, at no more than ``limit`` instants of its steps; None for a metric without
    a place on these axes."""
    if (steps := steps_of(run, name)) is None:
        return None
    table = steps.drawn(_SHARES if run.nodes > MAX_LINES else (), limit)
    series = _statistics(table)
    series |= {axis: _numbers(table[axis]) for axis in tidy.AXES if axis != "round" and table[axis].count()}
    if run.nodes > MAX_LINES:
        series["quantiles"] = [_numbers(table[str(share)], 5) for share in _SHARES]
    return series


def _statistics(table: pl.DataFrame) -> dict[str, Any]:
    # Values equal in all shown digits have no spread; otherwise rounding errors would be drawn as a spread.
    equal = pl.col("min").round_sig_figs(6) == pl.col("max").round_sig_figs(6)
    table = table.with_columns(std=pl.when(equal).then(0.0).otherwise("std"))
    return {column: _numbers(table[column], 5) for column in tidy.STATISTICS}


def _per_node(
    table: pl.DataFrame, name: str, nodes: Sequence[int], at: Sequence[int]
) -> list[list[float | None]]:
    """A column's values for single nodes: [drawn nodes][points]."""
    digits = 7 if name in _PLACES else 4
    known = dict(zip(table.select("node", "point").rows(), _numbers(table[name], digits), strict=True))
    return [[known.get((node, point)) for point in at] for node in nodes]


def _topology(
    run: RunData, graphs: dict[int, Any], nodes: Sequence[int], rounds: Sequence[float], max_values: int
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
        "used": run.uses_topology,
        "mixing": run.mixing_text,
        "positions": np.round(layout, 3).tolist(),
        "graphs": drawn,
        "edges": [len(graph) for graph in shown],
    }


def _spread(count: int, limit: int) -> list[int]:
    """At most ``limit`` of 0, ..., count - 1, evenly spaced, including the first and the last."""
    return [round(k) for k in np.linspace(0, count - 1, min(count, limit))]


def _numbers(column: pl.Series, digits: int = 7) -> list[float | None]:
    """Values in a form that JSON can represent."""
    numbers = column.cast(pl.Float64).round_sig_figs(digits).to_frame("value")
    return tidy.finite(numbers)["value"].to_list()
