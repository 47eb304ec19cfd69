"""Time to accuracy: how long groups of runs take to a level of a metric.

A run has reached a level at the first evaluation point at which the mean over the nodes is as good as the level. Only
points count at which all nodes are recorded that are still there; nothing is interpolated, so a time is at most one step
of the evaluation grid too long. Times are those of the engine's clock (virtual under ``simulate``), traffic is what
all nodes have sent until then.

Over the runs of a group (its seeds; of a run that was repeated with the same seed the newest that is done) means have
95 % confidence intervals by Student's t. Where a run has not reached the level, the mean over the others would flatter
the group, and none is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import polars as pl

from gossamer.errors import BadInput, listed, suggest
from gossamer.results.baseline import Baseline
from gossamer.results.confidence import Interval, confidence
from gossamer.results.frames import complete, final, lower_is_better, metric_names, summary
from gossamer.results.groups import Group
from gossamer.results.run import Run


@dataclass(frozen=True)
class Level:
    """A level of a metric, to be reached from above where lower is better, else from below."""

    metric: str
    value: float


@dataclass(frozen=True)
class Speed:
    """How many times as fast as the baseline: the baseline's mean time divided by the group's.

    Args:
        ratio: of the means.
        low, high: the least and the largest ratio of two runs of one seed; None where the seeds are not the same, or
            there is one.
    """

    ratio: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class TimeTo:
    """How long a group takes to a level.

    Args:
        group: its label.
        level: the level.
        runs: how many runs it has, those aside that were repeated.
        reached: how many of them reached the level.
        time_s: until then, over the runs; None unless all reached it.
        bytes: sent by all nodes until then; None unless all reached it.
        not_before_s: for so long every run that did not reach it went on; None if all did.
        baseline: label of the group that it is compared with, its own where it is the baseline; None without one.
        speed: compared with the baseline; None without one, and unless all runs of both reached the level.
        final: the metric at the last complete evaluation, over the runs that have it.
    """

    group: str
    level: Level
    runs: int
    reached: int
    time_s: Interval | None
    bytes: Interval | None
    not_before_s: float | None
    baseline: str | None
    speed: Speed | None
    final: Interval | None


def parse_levels(texts: Iterable[str]) -> list[Level]:
    """Levels as the command line gives them: ``METRIC=LEVEL[,LEVEL...]`` each.

    Raises:
        BadInput: for a text of another form.
    """
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
) -> list[TimeTo]:
    """How long every group takes to every level: the groups of the first level, then of the second, ...

    Args:
        groups: of runs.
        levels: of metrics.
        baseline: what the groups are compared with, among themselves.

    Raises:
        BadInput: for a metric that no run has recorded.
    """
    known = list(dict.fromkeys(name for group in groups for run in group.runs for name in metric_names(run)))
    for level in levels:
        if level.metric not in known:
            raise BadInput(
                f"--time-to {level.metric}: no run has recorded it{suggest(level.metric, known)}; accepted:"
                f" {listed(known)}"
            )
    rows = []
    for level in levels:
        reached = {group.label: [_reached(run, level) for run in group.samples] for group in groups}
        for group in groups:
            other = None if baseline is None else baseline.groups.get(group.label)
            speed = None if other is None else _speed(group, other, reached)
            rows.append(_row(group, level, reached[group.label], other, speed))
    return rows


def _row(
    group: Group, level: Level, reached: Sequence[_Reached], baseline: Group | None, speed: Speed | None
) -> TimeTo:
    times = [each.time_s for each in reached if each.time_s is not None]
    sent = [each.bytes for each in reached if each.bytes is not None]
    all_there = len(times) == len(reached)
    finals = [final(run, level.metric) for run in group.samples]
    return TimeTo(
        group.label,
        level,
        runs=len(reached),
        reached=len(times),
        time_s=confidence(times) if all_there else None,
        bytes=confidence(sent) if all_there and len(sent) == len(times) else None,
        not_before_s=None if all_there else min(each.last_s for each in reached if each.time_s is None),
        baseline=None if baseline is None else baseline.label,
        speed=speed,
        final=confidence(each.mean for each in finals if each is not None),
    )


def time_to_frame(rows: Sequence[TimeTo]) -> pl.DataFrame:
    """The table as a frame, a row each; ``*_half`` are half the widths of the 95 % confidence intervals."""
    schema = {
        "group": pl.String,
        "metric": pl.String,
        "level": pl.Float64,
        "runs": pl.Int64,
        "reached": pl.Int64,
        **dict.fromkeys(("time_s", "time_s_half", "bytes", "bytes_half", "not_before_s"), pl.Float64),
        "baseline": pl.String,
        **dict.fromkeys(("speed", "speed_low", "speed_high", "final", "final_half"), pl.Float64),
    }
    return pl.DataFrame(
        [
            (
                *(row.group, row.level.metric, row.level.value, row.runs, row.reached),
                *(*_ends(row.time_s), *_ends(row.bytes), row.not_before_s, row.baseline),
                *((None,) * 3 if row.speed is None else (row.speed.ratio, row.speed.low, row.speed.high)),
                *_ends(row.final),
            )
            for row in rows
        ],
        schema=schema,
        orient="row",
    )


@dataclass(frozen=True)
class _Reached:
    """When one run reached a level, and until when it's known that it had not."""

    time_s: float | None
    bytes: float | None
    last_s: float


def _reached(run: Run, level: Level) -> _Reached:
    if level.metric not in metric_names(run):
        return _Reached(None, None, 0.0)
    table = (
        summary(run, level.metric)
        .filter(pl.col("point").is_in(complete(run, level.metric)), pl.col("time_s").is_not_null())
        .sort("time_s", "point")
    )
    mean = pl.col("mean")
    good = mean.is_not_nan() & (mean <= level.value if lower_is_better(level.metric) else mean >= level.value)
    first = table.filter(good).head(1)
    last_s = float(table["time_s"][-1]) if table.height else 0.0
    if first.is_empty():
        return _Reached(None, None, last_s)
    return _Reached(first["time_s"][0], first["bytes"][0], last_s)


def _speed(group: Group, baseline: Group, reached: dict[str, list[_Reached]]) -> Speed | None:
    own, other = (
        [each.time_s for each in reached[one.label] if each.time_s is not None] for one in (group, baseline)
    )
    if len(own) < len(group.samples) or len(other) < len(baseline.samples) or not sum(own):
        return None
    ratio = (sum(other) / len(other)) / (sum(own) / len(own))
    if (
        (seeds := group.by_seed) is None
        or baseline.by_seed is None
        or seeds.keys() != baseline.by_seed.keys()
    ):
        return Speed(ratio)
    # Runs of a group are in the order of their seeds, so those of one seed are in the same place.
    pairs = [b / a for a, b in zip(own, other, strict=True) if a > 0]
    return Speed(ratio, min(pairs), max(pairs)) if 1 < len(pairs) == len(own) else Speed(ratio)


def _ends(interval: Interval | None) -> tuple[float | None, float | None]:
    return (None, None) if interval is None else (interval.mean, interval.half_width)
