"""Properties of asynchronous algorithms that hold for any order of messages, simulated and among real processes.

The learning rate is almost zero, so only averaging moves a model. At the end, nodes wait until no message is in flight.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import gossamer
from gossamer import Experiment, Run

NODES, ROUNDS, FEATURES, STEP_S, LATENCY_S = 5, 12, 64, 0.02, 0.015
ACTIVE = (0, 2, 4)
"""The active nodes of AD-PSGD on the complete graph, which start the averaging."""
SIZES = {"ad-psgd": 307, "ad-psgd-wait-free": 307, "swift": 304, "divshare": 116, "gossip-learning": 316}
"""Bytes of a message with headers; the values take 256 bytes, those of a fragment 64."""
LEEWAY = {"simulate": 1e-9, "processes": 0.25}
"""Seconds by which nodes' clocks may differ and timers may be late."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ad-psgd": {"name": "ad-psgd"},
    "ad-psgd-wait-free": {"name": "ad-psgd", "wait_free": True},
    "swift": {"name": "swift"},
    "divshare": {"name": "divshare", "fraction": 0.25, "recipients": 2, "queue": "keep"},
    "gossip-learning": {"name": "gossip-learning"},
}
ENGINES: dict[str, dict[str, Any]] = {
    "simulate": {"name": "simulate", "trainer": "sequential"},
    "processes": {"name": "processes", "trainer": "sequential", "pace": True},
}
Traffic = list[dict[str, Any]]
BOTH = pytest.mark.parametrize("engine", ["simulate", pytest.param("processes", marks=pytest.mark.slow)])
ALL = pytest.mark.parametrize("name", ALGORITHMS)


def settings(algorithm: dict[str, Any], engine: str, loss: float = 0.0) -> dict[str, Any]:
    return {
        "nodes": NODES,
        "task": {"name": "least-squares", "features": FEATURES, "samples": 40, "test_samples": 10},
        "topology": "complete",
        "initial": "independent",
        "algorithm": algorithm,
        "optimizer": {"name": "sgd", "lr": 1e-30},
        "compute": {"name": "per-node", "seconds_per_step": [STEP_S * (1 + 0.2 * k) for k in range(NODES)]},
        "network": {"name": "uniform", "latency_s": LATENCY_S, "loss": loss},
        "evaluation": {"every_rounds": ROUNDS},
        "stop": {"rounds": ROUNDS},
        "engine": ENGINES[engine],
    }


def play(name: str, engine: str, out: Path, loss: float = 0.0) -> tuple[Run, Traffic]:
    """The run, and the final traffic of each node."""
    settled = {"name": "golden_parts:Settled", "inner": ALGORITHMS[name], "folder": str(out)}
    run = gossamer.run(Experiment.of(settings(settled, engine, loss)), out)
    assert run.status == "done"
    traffic = [json.loads((out / f"traffic-{rank}.json").read_text()) for rank in range(NODES)]
    if any(node["late"] for node in traffic):
        pytest.skip("the machine is too busy: rounds took longer than nodes wait for the others")
    return run, traffic


@pytest.fixture(scope="module")
def played() -> dict[tuple[str, str], tuple[Run, Traffic]]:
    """Completed runs, by algorithm and engine."""
    return {}


