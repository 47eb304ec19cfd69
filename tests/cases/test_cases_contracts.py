"""What the pages say that topologies, algorithms, networks and compute profiles need, and what their base classes say that a
user's own must return: each sentence is tried before the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gossamer import BadInput, Experiment
from gossamer.runtime.setup import prepare

DOCS = Path(__file__).parents[2] / "docs"
BASE: dict[str, Any] = {
    "nodes": 4,
    "task": {"name": "least-squares", "samples": 32, "features": 3},
    "batch_size": 4,
    "algorithm": "d-psgd",
    "optimizer": {"name": "sgd", "lr": 0.01},
    "stop": {"rounds": 1},
    "engine": {"name": "simulate", "trainer": "sequential", "workers": 1},
}
LOSSY = {"network": {"name": "uniform", "loss": 0.1}, "gather": {"timeout_s": 1}}
ADAM = {"name": "adam", "lr": 0.1}
CHANGING = {"topology": {"name": "erdos-renyi", "p": 0.9, "every_rounds": 1}}
DIRECTED = {"topology": {"name": "networkx", "generator": "gn_graph", "allow_disconnected": True}}

SENTENCES = [
    ("algorithms", "`d2` needs a symmetric W with eigenvalues above −1/3", {"algorithm": "d2"}, "-0.333333"),
    ("algorithms", "`qg-momentum` need a doubly stochastic W", {"algorithm": "qg-momentum", **DIRECTED}, "not doubly stochastic"),
    ("algorithms", "accepts only `sgd` without momentum", {"algorithm": "qg-momentum", "optimizer": ADAM}, "optimizer.name: adam for qg-momentum"),
    ("algorithms", "**`relay-sum`** needs a static tree", {"algorithm": "relay-sum"}, "tree"),
    ("algorithms", "needs a way back along every edge", {"algorithm": "sgp", **DIRECTED}, "can't reach it, for sgp"),
    ("algorithms", "accepts no codec", {"algorithm": "powergossip", "codec": {"name": "top-k", "fraction": 0.1}}, "codec: top-k for powergossip"),
    ("algorithms", "needs every message and an undirected graph", {"algorithm": "powergossip", **LOSSY}, "powergossip"),
    ("algorithms", "needs every message and an undirected graph", {"algorithm": "powergossip", **DIRECTED}, "undirected"),
    ("algorithms", "the optimizer has to be plain `sgd`", {"algorithm": "beer", "optimizer": ADAM}, "for beer"),
    ("algorithms", "so every message has to arrive", {"algorithm": "choco-sgd", **LOSSY}, "choco-sgd"),
    ("algorithms", "The weights must be static",
     {"algorithm": "influence-corrected", "topology": {"name": "ring", "weights": "random"}}, "accepted: static ones"),
    ("algorithms", "`memory: stored` needs a static topology",
     {"algorithm": {"name": "swift", "memory": "stored"}, **CHANGING}, "accepted: a static one"),
    ("algorithms", "`trimmed-mean` needs 2 b + 1 models",
     {"aggregator": {"name": "trimmed-mean", "count": 2}}, "trimmed-mean takes at least 5 models, and node 0 has 3"),
    ("networks", "There must be `nodes` replicas",
     {"network": {"name": "kollaps", "path": DOCS.parent / "experiments/divshare/star-60.xml"}}, "60 replicas for 4 nodes"),
    ("networks", "`slowdowns` has to be the outermost profile",
     {"compute": {"name": "stragglers", "count": 1, "base": {"name": "slowdowns", "random": {"per_hour": 1, "mean_s": 1, "factor": 2}}}},
     "slowdowns have to be outermost"),
    ("experiments", "The graph of all possible links has to be connected",
     {"topology": {"name": "random-links", "probability": 0.5,
                   "base": {"name": "stochastic-block", "sizes": [2, 2], "p_in": 1, "p_out": 0, "allow_disconnected": True}}},
     "2 components"),
    ("experiments", "less than the number of nodes",
     {"algorithm": "gossip-learning", "topology": {"name": "cyclon", "view": 4}}, "topology.view: 4"),
]  # fmt: skip


@pytest.mark.parametrize(("page", "sentence", "changes", "problem"), SENTENCES)
def test_what_the_pages_say_is_needed_is_tried(
    page: str, sentence: str, changes: dict[str, Any], problem: str
) -> None:
    assert sentence in " ".join((DOCS / f"{page}.md").read_text().split())
    with pytest.raises(BadInput, match=re.escape(problem)):
        prepare(Experiment(**{**BASE, **changes}))


OWN = """
import networkx as nx
import numpy as np
from gossamer.network import Network
from gossamer.network.network import Access
from gossamer.topology import Topology, Weights


class Networkx(Topology):
    def draw(self, nodes, rng, round):
        return nx.path_graph(nodes)


class Raising(Topology):
    def draw(self, nodes, rng, round):
        return {}["graph"]


class Partial(Weights):
    def row(self, graph, rank, samples, round, rng):
        return {graph.neighbors(rank)[0]: 0.5}


class Unknown(Weights):
    def row(self, graph, rank, samples, round, rng):
        return dict.fromkeys(graph.neighbors(rank), float("nan"))


class Fair(Weights):
    def row(self, graph, rank, samples, round, rng):
        return {other: 0.25 for other in graph.neighbors(rank)}


class Few(Network):
    def conditions(self, nodes, seed):
        return Access(np.full(nodes, np.inf))


class Early(Network):
    def conditions(self, nodes, seed):
        return Access(np.full(2 * nodes, np.inf), latency_s=-1.0)


class Broken(Network):
    def conditions(self, nodes, seed):
        return 1 / 0


class Even(Network):
    def conditions(self, nodes, seed):
        return Access(np.full(2 * nodes, np.inf), latency_s=1.0)
"""
WRONG = [
    ("topology", "Networkx", "topology: own_contracts:Networkx.draw returns networkx.Graph; accepted: gossamer.topology.Graph"),
    ("topology", "Raising", "topology: KeyError: 'graph' (own_contracts.py, line 16)"),
    ("weights", "Partial", "topology.weights: own_contracts:Partial gives {1: 0.5} to a node with the in-neighbours [1, 3]"),
    ("weights", "Unknown", "gives {1: nan, 3: nan} to a node"),
    ("network", "Few", "network: own_contracts:Few has rates of the shape [4]; accepted: at least 8"),
    ("network", "Early", "Path(links=(0, 7), latency_s=-1.0"),
    ("network", "Broken", "network: own_contracts:Broken raised ZeroDivisionError: division by zero (own_contracts.py, line 46)"),
]  # fmt: skip


def with_own(here: Path, field: str, name: str) -> Experiment:
    (here / "own_contracts.py").write_text(OWN)
    own = f"own_contracts:{name}"
    changes = {"topology": {"name": "ring", "weights": own}} if field == "weights" else {field: own}
    return Experiment(**{**BASE, **changes})


@pytest.mark.parametrize(("field", "name", "problem"), WRONG)
def test_own_components_that_break_their_contract_are_refused(
    here: Path, field: str, name: str, problem: str
) -> None:
    with pytest.raises(BadInput, match=re.escape(problem)):
        prepare(with_own(here, field, name))


@pytest.mark.parametrize(("field", "name"), [("weights", "Fair"), ("network", "Even")])
def test_own_components_that_keep_it_are_accepted(here: Path, field: str, name: str) -> None:
    assert prepare(with_own(here, field, name)).experiment.nodes == 4
