"""What holds of algorithms that wait for nobody, whenever messages come: as simulated and among real processes.

Nodes train at a rate of next to nothing, so that nothing but averaging moves a model. They wait at the end until nothing is
under way any more.
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
"""Nodes of the complete graph that ask others to average with them."""
SIZES = {"ad-psgd": 307, "ad-psgd-wait-free": 307, "swift": 304, "divshare": 116, "gossip-learning": 316}
"""Bytes of a message, headers included: values of 256 bytes, of a fragment 64."""
LEEWAY = {"simulate": 1e-9, "processes": 0.25}
"""Seconds by which clocks of nodes differ, and timers are late, at most."""
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
    """The run, and the traffic of each node in the end."""
    settled = {"name": "golden_parts:Settled", "inner": ALGORITHMS[name], "folder": str(out)}
    run = gossamer.run(Experiment.of(settings(settled, engine, loss)), out)
    assert run.status == "done"
    traffic = [json.loads((out / f"traffic-{rank}.json").read_text()) for rank in range(NODES)]
    if any(node["late"] for node in traffic):
        pytest.skip("the machine is too busy: rounds took longer than nodes wait for the others")
    return run, traffic


@pytest.fixture(scope="module")
def played() -> dict[tuple[str, str], tuple[Run, Traffic]]:
    """What was run already, by algorithm and engine."""
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
    """The models that nodes begin with, [nodes, P]."""
    described = Experiment.of(settings({"name": "local"}, "simulate"))
    return models(gossamer.run(described, tmp_path_factory.mktemp("initial")))


def models(run: Run) -> torch.Tensor:
    assert run.parameters is not None
    return run.parameters.double()


def total(traffic: Traffic, column: str) -> int:
    return sum(int(node[column]) for node in traffic)


@BOTH
@ALL
def test_what_was_sent_was_received(outcome: tuple[Run, Traffic]) -> None:
    _, traffic = outcome
    assert total(traffic, "messages_sent") > 0
    for what in ("bytes", "messages"):
        assert total(traffic, f"{what}_sent") == total(traffic, f"{what}_received")
    for column in ("messages_lost", "messages_cancelled", "messages_late"):
        assert total(traffic, column) == 0, column


@BOTH
@pytest.mark.parametrize("name", ["swift", "divshare", "gossip-learning"])
def test_what_was_sent_was_received_or_lost(name: str, engine: str, tmp_path: Path) -> None:
    """Bytes of lost messages count as sent."""
    _, traffic = play(name, engine, tmp_path, loss=0.25)
    lost = total(traffic, "messages_lost")
    assert 0 < lost < total(traffic, "messages_sent")
    assert total(traffic, "messages_sent") == total(traffic, "messages_received") + lost
    assert total(traffic, "bytes_sent") == total(traffic, "bytes_received") + lost * SIZES[name]


@BOTH
@ALL
def test_messages_of_a_node_are_of_one_size(name: str, outcome: tuple[Run, Traffic]) -> None:
    _, traffic = outcome
    for rank, node in enumerate(traffic):
        # An answer's tag is a letter shorter than that of what asks for it.
        size = SIZES[name] - (name.startswith("ad-psgd") and rank not in ACTIVE)
        assert node["bytes_sent"] == node["messages_sent"] * size, rank


@BOTH
@ALL
def test_how_many_messages_are_sent(name: str, engine: str, outcome: tuple[Run, Traffic]) -> None:
    _, traffic = outcome
    sent = [node["messages_sent"] for node in traffic]
    if name == "ad-psgd":
        assert [sent[rank] for rank in ACTIVE] == [ROUNDS] * len(ACTIVE)
    if name.startswith("ad-psgd"):  # an answer to each that asks
        assert sum(sent[rank] for rank in ACTIVE) == sum(sent) / 2
        assert max(sent[rank] for rank in ACTIVE) <= ROUNDS
    elif name == "swift":  # it passes over those to whom the last model has not left yet
        assert max(sent) <= ROUNDS * (NODES - 1)
        assert engine == "processes" or min(sent) == ROUNDS * (NODES - 1)
    else:  # with divshare, four fragments to two nodes each
        assert sent == [ROUNDS * (8 if name == "divshare" else 1)] * NODES


@BOTH
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name.startswith("ad-psgd")])
def test_averaging_in_pairs_keeps_the_mean_of_all_models(
    outcome: tuple[Run, Traffic], initial: torch.Tensor
) -> None:
    after = models(outcome[0])
    torch.testing.assert_close(after.mean(dim=0), initial.mean(dim=0), rtol=0, atol=1e-6)
    assert after.std(dim=0).sum() < 0.3 * initial.std(dim=0).sum()


@BOTH
@ALL
def test_models_come_together_and_stay_between_those_at_the_start(
    outcome: tuple[Run, Traffic], initial: torch.Tensor
) -> None:
    """Averages of averages, in every coordinate."""
    after = models(outcome[0])
    assert (after >= initial.min(dim=0).values - 1e-6).all()
    assert (after <= initial.max(dim=0).values + 1e-6).all()
    assert after.std(dim=0).sum() < 0.5 * initial.std(dim=0).sum()


@BOTH
@ALL
def test_staleness_is_bounded(name: str, engine: str, outcome: tuple[Run, Traffic]) -> None:
    """A message is as old as its way was long, when it comes, and is taken at the end of the step that goes on by then."""
    run, _ = outcome
    rows = run.metrics.filter(pl.col("node") >= 0, pl.col("round") == ROUNDS)
    assert rows["node"].to_list() == list(range(NODES))
    leeway, waits = (
        LEEWAY[engine],
        name.startswith("ad-psgd"),
    )  # for what it takes, so that nothing lies about
    longest = 0.0 if waits else STEP_S * (1 + 0.2 * (NODES - 1))
    least, most = rows["staleness_s"].min(), rows["staleness_max_s"].max()
    assert isinstance(least, float)
    assert isinstance(most, float)
    assert least >= LATENCY_S - leeway
    assert most <= LATENCY_S + longest + leeway
