"""Local learning: flat parameters, optimizers, batches, trainers, evaluation, mixing."""

from gossamer.learning.aggregators import Aggregator, CoordinateMean, Krum, Mean, Median, TrimmedMean
from gossamer.learning.learning_rate import LearningRateSchedule
from gossamer.learning.optimizer import SGD, Optimizer

__all__ = ["SGD", "Aggregator", "CoordinateMean", "Krum", "LearningRateSchedule", "Mean", "Median"]
__all__ += ["Optimizer", "TrimmedMean"]
