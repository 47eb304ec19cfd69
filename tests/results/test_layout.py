"""Where graphs are drawn."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from gossamer.results.layout import by_distance

GRAPHS = {
    "ring": nx.cycle_graph(12),
    "path": nx.path_graph(9),
    "star": nx.star_graph(20),
    "complete": nx.complete_graph(8),
    "grid": nx.convert_node_labels_to_integers(nx.grid_2d_graph(6, 6)),
    "hypercube": nx.convert_node_labels_to_integers(nx.hypercube_graph(5)),
    "regular": nx.random_regular_graph(5, 48, seed=1),
}


def energy(graph: nx.Graph, places: np.ndarray) -> float:
    """Of Kamada and Kawai, at the scale that suits the places best."""
    hops = np.array(nx.floyd_warshall_numpy(graph))
    np.fill_diagonal(hops, 1.0)
    distances = np.linalg.norm(places[:, None] - places[None], axis=2) / hops
    scale = distances.sum() / (distances**2).sum()
    off = ~np.eye(len(graph), dtype=bool)
    return float(((scale * distances - 1) ** 2)[off].sum())


@pytest.mark.parametrize("name", GRAPHS)
def test_distances_follow_those_in_the_graph_as_well_as_another_solver_has_it(name: str) -> None:
    graph = GRAPHS[name]
    other = nx.kamada_kawai_layout(graph)
    ours = energy(graph, by_distance(graph))
    assert ours <= 1.02 * energy(graph, np.array([other[node] for node in graph])) + 1e-6


@pytest.mark.parametrize("make", [nx.star_graph, nx.complete_graph, nx.path_graph, nx.cycle_graph])
@pytest.mark.parametrize("nodes", [3, 4, 5, 8, 17, 40])
def test_no_two_nodes_are_drawn_in_one_place(make: object, nodes: int) -> None:
    assert callable(make)
    places = by_distance(make(nodes))
    apart = np.linalg.norm(places[:, None] - places[None], axis=2)
    assert apart[~np.eye(len(places), dtype=bool)].min() > 0.05
