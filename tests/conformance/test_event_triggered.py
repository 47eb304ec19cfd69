"""A protocol that looks at model values to decide whom to send to: under both engines, batched, and with traffic that
follows the values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
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
    """Messages that each node has sent, as it counted them itself."""
    last = run.metrics.filter(pl.col("node") >= 0, pl.col("round") == ROUNDS).sort("node")
    assert last["told"].to_list() == last["messages_sent"].to_list()
    return [int(count) for count in last["told"]]


def test_threshold_decides_the_traffic(tmp_path: Path) -> None:
    batched = {"name": "simulate", "trainer": "batched"}
    counts = {
        threshold: told(play(tmp_path, threshold, batched)) for threshold in (0.0, OFTEN, SELDOM, SILENT)
    }
    assert counts[0.0] == [ROUNDS] * 5  # two neighbours, each every other round
    assert counts[SILENT] == [2] * 5
    assert sum(counts[SELDOM]) < sum(counts[OFTEN]) < sum(counts[0.0])
    assert all(2 < count < ROUNDS for count in counts[SELDOM])
    assert len(set(counts[SELDOM])) > 1  # it's the nodes' own values that decide


def test_threshold_decides_the_traffic_of_processes(tmp_path: Path) -> None:
    counts = told(play(tmp_path, SELDOM, {"name": "processes"}))
    # What a real node has heard by then, and so how far it moves, depends on the machine.
    assert all(2 <= count <= ROUNDS for count in counts)
    assert sum(counts) < ROUNDS * 5  # as many as there would be without a threshold


def test_both_trainers_decide_alike(tmp_path: Path) -> None:
    """What is computed together with what makes no difference to who is told what, and when."""
    one, other = (
        play(tmp_path, SELDOM, {"name": "simulate", "trainer": trainer}, evaluation={"every_rounds": 1})
        for trainer in ("sequential", "batched")
    )
    seen = ["node", "round", "time_s", "told", "bytes_sent", "bytes_received"]
    assert_frame_equal(one.metrics.select(seen), other.metrics.select(seen), check_exact=True)


def test_latency_changes_the_traffic(tmp_path: Path) -> None:
    """Values depend on what has come when, and so does the traffic."""
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
