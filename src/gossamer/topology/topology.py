"""Topologies: when a graph is drawn, its mixing weights and layers, and the schedule of the graphs over all rounds."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from itertools import compress
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from jaxtyping import Float
from pydantic import Field, field_serializer, field_validator, model_validator

from gossamer.config.registry import Component, ComponentField, FilePath, FunctionComponent, build, register
from gossamer.errors import BadInput, GossamerError, cause, listed, suggest
from gossamer.randomness import SHARED, generator
from gossamer.topology.graph import Direction, Graph, NetworkX, union
from gossamer.topology.graph_files import read_matrix
from gossamer.topology.sampler import PeerSampler
from gossamer.topology.weights import MetropolisHastings, UniformWeights, Weights

ATTEMPTS = 100  # a random topology fails after this number of disconnected draws in a row
# The rounds of asynchronous nodes may be far apart, and a cycle comes back to its graphs. So the cache keeps the graphs that
# were used last: two for each node, and at least CYCLE, as long as they have at most CACHED_SIZE nodes and neighbours in
# total or are no more than CACHED_GRAPHS. (A neighbour takes some 100 bytes.)
CACHED_GRAPHS, CYCLE, CACHED_SIZE = 16, 64, 1_000_000


class Topology(Component):
    """The communication graph and its mixing weights. It may change from round to round.

    A subclass declares its parameters as fields and implements :meth:`draw`. If its graph changes with the round by a
    rule, it also implements :meth:`drawn_at`, and :meth:`cycle` if only the union of several rounds is connected."""

    # Whether nodes find their neighbours themselves, starting from the drawn graph.
    sampled: ClassVar[bool] = False

    # Number of rounds after which a new graph is drawn; None: one graph for all rounds. For random topologies only.
    every_rounds: int | None = Field(default=None, ge=1)
    # Mixing weights; None: metropolis-hastings if the graph is undirected, uniform if it is directed.
    weights: Annotated[Weights | None, ComponentField("weights", "topology.weights", optional=True)] = None
    allow_disconnected: bool = False  # accept a graph of several components

    @model_validator(mode="after")
    def _only_random_is_redrawn(self) -> Topology:
        if self.every_rounds is not None and not self.random:
            problem = f"topology.every_rounds: {self.every_rounds} for {self.name_of()}, which is not random"
            raise BadInput(f"{problem}; accepted: null (or, in layers, every_rounds of a random layer)")
        return self

    @property
    def random(self) -> bool:
        """Whether two draws can differ."""
        return False

    @abstractmethod
    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        """Draw a graph of this topology. ``rng`` is the only source of randomness; ``round`` is the round
        that :meth:`drawn_at` returned. BadInput for parameters for which no graph of this size exists.

        A subclass may ask for what nodes hold by further parameters of these names, and then gets them: ``samples``, the
        number of training samples of each node, and ``label_counts``, those of each class, int64 [nodes, classes] (None if
        targets are not classes). Both are counted before poisons."""

    def drawn_at(self, nodes: int, round: int) -> int:
        """The round at which the graph of ``round`` is drawn. Rounds with the same result share a graph."""
        return 0 if self.every_rounds is None else round - round % self.every_rounds

    def cycle(self, nodes: int) -> int:
        """Number of rounds, from 0 on, whose union has to be connected."""
        return 1

    def sampler(self, seed: int, contacts: Sequence[int], node: Any, host: Any) -> PeerSampler | None:
        """The peer sampler of a node, if nodes find their neighbours themselves."""
        return None


HELD = frozenset({"samples", "label_counts"})
"""The further parameters that a topology's ``draw`` may have."""


@contextmanager
def located(field: str) -> Iterator[None]:
    """Rename ``topology.x`` in errors to ``<field>.x``, for topologies inside another one. Other errors, of networkx or of
    a user's code, become BadInput."""
    try:
        yield
    except BadInput as error:
        raise BadInput(*(re.sub(r"(^|(?<=or ))topology", field, line) for line in error.problems)) from None
    except GossamerError:
        raise
    except Exception as error:  # a topology or weights may be the user's own
        raise BadInput(f"{field}: {cause(error)}; accepted: parameters for which there is a graph") from error


