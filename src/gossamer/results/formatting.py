"""Formatting of metric names, numbers with units, and short names for runs."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

ANY_WIDTH = 100_000
_SMALL = 0.001
_ANY_DIGITS = 12
_ROUNDING = 1e-12
_LONGEST_VALUE = 24

Table = tuple[str, list[str], list[list[str]]]
"""Title, head, rows."""

NOTHING = "\N{EN DASH}"
"""Shown if there is no value."""

_TITLES = {
    "train_loss": "training loss",
    "staleness_s": "staleness / s",
    "staleness_max_s": "largest staleness / s",
    "uplink_share": "use of the uplink",
    "downlink_share": "use of the downlink",
}


def metric_title(name: str) -> str:
    """A metric's title."""
    return _TITLES.get(name, name.replace("_", " "))


def is_share(name: str, classes: Container[str] = ()) -> bool:
    """Whether a metric is a share, shown in percent, as judged by its name. The accuracies of single classes, the columns
    ``classes``, are."""
    return name in classes or name.endswith(("accuracy", "_share"))


def value_text(metric: str, value: float, classes: Container[str] = ()) -> str:
    """A metric's value."""
    return f"{100 * value:.1f} %" if is_share(metric, classes) else f"{value:.4g}"


def numerals(value: float, *others: float) -> list[str]:
    """A value and related ones as text, with four decimal places, or with powers of ten if the value is small."""
    form = ".3e" if 0 < abs(value) < _SMALL else ".4f"
    return [f"{number:{form}}" for number in (value, *others)]


def count_text(value: int | None) -> str:
    """A whole number."""
    return NOTHING if value is None else f"{value:,}"


def seconds_text(value: int | float | None) -> str:
    """A time in a suitable unit."""
    if value is None:
        return NOTHING
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:,.1f} h"


def rounds_text(least: int, most: int) -> str:
    """A range of rounds."""
    return f"round {most:,}" if least == most else f"rounds {least:,} to {most:,}"


def nodes_text(count: int, nodes: int) -> str:
    """The nodes that a statistic covers."""
    return f"{count:,} nodes" if count == nodes else f"{count:,} of {nodes:,} nodes"


def point_text(point: Mapping[str, Any]) -> str:
    """An evaluation point (a row of :func:`gossamer.results.tidy.points`): its rounds and its times."""
    first_s, last_s = point["time_s_least"], point["time_s_most"]
    texts = [rounds_text(point["round_least"], point["round_most"])]
    if last_s is not None:
        texts.append(f"{last_s:.4g} s" if first_s == last_s else f"{first_s:.4g} to {last_s:.4g} s")
    return " · ".join(texts)


def bytes_unit(value: float) -> tuple[str, float]:
    """A suitable unit for a number of bytes, and its size in bytes."""
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    return next(((unit, 1000.0**i) for i, unit in enumerate(units) if value < 999.5 * 1000**i), ("PB", 1e15))


def bytes_text(value: int | float | None) -> str:
    """Traffic in a suitable unit."""
    if value is None:
        return NOTHING
    unit, size = bytes_unit(value)
    return f"{value / size:,.3g} {unit}"


def beyond_rounding(spread: float, size: float) -> float:
    """A spread or a difference of numbers of some size, or 0 if it is their rounding error.

    A number of type float64 has a relative precision of 1.1e-16. A sum of thousands of them, such as a
    virtual time, and a mean over nodes or runs err by less than 1e-12 of the result. Nothing that a run
    measures is as fine: a virtual time has steps of a nanosecond, and an accuracy those of one sample.
    """
    return 0.0 if abs(spread) < _ROUNDING * abs(size) else spread


def interval_text(mean: float | None, half: float | None, unit: str = "", scale: float = 1.0) -> str:
    """A mean and half the width of its interval, divided by a scale, with their unit. The interval has two
    significant digits, and the mean as many decimal places as the interval; an interval that is rounding
    error is 0."""
    if mean is None:
        return NOTHING
    mean, half = mean / scale, None if half is None else beyond_rounding(half, mean) / scale
    text = f"{float(f'{mean:.4g}'):g}"  # the outer format removes a power of ten, as in 5.3e+02
    if half is not None:
        digits = 1 - math.floor(math.log10(half)) if half > 0 and math.isfinite(half) else _ANY_DIGITS
        if digits < _ANY_DIGITS and abs(mean) * 10**digits < 1e6:
            text = f"{mean:.{max(digits, 0)}f}"
        text += f" ± {float(f'{half:.2g}'):g}"
    return f"{text} {unit}".rstrip()


def values_text(values: Sequence[float], unit: str = "", scale: float = 1.0, *, signed: bool = False) -> str:
    """Single values, divided by a scale, with their unit: "41.2, 43.5 %". The largest has three significant
    digits, and the others as many decimal places."""
    numbers = [value / scale for value in values]
    largest = max((abs(number) for number in numbers if math.isfinite(number)), default=0.0)
    digits = 2 - math.floor(math.log10(largest)) if largest else 0
    if digits > _ANY_DIGITS:
        texts = [f"{number:.2e}" for number in numbers]
    else:
        texts = [f"{number:.{max(digits, 0)}f}" for number in numbers]
    if signed:
        texts = [f"+{text}" if number > 0 else text for text, number in zip(texts, numbers, strict=True)]
    return f"{', '.join(texts)} {unit}".rstrip()


