"""Personal test sets of nodes: excluded from training, and recorded as ``personal_<metric>``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch.nn.functional as F  # noqa: N812

import gossamer
from gossamer import BadInput, Experiment
from gossamer.runtime.setup import prepare
from gossamer.tasks import accuracy


def experiment(**changes: Any) -> Experiment:
    defaults = {
        "nodes": 4,
        "task": {"name": "digits", "model": "logistic", "samples": 200},
        "partition": {"name": "dirichlet", "alpha": 0.3, "min_samples": 5, "personal_fraction": 0.25},
        "algorithm": "d-psgd",
        "evaluation": {"every_rounds": 2, "samples": 50},
        "stop": {"rounds": 4},
    }
    return Experiment.of({**defaults, **changes})


def test_nodes_do_not_train_on_personal_test_sets() -> None:
    full = prepare(experiment(partition={"name": "dirichlet", "alpha": 0.3, "min_samples": 5}))
    setup = prepare(experiment())
    for before, kept, personal in zip(full.parts, setup.parts, setup.personal, strict=True):
        assert len(personal) == max(round(0.25 * len(before)), 1)
        assert np.array_equal(np.sort(np.concatenate([kept, personal])), before)
    assert all(len(personal) == 0 for personal in full.personal)
    again, other = prepare(experiment()), prepare(experiment(seed=2))
    assert all(map(np.array_equal, setup.personal, again.personal))
    assert not all(map(np.array_equal, setup.personal, other.personal))


@pytest.mark.parametrize("trainer", ["sequential", "batched"])
def test_personal_metrics_match_the_model_of_each_node(trainer: str, tmp_path: Path) -> None:
    run = gossamer.run(experiment(engine={"name": "simulate", "trainer": trainer}), tmp_path)
    setup = prepare(experiment())
    inputs, targets = setup.task.train
    for rank, personal in enumerate(setup.personal):
        scores = run.module(rank)(inputs[personal])
        row = run.metrics.filter(node=rank, round=4)
        assert row["personal_loss"].item() == pytest.approx(
            F.cross_entropy(scores, targets[personal]).item(), rel=1e-5
        )
        assert row["personal_accuracy"].item() == pytest.approx(accuracy(scores, targets[personal]).item())


def test_both_engines_record_the_same_bits(tmp_path: Path) -> None:
    engines = "simulate", "processes"
    first, second = (
        gossamer.run(experiment(engine={"name": name, "trainer": "sequential"}), tmp_path).metrics
        for name in engines
    )
    columns = ["node", "round", "test_loss", "personal_loss", "personal_accuracy"]
    first, second = (
        table.filter(pl.col("node") >= 0).select(columns).sort("round", "node") for table in (first, second)
    )
    assert first.equals(second)
    assert first["personal_loss"].is_finite().all()


def test_run_can_stop_at_a_personal_target(tmp_path: Path) -> None:
    target = {"metric": "personal_accuracy", "value": 0.6}
    run = gossamer.run(experiment(stop={"rounds": 200, "target": target}), tmp_path)
    assert run.metrics["round"].max() < 200
    without_personal = {"name": "iid"}
    for changes in ({"partition": without_personal}, {"evaluation": {"every_rounds": 2, "nodes": "average"}}):
        with pytest.raises(BadInput, match="stop.target.metric: got 'personal_accuracy'"):
            prepare(experiment(stop={"rounds": 9, "target": target}, **changes))


def test_fraction_that_leaves_no_samples_is_refused() -> None:
    sizes = {"name": "sizes", "fractions": [0.005, 0.3, 0.3, 0.3], "personal_fraction": 0.5}
    with pytest.raises(BadInput, match="partition.personal_fraction: node 0 has one sample; accepted: two"):
        prepare(experiment(partition=sizes))
    with pytest.raises(BadInput, match="partition.personal_fraction: got 1; accepted: less than 1"):
        experiment(partition={"name": "iid", "personal_fraction": 1})
