"""The two-dimensional torus."""

from __future__ import annotations

from math import isqrt

import networkx as nx
import numpy as np
from pydantic import Field

from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.topology.graph import Graph
from gossamer.topology.topology import Topology


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
        """The torus.

        Raises:
            BadInput: for a number of rows that does not divide the number of nodes.
        """
        divisors = [rows for rows in range(1, nodes + 1) if nodes % rows == 0]
        if self.rows is not None and self.rows not in divisors:
            accepted = ", ".join(map(str, divisors))
            raise BadInput(
                f"topology.rows: {self.rows} with {nodes} nodes; accepted: a divisor of {nodes} ({accepted})"
            )
        rows = self.rows or max(divisor for divisor in divisors if divisor <= isqrt(nodes))
        grid = nx.grid_2d_graph(rows, nodes // rows, periodic=True)
        return Graph.from_networkx(nx.convert_node_labels_to_integers(grid, ordering="sorted"))
