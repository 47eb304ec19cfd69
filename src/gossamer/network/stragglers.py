"""A network with stragglers: nodes whose links are slower than the others'."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from pydantic import Field, PositiveFloat

from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.network.network import BYTES_PER_MEGABIT, Access, Conditions, Uniform
from gossamer.network.nodes import SomeNodes
from gossamer.randomness import generator


@register("network", "stragglers")
class Stragglers(Uniform, SomeNodes):
    """Like ``uniform``, but some nodes have less bandwidth: the others' divided by ``factor``, plus a normal deviation.

    DivShare's experiments, as published: ``bandwidth_mbps: 60, factor: 5, spread_mbps: 1``, with the stragglers at the
    first ranks.

    Args:
        factor: what the bandwidth of a straggler is divided by.
        spread_mbps: standard deviation of a straggler's bandwidth, 10^6 bits a second; drawn once for each, the same for
            its uplink and its downlink, and drawn again where nothing would be left.
        count: so many stragglers; one of these three.
        fraction: this share of the nodes, rounded to the nearest number.
        ranks: these nodes.
        which: of ``count`` or ``fraction``: "drawn" by the experiment's seed, or the "first" ranks.
        latency_s: as the rest, see :class:`Uniform`.
    """

    factor: PositiveFloat = 5.0
    spread_mbps: float = Field(default=0.0, ge=0)

    def conditions(self, nodes: int, seed: int) -> Conditions:
        links = super().conditions(nodes, seed).rates.reshape(2, nodes)  # uplinks and downlinks
        if not np.isfinite(links).any():
            raise BadInput(
                "network.bandwidth_mbps: null; accepted: what a straggler's is divided by network.factor of"
            )
        for rank in self.chosen(nodes, seed, "network"):
            links[:, rank] = self._slowed(links[:, rank] / self.factor, seed, rank)
        return Access(links.ravel(), self.latency_s, self.jitter_s, self.loss)

    def _slowed(self, mean: Float[np.ndarray, "2"], seed: int, rank: int) -> Float[np.ndarray, "2"]:
        rng = generator(seed, "network.spread", rank)
        while True:
            rates = mean + self.spread_mbps * BYTES_PER_MEGABIT * rng.standard_normal()
            if (rates > 0).all():
                return rates
