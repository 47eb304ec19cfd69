"""Comparison of runs: groups of seeds, the baseline of each, their curves, and how long they take to reach a level.

A run has reached a level of a metric at the first complete evaluation point at which the mean over the nodes is as good.
Nothing is interpolated, so a time is at most one evaluation step too long. Times are those of the engine's clock; traffic is
what all nodes have sent by then. Means over the runs of a group have 95 % confidence intervals by Student's t.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from statistics import fmean
from typing import Any, NamedTuple

import polars as pl

from gossamer.errors import BadInput, listed, suggest
from gossamer.results.formatting import NOTHING, bytes_unit, is_share, metric_title
from gossamer.results.run import Run, cell_names, differing, flat, part, tell_apart
from gossamer.results.tidy import AXES, check_recorded, confidence, final, lower_is_better, student_t

_NOT_THE_EXPERIMENT = (
    *("name", "seed", "data_root", "evaluation.timeline", "checkpoint", "trackers"),
    *("engine.trainer", "engine.workers", "engine.threads", "engine.device"),
)
"""Fields that only name the draw, the location of data, what else is kept, and how it is computed."""

COLUMNS: dict[str, Any] = {
    "group": pl.String,
    "metric": pl.String,
    "level": pl.Float64,
    "runs": pl.Int64,
    "reached": pl.Int64,
    **dict.fromkeys(("time_s", "time_s_half", "bytes", "bytes_half", "not_before_s"), pl.Float64),
    "baseline": pl.String,
    **dict.fromkeys(("speed", "speed_low", "speed_high", "final", "final_half"), pl.Float64),
}

Table = tuple[str, list[str], list[list[str]]]
"""Title, head, rows."""


@dataclass(frozen=True)
class Group:
    """Runs of one experiment, by seed, with all that were repeated. ``label`` sets it apart from the other groups;
    ``labels`` are the parts of the name of a sweep's cell."""

    label: str
    runs: tuple[Run, ...]
    labels: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def samples(self) -> tuple[Run, ...]:
        """The runs that statistics are over, by seed. Of an experiment that was repeated with the same seed it is the newest
        run that is done, or else the newest: to count both would make the spread look too small."""
        newest: dict[str, Run] = {}
        for run in sorted(self.runs, key=lambda run: (run.status == "done", run.id)):
            newest[_key([run.cell, run.experiment.get("seed"), _chosen(run)])] = run
        return tuple(run for run in self.runs if run in newest.values())


def groups(runs: Sequence[Run], by: Sequence[str] = ()) -> list[Group]:
    """Group runs that differ only in their seed, their name, and how they were computed; or by some fields of the
    experiment (``algorithm.name``), where one that no run has is bad input. Runs of a sweep keep the names of its cells,
    without what all have in common."""
    known = list(dict.fromkeys(key for run in runs for key in flat(run.experiment)))
    for name in by:
        if not any(_within(key, [name]) for key in known):
            raise BadInput(
                f"--group-by {name}: no run has it{suggest(name, known)}; accepted: {listed(known)}"
            )
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(_key([None if by else run.cell, _chosen(run, by)]), []).append(run)
    first = [same[0] for same in alike.values()]
    names = [] if by else cell_names(first)
    if len(set(names)) < len(first):
        names = tell_apart([_chosen(run, by) for run in first])
        names = [
            text if names.count(text) == 1 else f"{text} #{number}" for number, text in enumerate(names, 1)
        ]
    if names == [""]:
        names = [" · ".join(dict.fromkeys(run.name for run in runs))]
    return [
        Group(name, tuple(sorted(same, key=_seed)), {} if by else same[0].labels)
        for name, same in zip(names, alike.values(), strict=True)
    ]


def several(among: Sequence[Group]) -> bool:
    """Whether a curve per group says more than one per run: there are several groups, and some have several samples."""
    return len(among) > 1 and any(len(group.samples) > 1 for group in among)


def group_curve(group: Group, y: str) -> pl.DataFrame:
    """A metric at the points that are complete in all samples of a group: the same round, the same instant of the time grid,
    or the end. Every run counts with its mean over the nodes.

    Returns:
        Columns ``point`` (0, 1, ...), the axes and ``mean`` (means over the runs), ``half`` (half the width of the 95 %
        confidence interval over the runs; null for one run) and ``count`` (runs).
    """
    tables = [run.curves.filter(pl.col("metric") == y) for run in group.samples]
    count = sum(not table.is_empty() for table in tables)
    width = student_t(count - 1) / math.sqrt(count) if count > 1 else None
    rows = pl.concat(
        table.filter("complete").select(
            pl.lit((run.experiment.get("evaluation") or {}).get("every_s") is not None).alias("on_grid"),
            *("instant", "mean"),
            pl.col(AXES).cast(pl.Float64),
        )
        for run, table in zip(group.samples, tables, strict=True)
    )
    return (
        rows.group_by("on_grid", "instant")
        .agg(pl.col(AXES).mean(), pl.col("mean").mean(), half=pl.col("mean").std() * width, count=pl.len())
        .filter(pl.col("count") == count)
        .sort("instant")
        .select(pl.int_range(pl.len()).alias("point"), *AXES, "mean", "half", "count")
    )


