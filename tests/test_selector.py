"""Selectors: the chosen nodes against values worked out by hand, their spellings, refusals, and what the record shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import polars as pl
import pytest

from gossamer import BadInput, Experiment, run
from gossamer.faults import Fault, FaultInterval, FaultSchedule, Nodes
from gossamer.faults.fault import FaultPlan
from gossamer.network import Stragglers
from gossamer.network.compute import SlowNodes
from gossamer.results.report import page_data
from gossamer.runtime.setup import prepare
from gossamer.selector import Selector, chosen
from gossamer.topology import Graph, Topology, TopologySchedule

SEED = 7
TREE: nx.Graph[int] = nx.Graph([(0, 1), (1, 2), (2, 3), (2, 4)])
"""The path 0 - 1 - 2 - 3 with a leaf 4 at 2. The degrees are 1, 2, 3, 1, 1. Between 2 are five pairs (0-3, 0-4, 1-3, 1-4, 3-4),
between 1 three (0-2, 0-3, 0-4)."""
ARCS: nx.Graph[int] = nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)])
"""Three arcs meet at 0 and at 2, two at 1."""
RING: nx.Graph[int] = nx.cycle_graph(6)


def select(at: Any, graph: nx.Graph[int] | None = TREE, field: str = "f", nodes: int = 5) -> tuple[int, ...]:
    found = None if graph is None else lambda: graph
    return chosen(Selector.model_validate(at), nodes=nodes, seed=SEED, field=field, graph=found)


@pytest.mark.parametrize(
    ("at", "ranks"),
    [
        ({"rank": 3}, (3,)),
        ({"ranks": [4, 0, 4]}, (0, 4)),
        ([4, 0, 4], (0, 4)),
        ([], ()),
        ("all", (0, 1, 2, 3, 4)),
        ({"count": 2, "which": "first"}, (0, 1)),
        ({"fraction": 0.5, "which": "first"}, (0, 1, 2)),  # 2.5, rounded up
        ({"fraction": 1.0}, (0, 1, 2, 3, 4)),
        ({"degree_rank": 0}, (2,)),
        ({"degree_rank": 1}, (1,)),
        ({"degree_rank": 2}, (0,)),  # of the three leaves, in the order of their ranks
        ({"degree_rank": 3}, (3,)),
        ({"degree_rank": 4}, (4,)),
        ({"betweenness_rank": 0}, (2,)),
        ({"betweenness_rank": 1}, (1,)),
        ({"betweenness_rank": 4}, (4,)),
        ({"hops_from": {"rank": 0, "hops": 1}}, (1,)),
        ({"hops_from": {"rank": 0, "hops": 3}}, (3, 4)),
        ({"hops_from": {"rank": 0, "at_most": 2}}, (0, 1, 2)),
        ({"hops_from": {"rank": 2, "at_most": 9}}, (0, 1, 2, 3, 4)),
    ],
    ids=str,
)
def test_nodes_are_chosen_as_by_hand(at: Any, ranks: tuple[int, ...]) -> None:
    assert select(at) == ranks


def test_arcs_count_in_both_directions_for_degrees_and_forwards_for_hops() -> None:
    assert [select({"degree_rank": k}, ARCS, nodes=3) for k in range(3)] == [(0,), (2,), (1,)]
    assert [select({"hops_from": {"rank": 1, "hops": k}}, ARCS, nodes=3) for k in (1, 2)] == [(2,), (0,)]
    assert select({"hops_from": {"rank": 1, "at_most": 1}}, ARCS, nodes=3) == (1, 2)


@pytest.mark.parametrize("kind", ["degree_rank", "betweenness_rank"])
def test_equivalent_nodes_are_in_the_order_of_their_ranks(kind: str) -> None:
    assert [select({kind: k}, RING, nodes=6) for k in range(6)] == [(k,) for k in range(6)]


def test_drawn_nodes_are_those_of_before_selectors() -> None:
    """The numbers were drawn by the version before selectors, which had a draw for faults and one for stragglers."""
    for at, ranks in DRAWN_BY_FAULTS:
        for spelling in (at, {"count" if isinstance(at, int) else "fraction": at}):
            assert select(spelling, None, "faults.1.nodes", nodes=12) == ranks
    for fields, by_network, by_compute in DRAWN_BY_STRAGGLERS:
        network, compute = Stragglers(bandwidth_mbps=1, **fields), SlowNodes(**fields)
        assert network.chosen(12, SEED, "network") == by_network
        assert compute.chosen(12, SEED, "compute") == by_compute


DRAWN_BY_FAULTS = [(3, (2, 3, 9)), (0.3, (2, 3, 6, 9)), (0.5, (2, 3, 4, 5, 7, 8))]
DRAWN_BY_STRAGGLERS: list[tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = [
    ({"count": 4}, (0, 1, 8, 11), (3, 8, 10, 11)),
    ({"fraction": 0.3}, (0, 1, 8, 11), (3, 8, 10, 11)),
    ({"fraction": 0.3, "which": "first"}, (0, 1, 2, 3), (0, 1, 2, 3)),
    ({"ranks": (5, 2, 5)}, (2, 5), (2, 5)),
    ({"count": 0}, (), ()),
    ({"fraction": 0.01}, (), ()),
]


def described(**changes: Any) -> Experiment:
    defaults: dict[str, Any] = {
        "nodes": 5,
        "seed": SEED,
        "task": {"name": "digits", "model": "logistic", "samples": 100},
        "topology": {"name": "edge-list", "path": "tree.txt"},
        "algorithm": "d-psgd",
        "gather": {"lost_peer": "skip", "timeout_s": 1.0},
        "stop": {"rounds": 3},
        "engine": {"name": "simulate", "trainer": "sequential"},
    }
    return Experiment.of({**defaults, **changes})


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tree.txt").write_text("0 1\n1 2\n2 3\n2 4\n")


def crash(nodes: Any) -> dict[str, Any]:
    return {"name": "crash", "nodes": nodes, "at_round": 1}


def patch(at: Any) -> dict[str, Any]:
    return {"name": "patch", "at": at}


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ([4, 1], {"ranks": [4, 1]}),
        (3, {"count": 3}),
        (0.25, {"fraction": 0.25}),
        ("all", {"all": True}),
    ],
    ids=str,
)
def test_short_form_is_the_same_experiment_as_the_mapping(short: Any, full: dict[str, Any]) -> None:
    first, second = (
        described(faults=[crash(spelling)], poison=[patch(spelling)]) for spelling in (short, full)
    )
    assert first == second
    assert first.to_yaml() == second.to_yaml()
    assert first.model_dump(mode="json")["faults"][0]["nodes"] == short
    assert Experiment.parse(first.to_yaml()) == first


@pytest.mark.parametrize(
    "nodes",
    [
        {"rank": 2},
        {"degree_rank": 0},
        {"count": 2, "which": "first"},
        {"fraction": 1.0},
        {"hops_from": {"rank": 0, "at_most": 2}},
    ],
    ids=str,
)
def test_other_mappings_are_saved_as_written(nodes: dict[str, Any]) -> None:
    experiment = described(faults=[crash(nodes)], poison=[patch(nodes)])
    assert experiment.model_dump(mode="json")["faults"][0]["nodes"] == nodes
    assert Experiment.parse(experiment.to_yaml()) == experiment


def test_older_selectors_are_saved_as_before() -> None:
    """The key of a sweep's run is a hash of the saved experiment: with other fields, finished runs would be done again."""
    [saved] = described(poison=[patch({"hops_from": {"rank": 0, "hops": 2}})]).model_dump(mode="json")[
        "poison"
    ]
    none = dict.fromkeys(("rank", "ranks", "degree_rank", "betweenness_rank"))
    assert saved["at"] == {**none, "hops_from": {"rank": 0, "hops": 2}}
    churn = described(faults=[{"name": "churn", "mean_up_s": 1, "mean_down_s": 1}]).model_dump(mode="json")
    assert churn["faults"][0]["nodes"] == "all"


