"""What links and processors cost: networks and compute profiles."""

from gossamer.network.compute import ComputeProfile, Constant, LogNormal
from gossamer.network.delivery import fate
from gossamer.network.kollaps import Kollaps
from gossamer.network.matrix import Matrix
from gossamer.network.network import Access, Conditions, Network, Path, Uniform
from gossamer.network.slowdowns import Slowdowns
from gossamer.network.speeds import PerNode, SlowNodes
from gossamer.network.star import Star
from gossamer.network.step_trace import StepTrace
from gossamer.network.stragglers import Stragglers
from gossamer.network.trace import Trace
from gossamer.network.varying import Varying

__all__ = [
    "Access",
    "ComputeProfile",
    "Conditions",
    "Constant",
    "Kollaps",
    "LogNormal",
    "Matrix",
    "Network",
    "Path",
    "PerNode",
    "SlowNodes",
    "Slowdowns",
    "Star",
    "StepTrace",
    "Stragglers",
    "Trace",
    "Uniform",
    "Varying",
    "fate",
]
