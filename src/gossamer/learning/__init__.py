"""Local learning: flat parameters, optimizers, batches, trainers, evaluation, mixing."""

from gossamer.learning.aggregators import (
    Aggregation,
    Aggregator,
    CoordinateMean,
    DeviationMean,
    Krum,
    Mean,
    Median,
    TrimmedMean,
)
from gossamer.learning.gradient import BatchLoss, Gradient
from gossamer.learning.learning_rate import LearningRateSchedule
from gossamer.learning.optimizer import SGD, Optimizer

__all__ = [
    "SGD",
    "Aggregation",
    "Aggregator",
    "BatchLoss",
    "CoordinateMean",
    "DeviationMean",
    "Gradient",
    "Krum",
]
__all__ += ["LearningRateSchedule", "Mean", "Median", "Optimizer", "TrimmedMean"]
