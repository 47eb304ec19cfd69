"""Graphs and mixing matrices from text files: words separated by spaces or commas; ``#`` starts a comment."""

from __future__ import annotations

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


def read_words(path: Path, where: str) -> Iterator[tuple[int, list[str]]]:
    """The number and the words of every line that has any; ``where`` names the field and the file in errors."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{where}: can't be read ({error}); accepted: a text file") from None
    for number, line in enumerate(lines, start=1):
        if words := line.partition("#")[0].replace(",", " ").split():
            yield number, words


def read_matrix(path: Path, where: str) -> Float[np.ndarray, "nodes nodes"]:
    """A square matrix of finite numbers, one row per line; ``where`` as for :func:`read_words`."""
    try:
        matrix = np.array([words for _, words in read_words(path, where)], dtype=np.float64)
    except ValueError as error:
        raise BadInput(f"{where}: {error}; accepted: a square matrix of finite numbers") from None
    if matrix.ndim < 2 or len(matrix) != matrix.shape[1] or not np.isfinite(matrix).all():
        found = f"{' x '.join(map(str, matrix.shape))} numbers"
        raise BadInput(f"{where}: {found}; accepted: a square matrix of finite numbers")
    return matrix


@register("topology", "edge-list")
class EdgeList(Topology):
    """The edges in a text file, "i j" per line, with ranks from 0; ``#`` starts a comment. Nodes that no line names have no
    neighbours."""

    path: FilePath  # the file
    directed: bool = False  # whether "i j" lets only i send to j, or also j to i

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        edges, where = [], f"topology.path: {self.path}"
        for number, words in read_words(self.path, where):
            ranks = [int(word) for word in words if word.isdecimal() and int(word) < nodes]
            if len(words) != 2 or len(set(ranks)) != 2:
                accepted = f"two different ranks from 0 to {nodes - 1}"
                raise BadInput(f"{where}, line {number}: {' '.join(words)!r}; accepted: {accepted}")
            edges.append((ranks[0], ranks[1]))
        return Graph(nodes, edges, directed=self.directed)


@register("topology", "adjacency")
class Adjacency(Topology):
    """The graph of a 0/1 matrix in a text file: a 1 in row i, column j lets i send to j (both count from 0).

    A symmetric matrix is an undirected graph, any other a directed one."""

    path: FilePath  # the file; n lines of n numbers, separated by spaces or commas; # starts a comment

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        where = f"topology.path: {self.path}"
        matrix = read_matrix(self.path, where)
        if len(matrix) != nodes:
            raise BadInput(f"{where}: {len(matrix)} rows for {nodes} nodes; accepted: {nodes} rows")
        wrong = np.argwhere(((matrix != 0) & (matrix != 1)) | (np.eye(nodes) * matrix != 0))
        if len(wrong):
            i, j = wrong[0].tolist()
            found = f"{matrix[i, j]:.9g} in row {i}, column {j}"
            raise BadInput(f"{where}: {found}; accepted: 0 or 1, and 0 on the diagonal")
        edges = ((i, j) for i, j in np.argwhere(matrix).tolist())
        return Graph(nodes, edges, directed=bool((matrix != matrix.T).any()))


@register("weights", "given")
class Given(Weights):
    """A mixing matrix from a text file: one line per receiver, one number per sender, ``#`` comments.

    Negative weights are accepted, since the fastest averaging can need them (Xiao & Boyd, 2004)."""

    # The file; n lines of n numbers, separated by spaces or commas. Each row sums to 1 (to 1e-6).
    path: FilePath

    @cached_property
    def _matrix(self) -> Float[np.ndarray, "nodes nodes"]:
        return read_matrix(self.path, f"topology.weights.path: {self.path}")

    def check(self, graph: Graph, samples: Sequence[int] | None) -> None:
        W, nodes, where = self._matrix, graph.nodes, f"topology.weights.path: {self.path}"
        if len(W) != nodes:
            raise BadInput(f"{where}: {len(W)} rows for {nodes} nodes; accepted: {nodes} rows")
        for rank, row in enumerate(W):
            if not abs(row.sum() - 1) <= 1e-6:
                raise BadInput(f"{where}: row {rank} sums to {row.sum():.9g}; accepted: 1")
            for other in set(np.flatnonzero(row).tolist()) - {rank, *graph.neighbors(rank, "in")}:
                found = f"{row[other]:.9g} in row {rank}, column {other}"
                raise BadInput(
                    f"{where}: {found}, but the graph has no edge from {other} to {rank}; accepted: 0"
                )

    def row(self, graph: Graph, rank: int, samples: Sequence[int] | None) -> dict[int, float]:
        return {other: float(self._matrix[rank, other]) for other in graph.neighbors(rank, "in")}
