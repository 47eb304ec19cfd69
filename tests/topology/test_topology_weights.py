from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.topology import TopologySchedule
from gossamer.topology.mixing_matrix import sparse_matrix


def schedule(spec: Any, nodes: int, seed: int = 1, samples: list[int] | None = None) -> TopologySchedule:
    return TopologySchedule(build("topology", spec), nodes, seed, samples)


NODES = 16
UNDIRECTED: list[dict[str, Any]] = [
    {"name": "ring"},
    {"name": "star", "centre": 3},
    {"name": "complete"},
    {"name": "torus"},
    {"name": "hypercube"},
    {"name": "random-regular", "degree": 3, "every_rounds": 1},
    {"name": "erdos-renyi", "p": 0.3, "every_rounds": 1},
    {"name": "watts-strogatz", "degree": 4, "p": 0.4, "every_rounds": 1},
    {"name": "layers", "layers": {"a": "ring", "b": "star"}},
]
DIRECTED: list[dict[str, Any]] = [{"name": "exponential"}, {"name": "one-peer-exponential"}]
seeds, rounds = st.integers(0, 1000), st.integers(0, 100)


def fits(W: np.ndarray, topology: TopologySchedule, round: int) -> None:
    graph = topology.graph(round)
    allowed = np.eye(NODES, dtype=bool)
    for rank in range(NODES):
        allowed[rank, list(graph.neighbors(rank, "in"))] = True
    assert (W[~allowed] == 0).all()
    assert (W[allowed & ~np.eye(NODES, dtype=bool)] > 0).all()
    assert W.sum(axis=1) == pytest.approx(1, abs=1e-12)


@settings(max_examples=60)
@given(st.sampled_from(UNDIRECTED), seeds, rounds)
def test_metropolis_hastings_is_symmetric_and_doubly_stochastic(spec: Any, seed: int, round: int) -> None:
    topology = schedule(spec, NODES, seed)  # the default
    W = sparse_matrix(topology, round).toarray()
    fits(W, topology, round)
    assert (W == W.T).all() or pytest.approx(W.T, abs=1e-15) == W
    assert W.sum(axis=0) == pytest.approx(1, abs=1e-12)
    assert (W.diagonal() > 0).all()
    named = schedule({**spec, "weights": "metropolis-hastings"}, NODES, seed)
    assert (sparse_matrix(named, round).toarray() == W).all()


@settings(max_examples=60)
@given(st.sampled_from(UNDIRECTED + DIRECTED), seeds, rounds)
def test_uniform_weights_are_equal(spec: Any, seed: int, round: int) -> None:
    topology = schedule({**spec, "weights": {"name": "uniform"}}, NODES, seed)
    W = sparse_matrix(topology, round).toarray()
    fits(W, topology, round)
    for rank, row in enumerate(W):
        share = 1 / (1 + topology.graph(round).degree(rank, "in"))
        assert row[row > 1e-9] == pytest.approx(share, abs=1e-15)


@settings(max_examples=60)
@given(
    st.sampled_from(UNDIRECTED + DIRECTED),
    seeds,
    rounds,
    st.lists(st.integers(1, 500), min_size=NODES, max_size=NODES),
)
def test_data_size_averages_over_the_samples_of_neighbours(
    spec: Any, seed: int, round: int, samples: list[int]
) -> None:
    topology = schedule({**spec, "weights": "data-size"}, NODES, seed, samples)
    W = sparse_matrix(topology, round).toarray()
    fits(W, topology, round)
    values = np.arange(NODES) ** 2.0
    for rank in range(NODES):
        closed = [rank, *topology.neighbors(rank, round, "in")]
        sampled = np.concatenate([np.full(samples[i], values[i]) for i in closed])
        assert W[rank] @ values == pytest.approx(sampled.mean())


def test_metropolis_hastings_by_hand() -> None:
    # A star of four: every edge touches the centre, whose degree is 3.
    W = sparse_matrix(schedule("star", 4), 0).toarray()
    expected = np.array([[1, 1, 1, 1], [1, 3, 0, 0], [1, 0, 3, 0], [1, 0, 0, 3]]) / 4
    assert pytest.approx(expected, abs=1e-15) == W


