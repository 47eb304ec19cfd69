from __future__ import annotations

from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer
from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.topology import TopologySchedule
from gossamer.topology.mixing_matrix import influence, sparse_matrix, spectral_gap

NODES = 14
GRAPHS: list[dict[str, Any]] = [
    {"name": "barabasi-albert", "m": 2, "every_rounds": 1},
    {"name": "stochastic-block", "sizes": [6, 8], "p_in": 0.6, "p_out": 0.1, "every_rounds": 1},
    {"name": "star"},
    {"name": "random-links", "base": {"name": "watts-strogatz", "degree": 4, "p": 0.5}, "probability": 0.6},
]
DIRECTED: list[dict[str, Any]] = [
    {"name": "exponential"},
    {
        "name": "random-links",
        "base": {"name": "erdos-renyi", "p": 0.6},
        "probability": 0.8,
        "symmetric": False,
    },
]
MEASURES = ["degree", "betweenness", "closeness", "pagerank"]


def schedule(graph: dict[str, Any], nodes: int = NODES, seed: int = 1, **weights: Any) -> TopologySchedule:
    return TopologySchedule(build("topology", {**graph, "weights": weights}), nodes, seed)


def matrix(topology: TopologySchedule, round: int = 0) -> np.ndarray:
    return np.asarray(sparse_matrix(topology, round).toarray())


def reference(graph: Any, scores: dict[int, float], coefficient: float | None) -> np.ndarray:
    """The mixing matrix in NumPy: a softmax over closed neighbourhoods, or shares of the scores without a coefficient."""
    A = nx.to_numpy_array(graph, nodelist=range(len(graph))).T + np.eye(len(graph))
    s = np.array([scores[j] for j in range(len(graph))])
    W = A * (s if coefficient is None else np.exp(coefficient * s))
    return np.asarray(W / W.sum(axis=1, keepdims=True))


def scores_of(graph: Any, measure: str) -> dict[int, float]:
    """Centralities by formulas that share no code with the weights."""
    n = len(graph)
    if measure == "degree":
        return {j: graph.degree(j) / (n - 1) for j in graph}
    if (
        measure == "pagerank"
    ):  # the stationary distribution of a random surfer, who jumps anywhere from a dead end
        A = nx.to_numpy_array(graph, nodelist=range(n))
        steps = np.where(
            A.sum(axis=1, keepdims=True) > 0, A / np.maximum(A.sum(axis=1, keepdims=True), 1), 1 / n
        )
        values, vectors = np.linalg.eig((0.85 * steps + 0.15 / n).T)
        first = vectors[:, np.argmax(values.real)].real
        return dict(enumerate((first / first.sum()).tolist()))
    if measure == "closeness":  # from others to a node, scaled by the share of nodes that reach it
        distance = np.asarray(nx.floyd_warshall_numpy(graph, nodelist=range(n)))
        near = np.isfinite(distance)
        total, count = np.where(near, distance, 0).sum(axis=0), near.sum(axis=0) - 1
        return dict(enumerate((count / np.maximum(total, 1) * count / (n - 1)).tolist()))
    paths = np.zeros(n)  # betweenness with ends, by listing all shortest paths
    for i in graph:
        for j in set(nx.descendants(graph, i)) - {i}:
            between = list(nx.all_shortest_paths(graph, i, j))
            for path in between:
                paths[path] += 1 / len(between)
    return dict(enumerate((paths / (n * (n - 1))).tolist()))


@settings(max_examples=25)
@given(
    st.sampled_from(GRAPHS + DIRECTED),
    st.sampled_from(MEASURES),
    st.sampled_from([0.05, 0.1, 1.0]),
    st.integers(0, 99),
    st.integers(0, 9),
)
def test_weights_are_a_softmax_of_centralities(
    spec: Any, measure: str, temperature: float, seed: int, round: int
) -> None:
    topology = schedule(spec, seed=seed, name="centrality", measure=measure, temperature=temperature)
    graph = topology.graph(round).to_networkx()
    W = matrix(topology, round)
    assert pytest.approx(reference(graph, scores_of(graph, measure), 1 / temperature), abs=1e-6) == W
    assert W.sum(axis=1) == pytest.approx(1, abs=1e-12)
    assert (W > -1e-15).all()


@pytest.mark.parametrize("spec", [GRAPHS[0], GRAPHS[1], DIRECTED[0]], ids=str)
def test_weights_without_a_temperature_are_centrality_shares(spec: Any) -> None:
    for measure in MEASURES:
        topology = schedule(spec, name="centrality", measure=measure, temperature=None)
        graph = topology.graph(0).to_networkx()
        assert pytest.approx(reference(graph, scores_of(graph, measure), None), abs=1e-6) == matrix(topology)


