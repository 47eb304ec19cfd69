"""The unit of statistics: what a row covers is averaged within a seed (or another axis), against NumPy and SciPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import t

from gossamer import BadInput
from gossamer.results.comparison import compare, quantity
from gossamer.results.groups import Baseline, Group, find_baseline
from gossamer.results.run import Run
from synthetic_run import timed

ACCURACY = quantity("test_accuracy")


def cell(out: Path, values: Mapping[int, float], **labels: Any) -> Group:
    """A cell of a sweep, with the final accuracy of each seed."""
    label = ", ".join(str(value) if key == "cell" else f"{key}={value}" for key, value in labels.items())
    runs = [
        Run(
            timed(out, [(0.0, (0.1, 0.1)), (1.0, (value - 0.05, value + 0.05))], seed=seed).path,
            label,
            labels,
        )
        for seed, value in values.items()
    ]
    return Group(label, tuple(runs), labels, len(values))


def half(values: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of Student's t."""
    return float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))


def rows(
    groups: list[Group], baseline: Baseline | None, *per: str, unit: str = "seed"
) -> dict[str, dict[str, Any]]:
    """The rows for the accuracy, by label."""
    table = compare(groups, [ACCURACY], baseline, per, unit).rows
    return {row["group"]: row for row in table.to_dicts()}


SLOW, BASE = {3: 0.15, 1: 0.31, 2: 0.25}, {2: 0.41, 3: 0.17, 1: 0.36}


def test_axis_that_changes_nothing_leaves_the_interval(tmp_path: Path) -> None:
    cells = {"slow": SLOW, "base": BASE}
    one = [cell(tmp_path, values, cell=name) for name, values in cells.items()]
    grid = [
        cell(tmp_path, values, cell=name, step=step) for name, values in cells.items() for step in range(5)
    ]
    alone, all_points = (rows(groups, find_baseline("slow", groups), "cell") for groups in (one, grid))
    for name in cells:
        for column in ("mean", "mean_half", "difference", "difference_half", "ratio", "ratio_half"):
            expected = alone[name][column]
            assert all_points[name][column] == (expected if expected is None else pytest.approx(expected))
        assert (all_points[name]["units"], all_points[name]["runs"]) == (3, 15)
    differences = [BASE[seed] - SLOW[seed] for seed in (1, 2, 3)]
    assert all_points["base"]["difference"] == pytest.approx(np.mean(differences))
    assert all_points["base"]["difference_half"] == pytest.approx(half(differences))
    assert all_points["base"]["pairs"] == 3


def test_points_are_averaged_within_a_seed(tmp_path: Path) -> None:
    seeds, graphs = [4, 1, 3, 2], ["ring", "complete", "star"]
    rng = np.random.default_rng(7)
    values = {name: rng.uniform(0.2, 0.9, (len(seeds), len(graphs))) for name in ("slow", "base")}
    groups = [
        cell(tmp_path, dict(zip(seeds, table[:, k].tolist(), strict=True)), cell=name, topology=graph)
        for name, table in values.items()
        for k, graph in enumerate(graphs)
    ]
    row = rows(groups, find_baseline("slow", groups), "cell")["base"]
    slow, base = (values[name].mean(axis=1) for name in ("slow", "base"))
    assert (row["runs"], row["counted"], row["units"], row["pairs"]) == (12, 12, 4, 4)
    assert (row["mean"], row["mean_half"]) == (pytest.approx(base.mean()), pytest.approx(half(base)))
    assert row["difference"] == pytest.approx((base - slow).mean())
    assert row["difference_half"] == pytest.approx(half(base - slow))
    ratio = base.mean() / slow.mean()
    assert row["ratio"] == pytest.approx(ratio)
    assert row["ratio_half"] == pytest.approx(half((base - ratio * slow) / slow.mean()))
    notes = compare(groups, [ACCURACY], find_baseline("slow", groups), ["cell"]).notes
    assert any("these values of topology, not for others" in note for note in notes)