@pytest.mark.parametrize("spec", DIRECTED)
def test_default_on_directed_graphs_is_uniform(spec: dict[str, Any]) -> None:
    W = sparse_matrix(schedule(spec, NODES), 3).toarray()
    assert (sparse_matrix(schedule({**spec, "weights": "uniform"}, NODES), 3).toarray() == W).all()
    assert W.sum(axis=0) == pytest.approx(1, abs=1e-12)  # all in-degrees are equal
    with pytest.raises(
        BadInput, match="metropolis-hastings on a directed graph; accepted: uniform, data-size"
    ):
        schedule({**spec, "weights": "metropolis-hastings"}, NODES).check()


@pytest.mark.parametrize("nodes", [2, 4, 8, 16, 32])
def test_cycle_of_one_peer_averages_exactly(nodes: int) -> None:
    topology = schedule("one-peer-exponential", nodes)
    product = np.eye(nodes)
    for round in range(3, 3 + nodes.bit_length() - 1):  # any log2(n) rounds in a row
        product = sparse_matrix(topology, round).toarray() @ product
    assert product == pytest.approx(1 / nodes, abs=1e-12)


def test_data_size_requires_numbers_of_samples() -> None:
    with pytest.raises(
        BadInput, match=r"topology\.weights: data-size without the number of samples of each node"
    ):
        schedule({"name": "ring", "weights": "data-size"}, 4).check()
    empty = schedule({"name": "ring", "weights": "data-size"}, 5, samples=[0, 0, 1, 0, 1])
    empty.check()
    assert empty.mixing_weights(1, 0) == {0: 0.0, 2: 1.0}


def given_matrix(path: Path, W: Any) -> dict[str, Any]:
    np.savetxt(path, np.array(W))
    return {"name": "ring", "weights": {"name": "given", "path": str(path)}}


def test_given_matrix_is_the_mixing_matrix(tmp_path: Path) -> None:
    W = np.array([[0.5, 0.3, 0, 0.2], [0.1, 0.9, 0, 0], [0, 0.6, 0.6, -0.2], [0.25, 0, 0.25, 0.5]])
    topology = schedule(given_matrix(tmp_path / "W.txt", W), 4)
    topology.check()
    assert pytest.approx(W, abs=1e-12) == sparse_matrix(topology, 0).toarray()
    assert topology.mixing_weights(1, 0) == {0: 0.1, 2: 0.0}
    assert build("topology", topology.topology.spec()) == topology.topology


@pytest.mark.parametrize(
    ("W", "problem"),
    [
        (np.eye(3), "3 rows for 4 nodes; accepted: one per node"),
        (
            np.full((4, 4), 0.25),
            "0.25 in row 0, column 2, but the graph has no edge from 2; accepted: 0",
        ),
        (np.diag([1, 1, 0.5, 1]), "row 2 sums to 0.5; accepted: 1"),
        (np.ones((3, 4)), "3 lines of 4 numbers; accepted: a square matrix of numbers"),
    ],
)
def test_mismatched_given_matrix_is_refused(tmp_path: Path, W: Any, problem: str) -> None:
    path = tmp_path / "W.txt"
    with pytest.raises(BadInput) as raised:
        schedule(given_matrix(path, W), 4).check()
    assert str(raised.value) == f"topology.weights.path: {path.resolve()}: {problem}"


def test_rows_of_the_matrix_are_receivers() -> None:
    topology = schedule("exponential", 9)
    # Receivers are rows: node 0 hears from 8, 7, 5 and 1 = 0 - 8 modulo 9.
    assert set(np.flatnonzero(sparse_matrix(topology, 0).toarray()[0])) == {0, 8, 7, 5, 1}


