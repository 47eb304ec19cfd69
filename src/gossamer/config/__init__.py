"""Experiments: one complete description of what is run, and its sections."""

from gossamer.config.assign import assign, assign_all
from gossamer.config.engines import ENGINES, Processes, Simulate, engine_name
from gossamer.config.experiment import Experiment
from gossamer.config.sections import (
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