def test_eigenvector_centrality_is_the_leading_eigenvector() -> None:
    topology = schedule(GRAPHS[0], name="centrality", measure="eigenvector", temperature=0.2)
    graph = topology.graph(0).to_networkx()
    leading = np.abs(np.linalg.eigh(nx.to_numpy_array(graph))[1][:, -1])
    assert pytest.approx(reference(graph, dict(enumerate(leading)), 5), abs=1e-6) == matrix(topology)
    loose = {**GRAPHS[1], "p_out": 0.0, "p_in": 1.0, "allow_disconnected": True}
    with pytest.raises(BadInput, match=r"topology\.weights\.measure: eigenvector on a disconnected graph"):
        schedule(loose, name="centrality", measure="eigenvector").check()


@pytest.mark.parametrize(
    ("weights", "hubs", "gap"),
    [
        ({"name": "uniform"}, [0.096, 0.089, 0.064, 0.051], 0.192),
        ({"name": "centrality", "measure": "degree"}, [0.436, 0.308, 0.086, 0.011], 0.487),
        ({"name": "centrality", "measure": "betweenness"}, [0.411, 0.311, 0.071, 0.008], 0.467),
        ({"name": "metropolis-hastings"}, [1 / 33] * 4, 0.065),
    ],
)
def test_influence_of_hubs_on_a_graph_of_the_paper(weights: Any, hubs: list[float], gap: float) -> None:
    """The four nodes of highest degree in the first Barabási-Albert graph with 33 nodes, with values found by hand."""
    graph = {"name": "networkx", "generator": "barabasi_albert_graph", "parameters": {"m": 2, "seed": 0}}
    topology = schedule(graph, 33, **weights)
    first = sorted(range(33), key=lambda rank: -topology.graph(0).degree(rank))[:4]
    W = sparse_matrix(topology, 0)
    pi = influence(W)
    assert pi is not None
    assert pi[first] == pytest.approx(hubs, abs=6e-4)
    assert spectral_gap(W) == pytest.approx(gap, abs=6e-4)


def test_ego_network_of_the_whole_graph_gives_the_same_weights() -> None:
    for measure in ("degree", "betweenness", "closeness", "eigenvector", "pagerank"):
        whole, ego = (
            schedule(GRAPHS[0], name="centrality", measure=measure, hops=hops) for hops in (None, 13)
        )
        assert matrix(ego) == pytest.approx(matrix(whole), abs=1e-6)


def test_node_uses_only_its_ego_network() -> None:
    # On a ring, a node sees a path of five nodes: itself with 2 of 4 possible links, and so do its neighbours.
    W = matrix(schedule({"name": "ring"}, 12, name="centrality", hops=2))
    assert W[0, [11, 0, 1]] == pytest.approx(1 / 3)
    # The betweenness of the middle of this path, with ends: 8 of 20 ordered pairs by their ends and 8 across it.
    topology = schedule(
        {"name": "ring"}, 12, name="centrality", measure="betweenness", hops=2, temperature=None
    )
    middle, side = 16 / 20, 14 / 20
    assert matrix(topology)[0, [11, 0, 1]] == pytest.approx(
        np.array([side, middle, side]) / (middle + 2 * side)
    )


@settings(max_examples=20)
@given(st.sampled_from(GRAPHS + DIRECTED), st.integers(0, 99), st.integers(0, 9))
def test_random_scores_are_drawn_for_each_node_and_round(spec: Any, seed: int, round: int) -> None:
    topology = schedule(spec, seed=seed, name="random", temperature=0.5)
    W = matrix(topology, round)
    assert W.sum(axis=1) == pytest.approx(1, abs=1e-12)
    # All receivers use one score of a node: logarithms of two weights in a row differ as the scores do.
    score = np.full(NODES, np.nan)
    todo = [0]
    score[0] = 0.0
    graph = topology.graph(round)
    while todo:
        i = todo.pop()
        for j in {*graph.neighbors(i, "in")}:
            expected = score[i] + 0.5 * np.log(W[i, j] / W[i, i])
            if np.isnan(score[j]):
                score[j] = expected
                todo.append(j)
            assert score[j] == pytest.approx(expected, abs=1e-9)
    assert np.nanmax(score) - np.nanmin(score) < 1
    if spec["name"] == "star":
        assert (matrix(topology, round + 1) != W).any()
        assert topology.static
        assert not topology.static_weights


