"""Graph families: deterministic and random graphs, the generators of networkx, and graphs from files."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations, count
from math import isqrt
from typing import Any
from xml.etree.ElementTree import Element

import networkx as nx
import numpy as np
from pydantic import Field, PositiveInt, field_validator

from gossamer.config.experiment import MAX_NODES
from gossamer.config.registry import FilePath, register
from gossamer.errors import BadInput, cause
from gossamer.files import XML, check_room, parse_xml
from gossamer.process_memory import available_bytes
from gossamer.topology.graph import Graph, NetworkX
from gossamer.topology.graph_files import format_of, read_edges, read_matrix, read_text, refused
from gossamer.topology.topology import RandomTopology, Topology

_ALWAYS = 100_000
"""Nodes and links that a generator of networkx may make in a run of any size."""
_ENTRY_BYTES = 100
"""Bytes that a node or a link takes in a graph of networkx, at least."""


@register("topology", "ring")
class Ring(Topology):
    """The neighbours of node i are i - 1 and i + 1, modulo n."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        return Graph(nodes, ((i, (i + 1) % nodes) for i in range(nodes)) if nodes > 1 else ())


@register("topology", "star")
class Star(Topology):
    """Every node is a neighbour of the node of rank ``centre`` and of no other, as in federated learning."""

    centre: int = Field(default=0, ge=0, lt=MAX_NODES)

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        if self.centre >= nodes:
            raise BadInput(f"topology.centre: {self.centre} for {nodes} nodes; accepted: 0 to {nodes - 1}")
        return Graph(nodes, ((self.centre, rank) for rank in range(nodes) if rank != self.centre))


@register("topology", "complete")
class Complete(Topology):
    """Every node is a neighbour of every other. With the default weights, mixing is exact averaging."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        arcs = nodes * (nodes - 1)
        check_room(f"topology: the {arcs:,} links of a complete graph of {nodes:,} nodes", 4 * 8 * arcs)
        return Graph(nodes, combinations(range(nodes), 2))


@register("topology", "torus")
class Torus(Topology):
    """A grid whose rows and columns wrap around; rank = row * columns + column.

    A side of length two has one edge, a side of length one has none."""

    # Number of rows, a divisor of the number of nodes; None: the largest divisor up to the square root, which is the
    # most square torus (for a prime number of nodes, a ring).
    rows: int | None = Field(default=None, ge=1)

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        rows = self.rows or max(rows for rows in range(1, isqrt(nodes) + 1) if nodes % rows == 0)
        if nodes % rows:
            raise BadInput(
                f"topology.rows: {rows} for {nodes} nodes; accepted: a divisor of {nodes}, or null"
            )
        grid = nx.grid_2d_graph(rows, nodes // rows, periodic=True)
        return Graph.from_networkx(nx.convert_node_labels_to_integers(grid, ordering="sorted"))


@register("topology", "hypercube")
class Hypercube(Topology):
    """Two nodes are neighbours if their ranks differ in exactly one bit. The number of nodes must be a power of two."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        dimension = nodes.bit_length() - 1
        if nodes != 1 << dimension:
            raise BadInput(f"nodes: {nodes} for the topology hypercube; accepted: a power of two")
        return Graph(nodes, ((i, i ^ (1 << k)) for i in range(nodes) for k in range(dimension)))


@register("topology", "exponential")
class Exponential(Topology):
    """Node i sends to i + 2^k modulo n, for k = 0 to ceil(log2 n) - 1. Directed; both degrees are ceil(log2 n). (Assran et
    al., 2019; Ying et al., "Exponential graph is provably efficient for decentralized deep training", 2021.)"""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        hops = (nodes - 1).bit_length()
        edges = ((i, (i + (1 << k)) % nodes) for i in range(nodes) for k in range(hops))
        return Graph(nodes, edges, directed=True)


