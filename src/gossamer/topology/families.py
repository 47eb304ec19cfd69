"""Families of graphs: ring, star, complete, torus, hypercube, exponential; random regular, Erdős-Rényi, small-world. Graphs
and mixing matrices from text files: words separated by spaces or commas; ``#`` starts a comment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations
from math import isqrt
from pathlib import Path

import networkx as nx
import numpy as np
from jaxtyping import Float
from pydantic import Field

from gossamer.config.registry import FilePath, register
from gossamer.errors import BadInput
from gossamer.topology.graph import Graph, NetworkX
from gossamer.topology.topology import RandomTopology, Topology
from gossamer.topology.weights import Weights


@register("topology", "ring")
class Ring(Topology):
    """The neighbours of node i are i - 1 and i + 1, modulo n."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        return Graph(nodes, ((i, (i + 1) % nodes) for i in range(nodes)) if nodes > 1 else ())


@register("topology", "star")
class Star(Topology):
    """All nodes are neighbours of one, of rank ``centre``, and of no other: the shape of federated learning."""

    centre: int = Field(default=0, ge=0)

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        if self.centre >= nodes:
            raise BadInput(f"topology.centre: {self.centre} with {nodes} nodes; accepted: 0 to {nodes - 1}")
        return Graph(nodes, ((self.centre, rank) for rank in range(nodes) if rank != self.centre))


@register("topology", "complete")
class Complete(Topology):
    """Every node is a neighbour of every other. With the default weights, mixing is exact averaging."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        return Graph(nodes, combinations(range(nodes), 2))


@register("topology", "torus")
class Torus(Topology):
    """A grid whose rows and columns close to rings; rank = row * columns + column.

    A side of two has one edge, a side of one has none."""

    # Number of rows, a divisor of the number of nodes; None: the largest divisor up to the square root, which is the
    # most square torus (for a prime number of nodes, a ring).
    rows: int | None = Field(default=None, ge=1)

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        divisors = [rows for rows in range(1, nodes + 1) if nodes % rows == 0]
        if self.rows is not None and self.rows not in divisors:
            accepted = f"a divisor of {nodes} ({', '.join(map(str, divisors))})"
            raise BadInput(f"topology.rows: {self.rows} with {nodes} nodes; accepted: {accepted}")
        rows = self.rows or max(divisor for divisor in divisors if divisor <= isqrt(nodes))
        grid = nx.grid_2d_graph(rows, nodes // rows, periodic=True)
        return Graph.from_networkx(nx.convert_node_labels_to_integers(grid, ordering="sorted"))


@register("topology", "hypercube")
class Hypercube(Topology):
    """Two nodes are neighbours if their ranks differ in exactly one bit; needs a power of two of nodes."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        dimension = nodes.bit_length() - 1
        if nodes != 1 << dimension:
            accepted = f"a power of two, e.g. {1 << dimension} or {2 << dimension}"
            raise BadInput(f"nodes: {nodes} for the topology hypercube; accepted: {accepted}")
        return Graph(nodes, ((i, i ^ (1 << k)) for i in range(nodes) for k in range(dimension)))


@register("topology", "exponential")
class Exponential(Topology):
    """Node i sends to i + 2^k modulo n, for k = 0 to ceil(log2 n) - 1. Directed; both degrees are ceil(log2 n).

    Assran, Loizou, Ballas & Rabbat, "Stochastic gradient push for distributed deep learning" (2019); Ying, Yuan, Chen,
    Hu, Pan & Yin, "Exponential graph is provably efficient for decentralized deep training" (2021)."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        hops = (nodes - 1).bit_length()
        edges = ((i, (i + (1 << k)) % nodes) for i in range(nodes) for k in range(hops))
        return Graph(nodes, edges, directed=True)


@register("topology", "one-peer-exponential")
class OnePeerExponential(Topology):
    """In round r, node i sends to i + 2^(r mod ceil(log2 n)) modulo n, and to no other. Directed.

    The graph changes every round. With uniform weights and a power of two of nodes, ceil(log2 n) consecutive rounds
    average exactly (Ying et al., 2021). The graph of one round can be disconnected; the union of these rounds has to be
    connected."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        hop = 1 << round % self.cycle(nodes)
        edges = ((i, (i + hop) % nodes) for i in range(nodes)) if nodes > 1 else ()
        return Graph(nodes, edges, directed=True)

    def drawn_at(self, nodes: int, round: int) -> int:
        return round % self.cycle(nodes)

    def cycle(self, nodes: int) -> int:
        """ceil(log2 n), and 1 for a single node."""
        return max(1, (nodes - 1).bit_length())


@register("topology", "random-regular")
class RandomRegular(RandomTopology):
    """Every node has ``degree`` neighbours; otherwise random (Steger & Wormald, 1999). Degree times nodes must be even.

    Almost surely an expander from degree 3 on: the spectral gap does not depend on the number of nodes (Friedman, 2008)."""

    degree: int

    def generate(self, nodes: int, rng: np.random.Generator) -> NetworkX:
        return _regular(nodes, self.degree, rng)


def random_regular(nodes: int, degree: int, rng: np.random.Generator) -> Graph:
    """A random graph with ``degree`` neighbours of each node, connected or not."""
    return Graph.from_networkx(_regular(nodes, degree, rng))


def _regular(nodes: int, degree: int, rng: np.random.Generator) -> NetworkX:
    if not 0 <= degree < nodes or nodes * degree % 2:
        even = "an even number" if nodes % 2 else "a number"
        raise BadInput(f"topology.degree: {degree} for {nodes} nodes; accepted: {even} from 0 to {nodes - 1}")
    # Near the complete graph the generator fails again and again (a minute for 90 of 99 neighbours), so there the edges to
    # leave out are drawn.
    dense = degree > nodes // 2
    graph: NetworkX = nx.random_regular_graph(nodes - 1 - degree if dense else degree, nodes, seed=_seed(rng))
    return nx.complement(graph) if dense else graph


def _seed(rng: np.random.Generator) -> int:
    """A seed for networkx, which draws from Python's own generator."""
    return int(rng.integers(2**63))


@register("topology", "erdos-renyi")
class ErdosRenyi(RandomTopology):
    """Every possible edge exists with probability ``p``, independently: G(n, p) (Gilbert, 1959).

    Connected with high probability from p = (1 + epsilon) ln(n) / n on (Erdős & Rényi, 1960)."""

    p: float = Field(ge=0, le=1)

    def generate(self, nodes: int, rng: np.random.Generator) -> NetworkX:
        # In time proportional to the number of edges (Batagelj & Brandes, 2005).
        graph: NetworkX = nx.fast_gnp_random_graph(nodes, self.p, seed=_seed(rng))
        return graph


@register("topology", "small-world")
class SmallWorld(RandomTopology):
    """A ring lattice, some edges of which are rewired (Watts & Strogatz, 1998)."""

    degree: int  # neighbours in the lattice, and the mean degree: even, below the number of nodes
    p: float = Field(ge=0, le=1)  # probability that an edge is rewired to a random node

    def generate(self, nodes: int, rng: np.random.Generator) -> NetworkX:
        if not 0 <= self.degree < nodes or self.degree % 2:
            even = f"an even number from 0 to {nodes - 1}"
            raise BadInput(f"topology.degree: {self.degree} for {nodes} nodes; accepted: {even}")
        graph: NetworkX = nx.watts_strogatz_graph(nodes, self.degree, self.p, seed=_seed(rng))
        return graph


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

    path: FilePath
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
