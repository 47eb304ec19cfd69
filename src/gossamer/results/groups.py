"""Groups of runs that differ in their seed alone, their curves, and the baseline that each is compared with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import polars as pl

from gossamer.errors import BadInput, listed, suggest
from gossamer.results.run import Run, cell_names, differing, flat, part, tell_apart
from gossamer.results.tidy import AXES, student_t

_NOT_THE_EXPERIMENT = (
    *("name", "seed", "data_root", "evaluation.timeline", "checkpoint", "trackers"),
    *("engine.trainer", "engine.workers", "engine.threads", "engine.device"),
)
"""Fields that only name the draw, the location of data, what else is kept, and how it is computed."""


@dataclass(frozen=True)
class Group:
    """Runs of one experiment, by seed, with all that were repeated. ``label`` sets it apart from the other groups;
    ``labels`` are the parts of the name of a sweep's cell, which has ``planned`` runs, whether or not they are done."""

    label: str
    runs: tuple[Run, ...]
    labels: Mapping[str, Any] = field(default_factory=dict, compare=False)
    planned: int = 0

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
            pl.lit(run.every_s is not None).alias("on_grid"),
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


def default_baseline(among: Sequence[Group]) -> Baseline | None:
    """What the groups of a sweep are compared with by default: the first entry of ``cells``, or else the first value of the
    first axis of the grid that has several. None for runs of no sweep."""
    varying = differing([group.labels for group in among])
    if not varying or not all(group.labels for group in among):
        return None
    key = "cell" if "cell" in varying else varying[0]
    return find_baseline(part(key, among[0].labels[key]), among)
