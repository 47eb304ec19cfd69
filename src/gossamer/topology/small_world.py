"""Small-world graphs."""

from __future__ import annotations

import networkx as nx
import numpy as np
from pydantic import Field

from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.topology.graph import NetworkX
from gossamer.topology.topology import RandomTopology, networkx_seed


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
                f"topology.degree: {self.degree} with {nodes} nodes; accepted for small-world: an even "
                f"number from 0 to {nodes - 1}"
            )
        graph: NetworkX = nx.watts_strogatz_graph(nodes, self.degree, self.p, seed=networkx_seed(rng))
        return graph
