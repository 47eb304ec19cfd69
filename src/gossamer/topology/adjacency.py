"""A graph from a file that holds its adjacency matrix."""

from __future__ import annotations

import numpy as np

from gossamer.config.registry import FilePath, register
from gossamer.errors import BadInput
from gossamer.topology.files import read_matrix
from gossamer.topology.graph import Graph
from gossamer.topology.topology import Topology


@register("topology", "adjacency")
class Adjacency(Topology):
    """The graph of a 0/1 matrix in a text file: a 1 in row i, column j lets i send to j (both count from 0).

    A symmetric matrix is an undirected graph, any other a directed one.

    Args:
        path: the file; n lines of n numbers, separated by spaces or commas; ``#`` starts a comment.
    """

    path: FilePath

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        """The graph of the file.

        Raises:
            BadInput: for a file that can't be read, or a matrix that is not n by n, of 0 and 1, with a zero diagonal.
        """
        where = f"topology.path: {self.path}"
        matrix = read_matrix(self.path, "topology.path")
        if len(matrix) != nodes:
            raise BadInput(
                f"{where}: {len(matrix)} rows for {nodes} nodes; accepted: {nodes} rows and columns"
            )
        wrong = np.argwhere((matrix != 0) & (matrix != 1))
        if len(wrong):
            i, j = wrong[0].tolist()
            raise BadInput(f"{where}: {matrix[i, j]:.9g} in row {i}, column {j}; accepted: 0 or 1")
        loops = np.flatnonzero(matrix.diagonal())
        if len(loops):
            i = int(loops[0])
            raise BadInput(f"{where}: 1 in row {i}, column {i} is a self-loop; accepted: 0 on the diagonal")
        edges = ((i, j) for i, j in np.argwhere(matrix).tolist())
        return Graph(nodes, edges, directed=bool((matrix != matrix.T).any()))
