"""Experiments: one complete description of what is run, and its sections."""

from gossamer.experiment.assign import assign, assign_all
from gossamer.experiment.engines import ENGINES, Processes, Simulate, engine_name
from gossamer.experiment.experiment import Experiment
from gossamer.experiment.sections import (
    Checkpoints,
    Count,
    Evaluation,
    Failures,
    Gather,
    Stop,
    Target,
    Timeline,
)

__all__ = [
    "ENGINES",
    "Checkpoints",
    "Count",
    "Evaluation",
    "Experiment",
    "Failures",
    "Gather",
    "Processes",
    "Simulate",
    "Stop",
    "Target",
    "Timeline",
    "assign",
    "assign_all",
    "engine_name",
]
