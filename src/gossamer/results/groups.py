"""Groups of runs that differ only in their seed, their curves, and the baseline with which each group is compared."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from gossamer.errors import BadInput, suggest
from gossamer.results.formatting import differing, distinguishing_names, flat, part, short_names
from gossamer.results.run_data import RunData
from gossamer.results.steps import MAX_DRAWN, steps_of
from gossamer.results.tidy import FEWEST, complete_curve, curves_of, student_t

_NOT_THE_EXPERIMENT = (
    *("name", "seed", "data_root", "evaluation.timeline", "checkpoint", "trackers"),
    *("engine.trainer", "engine.workers", "engine.threads", "engine.device"),
    *("engine.cohort", "engine.cuda_graphs"),  # the first one in older records
)
"""Fields that affect only the draws, the location of the data, additional output and the way of computing."""


_RESULTS = {"done": 2, "diverged": 1}
"""The statuses of runs that are results, with their rank among attempts at one seed."""


@dataclass(frozen=True)
class Group:
    """Runs of one experiment with different seeds, including repetitions. ``label`` distinguishes it from the
    other groups. ``labels`` are the parts of the name of a sweep's cell, which has ``planned`` runs, whether
    or not they have begun. Runs that are ``unfinished`` count in statistics only on request."""

    label: str
    runs: tuple[RunData, ...]
    labels: Mapping[str, Any] = field(default_factory=dict, compare=False)
    planned: int = 0
    unfinished: bool = False

    @cached_property
    def attempts(self) -> tuple[RunData, ...]:
        """One run for each seed: the newest that is done, or else the newest that diverged, or else the newest.
        Counting repeated runs of a seed would make the spread look too small."""
        ordered = sorted(self.runs, key=lambda run: (_RESULTS.get(run.status, 0), run.id))
        newest = {run.experiment.get("seed"): run for run in ordered}
        return tuple(run for run in self.runs if run is newest[run.experiment.get("seed")])

    @cached_property
    def samples(self) -> tuple[RunData, ...]:
        """The runs used in statistics: of :attr:`attempts`, those that are done, and those that diverged, which
        is a result too. The others ended early for reasons outside of the experiment, so their last values
        are not those of its end."""
        return tuple(run for run in self.attempts if self.unfinished or run.status in _RESULTS)

    @cached_property
    def left_out(self) -> tuple[RunData, ...]:
        """The runs that failed, were stopped or killed, or still run."""
        return tuple(run for run in self.attempts if run not in self.samples)

    @cached_property
    def diverged(self) -> tuple[RunData, ...]:
        """The samples that diverged. A group with such a run has no means."""
        return tuple(run for run in self.samples if run.status == "diverged")

    @property
    def has_interval(self) -> bool:
        """Whether there are enough samples for an interval, none of which diverged. Otherwise single runs are
        shown."""
        return len(self.samples) >= FEWEST and not self.diverged

    @property
    def shown(self) -> str | None:
        """Which models the rows of its runs show (:attr:`Run.shown`); None without runs."""
        return self.runs[0].shown if self.runs else None

    @property
    def size(self) -> int:
        """The number of runs, planned or begun, one for each seed."""
        return max(self.planned, len(self.attempts))


def groups(runs: Sequence[RunData], *, unfinished: bool = False) -> list[Group]:
    """Group runs that differ only in their seed, their name, and how they were computed. Runs of a sweep keep
    the names of its cells, without the parts that all have in common. ``unfinished``: whether runs that
    failed, were stopped or killed, or still run count in statistics."""
    alike: dict[str, list[RunData]] = {}
    for run in runs:
        alike.setdefault(_key([run.cell, _settings(run)]), []).append(run)
    first = [same[0] for same in alike.values()]
    names = short_names([(run.cell, run.labels) for run in first if run.cell is not None])
    if len(names) == len(first):
        names = [
            shown_label(name, run.shown) if names.count(name) > 1 else name
            for name, run in zip(names, first, strict=True)
        ]
    if len(set(names)) < len(first):
        names = distinguishing_names([_settings(run) for run in first])
        names = [
            text if names.count(text) == 1 else f"{text} #{number}" for number, text in enumerate(names, 1)
        ]
    if names == [""]:
        names = [first[0].name]
    return [
        Group(
            name,
            tuple(sorted(same, key=lambda run: run.experiment.get("seed", 0))),
            same[0].labels,
            max(run.planned for run in same),
            unfinished,
        )
        for name, same in zip(names, alike.values(), strict=True)
    ]


def labels(runs: Sequence[RunData], *, statuses: bool = True) -> list[str]:
    """Short names for runs that are shown together: the group's label, with the seed if a group has several
    runs or belongs to a sweep, or ids if nothing differs. With ``statuses``, runs that are not done carry
    theirs."""
    by_run = {}
    for group in groups(runs):
        for run in group.runs:
            numbered = len(group.runs) > 1 or run.cell is not None
            name = f"{group.label}, seed {run.experiment.get('seed')}" if numbered else group.label
            by_run[run] = name + (ended(run) if statuses else "")
    names = [by_run[run] for run in runs]
    return [name if names.count(name) == 1 else run.id for name, run in zip(names, runs, strict=True)]


def member_label(group: Group, run: RunData) -> str:
    """The name of a run among others of its group."""
    return f"{group.label}, seed {run.experiment.get('seed')}{ended(run)}"


def shown_label(name: str, shown: str) -> str:
    """The name of the part of a cell whose rows show other models than those of the rest."""
    return f"{name}, of {shown}"


def ended(run: RunData) -> str:
    """The status of a run that is not done, to follow its name."""
    return "" if run.status == "done" else f" ({run.status})"


def shows_groups(groups: Sequence[Group]) -> bool:
    """Whether to show a curve per group instead of one per run: there are several groups, and some have an
    interval."""
    return len(groups) > 1 and any(group.has_interval for group in groups)


def group_curve(group: Group, y: str, x: str = "round") -> pl.DataFrame:
    """The mean of a metric over the samples of a group, each the mean over its nodes, against an axis; empty if a sample
    diverged. Columns: the axis, ``mean``, ``half`` (half the width of its 95 % confidence interval; null for less than
    three runs) and ``count`` (runs).

    Over rounds: at the points that are complete in all samples, which are the same round, the same instant of the time grid,
    or the end. Over time and bytes: at instants of the runs' steps, from where all runs have begun until the first one
    ends; each run has its value at that instant."""
    samples = () if group.diverged else group.samples
    if x != "round":
        return _over(samples, y, x)
    tables = [(run, complete_curve(run, y)) for run in samples if y in curves_of(run)["metric"]]
    rows = pl.concat(
        [
            curves_of(group.runs[0]).clear().with_columns(on_grid=pl.lit(value=False)),
            *(table.with_columns(on_grid=pl.lit(run.every_s is not None)) for run, table in tables),
        ],
        how="vertical_relaxed",
    )
    return (
        rows.group_by("on_grid", "instant")
        .agg(
            pl.col("round").mean(),
            pl.col("mean").mean(),
            half=_half(pl.col("mean"), len(tables)),
            count=pl.len(),
        )
        .filter(pl.col("count") == len(tables))
        .sort("instant")
        .select("round", "mean", "half", "count")
    )


def _over(samples: Sequence[RunData], y: str, x: str) -> pl.DataFrame:
    found = [steps.table.filter(pl.col("count") > 0) for run in samples if (steps := steps_of(run, y))]
    tables = [table for table in found if table[x].count()]
    if not tables:
        return pl.DataFrame(schema={x: pl.Float64, "mean": pl.Float64, "half": pl.Float64, "count": pl.Int64})
    first, last = max(float(table[x][0]) for table in tables), min(float(table[x][-1]) for table in tables)
    everywhere = np.unique(np.concatenate([table[x].to_numpy() for table in tables]))
    common = everywhere[(everywhere >= first) & (everywhere <= last)]
    some = np.linspace(0, len(common) - 1, min(len(common), MAX_DRAWN)).round().astype(int)
    at = common[some]
    values = [
        table["mean"].to_numpy()[np.searchsorted(table[x].to_numpy(), at, side="right") - 1]
        for table in tables
    ]
    rows = pl.DataFrame({x: np.tile(at, len(values)), "mean": np.concatenate(values)})
    return (
        rows.group_by(x)
        .agg(pl.col("mean").mean(), half=_half(pl.col("mean"), len(tables)), count=pl.len().cast(pl.Int64))
        .sort(x)
        .select(x, "mean", "half", "count")
    )


def _half(values: pl.Expr, count: int) -> pl.Expr:
    """Half the width of the 95 % confidence interval of a mean over some runs; null below :data:`FEWEST`."""
    if count < FEWEST:
        return pl.lit(None, dtype=pl.Float64)
    return values.std() * (student_t(count - 1) / math.sqrt(count))


def _settings(run: RunData) -> dict[str, Any]:
    """The fields by which a run is grouped."""
    left_out = tuple(f"{name}." for name in _NOT_THE_EXPERIMENT)
    settings = {**flat(run.experiment), "evaluation.of": run.shown}
    return {key: value for key, value in settings.items() if not f"{key}.".startswith(left_out)}


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


class Baseline(NamedTuple):
    """The group with which each group is compared, by label. Groups without a baseline are left out. ``key``
    is the part of the name that groups do not share with their baselines, or None for one baseline of all."""

    title: str
    groups: Mapping[str, Group]
    key: str | None = None


def find_baseline(name: str, groups: Sequence[Group]) -> Baseline:
    """The baseline with a name. A group's label makes this group the baseline of all groups. The name may also
    be an entry of ``cells`` or a ``field=value`` of the grid, which several groups of a sweep share: each group
    is then compared with the one of these that equals it in everything else. Where the rows of some of its runs show
    other models than those of the others, it is compared with those that show the same as its own. BadInput for a
    name that fits no group, or several."""
    matches = [group for group in groups if group.label == name]
    if len(matches) == 1:
        return Baseline(name, {group.label: matches[0] for group in groups})
    parts = {part(key, value): key for group in groups for key, value in group.labels.items()}
    if not matches and (key := parts.get(name)) is not None:
        matches = [group for group in groups if key in group.labels and part(key, group.labels[key]) == name]
        points = {
            group.label: _key({other: value for other, value in group.labels.items() if other != key})
            for group in groups
        }
        bases: dict[str, dict[str | None, Group]] = {}
        for group in matches:
            bases.setdefault(points[group.label], {})[group.shown] = group
        if sum(map(len, bases.values())) == len(matches):
            others = [other for other in differing([g.labels for g in groups if g.labels]) if other != key]
            title = name + (f" at the same {', '.join(others)}" if others else "")
            found: dict[str, Group] = {}
            for group in groups:
                alike = bases.get(points[group.label], {})
                base = next(iter(alike.values())) if len(alike) == 1 else alike.get(group.shown)
                if base is not None:
                    found[group.label] = base
            return Baseline(title, found, key)
    known = list(dict.fromkeys([*(group.label for group in groups), *parts]))
    raise BadInput(
        f"--baseline {name}: {f'{len(matches)} groups are' if matches else 'no group is'} called that"
        f"{'' if matches else suggest(name, known)}; accepted: " + "; ".join(known)
    )


def default_baseline(groups: Sequence[Group]) -> Baseline | None:
    """The default baseline of a sweep: the first entry of ``cells``, or else the first value of the first
    axis of the grid that has several. None for runs outside a sweep."""
    varying = differing([group.labels for group in groups])
    if not varying or not all(group.labels for group in groups):
        return None
    key = "cell" if "cell" in varying else varying[0]
    return find_baseline(part(key, groups[0].labels[key]), groups)
