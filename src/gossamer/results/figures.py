"""Figures of curves for a paper: of the width of a column, with fonts in the file, and captions that say what is drawn."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path

from gossamer.errors import BadInput
from gossamer.results.folder import write_text, writing
from gossamer.results.formatting import metric_title
from gossamer.results.groups import Group, several
from gossamer.results.plots import axis_title, curve_figure, matplotlib
from gossamer.results.run import Run
from gossamer.results.tidy import AXES, check_recorded

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
