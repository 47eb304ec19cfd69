"""What links and processors cost: networks and compute profiles."""

from gossamer.network.compute import ComputeProfile, Constant, LogNormal
from gossamer.network.network import Network, Uniform

__all__ = ["ComputeProfile", "Constant", "LogNormal", "Network", "Uniform"]
