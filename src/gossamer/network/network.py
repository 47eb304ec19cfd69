"""Networks: what links do to a message. The description; an engine carries it out.

A network is a set of links, each with a rate, and a path for each pair of nodes: the links that a message crosses,
how long its first bit is under way, and how likely it is lost. Link r is node r's uplink and link n + r its downlink;
links from 2 n on lie between them. All of it may change with time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float
from pydantic import Field

from gossamer.config.registry import Component, register

BYTES_PER_MEGABIT = 125_000

Sharing = Literal["fifo", "in-turn", "fair", "rtt-fair"]


@dataclass(frozen=True, slots=True)
class Path:
    """What a message meets on its way from one node to another.

    Args:
        links: numbers of the links that it crosses, in order; its sender's uplink first, its receiver's downlink last.
        latency_s: seconds from the first bit's departure to its arrival.
        jitter_s: standard deviation of the latency, which is normal and never below 0. It's drawn for each message;
            messages of one pair of nodes don't overtake each other.
        loss: probability that a message is lost; it takes its time on the sender's uplink all the same.
        rate: bytes a second that a transfer can have here at most, whatever else goes on.
    """

    links: tuple[int, ...]
    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    rate: float = math.inf


class Conditions(ABC):
    """A network as it is from one change to the next.

    Attributes:
        rates: bytes a second of every link, float64 [links]; ``math.inf`` is unlimited.
    """

    rates: Float[np.ndarray, " links"]

    @abstractmethod
    def path(self, source: int, to: int) -> Path | None:
        """The path from one node to another; None where there is none (the message is lost)."""

    def common_latency(self) -> float | None:
        """The latency, where it's the same for all pairs and nothing else delays or loses a message; else None."""
        return None

    def loses(self, nodes: int) -> bool:
        """Whether a message from one node to another may be lost. The default asks every path."""
        if self.common_latency() is not None:
            return False
        paths = (self.path(source, to) for source in range(nodes) for to in range(nodes) if source != to)
        return any(path is None or path.loss > 0 for path in paths)


@dataclass(frozen=True, eq=False)
class Access(Conditions):
    """Nodes whose uplinks and downlinks are all that limits them, at the same distance from each other.

    Args:
        rates: uplinks, then downlinks, bytes a second, float64 [2 nodes].
        latency_s: see :class:`Path`, as are ``jitter_s`` and ``loss``.
    """

    rates: Float[np.ndarray, " links"]
    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0

    def path(self, source: int, to: int) -> Path | None:
        links = (source, len(self.rates) // 2 + to)
        return Path(links, self.latency_s, self.jitter_s, self.loss)

    def common_latency(self) -> float | None:
        return self.latency_s if self.jitter_s == self.loss == 0 else None

    def loses(self, nodes: int) -> bool:
        return self.loss > 0


class Network(Component):
    """What a message meets between nodes.

    Args:
        sharing: how transfers share links. "fifo": a node sends one message at a time, whoever it's for, and receives
            one at a time, first come first served; a link between them limits the rate of a transfer, and isn't
            shared. "in-turn": a node sends one message at a time, whoever it's for; what all nodes are sending shares all
            links max-min fairly, and a slow receiver holds its senders back. "fair": each pair of nodes has one
            connection, on which messages follow one another; all connections at once share all links max-min fairly.
            "rtt-fair": the same, in proportion to the inverse of a path's round-trip time, as TCP does and Kollaps
            assumes.
    """

    sharing: Sharing = "fifo"

    @abstractmethod
    def conditions(self, nodes: int, seed: int) -> Conditions:
        """The network as it is at the start.

        Raises:
            BadInput: for a description that doesn't fit so many nodes; names the field.
        """

    def changes(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        """What becomes of it: seconds since the start, ascending, and the network from then on. May be endless."""
        return iter(())

    def loses(self, nodes: int, seed: int) -> bool:
        """Whether messages can be lost on it. The default is True for one that changes, since a path may vanish; a
        network whose changes leave all paths as they are says so."""
        return self.conditions(nodes, seed).loses(nodes) or next(self.changes(nodes, seed), None) is not None


class Changing(Network):
    """A network that is described by its course. A subclass says what that is."""

    def conditions(self, nodes: int, seed: int) -> Conditions:
        return next(self._course(nodes, seed))[1]

    def changes(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        course = self._course(nodes, seed)
        next(course)
        return course

    @abstractmethod
    def _course(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        """The network at the start, and after each change; seconds ascend from 0."""


@register("network", "uniform")
class Uniform(Network):
    """The same latency between all pairs, the same bandwidth at all nodes.

    Args:
        latency_s: one-way delay of every pair, seconds.
        jitter_s: standard deviation of the delay, seconds.
        loss: probability that a message is lost.
        bandwidth_mbps: uplink and downlink of every node, 10^6 bits a second; null is unlimited.
        uplink_mbps: the uplink alone, in place of ``bandwidth_mbps``.
        downlink_mbps: the downlink alone, in place of ``bandwidth_mbps``.
    """

    latency_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    jitter_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    loss: float = Field(default=0.0, ge=0, lt=1)
    bandwidth_mbps: float | None = Field(default=None, gt=0)
    uplink_mbps: float | None = Field(default=None, gt=0)
    downlink_mbps: float | None = Field(default=None, gt=0)

    def conditions(self, nodes: int, seed: int) -> Conditions:
        up = bytes_per_second(self.bandwidth_mbps if self.uplink_mbps is None else self.uplink_mbps)
        down = bytes_per_second(self.bandwidth_mbps if self.downlink_mbps is None else self.downlink_mbps)
        rates = np.repeat(np.array([up, down]), nodes)
        return Access(rates, self.latency_s, self.jitter_s, self.loss)


def bytes_per_second(mbps: float | None) -> float:
    """The rate of so many 10^6 bits a second; None is unlimited."""
    return math.inf if mbps is None else mbps * BYTES_PER_MEGABIT
