"""Time to accuracy: how long groups of runs take to reach a level of a metric.

A run has reached a level at the first evaluation point at which the mean over the nodes is as good as the level. Only
complete points count, and nothing is interpolated, so a time is at most one evaluation step too long. Times are those
of the engine's clock (virtual under ``simulate``); traffic is what all nodes have sent by then.

Over the runs of a group, means have 95 % confidence intervals by Student's t. Where a run has not reached the level, no
mean is given: the mean over the others would flatter the group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any, NamedTuple

import polars as pl

from gossamer.errors import BadInput, listed, suggest
from gossamer.results.formatting import NOTHING, bytes_unit, is_share, metric_title
from gossamer.results.groups import Baseline, Group
from gossamer.results.tidy import all_metrics, confidence, final, lower_is_better

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


class Level(NamedTuple):
    """A level of a metric, reached from above where lower is better, and otherwise from below."""

    metric: str
    value: float


def parse_levels(texts: Iterable[str]) -> list[Level]:
    """Levels as the command line gives them: ``METRIC=LEVEL[,LEVEL...]`` each; anything else is bad input."""
    levels = []
    for text in texts:
        metric, separator, values = text.partition("=")
        try:
            numbers = [float(value) for value in values.split(",")]
        except ValueError:
            numbers = []
        if not (metric and separator and numbers) or not all(map(math.isfinite, numbers)):
            raise BadInput(f"--time-to {text}: accepted: METRIC=LEVEL[,LEVEL...], e.g. test_accuracy=0.5,0.6")
        levels += [Level(metric, number) for number in numbers]
    return levels


def time_to(
    groups: Sequence[Group], levels: Sequence[Level], baseline: Baseline | None = None
) -> pl.DataFrame:
    """How long every group takes to reach every level, and how long its baseline takes.

    Returns:
        A row per level and group: ``group``, ``metric``, ``level``, ``runs``, ``reached`` (runs that reached it),
        ``time_s`` and ``bytes`` until then (null unless all runs did), ``not_before_s`` (the shortest time for which a
        run is known not to have reached it), ``baseline``, ``speed`` (the baseline's mean time divided by the group's),
        ``speed_low`` and ``speed_high`` (the least and the largest ratio of two runs of one seed, where the seeds are the
        same) and ``final`` (at the last complete evaluation). ``*_half`` are half the widths of confidence intervals.

    Raises:
        BadInput: for a metric that no run has recorded.
    """
    known = all_metrics(run for group in groups for run in group.runs)
    rows: list[dict[str, Any]] = []
    for level in levels:
        if level.metric not in known:
            raise BadInput(
                f"--time-to {level.metric}: no run has recorded it{suggest(level.metric, known)}; accepted:"
                f" {listed(known)}"
            )
        reached = {group.label: _reached(group, level) for group in groups}
        for group in groups:
            other = None if baseline is None else baseline.groups.get(group.label)
            rows.append(_row(group, level, reached[group.label]) | _speed(group, other, reached))
    return pl.DataFrame(rows, schema=COLUMNS)


def _reached(group: Group, level: Level) -> pl.DataFrame:
    """A row per sample: ``time_s`` and ``bytes`` when it reached the level (null if never), and ``last_s``, until when
    it was watched."""
    mean, falling = pl.col("mean"), lower_is_better(level.metric)
    good = mean.is_not_nan() & (mean <= level.value if falling else mean >= level.value)
    samples = []
    for run in group.samples:
        curve = run.curves.filter(pl.col("metric") == level.metric, "complete").drop_nulls("time_s")
        there = curve.sort("time_s", "point").select(pl.col("time_s", "bytes").cast(pl.Float64), good=good)
        row: dict[str, Any] = next(there.filter("good").iter_rows(named=True), {})
        samples.append(
            {
                "time_s": row.get("time_s"),
                "bytes": row.get("bytes"),
                "last_s": there["time_s"].max() if len(there) else 0.0,
            }
        )
    return pl.DataFrame(samples, schema=dict.fromkeys(("time_s", "bytes", "last_s"), pl.Float64))


def _row(group: Group, level: Level, reached: pl.DataFrame) -> dict[str, Any]:
    row: dict[str, Any] = {
        "group": group.label,
        "metric": level.metric,
        "level": level.value,
        "runs": reached.height,
        "reached": reached["time_s"].count(),
        "not_before_s": reached.filter(pl.col("time_s").is_null())["last_s"].min(),
    }
    values = {name: reached[name].to_list() for name in ("time_s", "bytes") if not reached[name].null_count()}
    finals = [final(run, level.metric) for run in group.samples]
    values["final"] = [each.mean for each in finals if each is not None]
    for name, each in values.items():
        if (found := confidence(each)) is not None:
            row |= {name: found.mean, f"{name}_half": found.half_width}
    return row


def _speed(group: Group, baseline: Group | None, reached: Mapping[str, pl.DataFrame]) -> dict[str, Any]:
    if baseline is None:
        return {}
    row: dict[str, Any] = {"baseline": baseline.label}
    own, other = (reached[each.label]["time_s"].to_list() for each in (group, baseline))
    if None in own or None in other or not own or not sum(own):
        return row
    row["speed"] = fmean(other) / fmean(own)
    seeds, others = group.by_seed or {}, baseline.by_seed or {}
    # Runs of a group are in the order of their seeds, so those of one seed are in the same place.
    if len(own) > 1 and all(own) and seeds.keys() == others.keys() and seeds:
        ratios = [b / a for a, b in zip(own, other, strict=True)]
        row |= {"speed_low": min(ratios), "speed_high": max(ratios)}
    return row


# --- as text


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
    late = row["time_s"] is None
    time = (
        f"> {_digits(row['not_before_s'] or 0, '.4g')}"
        if late
        else interval_text(row["time_s"], row["time_s_half"])
    )
    sent = interval_text(row["bytes"], row["bytes_half"], *bytes_unit(row["bytes"] or 0), ".3g")
    form = ("%", 0.01, ".1f", ".1f") if is_share(row["metric"]) else ("", 1.0, ".3g")
    cells = [row["group"], f"{row['reached']}/{row['runs']}", time, sent]
    if compared:
        span = "" if row["speed_low"] is None else f" ({row['speed_low']:.3g} to {row['speed_high']:.3g})"
        speed = NOTHING if row["speed"] is None else f"{row['speed']:.3g}{span}"
        cells.insert(3, "1" if row["speed"] and row["group"] == row["baseline"] else speed)
    return [*cells, interval_text(row["final"], row["final_half"], *form)]


def interval_text(
    mean: float | None,
    half: float | None,
    unit: str = "",
    scale: float = 1.0,
    form: str = ".4g",
    half_form: str = ".2g",
) -> str:
    """A mean and half of its interval's width, divided by a scale, with their unit."""
    if mean is None:
        return NOTHING
    text = _digits(mean / scale, form) + ("" if half is None else f" ± {_digits(half / scale, half_form)}")
    return f"{text} {unit}".rstrip()


def _digits(value: float, form: str) -> str:
    """A number without a power of ten, such as 530 for 5.3e+02, unless it is huge."""
    text = f"{value:{form}}"
    return f"{float(text):.0f}" if "e+" in text and abs(value) < 1e9 else text
