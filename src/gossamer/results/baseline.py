"""What groups of runs are compared with: one group, or in a sweep each group with the one of its own point of the grid."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.errors import BadInput, suggest
from gossamer.results.groups import Group
from gossamer.results.run import part


@dataclass(frozen=True)
class Baseline:
    """The group that each group is compared with.

    Args:
        title: what it's called.
        groups: label of a group -> its baseline; those that have none are left out.
    """

    title: str
    groups: Mapping[str, Group]


def find_baseline(name: str, among: Sequence[Group]) -> Baseline:
    """The baseline of a name.

    Args:
        name: a group's label, with which all are compared. Or what several groups of a sweep have in common, an entry of
            ``cells`` or ``field=value`` of the grid: each group is then compared with the one of them that is like it
            in all else. Or the beginning of one label, or a part that only it has.
        among: the groups.

    Raises:
        BadInput: if no group is called that, or more than one.
    """
    labels = [group.label for group in among]
    if name in labels:
        return _one(among[labels.index(name)], among)
    key, found = _sharing(name, among)
    if key is not None:
        at = {_point(group, key): group for group in found}
        if len(at) == len(found):
            pairs = {group.label: at[point] for group in among if (point := _point(group, key)) in at}
            return Baseline(name + _at_the_same(key, among), pairs)
    else:
        found = [group for group in among if group.label.startswith(name)]
        found = found or [group for group in among if name in group.label]
        if len(found) == 1:
            return _one(found[0], among)
    known = list(
        dict.fromkeys([*labels, *(part(key, group.labels[key]) for group in among for key in group.labels)])
    )
    raise BadInput(
        f"--baseline {name}: {f'{len(found)} groups are' if found else 'no group is'} called that"
        f"{'' if found else suggest(name, known)}; accepted: " + "; ".join(known)
    )


def _one(baseline: Group, among: Sequence[Group]) -> Baseline:
    return Baseline(baseline.label, {group.label: baseline for group in among})


def _sharing(name: str, among: Sequence[Group]) -> tuple[str | None, list[Group]]:
    """The groups that have a part of that name, and which of their labels it is."""
    for key in dict.fromkeys(key for group in among for key in group.labels):
        found = [group for group in among if key in group.labels and part(key, group.labels[key]) == name]
        if found:
            return key, found
    return None, []


def _at_the_same(key: str, among: Sequence[Group]) -> str:
    """The other labels in which groups differ, in words."""
    others = dict.fromkeys(other for group in among for other in group.labels if other != key)
    differing = [
        other
        for other in others
        if len({json.dumps(group.labels.get(other)) for group in among if group.labels}) > 1
    ]
    return f" at the same {', '.join(differing)}" if differing else ""


def _point(group: Group, key: str) -> str:
    """Where a group stands among those that differ in one label."""
    rest: dict[str, Any] = {other: value for other, value in group.labels.items() if other != key}
    return json.dumps(rest, sort_keys=True)