@register("topology", "one-peer-exponential")
class OnePeerExponential(Topology):
    """In round r, node i sends to i + 2^(r mod ceil(log2 n)) modulo n, and to no other. Directed. With
    uniform weights, and if n is a power of two, ceil(log2 n) consecutive rounds average exactly (Ying et al., 2021)."""

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
    """A random graph in which every node has ``degree`` neighbours (Steger & Wormald, 1999). Degree times
    nodes must be even.

    From degree 3 on, it is almost surely an expander: the spectral gap does not vanish as the number of nodes
    grows (Friedman, 2008)."""

    degree: int

    def generate(self, nodes: int, rng: np.random.Generator) -> NetworkX:
        return _regular(nodes, self.degree, rng)


def random_regular(nodes: int, degree: int, rng: np.random.Generator) -> Graph:
    """A random graph with ``degree`` neighbours of each node, connected or not."""
    return Graph.from_networkx(_regular(nodes, degree, rng))


def _regular(nodes: int, degree: int, rng: np.random.Generator) -> NetworkX:
    if not 0 <= degree < nodes or nodes * degree % 2:
        even = "an even number" if nodes % 2 else "a number"
        accepted = f"{even} from 0 to {nodes - 1}{_or_more_nodes(degree, nodes)}"
        raise BadInput(f"topology.degree: {degree} for {nodes} nodes; accepted: {accepted}")
    # For nearly complete graphs the generator fails repeatedly (a minute for 90 of 99 neighbours), so the
    # missing edges are drawn instead.
    dense = degree > nodes // 2
    graph: NetworkX = nx.random_regular_graph(nodes - 1 - degree if dense else degree, nodes, seed=_seed(rng))
    return nx.complement(graph) if dense else graph


def _or_more_nodes(links: int, nodes: int) -> str:
    """The way out of too few nodes for this many links of one of them, as the end of a sentence."""
    return f", or at least {links + 1:,} nodes" if links >= nodes else ""


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
        return nx.fast_gnp_random_graph(nodes, self.p, seed=_seed(rng))  # type: ignore[no-any-return]


@register("topology", "watts-strogatz")
class WattsStrogatz(RandomTopology):
    """A small world: a ring lattice with some rewired edges (Watts & Strogatz, 1998)."""

    # Neighbours in the lattice, which is also the mean degree: even, below the number of nodes.
    degree: int = Field(ge=0, multiple_of=2)
    p: float = Field(ge=0, le=1)  # probability that an edge is rewired to a random node

    def generate(self, nodes: int, rng: np.random.Generator) -> NetworkX:
        if self.degree >= nodes:
            accepted = f"an even number below {nodes}{_or_more_nodes(self.degree, nodes)}"
            raise BadInput(f"topology.degree: {self.degree} for {nodes} nodes; accepted: {accepted}")
        return nx.watts_strogatz_graph(nodes, self.degree, self.p, seed=_seed(rng))  # type: ignore[no-any-return]


@register("topology", "barabasi-albert")
class BarabasiAlbert(RandomTopology):
    """Preferential attachment (Barabási & Albert, 1999): after a star of m + 1 nodes, each rank in turn is linked to ``m``
    lower ones, with probabilities in proportion to their degrees. Low ranks become hubs; the graph is connected."""

    m: int = Field(ge=1)

    def generate(self, nodes: int, rng: np.random.Generator) -> NetworkX:
        if self.m >= nodes:
            fewer = f"a number from 1, below {nodes}" if nodes > 1 else "another topology for a single node"
            accepted = f"{fewer}{_or_more_nodes(self.m, nodes)}"
            raise BadInput(f"topology.m: {self.m} for {nodes} nodes; accepted: {accepted}")
        return nx.barabasi_albert_graph(nodes, self.m, seed=_seed(rng))


@register("topology", "stochastic-block")
class StochasticBlock(RandomTopology):
    """Communities (Holland, Laskey & Leinhardt, 1983): an edge exists with probability ``p_in`` within a block and ``p_out``
    between two. The first block has the lowest ranks."""

    sizes: tuple[PositiveInt, ...]  # number of nodes of each block
    p_in: float = Field(ge=0, le=1)
    p_out: float = Field(ge=0, le=1)

    def generate(self, nodes: int, rng: np.random.Generator) -> NetworkX:
        if sum(self.sizes) != nodes:
            raise BadInput(f"topology.sizes: {sum(self.sizes)} nodes in all; accepted: {nodes}, as in nodes")
        p = np.full((len(self.sizes), len(self.sizes)), self.p_out)
        np.fill_diagonal(p, self.p_in)
        return nx.stochastic_block_model(list(self.sizes), p.tolist(), seed=_seed(rng))


