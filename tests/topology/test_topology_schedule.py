from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.topology import (
    EdgeList,
    Graph,
    Layers,
    OnePeerExponential,
    RandomRegular,
    Ring,
    Star,
    Topology,
    TopologySchedule,
    union,
)
from gossamer.topology.topology import CACHED_GRAPHS, CYCLE


def schedule(spec: Any, nodes: int, seed: int = 1, **more: Any) -> TopologySchedule:
    return TopologySchedule(build("topology", spec), nodes, seed, **more)


DYNAMIC = {"name": "random-regular", "degree": 3, "every_rounds": 1}


class Drifting(Topology):
    """A user's topology that never repeats: in round r, a star around node r mod n."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        return Star(centre=round % nodes).draw(nodes, rng, round)

    def drawn_at(self, nodes: int, round: int) -> int:
        return round


class Alternating(Topology):
    """A path of three nodes whose two edges alternate."""

    rounds: int = 2

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        return Graph(nodes, [(round, round + 1)])

    def drawn_at(self, nodes: int, round: int) -> int:
        return round % 2

    def cycle(self, nodes: int) -> int:
        return self.rounds


class Small(Topology):
    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        return Graph(2, [(0, 1)])


def make_ring(extra: int = 0) -> Topology:
    return Star(centre=extra)


def not_a_topology() -> int:
    return 3


@pytest.mark.parametrize(
    "spec", ["ring", {"name": "random-regular", "degree": 3}, {"name": "erdos-renyi", "p": 0.5}]
)
def test_static_graph_is_one_object(spec: Any) -> None:
    fixed = schedule(spec, 12)
    assert fixed.graph(0) is fixed.graph(10_000)


@pytest.mark.parametrize(
    "spec",
    [
        DYNAMIC,
        {"name": "erdos-renyi", "p": 0.5, "every_rounds": 1},
        {"name": "watts-strogatz", "degree": 4, "p": 0.5, "every_rounds": 1},
    ],
)
def test_graphs_depend_only_on_seed_and_round(spec: Any) -> None:
    forward = schedule(spec, 16)
    graphs = [forward.graph(round) for round in range(6)]
    backward = schedule(spec, 16)
    assert [backward.graph(round) for round in reversed(range(6))] == graphs[::-1]
    assert len(set(graphs)) == 6
    assert schedule(spec, 16, seed=2).graph(0) != graphs[0]


@settings(max_examples=20)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=30), st.integers(1, 7))
def test_rounds_of_a_period_share_a_graph(rounds: list[int], every: int) -> None:
    spec = {**DYNAMIC, "every_rounds": every}
    shuffled, fresh = schedule(spec, 10), schedule(spec, 10)
    for round in rounds:
        graph = shuffled.graph(round)
        assert graph == fresh.graph(round // every * every)
        assert shuffled.graph(round) is graph
        if round >= every:
            assert shuffled.graph(round - every) != graph


def test_graphs_evicted_from_the_cache_are_redrawn_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a graph of ten nodes with three neighbours each is 40; small graphs stay in the cache longer."""
    for room, kept in ((0, CACHED_GRAPHS), (40 * 25, 25)):
        monkeypatch.setattr("gossamer.topology.topology.CACHED_SIZE", room)
        dynamic = schedule(DYNAMIC, 10)
        graphs = [dynamic.graph(round) for round in range(kept)]
        for _ in range(2):
            assert all(dynamic.graph(round) is graph for round, graph in enumerate(graphs))
        dynamic.graph(kept)
        assert dynamic.graph(1) is graphs[1]
        assert dynamic.graph(0) is not graphs[0]
        assert dynamic.graph(0) == graphs[0]


@pytest.mark.parametrize(("nodes", "kept"), [(10, CYCLE), (60, 120)])
def test_memory_does_not_grow_with_the_rounds(nodes: int, kept: int) -> None:
    """Two graphs for each node stay, since the rounds of asynchronous nodes may be far apart; others are freed."""
    dynamic = schedule(DYNAMIC, nodes)
    graphs = [dynamic.graph(round) for round in range(200)]
    assert all(dynamic.graph(round) is graphs[round] for round in range(200 - kept, 200))
    assert dynamic.graph(199 - kept) is not graphs[199 - kept]


