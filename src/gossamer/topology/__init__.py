"""Topologies: graphs, their schedule over the rounds, and mixing weights (all families are in ``families``)."""

from gossamer.topology.cyclon import Cyclon, CyclonSampler
from gossamer.topology.families import EdgeList, OnePeerExponential, RandomRegular, Ring, Star, random_regular
from gossamer.topology.graph import Direction, Graph, union
from gossamer.topology.mixing import BY_TOPOLOGY, Mixing
from gossamer.topology.topology import Layers, RandomTopology, Topology, TopologySchedule
from gossamer.topology.weights import (
    CCS,
    Centrality,
    DataSize,
    MetropolisHastings,
    TemperatureSchedule,
    UniformWeights,
    Weights,
)

__all__ = [
    "BY_TOPOLOGY",
    "CCS",
    "Centrality",
    "Cyclon",
    "CyclonSampler",
    "DataSize",
    "Direction",
    "EdgeList",
    "Graph",
    "Layers",
    "MetropolisHastings",
    "Mixing",
]
__all__ += ["OnePeerExponential", "RandomRegular", "RandomTopology", "Ring", "Star", "Topology"]
__all__ += ["TemperatureSchedule", "TopologySchedule", "UniformWeights", "Weights", "random_regular", "union"]
