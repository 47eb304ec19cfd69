"""Topologies: graphs, their schedule over the rounds, mixing weights, and measures."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gossamer.topology.adjacency import Adjacency
from gossamer.topology.complete import Complete
from gossamer.topology.cyclon import Cyclon
from gossamer.topology.edge_list import EdgeList
from gossamer.topology.erdos_renyi import ErdosRenyi
from gossamer.topology.exponential import Exponential, OnePeerExponential
from gossamer.topology.graph import Direction, Graph, union
from gossamer.topology.hypercube import Hypercube
from gossamer.topology.layers import Layers
from gossamer.topology.regular import RandomRegular, random_regular
from gossamer.topology.ring import Ring
from gossamer.topology.sampler import SampledTopology, Sampler
from gossamer.topology.schedule import TopologySchedule
from gossamer.topology.small_world import SmallWorld
from gossamer.topology.star import Star
from gossamer.topology.topology import RandomTopology, Topology
from gossamer.topology.torus import Torus
from gossamer.topology.weights import CCS, DataSize, Given, MetropolisHastings, Uniform, Weights

if TYPE_CHECKING:
    from gossamer.topology.measures import (
        average_degree,
        clustering,
        describe,
        diameter,
        effective_neighbors,
        smallest_eigenvalue,
        spectral_gap,
    )
    from gossamer.topology.mixing import matrix, sparse_matrix

# Imported on first use, because they import scipy, which no run needs.
_MEASURES = (
    "average_degree",
    "clustering",
    "describe",
    "diameter",
    "effective_neighbors",
    "smallest_eigenvalue",
    "spectral_gap",
)
_MODULES = {
    **dict.fromkeys(_MEASURES, "gossamer.topology.measures"),
    "matrix": "gossamer.topology.mixing",
    "sparse_matrix": "gossamer.topology.mixing",
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
    if name not in _MODULES:
        raise AttributeError(f"module 'gossamer.topology' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