def test_seed_counts_only_with_all_points_on_both_sides(tmp_path: Path) -> None:
    seeds = {seed: 0.3 + 0.04 * seed**1.5 for seed in range(1, 7)}

    def group(name: str, graph: str, *lacking: int) -> Group:
        shift = 0.1 * (graph == "star") + 0.2 * (name == "base") * np.arange(7)
        known = {seed: value + shift[seed] / 7 for seed, value in seeds.items() if seed not in lacking}
        return cell(tmp_path, known, cell=name, topology=graph)

    slow = [group("slow", "ring", 2), group("slow", "star")]
    base = [group("base", "ring"), group("base", "star", 5)]
    groups = [*slow, *base]
    compared = compare(groups, [ACCURACY], find_baseline("slow", groups), ["cell"])
    row = compared.rows.filter(group="base").row(0, named=True)
    assert (row["units"], row["pairs"]) == (5, 4)
    own = [np.mean([seeds[s] + 0.2 * s / 7, seeds[s] + 0.1 / 7 + 0.2 * s / 7]) for s in (1, 2, 3, 4, 6)]
    assert (row["mean"], row["mean_half"]) == (pytest.approx(np.mean(own)), pytest.approx(half(own)))
    differences = [0.2 * s / 7 for s in (1, 3, 4, 6)]
    assert row["difference"] == pytest.approx(np.mean(differences))
    assert row["difference_half"] == pytest.approx(half(differences))
    assert "base: seed 5 is left out: it lacks base, topology=star." in compared.notes
    assert "slow: seed 2 is left out: it lacks slow, topology=ring." in compared.notes
    assert any(note.startswith("base: differences and ratios are without seed 2") for note in compared.notes)


def test_another_axis_can_be_the_unit(tmp_path: Path) -> None:
    graphs = {"a": (0.5, 0.4), "b": (0.7, 0.45), "c": (0.4, 0.41), "d": (0.9, 0.6)}
    seeds = (1, 2)
    groups = [
        cell(tmp_path, {s: value + 0.02 * s * (number + 1) for s in seeds}, cell=name, graph=graph)
        for number, name in enumerate(("new", "old"))
        for graph, values in graphs.items()
        for value in [values[number]]
    ]
    row = rows(groups, find_baseline("old", groups), unit="graph")["new"]
    new = np.array([values[0] + 0.03 for values in graphs.values()])  # the mean over two seeds
    old = np.array([values[1] + 0.06 for values in graphs.values()])
    assert (row["units"], row["pairs"], row["runs"]) == (4, 4, 8)
    assert (row["mean"], row["mean_half"]) == (pytest.approx(new.mean()), pytest.approx(half(new)))
    assert row["difference_half"] == pytest.approx(half(new - old))
    table = compare(groups, [ACCURACY], find_baseline("old", groups), unit="graph")
    [(_, head, lines)] = table.tables()
    assert head[:4] == ["group", "runs", "graph", "pairs"]
    assert lines[0][:4] == ["new", "8/8", "4", "4"]
    for asked, message in [
        ({"unit": "grpah"}, "--unit grpah: no axis of the sweep .did you mean 'graph'"),
        ({"unit": "graph", "per": ["graph"]}, "--unit graph: --per names it too"),
    ]:
        with pytest.raises(BadInput, match=message):
            compare(groups, [ACCURACY], None, **asked)  # type: ignore[arg-type]


def test_differences_that_are_rounding_errors_are_ties(tmp_path: Path) -> None:
    times = {1: 25.5, 2: 30.2, 3: 18.1}

    def ends(name: str, error: float) -> Group:
        runs = [
            timed(
                tmp_path,
                [(0.0, (0.1,)), (seconds * (1 + k * error), (0.5,))],
                seed=seed,
                evaluation={"every_rounds": 1},
            )
            for k, (seed, seconds) in enumerate(times.items(), 1)
        ]
        return Group(name, tuple(runs))

    groups = [ends("a", 0.0), ends("b", 2e-16), ends("c", 1e-9)]
    table = compare(groups, [quantity("time_s to test_accuracy=0.5")], find_baseline("a", groups))
    _, same, later = table.rows.rows(named=True)
    assert (same["difference"], same["difference_half"]) == (0.0, 0.0)
    assert (same["ratio"], same["ratio_half"]) == (1.0, 0.0)
    assert later["difference"] > 0  # 40 ns are a difference
    assert later["ratio"] > 1


