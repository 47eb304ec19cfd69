from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
from synthetic_run import timed

from gossamer.errors import BadInput
from gossamer.results.comparison import (
    Group,
    Level,
    find_baseline,
    level_text,
    note,
    parse_levels,
    tables,
    time_to,
)

HALF = Level("test_accuracy", 0.5)


def rising(out: Path, *accuracies: float, step_s: float = 1.0, seed: int = 1, **settings: Any) -> Any:
    """A run of two nodes around these means, so many seconds apart."""
    points = [(step_s * k, (value - 0.1, value + 0.1)) for k, value in enumerate(accuracies)]
    return timed(out, points, seed=seed, **settings)


Speed = tuple[float | None, float | None, float | None]


def only(groups: Sequence[Group], level: Level = HALF, **options: Any) -> SimpleNamespace:
    [row] = rows_of(time_to(groups, [level], **options))
    return row


def rows_of(table: pl.DataFrame) -> list[SimpleNamespace]:
    return [SimpleNamespace(**row) for row in table.to_dicts()]


def speeds_of(table: pl.DataFrame) -> list[Speed]:
    return table.select("speed", "speed_low", "speed_high").rows()


def test_the_first_point_that_is_there_counts_and_a_tie_is_there(tmp_path: Path) -> None:
    # Exactly 0.5 at 2 s, below it again at 3 s.
    row = only([Group("a", (rising(tmp_path, 0.25, 0.375, 0.5, 0.25, 0.75),))])
    assert (row.runs, row.reached, row.not_before_s) == (1, 1, None)
    assert (row.time_s, row.time_s_half) == (2.0, None)
    assert row.bytes == 2 * 200  # two nodes, 100 bytes a second
    assert row.final == pytest.approx(0.75)


def test_seeds_have_a_mean_and_an_interval_worked_by_hand(tmp_path: Path) -> None:
    curves = [(0.1, 0.5), (0.1, 0.2, 0.6), (0.1, 0.2, 0.3, 0.7)]  # there at 1, 2 and 3 s
    runs = tuple(rising(tmp_path, *curve, seed=seed) for seed, curve in enumerate(curves))
    row = only([Group("a", runs)])
    assert row.reached == row.runs == 3
    assert row.time_s == 2.0
    assert row.time_s_half == pytest.approx(4.302653 / math.sqrt(3))  # t(0.975, 2) s / sqrt(n), s = 1
    assert row.bytes_half == pytest.approx(200 * 4.302653 / math.sqrt(3))
    assert row.final == pytest.approx(0.6)
    assert row.final_half == pytest.approx(0.1 * 4.302653 / math.sqrt(3))


def test_a_run_that_was_repeated_counts_once(tmp_path: Path) -> None:
    runs = tuple(rising(tmp_path, *[0.1] * at, 0.6, seed=seed) for seed, at in ((1, 9), (1, 1), (2, 3)))
    base = Group("base", (rising(tmp_path, 0.1, 0.1, 0.6), rising(tmp_path, *[0.1] * 3, 0.6, seed=2)))
    groups = [Group("a", runs), base]
    row, _ = rows_of(time_to(groups, [HALF], find_baseline("base", groups)))
    assert (row.runs, row.reached) == (2, 2)
    assert row.time_s == 2.0  # 1 s and 3 s
    assert (row.speed, row.speed_low, row.speed_high) == (1.25, 1.0, 2.0)


def test_a_group_that_is_not_there_with_every_seed_has_no_mean(tmp_path: Path) -> None:
    curves = [(0.1, 0.9), (0.1, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4)]
    runs = tuple(rising(tmp_path, *curve, seed=seed) for seed, curve in enumerate(curves))
    row = only([Group("a", runs)])
    assert (row.runs, row.reached, row.time_s, row.bytes, row.speed) == (3, 1, None, None, None)
    assert row.not_before_s == 2.0  # for so long both of the others were watched
    none = only([Group("a", runs)], Level("test_accuracy", 0.95))
    assert (none.reached, none.not_before_s) == (0, 1.0)


def test_grids_may_differ(tmp_path: Path) -> None:
    fine = rising(tmp_path, 0.1, 0.2, 0.3, 0.4, 0.5, step_s=0.25, evaluation={"every_s": 0.25})
    coarse = rising(tmp_path, 0.1, 0.5, step_s=2.0, evaluation={"every_s": 2.0})
    by_round = rising(tmp_path, 0.1, 0.2, 0.5, step_s=0.7, evaluation={"every_rounds": 1})
    rows = time_to([Group("fine", (fine,)), Group("coarse", (coarse,)), Group("rounds", (by_round,))], [HALF])
    assert rows["time_s"].to_list() == [1.0, 2.0, pytest.approx(1.4)]


