"""Mixing weights: row i of the mixing matrix W has the weights of node i, x_i <- W_ii x_i + sum_j W_ij x_j,
over the nodes j that may send to i. W_ii is 1 minus the sum of the others, so the rows of W sum to 1."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Annotated, Any, ClassVar, Literal

import networkx as nx
import numpy as np
from jaxtyping import Float
from pydantic import Field, model_validator

from gossamer.config.ranges import Factor
from gossamer.config.registry import Component, ComponentField, FilePath, register
from gossamer.errors import BadInput
from gossamer.topology.graph import Graph, NetworkX
from gossamer.topology.graph_files import read_matrix

Samples = Sequence[int] | None  # number of training samples of each node, if known
Row = dict[int, float]
Scores = Mapping[int, float] | Sequence[float]  # rank -> score
CentralityMeasure = Literal["degree", "betweenness", "closeness", "eigenvector", "pagerank"]
_MEASURES: dict[str, Callable[..., Any]] = {
    "degree": nx.degree_centrality,
    "betweenness": partial(nx.betweenness_centrality, normalized=True, endpoints=True),
    "closeness": nx.closeness_centrality,
    "eigenvector": partial(nx.eigenvector_centrality, max_iter=10_000, tol=1e-9),
    "pagerank": partial(nx.pagerank, max_iter=1_000, tol=1e-9),
}


class Weights(Component):
    """A rule for the mixing matrix of a graph.

    Attributes:
        draws: whether a built-in rule's :meth:`row` draws from ``rng``. If not, all rows get the same generator: a new one
            takes longer than most rows."""

    draws: ClassVar[bool] = True

    def check(self, graph: Graph, samples: Samples) -> None:
        """Check that the rule suits a graph and the nodes' numbers of training samples (None if unknown).
        Called before :meth:`row`. Raises BadInput otherwise."""

    @property
    def static(self) -> bool:
        """Whether a graph has the same weights in all rounds. If so, :meth:`row` gets round 0."""
        return True

    @abstractmethod
    def row(self, graph: Graph, rank: int, samples: Samples, round: int, rng: np.random.Generator) -> Row:
        """The weights that a node gives to its in-neighbours: rank -> weight, in rank order, without its own. ``rng`` is the
        only source of randomness; in one round it draws the same numbers for every rank."""


@register("weights", "metropolis-hastings")
class MetropolisHastings(Weights):
    """W_ij = 1 / (1 + max(d_i, d_j)), with d the degree: symmetric, hence doubly stochastic. Undirected graphs only.

    Repeated mixing converges to the plain average on any connected graph. Xiao & Boyd, "Fast linear iterations for
    distributed averaging" (2004); Xiao, Boyd & Lall, "A scheme for robust distributed sensor fusion based on average
    consensus" (2005)."""

    draws: ClassVar[bool] = False

    def check(self, graph: Graph, samples: Samples) -> None:
        _check_undirected(self, graph)

    def row(self, graph: Graph, rank: int, samples: Samples, round: int, rng: np.random.Generator) -> Row:
        degree = graph.degree(rank)
        return {other: 1 / (1 + max(degree, graph.degree(other))) for other in graph.neighbors(rank)}


def _check_undirected(weights: Weights, graph: Graph) -> None:
    if graph.directed:
        accepted = "uniform, data-size, random, centrality, given or null"
        raise BadInput(f"topology.weights: {weights.name_of()} on a directed graph; accepted: {accepted}")


@register("weights", "uniform")
class UniformWeights(Weights):
    """W_ij = 1 / (1 + d_i), with d_i the (in-)degree: the plain mean over the closed neighbourhood; row-stochastic, and
    doubly stochastic if all degrees are equal."""

    draws: ClassVar[bool] = False

    def row(self, graph: Graph, rank: int, samples: Samples, round: int, rng: np.random.Generator) -> Row:
        senders = graph.neighbors(rank, "in")
        return dict.fromkeys(senders, 1 / (1 + len(senders)))


@register("weights", "data-size")
class DataSize(Weights):
    """W_ij = n_j / (n_i + sum of n_k over the in-neighbours k), with n the numbers of samples:
    row-stochastic, the local form of the weights of federated averaging (McMahan et al., 2017, algorithm 1)."""

    draws: ClassVar[bool] = False

    def check(self, graph: Graph, samples: Samples) -> None:
        if samples is None:
            problem = "data-size without the number of samples of each node"
            raise BadInput(f"topology.weights: {problem}; accepted: metropolis-hastings, uniform, given")

    def row(self, graph: Graph, rank: int, samples: Samples, round: int, rng: np.random.Generator) -> Row:
        assert samples is not None  # otherwise check() would have raised
        senders = graph.neighbors(rank, "in")
        total = samples[rank] + sum(samples[other] for other in senders)
        return {other: samples[other] / total for other in senders}


