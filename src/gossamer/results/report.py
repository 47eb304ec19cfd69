"""The report: one HTML page that shows runs without a network, and its exports."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from jinja2 import Environment, PackageLoader, StrictUndefined

from gossamer.errors import BadInput
from gossamer.numerics import summary as summary_of_numerics
from gossamer.results import tidy
from gossamer.results.comparison import Comparison
from gossamer.results.folder import write_text, writing
from gossamer.results.formatting import (
    NOTHING,
    bytes_text,
    count_text,
    faults_text,
    is_share,
    metric_title,
    seconds_text,
    value_text,
)
from gossamer.results.groups import Group, group_curve, several
from gossamer.results.groups import groups as group_runs
from gossamer.results.plots import (
    PALETTE,
    Window,
    axis_title,
    drawn_nodes,
    positions,
    timeline_data,
)
from gossamer.results.run import Run, cell_names, differing, flat, labels

_PAGE = files("gossamer.results") / "page"
_COMINGS = ("lost", "left", "joined", "returned", "frozen", "thawed")
_MOST_NAMED = 12
_DESCRIBED = ("task", "partition", "topology", "algorithm", "network", "compute", "engine")
MOST_LINES = 20
"""The number of nodes above which their spread is shown by quantiles, and not by a line each."""
MOST_NODE_POINTS = 200
MOST_EDGES_DRAWN = 3000
MOST_VALUES = 60_000
"""The largest number of values of curves, of single nodes, and of ends of edges on a page, which then has less than 1 MB."""

STD_BAND = "± one standard deviation over the nodes"
QUANTILE_BAND = "the middle 50 % and 90 % of the nodes"

_OWN = ("name", "seed")
_OWN_PREFIXES = tuple(f"environment.{each}" for each in ("command", "start", "resumed", "run"))
"""What every run has of its own."""

Numbers = list[int | float | None]
Graphs = dict[int, list[list[int]]]
"""First round -> edges, by round."""


def write_report(
    runs: Sequence[Run],
    out: Path,
    *,
    csv: Path | None = None,
    groups: Sequence[Group] | None = None,
    compared: Comparison | None = None,
    within: Window | None = None,
) -> Path:
    """Write one self-contained HTML page on one or several runs, which needs no network; gives its path.

    Args:
        runs: in the order of their colours.
        out: the page; a folder stands for ``report.html`` in it.
        csv: a folder for ``curves.csv`` and ``metrics.csv``.
        groups: of the runs; None groups those that differ only in their seed.
        compared: the groups, with which the page opens.
        within: the part of the run's timeline that is shown; None is all of it.

    Without runs, and where a file can't be written, it raises BadInput.
    """
    if not runs:
        raise BadInput("report: got no run; accepted: one or more")
    path = Path(out) / "report.html" if Path(out).is_dir() else Path(out)
    groups = group_runs(runs) if groups is None else groups
    text = render(runs, groups, compared, within)
    with writing(f"--out {out}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    if csv is not None:
        write_csvs(runs, Path(csv))
    return path


def render(
    runs: Sequence[Run],
    groups: Sequence[Group] | None = None,
    compared: Comparison | None = None,
    within: Window | None = None,
) -> str:
    """The page as text; arguments as for :func:`write_report`. Everything that comes from an experiment is escaped."""
    pages = Environment(
        loader=PackageLoader("gossamer.results", "page"), autoescape=True, undefined=StrictUndefined
    )
    cells, names = cell_names(runs), labels(runs)
    titles = cells if len(cells) == len(runs) else [run.name for run in runs]
    mains = list(dict.fromkeys(main for run in runs if (main := tidy.main_metric(run)) is not None))
    finals = [tidy.final_summary(run) for run in runs]
    numerics = runs[0].environment.get("resumed", [runs[0].environment])[-1].get("numerics")
    return pages.get_template("report.html").render(
        title=names[0] if len(runs) == 1 else " · ".join(dict.fromkeys(titles)),
        numerics=None if numerics is None else summary_of_numerics(numerics),
        shared=_shared(runs),
        cards=_cards(runs[0], finals[0]),
        heads=[f"{which} {metric_title(main)}" for main in mains for which in ("final", "best")],
        runs=[
            {
                "run": run,
                "name": name,
                "lost": _named(run.lost),
                "comings": _comings(run),
                "figures": _figures(run, final),
                "ends": [text for main in mains for text in _final_and_best(main, final)],
                "events": _events(run),
                "environment": json.dumps(run.environment, indent=1, ensure_ascii=False),
            }
            for run, name, final in zip(runs, names, finals, strict=True)
        ],
        compared=compared,
        band=QUANTILE_BAND if any(run.nodes > MOST_LINES for run in runs) else STD_BAND,
        differing=_differing(group_runs(runs) if groups is None else groups),
        style=_PAGE.joinpath("report.css").read_text(encoding="utf-8"),
        data=embed(page_data(runs, groups, within)),
        script=_PAGE.joinpath("report.js").read_text(encoding="utf-8"),
    )


def embed(value: Any) -> str:
    """JSON that can stand inside ``<script type="application/json">``, whatever texts it holds."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def write_csvs(runs: Sequence[Run], folder: Path) -> None:
    """Write the curves (a row per run, metric and point) and the recorded metrics of all runs into a folder."""
    named = [(run, pl.lit(label).alias("run")) for run, label in zip(runs, labels(runs), strict=True)]
    curves = pl.concat(
        run.curves.select(label, "metric", *tidy.AXES, *tidy.STATISTICS) for run, label in named
    )
    metrics = pl.concat([run.metrics.select(label, pl.all()) for run, label in named], how="diagonal_relaxed")
    with writing(f"--csv {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        curves.write_csv(folder / "curves.csv")
        metrics.write_csv(folder / "metrics.csv")


def write_comparison(compared: Comparison, page: Path) -> Path:
    """Write the rows of a comparison as a CSV file next to a page; gives its path."""
    path = page.with_name(f"{page.stem}-comparison.csv")
    with writing(str(path)):
        compared.rows.write_csv(path)
    return path


def _shared(runs: Sequence[Run]) -> dict[str, str]:
    """The components that all runs share, by name."""
    shared = {}
    for key in _DESCRIBED:
        values = [run.experiment.get(key) or "" for run in runs]
        found = {str(value.get("name", "") if isinstance(value, dict) else value) for value in values}
        if len(found) == 1 and (name := found.pop()):
            shared[key] = name
    return shared


def _differing(groups: Sequence[Group]) -> dict[str, Any] | None:
    """The fields of experiments and environments that are not the same in all groups; None for one."""
    if len(groups) < 2:
        return None
    settings = []
    for group in groups:
        run = group.runs[0]
        fields = flat(run.experiment) | {f"environment.{k}": v for k, v in flat(run.environment).items()}
        settings.append({key: value for key, value in fields.items() if key not in _OWN})
    keys = [key for key in differing(settings) if not key.startswith(_OWN_PREFIXES)]
    rows = [[key, *(str(each.get(key, NOTHING)) for each in settings)] for key in keys]
    return {"labels": [group.label for group in groups], "rows": rows} if rows else None


def _comings(run: Run) -> list[str]:
    """Which nodes were lost, came and went, a line each."""
    events = run.events.filter(pl.col("event").is_in(_COMINGS), pl.col("detail").is_not_null()).sort("time_s")
    lines = [f"{row['time_s'] or 0:8.1f} s  {row['detail']}" for row in events.head(_MOST_NAMED).to_dicts()]
    return lines + [f"and {len(events) - _MOST_NAMED} more"] * (len(events) > _MOST_NAMED)


def _cards(run: Run, final: tidy.FinalSummary) -> dict[str, tuple[str, str]]:
    """Title -> (value, note) of a run's key figures."""
    shown: dict[str, tuple[str, str]] = {}
    main = tidy.main_metric(run)
    if main is not None and (value := final.metrics.get(main)) is not None:
        spread = f"std {value_text(main, value.std)} over {value.count} nodes" if value.count > 1 else ""
        if final.rounds is not None and value.round < final.rounds and run.status != "done":
            spread += f" in round {value.round:.0f}, the last complete evaluation"
        shown[f"final {metric_title(main)}"] = value_text(main, value.mean), spread
        if (best := value.best) is not None:
            text = value_text(main, best.mean), f"mean, in round {best.round:.0f}"
            shown[f"best {metric_title(main)}"] = text
    shown |= _figures(run, final)
    return shown


def _figures(run: Run, final: tidy.FinalSummary) -> dict[str, tuple[str, str]]:
    """Title -> (value, note) of everything that does not depend on the task."""
    behind = final.least_rounds is not None and final.least_rounds != final.rounds
    slowest = f", {final.least_rounds:,} of the slowest" if behind else ""
    per_node = None if final.bytes_sent is None else final.bytes_sent / max(final.nodes, 1)
    return {
        "rounds": (count_text(final.rounds), f"of the furthest node{slowest}"),
        "time": (seconds_text(final.time_s), "virtual" if run.virtual else "real"),
        "wall time": (seconds_text(final.wall_s), "real"),
        "sent": (bytes_text(final.bytes_sent), "by all nodes"),
        "sent per node": (bytes_text(per_node), "mean"),
        "messages": (count_text(final.messages.get("sent")), faults_text(final.messages)),
        "nodes": (count_text(final.nodes), ""),
        "parameters": (count_text(final.parameters), "of each model" if final.parameters else "not recorded"),
    }


def _final_and_best(name: str, final: tidy.FinalSummary) -> tuple[str, str]:
    if (value := final.metrics.get(name)) is None:
        return NOTHING, NOTHING
    last = f"{value_text(name, value.mean)}, std {value_text(name, value.std)}"
    best = value.best
    return last, NOTHING if best is None else f"{value_text(name, best.mean)} (round {best.round:.0f})"


def _events(run: Run) -> list[tuple[str, ...]]:
    """A row for each kind of event: its name, how often, of which nodes, when first and last, and an example."""
    kinds = run.events.group_by("event", maintain_order=True).agg(
        pl.len().alias("count"),
        pl.col("node").drop_nulls().unique().sort(),
        pl.col("time_s").min().alias("first"),
        pl.col("time_s").max().alias("last"),
        pl.col("detail").drop_nulls().first(),
    )
    return [
        (event, count_text(count), _named(nodes), seconds_text(first), seconds_text(last), detail or "")
        for event, count, nodes, first, last, detail in kinds.rows()
    ]


def _named(nodes: Sequence[int]) -> str:
    text = ", ".join(map(str, nodes[:_MOST_NAMED]))
    return f"{text} and {len(nodes) - _MOST_NAMED} more" if len(nodes) > _MOST_NAMED else text


# --- the data of the script: series are aligned to the evaluation points, and values that are not finite are None


def page_data(
    runs: Sequence[Run], groups: Sequence[Group] | None = None, within: Window | None = None
) -> dict[str, Any]:
    """Everything the page's script needs, ready for JSON without NaN; arguments as for the report."""
    groups = group_runs(runs) if groups is None else groups
    # The seeds of one experiment have a colour each, those of several experiments the colour of their group.
    together = several(groups)
    alike: list[Sequence[Run]] = [group.runs for group in groups] if together else [[run] for run in runs]
    colours = {run: index % len(PALETTE) for index, same in enumerate(alike) for run in same}
    names = tidy.all_metrics(runs)
    points = max(MOST_VALUES // (len(runs) * max(len(names), 1) * 10), 2)
    shown = groups if any(len(group.samples) > 1 for group in groups) else ()
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
            {"label": label, "colour": colours[run], **_run_data(run, within, points, len(runs))}
            for run, label in zip(runs, labels(runs), strict=True)
        ],
        "groups": [
            {"label": group.label, "colour": index % len(PALETTE), **_group_data(group, points)}
            for index, group in enumerate(shown)
        ],
        "together": together,
    }


