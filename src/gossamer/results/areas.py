"""Comparison of a sweep's cells by the areas under a metric's curves over rounds, in pairs with a baseline.

A pair are two runs of one seed that are alike in all axes of the grid, such as the graph and the data. So the differences
between graphs do not blur those between cells. A run that several experiments of a sweep share counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import polars as pl

from gossamer.errors import BadInput, listed, suggest
from gossamer.results.comparison import Table, interval_text
from gossamer.results.formatting import is_share, metric_title
from gossamer.results.run import Run
from gossamer.results.tidy import check_recorded, confidence, final


class Area(NamedTuple):
    """A run's folder, its area, and this area divided by that of another metric, less one."""

    path: Path
    area: float
    relative: float | None


Values = dict[tuple[Any, ...], Area]
"""Seed and axes of the grid -> the area of the run there."""

_FIGURES: dict[str, Any] = {
    "runs": pl.Int64,
    **dict.fromkeys(("area", "area_half", "relative", "relative_half"), pl.Float64),
    "pairs": pl.Int64,
    **dict.fromkeys(("difference", "difference_half", "ratio", "ratio_half"), pl.Float64),
}


def areas(
    runs: Sequence[Run],
    metric: str,
    baseline: str | None = None,
    per: Sequence[str] = (),
    relative_to: str | None = None,
) -> pl.DataFrame:
    """The area under a metric's curve over rounds, divided by their number, in the cells of a sweep; ``baseline`` is an entry
    of ``cells``, ``per`` are axes of the grid, and ``relative_to`` is another metric of the same runs. A BadInput refuses a
    name that no run has.

    Returns:
        A row per value of the axes ``per`` (a column each) and entry of ``cells`` (``cell``): ``runs``, ``area``, its mean
        over them, ``relative``, the mean of a run's area divided by that of the other metric, less one, and over ``pairs``
        of runs the mean ``difference`` to the baseline and the ``ratio`` of the two means; ``*_half`` is half the width of
        a 95 % confidence interval (null for one run; for ratios by linearization)."""
    check_recorded("--area", metric, runs)
    if relative_to is not None:
        check_recorded("--relative-to", relative_to, runs)
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
            other = None if relative_to is None else final(run, relative_to)
            relative = last.area / other.area - 1 if other is not None and other.area else None
            if values.setdefault(point, Area(run.path, last.area, relative)).path != run.path:
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
    own = {each.path: each for each in values.values()}.values()
    row: dict[str, Any] = {"runs": len(own), "pairs": 0}
    row |= _interval("area", [each.area for each in own])
    row |= _interval("relative", [each.relative for each in own if each.relative is not None])
    pairs = [(each, base[point].area) for point, each in values.items() if point in base]
    if values is base or not pairs:
        return row
    # A run that several experiments share has several partners, and counts as one pair with their mean.
    partners: dict[Area, list[float]] = {}
    for each, other in pairs:
        partners.setdefault(each, []).append(other)
    paired = [(each.area, fmean(others)) for each, others in partners.items()]
    row |= _interval("difference", [each - other for each, other in paired])
    mean = fmean(other for _, other in pairs)
    if mean:
        ratio = fmean(each.area for each, _ in pairs) / mean
        residuals = _interval("ratio", [(each - ratio * other) / mean for each, other in paired])
        row |= residuals | {"ratio": ratio}
    return row | {"pairs": len(pairs)}


def _interval(name: str, values: Sequence[float]) -> dict[str, float | None]:
    found = confidence(values)
    return {} if found is None else {name: found.mean, f"{name}_half": found.half_width}


def table(rows: pl.DataFrame, metric: str, baseline: str | None, relative_to: str | None) -> Table:
    """Rows of :func:`areas` as text."""
    unit, scale = ("%", 0.01) if is_share(metric) else ("", 1.0)
    axes = rows.columns[: rows.columns.index("runs")]
    head, lines = [*axes, "runs", "area"], []
    if relative_to is not None:
        head.append(f"relative to {relative_to}")
    if baseline is not None:
        head += [f"less {baseline}", "ratio"]
    for row in rows.to_dicts():
        line = [*(row[axis] for axis in axes), str(row["runs"])]
        line.append(interval_text(row["area"], row["area_half"], unit, scale))
        if relative_to is not None:
            line.append(interval_text(row["relative"], row["relative_half"], "%", 0.01))
        if baseline is not None:
            points = "points" if unit else ""
            line.append(interval_text(row["difference"], row["difference_half"], points, scale))
            line.append(interval_text(row["ratio"], row["ratio_half"]))
        lines.append(line)
    return (
        f"mean {metric_title(metric)} over the rounds, ± half of the 95 % interval over the runs",
        head,
        lines,
    )
