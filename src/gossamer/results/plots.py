"""Colours and titles of all plots, the layout of a graph, and curves as PNG."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networkx as nx
import polars as pl

from gossamer.errors import BadInput
from gossamer.randomness import torch_seed
from gossamer.results.folder import writing
from gossamer.results.formatting import is_share, metric_title
from gossamer.results.groups import Group, group_curve
from gossamer.results.run import Run, labels
from gossamer.results.tidy import AXES, all_metrics

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A", "#B59F00")
"""Colours for the colour-blind (Okabe and Ito, 2008), with grey and a darker yellow in place of black and yellow, which
don't show on a dark or a light page."""

MOST_NODES_DRAWN = 300
_MOST_NODES_BY_DISTANCE = 100
_MOST_NODES_NUMBERED = 100
_POINTS_PER_INCH = 160


def axis_title(x: str, runs: Sequence[Run]) -> str:
    """Title of an x axis, with its unit."""
    time = "virtual time / s" if all(run.virtual for run in runs) else "time / s"
    return {
        "round": "round",
        "time_s": time,
        "wall_s": "wall time / s",
        "bytes": "sent by all nodes / bytes",
    }[x]


def drawn_nodes(nodes: int, edges: Sequence[Sequence[int]]) -> list[int]:
    """The nodes that a picture of the graph shows: all, or in a large graph those nearest to node 0.

    Neighbours are drawn together, so that edges show; a random sample would have next to none.
    """
    if nodes <= MOST_NODES_DRAWN:
        return list(range(nodes))
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from((i, j) for i, j in edges)
    near = list(nx.bfs_tree(graph, 0))[:MOST_NODES_DRAWN]
    rest = [node for node in range(nodes) if node not in set(near)]
    return sorted(near + rest[: MOST_NODES_DRAWN - len(near)])


def positions(
    nodes: Sequence[int], edges: Sequence[Sequence[int]], *, seed: int = 0, changing: bool = False
) -> list[tuple[float, float]]:
    """The positions of nodes in the picture of a graph, each coordinate within [-1, 1].

    A changing graph is drawn on a circle, since no other layout suits all of its graphs. Otherwise distances in the
    picture follow those in the graph (Kamada and Kawai, 1989), or forces where that would take long or the graph is not
    connected (Fruchterman and Reingold, 1991).

    Args:
        nodes: the ranks to place.
        edges: pairs of ranks; those with an end that is not drawn are left out.
        seed: the experiment's seed.
        changing: whether the graph changes while the run goes on.
    """
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


def curve_figure(runs: Sequence[Run], y: str, x: str = "round", groups: Sequence[Group] | None = None) -> Any:
    """A metric of one or several runs against an axis: mean over the nodes, and a band of one standard
    deviation.

    Args:
        runs: the runs.
        y: a metric.
        x: one of :data:`AXES`.
        groups: draw these instead, each as the mean over its runs in the band of its 95 % confidence interval.

    Returns:
        A ``matplotlib.figure.Figure``, which no window shows.

    Raises:
        BadInput: when no run has recorded the metric, or matplotlib is not installed.
    """
    figures = matplotlib_module()
    figure = figures.Figure(figsize=(6.4, 4.0), dpi=_POINTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    drawn = False
    for index, (label, found) in enumerate(_curves(runs, y, groups)):
        table = found.filter(pl.col(x).is_not_null()).sort(x, maintain_order=True)
        if table.is_empty():
            continue
        colour = PALETTE[index % len(PALETTE)]
        place, mean, spread = (table[name].to_numpy() for name in (x, "mean", "spread"))
        marker = "o" if len(table) == 1 else None
        axes.plot(place, mean, color=colour, label=label, linewidth=1.8, marker=marker)
        axes.fill_between(place, mean - spread, mean + spread, color=colour, alpha=0.16, linewidth=0)
        drawn = True
    if not drawn:
        raise BadInput(
            f"metric: got {y!r}; accepted: one that a run has recorded: {', '.join(all_metrics(runs))}"
        )
    axes.set_xlabel(axis_title(x, runs))
    axes.set_ylabel(metric_title(y))
    if is_share(y):
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    if x == "bytes":
        axes.xaxis.set_major_formatter(matplotlib_module("matplotlib.ticker").EngFormatter("B"))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if len(runs if groups is None else groups) > 1:
        axes.legend(frameon=False, fontsize="small")
    return figure


def _curves(runs: Sequence[Run], y: str, groups: Sequence[Group] | None) -> list[tuple[str, pl.DataFrame]]:
    """Labels and curves; ``spread`` is the half-width of the band around ``mean``."""
    if groups is not None:
        return [
            (group.label, group_curve(group, y).with_columns(spread=pl.col("half").fill_null(0.0)))
            for group in groups
        ]
    return [
        (label, run.curves.filter(pl.col("metric") == y).with_columns(spread=pl.col("std")))
        for run, label in zip(runs, labels(runs), strict=True)
    ]


def write_pngs(runs: Sequence[Run], folder: Path, groups: Sequence[Group] | None = None) -> list[Path]:
    """Write every metric against every axis as ``<metric>-vs-<axis>.png``; the paths written. Arguments as for
    :func:`curve_figure`.

    Raises:
        BadInput: when matplotlib is not installed, or the folder can't be written.
    """
    matplotlib_module()
    written = []
    with writing(f"--png {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in all_metrics(runs):
            tables = [run.curves.filter(pl.col("metric") == name) for run in runs]
            for x in AXES:
                if any(table[x].count() for table in tables):
                    path = folder / f"{_file_name(name)}-vs-{x.removesuffix('_s').replace('_', '-')}.png"
                    curve_figure(runs, name, x, groups).savefig(path)
                    written.append(path)
    return written


def draw_graph(
    nodes: int, edges: Sequence[Sequence[int]], path: Path, *, directed: bool = False, seed: int = 0
) -> None:
    """Draw a graph into a PNG file; a large one in part (see :func:`drawn_nodes`).

    Raises:
        BadInput: when matplotlib is not installed, or the file can't be written.
    """
    figure = matplotlib_module().Figure(figsize=(6.4, 6.4), dpi=_POINTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    shown = drawn_nodes(nodes, edges)
    place = dict(zip(shown, positions(shown, edges, seed=seed), strict=True))
    style = {
        "arrowstyle": "-|>" if directed else "-",
        "color": "#8a8f98",
        "linewidth": 0.8,
        "shrinkA": 7,
        "shrinkB": 7,
    }
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
        figure.savefig(path)


def _file_name(metric: str) -> str:
    return "".join(c if c.isalnum() or c in "-." else "-" for c in metric)


def matplotlib_module(module: str = "matplotlib.figure") -> Any:
    """A module of matplotlib.

    Raises:
        BadInput: where it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise BadInput("PNG export needs matplotlib: pip install 'gossamer[report]'") from error
