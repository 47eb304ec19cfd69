from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gossamer.config.registry import build, names
from gossamer.errors import BadInput
from gossamer.randomness import generator
from gossamer.topology import Graph, Topology, TopologySchedule
from gossamer.topology.families import (
    BarabasiAlbert,
    Complete,
    ErdosRenyi,
    Exponential,
    Hypercube,
    OnePeerExponential,
    RandomRegular,
    Ring,
    Star,
    Torus,
    WattsStrogatz,
    random_regular,
)


def draw(topology: Topology, nodes: int, seed: int = 0, round: int = 0) -> Graph:
    return topology.draw(nodes, generator(seed, "test"), round)


@pytest.mark.parametrize("kind", ["topology", "weights", "temperature"])
def test_registered_names_are_documented(kind: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()
    assert set(names(kind)) <= set(re.findall(r"`([a-z0-9-]+)`", text))


@given(st.integers(1, 40))
def test_neighbours_in_ring_complete_and_star(nodes: int) -> None:
    steps = {1, nodes - 1}
    for rank in range(nodes):
        others = set(range(nodes)) - {rank}
        around = {(rank + step) % nodes for step in steps} - {rank}
        assert set(draw(Ring(), nodes).neighbors(rank)) == around
        assert set(draw(Complete(), nodes).neighbors(rank)) == others
        assert set(draw(Star(), nodes).neighbors(rank)) == (others if rank == 0 else {0})


@given(st.integers(2, 20), st.data())
def test_star_may_have_any_centre(nodes: int, data: st.DataObject) -> None:
    centre = data.draw(st.integers(0, nodes - 1))
    graph = draw(Star(centre=centre), nodes)
    assert set(graph.edges()) == {(min(centre, i), max(centre, i)) for i in range(nodes) if i != centre}


@pytest.mark.parametrize("dimension", range(7))
def test_hypercube_joins_ranks_that_differ_in_one_bit(dimension: int) -> None:
    nodes = 2**dimension
    expected = {(i, j) for i in range(nodes) for j in range(i) if (i ^ j).bit_count() == 1}
    assert {(j, i) for i, j in draw(Hypercube(), nodes).edges()} == expected


@given(st.integers(1, 8), st.integers(1, 8))
def test_torus_joins_cells_one_step_apart(rows: int, columns: int) -> None:
    graph = draw(Torus(rows=rows), rows * columns)
    for rank in range(rows * columns):
        row, column = divmod(rank, columns)
        steps = ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1))
        expected = {(i % rows) * columns + j % columns for i, j in steps} - {rank}
        assert set(graph.neighbors(rank)) == expected


@pytest.mark.parametrize(("nodes", "rows"), [(1, 1), (7, 1), (12, 3), (16, 4), (30, 5), (36, 6)])
def test_torus_is_as_square_as_possible(nodes: int, rows: int) -> None:
    assert draw(Torus(), nodes) == draw(Torus(rows=rows), nodes)


@given(st.integers(1, 40))
def test_exponential_sends_to_powers_of_two(nodes: int) -> None:
    graph = draw(Exponential(), nodes)
    assert graph.directed
    hops = [2**k for k in range(20) if 2**k < nodes]
    for rank in range(nodes):
        assert set(graph.neighbors(rank, "out")) == {(rank + hop) % nodes for hop in hops}
        assert set(graph.neighbors(rank, "in")) == {(rank - hop) % nodes for hop in hops}


@given(st.integers(2, 40), st.integers(0, 30))
def test_one_peer_cycles_through_the_hops(nodes: int, round: int) -> None:
    hops = [2**k for k in range(20) if 2**k < nodes]
    graph = draw(OnePeerExponential(), nodes, round=round)
    hop = hops[round % len(hops)]
    assert set(graph.edges()) == {(i, (i + hop) % nodes) for i in range(nodes)}
    assert OnePeerExponential().cycle(nodes) == len(hops)


@settings(max_examples=40)
@given(st.integers(3, 30), st.integers(2, 29), st.integers(0, 5))
def test_random_regular_is_regular_and_connected(nodes: int, degree: int, seed: int) -> None:
    assume(degree < nodes and nodes * degree % 2 == 0)
    graph = draw(RandomRegular(degree=degree), nodes, seed)
    assert {graph.degree(rank) for rank in range(nodes)} == {degree}
    assert nx.is_connected(graph.to_networkx())


def test_nearly_complete_regular_graphs_are_random() -> None:
    drawn = {random_regular(100, 90, generator(seed, "test")) for seed in range(3)}
    assert len(drawn) == 3
    assert {graph.degree(rank) for graph in drawn for rank in range(100)} == {90}


def test_random_regular_function_allows_disconnected_graphs() -> None:
    graph = random_regular(10, 1, generator(0, "test"))
    assert graph.components() == 5
    assert random_regular(1, 0, generator(0, "test")) == Graph(1, [])


@pytest.mark.parametrize(
    ("degree", "nodes", "accepted"),
    [
        (5, 5, "an even number from 0 to 4, or at least 6 nodes"),
        (3, 5, "an even number from 0 to 4"),
        (-1, 6, "a number from 0 to 5"),
        (6, 6, "a number from 0 to 5, or at least 7 nodes"),
    ],
)
def test_impossible_degree_is_refused(degree: int, nodes: int, accepted: str) -> None:
    message = f"topology.degree: {degree} for {nodes} nodes; accepted: {accepted}"
    with pytest.raises(BadInput) as raised:
        draw(RandomRegular(degree=degree), nodes)
    assert str(raised.value) == message
    with pytest.raises(BadInput, match=f"topology.degree: {degree} for {nodes} nodes"):
        random_regular(nodes, degree, generator(0, "test"))


