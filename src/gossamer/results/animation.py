"""An animation of the graph, with nodes coloured by a metric over the rounds, as on the report's page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gossamer.errors import BadInput, listed, suggest
from gossamer.results.folder import writing
from gossamer.results.formatting import is_share, metric_title
from gossamer.results.groups import ended
from gossamer.results.plots import PALETTE, matplotlib
from gossamer.results.report import page_data
from gossamer.results.run_data import RunData
from gossamer.results.tidy import class_columns, lower_is_better

MAX_RUNS = 4
"""Maximum number of runs side by side."""
_FRAMES_PER_SECOND = 4
_LINES = "#8a8f98"


def write_animation(runs: Sequence[RunData], metric: str, path: Path) -> None:
    """Write an animated GIF (``.gif``) or PNG (``.png``) of the graph: one frame for each evaluation that the
    page shows. Nodes that selectors have chosen, such as poisoned ones, are ringed; nodes without a value are hollow.
    Several runs are side by side and share a colour scale.

    BadInput for another file type, more than :data:`MAX_RUNS` runs, a run without a graph, or a metric that
    no node has recorded."""
    if path.suffix not in (".gif", ".png"):
        raise BadInput(f"--animate {path}: accepted: a file *.gif or *.png")
    if len(runs) > MAX_RUNS:
        raise BadInput(f"--animate: got {len(runs)} runs; accepted: 1 to {MAX_RUNS}")
    pages = page_data(runs)["runs"]
    for run, page in zip(runs, pages, strict=True):
        if metric not in (known := list(page["nodes"]["values"])):
            problem = f"the nodes of {run.path} have not recorded {metric}{suggest(metric, known)}"
            raise BadInput(f"--animate: {problem}; accepted as --metrics: {listed(known)}")
        if page["topology"] is None:
            raise BadInput(f"--animate: {run.path} has recorded no graph; accepted: runs with one")
    classes = class_columns(runs)
    values = [np.array(page["nodes"]["values"][metric], dtype=float) for page in pages]
    colours = matplotlib("cm").ScalarMappable(
        matplotlib("colors").Normalize(min(map(np.nanmin, values)), max(map(np.nanmax, values))),
        "viridis_r" if lower_is_better(metric, classes) else "viridis",
    )
    figure = matplotlib("figure").Figure(figsize=(5.2 * len(runs) + 0.8, 5.2), layout="constrained")
    panels = figure.subplots(1, len(runs), squeeze=False)[0]
    named = len(runs) > 1 or bool(ended(runs[0]))
    frames = [_frames(*panel, colours, named) for panel in zip(panels, pages, values, strict=True)]
    percent = (lambda value, _: f"{100 * value:.3g}%") if is_share(metric, classes) else None
    figure.colorbar(colours, ax=list(panels), label=metric_title(metric), format=percent, shrink=0.8)
    writer = matplotlib("animation").PillowWriter(fps=_FRAMES_PER_SECOND)
    with writing(f"--animate {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with writer.saving(figure, path, dpi=100):
            for number in range(max(map(len, frames))):
                for updates in frames:
                    updates[min(number, len(updates) - 1)]()
                writer.grab_frame()


def _frames(axes: Any, run: Any, values: Any, colours: Any, named: bool) -> list[Callable[[], None]]:
    """Draw the graph of a run, from its data for the page and its values (nodes, points). Returns functions
    that change the drawing to each point at which some node has a value."""
    positions, graphs = np.array(run["topology"]["positions"]), run["topology"]["graphs"]
    lines = axes.add_collection(
        matplotlib("collections").LineCollection([], colors=_LINES, linewidths=0.6, zorder=1)
    )
    size = float(np.clip(90 / np.sqrt(len(positions)), 3, 14))  # points across
    dots = axes.scatter(*positions.T, s=size**2, edgecolors=_LINES, linewidths=0.6)
    for number, ring in enumerate(run["rings"]):
        ringed, across = positions[np.isin(run["nodes"]["ranks"], ring["ranks"])], size + 5 + 6 * number
        axes.scatter(
            *ringed.T, s=across**2, facecolors="none", edgecolors=PALETTE[ring["colour"]], linewidths=2
        )
    axes.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal")
    axes.set_axis_off()

    def show(point: int) -> None:
        ends = np.array(graphs[min(point, len(graphs) - 1)], dtype=int).reshape(-1, 2)
        lines.set_segments(positions[ends])
        dots.set_facecolors(colours.to_rgba(np.ma.masked_invalid(values[:, point])))
        title = run["points"]["text"][run["nodes"]["at"][point]]
        axes.set_title(f"{run['label']}: {title}" if named else title)

    points = np.flatnonzero(np.isfinite(values).any(axis=0)).tolist()
    return [lambda point=point: show(point) for point in points]  # type: ignore[misc]
