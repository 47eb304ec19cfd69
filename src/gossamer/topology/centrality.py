"""Mixing weights by scores of the nodes: random ones, or their centrality in the graph.

Sakarvadia et al., "Topology-Aware Knowledge Propagation in Decentralized Learning" (2025). A node i divides its weight
among itself and its in-neighbours by their scores s: W_ij = exp(s_j / temperature) / sum_k exp(s_k / temperature), over k
in the closed neighbourhood of i. So knowledge spreads faster from nodes with high scores. The rows of W sum to 1; its columns
do not, so nodes agree on a mean in which some nodes count more than others (``gossamer topology`` prints by how much).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

import networkx as nx
import numpy as np
from pydantic import Field, model_validator

from gossamer.config.registry import Component, ComponentField, register
from gossamer.errors import BadInput
from gossamer.topology.graph import Graph, NetworkX
from gossamer.topology.weights import Row, Samples, Weights

Scores = Mapping[int, float] | Sequence[float]  # rank -> score
Measure = Literal["degree", "betweenness", "closeness", "eigenvector", "pagerank"]
_MEASURES: dict[str, Callable[..., Any]] = {
    "degree": nx.degree_centrality,
    "betweenness": partial(nx.betweenness_centrality, normalized=True, endpoints=True),
    "closeness": nx.closeness_centrality,
    "eigenvector": partial(nx.eigenvector_centrality, max_iter=10_000, tol=1e-9),
    "pagerank": partial(nx.pagerank, max_iter=1_000, tol=1e-9),
}


class TemperatureSchedule(Component):
    """Base of schedules: the factor of 1 / temperature in each round. A negative one prefers nodes with low scores."""

    @abstractmethod
    def factor_at(self, round: int) -> float:
        """The factor of a round, from 0."""


@register("temperature", "exponential")
class ExponentialTemperature(TemperatureSchedule):
    """``factor``^r, but at least ``minimum``."""

    factor: float = Field(default=0.95, gt=0, le=1)
    minimum: float = Field(default=0.0, ge=0)

    def factor_at(self, round: int) -> float:
        return max(self.minimum, self.factor**round)


@register("temperature", "cosine")
class CosineTemperature(TemperatureSchedule):
    """Falls from 1 to ``minimum`` along half a cosine, and starts again (Loshchilov & Hutter, 2017), as torch's
    CosineAnnealingWarmRestarts. ``rounds`` is the length of the first period; each is ``multiplier`` times the one before."""

    rounds: int = Field(ge=1)
    multiplier: int = Field(default=1, ge=1)
    minimum: float = Field(default=0.0, le=1)

    def factor_at(self, round: int) -> float:
        period = self.rounds
        if self.multiplier == 1:
            round %= period
        while round >= period:
            round, period = round - period, period * self.multiplier
        return self.minimum + (1 - self.minimum) * (1 + math.cos(math.pi * round / period)) / 2


@register("temperature", "oscillating")
class OscillatingTemperature(TemperatureSchedule):
    """1 for ``rounds`` rounds, -1 for as many, and so on."""

    rounds: int = Field(ge=1)

    def factor_at(self, round: int) -> float:
        return -1.0 if round // self.rounds % 2 else 1.0


class ScoreWeights(Weights):
    """Base of weights by scores over the closed neighbourhood; row-stochastic. A subclass implements :meth:`scores`."""

    # Of the softmax, the lower the more unequal the weights; null: weights in proportion to the scores.
    temperature: float | None = Field(default=0.1, gt=0)
    # How 1 / temperature changes with the round; null: not at all.
    schedule: Annotated[
        TemperatureSchedule | None, ComponentField("temperature", "topology.weights.schedule", optional=True)
    ] = None

    @model_validator(mode="after")
    def _schedule_has_a_temperature(self) -> ScoreWeights:
        if self.schedule is not None and self.temperature is None:
            raise BadInput("topology.weights.temperature: null with a schedule; accepted: a number above 0")
        return self

    @property
    def static(self) -> bool:
        return self.schedule is None

    @abstractmethod
    def scores(self, graph: Graph, rank: int, rng: np.random.Generator) -> Scores:
        """Scores from 0 on of a node and its in-neighbours, at least."""

    def row(self, graph: Graph, rank: int, samples: Samples, round: int, rng: np.random.Generator) -> Row:
        scores = self.scores(graph, rank, rng)
        factor = 1.0 if self.schedule is None else self.schedule.factor_at(round)
        closed = {j: scores[j] for j in sorted((rank, *graph.neighbors(rank, "in")))}
        found = shares(closed, self.temperature, factor)
        if len(closed) > 1 and not any(found.values()):
            problem = f"null, with scores of 0 around node {rank}; accepted: a number above 0"
            raise BadInput(f"topology.weights.temperature: {problem}")
        del found[rank]
        return found


def shares(scores: Mapping[int, float], temperature: float | None, factor: float = 1.0) -> dict[int, float]:
    """Weights that sum to 1: the softmax of ``factor`` * scores / temperature, or without a temperature in proportion to the
    scores (all 0 if these are)."""
    if temperature is None:
        found = dict(scores)
    else:
        exponents = {j: factor * score / temperature for j, score in scores.items()}
        largest = max(exponents.values())
        found = {j: math.exp(each - largest) for j, each in exponents.items()}
    total = math.fsum(found.values()) or 1.0
    return {j: each / total for j, each in found.items()}


@register("weights", "random")
class Random(ScoreWeights):
    """Scores are drawn from [0, 1) in each round, one for each node, which all of its neighbours use: the paper's control."""

    @property
    def static(self) -> bool:
        return False

    def scores(self, graph: Graph, rank: int, rng: np.random.Generator) -> Scores:
        drawn: list[float] = rng.random(graph.nodes).tolist()
        return drawn


