"""Networks, which model the links between nodes, and compute profiles, which model the durations of steps."""

from gossamer.network.compute import ComputeProfile, Constant, LogNormal, Slowdowns, SlowdownWindow, StepTrace
from gossamer.network.kollaps import Kollaps
from gossamer.network.matrix import Matrix
from gossamer.network.network import (
    Access,
    Conditions,
    Network,
    Path,
    StarNetwork,
    Stragglers,
    UniformNetwork,
    delivery,
)
from gossamer.network.varying import Trace, Varying

__all__ = ["Access", "ComputeProfile", "Conditions", "Constant", "Kollaps", "LogNormal", "Matrix"]
__all__ += ["Network", "Path", "SlowdownWindow", "Slowdowns", "StarNetwork", "StepTrace", "Stragglers"]
__all__ += ["Trace", "UniformNetwork", "Varying", "delivery"]
