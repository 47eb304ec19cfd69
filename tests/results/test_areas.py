"""Means over rounds: runs and metrics are compared over the rounds that all of them have, against hand calculations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from gossamer.results.comparison import compare, quantity
from gossamer.results.groups import Group
from gossamer.results.run import Run
from synthetic_run import timed


def recorded(out: Path, seed: int = 1, **curves: Mapping[int, float]) -> Run:
    """A run of one node with the values of metrics at some rounds."""
    rounds = sorted({r for curve in curves.values() for r in curve})
    run = timed(out, [(float(r), (0.0,)) for r in rounds], seed=seed, evaluation={"every_rounds": 1})
    columns = {name: [curve.get(r) for r in rounds] for name, curve in curves.items()}
    rows = run.metrics.with_columns(round=pl.Series(rounds, dtype=pl.Int64)).drop("test_accuracy")
    run.__dict__["metrics"] = rows.with_columns(
        pl.Series(name, values, dtype=pl.Float64) for name, values in columns.items()
    )
    return run


def test_two_metrics_are_compared_over_their_common_rounds(tmp_path: Path) -> None:
    # The training loss has no value at round 0, where the initial loss of 2.3 would count for the test loss alone.
    run = recorded(tmp_path, test_loss={0: 2.3, 10: 1.2, 20: 1.0}, train_loss={10: 1.1, 20: 1.05})
    relative = quantity("area test_loss relative to train_loss")
    table = compare([Group("a", (run,))], [relative])
    assert table.rows["mean"].to_list() == [pytest.approx(1.1 / 1.075 - 1)]
    assert table.tables()[0][0] == "area under test loss, over rounds 10 to 20"


def test_runs_of_different_length_are_compared_over_their_common_rounds(tmp_path: Path) -> None:
    def learned(r: int) -> float:
        return float(1 - np.exp(-0.05 * r))

    # The same curve, once until round 30 and once until round 90, which is closer to its limit.
    runs = [
        recorded(tmp_path, test_accuracy={r: learned(r) for r in range(0, last + 1, 5)}) for last in (30, 90)
    ]
    groups = [Group(label, (run,)) for label, run in zip(("short", "long"), runs, strict=True)]
    table = compare(groups, [quantity("area test_accuracy")])
    rounds = np.arange(0, 31, 5)
    expected = np.trapezoid([learned(r) for r in rounds], rounds) / 30
    assert table.rows["mean"].to_list() == [pytest.approx(expected)] * 2
    assert table.tables()[0][0] == "area under test accuracy, over rounds 0 to 30"


def test_the_ends_of_the_common_rounds_may_lie_between_evaluations(tmp_path: Path) -> None:
    runs = [
        recorded(tmp_path, test_loss={0: 4.0, 4: 2.0, 8: 1.0}),
        recorded(tmp_path, test_loss={2: 3.0, 6: 1.5}),
    ]
    groups = [Group(label, (run,)) for label, run in zip("ab", runs, strict=True)]
    first, second = compare(groups, [quantity("area test_loss")]).rows["mean"]
    # Linear between points: 3 at round 2, 2 at round 4, 1.5 at round 6.
    assert first == pytest.approx(((3 + 2) / 2 * 2 + (2 + 1.5) / 2 * 2) / 4)
    assert second == pytest.approx((3 + 1.5) / 2)


def test_runs_without_common_rounds_are_not_compared(tmp_path: Path) -> None:
    runs = [recorded(tmp_path, test_loss={0: 4.0, 4: 2.0}), recorded(tmp_path, test_loss={5: 3.0, 6: 1.5})]
    groups = [Group(label, (run,)) for label, run in zip("ab", runs, strict=True)]
    [(title, _, lines)] = compare(groups, [quantity("area test_loss")]).tables()
    assert title == "area under test loss, over no rounds, since the runs have none in common"
    assert [line[-1] for line in lines] == ["0 of 1 have it"] * 2
