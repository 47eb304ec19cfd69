"""The ring."""

from __future__ import annotations

import networkx as nx
import numpy as np

from gossamer.config.registry import register
from gossamer.topology.graph import Graph
from gossamer.topology.topology import Topology


@register("topology", "ring")
class Ring(Topology):
    """Node i talks to i - 1 and i + 1, modulo n: the sparsest of the regular connected graphs."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        """The cycle; of two nodes, the one edge; of one node, no edge."""
        # networkx closes a ring of one node with a self-loop.
        return Graph.from_networkx(nx.cycle_graph(nodes)) if nodes > 1 else Graph(nodes, ())
