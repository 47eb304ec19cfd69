"""Plots: colours and titles, graph layout, curves, figures for papers, and the timeline's data."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import polars as pl

from gossamer.config import Timeline
from gossamer.errors import BadInput
from gossamer.randomness import torch_seed
from gossamer.results.folder import write_text, writing
from gossamer.results.formatting import is_share, metric_title, some
from gossamer.results.groups import Group, group_curve, labels, member_label, shows_groups
from gossamer.results.run_data import RunData
from gossamer.results.steps import check_timed, steps_of
from gossamer.results.tidy import (
    AXES,
    belongs_to_model,
    check_recorded,
    class_columns,
    complete_curve,
    main_metric,
    recorded,
)

PALETTE = ("#0072B2", "#E1441B", "#18A030", "#B4508C", "#734521", "#008FFF", "#977373", "#3B2A66")
"""Colours with a contrast of at least 3:1 on white, chosen so that any two of them also differ for
colour-blind readers (a distance of 16 in CIELAB, as simulated by Machado et al., 2009). The page has another
set for dark backgrounds."""

MAX_NODES_DRAWN = 300
_MAX_NODES_BY_DISTANCE = 100

_KINDS = {"train": 0, "evaluate": 3, "encode": 2, "send": 1}
"""The activities of a node, and their positions in the palette."""
MAX_DRAWN = 6000
"""A page shows at most this many intervals, starting with the first."""

FORMATS = ("pdf", "svg", "png")
_INCHES = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72.27}
_HEIGHT = 0.66  # of the width
_DASHES = ("-", "--", "-.", ":")
_STYLE = {
    "font.size": 8,
    "axes.linewidth": 0.6,
    "pdf.fonttype": 42,  # TrueType, as publishers require; SVG contains outlines
    "savefig.dpi": 300,
    "text.parse_math": False,  # a $ in a name is a dollar
}


def axis_title(x: str, runs: Sequence[RunData]) -> str:
    """Title of an x axis, with its unit. On a time grid, the nodes of a point are in different rounds."""
    time = "virtual time / s" if all(run.virtual for run in runs) else "time / s"
    rounds = "round, mean over the nodes" if any(run.every_s is not None for run in runs) else "round"
    titles = {
        "round": rounds,
        "time_s": time,
        "wall_s": "wall time / s",
        "bytes": "sent by all nodes / bytes",
    }
    return titles[x]


# --- graphs


def drawn_nodes(nodes: int, edges: Sequence[Sequence[int]], start: int = 0) -> list[int]:
    """The nodes that a drawing of the graph shows: all, or in a large graph those nearest to the node
    ``start``.

    Neighbours are shown together, so that edges are visible; a random sample would have almost no edges.
    """
    if nodes <= MAX_NODES_DRAWN:
        return list(range(nodes))
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from((i, j) for i, j in edges)
    near = list(nx.bfs_tree(graph, start))
    return sorted(list(dict.fromkeys([*near, *range(nodes)]))[:MAX_NODES_DRAWN])


def positions(
    nodes: Sequence[int], edges: Sequence[Sequence[int]], *, seed: int = 0, changing: bool = False
) -> list[tuple[float, float]]:
    """The positions of nodes in a drawing of the graph, with coordinates in [-1, 1]: a circle for a changing
    graph; otherwise by graph distances (Kamada and Kawai, 1989), or by forces if that would take long or the
    graph is not connected (Fruchterman and Reingold, 1991). Edges to nodes that are not drawn are left out."""
    graph: Any = nx.Graph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from((i, j) for i, j in edges if graph.has_node(i) and graph.has_node(j) and i != j)
    if changing or not graph.number_of_edges():
        layout = nx.circular_layout(graph)
    elif len(nodes) <= _MAX_NODES_BY_DISTANCE and nx.is_connected(graph):
        layout = nx.kamada_kawai_layout(graph)
    else:
        layout = nx.spring_layout(graph, seed=torch_seed(seed, "layout") % 2**32)
    coordinates = np.array([layout[node] for node in nodes], dtype=float)
    return [(x, y) for x, y in (coordinates / (np.abs(coordinates).max() or 1.0)).tolist()]


# --- curves


def curve_figure(
    runs: Sequence[RunData], y: str, x: str = "round", groups: Sequence[Group] | None = None
) -> Any:
    """A metric against one of the axes, as a ``matplotlib.figure.Figure``: for each run, the mean over the
    nodes with a band of one standard deviation, or for each group, the mean over its runs with a band of its
    95 % confidence interval; a group without an interval has a line for each run. Over rounds, a curve joins evaluation
    points; over time and bytes it is a step function. BadInput for a metric that no run has recorded, or that has no
    place on the axis."""
    check_recorded("metric", y, runs)
    if groups is None:
        bands, names = [_band(run, y, x) for run in runs], labels(runs)
    else:
        _check_axis(runs, y, x)
        bands, names = [], []
        for group in groups:
            if group.has_interval:
                bands.append(group_curve(group, y, x).with_columns(spread="half"))
                names.append(group.label)
                continue
            bands += [_band(run, y, x).with_columns(spread=pl.lit(0.0)) for run in group.samples]
            names += [member_label(group, run) for run in group.samples]
    figure, axes = _figure(6.4, 4.0)
    for label, band in zip(names, bands, strict=True):
        _draw_curve(axes, band, x, label)
    _name_axes(axes, x, y, runs)
    return figure


def plot_run(run: RunData, metric: str | None, ax: Any, x: str, label: str) -> Any:
    """See :meth:`gossamer.results.run.Run.plot`."""
    metric = str(metric or main_metric(run))
    if x not in AXES:
        raise BadInput(f"x: got {x!r}; accepted: {', '.join(AXES)}")
    check_recorded("metric", metric, [run])
    axes = matplotlib("pyplot").subplots(layout="constrained")[1] if ax is None else ax
    _draw_curve(axes, _band(run, metric, x), x, label)
    _name_axes(axes, x, metric, [run])
    return axes


def _band(run: RunData, metric: str, x: str) -> pl.DataFrame:
    if x == "round":
        return complete_curve(run, metric).with_columns(spread="std")
    _check_axis([run], metric, x)
    steps = steps_of(run, metric)
    if steps is None:  # the run lacks the metric
        return pl.DataFrame(schema=dict.fromkeys((x, "mean", "spread"), pl.Float64))
    return steps.drawn().with_columns(spread="std")


def _check_axis(runs: Sequence[RunData], metric: str, x: str) -> None:
    for run in runs if x != "round" else ():
        if metric in run.metrics.columns and run.metrics[metric].count():
            check_timed(run, metric, f"{metric} over {x}")


def _draw_curve(axes: Any, table: pl.DataFrame, x: str, label: str) -> None:
    """Draw ``mean`` against ``x`` in a band of half-width ``spread``, in the next colour: as lines between the points of
    rounds, and as steps over time and bytes, where a mean holds until a node has a new model."""
    table = table.drop_nulls(x).sort(x, maintain_order=True)
    colour = PALETTE[len(axes.lines) % len(PALETTE)]
    xs, mean, spread = (table[name].to_numpy() for name in (x, "mean", "spread"))
    marker = "o" if len(table) == 1 else None
    step = None if x == "round" else "post"
    axes.plot(
        xs,
        mean,
        color=colour,
        label=label,
        linewidth=1.8,
        marker=marker,
        drawstyle="default" if step is None else "steps-post",
    )
    axes.fill_between(xs, mean - spread, mean + spread, color=colour, alpha=0.16, linewidth=0, step=step)


def _name_axes(axes: Any, x: str, y: str, runs: Sequence[RunData]) -> None:
    axes.set_xlabel(axis_title(x, runs))
    axes.set_ylabel(metric_title(y))
    if is_share(y, class_columns(runs)):
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    if x == "bytes":
        axes.xaxis.set_major_formatter(matplotlib("ticker").EngFormatter("B"))
    axes.grid(visible=True, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if len(axes.lines) > 1:
        axes.legend(frameon=False, fontsize="small")


def _figure(width: float, height: float) -> Any:
    """A figure without a window, and its axes."""
    figure = matplotlib("figure").Figure(figsize=(width, height), dpi=160, layout="constrained")
    return figure, figure.add_subplot()


def matplotlib(module: str) -> Any:
    """A module of matplotlib. If matplotlib is missing, a BadInput that explains how to install it."""
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ModuleNotFoundError as error:
        raise BadInput("pictures need matplotlib: pip install 'gossamer[report]'") from error


def parse_width(text: str) -> float:
    """A width such as ``3.3in``, ``84mm``, ``8.4cm`` or ``240pt``, in inches. BadInput for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(in|cm|mm|pt)", text)
    width = float(match[1]) * _INCHES[match[2]] if match else 0.0
    if not 1 <= width <= 40:
        raise BadInput(f"--width {text}: accepted: 1in to 40in, also in cm, mm or pt, such as 3.3in")
    return width


