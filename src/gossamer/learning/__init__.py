"""Local learning: flat parameters, optimizers, batches, trainers, evaluation, mixing."""

from gossamer.learning.aggregators import Aggregator, CoordinateMean, Krum, Mean, Median, TrimmedMean
from gossamer.learning.learning_rate import LearningRateSchedule
from gossamer.learning.optimizer import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Aggregator",
    "CoordinateMean",
    "Krum",
    "LearningRateSchedule",
    "Mean",
    "Median",
    "NAdam",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "Rprop",
    "TrimmedMean",
]
