"""Runs of one experiment that differ in the seed alone, put together, and named by what sets them apart."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import polars as pl

from gossamer.errors import BadInput, listed, suggest
from gossamer.results.confidence import LEVEL, student_t
from gossamer.results.formatting import NOTHING
from gossamer.results.frames import AXES, assigned, complete, metric_names, summary
from gossamer.results.run import Run, cell_names, flat

_NOT_THE_EXPERIMENT = (
    *("name", "seed", "data_root", "evaluation.timeline", "checkpoint", "trackers"),
    *("engine.trainer", "engine.workers", "engine.threads", "engine.device"),
)
"""Fields that say which draw it is, where its data lies, what else is kept, and how it's computed."""
_MOST_DIFFERENCES = 3
_LONGEST_VALUE = 24


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
        """The runs that statistics are over, by seed: of an experiment that was run again with the same seed only the
        newest that is done, or else the newest. To count both would make little of the spread."""
        newest: dict[str, Run] = {}
        for run in sorted(self.runs, key=lambda run: (run.status == "done", run.id)):
            settings = {key: value for key, value in flat(run.experiment).items() if _chosen(key, ())}
            draw = json.dumps([run.cell, run.experiment.get("seed"), settings], sort_keys=True, default=str)
            newest[draw] = run
        kept = set(newest.values())
        return tuple(run for run in self.runs if run in kept)

    @property
    def by_seed(self) -> dict[Any, Run] | None:
        """The sample of each seed; None where a seed has several, of experiments that were put together."""
        found = {run.experiment.get("seed"): run for run in self.samples}
        return found if len(found) == len(self.samples) else None


def groups(runs: Sequence[Run], by: Sequence[str] = ()) -> list[Group]:
    """Put runs together that differ in their seed, their name and how they were computed alone.

    Args:
        runs: in the order of the groups. Those of a sweep keep the names of its cells, without what all have in common.
        by: fields of the experiment (``algorithm.name``) that are to tell groups apart, whatever else differs.

    Raises:
        BadInput: for a field that no run has.
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
        firsts = [kept[indices[0]] for indices in cells.values()]
        names = _apart(firsts) if len(firsts) > 1 else [_shared_name(runs)]
    return [
        Group(
            name,
            tuple(sorted((runs[index] for index in indices), key=_seed)),
            {} if by else runs[indices[0]].labels,
        )
        for name, indices in zip(names, cells.values(), strict=True)
    ]


def several(among: Sequence[Group]) -> bool:
    """Whether there are several groups, and some have several samples: then a curve of each group says more than one of
    each run."""
    return len(among) > 1 and any(len(group.samples) > 1 for group in among)


def group_curve(group: Group, y: str) -> pl.DataFrame:
    """A metric at the points that are complete in all samples of a group: the same round, the same instant of the grid of
    time, or the end. Each run counts with its mean over the nodes.

    Returns:
        Columns ``point`` (0, 1, ...), ``round``, ``time_s``, ``wall_s``, ``bytes`` (means over the runs), ``mean``,
        ``half`` (half the width of the 95 % confidence interval over the runs, by Student's t; null for one run) and
        ``count`` (runs).
    """
    tables = [_complete(run, y) for run in group.samples if y in metric_names(run)]
    count = len(tables)
    if not tables:
        floats = dict.fromkeys((*AXES, "mean", "half"), pl.Float64)
        return pl.DataFrame(schema={"point": pl.Int64, **floats, "count": pl.UInt32})
    width = student_t((1 + LEVEL) / 2, count - 1) / math.sqrt(count) if count > 1 else None
    return (
        pl.concat(tables)
        .group_by("on_grid", "instant")
        .agg(pl.col(AXES).mean(), pl.col("mean").mean(), half=pl.col("mean").std() * width, count=pl.len())
        .filter(pl.col("count") == count)
        .sort("instant")
        .select(pl.int_range(pl.len()).alias("point"), *AXES, "mean", "half", "count")
    )


def _complete(run: Run, y: str) -> pl.DataFrame:
    """A run's means at its complete points, with what tells these points in every run."""
    on_grid = (run.experiment.get("evaluation") or {}).get("every_s") is not None
    instants = assigned(run).select("point", "instant").unique()
    return (
        summary(run, y)
        .filter(pl.col("point").is_in(complete(run, y)))
        .join(instants, on="point")
        .select(pl.lit(on_grid).alias("on_grid"), "instant", pl.col(AXES).cast(pl.Float64), "mean")
    )


def _chosen(key: str, by: Sequence[str]) -> bool:
    return _within(key, by) if by else not _within(key, _NOT_THE_EXPERIMENT)


def _within(key: str, fields: Iterable[str]) -> bool:
    return any(key == field or key.startswith(f"{field}.") for field in fields)


def _seed(run: Run) -> tuple[bool, Any]:
    seed = run.experiment.get("seed")
    return (not isinstance(seed, int), seed if isinstance(seed, int) else 0)


def _shared_name(runs: Sequence[Run]) -> str:
    return " · ".join(dict.fromkeys(run.name for run in runs))


def _apart(settings: Sequence[dict[str, Any]]) -> list[str]:
    """What tells settings apart: the names of the components that differ, and among those that share them the fewest
    fields that do."""
    named = [key for key in _differing(settings) if key.endswith(".name")]
    heads = [
        ", ".join(str(setting[key]) for key in named if key in setting) or NOTHING * bool(named)
        for setting in settings
    ]
    texts = list(heads)
    for head in dict.fromkeys(heads):
        same = [index for index, other in enumerate(heads) if other == head]
        if len(same) > 1:
            for index, more in zip(same, _fields([settings[index] for index in same]), strict=True):
                texts[index] = ", ".join(filter(None, (head, more)))
    return [text if texts.count(text) == 1 else f"{text} #{index + 1}" for index, text in enumerate(texts)]


def _fields(settings: Sequence[dict[str, Any]]) -> list[str]:
    keys = _differing(settings)
    fewest = next(
        (
            chosen
            for count in range(1, min(len(keys), _MOST_DIFFERENCES) + 1)
            for chosen in combinations(keys, count)
            if len({repr([setting.get(key) for key in chosen]) for setting in settings}) == len(settings)
        ),
        tuple(keys),
    )
    leaves = [key.rpartition(".")[2] for key in fewest]
    words = [leaf if leaves.count(leaf) == 1 else key for key, leaf in zip(fewest, leaves, strict=True)]
    return [
        ", ".join(
            f"{word} {str(setting.get(key, NOTHING))[:_LONGEST_VALUE]}"
            for key, word in zip(fewest, words, strict=True)
        )
        for setting in settings
    ]


def _differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for setting in settings for key in setting)
    return [key for key in keys if len({repr(setting.get(key)) for setting in settings}) > 1]