def test_random_weights_do_not_depend_on_the_order_of_calls() -> None:
    forward, backward = (schedule({"name": "star"}, name="random") for _ in range(2))
    wanted = [[forward.mixing_weights(rank, round) for rank in range(NODES)] for round in range(4)]
    reversed_calls = [
        [backward.mixing_weights(rank, round) for rank in (*range(NODES)[::-1],)][::-1]
        for round in (3, 2, 1, 0)
    ]
    assert reversed_calls[::-1] == wanted
    assert schedule({"name": "star"}, seed=2, name="random").mixing_weights(0, 0) != wanted[0][0]


def factors(spec: dict[str, Any], rounds: int) -> list[float]:
    """Factors of a schedule, read off the weights: the softmax coefficient between the hub and a leaf of a star, relative
    to that of round 0."""
    topology = schedule({"name": "star"}, name="centrality", temperature=0.3, schedule=spec)
    hub, leaf = 1.0, 1 / (NODES - 1)
    weights = [topology.mixing_weights(1, round)[0] for round in range(rounds)]
    return [float(np.log(w / (1 - w)) * 0.3 / (hub - leaf)) for w in weights]


@pytest.mark.parametrize(
    ("rounds", "multiplier", "minimum"), [(5, 1, 0.0), (3, 2, 0.1), (4, 1, -1.0), (1, 3, 0.5)]
)
def test_cosine_schedule_matches_torch(rounds: int, multiplier: int, minimum: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    torchs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, rounds, multiplier, eta_min=minimum
    )
    expected = []
    for _ in range(25):
        expected.append(torchs.get_last_lr()[0])
        optimizer.step()
        torchs.step()
    spec = {"name": "cosine", "rounds": rounds, "multiplier": multiplier, "minimum": minimum}
    assert factors(spec, 25) == pytest.approx(expected, abs=1e-9)


def test_exponential_and_oscillating_schedules_by_hand() -> None:
    exponential = factors({"name": "exponential", "factor": 0.5, "minimum": 0.1}, 6)
    assert exponential == pytest.approx([1, 0.5, 0.25, 0.125, 0.1, 0.1], abs=1e-9)
    oscillating = factors({"name": "oscillating", "rounds": 2}, 7)
    assert oscillating == pytest.approx([1, 1, -1, -1, 1, 1, -1], abs=1e-9)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"temperature": 0}, "temperature: got 0; accepted: greater than"),
        ({"measure": "fame"}, "measure: got 'fame'; accepted: "),
        ({"hops": 1}, "hops: got 1; accepted: greater than or equal to 2"),
        (
            {"temperature": None, "schedule": {"name": "oscillating", "rounds": 2}},
            "accepted: a temperature with a schedule",
        ),
        (
            {"schedule": "exponental"},
            "topology.weights.schedule: unknown name 'exponental' (did you mean 'exponential'?)",
        ),
    ],
)
def test_invalid_parameters_are_refused(weights: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as raised:
        schedule({"name": "ring"}, name="centrality", **weights)
    assert message in str(raised.value)


def test_ego_networks_of_directed_graphs_are_refused() -> None:
    with pytest.raises(BadInput, match=r"topology\.weights\.hops: 2 on a directed graph; accepted: null"):
        schedule({"name": "exponential"}, name="centrality", hops=2).check()


def test_saved_spec_gives_the_same_weights() -> None:
    topology = schedule(
        GRAPHS[0], name="centrality", measure="pagerank", hops=3, schedule={"name": "cosine", "rounds": 4}
    ).topology
    assert build("topology", topology.spec()) == topology


def test_secure_aggregation_uses_the_weights_of_the_round(tmp_path: Path) -> None:
    """Although the graph is static, the weights change, so masks can not be agreed on once."""
    experiment: dict[str, Any] = {
        "nodes": 6,
        "task": {"name": "least-squares", "samples": 120},
        "topology": {
            "name": "watts-strogatz",
            "degree": 4,
            "p": 0.5,
            "weights": {"name": "centrality", "schedule": {"name": "oscillating", "rounds": 1}},
        },
        "algorithm": "d-psgd",
        "stop": {"rounds": 4},
    }
    open_, secure = (
        gossamer.run(gossamer.Experiment.of({**experiment, **more}), tmp_path).parameters
        for more in ({}, {"secure_aggregation": {}})
    )
    torch.testing.assert_close(secure, open_, rtol=1e-4, atol=1e-5)
