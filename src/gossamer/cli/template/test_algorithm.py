"""The algorithm in algorithm.py learns, and a second run gives the same bits."""

from pathlib import Path

import polars as pl
import torch

from gossamer import Experiment, Run, run


def short_run(folder: Path) -> Run:
    """Run the experiment for fewer rounds, with evenly distributed data."""
    file = Path(__file__).parent / "experiment.yaml"
    return run(Experiment.load(file, ["stop.rounds=30", "partition=iid"]), folder)


def test_the_nodes_learn(tmp_path: Path) -> None:
    metrics = short_run(tmp_path).metrics
    loss = metrics.group_by("round").agg(pl.col("test_loss").mean()).sort("round")["test_loss"]
    assert loss[-1] < 0.95 * loss[0]


def test_a_second_run_gives_the_same_bits(tmp_path: Path) -> None:
    first, second = short_run(tmp_path / "first").parameters, short_run(tmp_path / "second").parameters
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
