"""Pictures: colours and titles of all plots, the layout of a graph, curves, figures for a paper, the timeline of a run."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import polars as pl

from gossamer.config import Timeline
from gossamer.errors import BadInput
from gossamer.randomness import torch_seed
from gossamer.results.folder import write_text, writing
from gossamer.results.formatting import is_share, metric_title
from gossamer.results.groups import Group, group_curve, several
from gossamer.results.run import Run, labels
from gossamer.results.tidy import AXES, all_metrics, check_recorded, main_metric

PALETTE = ("#0072B2", "#E1441B", "#18A030", "#B4508C", "#734521", "#008FFF", "#977373", "#3B2A66")
"""Colours with a contrast of at least 3:1 on white, chosen so that two of them differ for the colour-blind too (a distance of
16 in CIELAB, as simulated by Machado et al., 2009). The page has another set for dark backgrounds."""

MOST_NODES_DRAWN = 300
_MOST_NODES_BY_DISTANCE = 100
_MOST_NODES_NUMBERED = 100
_POINTS_PER_INCH = 160

KINDS = ("train", "evaluate", "encode", "send")
COLOURS = {"train": 0, "evaluate": 3, "encode": 2, "send": 1}
"""Places in the palette."""
MOST_DRAWN = 6000
"""The largest number of intervals that a page shows, the first ones."""
MOST_EDGED = 60
"""Intervals in a lane above which they are drawn without edges, which would look as if the node waited."""

FORMATS = ("pdf", "svg", "png")
_INCHES = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72.27}
_HEIGHT = 0.66  # of the width
_DASHES = ("-", "--", "-.", ":")
_STYLE = {
    "font.size": 8,
    "axes.linewidth": 0.6,
    "pdf.fonttype": 42,  # TrueType, which publishers ask for; SVG has the outlines
    "ps.fonttype": 42,
    "savefig.dpi": 300,
}


def axis_title(x: str, runs: Sequence[Run]) -> str:
    """Title of an x axis, with its unit."""
    time = "virtual time / s" if all(run.virtual for run in runs) else "time / s"
    titles = {"time_s": time, "wall_s": "wall time / s", "bytes": "sent by all nodes / bytes"}
    return titles.get(x, x)


# --- graphs


def drawn_nodes(nodes: int, edges: Sequence[Sequence[int]], start: int = 0) -> list[int]:
    """The nodes that a picture of the graph shows: all, or in a large graph those nearest to the node ``start``.

    Neighbours are drawn together, so that edges show; a random sample would have next to none.
    """
    if nodes <= MOST_NODES_DRAWN:
        return list(range(nodes))
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from((i, j) for i, j in edges)
    near = list(nx.bfs_tree(graph, start))
    return sorted(list(dict.fromkeys([*near, *range(nodes)]))[:MOST_NODES_DRAWN])


def positions(
    nodes: Sequence[int], edges: Sequence[Sequence[int]], *, seed: int = 0, changing: bool = False
) -> list[tuple[float, float]]:
    """The positions of nodes in the picture of a graph, each coordinate within [-1, 1]: a circle for a changing graph, else
    by distances in the graph (Kamada and Kawai, 1989), or by forces where that would take long or the graph is not
    connected (Fruchterman and Reingold, 1991). Edges with an end that is not drawn are left out."""
    graph: Any = nx.Graph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from((i, j) for i, j in edges if graph.has_node(i) and graph.has_node(j) and i != j)
    if changing or not graph.number_of_edges():
        found = nx.circular_layout(graph)
    elif len(nodes) <= _MOST_NODES_BY_DISTANCE and nx.is_connected(graph):
        found = nx.kamada_kawai_layout(graph)
    else:
        found = nx.spring_layout(graph, seed=torch_seed(seed, "layout") % 2**32)
    reach = max((abs(float(value)) for place in found.values() for value in place), default=0.0) or 1.0
    return [(float(found[node][0]) / reach, float(found[node][1]) / reach) for node in nodes]


def draw_graph(
    nodes: int, edges: Sequence[Sequence[int]], path: Path, *, directed: bool = False, seed: int = 0
) -> None:
    """Draw a graph into a PNG file; a large one in part (see :func:`drawn_nodes`)."""
    figure, axes = _figure(6.4, 6.4)
    shown = drawn_nodes(nodes, edges)
    place = dict(zip(shown, positions(shown, edges, seed=seed), strict=True))
    style = {"color": "#8a8f98", "linewidth": 0.8, "shrinkA": 7, "shrinkB": 7}
    style["arrowstyle"] = "-|>" if directed else "-"
    for i, j in edges:
        if i in place and j in place:
            axes.annotate("", place[j], place[i], arrowprops=style)
    x, y = zip(*place.values(), strict=True)
    axes.scatter(x, y, s=160, color=PALETTE[0], zorder=3)
    if len(shown) <= _MOST_NODES_NUMBERED:
        for node, (across, up) in place.items():
            axes.text(across, up, str(node), ha="center", va="center", fontsize=7, color="white", zorder=4)
    axes.set_title(
        f"{nodes} nodes, {len(edges)} edges" + ("" if len(shown) == nodes else f", {len(shown)} nodes drawn")
    )
    axes.set_axis_off()
    axes.set_aspect("equal")
    with writing(f"--png {path}"):
        figure.savefig(path, format="png")


# --- curves


def curve_figure(runs: Sequence[Run], y: str, x: str = "round", groups: Sequence[Group] | None = None) -> Any:
    """A metric against one of the axes, as a ``matplotlib.figure.Figure``: of each run the mean over the nodes in a band of
    one standard deviation, or of each group the mean over its runs in the band of its 95 % confidence interval. A metric
    that no run has recorded is bad input."""
    if groups is None:
        bands = [
            run.curves.filter(pl.col("metric") == y, "complete").with_columns(spread="std") for run in runs
        ]
        names = labels(runs)
    else:
        bands = [group_curve(group, y).with_columns(spread=pl.col("half").fill_null(0.0)) for group in groups]
        names = [group.label for group in groups]
    if not any(table[x].count() for table in bands):
        raise BadInput(
            f"metric: got {y!r}; accepted: one that a run has recorded: {', '.join(all_metrics(runs))}"
        )
    figure, axes = _figure(6.4, 4.0)
    for label, band in zip(names, bands, strict=True):
        _draw_curve(axes, band, x, label)
    _name_axes(axes, x, y, runs)
    return figure


def plot_run(run: Run, metric: str | None, ax: Any, x: str, label: str) -> Any:
    """See :meth:`gossamer.results.run.Run.plot`."""
    metric = metric or main_metric(run)
    if x not in AXES:
        raise BadInput(f"x: got {x!r}; accepted: {', '.join(AXES)}")
    check_recorded("metric", str(metric), [run])
    axes = matplotlib("pyplot").subplots(layout="constrained")[1] if ax is None else ax
    _draw_curve(
        axes, run.curves.filter(pl.col("metric") == metric, "complete").with_columns(spread="std"), x, label
    )
    _name_axes(axes, x, str(metric), [run])
    return axes


def _draw_curve(axes: Any, table: pl.DataFrame, x: str, label: str) -> None:
    """Draw ``mean`` against ``x`` in a band of half-width ``spread``, in the next colour."""
    table = table.drop_nulls(x).sort(x, maintain_order=True)
    colour = PALETTE[len(axes.lines) % len(PALETTE)]
    place, mean, spread = (table[name].to_numpy() for name in (x, "mean", "spread"))
    marker = "o" if len(table) == 1 else None
    axes.plot(place, mean, color=colour, label=label, linewidth=1.8, marker=marker)
    axes.fill_between(place, mean - spread, mean + spread, color=colour, alpha=0.16, linewidth=0)


def _name_axes(axes: Any, x: str, y: str, runs: Sequence[Run]) -> None:
    axes.set_xlabel(axis_title(x, runs))
    axes.set_ylabel(metric_title(y))
    if is_share(y):
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    if x == "bytes":
        axes.xaxis.set_major_formatter(matplotlib("ticker").EngFormatter("B"))
    axes.grid(visible=True, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if len(axes.lines) > 1:
        axes.legend(frameon=False, fontsize="small")


def _figure(width: float, height: float) -> Any:
    """A figure that no window shows, and its axes."""
    figure = matplotlib("figure").Figure(figsize=(width, height), dpi=_POINTS_PER_INCH, layout="constrained")
    return figure, figure.add_subplot()


def matplotlib(module: str) -> Any:
    """A module of matplotlib; without matplotlib, a BadInput that says how to install it."""
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ModuleNotFoundError as error:
        raise BadInput("pictures need matplotlib: pip install 'gossamer[report]'") from error


# --- figures for a paper: of the width of a column, with fonts in the file, and captions that say what is drawn


def parse_width(text: str) -> float:
    """A width such as ``3.3in``, ``84mm``, ``8.4cm`` or ``240pt``, in inches; anything else is bad input."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(in|cm|mm|pt)", text.strip())
    width = float(match[1]) * _INCHES[match[2]] if match else 0.0
    if not 1 <= width <= 40:
        raise BadInput(f"--width {text}: accepted: 1in to 40in, also in cm, mm or pt, such as 3.3in")
    return width


