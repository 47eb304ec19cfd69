from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from gossamer.results.folder import RunFolder
from gossamer.results.groups import Group, group_curve, groups, labels, shows_groups
from gossamer.results.run import Run
from synthetic_run import timed

POINTS = [(0.0, (0.1, 0.3)), (1.0, (0.5, 0.7))]


def run(out: Path, seed: int, **settings: Any) -> Run:
    return timed(out, POINTS, seed=seed, **settings)


def divshare(**parameters: Any) -> dict[str, Any]:
    return {"name": "divshare", "fragments": 10, "queue": "flush", **parameters}


def test_runs_differing_only_in_seed_or_execution_are_grouped(tmp_path: Path) -> None:
    engine = {"name": "simulate", "trainer": "batched", "workers": 4}
    window = {"every_s": 1.0, "timeline": {"from_s": 0.0, "to_s": 1.0, "nodes": 1}}
    runs = [
        run(tmp_path, 2, engine=engine),
        run(tmp_path, 1, engine={**engine, "trainer": "sequential", "workers": None}, name="again"),
        run(tmp_path, 3, engine=engine, evaluation={**window, "timeline": None}),
        run(tmp_path, 4, engine=engine, evaluation=window),
        run(tmp_path, 1, engine={"name": "processes"}),
    ]
    first, second = groups(runs)
    assert [run.experiment["seed"] for run in first.runs] == [1, 2, 3, 4]
    assert second.runs == (runs[-1],)
    assert (first.label, second.label) == ("simulate", "processes")
    assert shows_groups([first, second])
    assert not shows_groups([first])
    assert not shows_groups([Group("twice", (runs[0], run(tmp_path, 2, engine=engine))), second])
    assert not shows_groups([Group("two", first.runs[:2]), second])  # two seeds have no interval


def test_labels_are_minimal_differences(tmp_path: Path) -> None:
    algorithms = [
        {"name": "d-psgd", "local_steps": 5},
        divshare(),
        divshare(queue="keep"),
        divshare(fragments=1),
        divshare(fragments=1, queue="keep"),
    ]
    labels = [group.label for group in groups([run(tmp_path, 1, algorithm=spec) for spec in algorithms])]
    assert labels == [
        "d-psgd",
        "divshare, fragments 10, queue flush",
        "divshare, fragments 10, queue keep",
        "divshare, fragments 1, queue flush",
        "divshare, fragments 1, queue keep",
    ]
    networks = [{"name": "uniform", "bandwidth_mbps": rate, "latency_s": rate / 10} for rate in (1, 2)]
    both = [run(tmp_path, seed, network=network) for seed in (1, 2) for network in networks]
    assert [group.label for group in groups(both)] == [
        f"bandwidth_mbps {rate}, latency_s {rate / 10}" for rate in (1, 2)
    ]
    assert [group.label for group in groups(both[::2])] == ["timed"]
    older = run(tmp_path, 1)  # from a version without this field
    assert [group.label for group in groups([older, run(tmp_path, 1, batch_size=8)])] == [
        "batch_size –",
        "batch_size 8",
    ]
    assert [group.label for group in groups([older, run(tmp_path, 1, task={"name": "digits"})])] == [
        "–",
        "digits",
    ]


def test_sweep_runs_keep_their_cell_names(tmp_path: Path) -> None:
    runs = [
        Run(run(tmp_path, seed, batch_size=size).path, cell, {"batch_size": size})
        for size, cell in ((8, "small"), (16, "large"))
        for seed in (1, 2)
    ]
    assert [(group.label, len(group.runs)) for group in groups(runs)] == [("small", 2), ("large", 2)]
    assert [group.labels for group in groups(runs)] == [{"batch_size": 8}, {"batch_size": 16}]
    other = Run(run(tmp_path, 1, batch_size=32).path, "small")  # of another sweep
    assert [group.label for group in groups([*runs, other])] == [
        "batch_size 8",
        "batch_size 16",
        "batch_size 32",
    ]


def test_common_grid_values_are_omitted_from_names(tmp_path: Path) -> None:
    def cell(seed: int, entry: str, size: int) -> Run:
        point = {"local_steps": 16, "batch_size": size}
        name = ", ".join([entry, *(f"{key}={value}" for key, value in point.items())])
        return Run(run(tmp_path, seed, batch_size=size, name=entry).path, name, {"cell": entry, **point})

    small, large = (cell(1, "a, no flush", size) for size in (8, 16))
    assert [group.label for group in groups([small, large])] == [
        "a, no flush, batch_size=8",
        "a, no flush, batch_size=16",
    ]
    assert [group.label for group in groups([small])] == ["a, no flush"]
    assert labels([small, large]) == [
        "a, no flush, batch_size=8, seed 1",
        "a, no flush, batch_size=16, seed 1",
    ]
    assert labels([small]) == ["a, no flush, seed 1"]


def test_group_curve_is_mean_over_runs_with_interval(tmp_path: Path) -> None:
    curves = [(0.0, 0.4, 0.9), (0.2, 0.6), (0.1, 0.8)]
    runs = tuple(
        timed(
            tmp_path,
            [(k + 0.01 * seed, (value - 0.1, value + 0.1)) for k, value in enumerate(curve)],
            seed=seed,
        )
        for seed, curve in enumerate(curves)
    )
    table = group_curve(Group("a", runs), "test_accuracy")
    assert table["round"].to_list() == [0, 1]  # only one run has the third
    assert table["mean"].to_list() == pytest.approx([0.1, 0.6])
    assert table["half"].to_list() == pytest.approx([s * 4.302653 / math.sqrt(3) for s in (0.1, 0.2)])
    assert table["count"].to_list() == [3, 3]
    alone = group_curve(Group("a", runs[:1]), "test_accuracy")
    assert alone["half"].to_list() == [None] * 3
    assert group_curve(Group("a", runs), "test_loss").is_empty()