@pytest.mark.parametrize("degree", [3, 10, -2])
def test_watts_strogatz_refuses_invalid_degrees(degree: int) -> None:
    with pytest.raises(BadInput, match="topology"):
        spec = {"name": "watts-strogatz", "degree": degree, "p": 0.1}
        TopologySchedule(build("topology", spec), 8, 1).check()


def test_watts_strogatz_keeps_the_number_of_edges() -> None:
    lattice = draw(WattsStrogatz(degree=4, p=0.0), 12)
    for rank in range(12):
        assert set(lattice.neighbors(rank)) == {(rank + step) % 12 for step in (-2, -1, 1, 2)}
    rewired = draw(WattsStrogatz(degree=4, p=0.5), 12)
    assert len(list(rewired.edges())) == 24
    assert rewired != lattice


def test_erdos_renyi_has_about_p_of_all_edges() -> None:
    counts = [len(list(draw(ErdosRenyi(p=0.3), 60, seed).edges())) for seed in range(10)]
    pairs = 60 * 59 / 2
    deviation = (0.3 * 0.7 / (10 * pairs)) ** 0.5
    assert sum(counts) / (10 * pairs) == pytest.approx(0.3, abs=5 * deviation)
    assert len(set(counts)) > 1


@pytest.mark.parametrize(
    ("topology", "nodes", "components"),
    [(RandomRegular(degree=1), 8, 4), (ErdosRenyi(p=0.0), 7, 7), (WattsStrogatz(degree=0, p=0.0), 5, 5)],
)
def test_random_graph_that_is_never_connected_is_refused(
    topology: Topology, nodes: int, components: int
) -> None:
    with pytest.raises(BadInput) as raised:
        draw(topology, nodes)
    assert str(raised.value) == (
        f"topology: 100 disconnected draws of {topology.name_of()} with {nodes} nodes;"
        " accepted: connected ones, or topology.allow_disconnected: true"
    )
    accepted = topology.model_copy(update={"allow_disconnected": True})
    assert draw(accepted, nodes).components() == components


def test_disconnected_graphs_are_drawn_again() -> None:
    # A random 2-regular graph of 30 nodes is one cycle about once in three draws.
    for seed in range(5):
        assert draw(RandomRegular(degree=2), 30, seed).components() == 1
    loose = [
        draw(RandomRegular(degree=2, allow_disconnected=True), 30, seed).components() for seed in range(10)
    ]
    assert max(loose) > 1


@pytest.mark.parametrize(
    ("topology", "nodes", "message"),
    [
        (Star(centre=4), 4, "topology.centre: 4 for 4 nodes; accepted: 0 to 3"),
        (Hypercube(), 12, "nodes: 12 for the topology hypercube; accepted: a power of two"),
        (Torus(rows=5), 12, "topology.rows: 5 for 12 nodes; accepted: a divisor of 12, or null"),
        (BarabasiAlbert(m=4), 4, "topology.m: 4 for 4 nodes; accepted: a number from 1, below 4"),
    ],
)
def test_parameters_must_fit_the_number_of_nodes(topology: Topology, nodes: int, message: str) -> None:
    with pytest.raises(BadInput) as raised:
        TopologySchedule(topology, nodes, 1).check()
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "name", ["ring", "star", "complete", "torus", "hypercube", "exponential", "one-peer-exponential"]
)
def test_deterministic_topologies_refuse_every_rounds(name: str) -> None:
    with pytest.raises(
        BadInput, match=f"topology.every_rounds: 2 for {name}, which is not random; accepted: null"
    ):
        build("topology", {"name": name, "every_rounds": 2})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "erdos-renyi", "p": 1.5}, "p: got 1.5; accepted: less than or equal to 1"),
        (
            {"name": "random-regular", "degree": 2, "every_rounds": 0},
            "every_rounds: got 0; accepted: greater than",
        ),
        ({"name": "star", "centre": -1}, "centre: got -1; accepted: greater than or equal to 0"),
        (
            {"name": "ring", "degree": 2},
            "degree: unknown field; accepted: allow_disconnected, every_rounds, weights",
        ),
        ({"name": "ring", "weights": Ring()}, "weights: got Ring"),
        (
            {"name": "ring", "weights": "unifrom"},
            "topology.weights: unknown name 'unifrom' (did you mean 'uniform'?)",
        ),
        ({"name": "layers", "layers": {}}, "layers: got {}; accepted: "),
        ({"name": "layers", "layers": 3}, "layers: got 3; accepted: "),
        (
            {"name": "layers", "layers": {"a": {"name": "erdos-renyi", "p": 2}}},
            "layers.a.p: got 2; accepted: less than or equal to 1",
        ),
    ],
)
def test_invalid_parameters_are_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as raised:
        build("topology", spec)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "spec",
    [
        "ring",
        {"name": "random-regular", "degree": 3, "every_rounds": 1, "weights": "uniform"},
        {
            "name": "layers",
            "layers": {"a": "ring", "b": {"name": "star", "centre": 1, "weights": "data-size"}},
        },
    ],
)
def test_saved_spec_gives_the_same_topology(spec: Any) -> None:
    topology = build("topology", spec)
    assert build("topology", topology.spec()) == topology
