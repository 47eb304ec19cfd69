"""Mixing weights: how much of each neighbour's parameters a node takes when it mixes.

Row i of the mixing matrix W gives the weights of node i: x_i <- W_ii x_i + sum_j W_ij x_j, over the nodes j that may
send to i. W_ii is 1 minus the sum of the others, so the rows of W sum to 1.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache

from gossamer.config.registry import Component, register
from gossamer.errors import BadInput
from gossamer.topology.graph import Graph

DIRECTED = "on a directed graph; accepted: uniform, data-size, given or null"


class Weights(Component):
    """A rule that gives a graph its mixing matrix."""

    def check(self, graph: Graph, samples: Sequence[int] | None) -> None:
        """Check that the rule fits a graph and the nodes' numbers of training samples (None if unknown), before :meth:`row`;
        raise BadInput otherwise."""

    @abstractmethod
    def row(self, graph: Graph, rank: int, samples: Sequence[int] | None) -> dict[int, float]:
        """The weights that a node gives to its in-neighbours: rank -> weight, in rank order, without its own."""


@register("weights", "metropolis-hastings")
class MetropolisHastings(Weights):
    """W_ij = 1 / (1 + max(d_i, d_j)), with d the degree: symmetric, hence doubly stochastic.

    Repeated mixing converges to the plain average on any connected graph. Xiao & Boyd, "Fast linear iterations for
    distributed averaging" (2004); Xiao, Boyd & Lall, "A scheme for robust distributed sensor fusion based on average
    consensus" (2005). The Markov chain is that of Hastings (1970) with a uniform target. Undirected graphs only."""

    def check(self, graph: Graph, samples: Sequence[int] | None) -> None:
        if graph.directed:
            raise BadInput(f"topology.weights: metropolis-hastings {DIRECTED}")

    def row(self, graph: Graph, rank: int, samples: Sequence[int] | None) -> dict[int, float]:
        own = graph.degree(rank)
        return {other: 1 / (1 + max(own, graph.degree(other))) for other in graph.neighbors(rank)}


@register("weights", "uniform")
class Uniform(Weights):
    """W_ij = 1 / (1 + d_i), with d_i the (in-)degree: the plain mean over the closed neighbourhood; row-stochastic.

    Doubly stochastic if all degrees are equal. On one-peer exponential graphs these are the weights 1/2 of Assran et al.
    (2019) and Ying et al. (2021)."""

    def row(self, graph: Graph, rank: int, samples: Sequence[int] | None) -> dict[int, float]:
        senders = graph.neighbors(rank, "in")
        return dict.fromkeys(senders, 1 / (1 + len(senders)))


@register("weights", "data-size")
class DataSize(Weights):
    """W_ij = n_j / (n_i + sum of n_k over the in-neighbours k), with n the samples: row-stochastic, the local form of
    federated averaging's weights (McMahan et al., 2017, algorithm 1)."""

    def check(self, graph: Graph, samples: Sequence[int] | None) -> None:
        if samples is None:
            problem = "topology.weights: data-size without the number of samples of each node"
            raise BadInput(f"{problem}; accepted: metropolis-hastings, uniform, given")
        for rank in range(graph.nodes):
            if samples[rank] == 0 and not any(samples[other] for other in graph.neighbors(rank, "in")):
                problem = f"topology.weights: data-size, where neither node {rank} nor its in-neighbours have samples"
                raise BadInput(f"{problem}; accepted: other weights, or another partition")

    def row(self, graph: Graph, rank: int, samples: Sequence[int] | None) -> dict[int, float]:
        assert samples is not None  # or check() had raised
        senders = graph.neighbors(rank, "in")
        total = samples[rank] + sum(samples[other] for other in senders)
        return {other: samples[other] / total for other in senders}


@register("weights", "ccs")
class CCS(Weights):
    """The weights of SWIFT for clients of equal influence: symmetric, hence doubly stochastic.

    Nodes choose weights in order of descending degree. A node divides what remains of 1 evenly among itself and its
    remaining edges; two nodes of equal degree use the smaller of their two shares. If all degrees are equal, this is
    Metropolis-Hastings; a node whose neighbours have higher degrees gives its other edges more than that.

    Bornstein et al., "SWIFT: Rapid Decentralized Federated Learning via Wait-Free Model Communication", ICLR 2023,
    as in the authors' code for uniform influence p_i = 1/n, with one addition: the weight of an edge is at most
    1 / (1 + d_j), where j is its end of lower degree, because otherwise several neighbours could together take more than
    1 from j. The bound applies to every edge, so W can differ from the published rule on irregular graphs."""

    def check(self, graph: Graph, samples: Sequence[int] | None) -> None:
        if graph.directed:
            raise BadInput(f"topology.weights: ccs {DIRECTED}")

    def row(self, graph: Graph, rank: int, samples: Sequence[int] | None) -> dict[int, float]:
        return dict(_ccs(graph)[rank])


@lru_cache(maxsize=8)
def _ccs(graph: Graph) -> tuple[dict[int, float], ...]:
    """All rows of the matrix, cached because each node of a simulation asks for its own."""
    degrees = [graph.degree(rank) for rank in range(graph.nodes)]
    chosen: list[dict[int, float]] = [{} for _ in degrees]
    for degree in sorted(set(degrees), reverse=True):
        choosing = [rank for rank in range(graph.nodes) if degrees[rank] == degree]
        share = {i: (1 - sum(chosen[i].values())) / (1 + degree - len(chosen[i])) for i in choosing}
        for i in choosing:
            for j in graph.neighbors(i):
                if degrees[j] <= degree:
                    limit = share[j] if degrees[j] == degree else 1 / (1 + degrees[j])
                    chosen[i][j] = chosen[j][i] = min(share[i], limit)
    return tuple(dict(sorted(row.items())) for row in chosen)
