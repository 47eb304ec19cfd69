"""Random graphs: regular, Erdős-Rényi, small-world."""

from __future__ import annotations

import networkx as nx
import numpy as np
from pydantic import Field

from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.topology.graph import Graph, NetworkX
from gossamer.topology.topology import RandomTopology


@register("topology", "random-regular")
class RandomRegular(RandomTopology):
    """Every node has the same number of neighbours; otherwise random (Steger & Wormald, 1999).

    Almost surely an expander from degree 3 on: the spectral gap does not depend on the number of nodes (Friedman, 2008).

    Args:
        degree: number of neighbours of each node, below the number of nodes; degree times nodes must be even.
    """

    degree: int

    def generate(self, nodes: int, rng: np.random.Generator) -> NetworkX:
        return _generate(nodes, self.degree, rng)


def random_regular(nodes: int, degree: int, rng: np.random.Generator) -> Graph:
    """A random graph of ``nodes`` nodes with ``degree`` neighbours each, connected or not.

    Raises:
        BadInput: for a degree that no graph with that many nodes has.
    """
    return Graph.from_networkx(_generate(nodes, degree, rng))


def _generate(nodes: int, degree: int, rng: np.random.Generator) -> NetworkX:
    if not 0 <= degree < nodes or nodes * degree % 2:
        even = "an even number" if nodes % 2 else "a number"
        raise BadInput(
            f"topology.degree: {degree} with {nodes} nodes; accepted: {even} from 0 to {nodes - 1}"
        )
    # Near the complete graph the generator fails again and again (a minute for 90 of 99 neighbours), so there the edges to
    # leave out are drawn.
    dense = degree > nodes // 2
    drawn = nodes - 1 - degree if dense else degree
    graph: NetworkX = nx.random_regular_graph(drawn, nodes, seed=_seed(rng))
    return nx.complement(graph) if dense else graph


def _seed(rng: np.random.Generator) -> int:
    """A seed for networkx, which draws from Python's own generator."""
    return int(rng.integers(2**63))


@register("topology", "erdos-renyi")
class ErdosRenyi(RandomTopology):
    """Every possible edge exists with the same probability, independently: G(n, p) (Gilbert, 1959).

    Connected with high probability from p = (1 + epsilon) ln(n) / n on (Erdős & Rényi, 1960).

    Args:
        p: probability of an edge.
    """

    p: float = Field(ge=0, le=1)

    def generate(self, nodes: int, rng: np.random.Generator) -> NetworkX:
        # In time proportional to the number of edges (Batagelj & Brandes, 2005).
        graph: NetworkX = nx.fast_gnp_random_graph(nodes, self.p, seed=_seed(rng))
        return graph


@register("topology", "small-world")
class SmallWorld(RandomTopology):
    """A ring lattice, some edges of which are rewired (Watts & Strogatz, 1998).

    Args:
        degree: neighbours in the lattice, and the mean degree: even, below the number of nodes.
        p: probability that an edge is rewired to a random node.
    """

    degree: int
    p: float = Field(ge=0, le=1)

    def generate(self, nodes: int, rng: np.random.Generator) -> NetworkX:
        if not 0 <= self.degree < nodes or self.degree % 2:
            raise BadInput(
                f"topology.degree: {self.degree} with {nodes} nodes; accepted: an even number from 0 to {nodes - 1}"
            )
        graph: NetworkX = nx.watts_strogatz_graph(nodes, self.degree, self.p, seed=_seed(rng))
        return graph
