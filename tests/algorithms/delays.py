"""Hand-made schedules: a duration for every step and every pair of nodes, and an independent model to compare with.

The components for an experiment share no code with :class:`World`, in which a test models an algorithm in NumPy and
float64.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

import gossamer
from gossamer import Experiment, Node, NodeWrapper, Run
from gossamer.messages.tags import Payload
from gossamer.network import ComputeProfile, Conditions, Network
from gossamer.network import Path as NetworkPath
from gossamer.runtime.setup import prepare

Array = NDArray[np.float64]
LR = 0.1
FEATURES = 12
DOWNLINK = 60_000.0
"""Bytes per second: fast, but messages that queue for the downlink still arrive one after the other."""

# --- components of an experiment


class Steps(ComputeProfile):
    """Step k of node i takes durations[i][k modulo the row's length]."""

    durations: list[list[float]]

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        return self.durations[rank][step % len(self.durations[rank])]


class _Pairs(Conditions):
    def __init__(self, latency: list[list[float]], rates: Float[np.ndarray, " links"]) -> None:
        self.latency, self.rates = latency, rates

    def path(self, source: int, to: int) -> NetworkPath | None:
        return NetworkPath((source, len(self.latency) + to), self.latency[source][to])


class Pairs(Network):
    """A latency for every (source, to), and bytes per second for every uplink (None: all links are unlimited)."""

    latency_s: list[list[float]]
    uplink: list[float] | None = None

    def conditions(self, nodes: int, seed: int) -> Conditions:
        rates = np.full(2 * nodes, np.inf)
        if self.uplink is not None:
            rates[:nodes], rates[nodes:] = self.uplink, DOWNLINK
        return _Pairs(self.latency_s, rates)


_sent: list[list[tuple[int, tuple[str | int, ...], int, int]]] = []


class Postbook(NodeWrapper):
    """Records (source, tag, to, the source's round) of every message."""

    number: int

    def outgoing(self, node: Node, to: int, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
        _sent[self.number].append((node.rank, tag, to, node.round))
        return payload


Sent = list[tuple[int, tuple[str | int, ...], int, int]]


def experiment(
    algorithm: Any,
    seconds: list[list[float]],
    latency: list[list[float]],
    uplink: list[float] | None = None,
    **more: Any,
) -> Experiment:
    """Least squares with full batches, under these delays."""
    nodes = len(seconds)
    return Experiment.of(
        {
            "seed": 4,
            "nodes": nodes,
            "task": {
                "name": "least-squares",
                "features": FEATURES,
                "samples": 9 * nodes,
                "noise": 0.5,
                "test_samples": 2,
            },
            "topology": "complete",
            "algorithm": algorithm,
            "optimizer": {"name": "sgd", "lr": LR},
            "batch_size": "full",
            "initial": "independent",
            "compute": Steps(durations=seconds),
            "network": Pairs(latency_s=latency, uplink=uplink),
            "evaluation": {"every_rounds": None, "of": "instant"},
            "engine": {"name": "simulate", "trainer": "sequential", "workers": 1},
            **more,
        }
    )


def play(described: Experiment, out: Path) -> tuple[Run, Sent]:
    """The run, and its messages in the order of sending."""
    _sent.append([])
    noted = described.model_copy(update={"wrappers": (Postbook(number=len(_sent) - 1),)})
    return gossamer.run(noted, out, command=["test"]), _sent[-1]


# --- the model


class Learner:
    """One node's 1/(2n) ||A x - b||^2, and gradient descent on it."""

    def __init__(self, A: Array, b: Array) -> None:
        self.A, self.b = A, b

    def descend(self, x: Array, steps: int = 1) -> Array:
        for _ in range(steps):
            x = x - LR * self.A.T @ (self.A @ x - self.b) / len(self.b)
        return x


class World:
    """Processes in time. A process is a generator that yields the seconds until it continues.

    Attributes:
        now: seconds.
        X: the models, one row per node [nodes, params].
        learners: the nodes' data and gradient descent on it.
    """

    def __init__(self, described: Experiment) -> None:
        setup = prepare(described)
        inputs, targets = (tensor.double().numpy() for tensor in setup.task.train)
        self.learners = [Learner(inputs[part], targets[part, 0]) for part in setup.parts]
        self.X = np.stack(
            [setup.initial(rank).parameters.double().numpy() for rank in range(described.nodes)]
        )
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), call))

    def start(self, process: Iterator[float]) -> None:
        for seconds in process:
            self.after(seconds, partial(self.start, process))
            return

    def run(self, until: float) -> Array:
        """The models at that time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            call()
        return self.X


@dataclass(eq=False)
class Parcel:
    """A message in flight: on its sender's uplink from start to end, delivered at :meth:`through`."""

    size: float
    start: float
    end: float
    latency: float
    deliver: Callable[[], None]
    dropped: bool = False
    done: bool = False
    before: Parcel | None = None  # at the same receiver

    def through(self) -> float:
        free = 0.0 if self.before is None or self.before.done else self.before.through()
        return max(max(self.start + self.latency, free) + self.size / DOWNLINK, self.end + self.latency)


class Wires:
    """Uplinks with one rate each and downlinks of ``DOWNLINK``, which carry one message at a time. (Where uplinks are
    unlimited, so are downlinks.)"""

    def __init__(self, world: World, rates: list[float]) -> None:
        self._world, self._rates = world, rates
        self._sent: list[list[Parcel]] = [[] for _ in rates]
        self._coming: list[list[Parcel]] = [[] for _ in rates]

    def send(self, source: int, to: int, size: int, latency: float, deliver: Callable[[], None]) -> Parcel:
        now = self._world.now
        start = max([now, *(parcel.end for parcel in self._sent[source][-1:])])
        rate = self._rates[source]
        parcel = Parcel(0.0 if np.isinf(rate) else size, start, start + size / rate, latency, deliver)
        self._sent[source].append(parcel)
        self._world.after(start + latency - now, lambda: self._first_bit(parcel, to))
        return parcel

    def drop(self, source: int) -> int:
        """Cancel the messages that have not left completely, and return their number."""
        now = self._world.now
        late = [parcel for parcel in self._sent[source] if parcel.end > now]
        for parcel in late:
            parcel.size *= max(now - parcel.start, 0) / (parcel.end - parcel.start)
            parcel.dropped, parcel.end = True, now
            parcel.done = parcel.size == 0  # none of it arrives
        self._sent[source] = []
        for coming in self._coming:
            for parcel in coming:
                self._look(parcel)
        return len(late)

    def _first_bit(self, parcel: Parcel, to: int) -> None:
        if not parcel.done:
            waiting = [other for other in self._coming[to] if not other.done]
            parcel.before = waiting[-1] if waiting else None
            self._coming[to] = [*waiting, parcel]
            self._look(parcel)

    def _look(self, parcel: Parcel) -> None:
        """Deliver the parcel if it is through, otherwise check again when it may be."""
        if parcel.done:
            return
        left = parcel.through() - self._world.now
        if left > 1e-9:
            self._world.after(left, lambda: self._look(parcel))
            return
        parcel.done = True
        if not parcel.dropped:
            parcel.deliver()