def test_callers_cannot_change_the_cached_weights() -> None:
    ring = schedule("ring", 5)
    ring.mixing_weights(0, 0).clear()
    assert ring.mixing_weights(0, 0) == {1: 1 / 3, 4: 1 / 3}


def test_weights_follow_the_neighbours_of_the_round() -> None:
    dynamic = schedule(DYNAMIC, 20)
    for round in range(3):
        for rank in range(20):
            assert tuple(dynamic.mixing_weights(rank, round)) == dynamic.neighbors(rank, round)


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8, 12])
def test_one_peer_is_checked_over_its_cycle(nodes: int) -> None:
    one_peer = schedule("one-peer-exponential", nodes)
    one_peer.check()
    cycle = OnePeerExponential().cycle(nodes)
    assert one_peer.graph(0) is one_peer.graph(cycle)
    if nodes > 2:
        assert one_peer.graph(0) != one_peer.graph(1)
    with pytest.raises(ValueError, match='accepted: "in" or "out"'):
        one_peer.neighbors(0, 0)


@pytest.mark.parametrize("name", ["ring", "star", "complete", "torus", "hypercube", "exponential"])
def test_single_node_is_a_valid_graph(name: str) -> None:
    alone = schedule(name, 1)
    alone.check()
    assert alone.neighbors(0, 5, "in") == ()
    assert alone.mixing_weights(0, 5) == {}


def test_disconnected_graph_is_refused_unless_allowed(tmp_path: Path) -> None:
    path = tmp_path / "edges.txt"
    path.write_text("0 1\n2 3\n")
    with pytest.raises(BadInput) as raised:
        TopologySchedule(EdgeList(path=path), 5, 0).check()
    assert str(raised.value) == (
        "topology: 3 components in the graph of edge-list with 5 nodes, without neighbours: 4 (ranks count from 0);"
        " accepted: a connected graph, or topology.allow_disconnected: true"
    )
    TopologySchedule(EdgeList(path=path, allow_disconnected=True), 5, 0).check()


def test_directed_graph_must_be_strongly_connected(tmp_path: Path) -> None:
    path = tmp_path / "edges.txt"
    path.write_text("0 1\n1 2\n")
    with pytest.raises(BadInput, match="topology: 3 components"):
        TopologySchedule(EdgeList(path=path, directed=True), 3, 0).check()
    path.write_text("0 1\n1 2\n2 0\n")
    TopologySchedule(EdgeList(path=path, directed=True), 3, 0).check()


def test_check_refuses_invalid_degrees() -> None:
    with pytest.raises(
        BadInput, match=r"topology\.degree: 3 for 5 nodes; accepted: an even number from 0 to 4"
    ):
        schedule({"name": "random-regular", "degree": 3}, 5).check()


LAYERED = {
    "name": "layers",
    "layers": {
        "near": "ring",
        "far": {**DYNAMIC, "every_rounds": 2},
        "wide": {**DYNAMIC, "weights": "uniform"},
    },
}


def test_layers_are_drawn_separately_and_form_a_union() -> None:
    layered = schedule(LAYERED, 12)
    layered.check()
    for round in range(5):
        parts = []
        for name in ("near", "far", "wide"):
            edges = {(i, j) for i in range(12) for j in layered.neighbors(i, round, layer=name)}
            parts.append(Graph(12, edges))
        assert layered.graph(round) == union(parts)
        assert parts[0] == schedule("ring", 12).graph(0)
        assert parts[1] != parts[2]
    assert layered.neighbors(3, 0, layer="far") == layered.neighbors(3, 1, layer="far")
    assert any(
        layered.neighbors(i, 0, layer="far") != layered.neighbors(i, 2, layer="far") for i in range(12)
    )
    assert layered.mixing_weights(0, 0, layer="wide") == dict.fromkeys(
        layered.neighbors(0, 0, layer="wide"), 0.25
    )


