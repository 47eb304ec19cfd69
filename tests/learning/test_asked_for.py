"""What a component gets because it asks for it: the layout and a generator for an optimizer, counts for a topology."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer import BadInput, Experiment, Node, run
from gossamer.learning import SGD
from gossamer.runtime.setup import prepare
from gossamer.topology import Graph, Topology
from scenario import play, wide


class Langevin(SGD):
    """SGD with Gaussian noise (Welling and Teh, 2011), on all but the biases."""

    noise: float = 0.1

    def update(  # type: ignore[override]
        self,
        parameters: Tensor,
        gradient: Tensor,
        state: Any,
        lr: float,
        layout: Any,
        rng: np.random.Generator,
    ) -> None:
        super().update(parameters, gradient, state, lr)
        for field in layout.parameters:
            if len(field.shape) > 1:
                vector = field.of(parameters)
                vector.add_(
                    torch.from_numpy(rng.standard_normal(field.shape).astype("float32")), alpha=self.noise
                )


async def applied(node: Node) -> Any:
    start = wide(node.parameters)
    await node.apply(torch.zeros_like(node.parameters))
    return wide(node.parameters) - start


MLP = {"name": "digits", "model": {"name": "mlp", "hidden": [4]}}


def test_an_optimizer_gets_the_layout_and_its_own_draws(tmp_path: Path) -> None:
    changes = play(tmp_path, applied, 2, task=MLP, optimizer=Langevin(lr=0.1)).values
    again = play(tmp_path / "again", applied, 2, task=MLP, optimizer=Langevin(lr=0.1)).values
    setup = prepare(Experiment.of({"nodes": 2, "task": MLP, "algorithm": "local", "stop": {"rounds": 1}}))
    for field in setup.layout.parameters:
        changed = [np.abs(field.of(torch.from_numpy(changes[rank])).numpy()) for rank in range(2)]
        if len(field.shape) > 1:
            assert (changed[0] != changed[1]).all()
            assert np.sqrt((changed[0] ** 2).mean()) == pytest.approx(0.1, rel=0.25)
        else:
            assert not changed[0].any()
    assert all((changes[rank] == again[rank]).all() for rank in range(2))


@pytest.mark.parametrize("trainer", ["fused", "sequential"])
def test_draws_do_not_depend_on_the_workers(tmp_path: Path, trainer: str) -> None:
    runs = [
        run(
            Experiment.of(
                {
                    "name": "t",
                    "nodes": 4,
                    "task": MLP,
                    "algorithm": "d-psgd",
                    "optimizer": Langevin(lr=0.05),
                    "stop": {"rounds": 2},
                    "engine": {"name": "simulate", "trainer": trainer, "workers": workers},
                }
            ),
            tmp_path / str(workers),
        )
        for workers in (1, 2)
    ]
    assert torch.equal(runs[0].parameters, runs[1].parameters)  # type: ignore[arg-type]


def test_a_stack_of_nodes_is_never_given_to_an_optimizer_that_draws(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="'batched' can't give each node a generator in one update"):
        play(tmp_path, applied, 2, task=MLP, optimizer=Langevin(lr=0.1), engine={"trainer": "batched"})


class ByLabels(Topology):
    """Links nodes whose samples have most labels in common, in a ring of that order."""

    def draw(  # type: ignore[override]
        self, nodes: int, rng: np.random.Generator, round: int, label_counts: Any, samples: Any
    ) -> Graph:
        assert label_counts.sum(1).tolist() == list(samples)
        order = [int(rank) for rank in label_counts.argmax(1).argsort(kind="stable")]
        return Graph(nodes, [(order[k - 1], order[k]) for k in range(nodes)])


def test_a_topology_gets_the_counts_before_poisons(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "nodes": 5,
        "task": "digits",
        "partition": {"name": "shards", "per_node": 1},
        "algorithm": "local",
        "topology": ByLabels(),
        "stop": {"rounds": 1},
    }
    plain = prepare(Experiment.of(fields))
    assert plain.labels is not None
    order = [int(rank) for rank in plain.labels.argmax(1).argsort(kind="stable")]
    expected = sorted(tuple(sorted((order[k - 1], order[k]))) for k in range(5))
    assert sorted(tuple(sorted(edge)) for edge in plain.topology.graph(0).edges()) == expected
    poison = {"name": "patch", "share": 1.0, "target": 9, "at": {"ranks": [order[0]]}}
    poisoned = prepare(Experiment.of({**fields, "poison": [poison]}))
    assert poisoned.labels is not None
    assert poisoned.labels.argmax(1)[order[0]] == 9 != plain.labels.argmax(1)[order[0]]
    assert list(poisoned.topology.graph(0).edges()) == list(plain.topology.graph(0).edges())


def test_counts_are_missing_outside_of_a_run() -> None:
    from gossamer.topology import TopologySchedule

    with pytest.raises(BadInput, match=r"ByLabels.draw asks for label_counts, samples; accepted: in a run"):
        TopologySchedule(ByLabels(), 5, 1).graph(0)