def test_a_mean_that_is_not_a_number_is_not_there(tmp_path: Path) -> None:
    points = [(0.0, (0.1, 0.1)), (1.0, (0.9, math.nan)), (2.0, (0.9, 0.9))]
    row = only([Group("a", (timed(tmp_path, points),))])
    assert row.time_s == 2.0
    lower = [(0.0, (1.0, 1.0)), (1.0, (0.1, math.nan)), (2.0, (math.nan, math.nan))]
    diverged = Group("a", (timed(tmp_path, lower, metric="test_loss"),))
    row = only([diverged], Level("test_loss", 0.5))
    assert (row.reached, row.not_before_s) == (0, 2.0)
    assert math.isnan(row.final)
    assert row.final_half is None


def test_losses_are_reached_from_above(tmp_path: Path) -> None:
    points = [(0.0, (3.0, 1.0)), (1.0, (1.5, 0.5)), (2.0, (0.5, 0.25))]
    run = timed(tmp_path, points, metric="test_rmse")
    row = only([Group("a", (run,))], Level("test_rmse", 1.0))
    assert row.time_s == 1.0


def test_fast_nodes_alone_are_not_there_but_those_that_outlive_others_are(tmp_path: Path) -> None:
    points = [(0.0, (0.1, 0.1)), (1.0, (0.9, None)), (2.0, (0.9, None))]
    killed = only([Group("a", (timed(tmp_path, points, evaluation={"every_rounds": 1}),))])
    assert (killed.reached, killed.not_before_s) == (0, 0.0)
    lost = only([Group("a", (timed(tmp_path, points, lost=(1,)),))])
    assert lost.time_s is not None
    assert lost.time_s == 1.0


def test_the_baseline_is_compared_by_means_and_seed_by_seed(tmp_path: Path) -> None:
    def group(label: str, **there_at: int) -> Group:
        runs = {int(seed[1:]): [0.1] * at + [0.6] for seed, at in there_at.items()}
        return Group(label, tuple(rising(tmp_path, *curve, seed=seed) for seed, curve in runs.items()))

    base = group("base", s1=4, s2=6)
    fast = group("fast", s1=1, s2=3)
    others = group("others", s1=2, s3=3)
    never = Group("never", (rising(tmp_path, 0.1, 0.2), rising(tmp_path, 0.1, 0.6, seed=2)))
    at_once = Group("at once", (rising(tmp_path, 0.6), rising(tmp_path, 0.6, seed=2)))
    groups = [base, fast, others, never, at_once]
    speeds = speeds_of(time_to(groups, [HALF], find_baseline("base", groups)))
    # (4 + 6) / (1 + 3), from 6 / 3 to 4 / 1; other seeds can't be paired.
    none = (None, None, None)
    assert speeds == [(1.0, 1.0, 1.0), (2.5, 2.0, 4.0), (2.0, None, None), none, none]
    assert speeds_of(time_to(groups, [HALF], find_baseline("never", groups))) == [none] * 5
    assert speeds_of(time_to(groups, [HALF])) == [none] * 5