def test_layer_does_not_depend_on_its_siblings() -> None:
    full = schedule(LAYERED, 12)
    alone = schedule({"name": "layers", "layers": {"far": LAYERED["layers"]["far"]}}, 12)  # type: ignore[index]
    for rank in range(12):
        assert full.neighbors(rank, 4, layer="far") == alone.neighbors(rank, 4, layer="far")


def test_directed_layer_makes_the_union_directed() -> None:
    mixed = schedule({"name": "layers", "layers": {"a": "ring", "b": "one-peer-exponential"}}, 8)
    mixed.check()
    assert mixed.graph(1).directed
    assert mixed.neighbors(0, 1, "out") == (1, 2, 7)
    assert mixed.neighbors(0, 1, "in") == (1, 6, 7)
    assert mixed.graph(1) is mixed.graph(4)
    direct = Layers(layers={"a": Ring(), "b": OnePeerExponential()})
    assert direct.draw(8, np.random.default_rng(0), 1) == mixed.graph(1)


def test_errors_in_a_layer_name_the_layer() -> None:
    wrong = {"name": "layers", "layers": {"near": "ring", "far": {"name": "random-regular", "degree": 9}}}
    with pytest.raises(BadInput) as raised:
        schedule(wrong, 6).check()
    assert (
        str(raised.value)
        == "topology.layers.far.degree: 9 for 6 nodes; accepted: a number from 0 to 5, or at least 10 nodes"
    )
    loose = {"name": "layers", "layers": {"near": "ring", "far": {"name": "erdos-renyi", "p": 0.0}}}
    with pytest.raises(
        BadInput, match=r"^topology.layers.far: .* or topology.layers.far.allow_disconnected: true"
    ):
        schedule(loose, 6).check()
    loose["layers"]["far"]["allow_disconnected"] = True  # type: ignore[index]
    schedule(loose, 6).check()
    with pytest.raises(BadInput, match=r"layer 'fat' \(did you mean 'far'\?\); accepted: far, near"):
        schedule(loose, 6).neighbors(0, 0, layer="fat")
    with pytest.raises(BadInput, match="layer 'far'; accepted: none, the topology has no layers"):
        schedule("ring", 6).mixing_weights(0, 0, layer="far")


def test_user_defined_topologies_are_checked() -> None:
    drifting = TopologySchedule(Drifting(), 5, 0)
    assert [drifting.graph(round).degree(round % 5) for round in range(10)] == [4] * 10
    assert drifting.neighbors(0, 3) == (3,)
    with pytest.raises(BadInput, match="returns a graph of 2 nodes; accepted: 3"):
        TopologySchedule(Small(), 3, 0).check()


def test_alternating_topology_is_connected_over_its_cycle() -> None:
    TopologySchedule(Alternating(), 3, 0).check()
    with pytest.raises(BadInput, match="2 components"):
        TopologySchedule(Alternating(rounds=1), 3, 0).check()


def test_function_may_return_a_topology() -> None:
    assert schedule({"name": f"{__name__}:make_ring", "extra": 2}, 4).neighbors(0, 0) == (2,)
    with pytest.raises(BadInput, match=r"topology: .*:not_a_topology returns int; accepted: Topology"):
        schedule(f"{__name__}:not_a_topology", 4)


def test_graphs_are_drawn_on_demand() -> None:
    TopologySchedule(RandomRegular(degree=99), 3, 0)  # check() would refuse it


@pytest.mark.parametrize(
    ("spec", "static"),
    [
        ("ring", True),
        ({"name": "random-regular", "degree": 2}, True),
        ({"name": "random-regular", "degree": 2, "every_rounds": 3}, False),
        ("one-peer-exponential", False),
        ({"name": "layers", "layers": {"a": "ring", "b": "star"}}, True),
        ({"name": "layers", "layers": {"a": "ring", "b": "one-peer-exponential"}}, False),
    ],
    ids=str,
)
def test_static_means_one_graph_for_all_rounds(spec: Any, static: bool) -> None:
    assert schedule(spec, 6).static is static
    graphs = {schedule(spec, 6).graph(round) for round in range(6)}
    assert (len(graphs) == 1) is static