@register("topology", "networkx")
class Generator(RandomTopology):
    """The graph of any function of ``networkx.generators``, without its attributes.

    A function that takes a seed gets ``n``, the number of nodes, and a keyed ``seed``, unless ``parameters``
    sets them. With a fixed ``seed`` it returns the same graph in every run. Nodes are ranked in the
    function's order."""

    generator: str  # name of the function, e.g. powerlaw_cluster_graph
    parameters: dict[str, Any] = Field(default_factory=dict)  # its arguments

    @field_validator("generator")
    @classmethod
    def _known(cls, name: str) -> str:
        if not getattr(getattr(nx, name, None), "__module__", "").startswith("networkx.generators"):
            raise ValueError("a function of networkx.generators")
        return name

    @property
    def random(self) -> bool:
        return "seed" in self._arguments and "seed" not in self.parameters

    @property
    def _arguments(self) -> Collection[str]:
        return inspect.signature(getattr(nx, self.generator)).parameters

    def generate(self, nodes: int, rng: np.random.Generator) -> NetworkX:
        # Only random generators get n, which is the number of nodes there; elsewhere it may be a dimension or
        # a side length.
        offered = {"n": nodes, "seed": int(rng.integers(2**32))} if "seed" in self._arguments else {}
        defaults = {name: value for name, value in offered.items() if name in self._arguments}
        try:
            with _at_most(nodes, self.parameters):
                graph = getattr(nx, self.generator)(**{**defaults, **self.parameters})
        except BadInput:
            raise
        except Exception as error:
            accepted = f"arguments of networkx.{self.generator}"
            raise BadInput(
                f"topology.parameters: {self.parameters}: {cause(error)}; accepted: {accepted}"
            ) from error
        return _ranked(graph, f"topology.generator: {self.generator}")


