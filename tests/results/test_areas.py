"""Areas of a sweep's cells, and differences of pairs, against the rows that were recorded."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy.stats import t

from gossamer import BadInput, Sweep, run_sweep
from gossamer.results.areas import areas, table
from gossamer.results.run import Run, load_runs

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
    "cells": {"slow": {"optimizer.lr": 0.01}, "fast": {"optimizer.lr": 0.3}},
    "grid": {"graph": {"few": {"topology": "ring"}, "all": {"topology": "complete"}}, "batch_size": [4, 8]},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    sweep = Sweep.of(SWEEP, out=tmp_path_factory.mktemp("runs"))
    assert run_sweep(sweep, jobs=1).counts.done == 16
    return load_runs(sweep.folder)


def area(run: Run, metric: str = "test_loss") -> float:
    rows = run.metrics.filter(pl.col("node") >= 0).group_by("round").agg(pl.col(metric).mean()).sort("round")
    return float(np.trapezoid(rows[metric], rows["round"]) / 5)


def test_a_row_has_the_mean_of_its_cell_and_of_the_differences_of_pairs(runs: list[Run]) -> None:
    found = areas(runs, "test_loss", "slow", ["graph"]).rows(named=True)
    order = [(row["graph"], row["cell"]) for row in found]
    assert order == [("few", "slow"), ("few", "fast"), ("all", "slow"), ("all", "fast")]
    for row in found:
        mine = [run for run in runs if run.labels["graph"] == row["graph"]]
        by = {
            (run.labels["cell"], run.labels["batch_size"], run.experiment["seed"]): area(run) for run in mine
        }
        own = {point[1:]: value for point, value in by.items() if point[0] == row["cell"]}
        slow = {point[1:]: value for point, value in by.items() if point[0] == "slow"}
        assert (row["runs"], row["area"]) == (4, pytest.approx(np.mean(list(own.values()))))
        half = t.ppf(0.975, 3) * np.std(list(own.values()), ddof=1) / 2
        assert row["area_half"] == pytest.approx(half)
        if row["cell"] == "slow":
            assert (row["pairs"], row["difference"], row["ratio"]) == (0, None, None)
            continue
        differences = [own[point] - slow[point] for point in own]
        assert row["pairs"] == 4
        assert row["difference"] == pytest.approx(np.mean(differences))
        assert row["difference_half"] == pytest.approx(
            t.ppf(0.975, 3) * np.std(differences, ddof=1) / math.sqrt(4)
        )
        ratio = sum(own.values()) / sum(slow.values())
        assert row["ratio"] == pytest.approx(ratio)
        residuals = [own[point] - ratio * slow[point] for point in own]
        half = t.ppf(0.975, 3) * np.std(residuals, ddof=1) / math.sqrt(4) / np.mean(list(slow.values()))
        assert row["ratio_half"] == pytest.approx(half)


def test_an_area_can_be_compared_with_that_of_another_metric(runs: list[Run]) -> None:
    rows = areas(runs, "test_accuracy", relative_to="test_loss")
    for row in rows.rows(named=True):
        shares = [
            area(run, "test_accuracy") / area(run) - 1 for run in runs if run.labels["cell"] == row["cell"]
        ]
        assert row["relative"] == pytest.approx(np.mean(shares))
        assert row["relative_half"] == pytest.approx(t.ppf(0.975, 7) * np.std(shares, ddof=1) / math.sqrt(8))
    _, head, lines = table(rows, "test_accuracy", None, "test_loss")
    assert head == ["cell", "runs", "area", "relative to test_loss"]
    assert all(line[3].endswith("%") for line in lines)


def test_without_axes_all_of_a_cell_is_one_row(runs: list[Run]) -> None:
    found = areas(runs, "test_accuracy")
    assert found.columns[0] == "cell"
    assert found["runs"].to_list() == [8, 8]
    _, head, lines = table(found, "test_accuracy", None, None)
    assert head == ["cell", "runs", "area"]
    assert [line[0] for line in lines] == ["slow", "fast"]
    assert all("%" in line[2] for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tset_loss",), "--area tset_loss: no run has recorded it .did you mean 'test_loss'"),
        (("test_loss", "slwo"), "--baseline slwo: no cell .did you mean 'slow'"),
        (("test_loss", None, (), "tset_loss"), "--relative-to tset_loss: no run has recorded it"),
        (("test_loss", "slow", ["grpah"]), "--per grpah: no axis of the sweep .did you mean 'graph'"),
    ],
)
def test_names_that_do_not_exist_are_refused(runs: list[Run], arguments: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        areas(runs, *arguments)


def test_a_run_that_several_experiments_share_counts_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    alone = {"optimizer.lr": 0.3, "topology.name": "complete", "topology.weights": "uniform"}
    cells = {"slow": {"optimizer.lr": 0.01}, "alone": alone}
    folder = tmp_path_factory.mktemp("shared")
    sweep = Sweep.of(SWEEP | {"cells": cells, "grid": {"graph": SWEEP["grid"]["graph"]}}, out=folder)
    assert run_sweep(sweep, jobs=1).counts.done == 6
    runs = load_runs(sweep.folder)
    slow, shared = areas(runs, "test_loss", "slow").rows(named=True)
    assert (slow["runs"], shared["runs"], shared["pairs"]) == (4, 2, 4)
    by = {(run.labels["cell"], run.labels["graph"], run.experiment["seed"]): area(run) for run in runs}
    means = [
        np.mean([by["alone", graph, seed] - by["slow", graph, seed] for graph in ("few", "all")])
        for seed in (1, 2)
    ]
    assert shared["difference"] == pytest.approx(np.mean(means))
    assert shared["difference_half"] == pytest.approx(t.ppf(0.975, 1) * np.std(means, ddof=1) / math.sqrt(2))


def test_two_runs_of_one_point_are_refused(runs: list[Run], tmp_path: Path) -> None:
    again = [replace(run, path=tmp_path / run.id) for run in runs]
    for run, copy in zip(runs, again, strict=True):
        shutil.copytree(run.path, copy.path)
    with pytest.raises(BadInput, match="two runs of slow with seed 1"):
        areas([*runs, *again], "test_loss")