def write_figures(
    runs: Sequence[RunData],
    groups: Sequence[Group],
    folder: Path,
    *,
    metrics: Sequence[str],
    axes: Sequence[str],
    format: str = "pdf",
    width: float = 3.3,
) -> list[Path]:
    """Write a figure for a paper, ``<metric>-vs-<axis>.<format>``, for each metric and axis that some run has
    recorded, and ``captions.md``. Returns the paths of the figures. Lines are also dashed, for printing in
    black and white.

    If there are several groups, of which some have three seeds, each of these has a curve with the band of
    its confidence interval; otherwise each run has a curve. ``width`` is in inches. BadInput for an unknown metric, axis or
    format, a file that can't be written, or a missing matplotlib."""
    for metric in metrics:
        check_recorded("--metrics", metric, runs)
    for option, values, accepted in (("--axis", axes, AXES), ("--format", [format], FORMATS)):
        for value in values:
            if value not in accepted:
                raise BadInput(f"{option} {value}: accepted: {', '.join(accepted)}")
    together = groups if shows_groups(groups) else None
    written, captions = [], []
    with writing(f"--figures {folder}"), matplotlib("style").context(_STYLE):
        folder.mkdir(parents=True, exist_ok=True)
        for metric in metrics:
            for axis in axes:
                if not any(recorded(run, axis) for run in runs):
                    continue
                figure = curve_figure(runs, metric, axis, together)
                figure.set_size_inches(width, _HEIGHT * width)
                [panel] = figure.axes
                for index, line in enumerate(panel.lines):
                    line.set(linewidth=1.2, linestyle=_DASHES[index % len(_DASHES)])
                _name_axes(panel, axis, metric, runs)  # the legend with the dashes
                stem = re.sub(r"[^a-zA-Z0-9._-]", lambda match: f"{ord(match[0]):x}", metric).replace(
                    "_", "-"
                )
                name = f"{stem}-vs-{axis.removesuffix('_s')}.{format}"
                figure.savefig(folder / name)
                written.append(folder / name)
                captions.append(f"**{name}**: {_caption(runs, together, metric, axis)}\n")
        write_text(folder / "captions.md", "\n".join(captions))
    return written