@settings(max_examples=60)
@given(st.sampled_from(UNDIRECTED), seeds, rounds)
def test_ccs_is_symmetric_and_doubly_stochastic(spec: Any, seed: int, round: int) -> None:
    topology = schedule({**spec, "weights": "ccs"}, NODES, seed)
    topology.check()
    W = sparse_matrix(topology, round).toarray()
    fits(W, topology, round)
    assert pytest.approx(W.T, abs=1e-15) == W
    assert W.sum(axis=0) == pytest.approx(1, abs=1e-12)
    assert (W.diagonal() > 0).all()


def from_edges(path: Path, edges: list[tuple[int, int]], nodes: int) -> np.ndarray:
    path.write_text("".join(f"{i} {j}\n" for i, j in edges))
    spec = {"name": "edge-list", "path": str(path), "weights": "ccs"}
    return sparse_matrix(schedule(spec, nodes), 0).toarray()


def test_ccs_by_hand(tmp_path: Path) -> None:
    # A star: the hub chooses, 1/5 each.
    star = np.eye(5) * 4 / 5
    star[0], star[:, 0] = 1 / 5, 1 / 5
    assert from_edges(tmp_path / "star", [(0, j) for j in range(1, 5)], 5) == pytest.approx(star)
    # A path: the inner nodes choose 1/3, also for the ends.
    path = np.diag([2, 1, 1, 2]) / 3 + (np.eye(4, k=1) + np.eye(4, k=-1)) / 3
    assert from_edges(tmp_path / "path", [(0, 1), (1, 2), (2, 3)], 4) == pytest.approx(path)
    # A ring of five with the chord 0-2: the ends of the chord choose 1/4; 3 and 4 each split the remaining 3/4
    # between themselves and the edge that joins them.
    ring = np.zeros((5, 5))
    for i, j, w in [(0, 2, 1 / 4), (0, 1, 1 / 4), (1, 2, 1 / 4), (2, 3, 1 / 4), (0, 4, 1 / 4), (3, 4, 3 / 8)]:
        ring[i, j] = ring[j, i] = w
    ring += np.diag(1 - ring.sum(axis=1))
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (0, 2)]
    assert from_edges(tmp_path / "ring", edges, 5) == pytest.approx(ring)


def test_ccs_takes_the_smaller_share_for_equal_degrees(tmp_path: Path) -> None:
    """1 and 2 have degree 2; 1 has an edge to the hub 0 (3/4 left for itself and one edge), 2 has none (1/3 each)."""
    W = from_edges(tmp_path / "edges", [(0, 1), (1, 2), (2, 3), (0, 4), (0, 5)], 6)
    assert W[0, 1] == W[0, 4] == W[0, 5] == pytest.approx(1 / 4)
    assert W[1, 2] == W[2, 1] == pytest.approx(1 / 3)
    assert W[2, 3] == pytest.approx(1 / 3)


def test_ccs_weights_are_never_negative(tmp_path: Path) -> None:
    """Three nodes of degree 4 have small weights to three hubs each, and would give at least 0.36 each to their one common
    neighbour, more than 1 in total."""
    hubs = range(3)
    edges = [(hub, 20 + 20 * hub + k) for hub in hubs for k in range(15)]
    edges += [(hub, middle) for hub in hubs for middle in (3, 4, 5)]
    edges += [(middle, 6) for middle in (3, 4, 5)]
    used = sorted({rank for edge in edges for rank in edge})
    number = {rank: k for k, rank in enumerate(used)}
    W = from_edges(tmp_path / "edges", [(number[i], number[j]) for i, j in edges], len(used))
    assert (W >= 0).all()
    assert W[6, 3] == pytest.approx(1 / 4)
    assert W[6, 6] == pytest.approx(1 / 4)


def test_ccs_equals_metropolis_hastings_on_regular_graphs() -> None:
    spec = {"name": "random-regular", "degree": 4}
    ccs, metropolis = (
        sparse_matrix(schedule({**spec, "weights": name}, NODES), 0).toarray()
        for name in ("ccs", "metropolis-hastings")
    )
    assert ccs == pytest.approx(metropolis)
    with pytest.raises(BadInput, match="ccs on a directed graph"):
        schedule({"name": "exponential", "weights": "ccs"}, 8).check()