def _group_data(group: Group, most: int) -> dict[str, Any]:
    """Each metric's curve over the samples of a group; ``half`` is half of the confidence interval's width."""
    tables = {name: group_curve(group, name) for name in tidy.all_metrics(group.runs)}
    tables = {name: table[_spread(table.height, most)] for name, table in tables.items()}
    metrics = {
        name: {"points": _axes(table), **{key: _numbers(table[key]) for key in ("mean", "half", "count")}}
        for name, table in tables.items()
    }
    return {"runs": len(group.samples), "metrics": metrics}


def _run_data(run: Run, within: Window | None, most: int, runs: int) -> dict[str, Any]:
    places, table, names = tidy.points(run), tidy.assigned(run), tidy.metric_names(run)
    places = places[_spread(places.height, most)]
    graphs: Graphs = {int(start): edges for start, edges in run.setup.get("graphs", {}).items()}
    graphs = dict(sorted(graphs.items()))
    start = min(run.poisoned, default=0)
    nodes = drawn_nodes(run.nodes, next(iter(graphs.values()), []), start)
    most_at = MOST_VALUES // (runs * max(len(nodes), 1) * (len(names) + len(tidy.AXES)))
    at = _spread(places.height, min(max(most_at, 2), MOST_NODE_POINTS))
    shown = places["point"].gather(at).to_list()
    return {
        "points": _axes(places),
        "quantiles": run.nodes > MOST_LINES,
        "metrics": {name: _metric(run, name, places, table) for name in names},
        "nodes": {
            "ranks": nodes,
            "start": start,
            "at": at,
            "places": {
                name: _per_node(table, name, nodes, shown, 7) for name in tidy.AXES if name != "bytes"
            },
            "values": {
                name: values
                for name in names
                if (values := _per_node(table, name, nodes, shown, 4)) is not None
            },
        },
        "topology": _topology(run, graphs, nodes, places["round"].gather(at).to_list(), runs)
        if graphs
        else None,
        "labels": run.setup.get("labels"),
        "classes": run.setup.get("classes"),
        "samples": run.setup.get("samples"),
        "poisoned": run.poisoned,
        "timeline": timeline_data(run, within),
    }


