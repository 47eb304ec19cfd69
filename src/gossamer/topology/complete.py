"""The complete graph."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from gossamer.config.registry import register
from gossamer.topology.graph import Graph
from gossamer.topology.topology import Topology


@register("topology", "complete")
class Complete(Topology):
    """Every node is a neighbour of every other. With the default weights, mixing is exact averaging."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        # Not through networkx, which stores a dict per edge: over a gigabyte for 4096 nodes.
        return Graph(nodes, combinations(range(nodes), 2))
