"""Measures: what users compute whenever a row is made, against closed forms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from gossamer import Experiment, Measure, Measurement, RunFailed, run


class Seen(Measure):
    """The loss on the node's own samples, the received models' distance from the shown one, and who sent them."""

    def measure(self, at: Measurement) -> Mapping[str, Any]:
        inputs, targets = at.samples
        errors = at.outputs(at.model, inputs) - targets
        distances = [
            float((message.payload.over(at.model).parameters - at.model.parameters).norm())
            for message in at.taken
        ]
        draw = float(at.rng("x", at.round).random())
        return {
            "own_loss": float(errors.square().mean() / 2),
            "heard": [message.source for message in at.taken],
            "farthest": max(distances, default=None),
            "draw": draw,
            "sets": ",".join(at.sets),
        }


class Raises(Measure):
    def measure(self, at: Measurement) -> Mapping[str, Any]:
        return {"x": 1 / (1 - at.round)}


def described(**fields: Any) -> Experiment:
    return Experiment.of(
        {
            "name": "t",
            "nodes": 4,
            "task": {"name": "least-squares", "features": 3, "samples": 24, "test_samples": 10},
            "algorithm": "d-psgd",
            "topology": "ring",
            "batch_size": "full",
            "measures": [Seen()],
            "evaluation": {"every_rounds": 1},
            "stop": {"rounds": 2},
            **fields,
        }
    )


@pytest.mark.parametrize("engine", ["simulate", pytest.param("processes", marks=pytest.mark.slow)])
def test_values_are_of_the_shown_model_and_its_round(tmp_path: Path, engine: str) -> None:
    recorded = run(
        described(engine={"name": engine}, codec={"name": "top-k", "fraction": 0.5}), tmp_path / "a"
    )
    rows = recorded.metrics.filter(pl.col("node") >= 0).sort("round", "node")
    assert rows["heard"].to_list() == [[]] * 4 + [[1, 3], [0, 2], [1, 3], [0, 2]] * 2
    assert rows["sets"].unique().to_list() == ["test"]
    assert rows["draw"].n_unique() == len(rows)
    # The loss of the last row is that of the saved models on the nodes' samples.
    from gossamer.runtime.setup import prepare

    setup = prepare(described())
    inputs, targets = (tensor.double().numpy() for tensor in setup.task.train)
    for rank in range(4):
        w = recorded.parameters[rank].double().numpy()  # type: ignore[index]
        part = setup.parts[rank]
        expected = ((inputs[part] @ w - targets[part, 0]) ** 2).mean() / 2
        assert rows["own_loss"][8 + rank] == pytest.approx(expected, rel=1e-4)
    plain = run(
        described(measures=[], codec={"name": "top-k", "fraction": 0.5}, engine={"name": engine}),
        tmp_path / "b",
    )
    assert torch.equal(plain.parameters, recorded.parameters)  # type: ignore[arg-type]
    if engine == "simulate":
        assert plain.metrics["time_s"].to_list() == recorded.metrics["time_s"].to_list()


def test_distances_are_those_of_the_models_that_were_mixed(tmp_path: Path) -> None:
    """With two nodes, each mixes its own model with the other's, so it ends half of their distance away from it."""
    recorded = run(described(nodes=2, topology="complete"), tmp_path)
    rows = recorded.metrics.filter((pl.col("node") >= 0) & (pl.col("round") > 0)).sort("round", "node")
    pairs = np.array(rows["farthest"].to_list()).reshape(2, 2)
    np.testing.assert_allclose(pairs[:, 0], pairs[:, 1], rtol=1e-5)
    assert (pairs > 0).all()


def test_errors_name_the_node_and_the_line(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"node 0 failed in round 1: ZeroDivisionError.*test_measures.py"):
        run(described(measures=[Raises()]), tmp_path)
    with pytest.raises(RunFailed, match=r"ZeroDivisionError.*test_measures.py"):
        run(described(measures=[Raises()], evaluation={"every_s": 0.001}), tmp_path)
