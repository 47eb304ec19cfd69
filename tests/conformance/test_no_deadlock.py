"""Nothing deadlocks: random graphs, step times, latencies, bandwidths, ways to share them, losses and paths that come and
go; every run ends by its stop rule."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count, product
from pathlib import Path
from typing import Any
from unittest import mock

import networkx as nx
import pytest

from gossamer import Experiment, Message, Node, NodeWrapper
from gossamer.api import Silent
from gossamer.engines.outcome import Outcome
from gossamer.engines.setup import prepare
from gossamer.engines.simulate.simulation import Simulation
from gossamer.learning.evaluate import Evaluator
from gossamer.learning.trainer import SequentialTrainer, TrainJob, TrainResult
from gossamer.network import ComputeProfile, Conditions, Uniform
from gossamer.network import Path as Route
from gossamer.registry import names
from gossamer.results.segment import Segment

BEARS_LOSS = {name: found.bears_loss for name, found in names("algorithm").items()}
GATHERS = {name: found.gathers for name, found in sorted(names("algorithm").items()) if name != "fedavg"}
"""Whether an algorithm waits for its neighbours' messages, by its name. A client of fedavg waits for its server's model as
long as it takes: lost, it doesn't come."""


class Uneven(ComputeProfile):
    """A time for each node."""

    durations: list[float]

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        return self.durations[rank]


class Broken(Conditions):
    """A network without some of its paths, and with a fraction of its rates."""

    def __init__(self, whole: Conditions, nodes: int, seed: int, turn: int, gone: float) -> None:
        rng = random.Random(f"{seed} {turn}")
        self._whole, self.rates = whole, whole.rates * rng.choice([0.1, 0.5, 1.0])
        self._gone = {pair for pair in product(range(nodes), repeat=2) if rng.random() < gone}

    def path(self, source: int, to: int) -> Route | None:
        return None if (source, to) in self._gone else self._whole.path(source, to)


