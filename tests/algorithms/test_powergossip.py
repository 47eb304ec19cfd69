"""PowerGossip against NumPy, with matrices, a kernel and vectors; agreement; changing graphs; bytes; both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from timing import play
from torch import nn

import gossamer
from gossamer import BadInput, Experiment, Node, Task
from gossamer.algorithms.powergossip import PowerGossip, _Matrix
from gossamer.randomness import SHARED, generator
from gossamer.runtime.setup import prepare
from gossamer.topology.mixing_matrix import sparse_matrix

Array = NDArray[np.float64]
SHAPES = [(3, 2, 2, 2), (3,), (4, 12), (4,)]
CHANGING = {"name": "random-regular", "degree": 2, "every_rounds": 3}


def small() -> Task:
    """A convolution and a linear layer on random images."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 2, 3, 3), torch.randint(0, 4, (40,))

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4))

    return Task(
        model=model, loss=nn.functional.cross_entropy, metrics={}, train=(x, y), tests={"test": (x, y)}
    )


def described(rounds: int, rank: int = 1, topology: Any = "ring", **more: Any) -> Experiment:
    return Experiment.of(
        {
            "nodes": 5,
            "seed": 3,
            "task": f"{__name__}:small",
            "topology": topology,
            "algorithm": {"name": "powergossip", "rank": rank},
            "optimizer": {"name": "sgd", "lr": 1e-30},
            "batch_size": "full",
            "initial": "independent",
            "evaluation": {"every_rounds": rounds},
            "engine": {"name": "simulate", "trainer": "sequential"},
            "stop": {"rounds": rounds},
            **more,
        }
    )


def initial(experiment: Experiment) -> Array:
    setup = prepare(experiment)
    return np.stack([setup.initial(rank).parameters.double().numpy() for rank in range(experiment.nodes)])


def reference(experiment: Experiment, rounds: int, width: int) -> Array:
    """PowerGossip without training, since the learning rate is almost zero."""
    X, topology = initial(experiment), prepare(experiment).topology
    bases: dict[tuple[int, int], list[Array]] = {}
    for r in range(rounds):
        W, graph = sparse_matrix(topology, r).toarray(), topology.graph(r)
        edges = [(i, j) for i in range(len(X)) for j in graph.neighbors(i) if i < j]
        new = X.copy()
        for i, j in edges:
            rng = generator(3, "algorithm/powergossip", SHARED, i, j, r)
            start, first = 0, (i, j) not in bases
            after = []
            for number, shape in enumerate(SHAPES):
                size = int(np.prod(shape))
                A, B = (x[start : start + size].reshape(shape[0], -1) for x in (X[i], X[j]))
                if len(shape) == 1:
                    step = A - B
                    after.append(np.empty(0))
                else:
                    A, B = (A.T, B.T) if r % 2 else (A, B)
                    drawn = rng.standard_normal((A.shape[1], width), dtype=np.float32) if first else None
                    V = np.linalg.qr(drawn.astype(float))[0] if drawn is not None else bases[i, j][number]
                    D = (A - B) @ V
                    after.append(np.linalg.qr(D)[0])
                    step = D @ V.T
                    step = step.T if r % 2 else step
                new[i][start : start + size] -= W[i, j] * step.ravel()
                new[j][start : start + size] += W[i, j] * step.ravel()
                start += size
            bases[i, j] = after
        bases = {edge: bases[edge] for edge in edges}
        X = new
    return X


@pytest.mark.parametrize("topology", ["ring", CHANGING], ids=["ring", "changing"])
@pytest.mark.parametrize("rank", [1, 2])
def test_models_match_numpy(rank: int, topology: Any, tmp_path: Path) -> None:
    experiment = described(7, rank, topology)
    run = play(experiment, tmp_path)
    assert run.parameters is not None
    np.testing.assert_allclose(run.parameters.double().numpy(), reference(experiment, 7, rank), atol=1e-5)


def test_nodes_converge_to_their_average(tmp_path: Path) -> None:
    experiment = described(120)
    run = play(experiment, tmp_path)
    assert run.parameters is not None
    X, start = run.parameters.double().numpy(), initial(experiment)
    np.testing.assert_allclose(X.mean(0), start.mean(0), atol=1e-5)
    assert np.abs(X - X.mean(0)).max() < 0.02 * np.abs(start - start.mean(0)).max()


def test_messages_hold_a_column_or_a_row_of_each_matrix(tmp_path: Path) -> None:
    counts: list[int] = []

    class Count(gossamer.NodeWrapper):
        def outgoing(self, node: Node, to: int, payload: Any, tag: Any) -> Any:
            counts.append(len(payload))
            return payload

    play(described(2, wrappers=[Count()]), tmp_path)
    assert set(counts[: len(counts) // 2]) == {3 + 3 + 4 + 4}
    assert set(counts[len(counts) // 2 :]) == {8 + 3 + 12 + 4}


def test_resumed_runs_and_processes_keep_the_bits(tmp_path: Path) -> None:
    learns = {"optimizer": {"name": "sgd", "lr": 0.1}}
    whole = gossamer.run(described(6, **learns), tmp_path / "whole")
    cut = gossamer.run(described(3, checkpoint={"every_rounds": 3}, **learns), tmp_path / "cut")
    resumed = gossamer.resume(cut.path, ["stop.rounds=6"])
    real = gossamer.run(
        described(6, engine={"name": "processes", "trainer": "sequential"}, **learns), tmp_path / "real"
    )
    for run in (resumed, real):
        assert torch.equal(run.parameters, whole.parameters)  # type: ignore[arg-type]


def test_asymmetric_weights_are_refused(tmp_path: Path) -> None:
    shift = np.roll(np.eye(5), 1, axis=1)
    np.savetxt(tmp_path / "W.txt", 0.5 * np.eye(5) + 0.4 * shift + 0.1 * shift.T)
    topology = {"name": "ring", "weights": {"name": "given", "path": str(tmp_path / "W.txt")}}
    with pytest.raises(BadInput, match="topology.weights: not symmetric, for powergossip"):
        gossamer.run(described(2, topology=topology), tmp_path)


def test_equal_matrices_do_not_leave_a_zero_basis() -> None:
    matrices = [_Matrix(0, 3, 4)]
    _, [basis] = PowerGossip(rank=1)._step(torch.zeros(12), torch.zeros(3), [torch.ones(4, 1)], matrices, 0)
    assert basis.abs().min() > 0.1


def test_directed_graphs_and_timeouts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="topology: directed, for powergossip"):
        gossamer.run(described(2, topology={"name": "exponential"}), tmp_path)
    with pytest.raises(BadInput, match="topology: directed, for powergossip"):
        gossamer.run(described(2, topology={"name": "one-peer-exponential"}), tmp_path)
    with pytest.raises(BadInput, match="gather: powergossip needs every message"):
        gossamer.run(described(2, gather={"timeout_s": 1.0}), tmp_path)
