"""Which graph a round has: drawn when it is asked for, from a key of seed and round alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from gossamer.config.registry import Component, FunctionComponent
from gossamer.errors import BadInput, listed, suggest
from gossamer.randomness import SHARED, generator
from gossamer.topology.graph import Direction, Graph, union
from gossamer.topology.layers import Layers
from gossamer.topology.sampler import Member, Place, SampledTopology, Sampler
from gossamer.topology.topology import Topology, located
from gossamer.topology.weights import MetropolisHastings, Uniform, Weights

REMEMBERED = 16
"""So many graphs are kept at least, the last used ones."""

REMEMBERED_SIZE = 2_000_000
"""More are kept as long as they have no more nodes and neighbours than this in all: asynchronous nodes are in rounds far
apart, and would draw the graphs of all these rounds again and again."""


class TopologySchedule:
    """The graphs and mixing weights of all rounds of an experiment.

    Nothing is drawn before it is asked for, and what was asked for before does not matter: a graph is drawn
    from the key (seed, ``"topology"``, period), where a period is the ``every_rounds`` rounds that share
    one graph.

    Args:
        topology: a :class:`Topology`, or the component of a function that returns one.
        nodes: number of nodes, at least 1.
        seed: the experiment's seed.
        samples: number of training samples of each node, for weights that need it.
        purpose: what the keys and errors call this topology: its field in the experiment.

    Raises:
        BadInput: for fewer than one node, something that is no topology, or not one sample count a node.
    """

    def __init__(
        self,
        topology: Component,
        nodes: int,
        seed: int,
        samples: Sequence[int] | None = None,
        *,
        purpose: str = "topology",
    ) -> None:
        if nodes < 1:
            raise BadInput(f"nodes: {nodes}; accepted: 1 or more")
        if samples is not None and (len(samples) != nodes or min(samples) < 0):
            raise BadInput(
                f"samples: {len(samples)} counts from {min(samples, default=0)} for {nodes} nodes; "
                f"accepted: {nodes} counts from 0"
            )
        self.topology = _as_topology(topology, purpose)
        self.nodes = nodes
        self.seed = seed
        self.samples = None if samples is None else tuple(samples)
        self._purpose = purpose
        self._recent: OrderedDict[Hashable, _Drawn] = OrderedDict()
        self._recent_size = 0
        layers = self.topology.layers if isinstance(self.topology, Layers) else {}
        self._layers = {
            name: TopologySchedule(layer, nodes, seed, samples, purpose=f"{purpose}.layers.{name}")
            for name, layer in layers.items()
        }

    @property
    def sampled(self) -> bool:
        """Whether nodes find their neighbours themselves; the graph is what they start with then."""
        return self.topology.sampled

    def sampler(self, member: Member, place: Place) -> Sampler | None:
        """A node's own part in finding its neighbours; None where there is a graph.

        Args:
            member: the node.
            place: its side of the engine.
        """
        if not isinstance(self.topology, SampledTopology):
            return None
        contacts = self.neighbors(member.rank, 0, "out")
        return self.topology.sampler(self.seed, contacts, member, place)

    @property
    def static(self) -> bool:
        """Whether one graph is known to serve all rounds."""
        if self._layers:
            return all(layer.static for layer in self._layers.values())
        # A topology with a rule of its own for when it changes may have any.
        return type(self.topology).drawn_at is Topology.drawn_at and self.topology.every_rounds is None

    def graph(self, round: int) -> Graph:
        """The graph of a round; the same object as long as it stays the same (and is remembered).

        Raises:
            BadInput: for parameters that no graph of that many nodes has.
        """
        return self._at(round).graph

    def neighbors(
        self, rank: int, round: int, direction: Direction = "both", layer: str | None = None
    ) -> tuple[int, ...]:
        """The neighbours of a node in a round, sorted.

        Args:
            rank: the node.
            round: the round.
            direction: as for :meth:`Graph.neighbors`; on a directed graph ``"in"`` or ``"out"`` must be
                named.
            layer: in that layer only.

        Raises:
            ValueError: for ``"both"`` on a directed graph, or a rank that is not there.
            BadInput: for a layer that the topology does not have.
        """
        return self._layer(layer).graph(round).neighbors(rank, direction)

    def mixing_weights(self, rank: int, round: int, layer: str | None = None) -> dict[int, float]:
        """What a node gives to each that it hears from in a round: rank -> weight, by rank.

        Its own weight is what is left to 1. On a directed graph these are the in-neighbours.

        Raises:
            ValueError: for a rank that is not there.
            BadInput: for weights that do not fit the graph, or a layer that the topology does not have.
        """
        schedule = self._layer(layer)
        drawn = schedule._at(round)
        if rank not in drawn.rows:
            drawn.rows[rank] = schedule._weights(drawn).row(drawn.graph, rank, self.samples)
        return dict(drawn.rows[rank])

    def check(self) -> None:
        """Find what is wrong before any work starts: parameters, connectivity and weights of round 0.

        A directed graph has to be strongly connected; of views to start with, the graph of who knows whom. Of a topology
        that changes by a rule (one-peer-exponential), the union over one cycle has to be connected. Later draws of a
        random topology are connected by construction.

        Raises:
            BadInput: naming the field, its value and what is accepted.
        """
        for layer in self._layers.values():
            layer.check()
        graph = union([self.graph(round) for round in range(self.topology.cycle(self.nodes))])
        if self.sampled:
            graph = Graph(self.nodes, graph.edges())  # who is asked gets to know who asks
        if not (self.topology.allow_disconnected or graph.connected):
            raise BadInput(
                f"{self._purpose}: {graph.components()} components in the graph of {self.topology.name_of()} "
                f"with {self.nodes} nodes; set {self._purpose}.allow_disconnected to accept"
            )
        self._weights(self._at(0))

    def _at(self, round: int) -> _Drawn:
        key = self._key(round)
        if key in self._recent:
            self._recent.move_to_end(key)
            return self._recent[key]
        drawn = self._recent[key] = _Drawn(self._draw(round))
        self._recent_size += drawn.size
        while len(self._recent) > REMEMBERED and self._recent_size > REMEMBERED_SIZE:
            _, oldest = self._recent.popitem(last=False)
            self._recent_size -= oldest.size
        return drawn

    def _key(self, round: int) -> Hashable:
        """Equal for two rounds exactly when they share a graph."""
        if self._layers:
            return tuple(layer._key(round) for layer in self._layers.values())
        return self.topology.drawn_at(self.nodes, round)

    def _draw(self, round: int) -> Graph:
        if self._layers:
            return union([layer.graph(round) for layer in self._layers.values()])
        first = self.topology.drawn_at(self.nodes, round)
        period = first // (self.topology.every_rounds or 1)
        with located(self._purpose):
            graph = self.topology.draw(self.nodes, generator(self.seed, self._purpose, SHARED, period), first)
        if graph.nodes != self.nodes:
            raise BadInput(
                f"{self._purpose}: {self.topology.name_of()} drew {graph.nodes} nodes; accepted: {self.nodes}"
            )
        return graph

    def _weights(self, drawn: _Drawn) -> Weights:
        if drawn.weights is None:
            weights = self.topology.weights or (Uniform() if drawn.graph.directed else MetropolisHastings())
            with located(self._purpose):
                weights.check(drawn.graph, self.samples)
            drawn.weights = weights
        return drawn.weights

    def _layer(self, name: str | None) -> TopologySchedule:
        if name is None:
            return self
        if name not in self._layers:
            accepted = listed(list(self._layers)) or "none, the topology has no layers"
            raise BadInput(f"layer {name!r}{suggest(name, self._layers)}; accepted: {accepted}")
        return self._layers[name]


class _Drawn:
    """A graph, with the rows of its mixing matrix that were asked for.

    Attributes:
        size: its nodes and their neighbours.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.size = graph.nodes + sum(graph.degree(rank, "in") for rank in range(graph.nodes))
        self.weights: Weights | None = None
        self.rows: dict[int, dict[int, float]] = {}


def _as_topology(component: Component, purpose: str) -> Topology:
    found = component.call() if isinstance(component, FunctionComponent) else component
    if not isinstance(found, Topology):
        raise BadInput(
            f"{purpose}: {component.name_of()} gives a {type(found).__name__}; accepted: a Topology"
        )
    return found