class Flickering(Uniform):
    """Paths vanish and return, and rates change, every ``period_s``; for ever."""

    period_s: float
    gone: float

    def changes(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        whole = self.conditions(nodes, seed)
        return ((turn * self.period_s, Broken(whole, nodes, seed, turn, self.gone)) for turn in count(1))


class Lossy(NodeWrapper):
    """Every message is lost with the same probability, on any network."""

    loss: float

    def incoming(self, node: Node, message: Message) -> Message | None:
        rng = node.rng(
            "loss",
            message.source,
            round(message.sent_at * 1e9),
            *(k for k in message.tag if isinstance(k, int)),
        )
        return None if rng.random() < self.loss else message


def algorithm(name: str, rng: random.Random, nodes: int) -> dict[str, Any]:
    """One of its forms."""
    options: dict[str, dict[str, list[Any]]] = {
        "ad-psgd": {"wait_free": [False, True], "timeout_s": [0.01, 0.1, 5.0], "local_steps": [1, 2]},
        "ad-psgd-artifact": {"degree": [2, 5], "backlog": [1, None]},
        "divshare": {
            "fraction": [0.2, 0.5, 1.0],
            "recipients": [None, 1],
            "queue": ["drop", "keep"],
            "recipients_from": ["all", "neighbors"],
            "backlog": [1, None],
        },
        "epidemic-local": {"degree": [1, 2]},
        "epidemic-oracle": {"degree": [2]},
        "gossip-learning": {"merge": ["each", "all"], "period_s": [None, 0.05], "local_steps": [1, 2]},
        "relay-sum": {"tree": ["spanning"]},
        "swift": {"memory": ["stored", "fresh"], "average_every": [1, 3], "local_steps": [1, 2]},
        "swift-artifact": {"recipients": [None, 1], "backlog": [1, None]},
    }
    return {"name": name, **{field: rng.choice(values) for field, values in options.get(name, {}).items()}}


def scenario(name: str, number: int, folder: Path) -> Experiment:
    rng = random.Random(f"{name} {number}")
    nodes = rng.randint(3, 8)
    graph = nx.random_labeled_tree(nodes, seed=number)
    graph.add_edges_from(nx.gnp_random_graph(nodes, rng.choice([0.0, 0.3, 1.0]), seed=number).edges)
    edges = folder / f"{name}-{number}.txt"
    edges.write_text("".join(f"{i} {j}\n" for i, j in graph.edges))
    durations = [rng.choice([0.01, 0.015, 0.02, 0.1]) for _ in range(nodes)]
    stop = rng.choice([{"rounds": rng.randint(1, 4)}, {"time_s": 0.07}, {"rounds": 3, "time_s": 0.05}])
    network: dict[str, Any] = {
        "sharing": rng.choice(["fifo", "fair", "rtt-fair"]),
        "latency_s": rng.choice([0.0, 0.005, 0.2]),
        "jitter_s": rng.choice([0.0, 0.01]),
        "loss": rng.choice([0.0, 0.0, 0.1, 0.7]),
        "bandwidth_mbps": rng.choice([None, 1.0, 0.01]),
    }
    return Experiment.of(
        {
            "seed": number,
            "nodes": nodes,
            "task": {"name": "least-squares", "features": 6, "samples": 2 * nodes, "test_samples": 1},
            "topology": {"name": "edge-list", "path": str(edges)},
            "algorithm": algorithm(name, rng, nodes),
            "compute": Uneven(durations=durations),
            "network": rng.choice(
                [
                    Uniform(**network),
                    Flickering(**network, period_s=rng.choice([0.004, 0.03]), gone=rng.choice([0.1, 0.6])),
                ]
            )
            if BEARS_LOSS[name]
            else Uniform(**{**network, "loss": 0.0}),
            # Without a timeout, who gathers waits for ever for what is lost.
            "gather": {"timeout_s": rng.choice([0.02, 0.3]) if GATHERS[name] else None},
            "wrappers": rng.choice([[], [Lossy(loss=0.1)], [Lossy(loss=0.7)]]),
            "evaluation": {"every_rounds": None},
            "stop": stop,
            "engine": {"name": "simulate", "trainer": "sequential", "workers": 1},
        }
    )


def unchanged(trainer: SequentialTrainer, jobs: Sequence[TrainJob]) -> list[TrainResult]:
    """What is learned does not matter here, and takes most of the time."""
    return [TrainResult(job.start, job.state, 0.0) for job in jobs]


def play(experiment: Experiment, folder: Path) -> Outcome:
    """The run without its record, and without judging what it learned."""
    with (
        mock.patch.object(SequentialTrainer, "train", unchanged),
        mock.patch.object(Evaluator, "test", return_value={}),
        mock.patch("gc.freeze"),
        Segment(folder / "metrics") as metrics,
        Segment(folder / "graphs") as graphs,
    ):
        return Simulation(prepare(experiment), metrics, graphs, Silent()).run()


def check(name: str, numbers: range, folder: Path) -> None:
    for number in numbers:
        experiment = scenario(name, number, folder)
        outcome = play(experiment, folder)
        assert outcome.failure is None, (number, outcome.failure)
        rules = {"rounds": experiment.stop.rounds, "time": experiment.stop.time_s}
        assert rules[outcome.reason] is not None, number


@pytest.mark.parametrize("name", GATHERS)
def test_every_run_ends_by_its_stop_rule(tmp_path: Path, name: str) -> None:
    check(name, range(8), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("name", GATHERS)
def test_thousands_of_runs_end_by_their_stop_rules(tmp_path: Path, name: str) -> None:
    check(name, range(8, 608), tmp_path)


def test_the_algorithms_are_known() -> None:
    """A new one is tested here by itself."""
    asynchronous = {name for name, gathers in GATHERS.items() if not gathers}
    assert {"ad-psgd", "ad-psgd-artifact", "divshare", "swift", "swift-artifact"} <= asynchronous
    assert {"d-psgd", "gradient-tracking", "relay-sum", "sgp"} <= GATHERS.keys() - asynchronous
