"""Topologies: graphs, their schedule over the rounds, and mixing weights."""

from gossamer.topology.cyclon import Cyclon, Sampler
from gossamer.topology.families import (
    Complete,
    ErdosRenyi,
    Exponential,
    Hypercube,
    OnePeerExponential,
    RandomRegular,
    Ring,
    SmallWorld,
    Star,
    Torus,
    random_regular,
)
from gossamer.topology.files import Adjacency, EdgeList, Given
from gossamer.topology.graph import Direction, Graph, union
from gossamer.topology.topology import Layers, RandomTopology, Topology, TopologySchedule
from gossamer.topology.weights import CCS, DataSize, MetropolisHastings, Uniform, Weights

__all__ = ["CCS", "Adjacency", "Complete", "Cyclon", "DataSize", "Direction", "EdgeList"]
__all__ += ["ErdosRenyi", "Exponential", "Given", "Graph", "Hypercube", "Layers", "MetropolisHastings"]
__all__ += ["OnePeerExponential", "RandomRegular", "RandomTopology", "Ring", "Sampler", "SmallWorld"]
__all__ += ["Star", "Topology", "TopologySchedule", "Torus", "Uniform", "Weights", "random_regular"]
__all__ += ["union"]
