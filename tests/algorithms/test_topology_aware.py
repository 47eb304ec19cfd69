"""Topology-aware knowledge propagation: recorded metrics, participation, and the proximal term."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import gossamer
from gossamer import BadInput, Experiment, Run
from gossamer.algorithms.topology_aware import InfluenceCorrected


def played(out: Path, rounds: int = 2, **fields: Any) -> Run:
    experiment = {
        "nodes": 6,
        "task": {"name": "digits", "model": {"name": "mlp", "hidden": [8]}},
        "topology": {"name": "ring", "weights": "uniform"},
        "initial": "independent",
        "batch_size": 64,
        "optimizer": {"name": "sgd", "lr": 0.1, "reset_every_round": True},
        "evaluation": {"every_rounds": 1, "samples": None},
        "stop": {"rounds": rounds},
        "engine": {"name": "simulate", "trainer": "sequential"},
        **fields,
    }
    return gossamer.run(Experiment.of(experiment), out)


def test_trained_model_is_evaluated_before_mixing(tmp_path: Path) -> None:
    poison = {"name": "patch", "share": 0.5, "at": {"rank": 0}}
    algorithm = {"name": "topology-aware", "evaluate_trained": ["test", "ood"]}
    run = played(tmp_path, algorithm=algorithm, poison=[poison])
    alone = played(tmp_path, 1, algorithm={"name": "local", "local_steps": 4}, poison=[poison])
    columns = ["test_loss", "test_accuracy", "ood_loss", "ood_accuracy"]
    first = run.metrics.filter(pl.col("round") == 1, pl.col("node") >= 0).sort("node")
    trained = first.select([f"trained_{column}" for column in columns]).to_numpy()
    steps = [-(-samples // 64) for samples in run.setup["samples"]]
    assert set(steps) == {4}
    single = alone.metrics.filter(pl.col("round") == 1, pl.col("node") >= 0).sort("node").select(columns)
    torch.testing.assert_close(torch.tensor(trained), torch.tensor(single.to_numpy()), rtol=1e-5, atol=1e-6)
    assert (first["test_loss"] != first["trained_test_loss"]).all()


def test_unknown_evaluation_set_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="algorithm.evaluate_trained: 'ood'; accepted: test"):
        played(tmp_path, algorithm={"name": "topology-aware", "evaluate_trained": ["ood"]})


def test_nodes_that_do_not_participate_keep_their_models(tmp_path: Path) -> None:
    runs = [
        played(tmp_path, rounds, algorithm={"name": "topology-aware", "participation": 0.5})
        for rounds in (1, 2, 3)
    ]
    for before, after in zip(runs, runs[1:], strict=False):
        changed = (before.parameters != after.parameters).any(dim=1)
        assert int(changed.sum()) == 3


def test_proximal_term_holds_models_together(tmp_path: Path) -> None:
    """Covers both distances, with a model of several tensors."""

    def spread(**options: Any) -> float:
        run = played(tmp_path, 3, algorithm={"name": "topology-aware", **options}, initial="common")
        assert run.parameters is not None
        return float(run.parameters.std(dim=0).norm())

    free = spread()
    assert spread(proximal=2.0) < 0.9 * free
    assert spread(proximal=0.2, distance="norm") < 0.9 * free


def test_message_with_all_influences_is_within_the_limit() -> None:
    P, nodes = 650, 20_000
    assert InfluenceCorrected().message_limit(P, nodes) > 4 * P + 4 * nodes
