"""Deterministic graphs: ring, star, complete, torus, hypercube, exponential."""

from __future__ import annotations

from itertools import combinations
from math import isqrt

import networkx as nx
import numpy as np
from pydantic import Field

from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.topology.graph import Graph
from gossamer.topology.topology import Topology


@register("topology", "ring")
class Ring(Topology):
    """The neighbours of node i are i - 1 and i + 1, modulo n."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        return Graph(nodes, ((i, (i + 1) % nodes) for i in range(nodes)) if nodes > 1 else ())


@register("topology", "star")
class Star(Topology):
    """All nodes are neighbours of one and of no other: the shape of federated learning.

    Args:
        centre: rank of the node in the middle.
    """

    centre: int = Field(default=0, ge=0)

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        if self.centre >= nodes:
            raise BadInput(f"topology.centre: {self.centre} with {nodes} nodes; accepted: 0 to {nodes - 1}")
        return Graph(nodes, ((self.centre, rank) for rank in range(nodes) if rank != self.centre))


@register("topology", "complete")
class Complete(Topology):
    """Every node is a neighbour of every other. With the default weights, mixing is exact averaging."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        # Not through networkx, which stores a dict per edge: over a gigabyte for 4096 nodes.
        return Graph(nodes, combinations(range(nodes), 2))


@register("topology", "torus")
class Torus(Topology):
    """A grid whose rows and columns close to rings; rank = row * columns + column.

    A side of two has one edge, a side of one has none.

    Args:
        rows: number of rows, a divisor of the number of nodes; None: the largest divisor up to the square root, which is
            the most square torus (for a prime number of nodes, a ring).
    """

    rows: int | None = Field(default=None, ge=1)

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        divisors = [rows for rows in range(1, nodes + 1) if nodes % rows == 0]
        if self.rows is not None and self.rows not in divisors:
            accepted = ", ".join(map(str, divisors))
            raise BadInput(
                f"topology.rows: {self.rows} with {nodes} nodes; accepted: a divisor of {nodes} ({accepted})"
            )
        rows = self.rows or max(divisor for divisor in divisors if divisor <= isqrt(nodes))
        grid = nx.grid_2d_graph(rows, nodes // rows, periodic=True)
        return Graph.from_networkx(nx.convert_node_labels_to_integers(grid, ordering="sorted"))


@register("topology", "hypercube")
class Hypercube(Topology):
    """Two nodes are neighbours if their ranks differ in exactly one bit; needs a power of two of nodes."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        dimension = nodes.bit_length() - 1
        if nodes != 1 << dimension:
            raise BadInput(
                f"nodes: {nodes} for the topology hypercube; accepted: a power of two, e.g. "
                f"{1 << dimension} or {2 << dimension}"
            )
        return Graph(nodes, ((i, i ^ (1 << k)) for i in range(nodes) for k in range(dimension)))


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
