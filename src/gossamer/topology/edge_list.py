"""A graph from a file that lists its edges."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gossamer.config.registry import FilePath, register
from gossamer.errors import BadInput
from gossamer.topology.files import read_words
from gossamer.topology.graph import Graph
from gossamer.topology.topology import Topology


@register("topology", "edge-list")
class EdgeList(Topology):
    """The edges in a text file, "i j" per line, with ranks from 0; ``#`` starts a comment.

    Args:
        path: the file.
        directed: whether "i j" lets only i send to j, or also j to i.
    """

    path: FilePath
    directed: bool = False

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        """The graph of the file; nodes that no line names have no neighbours.

        Raises:
            BadInput: for a file that can't be read, or a line that is not an edge between two of the nodes.
        """
        return Graph(nodes, self._edges(nodes), directed=self.directed)

    def _edges(self, nodes: int) -> Iterator[tuple[int, int]]:
        for number, words in read_words(self.path, "topology.path"):
            where = f"topology.path: {self.path}, line {number}: {' '.join(words)!r}"
            if len(words) != 2 or not all(word.isdecimal() and int(word) < nodes for word in words):
                raise BadInput(f"{where}; accepted: two ranks from 0 to {nodes - 1}")
            if int(words[0]) == int(words[1]):
                raise BadInput(f"{where} is a self-loop; accepted: edges between two nodes")
            yield int(words[0]), int(words[1])