KINDS = "rank, ranks, count, fraction, degree_rank, betweenness_rank, hops_from, all"


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize(
    ("at", "problem"),
    [
        ({}, f": got {{}}; accepted: one of {KINDS}"),
        ({"rank": 1, "count": 2}, f": got {{'rank': 1, 'count': 2}}; accepted: one of {KINDS}"),
        ({"degree": 0}, ".degree: unknown field (did you mean 'degree_rank'?); accepted: "),
        ({"rank": -1}, ".rank: got -1; accepted: "),
        ({"count": True}, ".count: got True; accepted: "),
        ({"count": 2.5}, ".count: got 2.5; accepted: "),
        ({"fraction": 1.5}, ".fraction: got 1.5; accepted: "),
        ({"all": False}, ".all: got False; accepted: "),
        (1.5, ": got 1.5; accepted: a list of ranks from 0, a number of nodes from 1, a fraction"),
        (
            {"rank": 1, "which": "first"},
            ": got {'rank': 1, 'which': 'first'}; accepted: which: first with count",
        ),
        (
            {"hops_from": {"rank": 0}},
            ".hops_from: got {'rank': 0}; accepted: rank, and one of hops and at_most",
        ),
        ({"hops_from": {"rank": 0, "hops": 0}}, ".hops_from.hops: got 0; accepted: "),
        ({"rank": 5}, ".rank: node 5 of 5 nodes; accepted: ranks 0 to 4"),
        ([0, 5], ": node 5 of 5 nodes; accepted: ranks 0 to 4"),
        ({"count": 0}, ": 0 of 5 nodes; accepted: 1 to 5"),
        (6, ": 6 of 5 nodes; accepted: 1 to 5"),
        (0.05, ": 0.05, which is 0 of 5 nodes; accepted: 1 to 5"),
        ({"betweenness_rank": 5}, ".betweenness_rank: 5; accepted: 0 to 4"),
        ({"hops_from": {"rank": 5, "hops": 1}}, ".hops_from.rank: node 5 of 5 nodes; accepted: ranks 0 to 4"),
        ({"hops_from": {"rank": 2, "hops": 3}}, ".hops_from.hops: 3; accepted: 1 to 2"),
    ],
    ids=str,
)
def test_wrong_selector_is_refused_before_the_run_in_one_line(at: Any, problem: str) -> None:
    for field, part in (
        ("poison.0.at", {"poison": [patch(at)]}),
        ("faults.0.nodes", {"faults": [crash(at)]}),
    ):
        with pytest.raises(BadInput) as caught:
            prepare(described(**part))
        [line] = caught.value.problems
        assert line.startswith(field + problem), line


