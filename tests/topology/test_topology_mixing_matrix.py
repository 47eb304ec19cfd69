from __future__ import annotations

from math import cos, pi
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.config.registry import build
from gossamer.randomness import generator
from gossamer.topology import Graph, TopologySchedule
from gossamer.topology.mixing_matrix import (
    describe,
    diameter,
    influence,
    smallest_eigenvalue,
    sparse_matrix,
    spectral_gap,
)


def schedule(spec: Any, nodes: int) -> TopologySchedule:
    return TopologySchedule(build("topology", spec), nodes, 1)


@pytest.mark.parametrize("nodes", [3, 8, 100, 600])
def test_spectral_gap_of_a_ring(nodes: int) -> None:
    # Circulant with 1/3: eigenvalues (1 + 2 cos(2 pi k / n)) / 3.
    expected = 1 - (1 + 2 * cos(2 * pi / nodes)) / 3
    assert spectral_gap(sparse_matrix(schedule("ring", nodes), 0)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("nodes", [3, 4, 7, 100, 601])
def test_smallest_eigenvalue_of_a_ring(nodes: int) -> None:
    expected = (1 + 2 * cos(2 * pi * (nodes // 2) / nodes)) / 3
    W = sparse_matrix(schedule("ring", nodes), 0)
    assert smallest_eigenvalue(W) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("nodes", [6, 8, 20, 64, 700])
def test_spectral_gap_of_an_exponential_graph(nodes: int) -> None:
    # Ying et al. (2021), proposition 1: 2 / (1 + ceil(log2 n)) for an even n.
    expected = 2 / (1 + (nodes - 1).bit_length())
    assert spectral_gap(sparse_matrix(schedule("exponential", nodes), 0)) == pytest.approx(expected, abs=1e-9)


def test_spectral_gaps_of_one_and_zero() -> None:
    assert spectral_gap(sparse_matrix(schedule("complete", 7), 0).toarray()) == pytest.approx(1)
    assert spectral_gap(sparse_matrix(schedule("ring", 1), 0).toarray()) == 1
    loose: dict[str, Any] = {"name": "erdos-renyi", "p": 0.0, "allow_disconnected": True}
    assert spectral_gap(sparse_matrix(schedule(loose, 7), 0).toarray()) == 0
    two_rings = np.kron(np.eye(2), sparse_matrix(schedule("ring", 5), 0).toarray())
    assert spectral_gap(two_rings) == 0


def test_spectral_gap_of_a_large_hypercube() -> None:
    # Eigenvalues 1 - 2k / (d + 1) of Q_d: the largest modulus but 1 is (d - 1) / (d + 1).
    assert spectral_gap(sparse_matrix(schedule("hypercube", 1024), 0)) == pytest.approx(2 / 11, abs=1e-9)


@settings(max_examples=30)
@given(st.integers(1, 10), st.booleans(), st.data())
def test_diameter_matches_networkx(nodes: int, directed: bool, data: st.DataObject) -> None:
    rank = st.integers(0, nodes - 1)
    pairs = data.draw(st.sets(st.tuples(rank, rank).filter(lambda pair: pair[0] != pair[1]), max_size=60))
    graph = Graph(nodes, pairs, directed=directed)
    reference = graph.to_networkx()
    connected = nx.is_strongly_connected(reference) if directed else nx.is_connected(reference)
    assert diameter(graph) == (nx.diameter(reference) if connected else None)


@pytest.mark.parametrize(
    ("name", "nodes", "hops"), [("ring", 11, 5), ("torus", 36, 6), ("hypercube", 64, 6), ("star", 9, 2)]
)
def test_known_diameters(name: str, nodes: int, hops: int) -> None:
    assert diameter(schedule(name, nodes).graph(0)) == hops


def test_influence_under_uniform_weights_follows_the_degree() -> None:
    """D^-1 A, with D_ii the row sums of a symmetric A, has the stationary vector D_ii / sum_k D_kk."""
    for nodes in (40, 600):
        topology = schedule({"name": "barabasi-albert", "m": 2, "weights": "uniform"}, nodes)
        closed = np.array([1 + topology.graph(0).degree(rank) for rank in range(nodes)])
        assert influence(sparse_matrix(topology, 0)) == pytest.approx(closed / closed.sum(), abs=1e-12)


def test_iterated_influence_matches_the_dense_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    W = sparse_matrix(schedule({"name": "star", "weights": "uniform"}, 30), 0)
    solved = influence(W)
    monkeypatch.setattr("gossamer.topology.mixing_matrix.DENSE_NODES", 29)
    assert influence(W) == pytest.approx(solved, abs=1e-12)
    assert influence(sparse_matrix(schedule("ring", 30), 0)) == pytest.approx(1 / 30, abs=0)


@settings(max_examples=20)
@given(st.integers(2, 12), st.integers(0, 1000))
def test_influence_is_the_limit_of_repeated_mixing(nodes: int, seed: int) -> None:
    W = generator(seed, "test").dirichlet(np.ones(nodes), size=nodes)
    assert influence(W) == pytest.approx(np.linalg.matrix_power(W, 4096)[0], abs=1e-9)


def test_description_holds_all_measures() -> None:
    description = describe(schedule("complete", 8))
    assert description.pop("influence") == pytest.approx([1 / 8] * 8)
    assert description.pop("effective_nodes") == pytest.approx(8)
    assert description.pop("spectral_gap") == pytest.approx(1)
    assert description == {
        "nodes": 8,
        "edges": 28,
        "degree_min": 7,
        "degree_mean": 7.0,
        "degree_max": 7,
        "components": 1,
        "diameter": 1,
        "clustering": 1.0,
    }


def test_description_of_a_disconnected_round() -> None:
    one_peer = schedule("one-peer-exponential", 8)
    first, second = describe(one_peer, 0), describe(one_peer, 1)
    assert (first["edges"], first["components"], first["diameter"]) == (8, 1, 7)
    assert (second["edges"], second["components"], second["diameter"]) == (8, 2, None)
    assert second["spectral_gap"] == 0
    assert second["influence"] is second["effective_nodes"] is None
