"""Erdős-Rényi graphs."""

from __future__ import annotations

import networkx as nx
import numpy as np
from pydantic import Field

from gossamer.config.registry import register
from gossamer.topology.graph import NetworkX
from gossamer.topology.topology import RandomTopology, networkx_seed


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
        graph: NetworkX = nx.fast_gnp_random_graph(nodes, self.p, seed=networkx_seed(rng))
        return graph