def some(names: Sequence[str], most: int = 6) -> str:
    """Some names as a list in a sentence, with the number of the others."""
    shown = names if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} more"]
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks as numbers and ranges, such as "0-3, 7"."""
    ranges = list[list[int]]()
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def at_least(text: str, *, exact: bool) -> str:
    """A number as text, with a word if there may have been more."""
    return text if exact or text == NOTHING else f"at least {text}"


def fates_text(messages: Mapping[str, int], *, exact: bool) -> str:
    """What became of the messages, to follow the number of sent ones. Exact counts are a breakdown that adds up, beside
    which stand the messages that were not sent."""

    def counts(*fates: str) -> list[str]:
        return [f"{messages[fate]:,} {fate.replace('_', ' ')}" for fate in fates if messages.get(fate)]

    received, used = counts("received"), counts("taken", "late", "superseded", "refused", "unread")
    if received and used and messages["received"] != messages.get("taken"):
        received = [f"{received[0]} ({', '.join(used)})"]
    sent, beside = [*received, *counts("lost", "in_flight")], counts("cancelled", "unsent")
    if not exact:
        return f"sent; on record are {', '.join([*sent, *beside])}" if sent or beside else ""
    parts = [*([f"sent: {', '.join(sent)}"] if sent else []), *([", ".join(beside)] if beside else [])]
    return "; ".join(parts)


def print_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, labels: int = 1
) -> None:
    """Print a table, as wide as the terminal, or of any width in a file or a pipe. The first ``labels``
    columns hold text, the others numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for column, heading in enumerate(head):
        number = column >= labels
        table.add_column(heading, overflow="fold", justify="right" if number else "left", no_wrap=number)
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else ANY_WIDTH
    Console(markup=False, highlight=False, width=width).print(table)


# --- names


def part(key: str, value: Any) -> str:
    """A part of a cell's name: an entry of ``cells``, or a value of the grid."""
    return str(value) if key == "cell" else f"{key}={value}"


def short_names(cells: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Names of cells, given as a whole and in parts, without the points of the grid that all share."""
    points = [{part(*item) for item in parts.items() if item[0] != "cell"} for _, parts in cells]
    common = set.intersection(*points) if points else set()
    return [", ".join(word for word in name.split(", ") if word not in common) or name for name, _ in cells]


def distinguishing_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Texts that distinguish settings: the names of the components that differ and, if these are equal, the
    fields that differ. Lists of components, such as codecs or faults, are compared entry by entry."""
    settings = [itemized(setting) for setting in settings]
    named = [key for key in differing(settings) if key.endswith(".name")]
    texts = [", ".join(filter(None, (_component(entry, key) for key in named))) for entry in settings]
    if named:
        texts = [text or NOTHING for text in texts]
    for head in {head for head in texts if texts.count(head) > 1}:
        same = [index for index, text in enumerate(texts) if text == head]
        keys = differing([settings[index] for index in same])
        for index in same:
            texts[index] = ", ".join(filter(None, (head, *_field_texts(settings[index], keys, head))))
    return texts


def itemized(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Flat settings with a key for every field of a listed component: ``{"codec": [{"name": "top-k",
    "fraction": 0.1}]}`` is ``{"codec.name": "top-k", "codec.0.fraction": 0.1}``. The names of a list are one
    name, such as ``top-k + quantize``."""
    items: dict[str, Any] = {}
    for key, value in setting.items():
        if not _is_list_of_components(value):
            items[key] = value
            continue
        items[f"{key}.name"] = " + ".join(str(entry["name"]) for entry in value)
        for number, entry in enumerate(value):
            items |= flat({name: field for name, field in entry.items() if name != "name"}, f"{key}.{number}")
    return items


def _is_list_of_components(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(entry, Mapping) and "name" in entry for entry in value)
    )


def _component(setting: Mapping[str, Any], key: str) -> str | None:
    """The name of a component, or of none: a field that is null, or an empty list."""
    field = key.removesuffix(".name")
    if key in setting:
        return str(setting[key])
    return f"no {field}" if field in setting and not setting[field] else None


def _field_texts(setting: Mapping[str, Any], keys: Sequence[str], head: str) -> list[str]:
    """Fields and their values, such as "batch_size 8", or of a listed component, which is named unless the
    head names it, "quantize bits=8"."""
    texts: dict[str, list[str]] = {}
    for key in keys:
        value, name = str(setting.get(key, NOTHING)), key.rpartition(".")[2]
        if len(value) > _LONGEST_VALUE:
            value = f"{value[: _LONGEST_VALUE - 1]}…"
        if (entry := re.fullmatch(r"(.+?)\.(\d+)\..+", key)) is None:
            texts[key] = [f"{name} {value}"]
            continue
        components, number = setting.get(f"{entry[1]}.name", "").split(" + "), int(entry[2])
        named = [] if {*components} <= {*head.split(", ")} else components[number : number + 1]
        texts.setdefault(f"{entry[1]}.{number}", named).append(f"{name}={value}")
    return [" ".join(words) for words in texts.values()]


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same in all mappings."""
    keys = dict.fromkeys(key for setting in settings for key in setting)
    return [key for key in keys if len({repr(setting.get(key)) for setting in settings}) > 1]


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings as one mapping: ``{"a": {"b": 1}}`` is ``{"a.b": 1}``."""
    if not isinstance(value, dict):
        return {prefix: value}
    inner = ((f"{prefix}.{key}" if prefix else str(key), item) for key, item in value.items())
    return {key: item for path, branch in inner for key, item in flat(branch, path).items()}
