"""Files of graphs that other programs and people write (cases O14 and O15): one line that says what the file is, where, and
the way to one that is read."""

from __future__ import annotations

import re
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from command_line import Cli
from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.topology import Graph, Topology

DOCS = Path(__file__).parents[2] / "docs"
XMLNS = '<?xml version="1.0"?>\n<graphml xmlns="http://graphml.graphdrawing.org/xmlns">\n<graph edgedefault="undirected">'
NODES = '\n<node id="a"/>\n<node id="b"/>\n'

EDGES = [
    ("6\n0 1\n0 5\n1 0\n1 2\n", ", line 1: one number, the number of nodes as in DecentralizePy's .edges", "delete the line"),
    ("6\n1\n0 3 4\n3 5\n1 2 5\n1\n2 3\n", ", line 1: the number of nodes and the neighbours of each", "a line for each edge"),
    ("5\n1 4\n0 2\n1 3\n2 4\n3 0\n", ", line 1: the number of nodes and the neighbours of each", "a line for each edge"),
    ("1\n0 3 4\n3 5\n1 2 5\n1\n2 3\n", ", line 1: lists of the neighbours of each node", "a line for each edge"),
    ("1 4\n0 2\n1 3\n2 4\n3 0\n", ": each line i has two nodes whose lines have i", "in another order"),
    ("1 2 3\n0 2 3\n0 1 3\n0 1 2\n", ": lists of the neighbours of each node", "a line for each edge"),
    ("# cities\nAmsterdam Paris 10.2\nParis Rome 3\n", ", line 2: 'Amsterdam' is not a number", "ranks in place of names"),
    ("from,to,weight\n0,1,2\n1,2,3\n", ", line 1: a header", "begin it with #"),
    ("0 1 1.5\n1 2 3\n", ": 3 numbers per line, as if edges had weights", "delete the third"),
    ("1 2\n2 3\n3 4\n4 5\n5 1\n", ", line 4: node 5 in a graph of 5 nodes; the file's are 1 to 5", "subtract 1"),
    ("# SNAP\n0\t1\n2\t7\n7\t2\n9\t0\n", ", line 3: node 7 in a graph of 5 nodes; the file has 5 of the numbers", "number them"),
    ("0 1\n\n1 2\n2 2\n", ", line 4: a loop at 2", "delete the line"),
    ("0 1 0\n1 0 1\n0 1 0\n", ": a matrix of 0 and 1", "topology.name: adjacency"),
    ('graph [\n node [ id 0 ]\n]\n', ": GML", "networkx.read_gml"),
    ('Creator "yEd"\ngraph\n[\n node [ id 0 ]\n]\n', ": GML", "networkx.read_gml"),
    ('<?xml version="1.0"?>\n<gexf xmlns="x"/>', ": GEXF", "networkx.read_gexf"),
    (f"{XMLNS}</graph></graphml>", ": GraphML", "topology.name: graphml"),
    ("# by networkx\n0 1 4\n1 2\n2 3\n3 4\n4\n", ", line 2: a node and its neighbours per line", "networkx.read_adjlist"),
    ("0 1 {}\n1 2 {'weight': 3}\n", ", line 1: attributes after the ranks", "data=False"),
    ("%%MatrixMarket matrix coordinate pattern\n5 5 1\n2 1\n", ": Matrix Market", "scipy.io.mmread"),
    ("% sym unweighted\n1 2\n", ", line 1: '%' starts no comment here", "count from 1"),
    ('{"nodes": [], "links": []}', ": JSON", "networkx.node_link_graph"),
    (b"\xef\xbb\xbf0 1\n", ": UTF-8 with a byte order mark", "without one"),
    ("0;1\n1;2\n", ", line 1: '0;1': values separated by ';'", "spaces or commas"),
    ("0 1\n".encode("utf-16"), ": UTF-16", "save it as UTF-8"),
    (b"0 1\n# caf\xe9\n", ", line 2: not UTF-8", "save it as UTF-8"),
    ("", ": no numbers", "two ranks per line"),
    ("0 1\n1 0.5\n", ", line 2: 0.5 is not a rank", "two ranks per line"),
    ("0 1\n1 nan\n", ", line 2: 'nan' is not finite", "finite"),
    ("0 1\n1 2\n2 3 4\n", ", line 3: 3 numbers, and 2 in most lines", "as many"),
    (b"\x93NUMPY\x01\x00", ": an array of NumPy", "numpy.savetxt"),
    ("4 3\n2\n1 3\n2 4\n3\n", ", line 1: the neighbours of each node, from 1, as in METIS files", "a line for each edge"),
]  # fmt: skip
MATRICES = [
    (",a,b,c\na,0,1,0\nb,1,0,1\nc,0,1,0\n", ", line 1: names of rows and columns, as pandas writes them", "header=False"),
    (",0,1,2\n0,0,1,0\n1,1,0,1\n2,0,1,0\n", ", line 1: names of rows and columns, as pandas writes them", "header=False"),
    ("0 1 0\n1 0 2.5\n0 2.5 0\n", ", line 2: 2.5 in column 3", "topology.weights: given"),
    ("0 1 0\n1 1 1\n0 1 0\n", ", line 2: a loop at node 1", "0 on the diagonal"),
    ("0 1\n1 2\n2 3\n", ": 3 lines of 2 numbers", "topology.name: edge-list"),
    ("1 4\n0 2\n1 3\n2 4\n3 0\n", ": lists of the neighbours of each node", "a line for each edge"),
]  # fmt: skip
GRAPHML = [
    (f'{XMLNS}{NODES}<edge source="a" target="b"/>\n<edge source="b" target="b"/></graph></graphml>',
     ", line 7: a loop at node 'b'", "delete the edge"),
    (f'{XMLNS}{NODES}<edge source="a" target="b"/>\n<edge source="b" target="a"/></graph></graphml>',
     ", line 7: a second edge from 'b' to 'a', after line 6", "delete one"),
    (f'{XMLNS}{NODES}<edge source="a" target="c"/></graph></graphml>', ", line 6: no node 'c'", "nodes of the file"),
    ("graph [\n node [ id 0 ]\n]\n", ": GML", "networkx.read_gml"),
    ('<?xml version="1.0"?>\n<gexf xmlns="x"/>', ": GEXF", "networkx.read_gexf"),
    ("<graphml>\n<graph edge", ", line 2, column 1: unclosed token", "well-formed XML"),
]  # fmt: skip
CASES = [
    *(("edge-list", *case) for case in EDGES),
    *(("adjacency", *case) for case in MATRICES),
    *(("graphml", *case) for case in GRAPHML),
]


