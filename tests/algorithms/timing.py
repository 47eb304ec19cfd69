"""Least squares on heterogeneous data, hand-made step times, and wrappers that record the messages of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from gossamer import Experiment, Message, Node, NodeWrapper, Run, run
from gossamer.messages.tags import Payload
from gossamer.network import ComputeProfile
from gossamer.runtime.setup import prepare


class Table(ComputeProfile):
    """Step k of node i takes seconds_of[i][k modulo the row's length]."""

    seconds_of: list[list[float]]

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        row = self.seconds_of[rank]
        return row[step % len(row)]


sent: list[tuple[float, int, int, Payload]] = []
"""(seconds, source, to, payload) of every message since :func:`clear`."""
arrived: list[Message] = []
"""Every message received since then."""


class Window(NodeWrapper):
    """Records outgoing and incoming messages in the lists above."""

    def outgoing(self, node: Node, to: int, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
        sent.append((node.now(), node.rank, to, payload))
        return payload

    def incoming(self, node: Node, message: Message) -> Message:
        arrived.append(message)
        return message


class Lossy(NodeWrapper):
    """Drops about every fifth incoming message."""

    def incoming(self, node: Node, message: Message) -> Message | None:
        if node.rng("lossy", message.source, int(message.tag[-1])).random() < 0.2:
            return None
        arrived.append(message)
        return message


def clear() -> None:
    """Forget all messages."""
    sent.clear()
    arrived.clear()


def least_squares(nodes: int, rounds: int, **changes: Any) -> Experiment:
    """Least squares with five parameters and full batches on heterogeneous data: the nodes hold unequal shares."""
    shares = np.arange(1.0, nodes + 1)
    settings: dict[str, Any] = {
        "nodes": nodes,
        "seed": 4,
        "task": {
            "name": "least-squares",
            "features": 5,
            "samples": 20 * nodes,
            "noise": 0.5,
            "test_samples": 5,
        },
        "partition": {"name": "sizes", "fractions": (shares / shares.sum()).tolist()},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "batch_size": "full",
        "initial": "independent",
        "evaluation": {"every_rounds": None, "of": "instant"},
        "engine": {"name": "simulate", "trainer": "sequential"},
        "stop": {"rounds": rounds},
    }
    return Experiment.of({**settings, **changes})


def play(experiment: Experiment, out: Path) -> Run:
    return run(experiment, out)


class Data:
    """The data and the initial models of an experiment's nodes, in double precision."""

    def __init__(self, experiment: Experiment) -> None:
        setup = prepare(experiment)
        inputs, targets = (tensor.double().numpy() for tensor in setup.task.train)
        self._parts = [(inputs[part], targets[part, 0]) for part in setup.parts]
        self.initial: Float[np.ndarray, "nodes params"] = np.stack(
            [wide(setup.initial(rank).parameters) for rank in range(experiment.nodes)]
        )

    def gradient(self, rank: int, x: Float[np.ndarray, " params"]) -> Float[np.ndarray, " params"]:
        """Gradient of half the mean squared residual at one node."""
        A, b = self._parts[rank]
        return np.asarray(A.T @ (A @ x - b) / len(b))

    @property
    def optimum(self) -> Float[np.ndarray, " params"]:
        """Minimizer of the mean of the nodes' losses, each node counting once."""
        H = sum(A.T @ A / len(b) for A, b in self._parts)
        v = sum(A.T @ b / len(b) for A, b in self._parts)
        return np.asarray(np.linalg.solve(H, v))


def wide(v: Tensor) -> Float[np.ndarray, "..."]:
    """A tensor in double precision."""
    return v.double().numpy()