@pytest.fixture
def outcome(
    name: str, engine: str, played: dict[tuple[str, str], tuple[Run, Traffic]], tmp_path: Path
) -> tuple[Run, Traffic]:
    if (name, engine) not in played:
        played[name, engine] = play(name, engine, tmp_path)
    return played[name, engine]


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The initial models, [nodes, P]."""
    described = Experiment.of(settings({"name": "local"}, "simulate"))
    return models(gossamer.run(described, tmp_path_factory.mktemp("initial")))


def models(run: Run) -> torch.Tensor:
    assert run.parameters is not None
    return run.parameters.double()


def total(traffic: Traffic, column: str) -> int:
    return sum(int(node[column]) for node in traffic)


@BOTH
@ALL
def test_messages_sent_are_received(outcome: tuple[Run, Traffic]) -> None:
    _, traffic = outcome
    assert total(traffic, "messages_sent") > 0
    for unit in ("bytes", "messages"):
        assert total(traffic, f"{unit}_sent") == total(traffic, f"{unit}_received")
    for column in ("messages_lost", "messages_cancelled", "messages_late"):
        assert total(traffic, column) == 0, column


@BOTH
@pytest.mark.parametrize("name", ["swift", "divshare", "gossip-learning"])
def test_messages_sent_are_received_or_lost(name: str, engine: str, tmp_path: Path) -> None:
    """Bytes of lost messages count as sent."""
    _, traffic = play(name, engine, tmp_path, loss=0.25)
    lost = total(traffic, "messages_lost")
    assert 0 < lost < total(traffic, "messages_sent")
    assert total(traffic, "messages_sent") == total(traffic, "messages_received") + lost
    assert total(traffic, "bytes_sent") == total(traffic, "bytes_received") + lost * SIZES[name]


@BOTH
@ALL
def test_messages_of_a_node_have_one_size(name: str, outcome: tuple[Run, Traffic]) -> None:
    _, traffic = outcome
    for rank, node in enumerate(traffic):
        # The tag of an answer is one letter shorter than that of its question.
        size = SIZES[name] - (name.startswith("ad-psgd") and rank not in ACTIVE)
        assert node["bytes_sent"] == node["messages_sent"] * size, rank


@BOTH
@ALL
def test_number_of_messages_sent(name: str, engine: str, outcome: tuple[Run, Traffic]) -> None:
    _, traffic = outcome
    sent = [node["messages_sent"] for node in traffic]
    if name == "ad-psgd":
        assert [sent[rank] for rank in ACTIVE] == [ROUNDS] * len(ACTIVE)
    if name.startswith("ad-psgd"):  # each question is answered
        assert sum(sent[rank] for rank in ACTIVE) == sum(sent) / 2
        assert max(sent[rank] for rank in ACTIVE) <= ROUNDS
    elif name == "swift":  # it skips neighbours to which the last model is still being sent
        assert max(sent) <= ROUNDS * (NODES - 1)
        assert engine == "processes" or min(sent) == ROUNDS * (NODES - 1)
    else:  # with divshare, four fragments to two nodes each
        assert sent == [ROUNDS * (8 if name == "divshare" else 1)] * NODES


@BOTH
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name.startswith("ad-psgd")])
def test_pairwise_averaging_keeps_the_mean_of_all_models(
    outcome: tuple[Run, Traffic], initial: torch.Tensor
) -> None:
    after = models(outcome[0])
    torch.testing.assert_close(after.mean(dim=0), initial.mean(dim=0), rtol=0, atol=1e-6)
    assert after.std(dim=0).sum() < 0.3 * initial.std(dim=0).sum()


@BOTH
@ALL
def test_models_converge_within_the_range_of_the_initial_ones(
    outcome: tuple[Run, Traffic], initial: torch.Tensor
) -> None:
    """The models stay averages of the initial ones, in every coordinate."""
    after = models(outcome[0])
    assert (after >= initial.min(dim=0).values - 1e-6).all()
    assert (after <= initial.max(dim=0).values + 1e-6).all()
    assert after.std(dim=0).sum() < 0.5 * initial.std(dim=0).sum()


@BOTH
@ALL
def test_staleness_is_bounded(name: str, engine: str, outcome: tuple[Run, Traffic]) -> None:
    """A message arrives after its latency, and is taken at the end of the step then in progress."""
    run, _ = outcome
    # (A node that averages after its rounds has another row at the end.)
    rows = run.metrics.filter(pl.col("node") >= 0, round=ROUNDS, moment="round")
    assert rows["node"].to_list() == list(range(NODES))
    # AD-PSGD takes a message as soon as it arrives; the others may be in the middle of a step.
    longest = 0.0 if name.startswith("ad-psgd") else STEP_S * (1 + 0.2 * (NODES - 1))
    lowest, highest = rows["staleness_s"].min(), rows["staleness_max_s"].max()
    assert isinstance(lowest, float)
    assert isinstance(highest, float)
    assert lowest >= LATENCY_S - LEEWAY[engine]
    assert highest <= LATENCY_S + longest + LEEWAY[engine]
