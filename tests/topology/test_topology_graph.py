from __future__ import annotations

from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import BadInput
from gossamer.topology import Graph, union


@st.composite
def graphs(draw: st.DrawFn, directed: bool | None = None) -> tuple[int, set[tuple[int, int]], bool]:
    nodes = draw(st.integers(1, 12))
    rank = st.integers(0, nodes - 1)
    pairs = draw(st.sets(st.tuples(rank, rank).filter(lambda pair: pair[0] != pair[1]), max_size=40))
    return nodes, pairs, draw(st.booleans()) if directed is None else directed


@given(graphs())
def test_neighbours_do_not_depend_on_the_order_of_edges(
    spec: tuple[int, set[tuple[int, int]], bool],
) -> None:
    nodes, pairs, directed = spec
    graph = Graph(nodes, sorted(pairs, reverse=True), directed=directed)
    for rank in range(nodes):
        out = {j for i, j in pairs if i == rank}
        into = {i for i, j in pairs if j == rank}
        if not directed:
            out = into = out | into
            assert graph.neighbors(rank) == tuple(sorted(out))
        assert graph.neighbors(rank, "out") == tuple(sorted(out))
        assert graph.neighbors(rank, "in") == tuple(sorted(into))
        assert graph.degree(rank, "in") == len(into)


@given(graphs())
def test_components_and_edges_match_networkx(
    spec: tuple[int, set[tuple[int, int]], bool],
) -> None:
    nodes, pairs, directed = spec
    graph = Graph(nodes, pairs, directed=directed)
    reference = nx.DiGraph() if directed else nx.Graph()
    reference.add_nodes_from(range(nodes))
    reference.add_edges_from(pairs)
    count = nx.number_strongly_connected_components if directed else nx.number_connected_components
    assert graph.components() == count(reference)
    assert graph.connected == (count(reference) == 1)
    assert len(list(graph.edges())) == reference.number_of_edges()
    again = Graph.from_networkx(graph.to_networkx())
    assert again == graph
    assert hash(again) == hash(graph)


@given(st.data())
def test_union_has_the_arcs_of_all_graphs(data: st.DataObject) -> None:
    nodes, pairs, directed = data.draw(graphs())
    rank = st.integers(0, nodes - 1)
    others = data.draw(st.sets(st.tuples(rank, rank).filter(lambda pair: pair[0] != pair[1]), max_size=20))
    both = union([Graph(nodes, pairs, directed=directed), Graph(nodes, others)])
    arcs = others | {(j, i) for i, j in others} | pairs | (set() if directed else {(j, i) for i, j in pairs})
    assert both.directed == directed
    assert {(i, j) for i in range(nodes) for j in both.neighbors(i, "out")} == arcs


def test_directed_graph_requires_a_direction() -> None:
    graph = Graph(2, [(0, 1)], directed=True)
    for ask in (graph.neighbors, graph.degree):
        with pytest.raises(ValueError, match='direction "both" on a directed graph; accepted: "in" or "out"'):
            ask(0)
    assert graph.neighbors(0, "out") == (1,)
    assert graph.neighbors(0, "in") == ()


def test_unknown_direction_is_refused() -> None:
    ask: Any = getattr(
        Graph.neighbors, "__wrapped__", Graph.neighbors
    )  # bypasses the type checks of the tests
    with pytest.raises(
        ValueError, match='"sideways" on an undirected graph; accepted: "in" or "out" or "both"'
    ):
        ask(Graph(2, [(0, 1)]), 0, "sideways")


@pytest.mark.parametrize("rank", [-1, 3])
def test_rank_out_of_range_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank}; accepted: 0 to 2"):
        Graph(3, [(0, 1)]).neighbors(rank)


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        (
            3,
            [(0, 1), (1, 3)],
            r"edge \(1, 3\) in a graph of 3 nodes; accepted: two different ranks from 0 to 2",
        ),
        (3, [(-1, 1)], r"edge \(-1, 1\) in a graph of 3 nodes"),
        (3, [(0, 1), (2, 2)], r"edge \(2, 2\) in a graph of 3 nodes"),
    ],
)
def test_invalid_edges_are_refused(nodes: int, edges: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Graph(nodes, edges)


def test_equality_compares_edges_and_direction() -> None:
    assert Graph(3, [(0, 1), (1, 0)]) == Graph(3, [(1, 0)])
    assert Graph(3, [(0, 1)]) != Graph(3, [(0, 2)])
    assert Graph(2, [(0, 1)]) != Graph(2, [(0, 1), (1, 0)], directed=True)
    assert repr(Graph(3, [(0, 1)])) == "Graph(nodes=3, edges=1, directed=False)"