class RandomTopology(Topology):
    """A topology that is drawn at random, repeatedly until the graph is connected.

    The distribution is therefore that of the model *given that the graph is connected*, and a sweep over
    seeds does not fail at a disconnected draw. With ``allow_disconnected``, the first draw is used."""

    @property
    def random(self) -> bool:
        return True

    @abstractmethod
    def generate(self, nodes: int, rng: np.random.Generator) -> NetworkX:
        """One draw of the model with the nodes 0 to n - 1, connected or not."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        for _ in range(ATTEMPTS):
            graph = Graph.from_networkx(self.generate(nodes, rng))
            if self.allow_disconnected or not self.random or graph.connected:
                return graph
        problem = f"{ATTEMPTS} disconnected draws of {self.name_of()} with {nodes} nodes"
        raise BadInput(f"topology: {problem}; accepted: connected ones, or topology.allow_disconnected: true")


class CompositeTopology(Topology):
    """A topology composed of others. A schedule draws each of them with its own key, so that their graphs are
    independent."""

    @property
    @abstractmethod
    def parts(self) -> dict[str, Topology]:
        """Subfield of this topology -> topology."""

    @abstractmethod
    def combine(self, graphs: Sequence[Graph], rng: np.random.Generator | None) -> Graph:
        """The graph of a round, from the graphs of the parts. Without a generator, it has all possible links."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        parts = self.parts.values()
        return self.combine([part.draw(nodes, rng, part.drawn_at(nodes, round)) for part in parts], rng)

    def cycle(self, nodes: int) -> int:
        return max(part.cycle(nodes) for part in self.parts.values())


