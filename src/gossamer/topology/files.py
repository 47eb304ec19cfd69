"""Graphs and mixing matrices from text files: words separated by spaces or commas; ``#`` starts a comment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float

from gossamer.config.registry import FilePath, register
from gossamer.errors import BadInput
from gossamer.topology.graph import Graph
from gossamer.topology.topology import Topology
from gossamer.topology.weights import Weights


def read_words(path: Path, field: str) -> Iterator[tuple[int, list[str]]]:
    """The number and the words of every line that has any.

    Args:
        path: the file, UTF-8.
        field: the experiment's field that names it, for errors.

    Raises:
        BadInput: for a file that can't be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadInput(f"{field}: {path}: {error.strerror}; accepted: a text file") from None
    except UnicodeDecodeError:
        raise BadInput(f"{field}: {path}: not UTF-8; accepted: a text file") from None
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].replace(",", " ").split()
        if words:
            yield number, words


def read_matrix(path: Path, field: str) -> Float[np.ndarray, "nodes nodes"]:
    """A square matrix of finite numbers, one row per line.

    Raises:
        BadInput: for a file that can't be read, a word that is not a finite number, or a matrix that is not square.
    """
    rows: list[list[float]] = []
    for number, words in read_words(path, field):
        where = f"{field}: {path}, line {number}"
        row = [_finite(word, where) for word in words]
        if rows and len(row) != len(rows[0]):
            raise BadInput(f"{where}: {len(row)} numbers; accepted: {len(rows[0])}, as before")
        rows.append(row)
    if not rows or len(rows) != len(rows[0]):
        columns = len(rows[0]) if rows else 0
        raise BadInput(f"{field}: {path}: {len(rows)} rows of {columns} numbers; accepted: a square matrix")
    return np.array(rows, dtype=np.float64)


def _finite(word: str, where: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadInput(f"{where}: {word!r}; accepted: finite numbers")
    return value


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


@register("weights", "given")
class Given(Weights):
    """A mixing matrix from a text file: one line per receiver, one number per sender, ``#`` comments.

    Negative weights are accepted, since the fastest averaging can need them (Xiao & Boyd, 2004).

    Args:
        path: the file; n lines of n numbers, separated by spaces or commas.

    Raises:
        BadInput: for a matrix that is not n by n, a row that does not sum to 1 (to 1e-6), or a weight without an
            edge.
    """

    path: FilePath

    @cached_property
    def _matrix(self) -> Float[np.ndarray, "nodes nodes"]:
        return read_matrix(self.path, "topology.weights.path")

    def check(self, graph: Graph, samples: Sequence[int] | None) -> None:
        where = f"topology.weights.path: {self.path}"
        if len(self._matrix) != graph.nodes:
            raise BadInput(
                f"{where}: {len(self._matrix)} rows for {graph.nodes} nodes; accepted: {graph.nodes} "
                "rows and columns"
            )
        for rank, row in enumerate(self._matrix):
            if not abs(row.sum() - 1) <= 1e-6:
                raise BadInput(f"{where}: row {rank} sums to {row.sum():.9g}; accepted: 1")
            extra = set(np.flatnonzero(row).tolist()) - {rank, *graph.neighbors(rank, "in")}
            if extra:
                other = min(extra)
                raise BadInput(
                    f"{where}: row {rank} gives node {other} the weight {row[other]:.9g}, but the graph "
                    f"has no edge from {other} to {rank}; accepted there: 0"
                )

    def row(self, graph: Graph, rank: int, samples: Sequence[int] | None) -> dict[int, float]:
        return {other: float(self._matrix[rank, other]) for other in graph.neighbors(rank, "in")}
