"""An immutable graph over the ranks 0 to n - 1, with a sorted tuple of neighbours for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Literal

import networkx as nx
import numpy as np
from jaxtyping import Int

from gossamer.errors import BadInput

if TYPE_CHECKING:
    NetworkX = nx.Graph[int]
else:
    NetworkX = nx.Graph  # generic in its stubs only

Direction = Literal["in", "out", "both"]


class Graph:
    """Who may talk to whom. Immutable; two graphs with the same edges are equal.

    An edge (i, j) of a directed graph lets i send to j. A graph has no self-loops; the weight that a node gives to
    itself belongs to the mixing weights. Parallel edges count once.

    Args:
        nodes: number of nodes, at least 1.
        edges: pairs of ranks, in any order; an undirected edge may be given in either direction, or in both.
        directed: whether (i, j) and (j, i) are different edges.

    Raises:
        BadInput: for fewer than one node, a rank out of range, or a self-loop.
    """

    __slots__ = ("_directed", "_hash", "_incoming", "_outgoing")

    def __init__(self, nodes: int, edges: Iterable[tuple[int, int]], *, directed: bool = False) -> None:
        if nodes < 1:
            raise BadInput(f"nodes: {nodes}; accepted: 1 or more")
        pairs = np.fromiter(chain.from_iterable(edges), dtype=np.int64).reshape(-1, 2)
        _check_pairs(pairs, nodes)
        source, target = pairs.T
        self._directed = directed
        self._hash: int | None = None
        if directed:
            self._outgoing = _neighbourhoods(nodes, source, target)
            self._incoming = _neighbourhoods(nodes, target, source)
        else:
            both = np.concatenate((source, target)), np.concatenate((target, source))
            self._outgoing = self._incoming = _neighbourhoods(nodes, *both)

    @classmethod
    def from_networkx(cls, graph: NetworkX) -> Graph:
        """The graph of a networkx graph, without its edge and node attributes.

        Raises:
            BadInput: for nodes other than 0 to n - 1, or a self-loop.
        """
        nodes = graph.number_of_nodes()
        if set(graph) != set(range(nodes)):
            other = next((node for node in graph if node not in range(nodes)), None)
            raise BadInput(
                f"topology: a networkx graph of {nodes} nodes with a node {other!r}; accepted: the nodes "
                f"0 to {nodes - 1} (see networkx.convert_node_labels_to_integers)"
            )
        return cls(nodes, graph.edges(), directed=graph.is_directed())

    def to_networkx(self) -> NetworkX:
        """A new ``networkx.Graph``, or ``DiGraph`` if directed, with the nodes 0 to n - 1 in order."""
        graph: NetworkX = nx.DiGraph() if self._directed else nx.Graph()
        graph.add_nodes_from(range(self.nodes))
        graph.add_edges_from(self.edges())
        return graph

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self._outgoing)

    @property
    def directed(self) -> bool:
        """Whether an edge goes one way only."""
        return self._directed

    def neighbors(self, rank: int, direction: Direction = "both") -> tuple[int, ...]:
        """The neighbours of a node, sorted.

        Args:
            rank: the node.
            direction: ``"out"``: the nodes it may send to; ``"in"``: the nodes it may hear from. On an undirected graph
                all three are the same.

        Raises:
            ValueError: for ``"both"`` on a directed graph, or a rank out of range.
        """
        if not 0 <= rank < len(self._outgoing):
            raise ValueError(f"rank {rank}; accepted: 0 to {self.nodes - 1}")
        if direction == "in":
            return self._incoming[rank]
        if direction == "out":
            return self._outgoing[rank]
        if direction != "both":
            raise ValueError(f'direction {direction!r}; accepted: "in", "out" or, if undirected, "both"')
        if self._directed:
            raise ValueError('direction "both" on a directed graph; accepted: "in" or "out"')
        return self._outgoing[rank]

    def degree(self, rank: int, direction: Direction = "both") -> int:
        """Number of neighbours of a node; arguments and errors as for :meth:`neighbors`."""
        return len(self.neighbors(rank, direction))

    def edges(self) -> Iterator[tuple[int, int]]:
        """Every edge once, in order: (sender, receiver) if directed, else (lower rank, higher rank)."""
        for rank, others in enumerate(self._outgoing):
            for other in others:
                if self._directed or rank < other:
                    yield rank, other

    @property
    def connected(self) -> bool:
        """Whether every node can be reached from every other."""
        return _reaches_all(self._outgoing) and (not self._directed or _reaches_all(self._incoming))

    def components(self) -> int:
        """Number of connected components; of strongly connected ones if directed."""
        from scipy.sparse.csgraph import connected_components  # type: ignore[import-untyped]

        count, _ = connected_components(self.adjacency(), directed=self._directed, connection="strong")
        return int(count)

    def adjacency(self) -> Any:
        """A new ``scipy.sparse.csr_array`` [nodes, nodes], float64: 1 where the row may send to the column."""
        from scipy.sparse import csr_array  # type: ignore[import-untyped]  # slow to import, and no run needs it

        bounds = np.cumsum([0, *map(len, self._outgoing)])
        columns = np.fromiter(chain.from_iterable(self._outgoing), dtype=np.int32, count=int(bounds[-1]))
        return csr_array((np.ones(len(columns)), columns, bounds), shape=(self.nodes, self.nodes))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        return self._directed == other._directed and self._outgoing == other._outgoing

    def __hash__(self) -> int:
        # Cached, because every node of a simulation may look something up by the graph that all share.
        if self._hash is None:
            self._hash = hash((self._directed, self._outgoing))
        return self._hash

    def __repr__(self) -> str:
        arcs = sum(map(len, self._outgoing))
        edges = arcs if self._directed else arcs // 2
        return f"Graph(nodes={self.nodes}, edges={edges}, directed={self._directed})"


def union(graphs: Sequence[Graph]) -> Graph:
    """The graph with the edges of all graphs. It is directed if any of them is; an undirected edge then goes both ways.

    Args:
        graphs: at least one; all have the same number of nodes.
    """
    if len(graphs) == 1:
        return graphs[0]
    directed = any(graph.directed for graph in graphs)
    edges = chain.from_iterable(_arcs(graph) if directed else graph.edges() for graph in graphs)
    return Graph(max(graph.nodes for graph in graphs), edges, directed=directed)


def _arcs(graph: Graph) -> Iterator[tuple[int, int]]:
    """(sender, receiver) for each direction of each edge."""
    return ((rank, other) for rank in range(graph.nodes) for other in graph.neighbors(rank, "out"))


def _reaches_all(neighbors: Sequence[Sequence[int]]) -> bool:
    """Whether all nodes can be reached from node 0."""
    reached, frontier = {0}, {0}
    while frontier:
        frontier = set(chain.from_iterable(neighbors[rank] for rank in frontier)) - reached
        reached |= frontier
    return len(reached) == len(neighbors)


def _check_pairs(pairs: Int[np.ndarray, "edges 2"], nodes: int) -> None:
    outside = pairs[((pairs < 0) | (pairs >= nodes)).any(axis=1)]
    if len(outside):
        edge = tuple(outside[0].tolist())
        raise BadInput(
            f"topology: edge {edge} in a graph of {nodes} nodes; accepted: ranks from 0 to {nodes - 1}"
        )
    loops = pairs[pairs[:, 0] == pairs[:, 1]]
    if len(loops):
        edge = tuple(loops[0].tolist())
        raise BadInput(f"topology: edge {edge} is a self-loop; accepted: edges between two nodes")


def _neighbourhoods(
    nodes: int, source: Int[np.ndarray, " arcs"], target: Int[np.ndarray, " arcs"]
) -> tuple[tuple[int, ...], ...]:
    """The sorted, distinct targets of each source."""
    keys = np.sort(source * nodes + target)
    keys = keys[np.diff(keys, prepend=-1) > 0]  # np.unique hashes: 30 times slower here
    # By way of an object array, all tuples share one int object per rank: 8 bytes an entry instead of 40.
    ranks = np.arange(nodes).astype(object)
    targets = ranks[keys % nodes].tolist()
    bounds = np.searchsorted(keys, np.arange(nodes + 1) * nodes).tolist()
    return tuple(tuple(targets[start:end]) for start, end in pairwise(bounds))
