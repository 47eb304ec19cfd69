"""Labels of groups and texts of numbers."""

from __future__ import annotations

from typing import Any

import pytest

from gossamer.results.formatting import (
    beyond_rounding,
    distinguishing_names,
    flat,
    interval_text,
    ranks_text,
    some,
    values_text,
)


def names(*settings: dict[str, Any]) -> list[str]:
    return distinguishing_names([flat({"codec": None, "faults": [], **setting}) for setting in settings])


def chain(bits: int) -> dict[str, Any]:
    top = {"name": "top-k", "accumulate": True, "fraction": 0.1, "momentum": 0.0}
    return {"codec": [top, {"name": "quantize", "bits": bits, "block": 256}]}


def crash(*nodes: int, at_round: int) -> dict[str, Any]:
    return {"name": "crash", "nodes": list(nodes), "at_round": at_round}


def test_listed_components_are_told_apart_by_what_differs() -> None:
    assert names(chain(8), chain(4)) == ["quantize bits=8", "quantize bits=4"]
    assert names({"faults": [crash(1, 2, at_round=9)]}, {"faults": [crash(2, at_round=20)]}) == [
        "crash nodes=[1, 2] at_round=9",
        "crash nodes=[2] at_round=20",
    ]


def test_lists_of_different_components_are_told_apart_by_their_names() -> None:
    alone = {"codec": {"name": "quantize", "bits": 8, "block": 256}}
    assert names(chain(8), alone, {}) == ["top-k + quantize", "quantize", "no codec"]
    assert names({}, {"faults": [crash(1, at_round=2)]}) == ["no faults", "crash"]
    several = [{"faults": [crash(1, at_round=2)]}, {"faults": [crash(1, at_round=5)]}, {}]
    assert names(*several) == ["crash, at_round=2", "crash, at_round=5", "no faults"]


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (25.54, 1.3e-15, "25.54 ± 0 s"),
        (25.54, 0.0, "25.54 ± 0 s"),
        (25.54, 4e-9, "25.54 ± 4e-09 s"),  # nanoseconds, the steps of virtual time, are no rounding errors
        (1e-20, 1e-21, "1e-20 ± 1e-21 s"),  # small in size, not in relation
        (0.0, 1e-18, "0 ± 1e-18 s"),
        (-25.54, 1.3e-15, "-25.54 ± 0 s"),
    ],
)
def test_interval_that_is_rounding_error_is_zero(mean: float, half: float, text: str) -> None:
    assert interval_text(mean, half, "s") == text


def test_sum_of_many_steps_is_equal_beyond_rounding() -> None:
    added = 0.0
    for _ in range(10_000):
        added += 0.1
    assert added != 1000.0
    assert beyond_rounding(added - 1000.0, 1000.0) == 0.0
    assert beyond_rounding(1e-9, 25.0) == 1e-9


def test_values_share_their_decimal_places() -> None:
    assert values_text([0.412, 0.4349], "%", 0.01) == "41.2, 43.5 %"
    assert values_text([0.1002, -0.0093], "points", 0.01, signed=True) == "+10.0, -0.9 points"
    assert values_text([123456.0, 7.0]) == "123456, 7"
    assert values_text([0.0, 0.0], "s") == "0, 0 s"
    assert values_text([2e-20, 1e-20]) == "2.00e-20, 1.00e-20"


def test_long_lists_are_cut() -> None:
    assert some(["a"]) == "a"
    assert some(["a", "b", "c"]) == "a, b and c"
    assert some([*"abcdefgh"]) == "a, b, c, d, e and 3 more"


def test_ranks_in_a_row_are_a_range() -> None:
    assert ranks_text([7, 2, 0, 1, 9, 8, 4]) == "0-2, 4, 7-9"
    assert ranks_text([]) == ""
