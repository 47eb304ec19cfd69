"""The time-to-accuracy table in words, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from gossamer.results.confidence import Interval
from gossamer.results.formatting import NOTHING, bytes_unit, is_share, metric_title
from gossamer.results.frames import lower_is_better
from gossamer.results.time_to import Level, Speed, TimeTo

Table = tuple[str, list[str], list[list[str]]]
"""Title, head, rows."""

_NOTE = (
    "Time: mean over the runs of the first evaluation point at which the mean over the nodes is there (not"
    " interpolated) ± half of the 95 % confidence interval (Student's t). Where a run has not got there, no mean is"
    " given, but until when it is known not to. Of runs that were repeated with the same"
    " seed, the newest that is done counts."
)
_SPEED = (
    " Times as fast: the baseline's mean time divided by the group's, and the least and the largest ratio of two runs"
    " of one seed."
)


def note(baseline: str | None) -> str:
    """What the figures are."""
    return _NOTE if baseline is None else _NOTE + _SPEED


def tables(rows: Sequence[TimeTo], baseline: str | None = None) -> list[Table]:
    """One table a level; ``baseline`` is what that is called with which groups are compared."""
    found = []
    for level, each in groupby(rows, key=lambda row: row.level):
        title, head = level_text(level), ["", "reached", "time / s", "sent", "at the end"]
        if baseline is not None:
            title += f", against {baseline}"
            head.insert(3, "times as fast")
        found.append((title, head, [_row(row, baseline is not None) for row in each]))
    return found


def level_text(level: Level) -> str:
    """A level in words, e.g. "test accuracy ≥ 60 %"."""
    value = f"{100 * level.value:.4g} %" if is_share(level.metric) else f"{level.value:.4g}"
    return f"{metric_title(level.metric)} {'≤' if lower_is_better(level.metric) else '≥'} {value}"


def _row(row: TimeTo, compared: bool) -> list[str]:
    time = f"> {row.not_before_s or 0:.4g}" if row.time_s is None else str(row.time_s)
    share = is_share(row.level.metric)
    end = _interval(row.final, *(("%", 0.01, 1) if share else ("", 1.0, None)))
    cells = [row.group, f"{row.reached}/{row.runs}", time, _sent(row.bytes), end]
    if compared:
        cells.insert(3, "1" if row.speed and row.group == row.baseline else _speed(row.speed))
    return cells


def _speed(speed: Speed | None) -> str:
    if speed is None:
        return NOTHING
    return f"{speed.ratio:.3g}" + ("" if speed.low is None else f" ({speed.low:.3g} to {speed.high:.3g})")


def _sent(sent: Interval | None) -> str:
    return NOTHING if sent is None else _interval(sent, *bytes_unit(sent.mean))


def _interval(found: Interval | None, unit: str, scale: float, digits: int | None = None) -> str:
    """A mean and half of its interval's width, in a unit, with so many digits after the point (None: three or two that
    count)."""
    if found is None:
        return NOTHING
    mean, half = found.mean / scale, None if found.half_width is None else found.half_width / scale
    text = f"{mean:.3g}" if digits is None else f"{mean:.{digits}f}"
    if half is not None:
        text += f" ± {half:.2g}" if digits is None else f" ± {half:.{digits}f}"
    return f"{text} {unit}".rstrip()
