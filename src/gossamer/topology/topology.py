"""What every topology has: how often it is drawn, its mixing weights, and whether it may be disconnected."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import networkx as nx
import numpy as np
from pydantic import Field, field_serializer, field_validator, model_validator

from gossamer.config.registry import Component, build
from gossamer.errors import BadInput
from gossamer.topology.graph import Graph, NetworkX
from gossamer.topology.weights import Weights

ATTEMPTS = 100
"""How many draws of a random graph may come out disconnected before that is an error."""


class Topology(Component):
    """The graph of who may talk to whom, with mixing weights; it may change with time.

    A subclass gives its parameters as fields and implements :meth:`draw`. One that changes with the round
    by a rule of its own also implements :meth:`drawn_at`, and :meth:`cycle` where only the union of several
    rounds is connected.

    Args:
        every_rounds: draw afresh every so many rounds; None: one graph for all rounds. Only for random
            topologies.
        weights: mixing weights; None: metropolis-hastings where the graph is undirected, uniform where it
            is directed.
        allow_disconnected: accept a graph of several components.

    Raises:
        BadInput: for ``every_rounds`` on a topology that has only one graph to draw.
    """

    random: ClassVar[bool] = False
    """Whether two draws can differ."""
    sampled: ClassVar[bool] = False
    """Whether nodes find their neighbours themselves, and what is drawn is only what they start with."""

    every_rounds: int | None = Field(default=None, ge=1)
    weights: Weights | None = None
    allow_disconnected: bool = False

    @field_validator("weights", mode="before")
    @classmethod
    def _build_weights(cls, value: Any, info: Any) -> Any:  # a ValidationInfo: no run-time checks
        return None if value is None else build("weights", value, info.context, "topology.weights")

    @field_serializer("weights")
    def _weights_spec(self, weights: Weights | None) -> dict[str, Any] | None:
        return None if weights is None else weights.spec()

    @model_validator(mode="after")
    def _only_random_is_redrawn(self) -> Topology:
        if self.every_rounds is not None and not self.random:
            raise BadInput(
                f"topology.every_rounds: {self.every_rounds} for {self.name_of()}, which is not random; "
                "accepted: null (only random topologies are drawn afresh; of layers, each for itself)"
            )
        return self

    @abstractmethod
    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        """A graph of this topology.

        Args:
            nodes: number of nodes, at least 1.
            rng: the only source of randomness.
            round: the round that :meth:`drawn_at` gave.

        Raises:
            BadInput: for parameters that no graph of that many nodes has.
        """

    def drawn_at(self, nodes: int, round: int) -> int:
        """The round at which the graph of ``round`` is drawn: rounds with the same answer share one graph."""
        return 0 if self.every_rounds is None else round - round % self.every_rounds

    def cycle(self, nodes: int) -> int:
        """Of how many rounds, from 0, the union has to be connected."""
        return 1


@contextmanager
def located(field: str) -> Iterator[None]:
    """Errors call a field ``topology.x``; in a part of the topology that is ``topology.layers.name.x``, say."""
    try:
        yield
    except BadInput as error:
        if field == "topology":
            raise
        problems = (re.sub(r"^topology|(?<=set )topology", field, line) for line in error.problems)
        raise BadInput(*problems) from None


class RandomTopology(Topology):
    """A topology that is drawn at random, again and again until the graph is connected.

    So the distribution is that of the model *given that the graph is connected*, and a sweep over seeds
    does not fail at the one seed that came out disconnected. With ``allow_disconnected`` the first draw is
    taken.
    """

    random: ClassVar[bool] = True

    @abstractmethod
    def generate(self, nodes: int, rng: np.random.Generator) -> NetworkX:
        """One draw of the model, connected or not, with the nodes 0 to n - 1; undirected."""

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        """A connected graph, or any where disconnected ones are accepted.

        Raises:
            BadInput: for parameters that no such graph has, or after :data:`ATTEMPTS` disconnected draws.
        """
        for _ in range(ATTEMPTS):
            graph = self.generate(nodes, rng)
            if self.allow_disconnected or nx.is_connected(graph):
                return Graph.from_networkx(graph)
        raise BadInput(
            f"topology: {nx.number_connected_components(graph)} components in the last of {ATTEMPTS} draws "
            f"of {self.name_of()} with {nodes} nodes, none of them connected; "
            "set topology.allow_disconnected to accept"
        )


def networkx_seed(rng: np.random.Generator) -> int:
    """A seed for networkx, which draws from Python's own generator."""
    return int(rng.integers(2**63))
