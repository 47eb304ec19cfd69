"""Runs that did not finish: statistics leave them out and name them, and a group with a diverged run has no mean."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy.stats import t

from gossamer.results.comparison import compare, quantity
from gossamer.results.groups import Group, find_baseline, group_curve, groups, labels
from gossamer.results.plots import curve_figure
from gossamer.results.report import page_data, render, write_comparison
from gossamer.results.run import Run
from synthetic_run import timed

ACCURACY = quantity("test_accuracy")


def ended(out: Path, seed: int, value: float, status: str = "done", **settings: Any) -> Run:
    return timed(
        out, [(0.0, (0.1, 0.1)), (1.0, (value - 0.1, value + 0.1))], seed=seed, status=status, **settings
    )


def cells(out: Path) -> list[Group]:
    """Groups whose third seeds are done, failed and diverged."""
    statuses = {"whole": "done", "broken": "failed", "wild": "diverged"}
    return groups(
        [
            Run(ended(out, seed, 0.4 + 0.1 * seed, status if seed == 3 else "done", batch_size=k).path, name)
            for k, (name, status) in enumerate(statuses.items(), 1)
            for seed in (1, 2, 3)
        ]
    )


def test_only_finished_runs_have_a_mean(tmp_path: Path) -> None:
    table = compare(cells(tmp_path), [ACCURACY])
    whole, broken, wild = table.rows.rows(named=True)
    assert (whole["runs"], whole["counted"], whole["mean"]) == (3, 3, pytest.approx(0.6))
    assert whole["mean_half"] == pytest.approx(t.ppf(0.975, 2) * 0.1 / math.sqrt(3))
    assert (broken["runs"], broken["counted"]) == (3, 2)
    assert (broken["mean"], broken["mean_half"]) == (pytest.approx(0.55), None)
    assert (wild["runs"], wild["counted"], wild["diverged"], wild["mean"]) == (3, 2, 1, None)
    [(_, head, lines)] = table.tables()
    assert head == ["group", "runs", "seeds", "test accuracy"]
    assert lines == [
        ["whole", "3/3", "3", "60 ± 25 %"],
        ["broken", "2/3", "2", "50.0, 60.0 %"],
        ["wild", "2/3", "2", "1 of 3 diverged"],
    ]
    assert "Not counted: broken, seed 3 (failed)." in table.notes
    assert "Diverged: wild, seed 3." in table.notes


def test_option_counts_unfinished_runs(tmp_path: Path) -> None:
    every = [Group(group.label, group.runs, unfinished=True) for group in cells(tmp_path)]
    table = compare(every, [ACCURACY])
    _, broken, wild = table.rows.rows(named=True)
    assert (broken["counted"], broken["mean"]) == (3, pytest.approx(0.6))
    assert wild["mean"] is None  # a diverged run is a result, whatever is asked
    assert "Counted, though not done: broken, seed 3 (failed)." in table.notes


def test_reached_levels_are_told_from_unfinished_runs(tmp_path: Path) -> None:
    runs = [ended(tmp_path, seed, value) for seed, value in ((1, 0.9), (2, 0.3), (3, 0.8))]
    runs.append(ended(tmp_path, 4, 0.9, "stopped"))
    [(_, _, [line])] = compare(groups(runs), [quantity("time_s to test_accuracy=0.5")]).tables()
    assert line == ["timed", "3/4", "3", "2 of 3 reached it"]


def test_few_seeds_print_their_values(tmp_path: Path) -> None:
    def two(name: str, *values: float) -> Group:
        by_rounds = {"evaluation": {"every_rounds": 1}}
        runs = [ended(tmp_path, seed, value, **by_rounds) for seed, value in enumerate(values)]
        return Group(name, tuple(runs))

    pair = [two("a", 0.412, 0.435), two("b", 0.512, 0.385)]
    table = compare(pair, [ACCURACY, quantity("time_s to test_accuracy=0.3")], find_baseline("a", pair))
    (_, _, finals), (_, _, times) = table.tables()
    assert finals[1] == ["b", "2/2", "2", "2", "51.2, 38.5 %", "+10.0, -5.0 points"]
    assert times[1][-1] == "1.00, 1.00"  # the ratio of each seed
    path = write_comparison(table, tmp_path / "page.html")
    row = pl.read_csv(path).filter(group="b").row(0, named=True)
    assert (row["mean_half"], row["difference_half"]) == (None, None)
    assert [float(value) for value in row["mean_values"].split()] == pytest.approx([0.512, 0.385])


def test_curves_leave_unfinished_runs_out(tmp_path: Path) -> None:
    whole, broken, wild = cells(tmp_path)
    assert group_curve(whole, "test_accuracy")["half"].null_count() == 0
    assert group_curve(wild, "test_accuracy").is_empty()
    runs = [run for group in (whole, broken, wild) for run in group.runs]
    figure = curve_figure(runs, "test_accuracy", groups=[whole, broken, wild])
    names = [line.get_label() for line in figure.axes[0].lines]
    assert names == [
        "whole",
        "broken, seed 1",
        "broken, seed 2",
        "wild, seed 1",
        "wild, seed 2",
        "wild, seed 3 (diverged)",
    ]
    assert sum(len(area.get_paths()[0].vertices) > 0 for area in figure.axes[0].collections) == 6
    bands = [np.ptp(area.get_paths()[0].vertices[:, 1]) for area in figure.axes[0].collections]
    assert bands[0] > 0.3  # half of the interval of three seeds is 0.25 around 0.1 and 0.6
    data = page_data(runs, [whole, broken, wild])
    assert [group["members"] for group in data["groups"]] == [[], [3, 4], [6, 7, 8]]
    json.dumps(data, allow_nan=False)


def test_status_is_in_titles_and_names(tmp_path: Path) -> None:
    done, failed = ended(tmp_path, 1, 0.5), ended(tmp_path, 2, 0.5, "failed")
    assert labels([done, failed]) == ["timed, seed 1", "timed, seed 2 (failed)"]
    assert "<h1>timed (failed)</h1>" in render([failed])
    assert "<h1>timed</h1>" in render([done])
    assert failed._repr_html_().startswith("<b>timed (failed)</b>")


def test_values_over_some_nodes_and_early_rounds_say_so(tmp_path: Path) -> None:
    points = [(float(k), (0.2 + 0.1 * k, 0.4 + 0.1 * k)) for k in range(4)]
    run = timed(tmp_path, points, nodes=3, evaluation={"every_rounds": 1})
    rows = run.metrics.with_columns(
        probe_accuracy=pl.when(pl.col("round") <= 1).then(pl.col("test_accuracy"))
    )
    run.__dict__["metrics"] = rows
    assert run.summary["test accuracy"] == "0.6000, std 0.1000 over 2 of 3 nodes"
    assert run.summary["probe accuracy"] == "0.4000, std 0.1000 over 2 of 3 nodes, round 1"
    table = compare([Group("a", (run,))], [quantity("probe_accuracy"), ACCURACY])
    [(_, _, [line])] = table.tables()
    assert line[-2:] == ["40 % at round 1", "60 %"]
    assert "Values are means over 2 of 3 nodes." in table.notes
    assert table.rows["at"].to_list() == ["at round 1", None]
