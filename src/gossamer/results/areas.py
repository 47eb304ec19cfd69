"""Comparison of a sweep's cells by the areas under a metric's curves over rounds, in pairs with a baseline.

A pair are two runs of one seed that are alike in all axes of the grid, such as the graph and the data. So the differences
between graphs do not blur those between cells. A run that several experiments of a sweep share counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import polars as pl

from gossamer.errors import BadInput, listed, suggest
from gossamer.results.comparison import Table, interval_text
from gossamer.results.formatting import NOTHING, is_share, metric_title
from gossamer.results.run import Run
from gossamer.results.tidy import check_recorded, confidence, final

Values = dict[tuple[Any, ...], tuple[Path, float]]
"""Seed and axes of the grid -> the run's folder and its area."""

_FIGURES: dict[str, Any] = {
    "runs": pl.Int64,
    **dict.fromkeys(("area", "area_half"), pl.Float64),
    "pairs": pl.Int64,
    **dict.fromkeys(("difference", "difference_half", "ratio"), pl.Float64),
}


def areas(
    runs: Sequence[Run], metric: str, baseline: str | None = None, per: Sequence[str] = ()
) -> pl.DataFrame:
    """The area under a metric's curve over rounds, divided by their number, in the cells of a sweep; ``baseline`` is an entry
    of ``cells``, and ``per`` are axes of the grid. A BadInput refuses a name that no run has.

    Returns:
        A row per value of the axes ``per`` (a column each) and entry of ``cells`` (``cell``): ``runs``, ``area``, its mean
        over them, and over ``pairs`` of runs the mean ``difference`` to the baseline and the ``ratio`` of the two means;
        ``*_half`` is half the width of a 95 % confidence interval (null for one run)."""
    check_recorded("--area", metric, runs)
    axes = list(dict.fromkeys(key for run in runs for key in run.labels if key != "cell"))
    for axis in per:
        if axis not in axes:
            raise BadInput(
                f"--per {axis}: no axis of the sweep{suggest(axis, axes)}; accepted: {listed(axes)}"
            )
    found: dict[tuple[Any, ...], dict[str, Values]] = {}
    for run in runs:
        last = final(run, metric)
        if last is not None and last.area is not None:
            row = tuple(str(run.labels.get(axis)) for axis in per)
            point = (run.experiment.get("seed"), *(str(run.labels.get(axis)) for axis in axes))
            values = found.setdefault(row, {}).setdefault(_cell(run), {})
            if values.setdefault(point, (run.path, last.area))[0] != run.path:
                raise BadInput(
                    f"--area: two runs of {_cell(run)} with seed {point[0]}; accepted: runs of one sweep"
                )
    cells = list(dict.fromkeys(cell for row in found.values() for cell in row))
    if baseline is not None and baseline not in cells:
        raise BadInput(f"--baseline {baseline}: no cell{suggest(baseline, cells)}; accepted: {listed(cells)}")
    if baseline is not None and not any("cell" in run.labels for run in runs):
        raise BadInput(
            f"--baseline {baseline}: a sweep without cells has no pairs; accepted: a sweep with cells"
        )
    rows = []
    for row, by_cell in found.items():
        base = by_cell.get(baseline or "", {})
        for cell, values in by_cell.items():
            rows.append(dict(zip(per, row, strict=True)) | {"cell": cell} | _figures(values, base))
    return pl.DataFrame(rows, schema={**dict.fromkeys((*per, "cell"), pl.String), **_FIGURES})


def _cell(run: Run) -> str:
    return str(run.labels.get("cell", run.cell or run.name))


def _figures(values: Values, base: Values) -> dict[str, Any]:
    mean = confidence(dict(values.values()).values())
    assert mean is not None
    row: dict[str, Any] = {"runs": mean.count, "area": mean.mean, "area_half": mean.half_width, "pairs": 0}
    pairs = [(*own, base[point][1]) for point, own in values.items() if point in base]
    if values is base or not pairs:
        return row
    by_run: dict[Path, list[float]] = {}
    for path, own, other in pairs:
        by_run.setdefault(path, []).append(own - other)
    difference = confidence(map(fmean, by_run.values()))
    assert difference is not None
    others = sum(other for _, _, other in pairs)
    ratio = sum(own for _, own, _ in pairs) / others if others else None
    half = difference.half_width
    return row | {"pairs": len(pairs), "difference": difference.mean, "difference_half": half, "ratio": ratio}


def table(rows: pl.DataFrame, metric: str, baseline: str | None) -> Table:
    """Rows of :func:`areas` as text."""
    unit, scale = ("%", 0.01) if is_share(metric) else ("", 1.0)
    axes = rows.columns[: rows.columns.index("runs")]
    head, lines = [*axes, "runs", "area"], []
    if baseline is not None:
        head += [f"less {baseline}", "ratio"]
    for row in rows.to_dicts():
        line = [*(row[axis] for axis in axes), str(row["runs"])]
        line.append(interval_text(row["area"], row["area_half"], unit, scale))
        if baseline is not None:
            points = "points" if unit else ""
            line.append(interval_text(row["difference"], row["difference_half"], points, scale))
            line.append(NOTHING if row["ratio"] is None else f"{row['ratio']:.3g}")
        lines.append(line)
    return f"area under {metric_title(metric)} over the rounds, divided by their number", head, lines
