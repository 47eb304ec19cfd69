from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from gossamer import Experiment, run
from gossamer.runtime.recording import MAX_PENDING


def test_snapshots_do_not_pile_up_behind_a_slow_node(tmp_path: Path) -> None:
    """One of four nodes is a hundred times slower; each is recorded after every round."""

    def peak(seconds: float) -> int:
        done = run(
            Experiment.of(
                {
                    "nodes": 4,
                    "task": {"name": "least-squares", "features": 3, "samples": 16, "test_samples": 4},
                    "algorithm": "local",
                    "compute": {"name": "per-node", "seconds_per_step": [0.01, 0.01, 0.01, 1.0]},
                    "evaluation": {"every_rounds": 1},
                    "stop": {"time_s": seconds},
                    "engine": {"name": "simulate", "trainer": "sequential", "workers": 1},
                }
            ),
            tmp_path,
        )
        return int(done.figures["peak_vectors"])

    assert peak(0.9) == peak(0.3) < 4 * (MAX_PENDING + 4)


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_last_models_are_evaluated_when_evaluation_is_by_time(tmp_path: Path, engine: str) -> None:
    experiment = Experiment.of(
        {
            "nodes": 3,
            "task": "digits",
            "algorithm": "d-psgd",
            "optimizer": {"name": "sgd", "lr": 0.1},
            "evaluation": {"every_s": 1000},
            "stop": {"rounds": 5},
            "engine": engine,
        }
    )
    rows = run(experiment, tmp_path).metrics.filter(pl.col("node") >= 0, pl.col("round") == 5)
    assert rows["node"].sort().to_list() == [0, 1, 2]
    assert rows["test_loss"].null_count() == 0
