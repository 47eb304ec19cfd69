"""Faults: what goes wrong in a run, described once for both engines."""

from gossamer.faults.fault import Fault, FaultInterval, RoundCrash, StartFrom
from gossamer.faults.network_faults import Loss, Partition
from gossamer.faults.node_faults import Churn, Crash, Freeze, Join, Leave, Slow
from gossamer.faults.schedule import FaultEvent, FaultEventQueue, FaultSchedule

__all__ = [
    "Churn",
    "Crash",
    "Fault",
    "FaultEvent",
    "FaultEventQueue",
    "FaultInterval",
    "FaultSchedule",
    "Freeze",
    "Join",
    "Leave",
    "Loss",
    "Partition",
    "RoundCrash",
    "Slow",
    "StartFrom",
]
