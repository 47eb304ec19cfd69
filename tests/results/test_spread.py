"""A metric by distance from poisoned nodes, against explicit sums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import gossamer
from gossamer import BadInput, Experiment, Run
from gossamer.results.groups import groups
from gossamer.results.spread import by_hops, hops, spread, table


def played(out: Path, seed: int = 1, **fields: Any) -> Run:
    """Run on the path 0 - 1 - 2 - 3 - 4, poisoned at node 1."""
    (out / "path.txt").write_text("0 1\n1 2\n2 3\n3 4\n")
    experiment = {
        "seed": seed,
        "nodes": 5,
        "task": {"name": "digits", "samples": 300},
        "topology": {"name": "edge-list", "path": str(out / "path.txt"), "weights": "uniform"},
        "algorithm": "topology-aware",
        "poison": [{"name": "rotate", "share": 1.0, "at": {"rank": 1}}],
        "evaluation": {"every_rounds": 2, "samples": None},
        "stop": {"rounds": 5},
        "engine": {"name": "simulate", "trainer": "sequential"},
        **fields,
    }
    return gossamer.run(Experiment.of(experiment), out)


def test_area_and_arrival_round_match_hand_calculation(tmp_path: Path) -> None:
    run = played(tmp_path)
    assert hops(run, "ood_accuracy") == {0: 1, 1: 0, 2: 1, 3: 2, 4: 3}
    rows = by_hops(run, "ood_accuracy")
    rounds = [0, 2, 4, 5]
    curve = {
        rank: np.array([run.metrics.filter(node=rank, round=r)["ood_accuracy"][0] for r in rounds])
        for rank in range(5)
    }
    members = {0: [1], 1: [0, 2], 2: [3], 3: [4]}
    assert rows["hops"].to_list() == sorted(members)
    for distance, ranks in members.items():
        mean = np.mean([curve[rank] for rank in ranks], axis=0)
        area = (2 * (mean[0] + mean[1]) / 2 + 2 * (mean[1] + mean[2]) / 2 + (mean[2] + mean[3]) / 2) / 5
        reach = rows.row(by_predicate=pl.col("hops") == distance, named=True)
        assert (reach["nodes"], reach["area"], reach["final"]) == (
            len(ranks),
            pytest.approx(area),
            pytest.approx(mean[-1]),
        )
        halfway = (mean[0] + curve[1][-1]) / 2
        arrived = [r for r, value in zip(rounds, mean, strict=True) if value >= halfway]
        assert reach["half_round"] == (arrived[0] if arrived and curve[1][-1] > mean[0] else None)


def test_sources_are_nodes_of_the_metrics_poison(tmp_path: Path) -> None:
    poison = [
        {"name": "rotate", "share": 1.0, "set_name": "turned", "at": {"rank": 1}},
        {"name": "permute-labels", "share": 1.0, "set_name": "renamed", "at": {"rank": 4}},
        {"name": "label-flip", "share": 1.0, "at": {"rank": 3}},
    ]
    run = played(tmp_path, poison=poison, stop={"rounds": 1})
    assert hops(run, "turned_accuracy") == {0: 1, 1: 0, 2: 1, 3: 2, 4: 3}
    assert hops(run, "renamed_loss") == {0: 4, 1: 3, 2: 2, 3: 1, 4: 0}
    assert hops(run, "test_accuracy") == {0: 1, 1: 0, 2: 1, 3: 0, 4: 0}


def test_spread_table_aggregates_seeds(tmp_path: Path) -> None:
    runs = [played(tmp_path, seed) for seed in (1, 2, 3)]
    rows = spread(groups(runs), "ood_accuracy")
    areas = [by_hops(run, "ood_accuracy").filter(hops=2)["area"][0] for run in runs]
    row = rows.filter(hops=2).row(0, named=True)
    assert (row["runs"], row["area"]) == (3, pytest.approx(np.mean(areas)))
    assert row["area_half"] == pytest.approx(4.3027 * np.std(areas, ddof=1) / np.sqrt(3), rel=1e-3)
    title, head, lines = table(rows, "ood_accuracy")
    assert "ood accuracy" in title
    assert head == ["", "0 hops", "1 hop", "2 hops", "3 hops"]
    assert len(lines) == 1


def test_runs_without_distances_are_refused(tmp_path: Path) -> None:
    average = played(tmp_path, evaluation={"every_rounds": 2, "nodes": "average"})
    with pytest.raises(BadInput, match="--by-hops ood_accuracy: no node of the run .* has recorded it"):
        spread(groups([average]), "ood_accuracy")
    plain = played(tmp_path, poison=[])
    with pytest.raises(BadInput, match="--by-hops: the run .* has no poisoned nodes"):
        spread(groups([plain]), "test_accuracy")
    with pytest.raises(BadInput, match="--by-hops ood_accuracy: no run has recorded it"):
        spread(groups([plain]), "ood_accuracy")


def test_evaluations_by_time_are_compared_at_equal_times(tmp_path: Path) -> None:
    """At these times, nodes are in different rounds."""
    run = played(
        tmp_path,
        algorithm="ad-psgd",
        compute={"name": "log-normal", "median_seconds": 0.1, "sigma": 0.5},
        evaluation={"every_rounds": None, "every_s": 0.5, "samples": None},
        stop={"time_s": 2},
    )
    rows = by_hops(run, "ood_accuracy")
    last = run.metrics.filter(pl.col("time_s") == 2, pl.col("node") == 1)["ood_accuracy"].last()
    assert rows.filter(hops=0)["final"].item() == pytest.approx(last)


def test_unevaluated_sources_have_no_halfway_round(tmp_path: Path) -> None:
    run = played(tmp_path, evaluation={"every_rounds": 1, "samples": None, "nodes": [0, 2, 3, 4]})
    rows = by_hops(run, "ood_accuracy")
    assert rows["hops"].to_list() == [1, 2, 3]
    assert rows["half_round"].null_count() == 3


def test_algorithms_without_the_topology_have_no_distances(tmp_path: Path) -> None:
    run = played(tmp_path, algorithm={"name": "epidemic-local", "degree": 2}, stop={"rounds": 1})
    with pytest.raises(
        BadInput, match="epidemic-local does not use the topology edge-list.*accepted: runs whose"
    ):
        spread(groups([run]), "ood_accuracy")
    # Records of older versions, and algorithms that declare nothing, are taken to use it.
    setup = json.loads((run.path / "setup.json").read_text())
    assert setup["mixing"]["uses_topology"] is False


def test_distances_follow_the_tree_that_is_used(tmp_path: Path) -> None:
    """On a ring, the breadth-first tree from rank 0 has no edge between 2 and 3."""
    run = played(
        tmp_path, topology="ring", algorithm={"name": "relay-sum", "tree": "spanning"}, stop={"rounds": 1}
    )
    assert hops(run, "ood_accuracy") == {0: 1, 1: 0, 2: 1, 3: 3, 4: 2}
