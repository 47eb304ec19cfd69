"""Centralities and influences that nodes learn by gossip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import polars as pl
import pytest

import gossamer
from gossamer import BadInput, Experiment, Run
from gossamer.algorithms.topology_aware import _check
from gossamer.messages.tags import Message
from gossamer.topology import TopologySchedule
from gossamer.topology.mixing_matrix import influence, sparse_matrix

NODES = 12


def played(out: Path, algorithm: dict[str, Any], rounds: int = 60, **fields: Any) -> Run:
    experiment = {
        "nodes": NODES,
        "task": {"name": "digits", "model": "logistic", "samples": 24},
        "topology": {"name": "barabasi-albert", "m": 2, "weights": {"name": "centrality"}},
        "algorithm": algorithm,
        "evaluation": {"every_rounds": rounds, "samples": 8},
        "stop": {"rounds": rounds},
        **fields,
    }
    return gossamer.run(Experiment.of(experiment), out)


def last(run: Run, column: str) -> list[float]:
    rows = run.metrics.filter(pl.col("node") >= 0, pl.col("round") == run.metrics["round"].max())
    return [float(value) for value in rows.sort("node")[column]]


def graph_of(run: Run) -> nx.Graph[int]:
    return nx.Graph(map(tuple, run.setup["graphs"]["0"]))


@pytest.mark.parametrize("measure", ["pagerank", "degree"])
def test_scores_converge_to_those_of_the_whole_graph(tmp_path: Path, measure: str) -> None:
    run = played(tmp_path, {"name": "gossiped-centrality", "measure": measure})
    graph = graph_of(run)
    exact = nx.pagerank(graph, tol=1e-12) if measure == "pagerank" else nx.degree_centrality(graph)
    assert last(run, "score") == pytest.approx([exact[rank] for rank in range(NODES)], abs=1e-4)


def test_lost_score_is_replaced_by_the_last_one(tmp_path: Path) -> None:
    lossy = {"network": {"name": "uniform", "loss": 0.01}, "gather": {"timeout_s": 0.1}}
    every = {"evaluation": {"every_rounds": 1, "samples": 8}}
    run = played(tmp_path, {"name": "gossiped-centrality"}, **lossy, **every)
    assert run.metrics["messages_lost"].sum() > 0
    exact = nx.pagerank(graph_of(run))
    rows = run.metrics.filter(pl.col("node") >= 0, pl.col("round") > 30)
    usual = rows.group_by("node").agg(pl.col("score").median()).sort("node")["score"]
    assert usual.to_list() == pytest.approx([exact[rank] for rank in range(NODES)], abs=5e-3)


def test_influences_converge_to_the_stationary_ones(tmp_path: Path) -> None:
    run = played(tmp_path, {"name": "influence-corrected"}, rounds=100)
    experiment = Experiment.of(run.experiment)
    exact = influence(sparse_matrix(TopologySchedule(experiment.topology, NODES, experiment.seed), 0))
    assert exact is not None
    assert np.ptp(exact) > 0.1
    assert last(run, "influence") == pytest.approx(exact.tolist(), abs=1e-3)


def test_influence_correction_refuses_changing_weights(tmp_path: Path) -> None:
    changing = {"name": "barabasi-albert", "m": 2, "every_rounds": 2}
    with pytest.raises(BadInput, match="weights that change with the round, for influence-corrected"):
        played(tmp_path, {"name": "influence-corrected"}, topology=changing)


@pytest.mark.parametrize("score", [float("nan"), -0.1, "1", 1])
def test_invalid_score_is_refused(score: Any) -> None:
    with pytest.raises(ValueError, match="score of a peer: got"):
        _check(Message(1, (0,), {"score": score, "degree": 1}, 0.0))
