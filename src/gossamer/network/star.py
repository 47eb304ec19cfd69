"""A star: each node has a link of its own to a centre without limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from jaxtyping import Float
from pydantic import Field, NonNegativeFloat, PositiveFloat

from gossamer.config.registry import register
from gossamer.network.network import BYTES_PER_MEGABIT, Conditions, Network, Path
from gossamer.network.nodes import for_each

Probability = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, eq=False)
class Spokes(Conditions):
    """Nodes whose own links are all that limits, delays and loses messages: what two of them do adds up.

    Args:
        rates: uplinks, then downlinks, bytes a second, float64 [2 nodes].
        latency_s: of each node's link, seconds, float64 [nodes]; as ``jitter_s`` (variances add up) and ``loss``.
    """

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
    """Each parameter is about a node's own link: one value for all nodes, or a list with one for each.

    A message crosses two links. Their latencies add up, and so do the variances of their jitter; it survives both or is
    lost.

    Args:
        uplink_mbps: towards the centre, 10^6 bits a second; null is unlimited.
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