def _metric(run: Run, name: str, places: pl.DataFrame, rows: pl.DataFrame) -> dict[str, Any]:
    """Statistics of a metric at all points of a run that are complete, since a mean over the nodes that are ahead is none of
    all; and the values of the average model, if it has any."""
    curve, at = run.curves.filter(pl.col("metric") == name, "complete"), places.select("point")
    # Values that are equal to all digits have no spread: the rounding of floats would be drawn as one.
    equal = pl.col("min").round_sig_figs(6) == pl.col("max").round_sig_figs(6)
    curve = curve.with_columns(std=pl.when(equal).then(0.0).otherwise("std"))
    table = at.join(curve, on="point", how="left", maintain_order="left")
    series: dict[str, Any] = {column: _numbers(table[column], 5) for column in tidy.STATISTICS}
    values = run.metrics.filter(pl.col(name).is_not_null())["node"]
    if run.nodes > MOST_LINES and (values >= 0).any():
        parts = rows.filter(pl.col("node") >= 0).group_by("point")
        shares = {str(share): pl.col(name).quantile(share, "linear") for share in (0.05, 0.25, 0.75, 0.95)}
        spread = table.select("point", "mean").join(
            parts.agg(**shares), on="point", how="left", maintain_order="left"
        )
        series["quantiles"] = [_numbers(spread[share], 5) for share in shares]
    if (values < 0).any() and (values >= 0).any():
        average = tidy.summary(run, name, network=True)
        series["average"] = _numbers(at.join(average, on="point", how="left", maintain_order="left")["mean"])
    return series


