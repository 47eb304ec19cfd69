"""Local learning: flat parameters, optimizers, schedules, batches, trainers, evaluation, mixing."""

from gossamer.learning.adam_variants import Adamax, NAdam, RAdam
from gossamer.learning.adaptive import Adadelta, Adagrad, RMSprop, Rprop
from gossamer.learning.optimizer import ASGD, SGD, Adam, AdamW, Optimizer
from gossamer.learning.schedule import Schedule

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "Rprop",
    "Schedule",
]
