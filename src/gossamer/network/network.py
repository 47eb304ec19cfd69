"""Networks: what links do to a message. The description; an engine carries it out."""

from __future__ import annotations

import math
from abc import abstractmethod

from pydantic import Field

from gossamer.registry import Component, register

BYTES_PER_MEGABIT = 125_000


class Network(Component):
    """Latency of each pair and bandwidth of each node.

    The simulator shares links first come, first served: a node sends one message at a time over its uplink,
    and receives one at a time over its downlink.
    """

    @abstractmethod
    def latency_of(self, source: int, to: int) -> float:
        """Seconds from the first bit's departure to its arrival."""

    def common_latency(self) -> float | None:
        """The latency, where it is the same for all pairs, else None."""
        return None

    @abstractmethod
    def uplink_of(self, rank: int) -> float:
        """Bytes a second that a node can send; ``math.inf`` is unlimited."""

    @abstractmethod
    def downlink_of(self, rank: int) -> float:
        """Bytes a second that a node can receive; ``math.inf`` is unlimited."""


@register("network", "uniform")
class Uniform(Network):
    """The same latency between all pairs, the same bandwidth at all nodes.

    Args:
        latency_s: one-way delay of every pair, seconds.
        bandwidth_mbps: uplink and downlink of every node, 10^6 bits a second; null is unlimited.
        uplink_mbps: the uplink alone, in place of ``bandwidth_mbps``.
        downlink_mbps: the downlink alone, in place of ``bandwidth_mbps``.
    """

    latency_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    bandwidth_mbps: float | None = Field(default=None, gt=0)
    uplink_mbps: float | None = Field(default=None, gt=0)
    downlink_mbps: float | None = Field(default=None, gt=0)

    def latency_of(self, source: int, to: int) -> float:
        return self.latency_s

    def common_latency(self) -> float | None:
        return self.latency_s if type(self).latency_of is Uniform.latency_of else None

    def uplink_of(self, rank: int) -> float:
        return _bytes_per_second(self.bandwidth_mbps if self.uplink_mbps is None else self.uplink_mbps)

    def downlink_of(self, rank: int) -> float:
        return _bytes_per_second(self.bandwidth_mbps if self.downlink_mbps is None else self.downlink_mbps)


def _bytes_per_second(mbps: float | None) -> float:
    return math.inf if mbps is None else mbps * BYTES_PER_MEGABIT
