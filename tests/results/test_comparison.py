"""Measures of groups and differences of pairs, against hand calculations and recorded rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy.stats import t

import gossamer
from gossamer import BadInput, Experiment, Sweep, run_sweep
from gossamer.results.comparison import Quantity, compare, quantities, quantity
from gossamer.results.groups import Group, default_baseline, find_baseline, groups
from gossamer.results.run import Run, load_runs
from synthetic_run import timed

TIME, BYTES = (quantity(f"{axis} to test_accuracy=0.5") for axis in ("time_s", "bytes"))


def rising(out: Path, *accuracies: float, step_s: float = 1.0, seed: int = 1, **settings: Any) -> Run:
    """A run of two nodes around these means, ``step_s`` apart; each sends 100 bytes per second."""
    points = [(step_s * k, (value - 0.1, value + 0.1)) for k, value in enumerate(accuracies)]
    return timed(out, points, seed=seed, **settings)


def group(out: Path, label: str, **seconds: int) -> Group:
    """Runs by rounds of a second that reach 0.5 at the given second of each seed."""
    runs = {int(seed[1:]): [0.1] * second + [0.6] for seed, second in seconds.items()}
    each = {"every_rounds": 1}
    return Group(
        label, tuple(rising(out, *curve, seed=seed, evaluation=each) for seed, curve in runs.items())
    )


def only(subject: Group | Run, measure: Quantity) -> dict[str, Any]:
    group = subject if isinstance(subject, Group) else Group("a", (subject,))
    return compare([group], [measure]).rows.row(0, named=True)


def test_first_point_at_level_counts_and_equality_suffices(tmp_path: Path) -> None:
    # Exactly 0.5 at 2 s, below it again at 3 s.
    run = rising(tmp_path, 0.25, 0.375, 0.5, 0.25, 0.75)
    row = only(run, TIME)
    assert (row["runs"], row["known"], row["mean"], row["mean_half"]) == (1, 1, 2.0, None)
    assert only(run, BYTES)["mean"] == 2 * 200
    assert only(run, quantity("test_accuracy"))["mean"] == pytest.approx(0.75)


def test_group_with_an_unreached_seed_has_no_mean(tmp_path: Path) -> None:
    curves = [(0.1, 0.9), (0.1, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4)]
    late = Group("a", tuple(rising(tmp_path, *curve, seed=seed) for seed, curve in enumerate(curves)))
    row = only(late, TIME)
    assert (row["runs"], row["known"], row["mean"]) == (3, 1, None)


def test_repeated_run_counts_once(tmp_path: Path) -> None:
    runs = tuple(rising(tmp_path, *[0.1] * steps, 0.6, seed=seed) for seed, steps in ((1, 9), (1, 1), (2, 3)))
    row = only(Group("a", runs), TIME)
    assert (row["runs"], row["mean"]) == (2, 2.0)  # 1 s and 3 s


def test_runs_on_different_grids_are_measured(tmp_path: Path) -> None:
    fine = rising(tmp_path, 0.1, 0.2, 0.3, 0.4, 0.5, step_s=0.25, evaluation={"every_s": 0.25})
    by_round = rising(tmp_path, 0.1, 0.2, 0.5, step_s=0.7, evaluation={"every_rounds": 1})
    assert (only(fine, TIME)["mean"], only(by_round, TIME)["mean"]) == (1.0, pytest.approx(1.4))


def test_nan_mean_does_not_reach_level(tmp_path: Path) -> None:
    points = [(0.0, (0.1, 0.1)), (1.0, (0.9, math.nan)), (2.0, (0.9, 0.9))]
    assert only(timed(tmp_path, points), TIME)["mean"] == 2.0
    lower = [(0.0, (1.0, 1.0)), (1.0, (0.1, math.nan)), (2.0, (math.nan, math.nan))]
    diverged = timed(tmp_path, lower, metric="test_loss")
    assert only(diverged, quantity("time_s to test_loss=0.5"))["mean"] is None
    assert math.isnan(only(diverged, quantity("test_loss"))["mean"])


def test_loss_level_is_reached_from_above(tmp_path: Path) -> None:
    points = [(0.0, (3.0, 1.0)), (1.0, (1.5, 0.5)), (2.0, (0.5, 0.25))]
    time = quantity("time_s to test_rmse=1")
    assert only(timed(tmp_path, points, metric="test_rmse"), time)["mean"] == 1.0
    assert time.table == "test rmse ≤ 1"


def test_level_needs_all_surviving_nodes(tmp_path: Path) -> None:
    """A node that has fallen behind keeps its last value; a lost one does not count."""
    points = [(0.0, (0.1, 0.1)), (1.0, (0.8, None)), (2.0, (0.8, None))]
    assert only(timed(tmp_path, points, evaluation={"every_rounds": 1}), TIME)["known"] == 0
    assert only(timed(tmp_path, points, lost=(1,)), TIME)["mean"] == 1.0


def test_budget_uses_last_evaluation_within_it(tmp_path: Path) -> None:
    run = rising(tmp_path, 0.1, 0.2, 0.3, 0.4)  # 0, 200, 400, 600 bytes
    budgets = ("bytes=400", "bytes=599", "time_s=1.5", "bytes=601")
    values = [only(run, quantity(f"test_accuracy at {budget}"))["mean"] for budget in budgets]
    # A run that has not spent its budget might have reached more.
    assert values == [pytest.approx(0.3), pytest.approx(0.3), pytest.approx(0.2), None]


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    base, fast = group(tmp_path, "base", s1=4, s2=6, s3=8), group(tmp_path, "fast", s3=5, s1=2, s2=3)
    never = Group("never", tuple(rising(tmp_path, 0.1, 0.2, seed=seed) for seed in (1, 2, 3)))
    others = group(tmp_path, "others", s7=1, s8=1)
    all_groups = [base, fast, never, others]
    compared = compare(all_groups, [TIME], find_baseline("base", all_groups))
    itself, faster, unreached, apart = compared.rows.rows(named=True)
    differences = np.array([2, 3, 5]) - np.array([4, 6, 8])
    assert (faster["pairs"], faster["difference"]) == (3, pytest.approx(differences.mean()))
    half = t.ppf(0.975, 2) * differences.std(ddof=1) / math.sqrt(3)
    assert faster["difference_half"] == pytest.approx(half)
    # The interval of the unpaired times is wide; that of the differences excludes the effect of the seed.
    assert faster["mean_half"] > half
    assert faster["ratio"] == pytest.approx(10 / 18)
    residuals = np.array([2, 3, 5]) - 10 / 18 * np.array([4, 6, 8])
    assert faster["ratio_half"] == pytest.approx(t.ppf(0.975, 2) * residuals.std(ddof=1) / math.sqrt(3) / 6)
    assert (itself["pairs"], unreached["pairs"], apart["pairs"]) == (0, 0, 0)
    against_never = compare(all_groups, [TIME], find_baseline("never", all_groups)).rows
    assert against_never["difference"].to_list() == [None] * 4
    [(title, head, lines)] = compared.tables()
    assert (title, head) == (
        "test accuracy ≥ 50 %, against base",
        ["group", "runs", "seeds", "pairs", "time", "difference", "ratio"],
    )
    assert lines[1] == ["fast", "3/3", "3", "3", "3.3 ± 3.8 s", "-2.7 ± 1.4 s", "0.56 ± 0.2"]
    assert lines[2] == ["never", "3/3", "3", "–", "0 of 3 reached it", "–", "–"]
    assert lines[3][-3:] == ["1.00, 1.00 s", "–", "–"]  # two seeds have no interval
    assert any("pairs with the same seed" in note for note in compared.notes)


def test_groups_are_compared_at_their_own_grid_point(tmp_path: Path) -> None:
    def cell(name: str, count: int, *seconds: int) -> Group:
        made = group(tmp_path, f"{name}, count={count}", **{f"s{k}": time for k, time in enumerate(seconds)})
        return Group(made.label, made.runs, {"cell": name, "count": count})

    all_groups = [cell("new", 0, 2, 4), cell("new", 9, 4, 8), cell("old", 0, 3, 6), cell("old", 9, 12, 24)]
    baseline = find_baseline("old", all_groups)
    assert baseline.title == "old at the same count"
    rows = compare(all_groups, [TIME], baseline).rows
    assert rows["difference"].to_list() == [-1.5, -12.0, None, None]
    # A value of the grid as baseline.
    by_count = compare(all_groups, [TIME], find_baseline("count=0", all_groups)).rows
    assert by_count["difference"].to_list() == [None, 3.0, None, 13.5]
    # One row per cell, over the grid; pairs are still of one grid point.
    merged = compare(all_groups, [TIME], baseline, ["cell"]).rows.rows(named=True)
    assert [(row["group"], row["runs"], row["pairs"]) for row in merged] == [("new", 4, 2), ("old", 4, 0)]
    assert merged[0]["difference"] == -6.75
    assert merged[0]["difference_values"] == [3.0 - 7.5, 6.0 - 15.0]  # by seed, over the two counts
    first = default_baseline(all_groups)
    assert first is not None
    assert first.title == "new at the same count"


SWEEP: dict[str, Any] = {
    "name": "areas",
    "base": {
        "nodes": 4,
        "task": {"name": "digits", "model": "logistic", "samples": 80},
        "algorithm": "d-psgd",
        "evaluation": {"every_rounds": 2, "samples": 40},
        "stop": {"rounds": 5},
    },
    "seeds": 2,
    "cells": {
        "slow": {"optimizer.lr": 0.01},
        "alone": {"optimizer.lr": 0.3, "topology.name": "complete", "topology.weights": "uniform"},
    },
    "grid": {"graph": {"few": {"topology": "ring"}, "all": {"topology": "complete"}}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    sweep = Sweep.of(SWEEP, out=tmp_path_factory.mktemp("runs"))
    assert run_sweep(sweep, jobs=1).counts.done == 6
    return load_runs(sweep.folder)


def area(run: Run, metric: str = "test_loss") -> float:
    rows = run.metrics.filter(pl.col("node") >= 0).group_by("round").agg(pl.col(metric).mean()).sort("round")
    return float(np.trapezoid(rows[metric], rows["round"]) / 5)


def test_areas_are_averaged_within_a_seed(runs: list[Run]) -> None:
    all_groups = groups(runs)
    areas = [quantity("area test_loss"), quantity("area test_loss relative to test_accuracy")]
    rows = compare(all_groups, areas, find_baseline("slow", all_groups), ["cell"]).rows
    slow, alone, slow_relative, _ = rows.rows(named=True)
    area_of = {(run.labels["cell"], run.labels["graph"], run.experiment["seed"]): area(run) for run in runs}
    # Experiments: the cell "alone" has the same run at both points.
    assert (slow["runs"], slow["units"], alone["runs"], alone["pairs"]) == (4, 2, 4, 2)
    slow_areas = [np.mean([area_of["slow", graph, seed] for graph in ("few", "all")]) for seed in (1, 2)]
    assert slow["mean"] == pytest.approx(np.mean(slow_areas))
    assert (slow["mean_values"], slow["mean_half"]) == (pytest.approx(slow_areas), None)
    means = [
        np.mean([area_of["alone", graph, seed] - area_of["slow", graph, seed] for graph in ("few", "all")])
        for seed in (1, 2)
    ]
    assert alone["difference"] == pytest.approx(np.mean(means))
    assert (alone["difference_values"], alone["difference_half"]) == (pytest.approx(means), None)
    shares = [area(run) / area(run, "test_accuracy") - 1 for run in runs if run.labels["cell"] == "slow"]
    assert slow_relative["mean"] == pytest.approx(np.mean(shares))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"metrics": ["tset_loss"]}, "--metrics tset_loss: no run has recorded it .did you mean 'test_loss'"),
        ({"levels": ["tset_loss=1"]}, "--time-to tset_loss: no run has recorded it"),
        ({"area_of": "tset_loss"}, "--area tset_loss: no run has recorded it"),
        ({"area_of": "test_loss", "relative_to": "tset"}, "--relative-to tset: no run has recorded it"),
        ({"relative_to": "test_loss"}, "--relative-to test_loss: accepted: together with --area METRIC"),
        ({"levels": ["test_loss=high"]}, "--time-to test_loss=high: accepted: METRIC=LEVEL"),
        ({"budgets": ["bites=1"]}, "--budget bites=1: accepted: bytes=N"),
        ({"budgets": ["bytes="]}, "--budget bytes=: accepted: bytes=N"),
    ],
)
def test_unknown_names_and_bad_numbers_are_refused(runs: list[Run], asked: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        quantities(runs, **asked)
    with pytest.raises(BadInput, match="--per grpah: no axis of the sweep .did you mean 'graph'"):
        compare(groups(runs), quantities(runs), None, ["grpah"])


def test_bytes_of_a_record_without_totals_are_at_least_those(tmp_path: Path) -> None:
    groups = [group(tmp_path / name, name, s1=1) for name in ("one", "two")]
    text = "Bytes are those on record: at least so many were sent."
    for name, said in (("bytes", True), ("bytes to test_accuracy=0.5", True), ("test_accuracy", False)):
        assert (text in compare(groups, [quantity(name)]).notes) == said, name


def test_groups_whose_rounds_end_with_unmixed_steps_are_named(tmp_path: Path) -> None:
    def recorded(algorithm: str, of: str) -> Run:
        described = {
            "nodes": 3,
            "task": {"name": "least-squares", "features": 3, "samples": 30, "test_samples": 20},
            "algorithm": algorithm,
            "network": {"name": "uniform", "latency_s": 0.001},
            "evaluation": {"every_rounds": 1, "of": of},
            "stop": {"rounds": 2},
        }
        return gossamer.run(Experiment.of(described), tmp_path)

    cells = {
        "a": ("d-psgd", "round"),
        "b": ("swift", "round"),
        "c": ("swift", "mixed"),
        "d": ("local", "round"),
    }
    notes = compare(
        [Group(label, (recorded(*cell),)) for label, cell in cells.items()], [quantity("test_loss")]
    ).notes
    [unmixed] = [note for note in notes if "not mixed yet" in note]
    assert unmixed.startswith("Rounds of b end with local steps")
    assert any(note.startswith("Values of c are those of the last mixing") for note in notes)
