"""What an algorithm mixes with: the graph along which models travel, and the weights of the means."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gossamer.topology.graph import Graph
from gossamer.topology.topology import TopologySchedule
from gossamer.topology.weights import Row


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """The graph and the weights with which an algorithm mixes, in words and as functions of the topology.

    Attributes:
        graph: the graph in words.
        weights: the weights in words.
        links: (topology, round) -> the graph of a round; None for an algorithm that does not use the topology.
        row: (topology, rank, round) -> the weights of a round with which a node takes the models, rank -> weight, its own
            included; None if no matrix describes the round.
        note: what else a reader of the matrix has to know."""

    graph: str = "the topology"
    weights: str = "topology.weights"
    links: Callable[[TopologySchedule, int], Graph] | None = TopologySchedule.graph
    row: Callable[[TopologySchedule, int, int], Row] | None = None
    note: str = ""

    def description(self) -> dict[str, Any]:
        """What a run records about it."""
        return {"graph": self.graph, "weights": self.weights, "uses_topology": self.links is not None}


def topology_row(topology: TopologySchedule, rank: int, round: int) -> Row:
    """A row of W, the matrix of ``topology.weights``."""
    return with_own(rank, topology.mixing_weights(rank, round))


def with_own(rank: int, weights: Row) -> Row:
    """The weights of a node's neighbours, after its own, which is the rest of 1."""
    return {rank: 1.0 - math.fsum(weights.values()), **weights}


def damped(share: float) -> Callable[[TopologySchedule, int, int], Row]:
    """The rows of (1 - share) I + share W."""

    def row(topology: TopologySchedule, rank: int, round: int) -> Row:
        others = topology.mixing_weights(rank, round)
        return with_own(rank, {other: share * weight for other, weight in others.items()})

    return row


BY_TOPOLOGY = Mixing(row=topology_row)
"""Mixing along the graph of the topology with its weights."""
