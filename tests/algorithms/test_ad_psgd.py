"""AD-PSGD: against a NumPy model, the sum that averaging preserves, and the choice of active nodes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from delays import Array, Sent, World, experiment, play
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer
from gossamer import BadInput, Experiment, Node, NodeWrapper
from gossamer.algorithms import ADPSGD
from gossamer.algorithms.ad_psgd import active_ranks
from gossamer.messages.tags import Message, Payload
from gossamer.node import questions
from gossamer.results.checkpoints import newest
from gossamer.topology import Graph

# All durations differ, so that no two events fall on one instant.
SECONDS = [[0.311, 0.173], [0.2087], [0.4409, 0.1201, 0.2593], [0.1499], [0.6007]]
LATENCY = [[0.0517 + 0.0371 * ((3 * i + 5 * j) % 7) + 0.0013 * i for j in range(5)] for i in range(5)]
PATH = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 1)]  # bipartite: 0, 2, 4 are active


def edges(path: Path, pairs: list[tuple[int, int]]) -> dict[str, str]:
    path.write_text("".join(f"{i} {j}\n" for i, j in pairs))
    return {"name": "edge-list", "path": str(path)}


def model(
    described: Experiment,
    partners: dict[tuple[int, int], int],
    until: float,
    latency: list[list[float]] = LATENCY,
    *,
    steps: int = 1,
    wait_free: bool = False,
    timeout: float = 30.0,
) -> Array:
    """Lian et al. (2018) as a network of processes; partners: (active node, round) -> passive node."""
    world, clock = World(described), [count() for _ in range(5)]
    over = [0.0] * 5  # when a node's averaging is over
    late: list[list[Array]] = [[] for _ in range(5)]

    def averaging(i: int, j: int) -> Iterator[float]:
        while late[i]:
            world.X[i] -= late[i].pop()
        question = world.X[i].copy()
        yield latency[i][j]
        half = (question - world.X[j]) / 2
        world.X[j] += half
        yield latency[j][i]
        if latency[i][j] + latency[j][i] < timeout:
            world.X[i] -= half
        else:
            late[i].append(half)

    def node(i: int) -> Iterator[float]:
        for r in count():
            start = world.X[i].copy()
            if (i, r) in partners:
                j = partners[i, r]
                over[i] = world.now + min(latency[i][j] + latency[j][i], timeout)
                world.start(averaging(i, j))
            yield sum(SECONDS[i][next(clock[i]) % len(SECONDS[i])] for _ in range(steps))
            world.X[i] += world.learners[i].descend(start, steps) - start
            if not wait_free and world.now < over[i]:
                yield over[i] - world.now + 1e-9  # after the answer

    for i in range(5):
        world.start(node(i))
    return world.run(until)


def partners_in(sent: Sent) -> dict[tuple[int, int], int]:
    return {(source, int(tag[1])): to for source, tag, to, _ in sent if tag[0] == "average"}


@pytest.mark.parametrize("options", [{}, {"local_steps": 2}, {"wait_free": True}], ids=str)
@pytest.mark.parametrize("until", [1.1, 4.7])
def test_models_match_numpy(tmp_path: Path, options: dict[str, Any], until: float) -> None:
    """Covers stale gradients, answers in flight, and models that changed since they were sent."""
    described = experiment(
        {"name": "ad-psgd", **options},
        SECONDS,
        LATENCY,
        topology=edges(tmp_path / "edges.txt", PATH),
        stop={"time_s": until},
    )
    run, sent = play(described, tmp_path)
    partners = partners_in(sent)
    assert {i for i, _ in partners} == {0, 2, 4}
    assert set(partners.values()) <= {1, 3}
    expected = model(
        described,
        partners,
        until,
        steps=options.get("local_steps", 1),
        wait_free=options.get("wait_free", False),
    )
    assert run.parameters is not None
    np.testing.assert_allclose(run.parameters.numpy(), expected, rtol=1e-5, atol=1e-5)
    # The result depends on the latency, so the order of events matters here.
    other = model(described, partners, until, [[0.0] * 5] * 5)
    assert np.abs(expected - other).max() > 1e-3


@pytest.mark.slow
def test_wait_free_node_does_not_wait_for_averaging(tmp_path: Path) -> None:
    slow = [[10 * seconds for seconds in row] for row in LATENCY]
    rounds, questions = {}, {}
    for wait_free in (False, True):
        algorithm = {"name": "ad-psgd", "wait_free": wait_free}
        run, sent = play(experiment(algorithm, SECONDS, slow, stop={"time_s": 20.0}), tmp_path)
        rounds[wait_free] = run.metrics.filter(node=0)["round"].max()
        questions[wait_free] = len([1 for source, tag, _, _ in sent if (source, tag[0]) == (0, "average")])
    assert rounds[True] == 82  # two rounds in 0.484 s
    assert questions[False] == rounds[False] + 1 < 40
    assert questions[True] < rounds[True] / 2


def test_late_answer_counts_from_the_next_round(tmp_path: Path) -> None:
    far = [[0.15 + 0.1 * j + 0.013 * i for j in range(5)] for i in range(5)]
    algorithm = {"name": "ad-psgd", "timeout_s": 0.5}
    described = experiment(algorithm, SECONDS, far, stop={"time_s": 5.3})
    run, sent = play(described, tmp_path)
    partners = partners_in(sent)
    in_time = [far[i][j] + far[j][i] < 0.5 for (i, _), j in partners.items()]
    assert any(in_time)
    assert not all(in_time)
    assert run.parameters is not None
    expected = model(described, partners, 5.3, far, timeout=0.5)
    np.testing.assert_allclose(run.parameters.numpy(), expected, rtol=1e-5, atol=1e-5)
    other = model(described, partners, 5.3, far)
    assert np.abs(expected - other).max() > 1e-3


class Muffled(NodeWrapper):
    """Drops all messages of one kind."""

    kind: str

    def incoming(self, node: Node, message: Message) -> Message | None:
        return None if message.tag[0] == self.kind else message


@pytest.mark.parametrize("kind", ["average", "answer"])
def test_lost_message_costs_the_timeout(tmp_path: Path, kind: str) -> None:
    algorithm = {"name": "ad-psgd", "timeout_s": 0.75}
    described = experiment(
        algorithm, [[0.25]] * 4, [[0.1] * 4] * 4, wrappers=[Muffled(kind=kind)], stop={"rounds": 4}
    )
    run = gossamer.run(described.override(evaluation={"every_rounds": 4}), tmp_path)
    rows = run.metrics.filter(run.metrics["node"] >= 0, round=4, moment="round").sort("node")
    assert rows["time_s"].to_list() == [3.0, 1.0, 3.0, 1.0]


# --- the sum of all models

_nodes: dict[int, list[Node]] = {}
_flying: dict[int, list[tuple[float, torch.Tensor]]] = {}
_sums: dict[int, list[torch.Tensor]] = {}


class Watched(ADPSGD):
    """AD-PSGD that records the sum of all models and of the answers in flight."""

    number: int

    async def run(self, node: Node) -> None:
        _nodes.setdefault(self.number, []).append(node)
        if node.rank == 0:
            node.spawn(self._watch(node))
        await super().run(node)

    async def _watch(self, node: Node) -> None:
        while True:
            await node.sleep(0.0317)
            models = sum(other.parameters.double() for other in _nodes[self.number])
            flying = sum((d for _, d in _flying[self.number]), torch.zeros(len(node.parameters)).double())
            _sums[self.number].append(torch.stack([models, flying]))


class Flights(NodeWrapper):
    """Tracks the answers in flight, from the sending until the asking node takes them."""

    number: int

    def outgoing(self, node: Node, to: int, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
        if tag[0] == "answer":
            _flying[self.number].append((node.now(), payload.parameters.double()))
        return payload

    def incoming(self, node: Node, message: Message) -> Message | None:
        if message.tag[0] == "answer":
            flights = _flying[self.number]
            flights.remove(
                next(
                    flight
                    for flight in flights
                    if torch.equal(flight[1], message.payload.parameters.double())
                )
            )
        return message


def test_averaging_keeps_the_sum_of_models_and_answers(tmp_path: Path) -> None:
    """The answer in flight carries what one side has gained and the other has not yet given."""
    number = len(_sums)
    _nodes[number], _flying[number], _sums[number] = [], [], []
    described = experiment(
        Watched(number=number),
        SECONDS,
        LATENCY,
        topology=edges(tmp_path / "edges.txt", PATH),
        optimizer={"name": "sgd", "lr": 1e-30},  # only averaging moves a model
        wrappers=[Flights(number=number)],
        stop={"time_s": 8.0},
    )
    start = World(described).X
    run = gossamer.run(described, tmp_path)
    seen = torch.stack(_sums[number]).numpy()
    assert len(seen) > 200
    np.testing.assert_allclose(seen.sum(axis=1), np.tile(start.sum(axis=0), (len(seen), 1)), atol=2e-5)
    # The models alone do not keep the sum, and they have come closer.
    assert np.abs(seen[:, 0] - start.sum(axis=0)).max() > 0.1
    assert run.parameters is not None
    assert run.parameters.std(dim=0).max() < 0.3 * start.std(axis=0).max()


SLOW = [[4 * seconds for seconds in row] for row in LATENCY]


@pytest.mark.parametrize("wait_free", [False, True])
@pytest.mark.parametrize(
    ("latency", "timeout_s", "kept"),
    [
        (SLOW, 30.0, True),
        ([[0.3] * 5] * 5, 0.5, True),  # every answer is late but arrives
        ([[0.49] * 5] * 5, 0.5, True),
        ([[0.51] * 5] * 5, 0.5, False),  # the last answers come after twice the timeout
    ],
    ids=["in time", "late", "just in time", "too late"],
)
def test_node_waits_for_outstanding_answers_at_the_end(
    tmp_path: Path, latency: list[list[float]], timeout_s: float, kept: bool, wait_free: bool
) -> None:
    described = experiment(
        {"name": "ad-psgd", "wait_free": wait_free, "timeout_s": timeout_s},
        SECONDS,
        latency,
        topology=edges(tmp_path / "edges.txt", PATH),
        optimizer={"name": "sgd", "lr": 1e-30},
        stop={"rounds": 16},
    )
    start = World(described).X
    run, _ = play(described, tmp_path)
    assert run.parameters is not None
    missing = np.abs(run.parameters.double().sum(dim=0).numpy() - start.sum(axis=0)).max()
    assert (missing < 1e-6 * len(start) * np.abs(start).max()) == kept
    assert run.parameters.std(dim=0).max() < 0.8 * start.std(axis=0).max()  # averaging did take place


def test_outstanding_questions_are_saved_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions without an answer are remembered, up to a bound."""
    described = experiment(
        {"name": "ad-psgd", "timeout_s": 0.75},
        [[0.25]] * 4,
        [[0.1] * 4] * 4,
        wrappers=[Muffled(kind="answer")],
        checkpoint={"every_rounds": 6},
        stop={"rounds": 6},
    )
    monkeypatch.setattr(questions, "MAX_OPEN", 3)
    run = gossamer.run(described, tmp_path)
    checkpoint = newest(run.path / "checkpoints")
    assert checkpoint is not None
    open_rounds = [[q[1][1] for q in checkpoint.read(rank).state.get("~questions", [])] for rank in range(4)]
    assert open_rounds == [[3, 4, 5], [], [3, 4, 5], []]


