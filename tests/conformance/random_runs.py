"""Random environments for every algorithm: graphs, step times, latencies, bandwidths, ways to share links, losses and
vanishing paths; and short runs in them, without learning."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count, product
from pathlib import Path
from typing import Any
from unittest import mock

import networkx as nx

from gossamer import Experiment, Message, Node, NodeWrapper
from gossamer.config.registry import names
from gossamer.learning.evaluate import Evaluator
from gossamer.learning.trainer import SequentialTrainer, TrainJob, TrainResult
from gossamer.network import ComputeProfile, Conditions, UniformNetwork
from gossamer.network import Path as Route
from gossamer.results.observer import Observer
from gossamer.results.segment import Segment
from gossamer.runtime.outcome import Outcome
from gossamer.runtime.setup import prepare
from gossamer.runtime.simulate.simulation import Simulation

ALGORITHMS: dict[str, Any] = dict(sorted(names("algorithm").items()))
"""All algorithms, by name."""


class Uneven(ComputeProfile):
    """A fixed step time for each node."""

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


class Flickering(UniformNetwork):
    """Paths vanish and return, and rates change, every ``period_s``, without end."""

    period_s: float
    gone: float

    def changes(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        whole = self.conditions(nodes, seed)
        return ((turn * self.period_s, Broken(whole, nodes, seed, turn, self.gone)) for turn in count(1))


class Lossy(NodeWrapper):
    """Loses every message with the same probability, on any network."""

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
    """The algorithm with random options."""
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
        # (Without it, a ring of an even number of nodes is refused.)
        "d2": {"exact_diffusion": [True]},
        "epidemic-local": {"degree": [1, 2]},
        "epidemic-oracle": {"degree": [2]},
        "fedavg": {"client_fraction": [0.5, 1.0], "idle_s": [0.05, 0.2]},
        "gossip-learning": {"merge": ["each", "all"], "period_s": [None, 0.05], "local_steps": [1, 2]},
        "gossip-learning-on-receipt": {
            "create": ["rw", "mu", "um"],
            "period_s": [0.05],
            "local_steps": [1, 2],
        },
        "relay-sum": {"tree": ["spanning"]},
        "swift": {"memory": ["stored", "fresh"], "average_every": [1, 3], "local_steps": [1, 2]},
        "swift-artifact": {"recipients": [None, 1], "backlog": [1, None]},
    }
    chosen = {field: rng.choice(values) for field, values in options.get(name, {}).items()}
    if chosen.get("queue") == "drop":
        del chosen["backlog"]
    return {"name": name, **chosen}


def surroundings(
    name: str, number: int, nodes: int, folder: Path, *, lossless: bool, flickers: bool = True
) -> dict[str, Any]:
    """The fields of an experiment, without its stop rule.

    Args:
        name: the algorithm.
        number: the seed of all choices, together with the name.
        nodes: their number.
        folder: for the file of the graph.
        lossless: whether nothing is lost and gathering has no timeout; otherwise the network, and every node, may lose
            messages, unless the algorithm needs every one.
        flickers: whether paths may vanish so often that no long transfer succeeds, and a node may never hear from another.
    """
    lossless = lossless or ALGORITHMS[name].needs_every_message
    rng = random.Random(f"{name} {number}")
    graph = nx.random_labeled_tree(nodes, seed=number)
    graph.add_edges_from(nx.gnp_random_graph(nodes, rng.choice([0.0, 0.3, 1.0]), seed=number).edges)
    edges = folder / f"{name}-{number}.txt"
    edges.write_text("".join(f"{i} {j}\n" for i, j in graph.edges))
    links: dict[str, Any] = {
        "sharing": rng.choice(["fifo", "in-turn", "fair", "rtt-fair"]),
        "latency_s": rng.choice([0.0, 0.005, 0.2]),
        "jitter_s": rng.choice([0.0, 0.01]),
        "bandwidth_mbps": rng.choice([None, 1.0, 0.01]),
    }
    network = UniformNetwork(**links)
    if not lossless:
        links["loss"] = rng.choice([0.0, 0.0, 0.1, 0.7])
        period_s, gone = rng.choice([0.004, 0.03]), rng.choice([0.1, 0.6])
        network = rng.choice(
            [
                UniformNetwork(**links),
                UniformNetwork(**links)
                if not flickers
                else Flickering(**links, period_s=period_s, gone=gone),
            ]
        )
    return {
        "seed": number,
        "nodes": nodes,
        "task": {"name": "least-squares", "features": 6, "samples": 2 * nodes, "test_samples": 1},
        "topology": {"name": "edge-list", "path": str(edges)},
        "algorithm": algorithm(name, rng, nodes),
        "compute": Uneven(durations=[rng.choice([0.01, 0.015, 0.02, 0.1]) for _ in range(nodes)]),
        "network": network,
        "gather": {"timeout_s": None if lossless else rng.choice([0.02, 0.3])},
        "wrappers": [] if lossless else rng.choice([[], [Lossy(loss=0.1)], [Lossy(loss=0.7)]]),
        "engine": {"name": "simulate", "trainer": "sequential", "workers": 1},
    }


def unchanged(trainer: SequentialTrainer, jobs: Sequence[TrainJob]) -> list[TrainResult]:
    """Skip training, which would take most of the time."""
    return [TrainResult(job.start, job.state, 0.0) for job in jobs]


def play(experiment: Experiment, folder: Path) -> Outcome:
    """Run without training and evaluation; the record replaces the contents of the folder."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    with (
        mock.patch.object(SequentialTrainer, "train", unchanged),
        mock.patch.object(Evaluator, "test", return_value={}),
        mock.patch("gc.freeze"),
        Segment(folder / "metrics") as metrics,
        Segment(folder / "graphs") as graphs,
        Segment(folder / "events") as events,
    ):
        setup = prepare(experiment)
        return Simulation(setup, metrics, graphs, events, Observer()).run()
