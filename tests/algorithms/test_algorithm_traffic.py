"""Traffic of the algorithms: messages per round, and the share of a model in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gossamer
from gossamer import Experiment, Run

NODES, ROUNDS = 6, 3
FEATURES = 3000
"""Enough for a model (12 kB) to dwarf the headers of its messages."""


def play(out: Path, algorithm: Any, **changes: Any) -> Run:
    settings: dict[str, Any] = {
        "nodes": NODES,
        "task": {"name": "least-squares", "features": FEATURES, "samples": 12, "test_samples": 2},
        "topology": "star",
        "algorithm": algorithm,
        "optimizer": {"name": "sgd", "lr": 1e-4},
        "batch_size": "full",
        "stop": {"rounds": ROUNDS},
        "engine": {"name": "simulate", "trainer": "sequential"},
    }
    return gossamer.run(Experiment.of({**settings, **changes}), out)


@pytest.mark.parametrize(
    ("algorithm", "messages", "models"),
    [
        # Messages and models per round of nodes 0 to 5; node 0 is the hub of the star.
        ("d-psgd", [5, 1, 1, 1, 1, 1], [5, 1, 1, 1, 1, 1]),
        ({"name": "d-psgd", "overlap": True}, [5, 1, 1, 1, 1, 1], [5, 1, 1, 1, 1, 1]),
        ({"name": "epidemic-oracle", "degree": 3}, [3] * 6, [3] * 6),
        ({"name": "epidemic-local", "degree": 2}, [2] * 6, [2] * 6),
        ("fedavg", [5, 1, 1, 1, 1, 1], [5, 1, 1, 1, 1, 1]),
        ("all-reduce", [10] * 6, [10 / 6] * 6),
        ("d2", [5, 1, 1, 1, 1, 1], [5, 1, 1, 1, 1, 1]),
        ("gradient-tracking", [10, 2, 2, 2, 2, 2], [10, 2, 2, 2, 2, 2]),
        ("qg-momentum", [5, 1, 1, 1, 1, 1], [5, 1, 1, 1, 1, 1]),
        ("sgp", [5, 1, 1, 1, 1, 1], [5, 1, 1, 1, 1, 1]),
        ({"name": "sgp", "overlap": 2}, [10 / 3] + [2 / 3] * 5, [10 / 3] + [2 / 3] * 5),  # in rounds 0 and 2
        ("relay-sum", [5, 1, 1, 1, 1, 1], [5, 1, 1, 1, 1, 1]),
        ("gossip-learning", [1] * 6, [1] * 6),
        ("swift", [5, 1, 1, 1, 1, 1], [5, 1, 1, 1, 1, 1]),
        ({"name": "divshare", "fraction": 0.25, "recipients": 2}, [8] * 6, [2] * 6),
        ({"name": "divshare", "fraction": 1}, [3] * 6, [3] * 6),
        ("swift-artifact", [3] * 6, [3] * 6),
        ("local", [0] * 6, [0] * 6),
        ("centralized", [0], [0]),
    ],
    ids=str,
)
def test_messages_and_model_bytes_per_round(
    tmp_path: Path, algorithm: Any, messages: list[float], models: list[float]
) -> None:
    run = play(tmp_path, algorithm)
    last = run.metrics.filter(round=ROUNDS).sort("node")
    last = last.filter(last["node"] >= 0)
    assert last["messages_sent"].to_list() == [ROUNDS * count for count in messages]
    expected = [ROUNDS * count * 4 * FEATURES for count in models]
    for rank, (seen, payload) in enumerate(zip(last["bytes_sent"].to_list(), expected, strict=True)):
        assert payload <= seen <= payload + 200 * ROUNDS * messages[rank], rank
    assert last["messages_lost"].sum() == 0
    assert last["messages_late"].sum() == 0


def test_centralized_gives_all_data_to_one_node(tmp_path: Path) -> None:
    run = play(tmp_path, "centralized")
    assert run.setup["samples"] == [12, 0, 0, 0, 0, 0]
    assert run.setup["outcome_ranks"] == [0]
    assert set(run.metrics["node"]) == {-1, 0}


@pytest.mark.parametrize("local_steps", [1, 4])
@pytest.mark.parametrize(
    "name",
    [
        "d-psgd",
        "epidemic-oracle",
        "epidemic-local",
        "all-reduce",
        "local",
        "centralized",
        "sgp",
        "relay-sum",
        "gossip-learning",
    ],
)
def test_local_steps_are_counted_and_take_time(tmp_path: Path, name: str, local_steps: int) -> None:
    """Links cost nothing here, so a round lasts as long as its steps."""
    degree = {"degree": 2} if name.startswith("epidemic") else {}
    run = play(
        tmp_path,
        {"name": name, "local_steps": local_steps, **degree},
        compute={"name": "constant", "seconds_per_step": 0.5},
    )
    [last] = run.metrics.filter(round=ROUNDS, node=0).to_dicts()
    assert last["step"] == ROUNDS * local_steps
    assert last["time_s"] == ROUNDS * local_steps * 0.5


def test_overlap_hides_the_exchange_behind_the_steps(tmp_path: Path) -> None:
    """A round costs the longer of steps and exchange, not their sum."""
    settings: dict[str, Any] = {
        "compute": {"name": "constant", "seconds_per_step": 0.5},
        "network": {"name": "uniform", "latency_s": 0.3},
        "topology": "ring",
    }
    plain = play(tmp_path, {"name": "d-psgd"}, **settings)
    overlapped = play(tmp_path, {"name": "d-psgd", "overlap": True}, **settings)
    assert plain.metrics["time_s"].max() == pytest.approx(ROUNDS * 0.8)
    assert overlapped.metrics["time_s"].max() == pytest.approx(ROUNDS * 0.5)