def test_newest_finished_run_of_a_seed_is_the_sample(tmp_path: Path) -> None:
    def recorded(seed: int, value: float, status: str = "done", **settings: Any) -> Run:
        run = timed(tmp_path, [(0.0, (value, value))], seed=seed, **settings)
        RunFolder.open(run.path).write_status(status)  # type: ignore[arg-type]
        return Run(run.path)

    first = recorded(1, 0.1)
    second = recorded(1, 0.3, name="again", engine={"trainer": "batched"})
    broken = recorded(1, 0.9, status="failed")
    other = recorded(2, 0.5)
    failed, again = recorded(3, 0.6, status="failed"), recorded(3, 0.7, status="failed")
    [group] = groups([broken, second, first, other, failed, again])
    assert len(group.runs) == 6  # all stay accessible
    assert (group.samples, group.left_out) == ((second, other), (again,))
    table = group_curve(group, "test_accuracy")
    assert table.select("mean", "half", "count").rows() == [(pytest.approx(0.4), None, 2)]
    [every] = groups(group.runs, unfinished=True)
    assert every.samples == (second, other, again)
    table = group_curve(every, "test_accuracy")
    assert table.select("mean", "count").rows() == [(pytest.approx(0.5), 3)]
    assert table["half"].to_list() == pytest.approx([0.2 * 4.302653 / math.sqrt(3)])


def rounds(out: Path, seed: int, every: int, *, last: int, end_s: float) -> Run:
    """Two nodes with rows every ``every`` rounds of 1 s and at their end. The second gets half as far; accuracy is time
    / 100 s."""
    config = {"name": "t", "seed": seed, "nodes": 2, "evaluation": {"every_rounds": every}}
    folder = RunFolder.create(out, "t", experiment=yaml.safe_dump(config), environment={})
    with folder.segment("metrics") as metrics:
        for node, until in enumerate((last, last // 2)):
            points = [(k, float(k), "round") for k in range(0, until + 1, every)] + [(until, end_s, "end")]
            for k, time_s, moment in points:
                row = {"node": node, "round": k, "step": k, "time_s": time_s, "moment": moment}
                metrics.append({**row, "test_accuracy": time_s / 100})
    folder.write_status("done")
    return Run(folder.path)


def test_runs_join_at_common_complete_rounds_and_end(tmp_path: Path) -> None:
    runs = (rounds(tmp_path, 1, 2, last=12, end_s=20.0), rounds(tmp_path, 2, 3, last=24, end_s=30.0))
    table = group_curve(Group("a", runs), "test_accuracy")
    # The second nodes reached rounds 6 and 12, so rounds 0 and 6 are complete in both runs.
    assert table["round"].to_list() == [0, 6, (9 + 18) / 2]
    assert table["mean"].to_list() == pytest.approx([0, 0.06, 0.25])


def test_runs_join_over_time_at_common_instants(tmp_path: Path) -> None:
    """From where all runs have begun (0.5 s) until the first one ends (2 s), each with its value at that time."""
    curves = (
        [(0.0, 0.0), (1.0, 0.2), (2.0, 0.4)],
        [(0.5, 0.1), (1.25, 0.5), (3.0, 0.9)],
        [(0.0, 0.3), (5.0, 0.9)],
    )
    runs = tuple(
        timed(
            tmp_path,
            [(time_s, (value, value)) for time_s, value in curve],
            seed=seed,
            evaluation={"every_s": 0.25},
        )
        for seed, curve in enumerate(curves)
    )
    table = group_curve(Group("a", runs), "test_accuracy", "time_s")
    assert table["time_s"].to_list() == [0.5, 1.0, 1.25, 2.0]
    values = np.array([(0.0, 0.1, 0.3), (0.2, 0.1, 0.3), (0.2, 0.5, 0.3), (0.4, 0.5, 0.3)])
    assert table["mean"].to_list() == pytest.approx(values.mean(axis=1))
    # Student's t with two degrees of freedom.
    assert table["half"].to_list() == pytest.approx(
        4.30265 * values.std(axis=1, ddof=1) / math.sqrt(3), rel=1e-4
    )
    by_bytes = group_curve(Group("a", runs), "test_accuracy", "bytes")  # 200 bytes a second
    assert by_bytes["bytes"].to_list() == [100, 200, 250, 400]
    assert by_bytes["mean"].to_list() == pytest.approx(table["mean"].to_list())


def test_runs_on_time_grids_join_at_equal_times(tmp_path: Path) -> None:
    def on_grid(every_s: float, count: int) -> Run:
        points = [(every_s * k, (every_s * k, every_s * k)) for k in range(count)]
        return timed(tmp_path, points, evaluation={"every_s": every_s}, seed=count)

    by_tenths, by_fifths = on_grid(0.1, 8), on_grid(0.2, 9)
    table = group_curve(Group("a", (by_tenths, by_fifths)), "test_accuracy")
    assert table["mean"].to_list() == pytest.approx([0, 0.2, 0.4, 0.6])
    # Round 1 and the time 1 s differ, although both are labelled 1.
    by_round = timed(tmp_path, [(k / 2, (0.5, 0.5)) for k in range(4)], evaluation={"every_rounds": 1})
    assert group_curve(Group("a", (by_fifths, by_round)), "test_accuracy").is_empty()
