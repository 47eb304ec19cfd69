"""What is recorded, and when: the same under every engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from gossamer.engines.setup import Setup
from gossamer.experiment import Target
from gossamer.learning.evaluate import Evaluator
from gossamer.messages import Model, Traffic
from gossamer.node import Node
from gossamer.results.recorder import consensus_distance

NETWORK = -1
"""The node number of rows about the network as a whole."""


class Observer(Protocol):
    """Who watches a run (a progress display)."""

    def start(self, description: Mapping[str, Any]) -> None:
        """The run starts; see ``Setup.description``."""

    def progress(self, rounds: int, time_s: float) -> None:
        """All nodes together have completed so many rounds by this time of the engine's clock."""

    def row(self, row: Mapping[str, Any]) -> None:
        """A row was recorded."""

    def say(self, text: str) -> None:
        """Something a user may want to know."""


def is_due(setup: Setup, rounds: int) -> bool:
    """Whether a node that has completed this many rounds is recorded: before the first, every so many, after the last."""
    every, last = setup.experiment.evaluation.every_rounds, setup.experiment.stop.rounds
    return every is not None and (rounds % every == 0 or rounds == last)


def node_row(
    node: Node, traffic: Traffic, time_s: float, wall_s: float, test: Mapping[str, float] | None
) -> dict[str, Any]:
    """One node's row; takes the losses and the recorded values that have gathered since the last one."""
    losses, columns = node.losses, node.columns
    node.losses, node.columns = [], {}
    return {
        "node": node.rank,
        "round": node.round,
        "step": node.step,
        "time_s": time_s,
        "wall_s": wall_s,
        "train_loss": math.fsum(losses) / len(losses) if losses else None,
        **{f"test_{name}": value for name, value in (test or {}).items()},
        "bytes_sent": traffic.bytes_sent,
        "bytes_received": traffic.bytes_received,
        "messages_sent": traffic.messages_sent,
        "messages_lost": traffic.messages_lost,
        "messages_late": traffic.messages_late,
        **columns,
    }


class NetworkRows:
    """Rows about all judged nodes together: consensus distance, and the average model's metrics if asked for.

    A row is complete when every judged node has given its snapshot for the same moment (its own round r, or a common instant).

    Args:
        setup: says who is judged and what is asked for.
        evaluator: judges the average model.
    """

    def __init__(self, setup: Setup, evaluator: Evaluator) -> None:
        self._judged = set(setup.judged)
        self._average = setup.experiment.evaluation.nodes == "average"
        self._evaluator = evaluator
        self._snapshots: dict[Any, dict[int, Model]] = {}

    def add(self, moment: Any, node: Mapping[str, Any], model: Model) -> dict[str, Any] | None:
        """Take a node's row and snapshot; gives the network's row when it is the last one."""
        rank = node["node"]
        if rank not in self._judged:
            return None
        snapshots = self._snapshots.setdefault(moment, {})
        snapshots[rank] = model
        if len(snapshots) < len(self._judged):
            return None
        del self._snapshots[moment]
        models = [snapshots[rank] for rank in sorted(snapshots)]
        parameters = torch.stack([model.parameters for model in models])
        row: dict[str, Any] = {
            "node": NETWORK,
            "round": node["round"],
            "time_s": node["time_s"],
            "wall_s": node["wall_s"],
            "consensus_distance": consensus_distance(parameters),
        }
        if self._average:
            average = Model(parameters.mean(0), torch.stack([model.buffers for model in models]).mean(0))
            row |= {f"test_{name}": value for name, value in self._evaluator.test(average).items()}
        return row


class TargetWatch:
    """Watches for ``stop.target``: the mean over evaluated nodes (or the network's row) at one evaluation.

    Args:
        target: metric and level; a metric whose name speaks of a loss or distance must fall to it, any other rise.
        expected: how many nodes report the metric at an evaluation.
    """

    def __init__(self, target: Target | None, expected: int) -> None:
        self._target, self._expected = target, expected
        self._values: dict[Any, list[float]] = {}

    def reached(self, moment: Any, row: Mapping[str, Any]) -> bool:
        """Take a row; whether it completes an evaluation at which the target is met."""
        if self._target is None or row.get(self._target.metric) is None:
            return False
        values = self._values.setdefault(moment, [])
        values.append(float(row[self._target.metric]))
        if len(values) < (1 if row["node"] == NETWORK else self._expected):
            return False
        del self._values[moment]
        mean = math.fsum(values) / len(values)
        falling = "loss" in self._target.metric or "distance" in self._target.metric
        return mean <= self._target.value if falling else mean >= self._target.value


def expected_reports(setup: Setup) -> int:
    """How many nodes report the target's metric at an evaluation."""
    target = setup.experiment.stop.target
    return len(setup.judged if target is not None and target.metric == "train_loss" else setup.evaluated)


def stacked(models: list[Model]) -> tuple[Tensor, Tensor | None]:
    """All nodes' parameters [nodes, P], and buffers [nodes, B] where there are any."""
    parameters = torch.stack([model.parameters for model in models])
    buffers = torch.stack([model.buffers for model in models])
    return parameters, buffers if buffers.shape[1] else None


def stopwatch() -> Callable[[], float]:
    """Real seconds since this call."""
    start = time.perf_counter()
    return lambda: time.perf_counter() - start