def test_places_are_refused_without_a_graph_or_a_neighbour() -> None:
    sampled = {"name": "cyclon", "view": 3, "shuffle": 2}
    for place in ({"degree_rank": 0}, {"betweenness_rank": 0}, {"hops_from": {"rank": 0, "hops": 1}}):
        with pytest.raises(BadInput) as caught:
            prepare(described(algorithm="gossip-learning", topology=sampled, faults=[crash(place)]))
        [line] = caught.value.problems
        problem = (
            f"faults.0.nodes: {next(iter(place))} is a place in the graph, and a sampled topology has none"
        )
        assert line == f"{problem}; accepted: rank, ranks, count, fraction, all"
    apart: nx.Graph[int] = nx.Graph([(1, 2)])
    apart.add_node(0)
    with pytest.raises(
        BadInput, match=r"^f.hops_from.hops: 1; accepted: another rank, since node 0 has no neigh"
    ):
        select({"hops_from": {"rank": 0, "hops": 1}}, apart, nodes=3)


def test_places_are_those_in_the_graph_of_round_0() -> None:
    changing = {"name": "erdos-renyi", "p": 0.4, "every_rounds": 1, "allow_disconnected": True}
    experiment = described(nodes=12, topology=changing, faults=[crash({"degree_rank": 0})])
    graphs = TopologySchedule(experiment.topology, 12, SEED)
    hubs = [min(range(12), key=lambda rank: (-graphs.graph(k).degree(rank), rank)) for k in range(4)]
    assert len(set(hubs)) > 1
    assert prepare(experiment).description()["chosen"] == {"faults.0.nodes": [hubs[0]]}


class Around(Topology):
    """A star around the node with the most samples."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int, samples: Sequence[int] = ()) -> Graph:
        hub = int(np.argmax(samples))
        return Graph(nodes, [(hub, rank) for rank in range(nodes) if rank != hub])


def test_first_graph_may_depend_on_what_nodes_hold() -> None:
    uneven = {"partition": {"name": "dirichlet", "alpha": 0.3}, "topology": {"name": f"{__name__}:Around"}}
    setup = prepare(described(**uneven, faults=[crash({"degree_rank": 0})]))
    most = max(range(5), key=lambda rank: len(setup.parts[rank]))
    assert most > 0
    assert setup.chosen == {"faults.0.nodes": (most,)}


class Away(Fault):
    """A user's fault."""

    nodes: Nodes

    def plan(self, nodes: int, seed: int, field: str) -> FaultPlan:
        return FaultPlan([FaultInterval(1.0, 2.0, "crash", rank) for rank in self.nodes.ranks or ()])


def test_user_fault_gets_the_ranks_of_a_place() -> None:
    events = FaultSchedule([Away(nodes={"degree_rank": 1})], 5, SEED, lambda: TREE).event_queue().due(1.5)  # type: ignore[arg-type]
    assert [(event.node, event.what) for event in events] == [(1, "crash")]


@pytest.mark.usefixtures("tree")
def test_chosen_nodes_are_on_record_and_ringed(tmp_path: Path) -> None:
    faults = [
        crash({"hops_from": {"rank": 0, "hops": 3}}),
        {"name": "slow", "nodes": "all", "factor": 2},
        {"name": "partition", "groups": [[0]], "from_s": 90},
    ]
    experiment = described(poison=[patch({"degree_rank": 0})], faults=faults)
    done = run(experiment, tmp_path / "run")
    everyone = [0, 1, 2, 3, 4]
    wanted = {"poison.0.at": [2], "faults.0.nodes": [3, 4], "faults.1.nodes": everyone}
    assert done.chosen == json.loads((done.path / "setup.json").read_text())["chosen"] == wanted
    assert sorted(done.events.filter(pl.col("event") == "lost")["node"]) == [3, 4]
    [page] = page_data([done])["runs"]
    assert page["rings"] == [
        {"label": "patch (poison.0)", "ranks": [2], "colour": 1},
        {"label": "crash (faults.0)", "ranks": [3, 4], "colour": 2},
    ]
