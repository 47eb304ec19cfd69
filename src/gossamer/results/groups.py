"""Groups of runs: those of one experiment with different seeds, named by what sets them apart, and the baseline that
each group is compared with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import polars as pl

from gossamer.errors import BadInput, listed, suggest
from gossamer.results.run import Run, cell_names, flat, part, tell_apart
from gossamer.results.tidy import AXES, student_t

_NOT_THE_EXPERIMENT = (
    *("name", "seed", "data_root", "evaluation.timeline", "checkpoint", "trackers"),
    *("engine.trainer", "engine.workers", "engine.threads", "engine.device"),
)
"""Fields that only name the draw, the location of data, what else is kept, and how it is computed."""


@dataclass(frozen=True)
class Group:
    """Runs of one experiment.

    Args:
        label: what sets it apart from the other groups.
        runs: by seed, with all that were repeated.
        labels: of a cell of a sweep, its name in parts.
    """

    label: str
    runs: tuple[Run, ...]
    labels: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def samples(self) -> tuple[Run, ...]:
        """The runs that statistics are over, by seed. Of an experiment that was repeated with the same seed it is the newest
        run that is done, or else the newest: to count both would make the spread look too small."""
        newest: dict[str, Run] = {}
        for run in sorted(self.runs, key=lambda run: (run.status == "done", run.id)):
            settings = {key: value for key, value in flat(run.experiment).items() if _chosen(key, ())}
            draw = json.dumps([run.cell, run.experiment.get("seed"), settings], sort_keys=True, default=str)
            newest[draw] = run
        kept = set(newest.values())
        return tuple(run for run in self.runs if run in kept)

    @property
    def by_seed(self) -> dict[Any, Run] | None:
        """The sample of each seed; None where a seed has several samples, of experiments that were grouped together."""
        found = {run.experiment.get("seed"): run for run in self.samples}
        return found if len(found) == len(self.samples) else None


def groups(runs: Sequence[Run], by: Sequence[str] = ()) -> list[Group]:
    """Group runs that differ only in their seed, their name, and how they were computed.

    Args:
        runs: in the order of the groups. Runs of a sweep keep the names of its cells, without what all have in common.
        by: fields of the experiment (``algorithm.name``) by which to group instead; one that no run has is bad input.
    """
    settings = [flat(run.experiment) for run in runs]
    known = list(dict.fromkeys(key for setting in settings for key in setting))
    for name in by:
        if not any(_within(key, [name]) for key in known):
            raise BadInput(
                f"--group-by {name}: no run has it{suggest(name, known)}; accepted: {listed(known)}"
            )
    kept = [{key: value for key, value in setting.items() if _chosen(key, by)} for setting in settings]
    cells: dict[tuple[str | None, str], list[int]] = {}
    for index, setting in enumerate(kept):
        cell = None if by else runs[index].cell
        cells.setdefault((cell, json.dumps(setting, sort_keys=True, default=str)), []).append(index)
    names = [] if by else cell_names([runs[indices[0]] for indices in cells.values()])
    if len(set(names)) < len(cells):
        names = tell_apart([kept[indices[0]] for indices in cells.values()])
        names = [
            text if names.count(text) == 1 else f"{text} #{number}" for number, text in enumerate(names, 1)
        ]
    if len(cells) == 1 and names == [""]:
        names = [" · ".join(dict.fromkeys(run.name for run in runs))]
    return [
        Group(
            name,
            tuple(sorted((runs[index] for index in indices), key=_seed)),
            {} if by else runs[indices[0]].labels,
        )
        for name, indices in zip(names, cells.values(), strict=True)
    ]


def several(among: Sequence[Group]) -> bool:
    """Whether a curve per group says more than one per run: there are several groups, and some have several samples."""
    return len(among) > 1 and any(len(group.samples) > 1 for group in among)


def group_curve(group: Group, y: str) -> pl.DataFrame:
    """A metric at the points that are complete in all samples of a group: the same round, the same instant of the time
    grid, or the end. Every run counts with its mean over the nodes.

    Returns:
        Columns ``point`` (0, 1, ...), the axes (means over the runs), ``mean``, ``half`` (half the width of the 95 %
        confidence interval over the runs, by Student's t; null for one run) and ``count`` (runs).
    """
    curves = pl.concat(
        run.curves.filter(pl.col("metric") == y, "complete").select(
            pl.lit((run.experiment.get("evaluation") or {}).get("every_s") is not None).alias("on_grid"),
            *("run", "instant", "mean"),
            pl.col(AXES).cast(pl.Float64),
        )
        for run in group.samples
    )
    count = sum(not run.curves.filter(pl.col("metric") == y).is_empty() for run in group.samples)
    width = student_t(count - 1) / math.sqrt(count) if count > 1 else None
    return (
        curves.group_by("on_grid", "instant")
        .agg(pl.col(AXES).mean(), pl.col("mean").mean(), half=pl.col("mean").std() * width, count=pl.len())
        .filter(pl.col("count") == count)
        .sort("instant")
        .select(pl.int_range(pl.len()).alias("point"), *AXES, "mean", "half", "count")
    )


def _chosen(key: str, by: Sequence[str]) -> bool:
    return _within(key, by) if by else not _within(key, _NOT_THE_EXPERIMENT)


def _within(key: str, fields: Iterable[str]) -> bool:
    return any(key == field or key.startswith(f"{field}.") for field in fields)


def _seed(run: Run) -> tuple[bool, Any]:
    seed = run.experiment.get("seed")
    return (not isinstance(seed, int), seed if isinstance(seed, int) else 0)


# --- the baseline


@dataclass(frozen=True)
class Baseline:
    """The group that each group is compared with: by label; groups without one are left out."""

    title: str
    groups: Mapping[str, Group]


def find_baseline(name: str, among: Sequence[Group]) -> Baseline:
    """The baseline with a name.

    Args:
        name: a group's label, or a part that only one label has: all are compared with that group. Or what several
            groups of a sweep have in common, an entry of ``cells`` or ``field=value`` of the grid: each group is compared
            with the one of them that is like it in everything else.
        among: the groups.

    Raises:
        BadInput: if no group has the name, or more than one.
    """
    parts = {part(key, value): key for group in among for key, value in group.labels.items()}
    found = [group for group in among if group.label == name]
    if not found and name in parts:
        key = parts[name]
        found = [group for group in among if key in group.labels and part(key, group.labels[key]) == name]
        at = {_point(group, key): group for group in found}
        if len(at) == len(found):
            pairs = {group.label: at[point] for group in among if (point := _point(group, key)) in at}
            others = [other for other in _differing(among) if other != key]
            return Baseline(name + (f" at the same {', '.join(others)}" if others else ""), pairs)
    elif not found:
        found = [group for group in among if group.label.startswith(name)]
        found = found or [group for group in among if name in group.label]
    if len(found) == 1:
        return Baseline(found[0].label, {group.label: found[0] for group in among})
    known = list(dict.fromkeys([*(group.label for group in among), *parts]))
    raise BadInput(
        f"--baseline {name}: {f'{len(found)} groups are' if found else 'no group is'} called that"
        f"{'' if found else suggest(name, known)}; accepted: " + "; ".join(known)
    )


def _differing(among: Sequence[Group]) -> list[str]:
    """The labels in which groups differ."""
    keys = dict.fromkeys(key for group in among for key in group.labels)
    return [
        key for key in keys if len({json.dumps(group.labels.get(key)) for group in among if group.labels}) > 1
    ]


def _point(group: Group, key: str) -> str:
    """The labels of a group but one."""
    rest: dict[str, Any] = {other: value for other, value in group.labels.items() if other != key}
    return json.dumps(rest, sort_keys=True)