def graph_of(kind: str, path: Path, nodes: int) -> Graph:
    topology = build("topology", {"name": kind, "path": str(path)})
    assert isinstance(topology, Topology)
    return topology.draw(nodes, np.random.default_rng(1), 0)


@pytest.mark.parametrize(("kind", "text", "problem", "cure"), CASES)
def test_a_file_of_another_kind_is_named_in_one_line(
    tmp_path: Path, kind: str, text: str | bytes, problem: str, cure: str
) -> None:
    path = tmp_path / "graph.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadInput) as raised:
        graph_of(kind, path, 5)
    [line] = raised.value.problems
    found, _, accepted = line.partition("; accepted: ")
    if not accepted:
        found, accepted = line, line
    assert "\n" not in line
    assert line.startswith(f"topology.path: {path}{problem}")
    assert cure in line.removeprefix(found) or cure in accepted


def test_the_command_names_the_file_and_exits_with_2(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "ring.adj").write_text("5\n1 4\n0 2\n1 3\n2 4\n3 0\n")
    settings = "topology={name: edge-list, path: ring.adj}"
    code, _, err = cli("run", "quickstart", "--set", "nodes=5", "--set", settings)
    assert code == 2
    assert [line.partition(": the number")[0] for line in err.splitlines()] == [
        f"error: topology.path: {tmp_path / 'ring.adj'}, line 1"
    ]


def test_numbers_from_1_leave_a_named_node_alone(tmp_path: Path) -> None:
    """With one node more than the file has, its numbers from 1 to 5 fit, and node 0 is alone."""
    from gossamer.topology import EdgeList, TopologySchedule

    path = tmp_path / "edges.txt"
    path.write_text("1 2\n2 3\n3 4\n4 5\n5 1\n")
    with pytest.raises(
        BadInput, match=r"2 components .* nodes, without neighbours: 0 \(ranks count from 0\)"
    ):
        TopologySchedule(EdgeList(path=path), 6, 1).check()


def test_the_documented_way_leads_to_a_file_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, gaps and loops through the documented program; DecentralizePy's lists through the documented sentence."""
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "experiments.md").read_text()
    [block] = [
        part for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "write_edgelist" in part
    ]
    nx.write_gml(nx.Graph([("x", "y"), ("y", "z"), ("z", "z")]), tmp_path / "graph.gml")
    source = re.sub(r"graph = nx.Graph\(\[.*", "graph = nx.read_gml('graph.gml')", block)
    assert source != block
    exec(source, {})
    assert graph_of("edge-list", tmp_path / "edges.txt", 3) == Graph(3, [(0, 1), (1, 2)])

    (tmp_path / "96.adj").write_text("5\n1 4\n0 2\n1 3\n2 4\n3 0\n")
    statements = re.findall(r"`((?:lines|graph) = [^`]+)`", text)
    scope = {"Path": Path, "nx": nx}
    exec("\n".join([*statements, "nx.write_edgelist(graph, 'ring.txt', data=False)"]), scope)
    assert graph_of("edge-list", tmp_path / "ring.txt", 5) == Graph(5, [(i, (i + 1) % 5) for i in range(5)])
