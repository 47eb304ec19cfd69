from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.topology import Graph, TopologySchedule

BASE = {"name": "barabasi-albert", "m": 2}


def schedule(nodes: int = 20, seed: int = 1, folder: Path = Path(), **spec: Any) -> TopologySchedule:
    return TopologySchedule(
        build("topology", {"name": "random-links", **spec}, {"folder": folder}), nodes, seed
    )


def arcs(graph: Graph) -> set[tuple[int, int]]:
    return {(i, j) for i in range(graph.nodes) for j in graph.neighbors(i, "out")}


@pytest.mark.parametrize("symmetric", [True, False])
def test_links_of_the_base_exist_with_their_probability(symmetric: bool) -> None:
    links, rounds = schedule(base=BASE, probability=0.3, symmetric=symmetric), 400
    links.check()
    possible = arcs(schedule(base=BASE, probability=1.0).graph(0))
    counts = dict.fromkeys(possible, 0)
    both = 0
    for round in range(rounds):
        graph = links.graph(round)
        present = arcs(graph)
        assert graph.directed is not symmetric
        assert present <= possible
        for arc in present:
            counts[arc] += 1
        both += sum((j, i) in present for i, j in present)
    within = 5 * (0.3 * 0.7 / rounds) ** 0.5
    assert all(count / rounds == pytest.approx(0.3, abs=within) for count in counts.values())
    # Both directions of a link exist with probability p, or p^2 if they are drawn separately.
    expected = 0.3 if symmetric else 0.3**2
    assert both / rounds / len(possible) == pytest.approx(expected, abs=0.01)


def test_base_is_drawn_once_and_links_by_seed_and_round() -> None:
    forward, backward = schedule(base=BASE, probability=0.5), schedule(base=BASE, probability=0.5)
    graphs = [forward.graph(round) for round in range(6)]
    assert [backward.graph(round) for round in reversed(range(6))] == graphs[::-1]
    assert len(set(graphs)) == 6
    assert schedule(base=BASE, probability=0.5, seed=2).graph(0) != graphs[0]
    assert not forward.static
    pairs = schedule(base=BASE, probability=0.5, every_rounds=2)
    assert [pairs.graph(round) for round in range(4)] == [graphs[0], graphs[0], graphs[1], graphs[1]]
    assert schedule(base=BASE, probability=0.5, every_rounds=None).static


def test_changing_base_keeps_its_own_period() -> None:
    base = {"name": "random-regular", "degree": 3, "every_rounds": 3}
    links = schedule(base=base, probability=1.0, every_rounds=None)
    assert not links.static
    assert links.graph(0) == links.graph(2) != links.graph(3)


def test_probabilities_are_read_from_a_file(tmp_path: Path) -> None:
    P = np.array([[0, 1, 0.5], [0.2, 0, 0], [0, 1, 0]])
    np.savetxt(tmp_path / "P.txt", P)
    links = schedule(3, folder=tmp_path, probability="P.txt", symmetric=False)
    links.check()
    counts = np.zeros((3, 3))
    for round in range(500):
        for i, j in arcs(links.graph(round)):
            counts[i, j] += 1
    assert counts / 500 == pytest.approx(P, abs=5 * 0.5 / 500**0.5)
    assert (counts[P == 0] == 0).all()
    assert (counts[P == 1] == 500).all()
    assert build("topology", links.topology.spec()) == links.topology


@pytest.mark.parametrize(
    ("matrix", "spec", "problem"),
    [
        ([[0, 2], [2, 0]], {}, "accepted: numbers from 0 to 1"),
        ([[0.5, 1], [1, 0]], {}, "accepted: 2 rows, and 0 for pairs that topology.base does not link"),
        ([[0, 1], [0.5, 0]], {}, "and a symmetric matrix or topology.symmetric: false"),
        ([[0]], {}, "accepted: 2 rows"),
        ([[0, 0], [0, 0]], {}, "2 components in the graph of random-links with 2 nodes"),
        (
            np.ones((4, 4)) - np.eye(4),
            {"nodes": 4, "base": "ring"},
            "accepted: 4 rows, and 0 for pairs that topology.base does not link",
        ),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, matrix: Any, spec: dict[str, Any], problem: str) -> None:
    np.savetxt(tmp_path / "P.txt", np.array(matrix))
    with pytest.raises(BadInput) as raised:
        schedule(**{"nodes": 2, **spec}, folder=tmp_path, probability="P.txt").check()
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"probability": 1.5}, "probability: got 1.5; accepted: "),
        ({"base": "ring"}, "probability: "),
        ({"base": "cyclon", "probability": 0.5}, "topology.base: {'name': 'cyclon'"),
        (
            {"base": {"name": "ring", "weights": "uniform"}, "probability": 0.5},
            "topology.base: {'name': 'ring'",
        ),
        (
            {"base": "exponential", "probability": 0.5},
            "topology.symmetric: true for a directed base; accepted: false",
        ),
        ({"base": {"name": "random-regular", "degree": 99}, "probability": 0.5}, "topology.base.degree: 99"),
        ({"base": "ring", "probability": 0.0}, "topology: 20 components in the graph of random-links"),
    ],
)
def test_invalid_parameters_are_refused(spec: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadInput) as raised:
        schedule(**spec).check()
    assert problem in str(raised.value)


def test_directed_bases_are_accepted_with_separate_draws() -> None:
    links = schedule(8, base="exponential", probability=0.5, symmetric=False)
    links.check()
    # This base is connected over its cycle.
    schedule(8, base="one-peer-exponential", probability=0.5, symmetric=False).check()
    assert arcs(links.graph(3)) < arcs(TopologySchedule(build("topology", "exponential"), 8, 1).graph(0))