def write_figures(
    runs: Sequence[Run],
    groups: Sequence[Group],
    folder: Path,
    *,
    metrics: Sequence[str],
    axes: Sequence[str],
    format: str = "pdf",
    width: float = 3.3,
) -> list[Path]:
    """Write ``<metric>-vs-<axis>.<format>`` for all metrics and axes (of which some runs may have recorded none), and
    ``captions.md``; gives the paths of the figures.

    Several groups of several seeds have a curve each, in the band of its confidence interval; or else every run has one.
    ``width`` is in inches. A metric, an axis or a format that is not known, a file that can't be written, and a missing
    matplotlib are bad input."""
    for metric in metrics:
        check_recorded("--metrics", metric, runs)
    for axis in axes:
        if axis not in AXES:
            raise BadInput(f"--axis {axis}: accepted: {', '.join(AXES)}")
    if format not in FORMATS:
        raise BadInput(f"--format {format}: accepted: {', '.join(FORMATS)}")
    matplotlib("figure")
    together = groups if several(groups) else None
    written, captions = [], []
    with writing(f"--figures {folder}"), importlib.import_module("matplotlib").rc_context(_STYLE):
        folder.mkdir(parents=True, exist_ok=True)
        for metric in metrics:
            for axis in axes:
                if not any(run.curves[axis].count() for run in runs):
                    continue
                figure = curve_figure(runs, metric, axis, together)
                figure.set_size_inches(width, _HEIGHT * width)
                for index, line in enumerate(figure.axes[0].lines):
                    line.set(linewidth=1.2, linestyle=_DASHES[index % len(_DASHES)])
                if legend := figure.axes[0].get_legend():  # with the dashes
                    figure.axes[0].legend(frameon=False, fontsize=legend.get_texts()[0].get_fontsize())
                name = f"{re.sub(r'[^a-zA-Z0-9.-]', '-', metric)}-vs-{axis.removesuffix('_s')}.{format}"
                figure.savefig(folder / name)
                written.append(folder / name)
                captions.append(f"**{name}**: {caption(runs, together, metric, axis)}\n")
        write_text(folder / "captions.md", "\n".join(captions))
    return written


