"""A protocol in which model values decide the receivers: under both engines and both trainers, traffic follows the
values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import gossamer
from gossamer import Experiment, Run

ROUNDS = 30
SILENT, SELDOM, OFTEN = 100.0, 0.3, 0.03


def play(out: Path, threshold: float, engine: dict[str, Any], **changes: Any) -> Run:
    return gossamer.run(
        Experiment.of(
            {
                "nodes": 5,
                "seed": 3,
                "task": {"name": "least-squares", "features": 8, "samples": 60, "test_samples": 20},
                "topology": "ring",
                "algorithm": {"name": "user_algorithms:EventTriggered", "threshold": threshold},
                "batch_size": 4,
                "initial": "independent",
                "compute": {"name": "log-normal", "median_seconds": 0.01, "sigma": 0.4},
                "network": {"name": "uniform", "latency_s": 0.003},
                "evaluation": {"every_rounds": 5},
                "engine": engine,
                "stop": {"rounds": ROUNDS},
                **changes,
            }
        ),
        out,
    )


def told(run: Run) -> list[int]:
    """The number of messages that each node has sent, by its own count."""
    last = run.metrics.filter(pl.col("node") >= 0, pl.col("round") == ROUNDS).sort("node")
    assert last["told"].to_list() == last["messages_sent"].to_list()
    return [int(count) for count in last["told"]]


@pytest.mark.slow
def test_threshold_decides_the_traffic(tmp_path: Path) -> None:
    batched = {"name": "simulate", "trainer": "batched"}
    counts = {
        threshold: told(play(tmp_path, threshold, batched)) for threshold in (0.0, OFTEN, SELDOM, SILENT)
    }
    assert counts[0.0] == [ROUNDS] * 5  # two neighbours, each in every other round
    assert counts[SILENT] == [2] * 5
    assert sum(counts[SELDOM]) < sum(counts[OFTEN]) < sum(counts[0.0])
    assert all(2 < count < ROUNDS for count in counts[SELDOM])
    assert len(set(counts[SELDOM])) > 1  # each node's own values decide


def test_threshold_decides_the_traffic_of_processes(tmp_path: Path) -> None:
    counts = told(play(tmp_path, SELDOM, {"name": "processes"}))
    # The messages that a real node has received by then, and so its moves, depend on the machine.
    assert all(2 <= count <= ROUNDS for count in counts)
    assert sum(counts) < ROUNDS * 5  # the number without a threshold


def test_both_trainers_decide_alike(tmp_path: Path) -> None:
    """Batching does not affect which messages are sent, or when."""
    sequential, batched = (
        play(tmp_path, SELDOM, {"name": "simulate", "trainer": trainer}, evaluation={"every_rounds": 1})
        for trainer in ("sequential", "batched")
    )
    columns = ["node", "round", "time_s", "told", "bytes_sent", "bytes_received"]
    assert_frame_equal(sequential.metrics.select(columns), batched.metrics.select(columns), check_exact=True)


def test_latency_changes_the_traffic(tmp_path: Path) -> None:
    """Values depend on arrival times, and so does the traffic."""
    engine = {"name": "simulate", "trainer": "sequential"}
    near = play(tmp_path, SELDOM, engine, evaluation={"every_rounds": 1})
    far = play(
        tmp_path,
        SELDOM,
        engine,
        evaluation={"every_rounds": 1},
        network={"name": "uniform", "latency_s": 0.08},
    )
    counts = [
        run.metrics.filter(pl.col("node") >= 0).sort("node", "round")["told"].to_list() for run in (near, far)
    ]
    assert counts[0] != counts[1]