def _per_node(
    table: pl.DataFrame, name: str, nodes: Sequence[int], at: Sequence[int], digits: int
) -> list[Numbers] | None:
    """A column of single nodes: [nodes drawn][points]; None where no drawn node has a value."""
    known = dict(zip(table.select("node", "point").rows(), _numbers(table[name], digits), strict=True))
    grid = [[known.get((node, point)) for point in at] for node in nodes]
    return grid if any(value is not None for line in grid for value in line) else None


def _topology(
    run: Run, graphs: Graphs, nodes: Sequence[int], rounds: Sequence[float], runs: int
) -> dict[str, Any]:
    starts, edges = list(graphs), list(graphs.values())
    # The page needs only the graphs that hold at a point of the slider.
    held = [max(bisect_right(starts, round_) - 1, 0) for round_ in rounds or [0]]
    used = sorted(set(held))
    index = {node: i for i, node in enumerate(nodes)}
    drawn = []
    for number in used:
        inner = [(index[i], index[j]) for i, j in edges[number] if i in index and j in index]
        most = min(MOST_EDGES_DRAWN, max(MOST_VALUES // (2 * runs * len(used)), 100))
        drawn.append([end for k in _spread(len(inner), most) for end in inner[k]])
    changing = len(graphs) > 1
    seed = run.experiment.get("seed", 0)
    return {
        "nodes": run.nodes,
        "directed": bool(run.setup.get("directed", False)),
        "positions": [
            (round(x, 3), round(y, 3)) for x, y in positions(nodes, edges[0], seed=seed, changing=changing)
        ],
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
    return {name: _numbers(table[name]) if table[name].count() else None for name in tidy.AXES}


def _numbers(column: pl.Series, digits: int = 7) -> Numbers:
    """Values as JSON takes them."""
    return [None if v is None or not math.isfinite(v) else _short(f"{v:.{digits}g}") for v in column]


def _short(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value
