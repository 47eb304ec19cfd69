"""Tasks (data, model, loss, metrics), partitions of their samples over the nodes, and poisons."""

from gossamer.tasks.images import CIFAR10, CIFAR100, MNIST, Digits, FashionMNIST
from gossamer.tasks.least_squares import LeastSquares
from gossamer.tasks.movielens import MovieLens
from gossamer.tasks.partition import IID, Dirichlet, Natural, Partition, Shards, Sizes, label_counts
from gossamer.tasks.poison import (
    HeldOutClass,
    LabelFlip,
    Patch,
    PermuteLabels,
    Poison,
    Rotate,
    SecondTask,
    Tint,
    poisoned,
)
from gossamer.tasks.shakespeare import Shakespeare
from gossamer.tasks.task import RootMean, Task, TaskSource, accuracy, load_task

__all__ = ["CIFAR10", "CIFAR100", "IID", "Digits", "Dirichlet", "FashionMNIST", "HeldOutClass", "LabelFlip"]
__all__ += ["MNIST", "LeastSquares", "MovieLens", "Natural", "Partition", "Patch", "PermuteLabels", "Poison"]
__all__ += [
    "RootMean",
    "Rotate",
    "SecondTask",
    "Shakespeare",
    "Shards",
    "Sizes",
    "Task",
    "TaskSource",
    "Tint",
]
__all__ += ["accuracy", "label_counts", "load_task", "poisoned"]
