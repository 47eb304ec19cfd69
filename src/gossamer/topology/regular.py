"""Random regular graphs."""

from __future__ import annotations

import networkx as nx
import numpy as np

from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.topology.graph import Graph, NetworkX
from gossamer.topology.topology import RandomTopology, networkx_seed


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
    """A random regular graph, connected or not.

    Args:
        nodes: number of nodes.
        degree: number of neighbours of each.
        rng: the only source of randomness.

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
    graph: NetworkX = nx.random_regular_graph(drawn, nodes, seed=networkx_seed(rng))
    return nx.complement(graph) if dense else graph