def _chosen(run: Run, by: Sequence[str] = ()) -> dict[str, Any]:
    """The fields by which a run is grouped."""
    fields = flat(run.experiment).items()
    return {
        key: value
        for key, value in fields
        if (_within(key, by) if by else not _within(key, _NOT_THE_EXPERIMENT))
    }


def _within(key: str, fields: Iterable[str]) -> bool:
    return any(key == field or key.startswith(f"{field}.") for field in fields)


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _seed(run: Run) -> tuple[bool, Any]:
    seed = run.experiment.get("seed")
    return (not isinstance(seed, int), seed if isinstance(seed, int) else 0)


class Baseline(NamedTuple):
    """The group that each group is compared with: by label; groups without one are left out."""

    title: str
    groups: Mapping[str, Group]


def find_baseline(name: str, among: Sequence[Group]) -> Baseline:
    """The baseline with a name: the label of a group, with which all are compared; or what several groups of a sweep have
    in common, an entry of ``cells`` or ``field=value`` of the grid, where each group is compared with the one of them that
    is like it in everything else. A name of no group, or of more than one, is bad input."""
    parts = {part(key, value): key for group in among for key, value in group.labels.items()}
    found = [group for group in among if group.label == name]
    if not found and name in parts:
        key = parts[name]
        found = [group for group in among if key in group.labels and part(key, group.labels[key]) == name]
        rest = {
            group.label: _key({other: value for other, value in group.labels.items() if other != key})
            for group in among
        }
        at = {rest[group.label]: group for group in found}
        if len(at) == len(found):
            others = [other for other in differing([g.labels for g in among if g.labels]) if other != key]
            title = name + (f" at the same {', '.join(others)}" if others else "")
            return Baseline(title, {label: at[point] for label, point in rest.items() if point in at})
    if len(found) == 1:
        return Baseline(name, {group.label: found[0] for group in among})
    known = list(dict.fromkeys([*(group.label for group in among), *parts]))
    raise BadInput(
        f"--baseline {name}: {f'{len(found)} groups are' if found else 'no group is'} called that"
        f"{'' if found else suggest(name, known)}; accepted: " + "; ".join(known)
    )


class Level(NamedTuple):
    """A level of a metric, reached from above where lower is better, and otherwise from below."""

    metric: str
    value: float


def parse_levels(texts: Iterable[str]) -> list[Level]:
    """Levels as the command line gives them: ``METRIC=LEVEL[,LEVEL...]`` each; anything else is bad input."""
    levels = []
    for text in texts:
        metric, _, values = text.partition("=")
        try:
            numbers = [float(value) for value in values.split(",")]
        except ValueError:
            numbers = [math.nan]
        if not metric or not all(map(math.isfinite, numbers)):
            raise BadInput(f"--time-to {text}: accepted: METRIC=LEVEL[,LEVEL...], e.g. test_accuracy=0.5,0.6")
        levels += [Level(metric, number) for number in numbers]
    return levels


def time_to(
    groups: Sequence[Group], levels: Sequence[Level], baseline: Baseline | None = None
) -> pl.DataFrame:
    """How long every group takes to reach every level, and how long its baseline takes. A metric that no run has recorded is
    bad input.

    Returns:
        A row per level and group: ``group``, ``metric``, ``level``, ``runs``, ``reached`` (runs that reached it), ``time_s``
        and ``bytes`` until then (null unless all runs did: the mean over the others would flatter the group),
        ``not_before_s`` (the shortest time for which a run is known not to have reached it), ``baseline``, ``speed`` (the
        baseline's mean time divided by the group's), ``speed_low`` and ``speed_high`` (the extremes of that ratio for two
        runs of one seed, where the seeds are the same) and ``final`` (at the last complete evaluation). ``*_half`` are half
        the widths of confidence intervals.
    """
    rows: list[dict[str, Any]] = []
    for level in levels:
        check_recorded("--time-to", level.metric, (run for group in groups for run in group.runs))
        reached = {group.label: [_reached(run, level) for run in group.samples] for group in groups}
        others = {} if baseline is None else baseline.groups
        rows += [_row(group, level, reached, others.get(group.label)) for group in groups]
    return pl.DataFrame(rows, schema=COLUMNS)


def _reached(run: Run, level: Level) -> tuple[float | None, float | None, float]:
    """When a run reached a level and what was sent by then, if it did; and until when it was watched."""
    mean = pl.col("mean")
    good = mean <= level.value if lower_is_better(level.metric) else mean >= level.value
    curve = run.curves.filter(pl.col("metric") == level.metric, "complete").drop_nulls("time_s")
    curve = curve.sort("time_s", "point")
    last_s: Any = curve["time_s"].max() or 0.0
    first = curve.filter(good & mean.is_not_nan()).select("time_s", "bytes").head(1)
    return *(first.rows() or [(None, None)])[0], last_s