def caption(runs: Sequence[Run], groups: Sequence[Group] | None, metric: str, axis: str) -> str:
    """What a figure shows: the lines, the band, and how many runs and nodes they are over."""
    title = metric_title(metric)
    nodes = "–".join(map(str, sorted({min(run.nodes for run in runs), max(run.nodes for run in runs)})))
    against = (
        "the bytes that all nodes have sent"
        if axis == "bytes"
        else axis_title(axis, runs).removesuffix(" / s")
    )
    text = f"{title[0].upper()}{title[1:]} against {against}, {nodes} nodes."
    if groups is None:
        return f"{text} Lines: mean over the nodes of a run. Bands: ± one standard deviation over the nodes."
    seeds = "; ".join(f"{group.label}: {len(group.samples)} runs" for group in groups)
    band = "Bands: 95 % confidence interval over the runs (Student's t)."
    return f"{text} Lines: mean over runs, each the mean over its nodes ({seeds}). {band}"


# --- timelines


class Window(NamedTuple):
    """A part of a timeline: a span in seconds, and some ranks."""

    from_s: float
    to_s: float
    nodes: tuple[int, ...]


def window(run: Run) -> Window | None:
    """The part of the run that its timeline covers; None where the experiment asks for no timeline."""
    if not (asked := (run.experiment.get("evaluation") or {}).get("timeline")):
        return None
    timeline = Timeline.model_construct(**asked)  # the schema of the record has checked it
    end_s = run.metrics["time_s"].max()
    to_s = min(timeline.to_s, end_s) if isinstance(end_s, float) else timeline.to_s
    return Window(timeline.from_s, max(to_s, timeline.from_s), tuple(timeline.ranks(run.nodes)))


def choose(runs: Sequence[Run], span: str | None, nodes: str | None) -> Window | None:
    """The part of a run's timeline that the command line asks for; None where it asks for nothing. ``span`` is ``FROM:TO``
    in seconds, and ``nodes`` are ranks and ranges of ranks, ``0,3,8-12``; None is all. Several runs, a run without a
    timeline, and a part of which nothing was recorded are bad input."""
    if span is None and nodes is None:
        return None
    whole = _recorded(runs, "--window" if nodes is None else "--nodes")
    return Window(*_span(span, whole), _ranks(nodes, whole))


def _recorded(runs: Sequence[Run], option: str) -> Window:
    """As :func:`window` of the only run; several, or one without a timeline, are bad input."""
    if len(runs) != 1:
        raise BadInput(f"{option}: got {len(runs)} runs; accepted: one, whose timeline is shown")
    found = window(runs[0])
    if found is None or runs[0].timeline.is_empty():
        raise BadInput(
            f"{runs[0].path}: no timeline was recorded; accepted: a run whose experiment has evaluation.timeline, e.g."
            ' --set "evaluation.timeline={from_s: 0, to_s: 10}"'
        )
    return found


