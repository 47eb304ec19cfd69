"""Comparison of groups of runs by measures: metrics at the end or at a budget, time and bytes to reach a
level, areas under curves.

Times to a level and values at a budget are steps of :mod:`gossamer.results.steps`; nothing is interpolated. Each has a
resolution: how long before it the record last knows the model of some node. Where that is more than a tenth of the
time, the tables mark the number and show no difference or ratio. Times are on the engine's clock; traffic is the total
sent by all nodes until then. Means over the runs of a group have 95 % confidence intervals by Student's t.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl

from gossamer.errors import BadInput, listed, suggest
from gossamer.results.formatting import (
    Table,
    bytes_text,
    bytes_unit,
    interval_text,
    is_share,
    metric_title,
    part,
    seconds_text,
)
from gossamer.results.groups import Baseline, Group
from gossamer.results.run import Run
from gossamer.results.steps import Resolution, bytes_by, check_timed
from gossamer.results.tidy import (
    check_recorded,
    comparison_metrics,
    confidence,
    final,
    lower_is_better,
    rounds_on_record,
)

Number = Literal["mean", "difference", "ratio"]
_COMPARED: tuple[Number, ...] = ("difference", "ratio")

COLUMNS: dict[str, Any] = {
    **dict.fromkeys(("group", "measure", "baseline"), pl.String),
    **dict.fromkeys(("runs", "known", "pairs"), pl.Int64),
    **dict.fromkeys(
        ("mean", "mean_half", "difference", "difference_half", "ratio", "ratio_half"), pl.Float64
    ),
    "resolution": pl.Float64,
    "coarse": pl.String,
}

_NOTE = (
    "Means over runs ± half of the 95 % confidence interval (Student's t). A mean is shown only if every run has a value."
    " Of runs that were repeated with the same seed, the newest that is done counts."
)
_PAIRED = (
    " Differences and ratios are of pairs of runs with the same seed, so variation that a seed causes in both runs of a pair"
    " cancels out."
)


_COARSE = "*"
"""The mark of a number that is only known to more than a tenth of its time."""


def _exact(run: Run) -> Resolution | None:
    """The resolution of a number that does not depend on when nodes were evaluated."""


_COARSELY = (
    f"{_COARSE} Evaluations are too far apart: the right number may be of an instant that is earlier by more than a tenth of"
    " the time, so no difference or ratio is shown. Evaluate more often (evaluation.every_rounds or every_s). "
)


class Measure(NamedTuple):
    """A measure that compares groups: ``of`` returns its number for a run, or None if the run has none, such
    as a time to a level that it has not reached. ``table`` and ``column`` are titles. ``unit`` is "share",
    "bytes", or the suffix of the texts. ``against`` lists the comparisons with the baseline to show. ``resolution`` says how
    exactly the number of a run is known; None if it does not depend on when nodes were evaluated."""

    name: str
    table: str
    column: str
    unit: str
    of: Callable[[Run], float | None]
    against: Sequence[Number] = ("difference",)
    resolution: Callable[[Run], Resolution | None] = _exact

    def text(
        self, value: float | None, half: float | None, number: Number = "mean", size: float | None = None
    ) -> str:
        """A number and half the width of its interval as text. For bytes, ``size`` determines the unit."""
        if number == "ratio":
            return interval_text(value, half)
        if self.unit == "share":
            return interval_text(value, half, "points" if number == "difference" else "%", 0.01)
        unit, scale = bytes_unit(size or value or 0.0) if self.unit == "bytes" else (self.unit, 1.0)
        return interval_text(value, half, unit, scale)


# --- measures


def measure(text: str) -> Measure:
    """The measure with this name. ValueError for an unknown one.

    ``METRIC`` is the value at the end; ``time_s`` and ``bytes`` are totals of the whole
    run. ``time_s to METRIC=LEVEL`` is the time until the mean over the nodes reaches a level; ``bytes to
    METRIC=LEVEL`` is the total sent by all nodes until then. ``METRIC at bytes=N`` and ``METRIC at
    time_s=SECONDS`` are values at the last step of :meth:`Run.steps` within a budget, only for runs that have used
    it up, since others might have improved further. ``area METRIC`` is the area under the curve over rounds,
    divided by the number of rounds; ``area METRIC relative to OTHER`` is its relative difference from the
    area of another metric of the same run."""
    for form, make in _FORMS:
        if (match := re.fullmatch(form, text)) is not None:
            return make(*match.groups())
    raise ValueError("METRIC, time_s, bytes, 'time_s to METRIC=LEVEL', or 'METRIC at bytes=N'")


def _final(metric: str) -> Measure:
    number = partial(_figure, metric, "mean")
    return Measure(metric, "at the end", metric_title(metric), _unit(metric), number)


def _area(metric: str, other: str | None = None) -> Measure:
    def relative(run: Run) -> float | None:
        value, reference = area(run), _figure(str(other), "area", run)
        return value / reference - 1 if value is not None and reference else None

    area = partial(_figure, metric, "area")
    name, title = f"area {metric}", f"mean {metric_title(metric)} over the rounds"
    if other is None:
        return Measure(name, title, "area", _unit(metric), area, _COMPARED)
    column = f"relative to {metric_title(other)}"
    return Measure(f"{name} relative to {other}", title, column, "share", relative)


def _figure(metric: str, field: Literal["mean", "area"], run: Run) -> float | None:
    value = final(run, metric)
    return None if value is None else getattr(value, field)


def _total(axis: str) -> Measure:
    return Measure(axis, "at the end", *_AXES[axis], partial(_used, axis), ())


def _used(axis: str, run: Run) -> float | None:
    """The seconds or bytes that a run has used in all."""
    if axis == "time_s":
        return max(run.metrics["time_s"].drop_nulls(), default=None)
    sent = float(bytes_by(run, np.array([math.inf]))[0])
    return None if math.isnan(sent) else sent


def _time_to(axis: str, metric: str, number: str) -> Measure:
    def first(run: Run) -> dict[str, Any] | None:
        steps = run.steps(metric)
        index = None if steps is None else steps.first(level)
        return None if steps is None or index is None else steps.table.row(index, named=True)

    def position(run: Run) -> float | None:
        step = first(run)
        return None if step is None else step[axis]

    def resolution(run: Run) -> Resolution | None:
        steps, step = run.steps(metric), first(run)
        return None if steps is None or step is None else steps.before(step["time_s"])

    level, low = float(number), lower_is_better(metric)
    text = f"{100 * level:.4g} %" if is_share(metric) else f"{level:.4g}"
    title = f"{metric_title(metric)} {'≤' if low else '≥'} {text}"
    name = f"{axis} to {metric}={level:g}"
    return Measure(name, title, *_AXES[axis], position, _COMPARED, resolution)


def _at_budget(metric: str, axis: str, number: str) -> Measure:
    def within(run: Run) -> dict[str, Any] | None:
        steps = run.steps(metric)
        if steps is None or (_used(axis, run) or 0.0) < budget:
            return None
        inside = steps.table.filter(pl.col(axis) <= budget)
        return inside.row(-1, named=True) if inside.height else None

    def value(run: Run) -> float | None:
        step = within(run)
        return None if step is None else step["mean"]

    def resolution(run: Run) -> Resolution | None:
        steps, step = run.steps(metric), within(run)
        if steps is None or step is None:
            return None
        return steps.until(budget if axis == "time_s" else step["time_s"])

    budget = float(number)
    title = f"at {bytes_text(budget) if axis == 'bytes' else seconds_text(budget)}"
    name = f"{metric} at {axis}={budget:g}"
    return Measure(name, title, metric_title(metric), _unit(metric), value, resolution=resolution)


def _unit(metric: str) -> str:
    return "share" if is_share(metric) else ""


_AXES = {"time_s": ("time", "s"), "bytes": ("sent", "bytes")}
"""The title and the unit of each axis of a curve."""
_FORMS: tuple[tuple[str, Callable[..., Measure]], ...] = (
    (r"(time_s|bytes)", _total),
    (r"(\S+)", _final),
    (r"(time_s|bytes) to (\S+)=(\S+)", _time_to),
    (r"(\S+) at (time_s|bytes)=(\S+)", _at_budget),
    (r"area (\S+)", _area),
    (r"area (\S+) relative to (\S+)", _area),
)


def measures(
    runs: Sequence[Run],
    metrics: Sequence[str] = (),
    levels: Sequence[str] = (),
    budgets: Sequence[str] = (),
    area_of: str | None = None,
    relative_to: str | None = None,
) -> list[Measure]:
    """The measures requested on the command line: final ``metrics`` (default: those of all evaluation sets,
    time and traffic), ``levels`` as ``METRIC=LEVEL[,LEVEL...]``, ``budgets`` as ``bytes=N[,N...]`` or
    ``time_s=SECONDS[,...]``, and an area. BadInput for a metric that no run has recorded."""
    goals = _assigned("--time-to", levels, "METRIC=LEVEL[,LEVEL...], e.g. test_accuracy=0.5,0.6")
    limits = _assigned("--budget", budgets, "bytes=N[,N...] or time_s=SECONDS[,...]", _AXES)
    if relative_to is not None and area_of is None:
        raise BadInput(f"--relative-to {relative_to}: accepted: together with --area METRIC")
    requested = [("--metrics", metric) for metric in metrics] + [("--time-to", metric) for metric, _ in goals]
    for option, metric in (*requested, ("--area", area_of), ("--relative-to", relative_to)):
        if metric is not None:
            check_recorded(option, metric, runs)
    chosen = metrics or comparison_metrics(runs)
    timed = [("--time-to", metric) for metric, _ in goals]
    timed += [("--budget", metric) for metric in chosen if limits]
    for option, metric in timed:
        for run in runs:
            if metric in run.metrics.columns and run.metrics[metric].count():
                check_timed(run, metric, f"{option} {metric}")
    names = [*chosen] if metrics else [*chosen, *_AXES]
    names += [f"{axis} to {metric}={level}" for metric, level in goals for axis in _AXES]
    names += [f"{metric} at {axis}={budget}" for axis, budget in limits for metric in chosen]
    names += [] if area_of is None else [f"area {area_of}"]
    names += [] if relative_to is None else [f"area {area_of} relative to {relative_to}"]
    return [measure(name) for name in names]


def _assigned(
    option: str, texts: Iterable[str], accepted: str, names: Iterable[str] = ()
) -> list[tuple[str, float]]:
    """Parse ``NAME=NUMBER[,NUMBER...]`` from the command line; each name has to be one of ``names``, if given."""
    pairs = []
    for text in texts:
        name, _, values = text.partition("=")
        try:
            pairs += [(name, float(value)) for value in values.split(",")]
        except ValueError:
            name = ""
        if not name or (names and name not in names):
            raise BadInput(f"{option} {text}: accepted: {accepted}")
    return pairs


# --- comparisons


@dataclass(frozen=True)
class Comparison:
    """A comparison of groups by some measures.

    Attributes:
        rows: one per measure and group: ``group``, ``measure``, ``runs``, ``known`` (the runs that have the
            number), ``mean`` (null unless all runs have it, since the mean of the others would flatter the
            group), ``baseline``, and over ``pairs`` the mean ``difference`` and the ``ratio`` of the two
            means (null unless all runs of the baseline have the number). ``*_half`` are half the widths of 95
            % confidence intervals (null for one run; of ratios by linearization). ``resolution`` is the largest
            :class:`~gossamer.results.steps.Resolution` of the runs in seconds; ``coarse`` says which run is known to
            no better than a tenth of its time, and then there is neither a difference nor a ratio.
        remarks: what a reader has to know about these runs, in sentences.
    """

    rows: pl.DataFrame
    measures: tuple[Measure, ...]
    baseline: Baseline | None
    remarks: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """An explanation of the tables."""
        coarse = self.rows.filter(pl.col("coarse").is_not_null(), pl.col("mean").is_not_null())
        marked = coarse.unique(["group", "coarse"], maintain_order=True).select("group", "coarse").rows()
        lines = [_NOTE if self.baseline is None else _NOTE + _PAIRED, *self.remarks]
        if marked:
            lines += [_COARSELY, *(f"{_COARSE} {group}: {text}" for group, text in marked)]
        return "\n".join(lines)

    def tables(self) -> list[Table]:
        """The rows as text: one table for each title of the measures, with a line per group."""
        tables = []
        for title, same in groupby(self.measures, key=lambda measure: measure.table):
            columns: list[tuple[str, list[str]]] = []
            for measure in same:
                rows = self.rows.filter(measure=measure.name).to_dicts()
                if not columns:
                    columns.append(("group", [row["group"] for row in rows]))
                    columns.append(("runs", [f"{row['known']}/{row['runs']}" for row in rows]))
                columns.append((measure.column, [_text(measure, row, "mean") for row in rows]))
                if any(row["pairs"] for row in rows):
                    columns += [
                        (number, [_text(measure, row, number) for row in rows]) for number in measure.against
                    ]
            head, cells = zip(*columns, strict=True)
            against = f", against {self.baseline.title}" if self.baseline and "difference" in head else ""
            tables.append((title + against, list(head), [list(line) for line in zip(*cells, strict=True)]))
        return tables


def _text(measure: Measure, row: Mapping[str, Any], number: Number) -> str:
    text = measure.text(row[number], row[f"{number}_half"], number, row["mean"])
    if number == "mean" and row["coarse"] and row["mean"] is not None:
        text += _COARSE
    return f"+{text}" if number == "difference" and (row[number] or 0) > 0 else text


def compare(
    groups: Sequence[Group],
    measures: Sequence[Measure],
    baseline: Baseline | None = None,
    per: Sequence[str] = (),
) -> Comparison:
    """Compare groups by some measures, and in pairs with a baseline. The two runs of a pair have the same
    seed and the same point of the grid (such as graph and data), so the variation from these does not blur
    the difference. ``per`` lists axes of the grid (or "cell"): each row is then one of their values, over all
    points of the other axes. BadInput for an axis that no run has."""
    rows = []
    for measure in measures:
        values = {run: measure.of(run) for group in groups for run in group.samples}
        resolutions = {run: measure.resolution(run) for run in values}
        for label, members in _merged(groups, per).items():
            row = {"group": label, "measure": measure.name, "baseline": baseline and baseline.title}
            figures = _figures(members, values, baseline)
            rows.append(row | figures | _resolved(members, resolutions, baseline))
    remarks = _remarks(groups, measures)
    return Comparison(pl.DataFrame(rows, schema=COLUMNS), tuple(measures), baseline, remarks)


def _remarks(groups: Sequence[Group], measures: Sequence[Measure]) -> tuple[str, ...]:
    shown = []
    for group in groups:
        for run in group.samples:
            on_record, rounds = rounds_on_record(run)
            if run.every_s is not None and on_record < rounds:
                shown.append(f"{group.label}: {on_record:,} of {rounds:,} rounds on record")
                break
    remarks = [f"The time grid is coarser than the rounds. {'; '.join(shown)}."] if shown else []
    known = [{"network_bytes"} & {*run.metrics.columns} for group in groups for run in group.samples]
    if any(measure.resolution is not _exact and "bytes" in measure.name for measure in measures) and not all(
        known
    ):
        remarks.append(
            "Bytes of runs of older versions are those that their rows tell of: at least so many were sent."
        )
    return tuple(remarks)


def _resolved(
    members: Sequence[Group], resolutions: Mapping[Run, Resolution | None], baseline: Baseline | None
) -> dict[str, Any]:
    """The columns of one row about the resolution of its numbers. Where one is coarse, in the row or in its baseline,
    there is neither a difference nor a ratio."""
    others = [] if baseline is None else [baseline.groups.get(group.label) for group in members]
    own, bases = (
        [(run, known) for group in side if group for run in group.samples if (known := resolutions.get(run))]
        for side in (members, others)
    )
    row: dict[str, Any] = {"resolution": max((known.age_s for _, known in own), default=None)}
    if coarse := [(run, known) for run, known in own if known.coarse]:
        run, worst = max(coarse, key=lambda pair: pair[1].age_s)
        row["coarse"] = f"{worst} (seed {run.experiment.get('seed')})"
    if any(known.coarse for _, known in (*own, *bases)):
        row |= dict.fromkeys(("difference", "difference_half", "ratio", "ratio_half"))
    return row


def _merged(groups: Sequence[Group], per: Sequence[str]) -> dict[str, list[Group]]:
    """The groups of each row."""
    if not per:
        return {group.label: [group] for group in groups}
    known = list(dict.fromkeys(key for group in groups for key in group.labels))
    for axis in per:
        if axis not in known:
            problem = f"no axis of the sweep{suggest(axis, known)}; accepted: {listed(known)}"
            raise BadInput(f"--per {axis}: {problem}")
    axes = [key for key in dict.fromkeys((*per, "cell")) if key in known]
    merged: dict[str, list[Group]] = {}
    for group in groups:
        merged.setdefault(", ".join(part(key, group.labels.get(key)) for key in axes), []).append(group)
    return merged


def _figures(
    members: Sequence[Group], values: Mapping[Run, float | None], baseline: Baseline | None
) -> dict[str, Any]:
    """The columns of one row."""
    # A run shared by several cells counts once, and is paired with the mean of its partners.
    results = {run.path: values[run] for group in members for run in group.samples}
    known = [value for value in results.values() if value is not None]
    planned = sum(group.planned for group in members)
    row: dict[str, Any] = {"runs": max(planned, len(results)), "known": len(known), "pairs": 0}
    if len(known) < len(results):
        return row
    row |= _interval("mean", known)
    partners: dict[Path, list[float | None]] = {}
    for group in members:
        other = None if baseline is None else baseline.groups.get(group.label)
        if other is not None and other is not group:
            by_seed = {run.experiment.get("seed"): values[run] for run in other.samples}
            for run in group.samples:
                if (seed := run.experiment.get("seed")) in by_seed:
                    partners.setdefault(run.path, []).append(by_seed[seed])
    if not partners or any(None in others for others in partners.values()):
        return row
    pairs = [(results[path] or 0.0, fmean(map(float, others))) for path, others in partners.items()]  # type: ignore[arg-type]
    row |= {"pairs": len(pairs)} | _interval("difference", [value - reference for value, reference in pairs])
    if mean := fmean(reference for _, reference in pairs):
        ratio = fmean(value for value, _ in pairs) / mean
        row |= _interval("ratio", [(value - ratio * reference) / mean for value, reference in pairs])
        row["ratio"] = ratio
    return row


def _interval(name: str, values: Sequence[float]) -> dict[str, float | None]:
    interval = confidence(values)
    return {} if interval is None else {name: interval.mean, f"{name}_half": interval.half_width}