def _caption(runs: Sequence[RunData], groups: Sequence[Group] | None, metric: str, axis: str) -> str:
    """The caption of a figure, which explains its lines, its bands, and the runs and nodes that they cover."""
    nodes = "–".join(map(str, sorted({min(run.nodes for run in runs), max(run.nodes for run in runs)})))
    title = metric_title(metric).replace(" / ", " in ") + (
        " in %" if is_share(metric, class_columns(runs)) else ""
    )
    against = "bytes that all nodes have sent" if axis == "bytes" else axis_title(axis, runs)
    text = f"{title[0].upper()}{title[1:]} against {against.replace(' / ', ' in ')}, {nodes} nodes."
    newest = (
        ""
        if axis == "round" or not all(belongs_to_model(run, metric) for run in runs)
        else " of their newest models"
    )
    if groups is None:
        lines = (
            f"Lines: mean over the nodes{newest} of a run. Bands: ± one standard deviation over the nodes."
        )
        open_ends = [label for label, run in zip(labels(runs), runs, strict=True) if run.status != "done"]
        return " ".join([text, lines, *([f"Not done: {some(open_ends)}."] if open_ends else [])])
    means = "; ".join(f"{group.label}: {len(group.samples)} runs" for group in groups if group.has_interval)
    lines = f"Lines: mean over runs, each the mean over its nodes{newest} ({means})."
    lines += " Bands: 95 % confidence interval over the runs (Student's t)."
    single = [_counts(group) for group in groups if not group.has_interval]
    if single:
        lines += f" Lines without a band: single runs ({'; '.join(single)})."
    left_out = [member_label(group, run) for group in groups for run in group.left_out]
    return " ".join([text, lines, *([f"Not shown: {some(left_out)}."] if left_out else [])])


def _counts(group: Group) -> str:
    """The runs of a group without an interval."""
    diverged = f", {len(group.diverged)} diverged" if group.diverged else ""
    return f"{group.label}: {len(group.samples)} of {group.size}{diverged}"


# --- timelines


def timeline_data(run: RunData) -> dict[str, Any] | None:
    """The intervals in which the recorded nodes computed and sent, for the page; None without a timeline."""
    settings = (run.experiment.get("evaluation") or {}).get("timeline")
    if not settings or run.timeline.is_empty():
        return None
    timeline = Timeline.model_construct(**settings)  # already checked by the schema of the record
    rows = run.timeline.sort("start_s").head(MAX_DRAWN)
    last: Any = rows["end_s"].max()
    to_s = min(timeline.to_s, last)
    span = pl.col("start", "end").clip(timeline.from_s, to_s).round(9)
    rows = rows.rename({"start_s": "start", "end_s": "end"}).with_columns(span)
    columns = ("node", "start", "end", "to", "bytes")
    return {
        "from": timeline.from_s,
        "to": to_s,
        "nodes": timeline.ranks(run.nodes),
        "colours": _KINDS,
        "kinds": {
            kind: part.select(columns if kind == "send" else columns[:3]).to_dict(as_series=False)
            for kind in _KINDS
            if (part := rows.filter(kind=kind)).height
        },
    }
