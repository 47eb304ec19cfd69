"""The timeline of a run: which part of it is shown, and its picture with a lane per node."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from gossamer.errors import BadInput
from gossamer.results.plots import PALETTE, axis_title, matplotlib_module
from gossamer.results.run import Run

KINDS = ("train", "evaluate", "send")
COLOURS = {"train": PALETTE[0], "evaluate": PALETTE[3], "send": PALETTE[1]}
MOST_DRAWN = 6000
"""The largest number of intervals that a page shows, the first ones."""
MOST_EDGED = 60
"""Intervals in a lane above which they are drawn without edges, which would look as if the node waited."""
_DIGITS = 9


@dataclass(frozen=True)
class Window:
    """A part of a timeline: a span in seconds, and some ranks."""

    from_s: float
    to_s: float
    nodes: tuple[int, ...]


def window(run: Run) -> Window | None:
    """The part of the run that its timeline covers; None where the experiment asks for no timeline."""
    asked = (run.experiment.get("evaluation") or {}).get("timeline")
    if not asked:
        return None
    nodes = asked["nodes"]
    ranks = range(min(nodes, run.nodes)) if isinstance(nodes, int) else sorted(set(nodes))
    end_s = run.metrics["time_s"].max()
    to_s = min(asked["to_s"], end_s) if isinstance(end_s, float) else asked["to_s"]
    return Window(float(asked["from_s"]), float(max(to_s, asked["from_s"])), tuple(ranks))


def _recorded(run: Run) -> Window:
    """As :func:`window`; a run without a timeline is bad input."""
    found = window(run)
    if found is None or run.timeline.is_empty():
        raise BadInput(
            f"{run.path}: no timeline was recorded; accepted: a run whose experiment has evaluation.timeline, e.g. --set"
            ' "evaluation.timeline={from_s: 0, to_s: 10}"'
        )
    return found


def choose(runs: Sequence[Run], span: str | None, nodes: str | None) -> Window | None:
    """The part of a run's timeline that the command line asks for; None where it asks for nothing.

    Args:
        runs: one run.
        span: ``FROM:TO`` in seconds; None is all of it.
        nodes: ranks and ranges of ranks, ``0,3,8-12``; None is all of them.

    Raises:
        BadInput: for several runs, a run without a timeline, a text of another form, or a part of which nothing was
            recorded.
    """
    if span is None and nodes is None:
        return None
    if len(runs) != 1:
        option = "--window" if nodes is None else "--nodes"
        raise BadInput(f"{option}: got {len(runs)} runs; accepted: one, whose timeline it is of")
    whole = _recorded(runs[0])
    from_s, to_s = (whole.from_s, whole.to_s) if span is None else _span(span, whole)
    return Window(from_s, to_s, whole.nodes if nodes is None else _ranks(nodes, whole))


def _span(text: str, whole: Window) -> tuple[float, float]:
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


def _ranks(text: str, whole: Window) -> tuple[int, ...]:
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
    """Draw a run's timeline, or a part of it, into a file.

    Raises:
        BadInput: for several runs, a run without a timeline, a file that can't be written or is of another kind, and
            without matplotlib.
    """
    if len(runs) != 1:
        raise BadInput(f"--timeline: got {len(runs)} runs; accepted: one")
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise BadInput(f"--timeline {path}: accepted: a file *.svg, *.png, *.pdf")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        timeline_figure(runs[0], within).savefig(path)
    except OSError as error:
        raise BadInput(
            f"--timeline {path}: {error.strerror or error}; accepted: a file that can be written"
        ) from error


def timeline_figure(run: Run, within: Window | None = None) -> Any:
    """A ``matplotlib.figure.Figure`` of the timeline, or a part of it: each node's lane has computation above sending.

    Raises:
        BadInput: for a run without a timeline, or without matplotlib.
    """
    within = within or _recorded(run)
    table = _overlapping(run, within)
    height = 1.2 + 0.32 * len(within.nodes)
    figure = matplotlib_module().Figure(figsize=(9.6, height), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for kind in (kind for kind in KINDS if kind in set(table["kind"])):
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
    if not table.is_empty():
        figure.legend(loc="outside upper right", ncols=len(KINDS), frameon=False)
    return figure


def _overlapping(run: Run, within: Window) -> pl.DataFrame:
    return run.timeline.filter(
        pl.col("node").is_in(within.nodes),
        pl.col("start_s") < within.to_s,
        pl.col("end_s") > within.from_s,
    )