def _span(text: str | None, whole: Window) -> tuple[float, float]:
    if text is None:
        return whole.from_s, whole.to_s
    try:
        from_s, to_s = (float(part) for part in text.split(":"))
    except ValueError:
        from_s = to_s = math.nan
    if from_s < to_s and max(from_s, whole.from_s) < min(to_s, whole.to_s):
        return max(from_s, whole.from_s), min(to_s, whole.to_s)
    raise BadInput(
        f"--window {text}: accepted: FROM:TO in seconds, FROM before TO; the timeline is recorded from"
        f" {whole.from_s:g} to {whole.to_s:g}"
    )


def _ranks(text: str | None, whole: Window) -> tuple[int, ...]:
    if text is None:
        return whole.nodes
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip(), re.ASCII)
        chosen = set(range(int(match[1]), int(match[2] or match[1]) + 1)) if match else set[int]()
        if not chosen or not chosen <= set(whole.nodes):
            raise BadInput(
                f"--nodes {text}: accepted: ranks and ranges of them, such as 0,3,8-12, whose timeline was recorded"
            )
        ranks |= chosen
    return tuple(sorted(ranks))


def timeline_data(run: Run, within: Window | None = None) -> dict[str, Any] | None:
    """The page's data, with intervals clipped to a window (None: all that was recorded); None without a timeline."""
    within = within or window(run)
    if within is None or run.timeline.is_empty():
        return None
    first = _overlapping(run, within).sort("start_s").head(MOST_DRAWN + 1)
    to_s = within.to_s if first.height <= MOST_DRAWN else float(first["start_s"][-1])
    shown = first.head(MOST_DRAWN).with_columns(pl.col("start_s", "end_s").clip(within.from_s, to_s).round(9))
    shown = shown.rename({"start_s": "start", "end_s": "end"})
    return {
        "from": within.from_s,
        "to": to_s,
        "cut": to_s < within.to_s,
        "nodes": list(within.nodes),
        "colours": COLOURS,
        "edged": MOST_EDGED * len(within.nodes),
        "kinds": {
            kind: rows.select("node", "start", "end", *(("to", "bytes") if kind == "send" else ())).to_dict(
                as_series=False
            )
            for kind in KINDS
            if (rows := shown.filter(pl.col("kind") == kind)).height
        },
    }


def write_timeline(runs: Sequence[Run], path: Path, within: Window | None = None) -> None:
    """Draw a run's timeline, or a part of it, into a file. Several runs, a run without a timeline, and a file that can't be
    written or is of another kind are bad input."""
    within = within or _recorded(runs, "--timeline")
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise BadInput(f"--timeline {path}: accepted: a file *.svg, *.png, *.pdf")
    with writing(f"--timeline {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        timeline_figure(runs[0], within).savefig(path)


def timeline_figure(run: Run, within: Window) -> Any:
    """A ``matplotlib.figure.Figure`` of a part of a timeline: each node's lane has computation above sending."""
    table = _overlapping(run, within)
    figure, axes = _figure(9.6, 1.2 + 0.32 * len(within.nodes))
    for kind in (kind for kind in KINDS if kind in set(table["kind"])):
        rows = table.filter(pl.col("kind") == kind)
        edge = 0.4 if rows.height < MOST_EDGED * len(within.nodes) else 0.0
        for lane, node in enumerate(within.nodes):
            own = rows.filter(pl.col("node") == node)
            spans = own.select("start_s", pl.col("end_s") - pl.col("start_s")).rows()
            place = (lane, 0.38) if kind == "send" else (lane - 0.4, 0.38)
            label = kind if lane == 0 else None
            axes.broken_barh(
                spans, place, color=PALETTE[COLOURS[kind]], edgecolor="white", linewidth=edge, label=label
            )
    axes.set_xlim(within.from_s, within.to_s)
    axes.set_ylim(len(within.nodes) - 0.5, -0.5)
    axes.set_yticks(range(len(within.nodes)), [str(node) for node in within.nodes])
    axes.set_xlabel(axis_title("time_s", [run]))
    axes.set_ylabel("node")
    axes.spines[["top", "right"]].set_visible(False)
    if not table.is_empty():
        figure.legend(loc="outside upper right", ncols=len(KINDS), frameon=False)
    return figure


def _overlapping(run: Run, within: Window) -> pl.DataFrame:
    return run.timeline.filter(
        pl.col("node").is_in(within.nodes), pl.col("start_s") < within.to_s, pl.col("end_s") > within.from_s
    )
