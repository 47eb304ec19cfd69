"""The graphs of Epidemic Learning, as seen on the wire."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer
from gossamer import BadInput, Experiment, Node, NodeWrapper
from gossamer.algorithms import epidemic
from gossamer.messages.tags import Payload


class Postmark(NodeWrapper):
    """Appends (round, source, to) of every message to a file."""

    path: str

    def outgoing(self, node: Node, to: int, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
        with Path(self.path).open("a") as file:
            file.write(json.dumps([tag[-1], node.rank, to]) + "\n")
        return payload


def experiment(algorithm: dict[str, Any], nodes: int, rounds: int, seed: int = 1, **more: Any) -> Experiment:
    return Experiment.of(
        {
            "nodes": nodes,
            "seed": seed,
            "task": {"name": "least-squares", "features": 1, "samples": nodes, "test_samples": 1},
            "algorithm": algorithm,
            "batch_size": "full",
            "evaluation": {"every_rounds": None},
            "stop": {"rounds": rounds},
            "engine": {"name": "simulate", "trainer": "batched"},
            **more,
        }
    )


def drawn(name: str, nodes: int, degree: int, rounds: int, seed: int = 1) -> list[set[tuple[int, int]]]:
    """The (source, to) pairs of each round."""
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Postmark(path=f"{folder}/sent.jsonl")
        algorithm = {"name": name, "degree": degree}
        gossamer.run(experiment(algorithm, nodes, rounds, seed, wrappers=[wrapper]), folder)
        lines = [json.loads(line) for line in Path(wrapper.path).read_text().splitlines()]
    graphs: list[set[tuple[int, int]]] = [set() for _ in range(rounds)]
    for r, source, to in lines:
        assert (source, to) not in graphs[r], "sent twice"
        graphs[r].add((source, to))
    return graphs


def cases() -> st.SearchStrategy[tuple[int, int]]:
    """(nodes, degree) pairs for which regular graphs exist."""
    return st.integers(4, 9).flatmap(
        lambda nodes: (
            st.integers(1, nodes - 1)
            .filter(lambda degree: degree * nodes % 2 == 0)
            .map(lambda degree: (nodes, degree))
        )
    )


@settings(max_examples=8)
@given(cases(), st.integers(0, 2**31))
def test_oracle_draws_regular_undirected_graphs(case: tuple[int, int], seed: int) -> None:
    nodes, degree = case
    for edges in drawn("epidemic-oracle", nodes, degree, 2, seed):
        assert all(i != j for i, j in edges)
        assert {(j, i) for i, j in edges} == edges
        assert Counter(i for i, _ in edges) == dict.fromkeys(range(nodes), degree)


@settings(max_examples=8)
@given(
    st.integers(2, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))), st.integers(0, 2**31)
)
def test_local_nodes_draw_their_own_recipients(case: tuple[int, int], seed: int) -> None:
    nodes, degree = case
    for edges in drawn("epidemic-local", nodes, degree, 2, seed):
        assert all(i != j for i, j in edges)
        # `edges` is a set and nothing was sent twice, so the recipients are distinct.
        assert Counter(i for i, _ in edges) == dict.fromkeys(range(nodes), degree)


@pytest.mark.parametrize("name", ["epidemic-oracle", "epidemic-local"])
def test_graphs_differ_by_round_and_depend_on_the_seed(name: str) -> None:
    graphs = drawn(name, 10, 3, 5)
    assert len(set(map(frozenset, graphs))) == 5
    assert graphs == drawn(name, 10, 3, 5)
    assert graphs[0] != drawn(name, 10, 3, 1, seed=2)[0]


@pytest.mark.parametrize("name", ["epidemic-oracle", "epidemic-local"])
def test_every_pair_is_equally_likely(name: str) -> None:
    """Each other node with probability s / (n - 1): within five standard deviations over 1500 draws.

    The graphs are drawn directly, since this many rounds on the wire would take too long.
    """
    nodes, degree, draws = 6, 2, 1500
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(draws):
        if name == "epidemic-oracle":
            graph = epidemic._regular_graph(seed, nodes, degree)
            counts.update((i, j) for i in range(nodes) for j in graph.neighbors(i))
        else:
            recipients, senders = epidemic._directed_graph(seed, nodes, degree)
            edges = [(i, j) for i, row in enumerate(recipients) for j in row]
            assert edges == sorted((i, j) for j, row in enumerate(senders) for i in row)
            counts.update(edges)
    p = degree / (nodes - 1)
    spread = 5 * np.sqrt(draws * p * (1 - p))
    assert len(counts) == nodes * (nodes - 1)
    for edge, count in counts.items():
        assert abs(count - draws * p) < spread, edge


def test_in_degrees_of_epidemic_local_vary() -> None:
    in_degrees = [Counter(j for _, j in edges) for edges in drawn("epidemic-local", 10, 3, 4)]
    assert len({count for degrees in in_degrees for count in degrees.values()}) > 2


@pytest.mark.parametrize(
    ("algorithm", "nodes", "named"),
    [
        ({"name": "epidemic-oracle"}, 1, "nodes: 1 for epidemic-oracle; accepted: at least 2"),
        ({"name": "epidemic-local", "degree": 1}, 1, "nodes: 1 for epidemic-local; accepted: at least 2"),
        ({"name": "epidemic-oracle", "degree": 4}, 4, r"algorithm\.degree: 4 for 4 nodes; accepted: 1 to 3"),
        ({"name": "epidemic-local", "degree": 7}, 5, r"algorithm\.degree: 7 for 5 nodes; accepted: 1 to 4"),
        (
            {"name": "epidemic-oracle", "degree": 3},
            5,
            r"algorithm\.degree: 3 for 5 nodes; accepted: an even degree",
        ),
        ({"name": "epidemic-local", "degree": 0}, 5, r"algorithm\.degree"),
        ({"name": "epidemic-local", "local_steps": 0}, 5, r"algorithm\.local_steps"),
    ],
)
def test_invalid_degrees_are_refused(
    algorithm: dict[str, Any], nodes: int, named: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=named):
        gossamer.run(experiment(algorithm, nodes, 1), tmp_path)
    assert list(tmp_path.iterdir()) == []