@register("weights", "centrality")
class Centrality(ScoreWeights):
    """Scores are centralities as networkx defines them, also on directed graphs: degree and betweenness (Freeman, 1979; here
    paths count for their ends too), closeness, eigenvector, PageRank.

    They are knowledge of the whole graph. With ``hops``, a node computes them in its ego network, the graph of the nodes at
    most this far away, which it can learn from its neighbours."""

    measure: Measure = "degree"
    # Radius of the ego network; null: the whole graph. (One hop would show a node's own links, and few of its neighbours'.)
    hops: int | None = Field(default=None, ge=2)

    def check(self, graph: Graph, samples: Samples) -> None:
        if self.hops is not None and graph.directed:
            raise BadInput(f"topology.weights.hops: {self.hops} on a directed graph; accepted: null")
        if self.measure == "eigenvector" and self.hops is None and not graph.connected:
            problem = "eigenvector on a disconnected graph, where it is not unique"
            raise BadInput(f"topology.weights.measure: {problem}; accepted: another measure, or hops")
        if self.hops is None:
            centralities(graph, self.measure)  # once, before the processes of nodes are forked from this one

    def scores(self, graph: Graph, rank: int, rng: np.random.Generator) -> Scores:
        if self.hops is None:
            return centralities(graph, self.measure)
        return _ego_centralities(graph, self.measure, rank, self.hops)


@lru_cache(maxsize=16)
def centralities(graph: Graph, measure: Measure) -> Scores:
    """The centrality of each node, computed once for each graph."""
    found: Scores = _MEASURES[measure](_networkx(graph))
    return found


@lru_cache(maxsize=4096)
def _ego_centralities(graph: Graph, measure: Measure, rank: int, hops: int) -> Scores:
    found: Scores = _MEASURES[measure](nx.ego_graph(_networkx(graph), rank, radius=hops))
    return found


@lru_cache(maxsize=4)
def _networkx(graph: Graph) -> NetworkX:
    return graph.to_networkx()
