from __future__ import annotations

from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.randomness import generator
from gossamer.topology import EdgeList, Graph, Topology
from gossamer.topology.families import Adjacency


def draw(topology: Topology, nodes: int) -> Graph:
    return topology.draw(nodes, generator(0, "test"), 0)


def test_edge_list_allows_comments_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "edges.txt"
    path.write_text("# a path\n0 1\n\n2 1  # written backwards\n1,2\n")
    assert draw(EdgeList(path=path), 4) == Graph(4, [(0, 1), (1, 2)])
    directed = draw(EdgeList(path=path, directed=True), 3)
    assert directed == Graph(3, [(0, 1), (2, 1), (1, 2)], directed=True)


def test_paths_are_relative_to_the_experiment_file(tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("0 1\n")
    topology = build("topology", {"name": "edge-list", "path": "edges.txt"}, {"folder": tmp_path})
    assert isinstance(topology, EdgeList)
    assert draw(topology, 2) == Graph(2, [(0, 1)])
    assert build("topology", topology.spec()) == topology


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("1 x", "'x' is not a number"),
        ("1 3", "node 3 in a graph of 3 nodes"),
        ("2 2", "a loop at 2"),
        ("1 0.5", "0.5 is not a rank"),
    ],
)
def test_invalid_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "edges.txt"
    path.write_text(f"# graph\n0 1\n{line}\n")
    with pytest.raises(BadInput) as raised:
        draw(EdgeList(path=path), 3)
    assert str(raised.value).startswith(f"topology.path: {path.resolve()}, line 3: {problem}")


@pytest.mark.parametrize("text", ["0 1 2\n0 1 2\n", "0 1 2\n1 2\n"])
def test_edge_list_must_have_two_columns(tmp_path: Path, text: str) -> None:
    path = tmp_path / "edges.txt"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"^topology\.path: .*; accepted: "):
        draw(EdgeList(path=path), 3)


@pytest.mark.parametrize("family", [EdgeList, Adjacency])
def test_unreadable_files_are_refused(tmp_path: Path, family: type[EdgeList] | type[Adjacency]) -> None:
    with pytest.raises(BadInput, match=r"topology.path: .*nowhere.txt: .*No such file or directory"):
        draw(family(path=tmp_path / "nowhere.txt"), 3)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match=r"binary: UTF-16; accepted: .*save it as UTF-8"):
        draw(family(path=tmp_path / "binary"), 3)


@given(st.integers(1, 8), st.booleans(), st.data())
def test_adjacency_matrix_gives_its_graph(
    tmp_path_factory: pytest.TempPathFactory, nodes: int, symmetric: bool, data: st.DataObject
) -> None:
    bits = data.draw(st.lists(st.booleans(), min_size=nodes**2, max_size=nodes**2))
    matrix = np.array(bits, dtype=int).reshape(nodes, nodes)
    np.fill_diagonal(matrix, 0)
    matrix = matrix | matrix.T if symmetric else matrix
    path = tmp_path_factory.mktemp("adjacency") / "matrix.txt"
    np.savetxt(path, matrix, fmt="%d", header="rows send to columns")
    graph = draw(Adjacency(path=path), nodes)
    assert graph.directed == bool((matrix != matrix.T).any())
    assert (nx.to_numpy_array(graph.to_networkx()) == matrix).all()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0 1 0\n1 0 2\n0 1 0\n", ", line 2: 2 in column 3"),
        ("0 1 0\n1 1 1\n0 1 0\n", ", line 2: a loop at node 1"),
        ("0 1 0\n1 0\n", ", line 2: 2 numbers, and 3 in most lines"),
        ("0 1 0\n1 0 1\n", ": 2 lines of 3 numbers"),
        ("", ": no numbers"),
        ("0 one 0\n", ", line 1: 'one' is not a number"),
        ("0 1\n1 nan\n", ", line 2: 'nan' is not finite"),
    ],
)
def test_invalid_matrix_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "matrix.txt"
    path.write_text(text)
    with pytest.raises(BadInput) as raised:
        draw(Adjacency(path=path), 3)
    assert str(raised.value).startswith(
        f"topology.path: {path.resolve()}{problem}; accepted: a square matrix"
    )


@pytest.mark.parametrize("directed", [False, True])
def test_lists_of_neighbours_are_not_read_as_edges(tmp_path: Path, directed: bool) -> None:
    """DecentralizePy's .adj file of a ring of 5, without its first line: line i has the neighbours of node i. As edges, the
    lines are another ring: 0-2, 2-4, 4-1, 1-3, 3-0."""
    path = tmp_path / "ring5.txt"
    path.write_text("1 4\n0 2\n1 3\n2 4\n3 0\n")
    with pytest.raises(
        BadInput, match=r"ring5.txt: each line i has two nodes whose lines have i, as in a list of the neigh"
    ):
        draw(EdgeList(path=path, directed=directed), 5)
    if not directed:
        path.write_text("0 2\n1 4\n1 3\n2 4\n3 0\n")  # the same edges in another order
        assert draw(EdgeList(path=path), 5) == Graph(5, [(0, 2), (2, 4), (1, 4), (1, 3), (0, 3)])


def test_edges_in_their_usual_order_are_no_lists_of_neighbours(tmp_path: Path) -> None:
    path = tmp_path / "edges.txt"
    for nodes in range(3, 9):
        ring = [(i, (i + 1) % nodes) for i in range(nodes)]
        path.write_text("".join(f"{i} {j}\n" for i, j in ring))
        assert draw(EdgeList(path=path), nodes) == Graph(nodes, ring)
    path.write_text("1 2\n0 2\n0 1\n")  # a triangle either way
    assert draw(EdgeList(path=path), 3) == Graph(3, [(0, 1), (0, 2), (1, 2)])