@register("weights", "ccs")
class CCS(Weights):
    """The weights of SWIFT for clients of equal influence: symmetric, hence doubly stochastic.

    Nodes choose weights in order of descending degree. A node divides the remainder of 1 evenly among itself
    and its remaining edges. Two nodes of equal degree use the smaller of their two shares.

    Bornstein et al., "SWIFT: Rapid Decentralized Federated Learning via Wait-Free Model Communication", ICLR
    2023, as in the authors' code for uniform influence p_i = 1/n. Here, the weight of an edge is also at most
    1 / (1 + d_j), where j is its end of lower degree; otherwise the neighbours of j could together take more
    than 1 from it. On irregular graphs, W can therefore differ from the published rule."""

    draws: ClassVar[bool] = False

    def check(self, graph: Graph, samples: Samples) -> None:
        _check_undirected(self, graph)

    def row(self, graph: Graph, rank: int, samples: Samples, round: int, rng: np.random.Generator) -> Row:
        return dict(ccs(graph)[rank])


@lru_cache(maxsize=8)
def ccs(graph: Graph) -> tuple[Row, ...]:
    """All rows of the matrix of :class:`CCS`, cached because each node of a simulation requests its own."""
    degrees = [graph.degree(rank) for rank in range(graph.nodes)]
    chosen: list[dict[int, float]] = [{} for _ in degrees]
    for degree in sorted(set(degrees), reverse=True):
        choosing = [rank for rank in range(graph.nodes) if degrees[rank] == degree]
        share = {i: (1 - math.fsum(chosen[i].values())) / (1 + degree - len(chosen[i])) for i in choosing}
        for i in choosing:
            for j in graph.neighbors(i):
                if degrees[j] <= degree:
                    limit = share[j] if degrees[j] == degree else 1 / (1 + degrees[j])
                    chosen[i][j] = chosen[j][i] = min(share[i], limit)
    return tuple(dict(sorted(row.items())) for row in chosen)


@register("weights", "given")
class Given(Weights):
    """A mixing matrix from a text file: one line per receiver, one number per sender, ``#`` comments.

    Negative weights are accepted, since the fastest averaging may require them (Xiao & Boyd, 2004)."""

    draws: ClassVar[bool] = False

    # The file; n lines of n numbers, separated by spaces or commas. Each row sums to 1 (to 1e-6).
    path: FilePath

    @cached_property
    def _matrix(self) -> Float[np.ndarray, "nodes nodes"]:
        return read_matrix(self.path, "topology.weights.path").values

    def check(self, graph: Graph, samples: Samples) -> None:
        W, where = self._matrix, f"topology.weights.path: {self.path}"
        if len(W) != graph.nodes:
            raise BadInput(f"{where}: {len(W)} rows for {graph.nodes} nodes; accepted: one per node")
        sums = W.sum(axis=1)
        if not np.allclose(sums, 1, rtol=0, atol=1e-6):
            rank = int(np.argmax(abs(sums - 1)))
            raise BadInput(f"{where}: row {rank} sums to {sums[rank]:.9g}; accepted: 1")
        for rank, row in enumerate(W):
            for other in set(np.flatnonzero(row).tolist()) - {rank, *graph.neighbors(rank, "in")}:
                problem = f"{row[other]:.9g} in row {rank}, column {other}"
                raise BadInput(f"{where}: {problem}, but the graph has no edge from {other}; accepted: 0")

    def row(self, graph: Graph, rank: int, samples: Samples, round: int, rng: np.random.Generator) -> Row:
        return {other: float(self._matrix[rank, other]) for other in graph.neighbors(rank, "in")}


# --- by scores of the nodes: random ones, or their centrality in the graph


class TemperatureSchedule(Component):
    """Base class of temperature schedules: the factor of 1 / temperature in each round. A negative factor
    prefers nodes with low scores."""

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
    """Falls from 1 to ``minimum`` along half a cosine, and restarts (Loshchilov & Hutter, 2017), as torch's
    CosineAnnealingWarmRestarts. ``rounds`` is the length of the first period; each period is ``multiplier``
    times as long as the previous one."""

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
    """Alternates between 1 and -1 every ``rounds`` rounds."""

    rounds: int = Field(ge=1)

    def factor_at(self, round: int) -> float:
        return -1.0 if round // self.rounds % 2 else 1.0