def test_versions_and_evaluation_sets_are_named(tmp_path: Path) -> None:
    runs = [timed(tmp_path, [(0.0, (0.1,)), (1.0, (0.5,))], seed=seed) for seed in (1, 2, 3)]
    for run, version in zip(runs, ("2.9.0", "2.9.1", "2.9.0"), strict=True):
        packages = {"torch": version, "gossamer": "1"}
        run.__dict__["environment"] = {"machine": {"host": "one"}, "packages": packages}
        run.__dict__["setup"] = {"evaluation_samples": {"test": [1000, 10000], "ood": [9, 9]}}
    notes = compare([Group("a", tuple(runs))], [ACCURACY]).notes
    assert "a: its runs are of torch 2.9.0 (seeds 1 and 3) and 2.9.1 (seed 2)." in notes
    assert "test set: 1,000 of 10,000 samples." in notes
    assert not any("ood" in note or "machine" in note or "gossamer" in note for note in notes)


def test_own_modules_and_data_that_differ_are_named(tmp_path: Path) -> None:
    def file(name: str, hash_: str) -> dict[str, Any]:
        return {
            "of": "data_root",
            "path": "hub/x",
            "patterns": ["*"],
            "count": 2,
            "sha256": hash_,
            "files": {"a": "0" * 64, name: hash_},
        }

    runs = [timed(tmp_path, [(0.0, (0.1,)), (1.0, (0.5,))], seed=seed) for seed in (1, 2, 3)]
    for run, mine, data in zip(
        runs, ("1" * 64, "2" * 64, "2" * 64), ("3" * 64, "3" * 64, "4" * 64), strict=True
    ):
        prints = {
            "code": {"mine": mine, "other": "5" * 64},
            "data": [file("b", data)],
            "packages": {},
            "unknown": [],
        }
        run.__dict__["environment"] = {"fingerprint": prints}
    last = runs[-1].environment["fingerprint"]
    runs[-1].__dict__["environment"] = {
        "fingerprint": last,
        "resumed": [{"fingerprint": {**last, "code": {"mine": "6" * 64}}}],
    }
    notes = [
        note for note in compare([Group("a", tuple(runs))], [ACCURACY]).notes if "its runs are of" in note
    ]
    assert notes == [
        "a: its runs are of module mine 11111111 (seed 1), 22222222 (seeds 2 and 3) and 66666666 (seed 3).",
        "a: its runs are of data_root/hub/x/b 33333333 (seeds 1 and 2) and 44444444 (seed 3).",
    ]


def test_own_modules_and_data_that_differ_between_groups_are_named(tmp_path: Path) -> None:
    """Not those of a field that has another value there."""

    def group(label: str, mine: str, data: str, path: str) -> Group:
        run = timed(tmp_path, [(0.0, (0.1,)), (1.0, (0.5,))], seed=1)
        entries = [
            {"of": of, "path": "", "patterns": [], "count": 1, "sha256": data * 64}
            for of in ("task.path", "data_root")
        ]
        code = {"mine": mine * 64, "same": "0" * 64}
        prints = {"code": code, "data": entries, "packages": {}, "unknown": []}
        run.__dict__["environment"] = {"fingerprint": prints}
        run.__dict__["experiment"] = {**run.experiment, "task": {"path": path}, "data_root": label}
        return Group(label, (run,))

    def said(*groups: Group) -> list[str]:
        return [note for note in compare(groups, [ACCURACY]).notes if "Not the same" in note]

    first = group("a", "1", "3", "x")
    assert said(first) == said(first, group("b", "1", "3", "x"), group("c", "1", "3", "y")) == []
    assert said(first, group("b", "2", "3", "x"), group("c", "1", "4", "y")) == [
        "Not the same in all groups: module mine (a and c; b).",
        "Not the same in all groups: data_root (a and b; c).",
    ]
    assert said(first, group("b", "1", "4", "x")) == [
        "Not the same in all groups: task.path and data_root (a; b)."
    ]
