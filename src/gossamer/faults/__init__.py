"""Faults: what goes wrong in a run, described once for all engines; one file an idea."""

from gossamer.faults.churn import Churn
from gossamer.faults.crash import Crash
from gossamer.faults.fault import Fault, RoundCrash, Spell, StartFrom
from gossamer.faults.freeze import Freeze
from gossamer.faults.join import Join
from gossamer.faults.leave import Leave
from gossamer.faults.loss import Loss
from gossamer.faults.partition import Partition
from gossamer.faults.schedule import Agenda, Event, Schedule
from gossamer.faults.slow import Slow

__all__ = [
    "Agenda",
    "Churn",
    "Crash",
    "Event",
    "Fault",
    "Freeze",
    "Join",
    "Leave",
    "Loss",
    "Partition",
    "RoundCrash",
    "Schedule",
    "Slow",
    "Spell",
    "StartFrom",
]
