"""Topologies: graphs, their schedule over the rounds, mixing weights, and measures."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gossamer.topology.cyclon import Cyclon
from gossamer.topology.deterministic import (
    Complete,
    Exponential,
    Hypercube,
    OnePeerExponential,
    Ring,
    Star,
    Torus,
)
from gossamer.topology.files import Adjacency, EdgeList, Given
from gossamer.topology.graph import Direction, Graph, union
from gossamer.topology.random_graphs import ErdosRenyi, RandomRegular, SmallWorld, random_regular
from gossamer.topology.sampler import SampledTopology, Sampler
from gossamer.topology.schedule import TopologySchedule
from gossamer.topology.topology import Layers, RandomTopology, Topology
from gossamer.topology.weights import CCS, DataSize, MetropolisHastings, Uniform, Weights

if TYPE_CHECKING:
    from gossamer.topology.measures import (
        average_degree,
        clustering,
        describe,
        diameter,
        effective_neighbors,
        matrix,
        smallest_eigenvalue,
        sparse_matrix,
        spectral_gap,
    )

# Imported on first use, because they import scipy, which no run needs.
_MEASURES = {
    *("average_degree", "clustering", "describe", "diameter", "effective_neighbors"),
    *("matrix", "smallest_eigenvalue", "sparse_matrix", "spectral_gap"),
}

__all__ = [
    "CCS",
    "Adjacency",
    "Complete",
    "Cyclon",
    "DataSize",
    "Direction",
    "EdgeList",
    "ErdosRenyi",
    "Exponential",
    "Given",
    "Graph",
    "Hypercube",
    "Layers",
    "MetropolisHastings",
    "OnePeerExponential",
    "RandomRegular",
    "RandomTopology",
    "Ring",
    "SampledTopology",
    "Sampler",
    "SmallWorld",
    "Star",
    "Topology",
    "TopologySchedule",
    "Torus",
    "Uniform",
    "Weights",
    "average_degree",
    "clustering",
    "describe",
    "diameter",
    "effective_neighbors",
    "matrix",
    "random_regular",
    "smallest_eigenvalue",
    "sparse_matrix",
    "spectral_gap",
    "union",
]


def __getattr__(name: str) -> Any:
    if name not in _MEASURES:
        raise AttributeError(f"module 'gossamer.topology' has no attribute {name!r}")
    return getattr(importlib.import_module("gossamer.topology.measures"), name)
