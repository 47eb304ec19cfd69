"""The star."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.topology.graph import Graph
from gossamer.topology.topology import Topology


@register("topology", "star")
class Star(Topology):
    """All nodes are neighbours of one and of no other: the shape of federated learning.

    Args:
        centre: rank of the node in the middle.
    """

    centre: int = Field(default=0, ge=0)

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        """The star.

        Raises:
            BadInput: for a centre that is not one of the nodes.
        """
        if self.centre >= nodes:
            raise BadInput(f"topology.centre: {self.centre} with {nodes} nodes; accepted: 0 to {nodes - 1}")
        return Graph(nodes, ((self.centre, rank) for rank in range(nodes) if rank != self.centre))
