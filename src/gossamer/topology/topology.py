"""The base of topologies: how often a graph is drawn, its mixing weights, whether it may be disconnected; and layers."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

import networkx as nx
import numpy as np
from pydantic import Field, field_serializer, field_validator, model_validator

from gossamer.config.registry import Component, ComponentField, build, register
from gossamer.errors import BadInput
from gossamer.topology.graph import Graph, NetworkX, union
from gossamer.topology.weights import Weights

ATTEMPTS = 100
"""A random topology fails after this number of disconnected draws in a row."""


class Topology(Component):
    """The graph of who may talk to whom, with mixing weights; it may change from round to round.

    A subclass declares its parameters as fields and implements :meth:`draw`. If its graph changes with the round by a
    rule, it also implements :meth:`drawn_at`, and :meth:`cycle` if only the union of several rounds is connected.
    """

    random: ClassVar[bool] = False
    """Whether two draws can differ."""
    sampled: ClassVar[bool] = False
    """Whether nodes find their neighbours themselves, starting from the graph that is drawn."""

    # The period after which a new graph is drawn; None: one graph for all rounds. For random topologies only.
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

    @abstractmethod
    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        """A graph of this topology. ``rng`` is the only source of randomness, ``round`` the round that :meth:`drawn_at`
        returned. A BadInput refuses parameters that no graph with that many nodes has."""

    def drawn_at(self, nodes: int, round: int) -> int:
        """The round at which the graph of ``round`` is drawn; rounds with the same result share a graph."""
        return 0 if self.every_rounds is None else round - round % self.every_rounds

    def cycle(self, nodes: int) -> int:
        """Number of rounds, from 0 on, whose union has to be connected."""
        return 1

    def sampler(self, seed: int, contacts: Sequence[int], node: Any, host: Any) -> Any:
        """The peer sampler of a node, if nodes find their neighbours themselves."""
        return None


@contextmanager
def located(field: str) -> Iterator[None]:
    """Rename ``topology.x`` in errors to ``<field>.x``: for topologies inside another one."""
    try:
        yield
    except BadInput as error:
        raise BadInput(*(re.sub(r"(^|(?<=or ))topology", field, line) for line in error.problems)) from None


class RandomTopology(Topology):
    """A topology that is drawn at random, repeatedly until the graph is connected.

    So the distribution is that of the model *given that the graph is connected*, and a sweep over seeds does not fail at
    one disconnected draw. With ``allow_disconnected`` the first draw is used.
    """

    random: ClassVar[bool] = True

    @abstractmethod
    def generate(self, nodes: int, rng: np.random.Generator) -> NetworkX:
        """One undirected draw of the model with the nodes 0 to n - 1, connected or not."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        for _ in range(ATTEMPTS):
            graph = self.generate(nodes, rng)
            if self.allow_disconnected or nx.is_connected(graph):
                return Graph.from_networkx(graph)
        raise BadInput(
            f"topology: {nx.number_connected_components(graph)} components in the last of {ATTEMPTS} draws of"
            f" {self.name_of()} with {nodes} nodes; accepted: a connected graph, or topology.allow_disconnected: true"
        )


@register("topology", "layers")
class Layers(Topology):
    """Named layers, each a topology with its own parameters, draws and weights; the graph is their union.

    An algorithm asks for a layer by name: ``node.neighbors(r, layer="near")``. Each layer has to be connected unless its
    own ``allow_disconnected`` is set. The union is directed if any layer is. The field ``weights`` applies to the union.
    """

    layers: dict[str, Topology] = Field(min_length=1)  # name -> topology, at least one

    @field_validator("layers", mode="before")
    @classmethod
    def _build_layers(cls, value: Any, info: Any) -> Any:
        if not isinstance(value, dict):
            return value
        built = {
            name: build("topology", each, info.context, f"topology.layers.{name}")
            for name, each in value.items()
        }
        for name, layer in built.items():
            if isinstance(layer, Topology) and layer.sampled:
                raise BadInput(f"topology.layers.{name}: {layer.name_of()}; accepted: one with a graph")
        return built

    @field_serializer("layers")
    def _layers_spec(self, layers: dict[str, Topology]) -> dict[str, Any]:
        return {name: layer.spec() for name, layer in layers.items()}

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        # A schedule does not call this: it keeps one schedule per layer, each with its own key, so that the graphs of a layer
        # do not depend on the other layers.
        return union([layer.draw(nodes, rng, layer.drawn_at(nodes, round)) for layer in self.layers.values()])

    def drawn_at(self, nodes: int, round: int) -> int:
        return round

    def cycle(self, nodes: int) -> int:
        return max(layer.cycle(nodes) for layer in self.layers.values())
