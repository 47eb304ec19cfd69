"""The hypercube."""

from __future__ import annotations

import networkx as nx
import numpy as np

from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.topology.graph import Graph
from gossamer.topology.topology import Topology


@register("topology", "hypercube")
class Hypercube(Topology):
    """Two nodes talk when their ranks differ in exactly one bit; takes a power of two of nodes."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        """The hypercube of dimension log2(n).

        Raises:
            BadInput: for a number of nodes that is no power of two.
        """
        dimension = nodes.bit_length() - 1
        if nodes != 1 << dimension:
            raise BadInput(
                f"nodes: {nodes} for the topology hypercube; accepted: a power of two, e.g. "
                f"{1 << dimension} or {2 << dimension}"
            )
        if dimension == 0:
            return Graph(nodes, ())  # networkx leaves out the one node of dimension 0
        # networkx names a corner by its bits, the highest first, so their order is that of the ranks.
        cube = nx.hypercube_graph(dimension)
        return Graph.from_networkx(nx.convert_node_labels_to_integers(cube, ordering="sorted"))
