"""A graph from a file of edges."""

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
    """The edges that a text file lists: "i j" a line, with ranks from 0; ``#`` starts a comment.

    Args:
        path: the file.
        directed: whether "i j" lets only i send to j, or also j to i.
    """

    path: FilePath
    directed: bool = False

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        """The file's graph; nodes that no line names have no neighbours.

        Raises:
            BadInput: for a file that can't be read, or a line that is no edge between two of the nodes.
        """
        return Graph(nodes, self._edges(nodes), directed=self.directed)

    def _edges(self, nodes: int) -> Iterator[tuple[int, int]]:
        for number, words in read_words(self.path, "topology.path"):
            if len(words) != 2 or not all(word.isdecimal() and int(word) < nodes for word in words):
                problem = f"{' '.join(words)!r}; accepted: two ranks from 0 to {nodes - 1}"
            elif int(words[0]) == int(words[1]):
                problem = f"{' '.join(words)!r} is a self-loop; accepted: edges between two nodes"
            else:
                yield int(words[0]), int(words[1])
                continue
            raise BadInput(f"topology.path: {self.path}, line {number}: {problem}")
