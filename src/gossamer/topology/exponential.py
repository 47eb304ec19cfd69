"""Exponential graphs: directed, with hops of 1, 2, 4, ... nodes."""

from __future__ import annotations

import numpy as np

from gossamer.config.registry import register
from gossamer.topology.graph import Graph
from gossamer.topology.topology import Topology


@register("topology", "exponential")
class Exponential(Topology):
    """Node i sends to i + 2^k modulo n, for k = 0 to ceil(log2 n) - 1. Directed; both degrees are ceil(log2 n).

    Assran, Loizou, Ballas & Rabbat, "Stochastic gradient push for distributed deep learning" (2019); Ying, Yuan, Chen,
    Hu, Pan & Yin, "Exponential graph is provably efficient for decentralized deep training" (2021).
    """

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        edges = ((i, (i + (1 << k)) % nodes) for i in range(nodes) for k in range(_hops(nodes)))
        return Graph(nodes, edges, directed=True)


@register("topology", "one-peer-exponential")
class OnePeerExponential(Topology):
    """In round r, node i sends to i + 2^(r mod ceil(log2 n)) modulo n, and to no other. Directed.

    The graph changes every round. With uniform weights and a power of two of nodes, ceil(log2 n) consecutive rounds
    average exactly (Ying et al., 2021). The graph of one round can be disconnected; the union of these rounds has to be
    connected.
    """

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        hop = 1 << round % self.cycle(nodes)
        edges = ((i, (i + hop) % nodes) for i in range(nodes)) if nodes > 1 else ()
        return Graph(nodes, edges, directed=True)

    def drawn_at(self, nodes: int, round: int) -> int:
        return round % self.cycle(nodes)

    def cycle(self, nodes: int) -> int:
        """ceil(log2 n), and 1 for a single node."""
        return max(1, _hops(nodes))


def _hops(nodes: int) -> int:
    """ceil(log2 n), in integer arithmetic."""
    return (nodes - 1).bit_length()
