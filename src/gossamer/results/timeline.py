"""The timeline of a run in pictures: a lane a node, with what it computed and sent; it waited in between."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from gossamer.errors import BadInput
from gossamer.results.plots import PALETTE, axis_title, matplotlib_module
from gossamer.results.run import Run
from gossamer.results.window import Window, recorded, window

KINDS = ("train", "evaluate", "send")
COLOURS = {"train": PALETTE[0], "evaluate": PALETTE[3], "send": PALETTE[1]}
MOST_DRAWN = 6000
"""Of more intervals, a page shows the first ones."""
MOST_EDGED = 60
"""Of more intervals a lane, edges between them would look as if the node waited."""
_DIGITS = 9
_SUFFIXES = (".svg", ".png", ".pdf")


def waits(run: Run) -> pl.DataFrame:
    """When nodes neither computed nor sent, within the window: columns ``node``, ``start_s``, ``end_s``."""
    within, gaps = window(run) or Window(0.0, 0.0, ()), []
    for node in within.nodes:
        at = within.from_s
        busy = run.timeline.filter(pl.col("node") == node).select("start_s", "end_s").rows()
        for start_s, end_s in (*busy, (within.to_s, within.to_s)):  # sorted by their start
            gaps.append((node, at, min(start_s, within.to_s)))
            at = max(at, end_s)
    return pl.DataFrame(
        [gap for gap in gaps if gap[1] < gap[2]],
        schema={"node": pl.Int32, "start_s": pl.Float64, "end_s": pl.Float64},
        orient="row",
    )


def timeline_data(run: Run, within: Window | None = None) -> dict[str, Any] | None:
    """What the page draws; None where there is nothing. Intervals are cut off at the window's ends.

    Args:
        run: the run.
        within: a part of what was recorded; None is all of it.
    """
    within = within or window(run)
    if within is None or run.timeline.is_empty():
        return None
    first = _lying(run, within).sort("start_s").head(MOST_DRAWN + 1)
    to_s = within.to_s if first.height <= MOST_DRAWN else float(first["start_s"][-1])
    shown = first.head(MOST_DRAWN).with_columns(
        pl.col("start_s").clip(within.from_s, to_s).round(_DIGITS),
        pl.col("end_s").clip(within.from_s, to_s).round(_DIGITS),
    )
    return {
        "from": within.from_s,
        "to": to_s,
        "cut": to_s < within.to_s,
        "nodes": list(within.nodes),
        "colours": COLOURS,
        "edged": MOST_EDGED * len(within.nodes),
        "kinds": {
            kind: {
                name: rows[column].to_list()
                for name, column in (("node", "node"), ("start", "start_s"), ("end", "end_s"))
            }
            | ({"to": rows["to"].to_list(), "bytes": rows["bytes"].to_list()} if kind == "send" else {})
            for kind in KINDS
            if (rows := shown.filter(pl.col("kind") == kind)).height
        },
    }


def write_timeline(runs: Sequence[Run], path: Path, within: Window | None = None) -> None:
    """Draw a run's timeline into a file.

    Args:
        runs: one run.
        path: the file.
        within: a part of what was recorded; None is all of it.

    Raises:
        BadInput: for several runs, or one without a timeline; for a file of another kind, or one that can't be
            written; without matplotlib.
    """
    if len(runs) != 1:
        raise BadInput(f"--timeline: got {len(runs)} runs; accepted: one")
    if path.suffix not in _SUFFIXES:
        raise BadInput(
            f"--timeline {path}: accepted: a file {', '.join(f'*{suffix}' for suffix in _SUFFIXES)}"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        timeline_figure(runs[0], within).savefig(path)
    except OSError as error:
        raise BadInput(
            f"--timeline {path}: {error.strerror or error}; accepted: a file that can be written"
        ) from error


def timeline_figure(run: Run, within: Window | None = None) -> Any:
    """A ``matplotlib.figure.Figure`` of the timeline: a lane a node, what it computed above what it sent.

    Args:
        run: the run.
        within: a part of what was recorded; None is all of it.

    Raises:
        BadInput: for a run without a timeline, or without matplotlib.
    """
    within = within or recorded(run)
    table = _lying(run, within)
    height = 1.2 + 0.32 * len(within.nodes)
    figure = matplotlib_module().Figure(figsize=(9.6, height), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for kind in KINDS:
        rows = table.filter(pl.col("kind") == kind)
        edge = 0.4 if rows.height < MOST_EDGED * len(within.nodes) else 0.0
        for lane, node in enumerate(within.nodes):
            own = rows.filter(pl.col("node") == node)
            spans = [(start, end - start) for start, end in own.select("start_s", "end_s").iter_rows()]
            place = (lane, 0.38) if kind == "send" else (lane - 0.4, 0.38)
            label = kind if lane == 0 else None
            axes.broken_barh(
                spans, place, color=COLOURS[kind], edgecolor="white", linewidth=edge, label=label
            )
    axes.set_xlim(within.from_s, within.to_s)
    axes.set_ylim(len(within.nodes) - 0.5, -0.5)
    axes.set_yticks(range(len(within.nodes)), [str(node) for node in within.nodes])
    axes.set_xlabel(axis_title("time_s", [run]))
    axes.set_ylabel("node")
    axes.spines[["top", "right"]].set_visible(False)
    present = [kind for kind in KINDS if kind in set(table["kind"])]
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        [handles[kind] for kind in present],
        present,
        loc="outside upper right",
        ncols=len(present),
        frameon=False,
    )
    return figure


def _lying(run: Run, within: Window) -> pl.DataFrame:
    """The intervals of a timeline that lie in a window, at least in part."""
    return run.timeline.filter(
        pl.col("node").is_in(within.nodes),
        pl.col("start_s") < within.to_s,
        pl.col("end_s") > within.from_s,
    )