def test_every_group_is_compared_with_the_baseline_of_its_own_grid_point(tmp_path: Path) -> None:
    def group(cell: str, stragglers: int, *there_at: int) -> Group:
        runs = [rising(tmp_path, *[0.1] * at, 0.6, seed=seed) for seed, at in enumerate(there_at)]
        labels = {"cell": cell, "network.count": stragglers}
        return Group(f"{cell}, network.count={stragglers}", tuple(runs), labels)

    groups = [
        group("divshare", 0, 2, 4),
        group("divshare", 30, 4, 8),
        group("ad-psgd", 0, 3, 6),
        group("ad-psgd", 30, 12, 24),
        group("divshare", 7, 3, 3),
    ]
    baseline = find_baseline("ad-psgd", groups)
    rows = time_to(groups, [HALF], baseline)
    # 4.5 s / 3 s, and 18 s / 6 s; nobody has run the baseline with 7 stragglers.
    itself, none = (1.0, 1.0, 1.0), (None, None, None)
    assert speeds_of(rows) == [(1.5, 1.5, 1.5), (3.0, 3.0, 3.0), itself, itself, none]
    without, with_30 = "ad-psgd, network.count=0", "ad-psgd, network.count=30"
    assert rows["baseline"].to_list() == [without, with_30, without, with_30, None]
    [(title, _, lines)] = tables(rows, baseline.title)
    assert title == "test accuracy ≥ 50 %, against ad-psgd at the same network.count"
    assert [line[3] for line in lines] == ["1.5 (1.5 to 1.5)", "3 (3 to 3)", "1", "1", "–"]

    # A whole label is that of all; 4.5 s / (3, 6, 4.5, 18, 3) s.
    against_one = time_to(groups, [HALF], find_baseline(without, groups))
    assert against_one["speed"].to_list() == [1.5, 0.75, 1.0, 0.25, 1.5]
    # What stragglers cost each algorithm: 6 s and 18 s without, by 3 s and 4.5 s.
    by_count = time_to(groups, [HALF], find_baseline("network.count=0", groups))
    assert by_count["speed"].to_list() == [1.0, 0.5, 1.0, 0.25, 1.0]


def test_several_levels_and_the_table_of_them(tmp_path: Path) -> None:
    runs = tuple(rising(tmp_path, 0.1, 0.5, 0.9, seed=seed) for seed in (1, 2))
    groups = [Group("a", runs), Group("b", (rising(tmp_path, 0.1, 0.5),))]
    table = time_to(groups, parse_levels(["test_accuracy=0.5,0.9"]), find_baseline("a", groups))
    assert table.select("group", "level", "runs", "reached").rows() == [
        ("a", 0.5, 2, 2),
        ("b", 0.5, 1, 1),
        ("a", 0.9, 2, 2),
        ("b", 0.9, 1, 0),
    ]
    assert table["time_s"].to_list() == [1.0, 1.0, 2.0, None]
    assert table["time_s_half"].to_list() == [0.0, None, 0.0, None]
    assert table["not_before_s"].to_list() == [None, None, None, 1.0]
    assert table["speed"].to_list() == [1.0, 1.0, 1.0, None]
    assert table["bytes"].to_list() == [200.0, 200.0, 400.0, None]
    assert table["final"].to_list() == pytest.approx([0.9, 0.5, 0.9, 0.5])
    assert table.schema["time_s"] == pl.Float64
    first, second = tables(table, "a")
    assert first[0] == "test accuracy ≥ 50 %, against a"
    assert first[1] == ["", "reached", "time / s", "times as fast", "sent", "at the end"]
    assert first[2] == [
        ["a", "2/2", "1 ± 0", "1", "200 ± 0 B", "90 ± 0 %"],
        ["b", "1/1", "1", "1", "200 B", "50 %"],
    ]
    assert second[2][1] == ["b", "0/1", "> 1", "–", "–", "50 %"]
    assert tables(table)[0][1] == ["", "reached", "time / s", "sent", "at the end"]
    assert "not interpolated" in note(None)
    assert "baseline" in note("a")


def test_levels_are_read_and_shown() -> None:
    assert parse_levels(["test_accuracy=0.5,0.6", "test_loss=1"]) == [
        Level("test_accuracy", 0.5),
        Level("test_accuracy", 0.6),
        Level("test_loss", 1.0),
    ]
    assert level_text(Level("test_accuracy", 0.625)) == "test accuracy ≥ 62.5 %"
    assert level_text(Level("consensus_distance", 0.01)) == "consensus distance ≤ 0.01"
    for wrong in (
        "test_accuracy",
        "test_accuracy=",
        "=0.5",
        "test_accuracy=0.5,",
        "test_accuracy=high",
        "x=nan",
    ):
        with pytest.raises(BadInput, match="METRIC=LEVEL"):
            parse_levels([wrong])


def test_a_metric_that_no_run_has_is_named(tmp_path: Path) -> None:
    with_it, without = rising(tmp_path, 0.1, 0.6), rising(tmp_path, 1.0, metric="test_loss", seed=2)
    with pytest.raises(BadInput, match=r"test_acuracy: .*did you mean 'test_accuracy'"):
        time_to([Group("a", (with_it,))], [Level("test_acuracy", 0.5)])
    row = only([Group("a", (with_it, without))])
    assert (row.runs, row.reached, row.not_before_s) == (2, 1, 0.0)
