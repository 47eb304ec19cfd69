"""The experiment file: its fields, the components that it names, and one clear error for each mistake in it."""

from gossamer.config.experiment import Experiment, engine_name
from gossamer.config.mappings import assign, assign_all
from gossamer.config.sections import (
    Checkpoints,
    Count,
    Evaluation,
    Failures,
    Gather,
    Processes,
    Simulate,
    Stop,
    Target,
    Timeline,
)

__all__ = [
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