@contextmanager
def _at_most(nodes: int, parameters: Mapping[str, Any]) -> Iterator[None]:
    """Let the graphs that networkx makes have no more nodes and links together than ten complete graphs of the run's nodes (a
    generator may make larger graphs than the one that it returns), and no more than fit the memory that is free. BadInput
    beyond, and for a number in the parameters that asks for more."""
    free = available_bytes()
    most = min(max(10 * nodes**2, _ALWAYS), sys.maxsize if free is None else free // _ENTRY_BYTES)
    problem = f"{parameters}: graphs of more than {most:,} nodes and links"
    refused = BadInput(f"topology.parameters: {problem}; accepted: a graph of {nodes} nodes, as in nodes")
    if any(
        number > most for name, value in parameters.items() if name != "seed" for number in _integers(value)
    ):
        raise refused
    made = count(1)

    class Counted(dict[Any, Any]):
        """The nodes of a graph, or the links of a node."""

        def __setitem__(self, key: Any, value: Any) -> None:
            if key not in self and next(made) > most:
                raise refused
            super().__setitem__(key, value)

    plain = nx.Graph.node_dict_factory, nx.Graph.adjlist_inner_dict_factory
    nx.Graph.node_dict_factory = nx.Graph.adjlist_inner_dict_factory = Counted
    try:
        yield
    finally:
        nx.Graph.node_dict_factory, nx.Graph.adjlist_inner_dict_factory = plain


def _integers(value: Any) -> Iterator[int]:
    """The integers in a value of a file."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _integers(item)


def _ranked(graph: Any, where: str) -> NetworkX:
    """A simple graph with ranks in place of names, in the order of its nodes. BadInput for any other value."""
    problem = ""
    if not isinstance(graph, nx.Graph):
        problem = f"a {type(graph).__name__}"
    elif graph.is_multigraph():
        problem = f"a {type(graph).__name__}, which may have parallel edges"
    elif loop := next(iter(nx.selfloop_edges(graph)), None):
        problem = f"a graph with a loop at node {loop[0]!r}"
    if problem:
        raise BadInput(f"{where}: {problem}; accepted: a graph without parallel edges and loops")
    ranked = set(graph) == set(range(len(graph)))
    return graph if ranked else nx.convert_node_labels_to_integers(graph)


@register("topology", "edge-list")
class EdgeList(Topology):
    """The edges in a text file, one "i j" per line, with ranks from 0; ``#`` starts a comment. Nodes without
    a line have no neighbours."""

    path: FilePath
    directed: bool = False  # whether "i j" lets only i send to j, or also j to i

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        return read_edges(self.path, "topology.path", nodes, directed=self.directed)


@register("topology", "adjacency")
class Adjacency(Topology):
    """The graph of a 0/1 matrix in a text file: a 1 in row i, column j lets i send to j (both count from 0).

    A symmetric matrix is an undirected graph, any other a directed one."""

    path: FilePath  # the file; n lines of n numbers, separated by spaces or commas; # starts a comment

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        table = read_matrix(self.path, "topology.path", "a square matrix of 0 and 1, and 0 on the diagonal")
        matrix = table.values
        if len(other := np.argwhere(~np.isin(matrix, (0, 1)))):
            row, column = other[0].tolist()
            cure = "topology.weights: given has a matrix of weights"
            raise table.refused(f"{matrix[row, column]:g} in column {column + 1}", cure, row)
        if len(loops := np.flatnonzero(matrix.diagonal())):
            raise table.refused(f"a loop at node {loops[0]}", "", int(loops[0]))
        edges = ((i, j) for i, j in np.argwhere(matrix).tolist())
        return Graph(len(matrix), edges, directed=bool((matrix != matrix.T).any()))


@register("topology", "graphml")
class GraphML(Topology):
    """The graph in a GraphML file, directed or not, without its attributes. Nodes are ranked in the order of the file."""

    path: FilePath

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        text = read_text(self.path, "topology.path", "GraphML")
        known = format_of(text)
        if known is not None and not text.lstrip().startswith("<"):
            raise refused(self.path, "topology.path", known[0], "GraphML", known[1])
        xml = parse_xml(text.encode(), where := f"topology.path: {self.path}")
        if (root := _local(xml.root.tag)) != "graphml":
            kind, cure = known or (root, "")
            raise refused(self.path, "topology.path", kind, "GraphML", cure)
        return _graph_of(xml, where)


def _local(tag: str) -> str:
    """The name of an element without the prefix of its namespace."""
    return tag.rpartition(":")[2]


def _graph_of(xml: XML, where: str) -> Graph:
    """The simple graph of a GraphML file."""
    parts: dict[str, list[Element]] = defaultdict(list)
    for element in xml.root.iter():
        parts[_local(element.tag)].append(element)

    def refused(element: Element, problem: str, accepted: str) -> BadInput:
        return BadInput(f"{where}, line {xml.lines[element]}: {problem}; accepted: {accepted}")

    if len(parts["graph"]) != 1:
        raise refused([xml.root, *parts["graph"]][-1], f"{len(parts['graph'])} graphs", "one")
    for hyperedge in parts["hyperedge"]:
        raise refused(hyperedge, "a hyperedge", "edges between two nodes")
    directed = parts["graph"][0].get("edgedefault") == "directed"
    ranks = {element.get("id"): rank for rank, element in enumerate(parts["node"])}
    edges: dict[tuple[int, int], Element] = {}
    for edge in parts["edge"]:
        names = edge.get("source"), edge.get("target")
        if unknown := [name for name in names if name not in ranks]:
            raise refused(edge, f"no node {unknown[0]!r}", "ends that are nodes of the file")
        if edge.get("directed", str(directed).lower()) != str(directed).lower():
            raise refused(edge, "directed and undirected edges", "one kind")
        source, target = (ranks[name] for name in names)
        if source == target:
            raise refused(edge, f"a loop at node {names[0]!r}", "a graph without loops (delete the edge)")
        ends = (source, target) if directed else (min(source, target), max(source, target))
        if (first := edges.setdefault(ends, edge)) is not edge:
            problem = f"a second edge from {names[0]!r} to {names[1]!r}, after line {xml.lines[first]}"
            raise refused(edge, problem, "a graph without parallel edges (delete one)")
    return Graph(len(parts["node"]), edges, directed=directed)
