"""A scene of a few nodes, their links, and the messages that arrive. A byte takes a microsecond (1,000 ns) at 8 Mbit/s."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np

from gossamer.messages import wire_bytes
from gossamer.messages.tags import Message
from gossamer.network import Conditions, Network, Path, UniformNetwork
from gossamer.runtime.simulate.core import Core, Deadlock, Order
from gossamer.runtime.simulate.fair import FairLinks
from gossamer.runtime.simulate.fifo import FifoLinks

TAG = ("t",)
US = 1000
"""Nanoseconds."""
BYTE = 1000
"""Nanoseconds, at 8 Mbit/s."""
SHARINGS = ("fifo", "in-turn", "fair", "rtt-fair")


def size(payload: Any) -> int:
    return wire_bytes(TAG, payload)


def of_size(wire: int) -> int:
    """The length of a payload whose message has this size on the wire."""
    length = wire - (size(bytes(wire)) - wire)
    while size(bytes(length)) < wire:
        length += 1
    assert size(bytes(length)) == wire
    return length


class Map(Conditions):
    """Conditions set by the test: rates in Mbit/s, and a path for each pair."""

    def __init__(self, mbps: list[float], path: Callable[[int, int], Path | None]) -> None:
        self.rates = np.array(mbps) * 125_000.0
        self._path = path

    def path(self, source: int, to: int) -> Path | None:
        return self._path(source, to)


def star(nodes: int, mbps: float | list[float] = 8.0, **path: Any) -> Map:
    """Uplinks and downlinks; all paths have the same properties."""
    rates = mbps if isinstance(mbps, list) else [mbps] * (2 * nodes)
    return Map(rates, lambda source, to: Path((source, nodes + to), **path))


class Drawn(Network):
    """A network set by the test: its first conditions, and its changes."""

    first: Any
    then: Any = ()

    def conditions(self, nodes: int, seed: int) -> Conditions:
        return self.first

    def changes(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        return iter(self.then)


class Scene:
    """The links of some nodes. Arrivals are noted as (receiver, sender, nanoseconds, length of the payload)."""

    def __init__(self, nodes: int = 4, drawn: Network | None = None, seed: int = 1, **network: Any) -> None:
        self.core = Core()
        self.arrived: list[tuple[int, int, int, int]] = []
        self.watched: list[tuple[int, int, int, int, int]] = []
        network_ = drawn or UniformNetwork(**network)
        kind = FifoLinks if network_.sharing == "fifo" else FairLinks
        self.links = kind(self.core, network_, nodes, seed, 2**40, self._arrive, self._watch)

    def _watch(self, source: int, to: int, start_s: float, end_s: float, nbytes: int) -> None:
        self.watched.append((source, to, round(start_s * 1e9), round(end_s * 1e9), nbytes))

    def busy(self, rank: int) -> tuple[float | None, float | None]:
        return self.links.busy_seconds(rank, self.links.traffic(rank))

    def _arrive(self, to: int, message: Message) -> None:
        self.arrived.append((to, message.source, self.core.now_ns, len(message.payload)))

    def send(self, source: int, to: int, length: int) -> Any:
        return self.links.send(source, (to,), bytes(length), TAG)[0]

    def at(self, ns: int, call: Callable[[], Any]) -> None:
        self.core.at(ns, Order.TIMER, 0, call)

    def play(self) -> list[tuple[int, int, int, int]]:
        try:
            while True:
                self.core.advance()
        except Deadlock:
            return self.arrived

    def live(self, play: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine on the scene's core."""
        self.core.run(play())
