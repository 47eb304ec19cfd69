"""An animation of the graph, with nodes coloured by a metric over the rounds, as on the report's page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from gossamer.errors import BadInput, listed, suggest
from gossamer.results.folder import writing
from gossamer.results.formatting import is_share, metric_title
from gossamer.results.plots import PALETTE, matplotlib
from gossamer.results.report import page_data
from gossamer.results.run import Run
from gossamer.results.tidy import lower_is_better

MOST_RUNS = 4
"""The largest number of runs side by side."""

_FRAMES_PER_SECOND = 4
_LINES = "#8a8f98"


class Animation:
    """The graph with a frame for each evaluation point, at most 200, in the layout of the page. Nodes with poisoned data are
    ringed, and nodes without a value are hollow. Several runs are shown side by side; the limits of colour are the same in
    all frames.

    More than :data:`MOST_RUNS` runs, a run without a graph, and a metric that no node has recorded are bad input."""

    def __init__(self, runs: Sequence[Run], metric: str) -> None:
        self.metric = metric
        if len(runs) > MOST_RUNS:
            raise BadInput(f"--animate: got {len(runs)} runs; accepted: 1 to {MOST_RUNS}")
        data = page_data(runs)
        shown = data["runs"]
        for run, each in zip(runs, shown, strict=True):
            known = list(each["nodes"]["values"])
            if metric not in known:
                found = f"the nodes of {run.path} have not recorded it{suggest(metric, known)}"
                raise BadInput(f"--animate {metric}: {found}; accepted: {listed(known)}")
            if each["topology"] is None:
                raise BadInput(f"--animate: {run.path} has recorded no graph; accepted: runs with one")
        values = [np.array(each["nodes"]["values"][metric], dtype=np.float64) for each in shown]
        colours = {
            "cmap": "viridis_r" if lower_is_better(metric) else "viridis",
            "vmin": min(map(np.nanmin, values)),
            "vmax": max(map(np.nanmax, values)),
        }
        size = 5.2 * len(runs) + 0.8, 5.2
        self.figure = matplotlib("figure").Figure(figsize=size, dpi=100, layout="constrained")
        panels = self.figure.subplots(1, len(runs), squeeze=False)[0]
        self.graphs = [
            _Graph(axes, each, value, colours, PALETTE[1], each["label"] if len(runs) > 1 else "")
            for axes, each, value in zip(panels, shown, values, strict=True)
        ]
        bar = {"label": metric_title(metric), "shrink": 0.8, "pad": 0.01}
        if is_share(metric):
            bar["format"] = lambda value, _: f"{100 * value:.3g}%"
        self.figure.colorbar(self.graphs[0].nodes, ax=list(panels), **bar)

    def write(self, page: Path, suffix: str = "gif") -> Path:
        """Write ``<page>-<metric>.gif`` next to a page, or an animated PNG for the suffix ``png``; gives its path."""
        path = page.with_name(f"{page.stem}-{self.metric.replace('_', '-')}.{suffix}")
        writer = matplotlib("animation").PillowWriter(fps=_FRAMES_PER_SECOND)
        with writing(str(path)), writer.saving(self.figure, path, dpi=100):
            for frame in range(max(len(graph.points) for graph in self.graphs)):
                for graph in self.graphs:
                    graph.draw(frame)
                writer.grab_frame()
        return path


class _Graph:
    """The graph of one run in its axes; ``run`` is its data for the page, ``values`` has a row per node drawn."""

    def __init__(
        self,
        axes: Any,
        run: dict[str, Any],
        values: Float[np.ndarray, "nodes points"],
        colours: dict[str, Any],
        ring: str,
        label: str,
    ) -> None:
        self.axes, self.run, self.values, self.label = axes, run, values, label
        # Before the first training no node has a training loss, say.
        self.points = np.flatnonzero(np.isfinite(values).any(axis=0))
        self.places = np.array(run["topology"]["positions"])
        lines = matplotlib("collections").LineCollection([], colors=_LINES, linewidths=0.6)
        self.edges = axes.add_collection(lines)
        size = float(np.clip(90 / np.sqrt(len(self.places)), 3, 14))  # points across
        style = {"s": size**2, "edgecolors": _LINES, "linewidths": 0.6, "zorder": 3}
        self.nodes = axes.scatter(*self.places.T, c=np.zeros(len(self.places)), **style, **colours)
        poisoned = np.isin(run["nodes"]["ranks"], run["poisoned"])
        rings = {"facecolors": "none", "edgecolors": ring, "linewidths": 2, "zorder": 4}
        axes.scatter(*self.places[poisoned].T, s=(size + 5) ** 2, **rings)
        axes.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal")
        axes.set_axis_off()

    def draw(self, frame: int) -> None:
        """Show one of the run's evaluation points, or its last one after its end."""
        k = self.points[min(frame, len(self.points) - 1)]
        topology, run = self.run["topology"], self.run
        edges = np.array(topology["graphs"][topology["held"][k]], dtype=int).reshape(-1, 2)
        self.edges.set_segments(self.places[edges])
        self.nodes.set_array(np.ma.masked_invalid(self.values[:, k]))
        round_ = f"round {run['points']['round'][run['nodes']['at'][k]]:.4g}"
        self.axes.set_title(f"{self.label}: {round_}" if self.label else round_)
