"""The ring."""

from __future__ import annotations

import numpy as np

from gossamer.config.registry import register
from gossamer.topology.graph import Graph
from gossamer.topology.topology import Topology


@register("topology", "ring")
class Ring(Topology):
    """The neighbours of node i are i - 1 and i + 1, modulo n."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        return Graph(nodes, ((i, (i + 1) % nodes) for i in range(nodes)) if nodes > 1 else ())