def _row(group: Group, level: Level, reached: Mapping[str, Any], other: Group | None) -> dict[str, Any]:
    times_s, sent, last_s = zip(*reached[group.label], strict=True)
    late = [last for time_s, last in zip(times_s, last_s, strict=True) if time_s is None]
    row: dict[str, Any] = {
        "group": group.label,
        "metric": level.metric,
        "level": level.value,
        "runs": len(times_s),
        "reached": len(times_s) - len(late),
        "not_before_s": min(late, default=None),
        "baseline": other and other.label,
    }
    finals = [each.mean for run in group.samples if (each := final(run, level.metric)) is not None]
    for name, values in {"time_s": times_s, "bytes": sent, "final": finals}.items():
        if None not in values and (found := confidence(values)) is not None:
            row |= {name: found.mean, f"{name}_half": found.half_width}
    others_s: list[Any] = [each[0] for each in reached[other.label]] if other else [None]
    if late or None in others_s or not sum(times_s):
        return row
    row["speed"] = fmean(others_s) / fmean(times_s)
    if len(times_s) > 1 and all(times_s) and other and _paired(group, other):
        ratios = [theirs / own for own, theirs in zip(times_s, others_s, strict=True)]
        row |= {"speed_low": min(ratios), "speed_high": max(ratios)}
    return row


def _paired(one: Group, other: Group) -> bool:
    """Whether two groups have one sample each of the same seeds."""
    seeds, others = ([run.experiment.get("seed") for run in each.samples] for each in (one, other))
    return seeds == others and len(set(seeds)) == len(seeds)


_NOTE = (
    "Time: mean over the runs of the first evaluation point at which the mean over the nodes has reached the level (not"
    " interpolated) ± half of the 95 % confidence interval (Student's t). Where a run has not reached it, no mean is"
    " given, but the time until which it is known not to have. Of runs that were repeated with the same seed, the newest"
    " that is done counts."
)
_SPEED = (
    " Times as fast: the baseline's mean time divided by the group's, and the least and the largest ratio of two runs"
    " of one seed."
)


def note(baseline: str | None) -> str:
    """An explanation of the table."""
    return _NOTE if baseline is None else _NOTE + _SPEED


def tables(rows: pl.DataFrame, baseline: str | None = None) -> list[Table]:
    """One table per level, as text, from rows of :func:`time_to`; ``baseline`` is what groups are compared with."""
    found = []
    for level, each in groupby(rows.to_dicts(), key=lambda row: Level(row["metric"], row["level"])):
        title, head = level_text(level), ["", "reached", "time / s", "sent", "at the end"]
        if baseline is not None:
            title += f", against {baseline}"
            head.insert(3, "times as fast")
        found.append((title, head, [_line(row, baseline is not None) for row in each]))
    return found


def level_text(level: Level) -> str:
    """A level as text, e.g. "test accuracy ≥ 60 %"."""
    value = f"{100 * level.value:.4g} %" if is_share(level.metric) else f"{level.value:.4g}"
    return f"{metric_title(level.metric)} {'≤' if lower_is_better(level.metric) else '≥'} {value}"


def _line(row: Mapping[str, Any], compared: bool) -> list[str]:
    time = interval_text(row["time_s"], row["time_s_half"])
    if row["time_s"] is None:
        time = f"> {interval_text(row['not_before_s'] or 0, None)}"
    sent = interval_text(row["bytes"], row["bytes_half"], *bytes_unit(row["bytes"] or 0))
    form = ("%", 0.01) if is_share(row["metric"]) else ("", 1.0)
    cells = [row["group"], f"{row['reached']}/{row['runs']}", time, sent]
    if compared:
        span = "" if row["speed_low"] is None else f" ({row['speed_low']:.3g} to {row['speed_high']:.3g})"
        speed = NOTHING if row["speed"] is None else f"{row['speed']:.3g}{span}"
        cells.insert(3, "1" if row["speed"] and row["group"] == row["baseline"] else speed)
    return [*cells, interval_text(row["final"], row["final_half"], *form)]


def interval_text(mean: float | None, half: float | None, unit: str = "", scale: float = 1.0) -> str:
    """A mean and half of its interval's width, divided by a scale, with their unit."""
    if mean is None:
        return NOTHING
    digits = [(mean, ".4g")] + ([] if half is None else [(half, ".2g")])
    # (The outer format leaves out a power of ten, such as that of 5.3e+02.)
    text = " ± ".join(f"{float(f'{value / scale:{form}}'):g}" for value, form in digits)
    return f"{text} {unit}".rstrip()
