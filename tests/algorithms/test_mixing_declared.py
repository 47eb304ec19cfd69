"""What algorithms declare about the graph and the weights with which they mix, against what they do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest

import gossamer
from gossamer import Experiment
from gossamer.config.registry import build, names
from gossamer.node.setup import mixing_of
from gossamer.runtime.setup import prepare
from gossamer.topology import Graph, Mixing, TopologySchedule
from gossamer.topology.mixing_matrix import describe, mixing_matrix

DIRECTED = "0 1\n1 2\n2 3\n3 4\n4 0\n0 3\n2 0\n"


def experiment(out: Path, algorithm: Any, topology: Any = "star", **fields: Any) -> Experiment:
    (out / "directed.txt").write_text(DIRECTED)
    if topology == "directed":
        topology = {"name": "edge-list", "path": str(out / "directed.txt"), "directed": True}
    return Experiment.of(
        {
            "nodes": 5,
            "task": {"name": "least-squares", "features": 6, "samples": 50},
            "topology": topology,
            "algorithm": algorithm,
            "optimizer": {"name": "sgd", "lr": 1e-12},
            "initial": "independent",
            "stop": {"rounds": 1},
            "engine": {"name": "simulate", "trainer": "sequential"},
            **fields,
        }
    )


def declared(chosen: Experiment) -> Mixing:
    mixing = mixing_of(chosen)
    assert mixing is not None
    return mixing


@pytest.mark.parametrize(
    ("algorithm", "topology", "rounds"),
    [
        ("d-psgd", "star", 1),
        ({"name": "d-psgd", "overlap": True}, "directed", 1),
        ("topology-aware", {"name": "star", "weights": "centrality"}, 1),
        ("qg-momentum", "star", 1),
        ("gradient-tracking", "star", 1),
        ({"name": "gradient-tracking", "variant": "diging"}, "star", 1),
        ("d2", "star", 1),
        ({"name": "d2", "exact_diffusion": True}, "star", 1),
        ("influence-corrected", {"name": "star", "weights": "uniform"}, 1),
        ({"name": "gossiped-centrality", "measure": "degree"}, "star", 1),
        ({"name": "gossiped-centrality", "measure": "degree", "temperature": 0.3}, "directed", 1),
        ({"name": "choco-sgd", "gamma": 0.3}, "star", 1),
        ({"name": "deepsqueeze", "gamma": 0.3}, "star", 1),
        (
            {"name": "beer", "gamma": 0.3},
            "star",
            2,
        ),  # its first round sends the models, the second mixes them
        ("sgp", "directed", 1),
    ],
)
def test_a_round_without_learning_applies_the_declared_matrix(
    algorithm: Any, topology: Any, rounds: int, tmp_path: Path
) -> None:
    chosen = experiment(tmp_path, algorithm, topology, stop={"rounds": rounds})
    setup = prepare(chosen)
    before = np.stack([setup.initial(rank).parameters.numpy() for rank in range(5)]).astype(np.float64)
    matrix = mixing_matrix(declared(chosen), setup.topology, 0)
    after = gossamer.run(chosen, tmp_path).parameters
    assert matrix is not None
    assert after is not None
    M = matrix.toarray()
    # Push-sum divides by the mixed weights, which are 1 at first.
    assert after.numpy() == pytest.approx(M @ before / M.sum(axis=1, keepdims=True), abs=1e-6)


def test_every_shipped_algorithm_declares_what_it_mixes_with() -> None:
    undeclared = [name for name in names("algorithm") if build("algorithm", name).mixing() is None]
    assert undeclared == []


def test_exact_diffusion_halves_the_gap_of_a_ring_of_eight() -> None:
    ring = TopologySchedule(build("topology", "ring"), 8, 1)
    plain, damped = (
        describe(ring, 0, build("algorithm", {"name": "d2", "exact_diffusion": value}).mixing())
        for value in (False, True)
    )
    # W has the eigenvalues (1 + 2 cos(2 pi k / 8)) / 3.
    second = (1 + 2 * np.cos(np.pi / 4)) / 3
    assert plain["spectral_gap"] == pytest.approx(1 - second)
    assert damped["spectral_gap"] == pytest.approx((1 - second) / 2)
    assert round(damped["spectral_gap"], 4) == 0.0976


def test_push_sum_is_described_by_its_column_stochastic_matrix(tmp_path: Path) -> None:
    chosen = experiment(tmp_path, "sgp", "directed")
    topology = TopologySchedule(chosen.topology, 5, 1)
    P = np.zeros((5, 5))
    arcs = [tuple(map(int, line.split())) for line in DIRECTED.splitlines()]
    for sender in range(5):
        receivers = [sender, *(to for source, to in arcs if source == sender)]
        P[receivers, sender] = 1 / len(receivers)
    moduli = sorted(abs(np.linalg.eigvals(P)))
    figures = describe(topology, 0, declared(chosen))
    assert figures["spectral_gap"] == pytest.approx(1 - moduli[-2])
    assert figures["influence"] == pytest.approx([1 / 5] * 5)  # it converges to the mean
    assert (figures["in_degree_max"], figures["out_degree_max"]) == (2, 2)
    assert (figures["in_degree_min"], figures["out_degree_min"]) == (1, 1)


def test_in_and_out_degrees_differ() -> None:
    arcs = [(0, 1), (1, 2), (2, 0), (3, 0), (0, 3), (1, 0)]
    topology = TopologySchedule(build("topology", "ring"), 4, 1)
    graph = Graph(4, arcs, directed=True)
    figures = describe(topology, 0, Mixing(links=lambda topology, round: graph))
    assert (figures["in_degree_max"], figures["out_degree_max"]) == (3, 2)  # node 0; nodes 0 and 1
    assert "degree_max" not in figures


def test_graphs_that_algorithms_derive_from_the_topology() -> None:
    complete = TopologySchedule(build("topology", "complete"), 5, 1)
    tree = build("algorithm", {"name": "relay-sum", "tree": "spanning"}).mixing().links(complete, 0)
    assert list(tree.edges()) == [(0, 1), (0, 2), (0, 3), (0, 4)]
    pairs = build("algorithm", "ad-psgd").mixing().links(complete, 0)
    # Active and passive nodes alternate in the depth-first tree 0 - 1 - 2 - 3 - 4.
    assert set(pairs.edges()) == {(i, j) for i, j in nx.complete_graph(5).edges() if (i + j) % 2}


@pytest.mark.parametrize("aggregator", ["median", "coordinate-mean", "deviation-mean"])
def test_other_aggregators_have_no_matrix(aggregator: str, tmp_path: Path) -> None:
    mixing = declared(experiment(tmp_path, "d-psgd", aggregator=aggregator))
    assert mixing.row is None
    assert mixing.weights == f"the aggregator {aggregator}, in place of a weighted mean"
    figures = describe(TopologySchedule(build("topology", "ring"), 5, 1), 0, mixing)
    assert (figures["diameter"], figures["spectral_gap"], figures["influence"]) == (2, None, None)


@pytest.mark.parametrize(
    "algorithm",
    [
        *("epidemic-local", "epidemic-oracle", "fedavg", "all-reduce", "local", "centralized", "divshare"),
        *("swift-artifact", "ad-psgd-artifact"),
    ],
)
def test_algorithms_without_a_topology_have_no_figures_of_it(algorithm: str) -> None:
    ring = TopologySchedule(build("topology", "ring"), 8, 1)
    assert describe(ring, 0, build("algorithm", algorithm).mixing()) == {"nodes": 8}


def test_the_documented_table_is_what_algorithms_declare() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    section = page[page.index("## Graph and weights") :]
    table = section[section.index("|") : section.index("\n\n", section.index("|"))]
    documented = []
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        name, *options = re.findall(r"`([^`]+)`", cells[0])
        parameters = dict(option.split(": ") for option in options)
        spec = {"name": name, **{key: _value(text) for key, text in parameters.items()}}
        mixing = build("algorithm", spec).mixing()
        documented.append(name)
        graph = mixing.graph if mixing.links is not None else f"not used: {mixing.graph}"
        assert cells[1:3] == [graph, mixing.weights], name
    assert sorted(set(documented)) == sorted(names("algorithm"))


def _value(text: str) -> Any:
    return {"true": True, "false": False}.get(text, float(text) if re.fullmatch(r"[\d.]+", text) else text)
