"""Runs in which a model is no longer finite: they end as "diverged", with the node and the round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import gossamer
from gossamer import Experiment, Model, Node
from gossamer.algorithms import DPSGD, GossipLearning

ENGINES = ("simulate", "processes")


class Broken(DPSGD):
    """D-PSGD in which a value of node 1 becomes infinite after some rounds, or after the last one."""

    after: int

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train(self.local_steps)
            if node.rank == 1 and r == self.after:
                self._break(node)
            node.broadcast(await node.neighbors(r), node.model, tag=r)
            await node.mix(await node.gather(await node.neighbors(r), tag=r), node.mixing_weights(r))
        if node.rank == 1 and node.round == self.after:
            self._break(node)

    def _break(self, node: Node) -> None:
        broken = node.parameters.clone()
        broken[2] = torch.inf
        node.parameters = broken


class BrokenGossip(GossipLearning):
    """Gossip learning, in which no node waits; the model of node 1 becomes NaN after some rounds."""

    async def run(self, node: Node) -> None:
        if node.rank == 1:
            node.spawn(self._break(node))
        await super().run(node)

    async def _break(self, node: Node) -> None:
        while node.round < 3:
            await node.sleep(0.002)
        node.model = Model(torch.full_like(node.parameters, torch.nan))


def described(algorithm: Any, engine: str = "simulate", **changes: Any) -> Experiment:
    options = {"pace": True} if engine == "processes" else {"trainer": "sequential"}
    fields: dict[str, Any] = {
        "nodes": 4,
        "task": {"name": "least-squares", "features": 5, "samples": 80, "test_samples": 20},
        "topology": "ring",
        "algorithm": algorithm,
        "optimizer": {"name": "sgd", "lr": 0.01},
        "compute": {"name": "constant", "seconds_per_step": 0.01},
        "evaluation": {"every_rounds": 4},
        "stop": {"rounds": 12},
        "engine": {"name": engine, **options},
    }
    return Experiment.of({**fields, **changes})


@pytest.mark.parametrize("engine", ENGINES)
def test_nonfinite_model_ends_the_run_as_diverged(engine: str, tmp_path: Path) -> None:
    run = gossamer.run(described(Broken(after=6), engine), tmp_path)
    assert run.status == "diverged"
    assert run.error == "the model of node 1 is not finite after 6 rounds"
    assert run.parameters is not None
    assert run.parameters.isfinite().all(1).tolist() == [True, False, True, True]  # no peer received it
    events = run.events.filter(pl.col("event") == "diverged")
    assert events["node"].to_list() == [1]
    assert run.metrics.filter(pl.col("node") >= 0)["round"].max() < 12


@pytest.mark.parametrize("engine", ENGINES)
def test_divergence_ends_nodes_that_never_wait(engine: str, tmp_path: Path) -> None:
    run = gossamer.run(described(BrokenGossip(), engine, stop={"rounds": 300}), tmp_path)
    assert run.status == "diverged"
    assert run.error is not None
    assert run.error.startswith("the model of node 1 is not finite after ")
    assert run.metrics["round"].max() < 300


@pytest.mark.parametrize("engine", ENGINES)
def test_divergence_after_the_last_round_is_detected(engine: str, tmp_path: Path) -> None:
    run = gossamer.run(described(Broken(after=12), engine), tmp_path)
    assert (run.status, run.error) == ("diverged", "the model of node 1 is not finite after 12 rounds")


@pytest.mark.parametrize("codec", [None, {"name": "quantize", "bits": 4}])
@pytest.mark.parametrize("secure", [None, {"drop_outs": "skip"}])
def test_high_learning_rate_diverges_and_blames_no_peer(codec: Any, secure: Any, tmp_path: Path) -> None:
    if codec and secure:
        pytest.skip("refused before the run")
    changes = {"optimizer": {"name": "sgd", "lr": 1e9}, "codec": codec, "stop": {"rounds": 60}}
    algorithm: Any = {"name": "d-psgd", "local_steps": 3 if secure is None else 40}
    run = gossamer.run(described(algorithm, secure_aggregation=secure, **changes), tmp_path)
    assert run.status == "diverged"
    assert set(run.events["event"]) == {"diverged"}


@pytest.mark.parametrize("engine", ENGINES)
def test_run_continues_after_divergence_on_request(engine: str, tmp_path: Path) -> None:
    gather, stop = {"malformed": "drop"}, {"rounds": 12, "diverged": "continue"}
    run = gossamer.run(described(Broken(after=6), engine, gather=gather, stop=stop), tmp_path)
    assert run.status == "done"
    assert run.parameters is not None
    assert run.parameters.isfinite().all(1).tolist() == [True, False, True, True]
    assert run.events.filter(pl.col("event") == "diverged")["node"].to_list() == [1]
    assert set(run.events.filter(pl.col("event") == "malformed")["node"]) == {0, 2}
