"""FedAvg's clients and server."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer
from gossamer import BadInput, Experiment, Run
from gossamer.algorithms import FedAvg
from gossamer.progress import Lines
from gossamer.results.tidy import metric_names


def play(out: Path, nodes: int = 5, rounds: int = 4, **algorithm: Any) -> Run:
    return gossamer.run(
        Experiment.of(
            {
                "nodes": nodes,
                "task": {"name": "least-squares", "features": 2, "samples": 10 * nodes, "test_samples": 5},
                "algorithm": {"name": "fedavg", **algorithm},
                "batch_size": "full",
                "evaluation": {"every_rounds": 1},
                "stop": {"rounds": rounds},
                "engine": {"name": "simulate", "trainer": "batched"},
            }
        ),
        out,
    )


def sent(run: Run, rank: int) -> list[int]:
    """Messages that a node has sent by the end of each round."""
    return run.metrics.filter(node=rank).sort("round")["messages_sent"].to_list()


def test_server_rounds_take_time_while_all_clients_are_away(tmp_path: Path) -> None:
    run = gossamer.run(
        Experiment.of(
            {
                "nodes": 3,
                "task": {"name": "least-squares", "features": 2, "samples": 30, "test_samples": 5},
                "algorithm": {"name": "fedavg", "idle_s": 0.5},
                "compute": {"name": "constant", "seconds_per_step": 0.1},
                "faults": [{"name": "crash", "nodes": [1, 2], "at_s": 0.25, "restart_after_s": 3.0}],
                "failures": {"detection_s": 0.4},
                "gather": {"lost_peer": "skip"},
                "evaluation": {"every_rounds": 1},
                "stop": {"time_s": 5.0},
                "engine": {"name": "simulate", "trainer": "sequential"},
            }
        ),
        tmp_path,
    )
    assert run.status == "done"
    ends = run.metrics.filter(node=0).sort("round")["time_s"].to_list()
    alone = [end for end in ends if 0.7 < end < 3.2]
    assert len(alone) in (4, 5)
    assert [b - a for a, b in pairwise(alone)] == pytest.approx([0.5] * (len(alone) - 1))
    assert len([end for end in ends if end > 4.0]) > 8  # the clients are back


def test_client_continues_with_the_next_model_after_a_loss(tmp_path: Path) -> None:
    """One of two clients receives nothing in the first second, and again around the last rounds."""
    run = gossamer.run(
        Experiment.of(
            {
                "nodes": 3,
                "task": {"name": "least-squares", "features": 2, "samples": 30, "test_samples": 5},
                "algorithm": "fedavg",
                "compute": {"name": "constant", "seconds_per_step": 0.1},
                "faults": [
                    {"name": "loss", "probability": 1, "nodes": [1], "to_s": 1.05},
                    {"name": "loss", "probability": 1, "nodes": [1], "from_s": 2.05, "to_s": 3.2},
                ],
                "gather": {"timeout_s": 0.25},
                "stop": {"rounds": 16},
                "engine": {"name": "simulate", "trainer": "sequential"},
            }
        ),
        tmp_path,
    )
    assert run.status == "done"
    replies = dict(run.metrics.filter(round=16).select("node", "messages_sent").iter_rows())
    assert replies[2] == 16
    assert 4 <= replies[1] <= 10


@pytest.mark.parametrize(
    ("nodes", "fraction", "clients"),
    [
        (5, 1.0, 4),
        (5, 0.5, 2),
        (5, 0.6, 2),
        (5, 0.01, 1),
        (11, 0.3, 3),
        (11, 0.7, 7),
        (26, 0.28, 7),
        (50, 2 / 49, 2),
    ],
)
def test_round_has_max_CK_1_clients(tmp_path: Path, nodes: int, fraction: float, clients: int) -> None:  # noqa: N802
    """McMahan et al. (2017), Algorithm 1: m <- max(C K, 1), with K = nodes - 1; C = k / K makes k clients."""
    run = play(tmp_path, nodes=nodes, client_fraction=fraction, rounds=2)
    assert sent(run, 0) == [0, clients, 2 * clients]


def test_every_client_is_drawn_sooner_or_later(tmp_path: Path) -> None:
    run = play(tmp_path, client_fraction=0.25, rounds=24)
    turns = [sent(run, rank)[-1] for rank in range(1, 5)]
    assert sum(turns) == 24
    # Each is drawn 6 times on average, with a standard deviation of 2.1.
    assert all(1 <= count <= 16 for count in turns)


@pytest.mark.parametrize("server", [0, 3])
def test_only_the_server_is_evaluated_and_it_holds_no_data(tmp_path: Path, server: int) -> None:
    run = play(tmp_path, server=server)
    assert [n == 0 for n in run.setup["samples"]] == [rank == server for rank in range(5)]
    assert run.setup["outcome_ranks"] == [server]
    evaluated = run.metrics.filter(run.metrics["test_loss"].is_not_null())
    assert set(evaluated["node"]) == {server}
    assert evaluated["round"].to_list() == [0, 1, 2, 3, 4]


@settings(max_examples=50)
@given(st.integers(2, 50).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))))
def test_every_rank_has_data_or_the_outcome(case: tuple[int, int]) -> None:
    nodes, server = case
    algorithm = FedAvg(server=server)
    assert sorted({*algorithm.data_ranks(nodes), *algorithm.outcome_ranks(nodes)}) == list(range(nodes))
    assert len(algorithm.data_ranks(nodes)) == nodes - 1


@pytest.mark.parametrize(
    ("nodes", "algorithm", "named"),
    [
        (1, {}, r"nodes: got 1, which leaves fedavg no node with data"),
        (4, {"server": 4}, r"algorithm\.server: rank 4 of 4 nodes; accepted: 0 to 3"),
        (4, {"client_fraction": 0}, r"algorithm\.client_fraction"),
        (4, {"client_fraction": 1.5}, r"algorithm\.client_fraction"),
        (4, {"weighting": "size"}, r"algorithm\.weighting"),
        (4, {"clients": 3}, r"algorithm\.clients"),
    ],
)
def test_invalid_settings_are_refused(
    tmp_path: Path, nodes: int, algorithm: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadInput, match=named):
        play(tmp_path, nodes=nodes, **algorithm)


@pytest.mark.parametrize("algorithm", ["fedavg", "centralized"])
def test_a_single_outcome_has_no_consensus_distance(
    algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = Experiment.of(
        {
            "nodes": 3,
            "task": {"name": "least-squares", "features": 2, "samples": 30, "test_samples": 5},
            "algorithm": algorithm,
            "evaluation": {"every_rounds": 1},
            "stop": {"rounds": 2},
            "engine": {"name": "simulate", "trainer": "sequential"},
        }
    )
    run = gossamer.run(experiment, tmp_path, observer=Lines(experiment))
    assert run.metrics["consensus_distance"].count() == 0
    assert not any("consensus" in name for name in (*run.summary, *metric_names(run)))
    assert "round 2" in (shown := capsys.readouterr().err)
    assert "consensus" not in shown
    goal = {"rounds": 2, "target": {"metric": "consensus_distance", "value": 0.1}}
    with pytest.raises(
        BadInput, match="stop.target.metric: got 'consensus_distance'; accepted: (?!.*consensus)"
    ):
        gossamer.run(experiment.override(stop=goal), tmp_path)
