from __future__ import annotations

from typing import Any

import pytest

from gossamer.errors import BadInput
from gossamer.results.groups import Group, find_baseline


def cell(**labels: Any) -> Group:
    """A group without runs, labelled as by a sweep."""
    parts = [str(value) if key == "cell" else f"{key}={value}" for key, value in labels.items()]
    return Group(", ".join(parts), (), labels)


def test_baseline_is_found_by_its_label() -> None:
    groups = [Group(label, ()) for label in ("d-psgd", "d-psgd, local_steps 5", "divshare")]
    for index, group in enumerate(groups):
        baseline = find_baseline(group.label, groups)
        assert baseline.title == group.label
        assert all(baseline.groups[other.label] is groups[index] for other in groups)
    for name in ("d-p", "ad-psgd", "div"):
        with pytest.raises(
            BadInput, match=rf"--baseline {name}: .*accepted: d-psgd; d-psgd, local_steps 5; "
        ):
            find_baseline(name, groups)


def test_entry_is_the_baseline_at_each_grid_point() -> None:
    groups = [cell(cell=name, steps=128, count=count) for name in ("a", "ab") for count in (0, 7)]
    baseline = find_baseline("a", groups)
    assert [baseline.groups[group.label] for group in groups] == [groups[0], groups[1]] * 2
    assert baseline.title == "a at the same count"  # all have the same number of steps
    # An entry run at one point only is no baseline at other points.
    baseline = find_baseline("a", groups[1:])
    assert baseline.groups == {groups[1].label: groups[1], groups[3].label: groups[1]}
    assert baseline.title == "a at the same count"


def test_grid_value_can_be_the_baseline() -> None:
    groups = [cell(rule=rule, count=count) for rule in ("a", "b") for count in (0, 7)]
    baseline = find_baseline("rule=b", groups)
    assert [baseline.groups[group.label] for group in groups] == [groups[2], groups[3]] * 2
    assert baseline.title == "rule=b at the same count"


def test_entry_without_grid_is_the_baseline_of_all() -> None:
    groups = [cell(cell="a", steps=8), cell(cell="b", steps=8)]
    baseline = find_baseline("a", groups)
    assert baseline.title == "a"
    assert [baseline.groups[group.label] for group in groups] == [groups[0]] * 2


def test_ambiguous_entry_name_is_refused() -> None:
    groups = [Group("first", (), {"cell": "a", "count": 0}), Group("second", (), {"cell": "a", "count": 0})]
    with pytest.raises(
        BadInput, match=r"^--baseline a: 2 groups are called that; accepted: first; second; a; count=0"
    ):
        find_baseline("a", groups)
    # A difference in another label does not resolve the ambiguity.
    groups.append(Group("third", (), {"cell": "a", "count": 7}))
    with pytest.raises(BadInput, match=r"^--baseline a: 3 groups are called that"):
        find_baseline("a", groups)
