from __future__ import annotations

from typing import Any

import pytest

from gossamer.errors import BadInput
from gossamer.results.groups import Group, find_baseline


def cell(**labels: Any) -> Group:
    """A group of no runs, called as a sweep calls it."""
    parts = [str(value) if key == "cell" else f"{key}={value}" for key, value in labels.items()]
    return Group(", ".join(parts), (), labels)


def test_baseline_is_found_by_its_label() -> None:
    among = [Group(label, ()) for label in ("d-psgd", "d-psgd, local_steps 5", "divshare")]
    for index, group in enumerate(among):
        found = find_baseline(group.label, among)
        assert found.title == group.label
        assert all(found.groups[other.label] is among[index] for other in among)
    for name in ("d-p", "ad-psgd", "div"):
        with pytest.raises(
            BadInput, match=rf"--baseline {name}: .*accepted: d-psgd; d-psgd, local_steps 5; "
        ):
            find_baseline(name, among)


def test_entry_is_the_baseline_at_each_grid_point() -> None:
    among = [cell(cell=name, steps=128, count=count) for name in ("a", "ab") for count in (0, 7)]
    found = find_baseline("a", among)
    assert [found.groups[group.label] for group in among] == [among[0], among[1]] * 2
    assert found.title == "a at the same count"  # all have as many steps
    # Where it has been run at one point alone, it's no baseline of the others.
    found = find_baseline("a", among[1:])
    assert found.groups == {among[1].label: among[1], among[3].label: among[1]}
    assert found.title == "a at the same count"


def test_grid_value_can_be_the_baseline() -> None:
    among = [cell(rule=rule, count=count) for rule in ("a", "b") for count in (0, 7)]
    found = find_baseline("rule=b", among)
    assert [found.groups[group.label] for group in among] == [among[2], among[3]] * 2
    assert found.title == "rule=b at the same count"


def test_entry_without_grid_is_the_baseline_of_all() -> None:
    among = [cell(cell="a", steps=8), cell(cell="b", steps=8)]
    found = find_baseline("a", among)
    assert found.title == "a"
    assert [found.groups[group.label] for group in among] == [among[0]] * 2


def test_ambiguous_entry_name_is_refused() -> None:
    among = [Group("first", (), {"cell": "a", "count": 0}), Group("second", (), {"cell": "a", "count": 0})]
    with pytest.raises(
        BadInput, match=r"^--baseline a: 2 groups are called that; accepted: first; second; a; count=0"
    ):
        find_baseline("a", among)
    # That they differ in another label does not make them fit.
    among.append(Group("third", (), {"cell": "a", "count": 7}))
    with pytest.raises(BadInput, match=r"^--baseline a: 3 groups are called that"):
        find_baseline("a", among)
