"""The hypercube."""

from __future__ import annotations

import numpy as np

from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.topology.graph import Graph
from gossamer.topology.topology import Topology


@register("topology", "hypercube")
class Hypercube(Topology):
    """Two nodes are neighbours if their ranks differ in exactly one bit; needs a power of two of nodes."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        """The hypercube of dimension log2(n).

        Raises:
            BadInput: for a number of nodes that is not a power of two.
        """
        dimension = nodes.bit_length() - 1
        if nodes != 1 << dimension:
            raise BadInput(
                f"nodes: {nodes} for the topology hypercube; accepted: a power of two, e.g. "
                f"{1 << dimension} or {2 << dimension}"
            )
        return Graph(nodes, ((i, i ^ (1 << k)) for i in range(nodes) for k in range(dimension)))
