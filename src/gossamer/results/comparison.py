"""Comparison of groups of runs by quantities: metrics at the end or at a budget, time and bytes to reach a
level, areas under curves.

Times to a level and values at a budget are steps of :mod:`gossamer.results.steps`; nothing is interpolated. Each has a
resolution: how long before it the record last knows the model of some node. Where that is more than a tenth of the
time, the tables mark the number and show no difference or ratio. Times are on the engine's clock; traffic is the total
sent by all nodes until then.

Means over the seeds of a group have 95 % confidence intervals by Student's t. The seed is the unit: runs of
one seed that differ in something else, such as the graph, are averaged first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl

from gossamer.errors import BadInput, listed, suggest
from gossamer.fingerprint import files_of
from gossamer.results.finals import FinalValue, final, total, totals
from gossamer.results.folder import versions
from gossamer.results.formatting import (
    NOTHING,
    Table,
    beyond_rounding,
    bytes_text,
    bytes_unit,
    differing,
    flat,
    interval_text,
    is_share,
    metric_title,
    part,
    rounds_text,
    seconds_text,
    some,
    values_text,
)
from gossamer.results.groups import Baseline, Group, member_label
from gossamer.results.run_data import SHOWN, RunData
from gossamer.results.steps import Resolution, check_timed, steps_of
from gossamer.results.tidy import (
    check_recorded,
    class_columns,
    comparison_metrics,
    complete_curve,
    confidence,
    lower_is_better,
    mean_over_rounds,
    rounds_on_record,
)

Number = Literal["mean", "difference", "ratio"]
_COMPARED: tuple[Number, ...] = ("difference", "ratio")

COLUMNS: dict[str, Any] = {
    **dict.fromkeys(("group", "measure", "at", "baseline"), pl.String),
    **dict.fromkeys(("runs", "counted", "diverged", "known", "units", "pairs"), pl.Int64),
    **dict.fromkeys(
        ("mean", "mean_half", "difference", "difference_half", "ratio", "ratio_half"), pl.Float64
    ),
    **dict.fromkeys(("mean_values", "difference_values", "ratio_values"), pl.List(pl.Float64)),
    "resolution": pl.Float64,
    "coarse": pl.String,
}


_COARSE = "*"
"""The mark of a number that is only known to more than a tenth of its time."""


def _exact(run: RunData) -> Resolution | None:
    """The resolution of a number that does not depend on when nodes were evaluated."""


_COARSELY = (
    f"{_COARSE} Evaluations are too far apart: some node's evaluation before this instant is older than a tenth of the time,"
    " and its model may have changed since. So a level may have been reached earlier, a value at a budget may be another one,"
    " and no difference or ratio is shown. Evaluate more often (evaluation.every_rounds or every_s)."
)


class Quantity(NamedTuple):
    """A quantity by which groups are compared: ``of`` returns its number for a run, or None if the run has none, such
    as a time to a level that it has not reached. ``table`` and ``column`` are titles. ``unit`` is "share",
    "bytes", or the suffix of the texts. ``against`` lists the comparisons with the baseline to show. ``resolution``
    says how exactly the number of a run is known; None if it does not depend on when nodes were evaluated.
    ``having`` says in a table what some runs have not done. ``final`` returns the final value whose mean the
    number is. ``among`` returns the quantity for runs that are compared with each other, if it depends on what
    all of them have recorded."""

    name: str
    table: str
    column: str
    unit: str
    of: Callable[[RunData], float | None]
    against: Sequence[Number] = ("difference",)
    resolution: Callable[[RunData], Resolution | None] = _exact
    having: str = "have it"
    final: Callable[[RunData], FinalValue | None] | None = None
    among: Callable[[Sequence[RunData]], Quantity] | None = None

    def text(
        self,
        value: float | None,
        half: float | None,
        number: Number = "mean",
        size: float | None = None,
        values: Sequence[float] = (),
    ) -> str:
        """A number and half the width of its interval as text or, without an interval, the ``values`` of which it
        is the mean. For bytes, ``size`` determines the unit."""
        unit, scale = self.unit, 1.0
        if number == "ratio":
            unit = ""
        elif self.unit == "share":
            unit, scale = "points" if number == "difference" else "%", 0.01
        elif self.unit == "bytes":
            unit, scale = bytes_unit(abs(size or value or 0.0))
        signed = number == "difference"
        if value is not None and half is None and len(values) > 1:
            return values_text(values, unit, scale, signed=signed)
        text = interval_text(value, half, unit, scale)
        return f"+{text}" if signed and (value or 0.0) > 0 else text


# --- quantities


def quantity(text: str) -> Quantity:
    """The quantity with this name. ValueError for an unknown one.

    ``METRIC`` is the value at the end; ``time_s`` and ``bytes`` are totals of the whole
    run. ``time_s to METRIC=LEVEL`` is the time until the mean over the nodes reaches a level; ``bytes to
    METRIC=LEVEL`` is the total sent by all nodes until then. ``METRIC at bytes=N`` and ``METRIC at
    time_s=SECONDS`` are values at the last step of :meth:`Run.steps` within a budget, only for runs that have used
    it up, since others might have improved further. ``area METRIC`` is the area under the curve over
    the rounds that all compared runs have recorded, divided by their number; ``area METRIC
    relative to OTHER`` is its relative difference from that of another metric of the same run, over the
    rounds that both have."""
    for form, make in _FORMS:
        if (match := re.fullmatch(form, text)) is not None:
            return make(*match.groups())
    raise ValueError("METRIC, time_s, bytes, 'time_s to METRIC=LEVEL', or 'METRIC at bytes=N'")


def _final(metric: str, classes: Container[str] = ()) -> Quantity:
    def number(run: RunData) -> float | None:
        value = final(run, metric)
        return None if value is None else value.mean

    value = partial(final, name=metric)
    return Quantity(metric, "at the end", metric_title(metric), _unit(metric, classes), number, final=value)


def _area(metric: str, other: str | None = None, classes: Container[str] = ()) -> Quantity:
    def among(runs: Sequence[RunData]) -> Quantity:
        span = _common_rounds(runs, [metric] if other is None else [metric, other])

        def number(run: RunData) -> float | None:
            value = None if span is None else _mean_over(run, metric, *span)
            if value is None or span is None or other is None:
                return value
            reference = _mean_over(run, other, *span)
            return value / reference - 1 if reference else None

        rounds = (
            "over no rounds, since the runs have none in common"
            if span is None
            else "over rounds {:.4g} to {:.4g}".format(*span)
        )
        return Quantity(name, f"area under {metric_title(metric)}, {rounds}", column, unit, number, against)

    def alone(run: RunData) -> float | None:
        return among([run]).of(run)

    name, column, unit, against = f"area {metric}", "area / rounds", _unit(metric, classes), _COMPARED
    if other is not None:
        name, column, unit, against = (
            f"{name} relative to {other}",
            f"relative to {metric_title(other)}",
            "share",
            ("difference",),
        )
    return Quantity(name, f"area under {metric_title(metric)}", column, unit, alone, against, among=among)


def _common_rounds(runs: Sequence[RunData], metrics: Sequence[str]) -> tuple[float, float] | None:
    """The first and the last round that all curves of some metrics cover, for the runs that have them; None if
    these are less than two rounds."""
    covered = [complete_curve(run, metric)["round"].drop_nulls() for run in runs for metric in metrics]
    ends = [(float(rounds.min()), float(rounds.max())) for rounds in covered if len(rounds)]  # type: ignore[arg-type]
    first, last = (max(low for low, _ in ends), min(high for _, high in ends)) if ends else (0.0, 0.0)
    return (first, last) if first < last else None


def _mean_over(run: RunData, metric: str, first: float, last: float) -> float | None:
    """The mean of a curve, linear between its points, from one round to another; None if it does not cover
    them."""
    curve = complete_curve(run, metric).drop_nulls("round").sort("round", "point")
    rounds, values = curve["round"].to_numpy(), curve["mean"].to_numpy()
    if not len(rounds) or first < rounds[0] or last > rounds[-1]:
        return None
    inside = (first < rounds) & (rounds < last)
    at_ends = np.interp((first, last), rounds, values)
    return mean_over_rounds(
        np.array([first, *rounds[inside], last]), np.array([at_ends[0], *values[inside], at_ends[1]])
    )


def _total(axis: str) -> Quantity:
    return Quantity(axis, "at the end", *_AXES[axis], partial(total, axis=axis), ())


def _time_to(axis: str, metric: str, number: str, classes: Container[str] = ()) -> Quantity:
    def first(run: RunData) -> dict[str, Any] | None:
        steps = steps_of(run, metric)
        index = None if steps is None else steps.first(level)
        return None if steps is None or index is None else steps.table.row(index, named=True)

    def position(run: RunData) -> float | None:
        step = first(run)
        return None if step is None else step[axis]

    def resolution(run: RunData) -> Resolution | None:
        steps, step = steps_of(run, metric), first(run)
        return None if steps is None or step is None else steps.before(step["time_s"])

    level, low = float(number), lower_is_better(metric, classes)
    text = f"{100 * level:.4g} %" if is_share(metric, classes) else f"{level:.4g}"
    title = f"{metric_title(metric)} {'≤' if low else '≥'} {text}"
    name = f"{axis} to {metric}={level:g}"
    return Quantity(name, title, *_AXES[axis], position, _COMPARED, resolution, having="reached it")


def _at_budget(metric: str, axis: str, number: str, classes: Container[str] = ()) -> Quantity:
    def within(run: RunData) -> dict[str, Any] | None:
        steps = steps_of(run, metric)
        if steps is None or (total(run, axis) or 0.0) < budget:
            return None
        inside = steps.table.filter(pl.col(axis) <= budget)
        return inside.row(-1, named=True) if inside.height else None

    def value(run: RunData) -> float | None:
        step = within(run)
        return None if step is None else step["mean"]

    def resolution(run: RunData) -> Resolution | None:
        steps = steps_of(run, metric)
        if steps is None or within(run) is None:
            return None
        return steps.until(budget) if axis == "time_s" else steps.within_bytes(budget)

    budget = float(number)
    title = f"at {bytes_text(budget) if axis == 'bytes' else seconds_text(budget)}"
    name = f"{metric} at {axis}={budget:g}"
    column, unit = metric_title(metric), _unit(metric, classes)
    return Quantity(name, title, column, unit, value, resolution=resolution, having="used it up")


def _unit(metric: str, classes: Container[str]) -> str:
    return "share" if is_share(metric, classes) else ""


_AXES = {"time_s": ("time", "s"), "bytes": ("sent", "bytes")}
"""The title and the unit of each axis of a curve."""
_FORMS: tuple[tuple[str, Callable[..., Quantity]], ...] = (
    (r"(time_s|bytes)", _total),
    (r"(\S+)", _final),
    (r"(time_s|bytes) to (\S+)=(\S+)", _time_to),
    (r"(\S+) at (time_s|bytes)=(\S+)", _at_budget),
    (r"area (\S+)", _area),
    (r"area (\S+) relative to (\S+)", _area),
)


def quantities(
    runs: Sequence[RunData],
    metrics: Sequence[str] = (),
    levels: Sequence[str] = (),
    budgets: Sequence[str] = (),
    area_of: str | None = None,
    relative_to: str | None = None,
) -> list[Quantity]:
    """The quantities requested on the command line: final ``metrics`` (default: those of all evaluation sets,
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
    # Classes are not recognised by names, since a metric of an older record may have any name.
    classes = class_columns(runs)
    made = [*(_final(metric, classes) for metric in chosen), *(() if metrics else map(_total, _AXES))]
    made += [_time_to(axis, metric, str(level), classes) for metric, level in goals for axis in _AXES]
    made += [_at_budget(metric, axis, str(budget), classes) for axis, budget in limits for metric in chosen]
    made += [] if area_of is None else [_area(area_of, classes=classes)]
    made += [] if area_of is None or relative_to is None else [_area(area_of, relative_to, classes)]
    return made


def _assigned(
    option: str, texts: Iterable[str], accepted: str, names: Iterable[str] = ()
) -> list[tuple[str, float]]:
    """Parse ``NAME=NUMBER[,NUMBER...]`` from the command line; each name has to be one of ``names``, if given."""
    pairs = []
    for text in texts:
        name, _, values = text.rpartition("=")
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
    """A comparison of groups by some quantities.

    Attributes:
        rows: one per quantity and group.

            ``group``, ``measure``, ``baseline``: names. ``at``: the round of a final metric that was recorded
            only until then, or the rounds of an area.

            ``runs``: planned or begun, one for each seed. ``counted``: those that are done (or, on request,
            unfinished). ``diverged``. ``known``: the counted ones that have the number. ``units``: the seeds
            (or values of another axis) that have all points of the grid that the row covers. ``pairs``: those
            that have them in the baseline too.

            ``mean``: over the units, of means over a unit's points. It is null if a run diverged or a counted
            run lacks the number, since the mean of the others would flatter the group. ``difference``: the mean
            over the pairs. ``ratio``: of the two means over the pairs. ``*_half``: half the widths of 95 %
            confidence intervals over the units (of ratios by linearization); null below three. ``*_values``: the
            numbers of single units.

            ``resolution``: the largest :class:`~gossamer.results.steps.Resolution` of the runs, in seconds.
            ``coarse`` says which run is known to no better than a tenth of its time; then there is neither a
            difference nor a ratio.
        unit: "seed", or the axis whose values are the units.
        notes: sentences that explain the rows.
    """

    rows: pl.DataFrame
    quantities: tuple[Quantity, ...]
    baseline: Baseline | None
    unit: str = "seed"
    notes: tuple[str, ...] = ()

    def tables(self) -> list[Table]:
        """The rows as text: one table for each title of the quantities, with a line per group."""
        tables = []
        for title, same in groupby(self.quantities, key=lambda quantity: quantity.table):
            numbers = {quantity: self.rows.filter(measure=quantity.name).to_dicts() for quantity in same}
            first = next(iter(numbers.values()))
            pairs = [max(row["pairs"] for row in line) for line in zip(*numbers.values(), strict=True)]
            columns: list[tuple[str, list[str]]] = [
                ("group", [row["group"] for row in first]),
                ("runs", [f"{row['counted']}/{row['runs']}" for row in first]),
                ("seeds" if self.unit == "seed" else self.unit, [str(row["units"]) for row in first]),
            ]
            if any(pairs):
                columns.append(("pairs", [str(count) if count else NOTHING for count in pairs]))
            for quantity, rows in numbers.items():
                columns.append((quantity.column, [_text(quantity, row, "mean") for row in rows]))
                if any(row["pairs"] for row in rows):
                    columns += [
                        (number, [_text(quantity, row, number) for row in rows])
                        for number in quantity.against
                    ]
            head, cells = zip(*columns, strict=True)
            against = f", against {self.baseline.title}" if self.baseline and "difference" in head else ""
            tables.append((title + against, list(head), [list(line) for line in zip(*cells, strict=True)]))
        return tables


def _text(quantity: Quantity, row: Mapping[str, Any], number: Number) -> str:
    if number == "mean" and row["diverged"]:
        return f"{row['diverged']} of {row['runs']} diverged"
    if number == "mean" and row["known"] < row["counted"]:
        return f"{row['known']} of {row['counted']} {quantity.having}"
    values = row[f"{number}_values"] or ()
    text = quantity.text(row[number], row[f"{number}_half"], number, row["mean"], values)
    if number != "mean" or row["mean"] is None:
        return text
    marked = text + _COARSE if row["coarse"] else text
    return f"{marked} {row['at']}" if row["at"] else marked


def compare(
    groups: Sequence[Group],
    quantities: Sequence[Quantity],
    baseline: Baseline | None = None,
    per: Sequence[str] = (),
    unit: str = "seed",
) -> Comparison:
    """Compare groups by some quantities, and in pairs with a baseline.

    The unit of the statistics is the seed: what a row covers is averaged within a seed, and intervals are over
    the seeds. Runs of one seed at several points of the grid are not independent, since a seed determines
    data, graph and first model of all of them. The two members of a pair have the same seed and the same
    points of the grid.

    Args:
        groups: the groups of runs.
        quantities: what is compared.
        baseline: the groups with which they are compared.
        per: axes of the grid (or "cell"): each row is then one of their values, over all points of the other
            axes.
        unit: an axis whose values are the units in place of seeds, such as files of random graphs. Rows are
            then over all its values, and seeds are averaged within each.

    Raises:
        BadInput: for an axis that no run has."""
    lines = [
        _Line.of(label, members, baseline, unit)
        for label, members in _merged(groups, per, baseline, unit).items()
    ]
    compared = [run for group in groups for run in _counted(group)]
    quantities = [quantity if quantity.among is None else quantity.among(compared) for quantity in quantities]
    rows, over = [], dict[str, list[str]]()
    for quantity in quantities:
        values = {run: quantity.of(run) for run in compared}
        finals = {} if quantity.final is None else {run: quantity.final(run) for run in compared}
        resolutions = {run: quantity.resolution(run) for run in compared}
        for line in lines:
            known = [value for run in line.counted if (value := finals.get(run)) is not None]
            row = {"group": line.label, "measure": quantity.name, "at": _rounds(known)}
            row |= {"baseline": baseline and baseline.title}
            rows.append(row | line.figures(values) | _resolved(line, resolutions))
            partly = {value.over for value in known if value.nodes is not None and value.count < value.nodes}
            for nodes in sorted(partly):
                over.setdefault(nodes, []).append(line.label)
    table = pl.DataFrame(rows, schema=COLUMNS)
    notes = [*_explained(lines, baseline, unit), *_remarks(groups, quantities)]
    for nodes, labels in over.items():
        labels = list(dict.fromkeys(labels))
        notes.append(f"Values {'' if len(labels) == len(lines) else f'of {some(labels)} '}are means {nodes}.")
    notes += [text for line in lines for text in line.incomplete(baseline, unit)]
    notes += _coarsely(table)
    return Comparison(table, tuple(quantities), baseline, unit, tuple(notes))


def _resolved(line: _Line, resolutions: Mapping[RunData, Resolution | None]) -> dict[str, Any]:
    """The columns of one row about the resolution of its numbers. Where one is coarse, in the row or in its baseline,
    there is neither a difference nor a ratio."""
    own = [(run, known) for run in line.counted if (known := resolutions.get(run))]
    partners = [
        known for at in line.partners.values() for run in at.values() if (known := resolutions.get(run))
    ]
    row: dict[str, Any] = {"resolution": max((known.age_s for _, known in own), default=None)}
    if coarse := [(run, known) for run, known in own if known.coarse]:
        run, worst = max(coarse, key=lambda pair: pair[1].age_s)
        row["coarse"] = f"{worst} (seed {run.experiment.get('seed')})"
    if coarse or any(known.coarse for known in partners):
        row |= {f"{number}{what}": None for number in _COMPARED for what in ("", "_half", "_values")}
    return row


def _coarsely(rows: pl.DataFrame) -> list[str]:
    """An explanation of the marks, and the runs to which they belong."""
    coarse = rows.filter(pl.col("coarse").is_not_null(), pl.col("mean").is_not_null())
    marked = coarse.unique(["group", "coarse"], maintain_order=True).select("group", "coarse").rows()
    return [_COARSELY, *(f"{_COARSE} {group}: {text}." for group, text in marked)] if marked else []


def _rounds(values: Sequence[FinalValue]) -> str | None:
    """The rounds of final values that were recorded only until then."""
    early = [value for value in values if value.early]
    if not early:
        return None
    least, most = min(value.round_least for value in early), max(value.round_most for value in early)
    return f"at {rounds_text(least, most)}"


def _merged(
    groups: Sequence[Group], per: Sequence[str], baseline: Baseline | None, unit: str
) -> dict[str, list[Group]]:
    """The groups of each row."""
    known = list(dict.fromkeys(key for group in groups for key in group.labels))
    for option, axis in (*(("--per", axis) for axis in per), ("--unit", unit)):
        if axis not in known and (option, axis) != ("--unit", "seed"):
            accepted = known if option == "--per" else ["seed", *known]
            problem = f"no axis of the sweep{suggest(axis, accepted)}; accepted: {listed(accepted)}"
            raise BadInput(f"{option} {axis}: {problem}")
    against = None if baseline is None else baseline.key
    if unit in per or unit == against:
        named = "--per" if unit in per else "--baseline"
        raise BadInput(f"--unit {unit}: {named} names it too; accepted: another axis, or seed")
    if not per and unit == "seed":
        return {group.label: [group] for group in groups}
    if per:
        axes = [key for key in dict.fromkeys((*per, "cell", against)) if key in known]
    else:
        axes = [key for key in differing([group.labels for group in groups]) if key != unit]
    merged: dict[str, list[Group]] = {}
    for group in groups:
        label = ", ".join(part(key, group.labels.get(key)) for key in axes) or "all"
        merged.setdefault(label, []).append(group)
    return merged


def _counted(group: Group) -> list[RunData]:
    return [run for run in group.samples if run not in group.diverged]


_ByUnit = Mapping[str, Mapping[str, RunData]]
"""Runs by unit, such as "seed 3", and by the point of the grid."""


@dataclass(frozen=True)
class _Line:
    """A line of the tables: the runs of some groups, and those of their baselines at the same units and
    points, without those that diverged. ``points`` are all points of the grid that the line covers.
    ``against`` are the baselines, unless the line is its own."""

    label: str
    members: Sequence[Group]
    points: frozenset[str]
    runs: _ByUnit
    partners: _ByUnit
    against: Sequence[Group]

    @classmethod
    def of(cls, label: str, members: Sequence[Group], baseline: Baseline | None, unit: str) -> _Line:
        """The line of some groups."""

        def placed(group: Group, run: RunData) -> tuple[str, str]:
            seed = f"seed {run.experiment.get('seed')}"
            if unit == "seed":
                return seed, group.label
            others = [part(*item) for item in group.labels.items() if item[0] != unit]
            return part(unit, group.labels.get(unit)), ", ".join((*others, seed))

        def by_unit(pairs: Iterable[tuple[Group, Group | None]]) -> _ByUnit:
            found: dict[str, dict[str, RunData]] = {}
            for group, source in pairs:
                for run in () if source is None else _counted(source):
                    name, point = placed(group, run)
                    if point in found.setdefault(name, {}):
                        raise BadInput(f"--unit {unit}: {name} has several runs at {point}; accepted: one")
                    found[name][point] = run
            return found

        others = [
            (group, None if baseline is None else baseline.groups.get(group.label)) for group in members
        ]
        points = {placed(group, run)[1] for group in members for run in group.runs}
        if unit == "seed":
            points = {group.label for group in members}
        itself = all(other is group or other is None for group, other in others)
        against = () if itself else tuple(other for _, other in others if other is not None)
        return cls(
            label,
            members,
            frozenset(points),
            by_unit((group, group) for group in members),
            by_unit(others),
            against,
        )

    @property
    def counted(self) -> list[RunData]:
        """The runs that count, without those that diverged."""
        return [run for group in self.members for run in _counted(group)]

    def _complete(self, runs: _ByUnit) -> list[str]:
        return [unit for unit, at in runs.items() if self.points <= at.keys()]

    def figures(self, values: Mapping[RunData, float | None]) -> dict[str, Any]:
        """The columns of a row, from each run's number."""
        counted = self.counted
        units = self._complete(self.runs)
        row: dict[str, Any] = {
            "runs": sum(group.size for group in self.members),
            "counted": len(counted),
            "diverged": sum(len(group.diverged) for group in self.members),
            "known": sum(values[run] is not None for run in counted),
            "units": len(units),
            "pairs": 0,
        }
        if row["diverged"] or row["known"] < row["counted"]:
            return row
        means = self._means(self.runs, units, values)
        row |= _interval("mean", list(means.values()))
        partners = [run for at in self.partners.values() for run in at.values()]
        lacking = any(values.get(run) is None for run in partners)
        if lacking or not self.against or any(group.diverged for group in self.against):
            return row
        paired = [unit for unit in self._complete(self.partners) if unit in means]
        references = self._means(self.partners, paired, values)
        pairs = [(means[unit], references[unit]) for unit in paired]
        # What differs by rounding is equal: a tie must not become a difference.
        pairs = [(value, other if beyond_rounding(value - other, value) else value) for value, other in pairs]
        row |= {"pairs": len(pairs)} | _interval("difference", [value - other for value, other in pairs])
        if pairs and (mean := fmean(other for _, other in pairs)):
            ratio = fmean(value for value, _ in pairs) / mean
            row |= _interval("ratio", [(value - ratio * other) / mean for value, other in pairs])
            half = row["ratio_half"]
            row |= {"ratio": ratio, "ratio_half": half if half is None else beyond_rounding(half, ratio)}
            row["ratio_values"] = [value / other if other else math.nan for value, other in pairs]
        return row

    def _means(
        self, runs: _ByUnit, units: Iterable[str], values: Mapping[RunData, float | None]
    ) -> dict[str, float]:
        """Each unit's mean over the points."""
        return {unit: fmean(float(values[runs[unit][at]] or 0.0) for at in self.points) for unit in units}

    def incomplete(self, baseline: Baseline | None, unit: str) -> Iterator[str]:
        """Sentences that name the units that are left out."""
        units = self._complete(self.runs)
        for name in self.runs.keys() - {*units}:
            lacking = some(sorted(self.points - self.runs[name].keys()))
            yield f"{self.label}: {name} is left out: it lacks {lacking}."
        if self.against and baseline is not None:
            unpaired = [name for name in units if name not in self._complete(self.partners)]
            if unpaired:
                yield (
                    f"{self.label}: differences and ratios are without {some(unpaired)}, since not all runs of"
                    f" {baseline.title} that would be their partners are there."
                )


def _interval(name: str, values: Sequence[float]) -> dict[str, Any]:
    interval = confidence(values)
    if interval is None:
        return {}
    return {name: interval.mean, f"{name}_half": interval.half_width, f"{name}_values": list(values)}


# --- what the tables say about themselves


def _explained(lines: Sequence[_Line], baseline: Baseline | None, unit: str) -> list[str]:
    """Sentences on how the numbers are computed."""
    units = "seeds" if unit == "seed" else f"values of {unit}"
    texts = [
        f"Means over {units} ± half of the 95 % confidence interval (Student's t); below three, single values."
        " Accuracies and losses of a run are means over its evaluated nodes, each with its own model."
        " Only runs that are done count, and of each seed the newest. A mean is shown if each of them has a value"
        " and no run diverged."
    ]
    averaged = dict.fromkeys(
        key for line in lines for key in differing([group.labels for group in line.members]) if key != unit
    )
    names = [*averaged] + (["seed"] if unit != "seed" else [])
    if names:
        texts.append(
            f"The runs of one {unit} are averaged over {some(names)} first. Intervals are for these values of"
            f" {some(names)}, not for others."
        )
    if baseline is not None and any(line.against for line in lines):
        texts.append(
            f"Differences and ratios are of pairs with the same {unit}, so variation that it causes in both members"
            " of a pair cancels out."
        )
    return texts


def _remarks(groups: Sequence[Group], quantities: Sequence[Quantity]) -> Iterator[str]:
    """Sentences that a reader needs beside the numbers: which runs do not count, on which samples they were evaluated, and
    whether they differ in something that is not part of the experiment."""
    left_out = [member_label(group, run) for group in groups for run in group.left_out]
    if left_out:
        yield f"Not counted: {some(left_out)}."
    ended = [
        member_label(group, run)
        for group in groups
        for run in group.samples
        if run.status not in ("done", "diverged")
    ]
    if ended:
        yield f"Counted, though not done: {some(ended)}."
    diverged = [
        f"{group.label}, seed {run.experiment.get('seed')}" for group in groups for run in group.diverged
    ]
    if diverged:
        yield f"Diverged: {some(diverged)}."
    for of, text in SHOWN.items():
        labels = [group.label for group in groups if of in {run.shown for run in group.samples}]
        if labels:
            yield f"Values {'' if len(labels) == len(groups) else f'of {some(labels)} '}are {text}."
    unmixed = [
        group.label
        for group in groups
        if any(run.shown == "round" and run.setup.get("ends_with_steps") for run in group.samples)
    ]
    if unmixed:
        yield (
            f"Rounds of {some(unmixed)} end with local steps that are not mixed yet; with evaluation.of: mixed, records show"
            " the last mixing."
        )
    on_grid = [rounds_on_record(run) for group in groups for run in group.samples if run.every_s is not None]
    if coarser := [shown / rounds for shown, rounds in on_grid if shown < rounds]:
        least, most = (f"{100 * share:.0f}" for share in (min(coarser), max(coarser)))
        yield (
            "The time grid is coarser than the rounds:"
            f" {least if least == most else f'{least} to {most}'} % of the rounds are on record."
        )
    axes = {axis for quantity in quantities for axis in _AXES if axis in re.split("[ =]", quantity.name)}
    clocks = {run.virtual for group in groups for run in group.samples}
    if "time_s" in axes and clocks:
        virtual, wall = "virtual, on the clock of the simulation", "on the wall clock"
        yield f"Times are {' or '.join([virtual] * (True in clocks) + [wall] * (False in clocks))}."
    if "bytes" in axes:
        yield "Bytes sent are those of all nodes together."
        partial = [group.label for group in groups if not all(map(_counts_bytes, group.samples))]
        if partial:
            of = "" if len(partial) == len(groups) else f" of {some(partial)}"
            yield f"Bytes{of} are those on record: at least so many were sent."
    yield from evaluation_texts(groups, [quantity.name for quantity in quantities])
    for group in groups:
        for what, values in _origins(group.samples).items():
            if len(values) > 1:
                texts = [f"{value} ({_seeds(values[value])})" for value in sorted(values)]
                yield f"{group.label}: its runs are of {what} {some(texts)}."
    for parts, names in _apart(groups).items():
        yield f"Not the same in all groups: {some(names)} ({'; '.join(some(labels) for labels in parts)})."


def _counts_bytes(run: RunData) -> bool:
    """Whether the record has all bytes of a run, at its end and at every instant before."""
    return bool(totals(run)["exact"]) and run.metrics["network_bytes"].count() > 0


def evaluation_texts(groups: Sequence[Group], metrics: Iterable[str]) -> Iterator[str]:
    """The number of samples of each evaluation set that some metrics are of, such as "test set: 1,000 of
    10,000 samples.", with the groups if these differ."""
    labels: dict[tuple[str, str], list[str]] = {}
    metrics = list(metrics)
    for group in groups:
        for run in group.samples:
            for name, text in run.evaluation_samples.items():
                if any(re.search(rf"(^|\s){re.escape(name)}_", metric) for metric in metrics):
                    labels.setdefault((name, text), []).append(group.label)
    texts = {(name, text): list(dict.fromkeys(of)) for (name, text), of in labels.items()}
    for (name, text), of in texts.items():
        several = sum(name == other for other, _ in texts) > 1
        yield f"{name} set{f' of {some(of)}' if several else ''}: {text}."


def _origins(runs: Iterable[RunData]) -> dict[str, dict[str, list[RunData]]]:
    """What may affect results and is not part of an experiment: versions, machines, own modules and data, by kind and
    value, with the runs that have it. A run that was resumed may have several values."""
    found: dict[str, dict[str, list[RunData]]] = {}
    for run in runs:
        for environment in (run.environment, *run.environment.get("resumed", [])):
            origins = {**versions(environment), "machine": environment.get("machine", {}).get("host")}
            if (recorded := environment.get("fingerprint")) is not None:
                hashes = {f"module {name}": hash_ for name, hash_ in recorded["code"].items()}
                hashes |= files_of(recorded["data"])
                origins |= {name: hash_[:8] for name, hash_ in hashes.items()}
            for what, value in origins.items():
                if value is not None and run not in (of := found.setdefault(what, {}).setdefault(value, [])):
                    of.append(run)
    return found


def _apart(groups: Sequence[Group]) -> dict[tuple[tuple[str, ...], ...], list[str]]:
    """The own modules and the data that differ between groups, by the groups that have them in common. Files of a field are
    compared where the experiments give the field the same value."""
    found: dict[tuple[str, Any], dict[str, dict[str, None]]] = {}
    for group in groups:
        for run in group.samples:
            fields = {**flat(run.experiment), "data_root": None}  # data may be at another place
            for environment in (run.environment, *run.environment.get("resumed", [])):
                if (recorded := environment.get("fingerprint")) is None:
                    continue
                hashes = {(f"module {name}", ""): hash_ for name, hash_ in recorded["code"].items()}
                for entry in recorded["data"]:
                    value = repr(fields.get(entry["of"]))
                    hashes |= {(name, value): hash_ for name, hash_ in files_of([entry]).items()}
                for key, hash_ in hashes.items():
                    found.setdefault(key, {}).setdefault(hash_, {})[group.label] = None
    apart: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for (name, _), labels in found.items():
        if len(parts := tuple(dict.fromkeys(map(tuple, labels.values())))) > 1:
            apart.setdefault(parts, []).append(name)
    return apart


def _seeds(runs: Sequence[RunData]) -> str:
    seeds = [str(run.experiment.get("seed")) for run in runs]
    return f"seed{'s' * (len(seeds) > 1)} {some(seeds)}"
