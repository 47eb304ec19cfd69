"""Generators of networkx, and topology families that use them."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.randomness import generator
from gossamer.topology import Graph, Topology, TopologySchedule
from gossamer.topology.families import BarabasiAlbert, Generator, GraphML, StochasticBlock


def draw(topology: Topology, nodes: int, seed: int = 0) -> Graph:
    return topology.draw(nodes, generator(seed, "test"), 0)


@pytest.mark.parametrize("m", [1, 2, 5])
def test_barabasi_albert_links_each_rank_to_m_lower_ones(m: int) -> None:
    graph = draw(BarabasiAlbert(m=m), 30)
    assert [sum(j < i for j in graph.neighbors(i)) for i in range(m + 1, 30)] == [m] * (29 - m)
    assert graph.connected
    with pytest.raises(BadInput, match=r"topology: .*m < n"):
        TopologySchedule(BarabasiAlbert(m=5), 5, 1).check()


def test_stochastic_blocks_have_about_p_of_all_edges() -> None:
    sizes = (30, 50)
    blocks = [rank >= 30 for rank in range(80)]
    inside = {pair: 0.4 if blocks[pair[0]] == blocks[pair[1]] else 0.1 for pair in combinations(range(80), 2)}
    edges = [
        set(draw(StochasticBlock(sizes=sizes, p_in=0.4, p_out=0.1), 80, seed).edges()) for seed in range(5)
    ]
    for p in (0.4, 0.1):
        pairs = [pair for pair, probability in inside.items() if probability == p]
        share = sum(pair in drawn for drawn in edges for pair in pairs) / (5 * len(pairs))
        assert share == pytest.approx(p, abs=5 * (p * (1 - p) / (5 * len(pairs))) ** 0.5)
    loose = StochasticBlock(sizes=(2, 3), p_in=1, p_out=0, allow_disconnected=True)
    assert set(draw(loose, 5).edges()) == {(0, 1), (2, 3), (2, 4), (3, 4)}


def test_mismatched_or_disconnected_blocks_are_refused() -> None:
    with pytest.raises(BadInput, match=r"topology.sizes: 5 nodes in all; accepted: 6, as in nodes"):
        TopologySchedule(StochasticBlock(sizes=(2, 3), p_in=1, p_out=0.5), 6, 1).check()
    with pytest.raises(BadInput, match="100 disconnected draws of stochastic-block with 5 nodes"):
        draw(StochasticBlock(sizes=(2, 3), p_in=1, p_out=0), 5)


NAMED: list[tuple[str, dict[str, Any], int]] = [
    ("powerlaw_cluster_graph", {"m": 2, "p": 0.1}, 20),
    ("ring_of_cliques", {"num_cliques": 4, "clique_size": 5}, 20),
    ("connected_caveman_graph", {"l": 4, "k": 5}, 20),
    ("barbell_graph", {"m1": 8, "m2": 4}, 20),
    ("full_rary_tree", {"r": 2, "n": 20}, 20),
    ("grid_2d_graph", {"m": 4, "n": 5}, 20),
    ("random_geometric_graph", {"radius": 0.5}, 20),
    ("karate_club_graph", {}, 34),
    ("les_miserables_graph", {}, 77),
    ("lollipop_graph", {"m": 8, "n": 12}, 20),
]


@pytest.mark.parametrize(("name", "parameters", "nodes"), NAMED)
def test_generators_give_the_graphs_of_networkx(name: str, parameters: dict[str, Any], nodes: int) -> None:
    topology = build("topology", {"name": "networkx", "generator": name, "parameters": parameters})
    assert build("topology", topology.spec()) == topology
    schedule = TopologySchedule(topology, nodes, 1)
    schedule.check()
    random = name in ("powerlaw_cluster_graph", "random_geometric_graph")
    others = [TopologySchedule(topology, nodes, seed).graph(0) for seed in range(1, 4)]
    assert schedule.graph(0) == others[0]
    assert len(set(others)) == (3 if random else 1)
    if random:
        parameters = {**parameters, "n": nodes, "seed": 5}
    expected = getattr(nx, name)(**parameters)
    fixed = TopologySchedule(Generator(generator=name, parameters=parameters), nodes, 1).graph(0)
    labels = {label: rank for rank, label in enumerate(expected)}
    assert fixed == Graph(nodes, [(labels[u], labels[v]) for u, v in expected.edges()])


@pytest.mark.parametrize(
    ("spec", "nodes", "message"),
    [
        (
            {"generator": "read_gml"},
            5,
            "topology.generator: got 'read_gml'; accepted: a function of networkx.generators",
        ),
        ({"generator": "os"}, 5, "topology.generator: got 'os'"),
        (
            {"generator": "karate_club_graph"},
            10,
            "topology: networkx returns a graph of 34 nodes; accepted: 10, as in nodes",
        ),
        ({"generator": "hypercube_graph"}, 8, "topology.parameters: {}: TypeError: "),
        (
            {"generator": "barabasi_albert_graph", "parameters": {"m": 9}},
            8,
            "topology.parameters: {'m': 9}: NetworkXError",
        ),
        (
            {"generator": "scale_free_graph"},
            8,
            "scale_free_graph: got MultiDiGraph; accepted: a graph without",
        ),
        (
            {"generator": "graph_atlas_g"},
            8,
            "graph_atlas_g: got list; accepted: a graph without parallel edges",
        ),
        (
            {"generator": "ego_graph", "parameters": {"G": "x", "n": 1}},
            8,
            "topology.parameters: {'G': 'x', 'n': 1}: ",
        ),
        (
            {
                "generator": "ring_of_cliques",
                "parameters": {"num_cliques": 2, "clique_size": 4},
                "every_rounds": 2,
            },
            8,
            "topology.every_rounds: 2 for networkx, which is not random",
        ),
        (
            {"generator": "caveman_graph", "parameters": {"l": 2, "k": 4}},
            8,
            "topology: 2 components in the graph of networkx with 8 nodes",
        ),
        (
            {"generator": "gnp_random_graph", "parameters": {"p": 0.0}},
            8,
            "topology: 100 disconnected draws of networkx with 8 nodes",
        ),
    ],
)
def test_generators_without_a_simple_connected_graph_are_refused(
    spec: dict[str, Any], nodes: int, message: str
) -> None:
    with pytest.raises(BadInput) as raised:
        TopologySchedule(build("topology", {"name": "networkx", **spec}), nodes, 1).check()
    assert message in str(raised.value)


def test_directed_generators_give_directed_graphs() -> None:
    spec = {"name": "networkx", "generator": "gnp_random_graph", "parameters": {"p": 0.5, "directed": True}}
    schedule = TopologySchedule(build("topology", {**spec, "every_rounds": 1}), 8, 1)
    schedule.check()
    assert schedule.graph(0).directed
    assert len({schedule.graph(round) for round in range(4)}) == 4


@pytest.mark.parametrize("directed", [False, True])
def test_graphml_keeps_the_order_of_the_file(tmp_path: Path, directed: bool) -> None:
    graph: Any = nx.DiGraph() if directed else nx.Graph()
    graph.add_nodes_from(["Köln", "Bonn", "Aachen"], population=1)
    graph.add_edges_from([("Aachen", "Köln"), ("Köln", "Bonn")], weight=0.5)
    nx.write_graphml(graph, tmp_path / "graph.xml")
    topology = build("topology", {"name": "graphml", "path": "graph.xml"}, {"folder": tmp_path})
    assert draw(topology, 3) == Graph(3, [(2, 0), (0, 1)], directed=directed)
    with pytest.raises(BadInput, match="graphml returns a graph of 3 nodes; accepted: 4"):
        TopologySchedule(topology, 4, 1).check()


EDGES = '<edge source="a" target="b"/><edge source="b" target="a"/>'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "No such file"),
        ("0 1\n", "ParseError"),
        ("<kml/>", "NetworkXError"),
        (
            '<!DOCTYPE x [<!ENTITY a "aaaaaaaa"><!ENTITY b "&a;&a;&a;">]><graphml>&b;</graphml>',
            "DTDForbidden",
        ),
        (
            f'<graphml xmlns="http://graphml.graphdrawing.org/xmlns"><graph edgedefault="undirected">{EDGES}</graph></graphml>',
            "got MultiGraph; accepted: a graph without",
        ),
    ],
)
def test_invalid_graphml_files_are_refused(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "graph.xml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match=problem) as raised:
        draw(GraphML(path=path), 2)
    assert str(raised.value).startswith(f"topology.path: {path.resolve()}: ")