class ScoreWeights(Weights):
    """Base class of weights from node scores (Sakarvadia et al., "Topology-Aware Knowledge Propagation in
    Decentralized Learning", 2025). A subclass implements :meth:`scores`.

    A node i divides its weight among itself and its in-neighbours by their scores s: W_ij = exp(s_j /
    temperature) / sum_k exp(s_k / temperature), over k in the closed neighbourhood of i. The columns of W do
    not sum to 1, so nodes agree on a mean in which some nodes count more than others (``gossamer topology``
    prints their influence)."""

    # Temperature of the softmax: the lower, the more unequal the weights. Null: weights proportional to the scores.
    temperature: Factor | None = 0.1
    # How 1 / temperature changes with the round; null: constant.
    schedule: Annotated[
        TemperatureSchedule | None, ComponentField("temperature", "topology.weights.schedule", optional=True)
    ] = None

    @model_validator(mode="after")
    def _schedule_has_a_temperature(self) -> ScoreWeights:
        if self.schedule is not None and self.temperature is None:
            raise ValueError("a temperature with a schedule")
        return self

    @property
    def static(self) -> bool:
        return self.schedule is None

    @abstractmethod
    def scores(self, graph: Graph, rank: int, rng: np.random.Generator) -> Scores:
        """Non-negative scores of at least the node and its in-neighbours."""

    def row(self, graph: Graph, rank: int, samples: Samples, round: int, rng: np.random.Generator) -> Row:
        scores = self.scores(graph, rank, rng)
        factor = 1.0 if self.schedule is None else self.schedule.factor_at(round)
        closed = {j: scores[j] for j in sorted((rank, *graph.neighbors(rank, "in")))}
        weights = shares(closed, self.temperature, factor)
        del weights[rank]
        return weights


def shares(scores: Mapping[int, float], temperature: float | None, factor: float = 1.0) -> dict[int, float]:
    """Weights that sum to 1: the softmax of ``factor`` * scores / temperature or, without a temperature,
    proportional to the scores (all 0 if the scores are)."""
    if temperature is None:
        terms = dict(scores)
    else:
        exponents = {j: factor * score / temperature for j, score in scores.items()}
        largest = max(exponents.values())
        terms = {j: math.exp(exponent - largest) for j, exponent in exponents.items()}
    total = math.fsum(terms.values()) or 1.0
    return {j: term / total for j, term in terms.items()}


@register("weights", "random")
class Random(ScoreWeights):
    """Each node's score is drawn from [0, 1) in each round, and all of its neighbours use it: the paper's control."""

    @property
    def static(self) -> bool:
        return False

    def scores(self, graph: Graph, rank: int, rng: np.random.Generator) -> Scores:
        drawn: list[float] = rng.random(graph.nodes).tolist()
        return drawn


@register("weights", "centrality")
class Centrality(ScoreWeights):
    """Scores are centralities as defined by networkx, also on directed graphs: degree and betweenness
    (Freeman, 1979; here paths count for their end points too, networkx's ``endpoints=True``, as in the code of
    Sakarvadia et al., 2025), closeness, eigenvector, PageRank.

    They require the whole graph. With ``hops``, a node computes them in its ego network, the graph of the
    nodes within this distance, which it can learn from its neighbours."""

    draws: ClassVar[bool] = False

    measure: CentralityMeasure = "degree"
    # Radius of the ego network; null: the whole graph. (One hop shows the node's own links, but few of its
    # neighbours'.)
    hops: int | None = Field(default=None, ge=2)

    def check(self, graph: Graph, samples: Samples) -> None:
        if self.hops is not None and graph.directed:
            raise BadInput(f"topology.weights.hops: {self.hops} on a directed graph; accepted: null")
        if self.measure == "eigenvector" and self.hops is None and not graph.connected:
            problem = "eigenvector on a disconnected graph, where it is not unique"
            raise BadInput(f"topology.weights.measure: {problem}; accepted: another measure, or hops")
        if self.hops is None:
            # Computed once, before the nodes' processes are forked from this one.
            centralities(graph, self.measure, 0, None)

    def scores(self, graph: Graph, rank: int, rng: np.random.Generator) -> Scores:
        return centralities(graph, self.measure, 0 if self.hops is None else rank, self.hops)


@lru_cache(maxsize=4096)
def centralities(graph: Graph, measure: CentralityMeasure, rank: int, hops: int | None) -> Scores:
    """The centrality of each node, in the whole graph or in the ego network of a rank."""
    whole = _networkx(graph)
    scores: Scores = _MEASURES[measure](whole if hops is None else nx.ego_graph(whole, rank, radius=hops))
    return scores


@lru_cache(maxsize=4)
def _networkx(graph: Graph) -> NetworkX:
    return graph.to_networkx()
