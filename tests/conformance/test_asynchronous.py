"""The asynchronous algorithms, whose bits depend on engine and schedule: they run everywhere, end by every stop rule,
are recorded on a common grid, and bring models together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from safetensors.torch import load_file

import gossamer
from gossamer import Experiment, Run
from gossamer.config.registry import names

ALGORITHMS: list[dict[str, Any]] = [
    {"name": "ad-psgd"},
    {"name": "ad-psgd-artifact"},
    {"name": "divshare", "fraction": 0.25},
    {"name": "divshare", "fraction": 1.0, "queue": "keep", "backlog": 3},
    {"name": "swift"},
    {"name": "swift", "memory": "fresh", "boost": True, "average_every": 2},
    {"name": "swift-artifact"},
]
MLP: dict[str, Any] = {
    "nodes": 5,
    "seed": 7,
    "task": {"name": "digits", "model": {"name": "mlp", "hidden": [12]}},
    "partition": {"name": "dirichlet", "alpha": 0.5},
    "topology": {"name": "random-regular", "degree": 2},
    "batch_size": 8,
    "compute": {"name": "log-normal", "median_seconds": 0.01, "sigma": 0.7},
    "network": {"name": "uniform", "latency_s": 0.004, "bandwidth_mbps": 2},
    "evaluation": {"every_rounds": None, "every_s": 0.05, "samples": 20},
    "engine": {"name": "simulate", "trainer": "sequential"},
    "stop": {"time_s": 0.15},
}


def play(out: Path, algorithm: dict[str, Any], **changes: Any) -> Run:
    return gossamer.run(Experiment.of({**MLP, "algorithm": algorithm, **changes}), out)


def test_asynchronous_algorithms_of_three_modules_are_covered() -> None:
    modules = {"ad_psgd", "divshare", "swift"}
    built_in = {
        name for name, kind in names("algorithm").items() if kind.__module__.split(".")[-1] in modules
    }
    assert {algorithm["name"] for algorithm in ALGORITHMS} == built_in


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_batching_changes_rounding_only(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    """Which messages a node receives depends on instants, not on batches."""
    batched = {"name": "simulate", "trainer": "batched"}
    single, together = play(tmp_path, algorithm), play(tmp_path, algorithm, engine=batched)
    columns = ["node", "round", "step", "time_s", "bytes_sent", "bytes_received", "messages_sent"]
    assert_frame_equal(single.metrics.select(columns), together.metrics.select(columns), check_exact=True)
    torch.testing.assert_close(single.parameters, together.parameters, rtol=1e-3, atol=1e-4)
    # All nodes have rows at common instants, in different rounds.
    rows = single.metrics.filter(pl.col("node") >= 0)
    grid = rows.group_by("time_s").agg(pl.col("node").n_unique(), pl.col("round").n_unique().alias("rounds"))
    assert grid.sort("time_s")["time_s"].to_list() == pytest.approx([0.0, 0.05, 0.1, 0.15])
    assert set(grid["node"]) == {5}
    assert grid["rounds"].max() > 1


BATCH_NORM: dict[str, Any] = {
    "nodes": 4,
    "task": {"name": "user_tasks:batch_norm"},
    "partition": "iid",
    "topology": "complete",
    "initial": "independent",
    "network": {"name": "uniform", "latency_s": 0.002},
    "evaluation": {"every_rounds": 20},
    "stop": {"rounds": 20},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of nodes that train alone."""
    return play(tmp_path_factory.mktemp("alone"), {"name": "local"}, **BATCH_NORM)


def spread(run: Run) -> tuple[float, float]:
    """The spread of the models, and of the running means of their batch norm."""
    means = load_file(run.path / "models.safetensors")["buffers"][:, :8]
    return run.metrics.filter(node=-1, round=20)["consensus_distance"][0], float(means.std(dim=0).sum())


@pytest.mark.parametrize("algorithm", [*ALGORITHMS[:3], ALGORITHMS[4], ALGORITHMS[6]], ids=str)
def test_gossip_brings_models_and_buffers_together(
    tmp_path: Path, alone: Run, algorithm: dict[str, Any]
) -> None:
    """Batch-norm statistics travel with the parameters."""
    together = spread(play(tmp_path, algorithm, **BATCH_NORM))
    for mixed, unmixed in zip(together, spread(alone), strict=True):
        assert mixed < 0.7 * unmixed


@pytest.mark.parametrize("algorithm", [*ALGORITHMS[:3], ALGORITHMS[4], ALGORITHMS[6]], ids=str)
def test_processes_end_by_rounds(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    """Nodes that are done keep answering the others."""
    run = play(tmp_path, algorithm, **BATCH_NORM, engine={"name": "processes"})
    assert run.status == "done"
    rows = run.metrics.filter(pl.col("node") >= 0, round=20, moment="round")
    assert sorted(rows["node"]) == [0, 1, 2, 3]
    assert rows["test_loss"].is_finite().all()
    assert rows["messages_sent"].sum() > 0


def test_processes_end_by_time(tmp_path: Path) -> None:
    """A passive node answers until it is told that the time is up."""
    run = play(
        tmp_path,
        {"name": "ad-psgd"},
        network="uniform",
        engine={"name": "processes"},
        evaluation={"every_rounds": None, "every_s": 0.2, "samples": 50},
        stop={"time_s": 0.5},
    )
    assert run.status == "done"
    assert set(run.metrics.filter(pl.col("node") >= 0)["node"]) == set(range(5))