# --- roles


@settings(max_examples=100)
@given(st.integers(2, 12), st.floats(0.1, 1.0), st.integers(0, 2**20))
def test_every_node_of_a_connected_graph_has_a_partner(n: int, p: float, seed: int) -> None:
    drawn = nx.compose(nx.gnp_random_graph(n, p, seed), nx.random_labeled_tree(n, seed=seed))
    graph = Graph.from_networkx(drawn)
    active = active_ranks(graph)
    used = nx.Graph([(i, j) for i, j in graph.edges() if (i in active) != (j in active)])
    assert set(used) == set(range(n))
    assert nx.is_connected(used)
    if nx.is_bipartite(drawn):
        assert active in [frozenset(side) for side in nx.bipartite.sets(drawn)]


def test_active_ranks_of_small_graphs() -> None:
    assert active_ranks(Graph(4, [(0, 1), (0, 2), (0, 3)])) == {0}
    assert active_ranks(Graph(4, [(3, 0), (3, 1), (3, 2)])) == {0, 1, 2}
    assert active_ranks(Graph(6, [(i, j) for i in range(6) for j in range(i)])) == {0, 2, 4}
    assert active_ranks(Graph(5, [(i, (i + 1) % 5) for i in range(5)])) == {0, 2, 4}


@pytest.mark.parametrize(
    ("topology", "nodes", "named"),
    [
        ("exponential", 4, "a directed graph for ad-psgd; accepted: an undirected one"),
        ({"name": "complete", "allow_disconnected": True}, 1, "node 0 has no neighbour to average with"),
    ],
)
def test_unsupported_graphs_are_refused(tmp_path: Path, topology: Any, nodes: int, named: str) -> None:
    seconds = [[0.1]] * nodes
    with pytest.raises(BadInput, match=named):
        play(
            experiment("ad-psgd", seconds, [[0.0] * nodes] * nodes, topology=topology, stop={"rounds": 1}),
            tmp_path,
        )
