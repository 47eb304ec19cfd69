"""Faults: failures in a run, with one description for both engines."""

from gossamer.faults.fault import Fault as Fault
from gossamer.faults.fault import FaultEvent as FaultEvent
from gossamer.faults.fault import FaultEventQueue as FaultEventQueue
from gossamer.faults.fault import FaultInterval as FaultInterval
from gossamer.faults.fault import FaultSchedule as FaultSchedule
from gossamer.faults.fault import Nodes as Nodes
from gossamer.faults.fault import RoundCrash as RoundCrash
from gossamer.faults.fault import StartFrom as StartFrom
from gossamer.faults.kinds import Churn as Churn
from gossamer.faults.kinds import Crash as Crash
