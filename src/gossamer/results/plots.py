"""Colours and titles of all plots, the layout of a graph, and curves as PNG."""

from __future__ import annotations

import importlib
import re
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
    connected (Fruchterman and Reingold, 1991). Edges with an end that is not drawn are left out.
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
    """A metric against one of :data:`AXES`, as a ``matplotlib.figure.Figure`` that no window shows.

    Of each run, the mean over the nodes in a band of one standard deviation; of each group, if groups are given, the mean
    over its runs in the band of its 95 % confidence interval. A metric that no run has recorded is bad input.
    """
    if groups is None:
        bands = [run.curves.filter(pl.col("metric") == y).with_columns(spread="std") for run in runs]
        names = labels(runs)
    else:
        bands = [group_curve(group, y).with_columns(spread=pl.col("half").fill_null(0.0)) for group in groups]
        names = [group.label for group in groups]
    if not any(table[x].count() for table in bands):
        raise BadInput(
            f"metric: got {y!r}; accepted: one that a run has recorded: {', '.join(all_metrics(runs))}"
        )
    figure = matplotlib_module().Figure(figsize=(6.4, 4.0), dpi=_POINTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    for index, (label, band) in enumerate(zip(names, bands, strict=True)):
        table = band.drop_nulls(x).sort(x, maintain_order=True)
        colour = PALETTE[index % len(PALETTE)]
        place, mean, spread = (table[name].to_numpy() for name in (x, "mean", "spread"))
        marker = "o" if len(table) == 1 else None
        axes.plot(place, mean, color=colour, label=label, linewidth=1.8, marker=marker)
        axes.fill_between(place, mean - spread, mean + spread, color=colour, alpha=0.16, linewidth=0)
    axes.set_xlabel(axis_title(x, runs))
    axes.set_ylabel(metric_title(y))
    if is_share(y):
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    if x == "bytes":
        axes.xaxis.set_major_formatter(matplotlib_module("matplotlib.ticker").EngFormatter("B"))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if len(names) > 1:
        axes.legend(frameon=False, fontsize="small")
    return figure


def write_pngs(runs: Sequence[Run], folder: Path, groups: Sequence[Group] | None = None) -> list[Path]:
    """Write every metric against every axis as ``<metric>-vs-<axis>.png``; gives the paths."""
    matplotlib_module()
    written = []
    with writing(f"--png {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in all_metrics(runs):
            tables = [run.curves.filter(pl.col("metric") == name) for run in runs]
            safe = re.sub(r"[^\w.-]", "-", name).replace("_", "-")
            for x in AXES:
                if any(table[x].count() for table in tables):
                    path = folder / f"{safe}-vs-{x.removesuffix('_s').replace('_', '-')}.png"
                    curve_figure(runs, name, x, groups).savefig(path)
                    written.append(path)
    return written


def draw_graph(
    nodes: int, edges: Sequence[Sequence[int]], path: Path, *, directed: bool = False, seed: int = 0
) -> None:
    """Draw a graph into a PNG file; a large one in part (see :func:`drawn_nodes`)."""
    figure = matplotlib_module().Figure(figsize=(6.4, 6.4), dpi=_POINTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
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
        figure.savefig(path)


def matplotlib_module(module: str = "matplotlib.figure") -> Any:
    """A module of matplotlib; bad input where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise BadInput("PNG export needs matplotlib: pip install 'gossamer[report]'") from error