@register("topology", "layers")
class Layers(CompositeTopology):
    """Named layers, each a topology with its own parameters, draws and weights; the graph is their union.

    An algorithm asks for a layer by name: ``node.neighbors(r, layer="near")``. Each layer has to be connected unless its
    own ``allow_disconnected`` is set. The union is directed if any layer is. The field ``weights`` applies to the union."""

    layers: dict[str, Topology] = Field(min_length=1)  # name -> topology, at least one

    @field_validator(
        "layers", mode="before", json_schema_input_type=dict[str, Annotated[Any, ComponentField("topology")]]
    )
    @classmethod
    def _build_layers(cls, value: Any, info: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = {name: f"topology.layers.{name}" for name in value}
        built = {name: build("topology", value[name], info.context, fields[name]) for name in value}
        for name, layer in built.items():
            if isinstance(layer, Topology) and layer.sampled:
                raise BadInput(f"{fields[name]}: {layer.name_of()}; accepted: one with a graph")
        return built

    @field_serializer("layers")
    def _layers_spec(self, layers: dict[str, Topology]) -> dict[str, Any]:
        return {name: layer.spec() for name, layer in layers.items()}

    @property
    def parts(self) -> dict[str, Topology]:
        return {f"layers.{name}": layer for name, layer in self.layers.items()}

    def combine(self, graphs: Sequence[Graph], rng: np.random.Generator | None) -> Graph:
        return union(graphs)


@register("topology", "random-links")
class RandomLinks(CompositeTopology):
    """The links of another topology, each of which exists in a round with some probability, independently of
    other links and rounds (Kar & Moura, "Sensor networks with random links", 2008).

    All possible links together have to connect the nodes; those of one round need not. Default weights are
    metropolis-hastings, or uniform without ``symmetric``."""

    base: Annotated[Topology, ComponentField("topology", "topology.base")] = Field(
        default="complete", validate_default=True
    )
    # One probability for all links, or a text file with n lines of n probabilities: number j of line i is for
    # the link from i to j.
    probability: Annotated[float, Field(ge=0, le=1)] | FilePath
    # Whether both directions of a link are drawn together; otherwise the graph is directed.
    symmetric: bool = True
    every_rounds: int | None = Field(default=1, ge=1)

    @property
    def random(self) -> bool:
        return True

    @model_validator(mode="after")
    def _bare_base(self) -> RandomLinks:
        if self.base.sampled or self.base.weights is not None:
            accepted = "a topology with a graph, without weights"
            raise BadInput(f"topology.base: {self.base.spec()}; accepted: {accepted}")
        return self

    @cached_property
    def _matrix(self) -> Float[np.ndarray, "nodes nodes"]:
        """The probabilities of a file."""
        assert isinstance(self.probability, Path)
        P = read_matrix(self.probability, "topology.probability").values
        if ((P < 0) | (P > 1)).any() or (self.symmetric and (P != P.T).any()):
            accepted = "numbers from 0 to 1, and a symmetric matrix or topology.symmetric: false"
            raise BadInput(f"topology.probability: {self.probability}; accepted: {accepted}")
        return P

    @property
    def parts(self) -> dict[str, Topology]:
        return {"base": self.base}

    def combine(self, graphs: Sequence[Graph], rng: np.random.Generator | None) -> Graph:
        [graph] = graphs
        if graph.directed and self.symmetric:
            raise BadInput("topology.symmetric: true for a directed base; accepted: false")
        links = list(graph.edges())
        if not (graph.directed or self.symmetric):
            links += [(j, i) for i, j in links]
        drawn = np.zeros(len(links)) if rng is None else rng.random(len(links))
        present = self._probabilities(graph.nodes, links) > drawn
        return Graph(graph.nodes, compress(links, present), directed=not self.symmetric)

    def _probabilities(self, nodes: int, links: list[tuple[int, int]]) -> Float[np.ndarray, " links"]:
        if isinstance(self.probability, float):
            return np.full(len(links), self.probability)
        sources, targets = np.array(links, dtype=np.int64).reshape(-1, 2).T
        P, directions = self._matrix, 1 + self.symmetric
        if len(P) != nodes or np.count_nonzero(P[sources, targets]) * directions != np.count_nonzero(P):
            accepted = f"{nodes} rows, and 0 for pairs that topology.base does not link"
            raise BadInput(f"topology.probability: {self.probability}; accepted: {accepted}")
        return P[sources, targets]


@dataclass
class _DrawnGraph:
    """A graph, with the rows of its mixing matrix that were requested so far."""

    graph: Graph
    weights: Weights | None = None
    rows: dict[int, dict[int, float]] = field(default_factory=dict)


def _is_own(component: Component) -> bool:
    """Whether a component is the user's, so that what it returns is checked."""
    return not component.module_of().startswith("gossamer.")


class TopologySchedule:
    """The graphs and mixing weights of all rounds of an experiment.

    The key of a draw is (seed, ``purpose``, period), where a period consists of the ``every_rounds`` rounds
    that share a graph, and ``purpose`` is the topology's field in the experiment. The topology may be a
    component for a function that returns one. ``samples`` has the number of training samples of each node,
    for weights that need it.

    Attributes:
        asked: what :meth:`Topology.draw` asks for, of :data:`HELD`."""

    def __init__(
        self,
        topology: Component,
        nodes: int,
        seed: int,
        samples: Sequence[int] | None = None,
        *,
        purpose: str = "topology",
    ) -> None:
        resolved = topology.call() if isinstance(topology, FunctionComponent) else topology
        if not isinstance(resolved, Topology):
            problem = f"{topology.name_of()} returns {type(resolved).__name__}"
            raise BadInput(f"{purpose}: {problem}; accepted: Topology")
        self.topology, self.nodes, self.seed, self.samples = resolved, nodes, seed, samples
        self._purpose = purpose
        self._undrawn = self._weights_generator(0)  # for rules that do not draw
        self._held: dict[str, Any] = {}
        self._asked = HELD & signature(resolved.draw).parameters.keys()
        self._cache: OrderedDict[Hashable, _DrawnGraph] = OrderedDict()
        self._last: tuple[int, _DrawnGraph] | None = None  # the last requested round, and its graph
        parts = resolved.parts if isinstance(resolved, CompositeTopology) else {}
        self._parts = [
            TopologySchedule(part, nodes, seed, samples, purpose=f"{purpose}.{name}")
            for name, part in parts.items()
        ]
        names = resolved.layers if isinstance(resolved, Layers) else ()
        self._layers = dict(zip(names, self._parts, strict=False))
        self.asked: frozenset[str] = self._asked.union(*(part.asked for part in self._parts))

    def give(self, **held: Any) -> None:
        """Give what was asked for, by name, before the first graph is drawn."""
        self._held = held
        for part in self._parts:
            part.give(**held)

    @property
    def sampled(self) -> bool:
        """Whether nodes sample their neighbours themselves, starting from the graph of round 0."""
        return self.topology.sampled

    def sampler(self, node: Any, host: Any) -> PeerSampler | None:
        """The peer sampler of a node; None for a topology with a graph."""
        contacts = self.neighbors(node.rank, 0, "out") if self.sampled else ()
        return self.topology.sampler(self.seed, contacts, node, host)

    @property
    def static(self) -> bool:
        """Whether one graph is known to serve all rounds."""
        # A topology that overrides drawn_at may change at any round.
        fixed = type(self.topology).drawn_at is Topology.drawn_at and self.topology.every_rounds is None
        return fixed and all(part.static for part in self._parts)

    @property
    def static_weights(self) -> bool:
        """Whether one mixing matrix is known to serve all rounds."""
        return self.static and (self.topology.weights is None or self.topology.weights.static)

    def graph(self, round: int) -> Graph:
        """The graph of a round. Rounds that share a graph get the same object while it is cached."""
        return self._at(round).graph

    def neighbors(
        self, rank: int, round: int, direction: Direction = "both", layer: str | None = None
    ) -> tuple[int, ...]:
        """The neighbours of a node in a round, sorted; with ``layer``, only those in that layer. Errors are
        those of :meth:`Graph.neighbors`, and BadInput for an unknown layer."""
        return self._layer(layer).graph(round).neighbors(rank, direction)

    def mixing_weights(self, rank: int, round: int, layer: str | None = None) -> dict[int, float]:
        """The weights that a node gives to its in-neighbours in a round: rank -> weight, in rank order. Its own weight is 1
        minus their sum. Raises BadInput for weights that do not fit the graph, or a layer that the topology does not have."""
        schedule = self._layer(layer)
        drawn = schedule._at(round)
        weights = schedule._weights(drawn)
        if not weights.static:
            return schedule._row(weights, drawn.graph, rank, round)
        if rank not in drawn.rows:
            drawn.rows[rank] = schedule._row(weights, drawn.graph, rank, 0)
        return dict(drawn.rows[rank])

    def _row(self, weights: Weights, graph: Graph, rank: int, round: int) -> dict[int, float]:
        own = _is_own(weights)
        rng = self._weights_generator(round) if own or weights.draws else self._undrawn
        with located(self._purpose):
            row = weights.row(graph, rank, self.samples, round, rng)
        if own:
            self._check_row(weights, row, graph.neighbors(rank, "in"))
        return row

    def _weights_generator(self, round: int) -> np.random.Generator:
        return generator(self.seed, f"{self._purpose}/weights", SHARED, round)

    def _check_row(self, weights: Weights, row: Any, senders: Sequence[int]) -> None:
        """Refuse weights of the user's own rule that do not fit a node with these in-neighbours."""
        whole = isinstance(row, dict) and list(row) == list(senders)
        if not (whole and all(isinstance(weight, Real) and math.isfinite(weight) for weight in row.values())):
            text = f"{weights.name_of()} gives {row!r:.200} to a node with the in-neighbours {list(senders)!r:.100}"
            raise BadInput(
                f"{self._purpose}.weights: {text}; accepted: a finite weight of each, in rank order"
            )

    def check(self) -> None:
        """Check the parameters, the connectivity and the weights of round 0. Raises BadInput.

        A directed graph has to be strongly connected. If the topology changes by a rule
        (one-peer-exponential), the union over one cycle has to be connected. If nodes sample their peers, the
        undirected graph of the first views has to be connected; if links are random, the graph of all
        possible links. Later draws of a random topology are connected by construction."""
        for layer in self._layers.values():
            layer.check()
        rounds = range(self.topology.cycle(self.nodes))
        graph = union([self._combined(r, None) if self._parts else self.graph(r) for r in rounds])
        if self.sampled:
            graph = Graph(self.nodes, graph.edges())  # a node learns of the peers that contact it
        if not (self.topology.allow_disconnected or graph.connected):
            problem = f"{graph.components()} components in the graph of {self.topology.name_of()} with {self.nodes} nodes"
            if alone := graph.alone:
                more = f" and {len(alone) - 5} more" if len(alone) > 5 else ""
                ranks = ", ".join(map(str, alone[:5]))
                problem += f", without neighbours: {ranks}{more} (ranks count from 0)"
            accepted = f"a connected graph, or {self._purpose}.allow_disconnected: true"
            raise BadInput(f"{self._purpose}: {problem}; accepted: {accepted}")
        if _is_own(self._weights(self._at(0))) and not self.sampled:
            first = self.graph(0)
            for rank in {0, max(range(self.nodes), key=lambda rank: first.degree(rank, "in"))}:
                self.mixing_weights(rank, 0)

    def _at(self, round: int) -> _DrawnGraph:
        if self._last is not None and self._last[0] == round:  # the usual case in a synchronous run
            return self._last[1]
        key = self._key(round)
        drawn = self._cache.get(key)
        if drawn is None:
            drawn = self._cache[key] = _DrawnGraph(self._draw(round))
            fitting = max(CACHED_GRAPHS, CACHED_SIZE // (drawn.graph.nodes + drawn.graph.arcs))
            if len(self._cache) > min(fitting, max(CYCLE, 2 * self.nodes)):
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        self._last = round, drawn
        return drawn

    def _key(self, round: int) -> Hashable:
        """Equal for two rounds exactly when they share a graph."""
        return self.topology.drawn_at(self.nodes, round), *(part._key(round) for part in self._parts)

    def _draw(self, round: int) -> Graph:
        first = self.topology.drawn_at(self.nodes, round)
        period = first // (self.topology.every_rounds or 1)
        rng = generator(self.seed, self._purpose, SHARED, period)
        if self._parts:
            return self._combined(round, rng)
        if unknown := sorted(self._asked - self._held.keys()):
            problem = f"{self.topology.name_of()}.draw asks for {listed(unknown)}"
            raise BadInput(f"{self._purpose}: {problem}; accepted: in a run, which has the nodes' data")
        with located(self._purpose):
            graph = self.topology.draw(
                self.nodes, rng, first, **{name: self._held[name] for name in self._asked}
            )
        if not isinstance(graph, Graph):
            kind = f"{type(graph).__module__.partition('.')[0]}.{type(graph).__name__}"
            problem = f"{self.topology.name_of()}.draw returns {kind}"
            accepted = "gossamer.topology.Graph, as Graph.from_networkx makes it"
            raise BadInput(f"{self._purpose}: {problem}; accepted: {accepted}")
        if graph.nodes != self.nodes:
            problem = f"{self.topology.name_of()} returns a graph of {graph.nodes} nodes"
            raise BadInput(f"{self._purpose}: {problem}; accepted: {self.nodes}, as in nodes")
        return graph

    def _combined(self, round: int, rng: np.random.Generator | None) -> Graph:
        assert isinstance(self.topology, CompositeTopology)
        with located(self._purpose):
            return self.topology.combine([part.graph(round) for part in self._parts], rng)

    def _weights(self, drawn: _DrawnGraph) -> Weights:
        if drawn.weights is None:
            weights = self.topology.weights or (
                UniformWeights() if drawn.graph.directed else MetropolisHastings()
            )
            with located(self._purpose):
                weights.check(drawn.graph, self.samples)
            drawn.weights = weights
        return drawn.weights

    def _layer(self, name: str | None) -> TopologySchedule:
        if name is None:
            return self
        if name not in self._layers:
            accepted = listed(self._layers) or "none, the topology has no layers"
            raise BadInput(f"layer {name!r}{suggest(name, self._layers)}; accepted: {accepted}")
        return self._layers[name]
