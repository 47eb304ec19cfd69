"""Networks that are limited by the nodes' own links only: uniform, stragglers, star."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from jaxtyping import Float
from pydantic import Field, NonNegativeFloat, PositiveFloat

from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.network.network import BYTES_PER_MEGABIT, Conditions, Network, Path, bytes_per_second
from gossamer.network.nodes import SomeNodes, for_each
from gossamer.randomness import generator

Probability = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, eq=False)
class Access(Conditions):
    """Nodes with uplinks and downlinks, bytes per second, float64 [2 nodes], and the same latency, jitter and loss between
    all pairs. ``delays_s`` of the nodes' own links, float64 [nodes], are added to the latency."""

    rates: Float[np.ndarray, " links"]
    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    delays_s: Float[np.ndarray, " nodes"] | None = None

    def path(self, source: int, to: int) -> Path | None:
        links, latency_s = (source, len(self.rates) // 2 + to), self.latency_s
        if self.delays_s is not None:
            latency_s += float(self.delays_s[source] + self.delays_s[to])
        return Path(links, latency_s, self.jitter_s, self.loss)

    def common_latency(self) -> float | None:
        varies = self.jitter_s or self.loss or (self.delays_s is not None and self.delays_s.any())
        return None if varies else self.latency_s

    def loses(self, nodes: int) -> bool:
        return self.loss > 0


@register("network", "uniform")
class Uniform(Network):
    """The same latency between all pairs, the same bandwidth at all nodes."""

    latency_s: NonNegativeFloat = 0.0  # one-way delay of every pair, seconds
    jitter_s: NonNegativeFloat = 0.0  # standard deviation of the delay, seconds
    loss: Probability = 0.0  # probability that a message is lost
    # Uplink and downlink of every node, 10^6 bits per second; null is unlimited.
    bandwidth_mbps: PositiveFloat | None = None
    uplink_mbps: PositiveFloat | None = None  # the uplink, in place of bandwidth_mbps
    downlink_mbps: PositiveFloat | None = None  # the downlink, in place of bandwidth_mbps

    def conditions(self, nodes: int, seed: int) -> Conditions:
        up = bytes_per_second(self.bandwidth_mbps if self.uplink_mbps is None else self.uplink_mbps)
        down = bytes_per_second(self.bandwidth_mbps if self.downlink_mbps is None else self.downlink_mbps)
        rates = np.repeat(np.array([up, down]), nodes)
        return Access(rates, self.latency_s, self.jitter_s, self.loss)


@register("network", "stragglers")
class Stragglers(Uniform, SomeNodes):
    """Like ``uniform``, but the bandwidth of some nodes is divided by ``factor``, with a normal deviation.

    DivShare's experiments, as published, use ``bandwidth_mbps: 60, factor: 5, spread_mbps: 1``, with the stragglers at the
    first ranks. The stragglers are chosen by ``count``, ``fraction`` or ``ranks``.
    """

    factor: PositiveFloat = 5.0  # divisor of a straggler's bandwidth
    # Standard deviation of a straggler's bandwidth, 10^6 bits per second; drawn once per node for uplink and downlink
    # together, and drawn again if no bandwidth would be left.
    spread_mbps: NonNegativeFloat = 0.0

    def conditions(self, nodes: int, seed: int) -> Conditions:
        links = super().conditions(nodes, seed).rates.reshape(2, nodes)  # uplinks and downlinks
        if not np.isfinite(links).any():
            raise BadInput("network.bandwidth_mbps: null; accepted: a bandwidth for network.factor to divide")
        for rank in self.chosen(nodes, seed, "network"):
            rng, mean = generator(seed, "network.spread", rank), links[:, rank] / self.factor
            links[:, rank] = 0
            while (links[:, rank] <= 0).any():
                links[:, rank] = mean + self.spread_mbps * BYTES_PER_MEGABIT * rng.standard_normal()
        return Access(links.ravel(), self.latency_s, self.jitter_s, self.loss)


@dataclass(frozen=True, eq=False)
class Spokes(Conditions):
    """Nodes around a centre without limits; latency, jitter and loss are those of each node's link."""

    rates: Float[np.ndarray, " links"]
    latency_s: Float[np.ndarray, " nodes"]
    jitter_s: Float[np.ndarray, " nodes"]
    loss: Float[np.ndarray, " nodes"]

    def path(self, source: int, to: int) -> Path | None:
        return Path(
            (source, len(self.latency_s) + to),
            float(self.latency_s[source] + self.latency_s[to]),
            math.hypot(self.jitter_s[source], self.jitter_s[to]),
            float(1 - (1 - self.loss[source]) * (1 - self.loss[to])),
        )

    def common_latency(self) -> float | None:
        if np.ptp(self.latency_s) or self.jitter_s.any() or self.loss.any():
            return None
        return 2 * float(self.latency_s[0])

    def loses(self, nodes: int) -> bool:
        return bool(self.loss.any())


@register("network", "star")
class Star(Network):
    """A link for each node to a centre. Each parameter is one value for all nodes, or a list with one for each.

    A message crosses two links: their latencies add up, and so do the variances of their jitter; either may lose it.
    """

    # Towards the centre, 10^6 bits per second; null is unlimited.
    uplink_mbps: PositiveFloat | tuple[PositiveFloat, ...] | None = None
    # From the centre; null is unlimited.
    downlink_mbps: PositiveFloat | tuple[PositiveFloat, ...] | None = None
    latency_s: NonNegativeFloat | tuple[NonNegativeFloat, ...] = 0.0  # delay of a link, seconds
    # Standard deviation of the delay, seconds.
    jitter_s: NonNegativeFloat | tuple[NonNegativeFloat, ...] = 0.0
    loss: Probability | tuple[Probability, ...] = 0.0  # probability that a link loses a message

    def conditions(self, nodes: int, seed: int) -> Conditions:
        up, down, latency_s, jitter_s, loss = (
            for_each(getattr(self, field), nodes, f"network.{field}")
            for field in ("uplink_mbps", "downlink_mbps", "latency_s", "jitter_s", "loss")
        )
        return Spokes(BYTES_PER_MEGABIT * np.concatenate([up, down]), latency_s, jitter_s, loss)
