"""RelaySum: delays and sums by hand on a path of four nodes, other graphs, and lost messages."""

from __future__ import annotations

import tracemalloc
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timing
from timing import Data, Lossy, least_squares, play, wide

from gossamer import BadInput, Run
from gossamer.algorithms.ad_psgd import active_ranks
from gossamer.algorithms.relay_sum import spanning_tree
from gossamer.topology import Graph

STILL = {"name": "sgd", "lr": 1e-30}
"""A learning rate so small that training does not move the models."""


def relay(out: Path, rounds: int, edges: list[tuple[int, int]], **changes: Any) -> tuple[Run, Data]:
    (out / "edges.txt").write_text("".join(f"{i} {j}\n" for i, j in edges))
    settings = {
        "algorithm": {"name": "relay-sum"},
        "topology": {"name": "edge-list", "path": str(out / "edges.txt")},
        "optimizer": STILL,
        **changes,
    }
    experiment = least_squares(1 + max(max(edge) for edge in edges), rounds, **settings)
    return play(experiment, out), Data(experiment)


def models(run: Run) -> Any:
    assert run.parameters is not None
    return wide(run.parameters)


PATH = [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(
    ("rounds", "stand_in", "mixture"),
    [
        # After one round a node has heard its neighbours; its own model stands in for those farther away.
        (1, "own", [[3, 1, 0, 0], [1, 2, 1, 0], [0, 1, 2, 1], [0, 0, 1, 3]]),
        (1, "initial", [[3, 1, 0, 0], [1, 2, 1, 0], [0, 1, 2, 1], [0, 0, 1, 3]]),
    ],
)
def test_first_round_on_a_path(tmp_path: Path, rounds: int, stand_in: str, mixture: list[list[int]]) -> None:
    algorithm = {"name": "relay-sum", "stand_in": stand_in}
    run, data = relay(tmp_path, rounds, PATH, algorithm=algorithm)
    np.testing.assert_allclose(models(run), np.array(mixture) / 4 @ data.initial, atol=1e-6)


def test_second_round_on_a_path(tmp_path: Path) -> None:
    """Neighbours' models are those at the end of the first round, models from two hops away those at its start."""
    first = np.array([[3, 1, 0, 0], [1, 2, 1, 0], [0, 1, 2, 1], [0, 0, 1, 3]]) / 4
    start = np.eye(4)
    own = [
        2 * first[0] + first[1] + start[2],  # nothing has arrived from 3 yet
        first[0] + first[1] + first[2] + start[3],
        start[0] + first[1] + first[2] + first[3],
        start[1] + first[2] + 2 * first[3],
    ]
    run, data = relay(tmp_path, 2, PATH)
    np.testing.assert_allclose(models(run), np.array(own) / 4 @ data.initial, atol=1e-6)
    initial = [
        first[0] + first[1] + start[2] + start[0],
        *own[1:3],
        start[3] + start[1] + first[2] + first[3],
    ]
    run, data = relay(tmp_path, 2, PATH, algorithm={"name": "relay-sum", "stand_in": "initial"})
    np.testing.assert_allclose(models(run), np.array(initial) / 4 @ data.initial, atol=1e-6)


def test_fixed_models_reach_consensus(tmp_path: Path) -> None:
    """Each node has all others in equal parts, so nodes that agree keep agreeing."""
    X = models(relay(tmp_path, 20, [(0, 1), (1, 2), (1, 3), (3, 4)])[0])
    np.testing.assert_allclose(X, np.tile(X[0], (5, 1)), atol=2e-3)


def test_nodes_agree_despite_lost_messages(tmp_path: Path) -> None:
    """Nodes still agree, on values within the range of the initial models."""
    timing.clear()
    run, data = relay(tmp_path, 25, PATH, wrappers=[Lossy()], gather={"timeout_s": 0.01})
    assert 10 < 6 * 25 - len(timing.arrived) < 100
    X = models(run)
    np.testing.assert_allclose(X, np.tile(X[0], (4, 1)), atol=1e-3)
    assert (X[0] >= data.initial.min(axis=0) - 1e-3).all()
    assert (X[0] <= data.initial.max(axis=0) + 1e-3).all()


def test_spanning_tree_is_breadth_first() -> None:
    ring = Graph(5, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)])
    assert list(spanning_tree(ring).edges()) == [(0, 1), (0, 4), (1, 2), (3, 4)]
    tree = Graph(5, [(4, 2), (2, 0), (2, 1), (1, 3)])
    assert spanning_tree(tree) == tree


def test_trees_of_a_dense_graph_take_little_memory() -> None:
    """A dict for each of the 79,800 edges would take about 30 MB."""
    complete = Graph(400, combinations(range(400), 2))
    tracemalloc.start()
    try:
        assert active_ranks(complete) == frozenset(range(0, 400, 2))
        assert list(spanning_tree(complete).edges()) == [(0, rank) for rank in range(1, 400)]
        assert tracemalloc.get_traced_memory()[1] < 2e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("topology", "problem"),
    [
        ("ring", r"topology: 4 edges between 4 nodes, for relay-sum; accepted: a tree"),
        ("exponential", r"topology: exponential for relay-sum; accepted: one connected, undirected graph"),
        (
            {"name": "random-regular", "degree": 2, "every_rounds": 1},
            r"topology: random-regular for relay-sum",
        ),
        ("one-peer-exponential", r"topology: one-peer-exponential for relay-sum"),
    ],
)
def test_graphs_other_than_fixed_trees_are_refused(tmp_path: Path, topology: Any, problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        play(least_squares(4, 1, algorithm="relay-sum", topology=topology), tmp_path)


def test_disconnected_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("0 1\n2 3\n")
    topology = {"name": "edge-list", "path": str(tmp_path / "edges.txt"), "allow_disconnected": True}
    with pytest.raises(BadInput, match=r"edge-list for relay-sum; accepted: one connected"):
        play(least_squares(4, 1, algorithm="relay-sum", topology=topology), tmp_path)
