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
    """The same latency between all pairs, the same bandwidth at all nodes.

    Args:
        latency_s: one-way delay of every pair, seconds.
        jitter_s: standard deviation of the delay, seconds.
        loss: probability that a message is lost.
        bandwidth_mbps: uplink and downlink of every node, 10^6 bits per second; null is unlimited.
        uplink_mbps: the uplink, in place of ``bandwidth_mbps``.
        downlink_mbps: the downlink, in place of ``bandwidth_mbps``.
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


@register("network", "stragglers")
class Stragglers(Uniform, SomeNodes):
    """Like ``uniform``, but the bandwidth of some nodes is divided by ``factor``, with a normal deviation.

    DivShare's experiments, as published, use ``bandwidth_mbps: 60, factor: 5, spread_mbps: 1``, with the stragglers at the
    first ranks.

    Args:
        factor: divisor of a straggler's bandwidth.
        spread_mbps: standard deviation of a straggler's bandwidth, 10^6 bits per second; drawn once per node for uplink
            and downlink together, and drawn again if no bandwidth would be left.
        count: number of stragglers, or ``fraction`` of the nodes, or their ``ranks``; the rest as in :class:`Uniform`.
    """

    factor: PositiveFloat = 5.0
    spread_mbps: float = Field(default=0.0, ge=0)

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

    Args:
        uplink_mbps: towards the centre, 10^6 bits per second; null is unlimited.
        downlink_mbps: from the centre; null is unlimited.
        latency_s: delay of a link, seconds.
        jitter_s: standard deviation of the delay, seconds.
        loss: probability that a link loses a message.
    """

    uplink_mbps: PositiveFloat | tuple[PositiveFloat, ...] | None = None
    downlink_mbps: PositiveFloat | tuple[PositiveFloat, ...] | None = None
    latency_s: NonNegativeFloat | tuple[NonNegativeFloat, ...] = 0.0
    jitter_s: NonNegativeFloat | tuple[NonNegativeFloat, ...] = 0.0
    loss: Probability | tuple[Probability, ...] = 0.0

    def conditions(self, nodes: int, seed: int) -> Conditions:
        up, down, latency_s, jitter_s, loss = (
            for_each(getattr(self, field), nodes, f"network.{field}")
            for field in ("uplink_mbps", "downlink_mbps", "latency_s", "jitter_s", "loss")
        )
        return Spokes(BYTES_PER_MEGABIT * np.concatenate([up, down]), latency_s, jitter_s, loss)
